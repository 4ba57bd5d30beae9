"""Attention of a few new rows over a cache, in one pass with a running softmax.

The rows' own keys and values take part beside the cache and are written to it by the caller
afterwards. Work follows the longest live context, not the cache's capacity. On a TPU it is a
kernel's, for a draft's block as for a target's rows; long chunks of a prompt stay with XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec

from dspark_jax.kv_cache import KVCache, WindowCache
from dspark_jax.sharding import spec_here
from pallas_kernels.block_attention.ops import block_attention
from pallas_kernels.dispatch import on_tpu, per_shard

CONTEXT_BLOCK = 256  # cache rows per step of the running softmax
_MASKED = -1e30  # finite, so that a fully masked step leaves no NaN


def attend(
    q: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    *,
    first_slot: jax.Array | int,
    cache_len: jax.Array,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Grouped-query attention over cached context and the new rows.

    Args:
      q: [R, W, N, H], rotated.
      new_k: [R, W, G, H], rotated keys of the rows themselves.
      new_v: [R, W, G, H].
      cache: KVCache [L, S, G, C, H]; the rows of request r lie in slot first_slot + r.
      layer: index into L.
      first_slot: first of the R neighbouring slots.
      cache_len: i32[R], valid context rows, 0..C.
      causal: row i sees rows 0..i; otherwise all rows of its request see each other.
      scale: factor on the scores.
      window: only the last `window` context rows are visible; None shows all.

    Returns:
      [R, W, N, H] in q's type. Scores and sums are float32.
    """

    def kernel(*operands: Any) -> jax.Array:
        q, new_k, new_v, cache, layer, first_slot, cache_len = operands
        return block_attention(
            q, new_k, new_v, cache.k, cache.v, layer, first_slot, cache_len,
            causal=causal, scale=scale, window=window, impl="pallas",
        )  # fmt: skip

    reference = functools.partial(_attend, causal=causal, scale=scale, window=window)
    rows = spec_here(None, None, "heads", None)
    stored = spec_here(None, None, "heads", None, None)
    whole = PartitionSpec()
    in_specs = (rows, rows, rows, KVCache(k=stored, v=stored), whole, whole, whole)
    operands = (q, new_k, new_v, cache, jnp.int32(layer), jnp.int32(first_slot), cache_len)
    return on_tpu(per_shard(kernel, in_specs, rows), reference, *operands)


def _attend(
    q: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    first_slot: jax.Array,
    cache_len: jax.Array,
    *,
    causal: bool,
    scale: float,
    window: int | None,
) -> jax.Array:
    """`attend` in plain JAX."""
    groups = new_k.shape[2]
    rows, width, heads, head_dim = q.shape
    q = rearrange(q, "r w (g n) h -> r g (n w) h", g=groups)
    per_group = heads // groups

    def scores(keys: jax.Array) -> jax.Array:
        return jnp.einsum("rgqh,rgch->rgqc", q, keys, preferred_element_type=jnp.float32) * scale

    def weigh(probs: jax.Array, values: jax.Array) -> jax.Array:
        probs = probs.astype(values.dtype)
        return jnp.einsum("rgqc,rgch->rgqh", probs, values, preferred_element_type=jnp.float32)

    own = scores(rearrange(new_k, "r w g h -> r g w h"))
    if causal:
        visible = jnp.tile(jnp.tril(jnp.ones((width, width), bool)), (per_group, 1))
        own = jnp.where(visible, own, _MASKED)
    top = own.max(axis=-1, keepdims=True)
    probs = jnp.exp(own - top)
    total = probs.sum(axis=-1, keepdims=True)
    out = weigh(probs, rearrange(new_v, "r w g h -> r g w h"))

    block = min(CONTEXT_BLOCK, cache.capacity)
    size = (1, rows, groups, block, head_dim)
    first_row = jnp.zeros_like(cache_len) if window is None else cache_len - window

    def step(i: jax.Array, carry: tuple) -> tuple:
        top, total, out = carry
        begin = jnp.minimum(i * block, cache.capacity - block)  # the last block may overlap
        at = (layer, first_slot, 0, begin, 0)
        keys = jax.lax.dynamic_slice(cache.k, at, size)[0]
        values = jax.lax.dynamic_slice(cache.v, at, size)[0]
        row = begin + jnp.arange(block)
        seen = (row >= i * block) & (row < cache_len[:, None]) & (row >= first_row[:, None])
        seen = seen[:, None, None, :]
        s = jnp.where(seen, scores(keys), _MASKED)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        decay = jnp.exp(top - new_top)
        probs = jnp.exp(s - new_top)  # 0 where masked: a row sees itself, so its top is finite
        values = jnp.where(seen[..., None][:, :, 0], values, 0)  # unused rows may hold anything
        total = total * decay + probs.sum(axis=-1, keepdims=True)
        return new_top, total, out * decay + weigh(probs, values)

    blocks = (jnp.max(cache_len) + block - 1) // block
    first_block = 0 if window is None else jnp.maximum(jnp.min(first_row), 0) // block
    _, total, out = jax.lax.fori_loop(first_block, blocks, step, (top, total, out))
    out = (out / total).astype(q.dtype)
    return rearrange(out, "r g (n w) h -> r w (g n) h", n=per_group)


def attend_window(
    q: jax.Array,
    new_kv: jax.Array,
    cache: WindowCache,
    layer: int,
    *,
    first_slot: jax.Array | int,
    cache_len: jax.Array,
    sink: jax.Array,
    scale: float,
) -> jax.Array:
    """Attention of a block over the window and itself, one row serving as key and value.

    Every row of a block sees the same rows: the window's and all of the block's.

    Args:
      q: [R, K, N, H], rotated.
      new_kv: [R, K, H], rotated rows of the block.
      cache: WindowCache [L, S, C, H]; the rows of request r lie in slot first_slot + r.
      layer: index into L.
      first_slot: first of the R neighbouring slots.
      cache_len: i32[R], positions written to each slot so far.
      sink: f32[N], a logit per head that takes part in the sum and carries no value.
      scale: factor on the scores, not on the sink.

    Returns:
      [R, K, N, H] in q's type. Scores and sums are float32.

    Source: DeepSeek V4 inference code, `DSparkAttention` and `sparse_attn`.
    """
    rows, width, _, head_dim = q.shape
    capacity = cache.capacity
    at, size = (layer, first_slot, 0, 0), (1, rows, capacity, head_dim)
    context = jax.lax.dynamic_slice(cache.kv, at, size)[0]
    seen = jnp.arange(capacity) < cache_len[:, None]
    context = jnp.where(seen[..., None], context, 0)  # unused rows may hold anything
    kv = jnp.concatenate([context, new_kv.astype(context.dtype)], axis=1)
    seen = jnp.concatenate([seen, jnp.ones((rows, width), bool)], axis=1)
    scores = jnp.einsum("rknh,rch->rnkc", q, kv, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], scores, _MASKED)
    sink = sink.astype(jnp.float32)[:, None, None]
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    probs = jnp.exp(scores - top)
    total = probs.sum(axis=-1, keepdims=True) + jnp.exp(sink - top)
    out = jnp.einsum(
        "rnkc,rch->rnkh", probs.astype(kv.dtype), kv, preferred_element_type=jnp.float32
    )
    return rearrange(out / total, "r n k h -> r k n h").astype(q.dtype)
