"""One step of the Markov head: bias from the token before, temperature, and a sample."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.chips import block_sizes
from pallas_kernels.dispatch import Impl, select
from pallas_kernels.markov_sample import kernel, ref
from pallas_kernels.noise import check_noise, gumbel_at, is_key
from pallas_kernels.vocab import first_column, gather_shards, perturb, scale


class MarkovSample(NamedTuple):
    """A draft token per request; log q of it is token_logit - log_normaliser.

    Logits here are over the temperature; of greedy requests, as they are.
    """

    token: jax.Array  # i32[R]
    token_logit: jax.Array  # f32[R]
    log_normaliser: jax.Array  # f32[R]
    logits: jax.Array | None  # f32[R, V], base + bias before the temperature, if asked for


def markov_sample(
    previous: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    base_logits: jax.Array,
    *,
    temperature: jax.Array | None = None,
    noise: jax.Array | None = None,
    keep_logits: bool = False,
    axis_name: str | None = None,
    impl: Impl = "auto",
) -> MarkovSample:
    """Draws x_k from softmax((U_k + W2 W1[x_{k-1}]) / temperature).

    Args:
      previous: i32[R], x_{k-1}; the anchor for the first draft.
      w1: [V, Q], not sharded.
      w2, base_logits, temperature, noise, keep_logits, axis_name, impl: see `sample_latent`.

    Returns:
      The sample.

    Raises:
      ValueError: shapes that do not fit each other.

    Source: DSpark paper eq. 5 and 6.
    """
    if w1.ndim != 2:
        raise ValueError(f"w1 is {w1.shape}; expected [V, Q]")
    return sample_latent(
        w1[previous], w2, base_logits, temperature=temperature, noise=noise,
        keep_logits=keep_logits, axis_name=axis_name, impl=impl,
    )  # fmt: skip


def sample_latent(
    latent: jax.Array,
    w2: jax.Array,
    base_logits: jax.Array,
    *,
    temperature: jax.Array | None = None,
    noise: jax.Array | None = None,
    keep_logits: bool = False,
    axis_name: str | None = None,
    impl: Impl = "auto",
) -> MarkovSample:
    """Draws from softmax((base_logits + latent W2^T) / temperature), for any kind of head.

    Args:
      latent: [R, Q].
      w2: [V, Q].
      base_logits: [R, V], U_k.
      temperature: f32[R], below 1e-5 greedy; None is 1, or greedy without noise.
      noise: Gumbel noise f32[R, V], or the data of the keys it comes from, u32[R, 2], of which
        only tiles are made then; None makes every request greedy.
      keep_logits: also return the logits, which acceptance needs.
      axis_name: inside `shard_map`, the mesh axis over which the vocabulary of w2, base_logits and
        noise is sharded evenly. Shards exchange five numbers per request in one all-gather.
      impl: see `dispatch.select`.

    Returns:
      The sample, the same on all shards but for `logits`, of which each shard keeps its own.

    Raises:
      ValueError: shapes that do not fit each other.
    """
    _check(latent, w2, base_logits, temperature)
    requests, vocab = base_logits.shape
    first = first_column(vocab, axis_name)
    operands = [latent, w2, base_logits, _temperature(temperature, noise, requests)]
    operands.append(jnp.asarray(first, jnp.int32))
    if noise is not None:
        check_noise(noise, (requests,), vocab)
        operands.append(noise)
    static = dict(keep_logits=keep_logits)
    draw = select(
        impl,
        functools.partial(kernel.draw, sizes=block_sizes(), **static),
        functools.partial(ref.draw, **static),
        *operands,
    )
    draw = _merge_shards(draw, axis_name)
    return MarkovSample(draw.token, draw.token_logit, draw.top + jnp.log(draw.total), draw.logits)


def sample_candidates(
    latent: jax.Array,
    w2: jax.Array,
    base_logits: jax.Array,
    candidates: jax.Array,
    *,
    temperature: jax.Array | None = None,
    noise: jax.Array | None = None,
) -> MarkovSample:
    """The same among a few tokens, reading only their rows of W2.

    q is then zero everywhere else; exact as long as acceptance is told this q. Plain JAX on every
    platform: the rows are scattered and few, so there is nothing to tile.

    Args:
      latent: [R, Q].
      w2: [V, Q].
      base_logits: [R, V].
      candidates: i32[R, C], ascending, such as the C largest of base_logits in order of their ids.
      temperature: f32[R], as in `sample_latent`.
      noise: as in `sample_latent`; a token's noise is the same whether it is a candidate or not.

    Returns:
      The sample; `logits` are the candidates', f32[R, C].

    Raises:
      ValueError: shapes that do not fit each other.
    """
    _check(latent, w2, base_logits, temperature)
    requests, vocab = base_logits.shape
    if candidates.ndim != 2 or candidates.shape[0] != requests:
        raise ValueError(f"candidates is {candidates.shape}; expected [R={requests}, C]")
    temperature = _temperature(temperature, noise, requests)[:, None]
    bias = jnp.einsum("rq,rcq->rc", latent, w2[candidates], preferred_element_type=jnp.float32)
    logits = jnp.take_along_axis(base_logits, candidates, axis=1).astype(jnp.float32) + bias
    scaled = scale(logits, temperature)
    perturbed = scaled
    if noise is not None:
        check_noise(noise, (requests,), vocab)
        if is_key(noise):
            drawn = gumbel_at((noise[:, :1], noise[:, 1:]), candidates)
        else:
            drawn = jnp.take_along_axis(noise, candidates, axis=1)
        perturbed = perturb(scaled, temperature, drawn)
    best = jnp.argmax(perturbed, axis=1)[:, None]
    return MarkovSample(
        token=jnp.take_along_axis(candidates, best, axis=1)[:, 0],
        token_logit=jnp.take_along_axis(scaled, best, axis=1)[:, 0],
        log_normaliser=jax.nn.logsumexp(scaled, axis=1),
        logits=logits,
    )


def _temperature(
    temperature: jax.Array | None, noise: jax.Array | None, requests: int
) -> jax.Array:
    if noise is None:
        return jnp.zeros((requests,))
    return jnp.ones((requests,)) if temperature is None else temperature


def _merge_shards(draw: ref.Draw, axis_name: str | None) -> ref.Draw:
    if axis_name is None:
        return draw
    every = ref.Draw(*gather_shards(draw[:5], axis_name), None)
    top = every.top.max(axis=0)
    winner = jnp.argmax(every.value, axis=0)[None]

    def of_winner(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, winner, axis=0)[0]

    return ref.Draw(
        top=top,
        total=(every.total * jnp.exp(every.top - top)).sum(axis=0),
        value=of_winner(every.value),
        token=of_winner(every.token),
        token_logit=of_winner(every.token_logit),
        logits=draw.logits,
    )


def _check(
    latent: jax.Array, w2: jax.Array, base_logits: jax.Array, temperature: jax.Array | None
) -> None:
    if latent.ndim != 2 or base_logits.ndim != 2 or latent.shape[0] != base_logits.shape[0]:
        raise ValueError(
            f"latent is {latent.shape}, base_logits {base_logits.shape}; expected [R, Q], [R, V]"
        )
    rows = (base_logits.shape[1], latent.shape[1])
    if w2.shape != rows:
        raise ValueError(f"w2 is {w2.shape}; expected [V, Q] = {rows}")
    if temperature is not None and temperature.shape != latent.shape[:1]:
        raise ValueError(f"temperature is {temperature.shape}; expected {latent.shape[:1]}")
