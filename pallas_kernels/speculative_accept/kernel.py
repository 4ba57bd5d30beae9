"""The two passes over logits that accepting a block takes, in tiles of the vocabulary.

The outputs of a group of requests stay in VMEM while the tiles of its rows pass by, and are what
the tiles are folded into. Nothing else is written.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import BlockSizes, round_up, split
from pallas_kernels.noise import gumbel_at, is_key
from pallas_kernels.vocab import (
    RowStats,
    empty_stats,
    fold_best,
    fold_columns,
    perturb,
    scale,
)


def _columns(
    shape: tuple[int, ...], begin: jax.Array, first: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens of the columns from `begin` of this step's tile on, and which of them exist."""
    local = begin + jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return local + first, local < vocab


def _noise_of(refs: tuple, at: pl.Slice, column: jax.Array) -> jax.Array:
    """Noise of the columns: a part of its tile, or made from the two words of the keys."""
    if len(refs) == 1:
        return refs[0][..., at]
    return gumbel_at((refs[0][...], refs[1][...]), column)


def _stats_body(first, logits, token, temperature, *refs, vocab: int, columns: int):
    noise, out = refs[:-5], RowStats(*refs[-5:])
    tile = logits.shape[-1]
    steps, part = split(tile, columns)

    @pl.when(pl.program_id(1) == 0)
    def _start():
        for ref, value in zip(out, empty_stats(out.top.shape), strict=True):
            ref[...] = value

    def step(i: jax.Array, stats: RowStats) -> RowStats:
        at = pl.ds(pl.multiple_of(i * part, part), part)
        shape, begin = (*logits.shape[:-1], part), pl.program_id(1) * tile + i * part
        column, valid = _columns(shape, begin, first[0], vocab)
        scaled = scale(logits[..., at], temperature[...])
        perturbed = scaled
        if noise:
            perturbed = perturb(scaled, temperature[...], _noise_of(noise, at, column))
        return fold_columns(stats, scaled, perturbed, column, token[...], valid)

    stats = jax.lax.fori_loop(0, steps, step, RowStats(*(ref[...] for ref in out)))
    for ref, value in zip(out, stats, strict=True):
        ref[...] = value


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def row_stats(
    logits: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    first: jax.Array,
    noise: jax.Array | None = None,
    *,
    sizes: BlockSizes,
    interpret: bool | pltpu.InterpretParams,
) -> RowStats:
    """The kernel; arguments and result as in `ref.row_stats`."""
    requests, width, vocab = logits.shape
    operands = [logits, token[..., None], temperature[:, None, None]]
    if noise is not None:
        operands += [noise[..., :1], noise[..., 1:]] if is_key(noise) else [noise]
    # Memory comes in tiles of 8 rows: whichever of R and W leaves fewer of them empty goes last,
    # which is how the compiler lays such arrays out anyway.
    rows_lead = width * round_up(requests, 8) < requests * round_up(width, 8)
    if rows_lead:
        operands = [jnp.swapaxes(x, 0, 1) for x in operands]
    group, tile = min(sizes.requests, requests), min(sizes.vocab_columns, vocab)

    def block(rows: int, columns: int) -> pl.BlockSpec:
        def at(r: jax.Array, v: jax.Array, first: jax.Array) -> tuple:
            v = v if columns == tile else 0
            return (0, r, v) if rows_lead else (r, 0, v)

        return pl.BlockSpec((rows, group, columns) if rows_lead else (group, rows, columns), at)

    wide, narrow = block(width, tile), block(width, 1)
    specs = [wide, narrow, block(1, 1)]
    if noise is not None:
        specs += [narrow, narrow] if is_key(noise) else [wide]
    shape = (width, requests, 1) if rows_lead else (requests, width, 1)
    kinds = [jnp.float32] * 4 + [jnp.int32]
    stats = pl.pallas_call(
        functools.partial(_stats_body, vocab=vocab, columns=sizes.vector_columns),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(requests, group), pl.cdiv(vocab, tile)),
            in_specs=specs,
            out_specs=[narrow] * 5,
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, kind) for kind in kinds],
        compiler_params=_compiler_params(sizes),
        interpret=interpret,
        name="vocabulary_stats",
    )(_scalar(first), *operands)
    stats = [x[..., 0] for x in stats]
    return RowStats(*(x.T if rows_lead else x for x in stats))


