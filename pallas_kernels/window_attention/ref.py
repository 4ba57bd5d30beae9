"""Attention of draft blocks over a window, one row serving as key and value: the definition."""

import jax
import jax.numpy as jnp


def window_attention(
    q: jax.Array,
    new_kv: jax.Array,
    windows: jax.Array,
    window_index: jax.Array,
    cache_len: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Every row of a block sees the window of its request and the block.

    Args:
      q: [R, K, N, H], rotated.
      new_kv: [R, K, H], rotated rows of the block, shared by all heads.
      windows: [X, C, H], rings of C rows.
      window_index: i32[R], which of the X is a request's.
      cache_len: i32[R], rows written to the ring so far: rows 0..min(C, cache_len)-1 are read.
      sink: f32[N], a logit per head that takes part in the sum and carries no value.
      scale: factor on the scores, not on the sink.

    Returns:
      [R, K, N, H] in q's type; scores and sums are float32.

    Source: DeepSeek V4 inference code, `DSparkAttention` and `sparse_attn`.
    """
    capacity, block = windows.shape[1], q.shape[1]
    seen = jnp.arange(capacity) < cache_len[:, None]
    context = jnp.where(seen[..., None], windows[window_index], 0)  # the rest may hold anything
    kv = jnp.concatenate([context, new_kv.astype(windows.dtype)], axis=1)
    seen = jnp.concatenate([seen, jnp.ones((q.shape[0], block), bool)], axis=1)
    scores = jnp.einsum("rknh,rch->rknc", q, kv, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    sink = sink.astype(jnp.float32)[:, None]
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top)
    out = jnp.einsum(
        "rknc,rch->rknh", weights.astype(kv.dtype), kv, preferred_element_type=jnp.float32
    )
    return (out / total).astype(q.dtype)
