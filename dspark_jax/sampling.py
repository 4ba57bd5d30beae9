"""From logits to tokens: one warp for everybody, and noise addressed by seed and position.

Plain decoding, draft, verification and bonus all pass their logits through `warp`; what it
returns is the distribution a token is drawn from. Filters are thresholds found by bisection on
the bits of the logits, so nothing is sorted and equal logits are kept or dropped together.
"""

import enum

import jax
import jax.numpy as jnp

from dspark_jax.types import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures below this are exactly greedy


class Purpose(enum.IntEnum):
    """What a random number is for; part of every key."""

    PLAIN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def warp(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Log-probabilities after temperature, then top-k, then top-p, then min-p.

    Args:
      logits: f32[R, .., V].
      params: per-request settings. Top-p is taken over what top-k left; min-p drops tokens less
        likely than min_p times the likeliest. A temperature below 1e-5 gives a one-hot.

    Returns:
      f32[R, .., V], normalised, -inf where dropped.
    """
    logits = logits.astype(jnp.float32)
    inner = logits.ndim - 1

    def spread(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], *([1] * inner))

    greedy = spread(params.temperature < GREEDY_BELOW)
    scaled = logits / jnp.where(greedy, 1.0, spread(params.temperature))
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    truncated = (params.top_k > 0) | (params.top_p < 1.0)
    scaled = jax.lax.cond(
        jnp.any(truncated),
        lambda x: _top_k_top_p(x, spread(params.top_k), spread(params.top_p)),
        lambda x: x,
        scaled,
    )
    # -inf when off. The likeliest token need not sit at exactly 0: the compiler may round the
    # scaled logits differently in the maximum and in the subtraction.
    floor = jnp.log(spread(params.min_p)) + scaled.max(axis=-1, keepdims=True)
    scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
    log_probs = scaled - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    best = jnp.argmax(logits, axis=-1)[..., None]
    one_hot = jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
    return jnp.where(greedy, one_hot, log_probs)


def any_sampled(params: SamplingParams) -> jax.Array:
    """bool[]: does any request of the batch draw at random?"""
    return jnp.any(params.temperature >= GREEDY_BELOW)


def position_keys(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Keys of plain decoding and of coupled verification: seed and position, nothing else.

    Args:
      seed: u32[R].
      position: i32[R], position of the token to be drawn.

    Returns:
      key[R].
    """

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), Purpose.PLAIN)
        return jax.random.fold_in(key, position)

    return jax.vmap(one)(seed, position)


def round_keys(
    seed: jax.Array, round_index: jax.Array, position: jax.Array, purpose: Purpose
) -> jax.Array:
    """Keys of standard verification: a position drafted again in a later round is new noise.

    Args:
      seed: u32[R].
      round_index: i32[R], rounds this request has run.
      position: i32[R], position of the token the draw is about.
      purpose: what is drawn.

    Returns:
      key[R].
    """

    def one(seed: jax.Array, round_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), purpose)
        return jax.random.fold_in(jax.random.fold_in(key, round_index), position)

    return jax.vmap(one)(seed, round_index, position)


def gumbel(keys: jax.Array, size: int) -> jax.Array:
    """Gumbel noise f32[R, size], one row per key."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)


def draw(log_probs: jax.Array, noise: jax.Array) -> jax.Array:
    """Gumbel-max sample: i32[..] from log-probabilities and noise [.., V]."""
    return jnp.argmax(log_probs + noise, axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, params: SamplingParams, keys: jax.Array) -> jax.Array:
    """A token per request; a batch without sampling only takes argmaxes.

    Args:
      logits: f32[R, V].
      params: per-request settings.
      keys: key[R], of the noise.

    Returns:
      i32[R].
    """

    def sampled(logits: jax.Array) -> jax.Array:
        return draw(warp(logits, params), gumbel(keys, logits.shape[-1]))

    def greedy(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(any_sampled(params), sampled, greedy, logits)


def sample_plain(logits: jax.Array, params: SamplingParams, position: jax.Array) -> jax.Array:
    """The token plain decoding emits.

    Args:
      logits: f32[R, V].
      params: per-request settings.
      position: i32[R], position of the token to be drawn.

    Returns:
      i32[R].
    """
    return sample(logits, params, position_keys(params.seed, position))


def _top_k_top_p(x: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the top k, then of those the smallest upper set of mass at least top_p."""
    keys = _ordered_bits(x)
    k = jnp.where(top_k > 0, top_k, x.shape[-1])
    kth = _largest_key(keys, lambda kept: kept.sum(axis=-1, keepdims=True) >= k)
    x = jnp.where(keys >= kth, x, -jnp.inf)
    probs = jax.nn.softmax(x, axis=-1)

    def enough(kept: jax.Array) -> jax.Array:
        return jnp.where(kept, probs, 0.0).sum(axis=-1, keepdims=True) >= top_p

    edge = _largest_key(_ordered_bits(x), enough)
    nucleus = jnp.where(keys >= edge, x, -jnp.inf)
    return jnp.where(top_p < 1.0, nucleus, x)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """u32 keys in the order of the floats; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _largest_key(keys: jax.Array, satisfied) -> jax.Array:
    """Largest u32 t per row for which satisfied(keys >= t); 0 if none is. [.., 1]."""
    start = jnp.zeros((*keys.shape[:-1], 1), jnp.uint32)

    def step(i: jax.Array, low: jax.Array) -> jax.Array:
        trial = low | (jnp.uint32(0x80000000) >> i.astype(jnp.uint32))
        return jnp.where(satisfied(keys >= trial), trial, low)

    return jax.lax.fori_loop(0, 32, step, start)
