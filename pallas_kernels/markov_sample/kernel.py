"""One step of the Markov head with its sample, in tiles of the vocabulary.

A tile of W2 meets the latents of all requests, the bias is added to a tile of base logits, and
only five numbers per request stay: the bias is nowhere written down. A tile of W2 is read once
for up to 256 requests.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import BlockSizes, split
from pallas_kernels.markov_sample.ref import Draw
from pallas_kernels.matmul import dot
from pallas_kernels.noise import gumbel_at, is_key
from pallas_kernels.vocab import GREEDY_BELOW, fold_best, perturb, scale

_GROUP = 256  # requests that share a tile of W2


def _body(
    scalars, latent, w2, base, temperature, *refs, vocab: int, noises: int, keep: bool, columns: int
):
    noise, refs = refs[:noises], refs[noises:]
    out = refs[:5]
    tile = base.shape[1]
    steps, part = split(tile, columns)

    @pl.when(pl.program_id(1) == 0)
    def _start():
        for ref, value in zip(out, (-jnp.inf, 0.0, -jnp.inf, 0, -jnp.inf), strict=True):
            ref[...] = jnp.full_like(ref, value)

    def step(i: jax.Array, carry: tuple) -> tuple:
        top, total, value, token, token_logit = carry
        at = pl.ds(pl.multiple_of(i * part, part), part)
        logits = base[:, at].astype(jnp.float32) + dot(latent[...], w2[at, :], contract=1)
        if keep:
            refs[5][:, at] = logits
        local = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        local = local + (pl.program_id(1) * tile + i * part)
        column, valid = local + scalars[0], local < vocab
        scaled = jnp.where(valid, scale(logits, temperature[...]), -jnp.inf)
        perturbed = scaled
        if noises == 1:
            perturbed = perturb(scaled, temperature[...], noise[0][:, at])
        elif noises:
            drawn = jax.lax.cond(
                scalars[1] != 0,
                lambda: gumbel_at((noise[0][...], noise[1][...]), column),
                lambda: jnp.zeros_like(scaled),
            )
            perturbed = perturb(scaled, temperature[...], drawn)
        peak = jnp.maximum(top, scaled.max(axis=1, keepdims=True))
        safe = jnp.where(peak == -jnp.inf, 0.0, peak)
        mass = jnp.exp(scaled - safe).sum(axis=1, keepdims=True)
        new_value, new_token = fold_best(value, token, perturbed, column, valid)
        here = jnp.where(column == new_token, scaled, -jnp.inf).max(axis=1, keepdims=True)
        return (
            peak,
            total * jnp.exp(top - safe) + mass,
            new_value,
            new_token,
            jnp.where(new_value > value, here, token_logit),
        )

    folded = jax.lax.fori_loop(0, steps, step, tuple(ref[...] for ref in out))
    for ref, value in zip(out, folded, strict=True):
        ref[...] = value


@functools.partial(jax.jit, static_argnames=("keep_logits", "sizes", "interpret"))
def draw(
    latent: jax.Array,
    w2: jax.Array,
    base_logits: jax.Array,
    temperature: jax.Array,
    first: jax.Array,
    noise: jax.Array | None = None,
    *,
    keep_logits: bool,
    sizes: BlockSizes,
    interpret: bool | pltpu.InterpretParams,
) -> Draw:
    """The kernel; arguments and result as in `ref.draw`."""
    requests, rank = latent.shape
    vocab = w2.shape[0]
    common = jnp.promote_types(latent.dtype, w2.dtype)
    if w2.dtype != common:
        raise NotImplementedError(f"w2 is {w2.dtype}, latents {latent.dtype}: it would be copied")
    group = min(_GROUP, requests)
    crowd = max(1, 2 ** (group - 1).bit_length() // 64)  # more requests, fewer columns at a time
    columns = sizes.vector_columns // crowd
    tile = min(sizes.vocab_columns // crowd, vocab)

    wide = pl.BlockSpec((group, tile), lambda r, v, first: (r, v))
    narrow = pl.BlockSpec((group, 1), lambda r, v, first: (r, 0))
    operands = [latent.astype(common), w2, base_logits, temperature[:, None]]
    specs = [
        pl.BlockSpec((group, rank), lambda r, v, first: (r, 0)),
        pl.BlockSpec((tile, rank), lambda r, v, first: (v, 0)),
        wide,
        narrow,
    ]
    any_sampled = jnp.any(temperature >= GREEDY_BELOW)  # else no noise is made
    scalars = jnp.stack([jnp.asarray(first, jnp.int32), any_sampled.astype(jnp.int32)])
    noises = []
    if noise is not None:
        noises = [noise[:, :1], noise[:, 1:]] if is_key(noise) else [noise]
        specs += [narrow, narrow] if is_key(noise) else [wide]
    kinds = [jnp.float32, jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    shapes = [jax.ShapeDtypeStruct((requests, 1), kind) for kind in kinds]
    out_specs = [narrow] * 5
    if keep_logits:
        shapes.append(jax.ShapeDtypeStruct((requests, vocab), jnp.float32))
        out_specs.append(wide)
    out = pl.pallas_call(
        functools.partial(
            _body, vocab=vocab, noises=len(noises), keep=keep_logits, columns=columns
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(requests, group), pl.cdiv(vocab, tile)),
            in_specs=specs,
            out_specs=out_specs,
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_limit_bytes,
        ),
        interpret=interpret,
        name="markov_sample",
    )(scalars, *operands, *noises)
    return Draw(*(x[:, 0] for x in out[:5]), out[5] if keep_logits else None)