def _residual_body(
    first, target, draft, log_p_sum, log_q_sum, temperature, draft_temperature, *refs,
    vocab: int, columns: int,
):  # fmt: skip
    noise, out = refs[:-5], refs[-5:]
    tile = target.shape[-1]
    steps, part = split(tile, columns)

    @pl.when(pl.program_id(1) == 0)
    def _start():
        for ref, value in zip(out, (0.0, -jnp.inf, 0, -jnp.inf, 0), strict=True):
            ref[...] = jnp.full_like(ref, value)

    def step(i: jax.Array, carry: tuple) -> tuple:
        mass, value, token, plain_value, plain_token = carry
        at = pl.ds(pl.multiple_of(i * part, part), part)
        shape, begin = (target.shape[0], part), pl.program_id(1) * tile + i * part
        column, valid = _columns(shape, begin, first[0], vocab)
        log_p = scale(target[..., at], temperature[...]) - log_p_sum[...]
        log_q = scale(draft[..., at], draft_temperature[...]) - log_q_sum[...]
        residual = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0.0)
        residual = jnp.where(valid, residual, 0.0)
        drawn = _noise_of(noise, at, column)
        plain = perturb(log_p, temperature[...], drawn)
        return (
            mass + residual.sum(axis=-1, keepdims=True),
            *fold_best(value, token, jnp.log(residual) + drawn, column, valid),
            *fold_best(plain_value, plain_token, plain, column, valid),
        )

    folded = jax.lax.fori_loop(0, steps, step, tuple(ref[...] for ref in out))
    for ref, value in zip(out, folded, strict=True):
        ref[...] = value


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def residual_stats(
    target_row: jax.Array,
    draft_row: jax.Array,
    target_log_normaliser: jax.Array,
    draft_log_normaliser: jax.Array,
    temperature: jax.Array,
    draft_temperature: jax.Array,
    noise: jax.Array,
    first: jax.Array,
    *,
    sizes: BlockSizes,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, ...]:
    """The kernel; arguments and result as in `ref.residual_stats`."""
    requests, vocab = target_row.shape
    group = min(sizes.requests, requests)
    # A tile here is one row per request, not a block of them.
    tile = min(4 * sizes.vocab_columns, vocab)
    wide = pl.BlockSpec((group, tile), lambda r, v, first: (r, v))
    small = pl.BlockSpec((group, 1), lambda r, v, first: (r, 0))
    operands = [target_row, draft_row]
    operands += [x[:, None] for x in (target_log_normaliser, draft_log_normaliser)]
    operands += [temperature[:, None], draft_temperature[:, None]]
    operands += [noise[:, :1], noise[:, 1:]] if is_key(noise) else [noise]
    specs = [wide, wide, small, small, small, small] + ([small, small] if is_key(noise) else [wide])
    kinds = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32]
    stats = pl.pallas_call(
        functools.partial(_residual_body, vocab=vocab, columns=4 * sizes.vector_columns),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(requests, group), pl.cdiv(vocab, tile)),
            in_specs=specs,
            out_specs=[small] * 5,
        ),
        out_shape=[jax.ShapeDtypeStruct((requests, 1), kind) for kind in kinds],
        compiler_params=_compiler_params(sizes),
        interpret=interpret,
        name="residual_stats",
    )(_scalar(first), *operands)
    return tuple(x[:, 0] for x in stats)


def _scalar(x: jax.Array | int) -> jax.Array:
    return jnp.asarray(x, jnp.int32).reshape(1)


def _compiler_params(sizes: BlockSizes) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=sizes.vmem_limit_bytes
    )
