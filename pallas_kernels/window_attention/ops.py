"""Attention of DeepSeek draft blocks over a window of context."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.chips import block_sizes
from pallas_kernels.dispatch import Impl, select
from pallas_kernels.window_attention import kernel, ref


def window_attention(
    q: jax.Array,
    new_kv: jax.Array,
    cache: jax.Array,
    layer: jax.Array | int,
    first_slot: jax.Array | int,
    cache_len: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
    impl: Impl = "auto",
) -> jax.Array:
    """K block rows per request over the window of its slot and over each other.

    Args:
      q: [R, K, N, H], rotated.
      new_kv: [R, K, H], rotated rows of the block: key and value of all heads.
      cache: [L, S, C, H], a ring of C rows per layer and slot.
      layer: index into L.
      first_slot: the rows of request r lie in slot first_slot + r.
      cache_len: i32[R], positions written to each slot so far.
      sink: f32[N], a logit per head that takes part in the sum and carries no value.
      scale: factor on the scores, not on the sink.
      impl: see `dispatch.select`.

    Returns:
      [R, K, N, H] in q's type; scores and sums are float32.

    Raises:
      ValueError: shapes that do not fit each other.
    """
    if q.ndim != 4:
        raise ValueError(f"q is {q.shape}; expected [R, K, N, H]")
    requests, block, heads, head_dim = q.shape
    if cache.ndim != 4 or cache.shape[3] != head_dim:
        raise ValueError(f"cache is {cache.shape}; expected [L, S, C, H={head_dim}]")
    expected = dict(
        new_kv=(new_kv, (requests, block, head_dim)),
        cache_len=(cache_len, (requests,)),
        sink=(sink, (heads,)),
    )
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"{name} is {x.shape}; expected {shape}")
    index = layer * cache.shape[1] + first_slot + jnp.arange(requests)
    return select(
        impl,
        functools.partial(kernel.window_attention, scale=scale, sizes=block_sizes()),
        functools.partial(ref.window_attention, scale=scale),
        q, new_kv, cache.reshape(-1, *cache.shape[2:]), index.astype(jnp.int32),
        jnp.asarray(cache_len, jnp.int32), sink,
    )  # fmt: skip
