"""Attention of a few new rows over a paged cache that holds their own keys and values already.

On a TPU it is JAX's own kernel, which takes the rows of all requests laid end to end. It does not
serve every shape: narrow heads, or a number of them that does not fill a register's rows. Those
take the plain form wherever they run; engines for a TPU refuse them (`check_pages`).
"""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec

from dspark_jax.attention import CONTEXT_BLOCK
from dspark_jax.kv_cache import PAGE_SIZE, PagedCache
from dspark_jax.sharding import spec_here
from dspark_jax.types import Packing
from pallas_kernels.chips import block_sizes
from pallas_kernels.dispatch import on_tpu, per_shard

_LANES = 128
_ROWS_PER_STEP = 32  # flat rows that the kernel attends for at a time
_MASKED = -1e30  # finite, so that a fully masked step leaves no NaN


def check_pages(kv_heads: int, head_dim: int, dtype: jnp.dtype) -> None:
    """Refuses a paged cache that the kernel cannot read.

    Args:
      kv_heads: G on one device.
      head_dim: H.
      dtype: of the cache.

    Raises:
      ValueError: there is no kernel for it.
    """
    if reason := _refusal(2 * kv_heads, head_dim, dtype):
        raise ValueError(
            f"JAX's paged attention kernel cannot serve {reason}; use a contiguous cache."
        )


def _refusal(heads: int, head_dim: int, dtype: jnp.dtype) -> str:
    """What about a row of 2*G keys and values the kernel does not take; empty if it does."""
    if head_dim % _LANES:
        return f"heads of width {head_dim}, only multiples of {_LANES}"
    filled = heads * jnp.dtype(dtype).itemsize / 4  # rows of a register
    if filled not in (1, 2, 4, 8) and filled % 8:
        return f"{heads // 2} KV heads a device in {jnp.dtype(dtype).name}"
    return ""


def attend_pages(
    q: jax.Array,
    cache: PagedCache,
    layer: jax.Array | int,
    packing: Packing,
    *,
    first_slot: jax.Array | int,
    cache_len: jax.Array,
    scale: float,
) -> jax.Array:
    """Causal grouped-query attention of flat rows that are in the cache already.

    Args:
      q: [T, N, H], rotated.
      cache: PagedCache [L, S, C', 2*G, H]; row w of request r lies at cache_len[r] + w of its slot.
      layer: index into L.
      packing: which request and row each flat row is.
      first_slot: slot of request 0; request r uses slot first_slot + r.
      cache_len: i32[R], rows of each request before its new ones.
      scale: factor on the scores.

    Returns:
      [T, N, H] in q's type, zeros for padding. Scores and sums are float32.
    """
    rows, stored = spec_here(None, "heads", None), spec_here(None, None, None, "heads", None)
    whole = PartitionSpec()
    packed = Packing(request=whole, offset=whole, index=whole)
    in_specs = (rows, cache.replace(pages=stored), whole, packed, whole, whole)
    kernel = per_shard(functools.partial(_by_kernel, scale=scale), in_specs, rows)
    reference = functools.partial(_attend_pages, scale=scale)
    operands = (q, cache, jnp.int32(layer), packing, jnp.int32(first_slot), cache_len)
    return jnp.where(packing.real[:, None, None], on_tpu(kernel, reference, *operands), 0)


def _by_kernel(
    q: jax.Array,
    cache: PagedCache,
    layer: jax.Array,
    packing: Packing,
    first_slot: jax.Array,
    cache_len: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """`attend_pages` on a TPU.

    The kernel wants a row and some context of every request it is told of. So requests without
    rows go last and are not counted; where there is no row at all, one of request 0 is made up.
    """
    heads, head_dim = cache.pages.shape[3:]
    if reason := _refusal(heads, head_dim, cache.pages.dtype):
        raise NotImplementedError(reason)
    rows = packing.rows
    rows = rows.at[0].add(rows.sum() == 0)
    order = jnp.argsort(rows == 0, stable=True)
    table = cache.table(layer, first_slot + order)
    sizes = block_sizes()
    return ragged_paged_attention(
        q,
        cache.pages.reshape(-1, PAGE_SIZE, heads, head_dim),
        (cache_len + rows)[order],
        table,
        jnp.pad(jnp.cumsum(rows[order], dtype=jnp.int32), (1, 0)),
        (rows > 0).sum(dtype=jnp.int32)[None],
        sm_scale=scale,
        num_kv_pages_per_block=min(sizes.context_rows // PAGE_SIZE, table.shape[1]),
        num_queries_per_block=min(_ROWS_PER_STEP, q.shape[0]),
        vmem_limit_bytes=sizes.vmem_limit_bytes,
    )


def _attend_pages(
    q: jax.Array,
    cache: PagedCache,
    layer: jax.Array,
    packing: Packing,
    first_slot: jax.Array,
    cache_len: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """`attend_pages` in plain JAX, with a running softmax over blocks of every slot's rows."""
    requests, width = packing.index.shape
    capacity, heads, head_dim = cache.pages.shape[2:]
    q = rearrange(packing.unpack(q), "r w (g n) h -> r g (n w) h", g=heads // 2)
    per_group = q.shape[2] // width
    last = cache_len[:, None] + jnp.arange(width)  # [R, W], the row each sees last: itself
    last = jnp.tile(last, (1, per_group))[:, None, :, None]
    end = cache_len + packing.rows
    block = min(CONTEXT_BLOCK, capacity)

    def step(i: jax.Array, carry: tuple) -> tuple:
        top, total, out = carry
        begin = jnp.minimum(i * block, capacity - block)  # the last block may overlap
        at, size = (layer, first_slot, begin, 0, 0), (1, requests, block, heads, head_dim)
        kv = jax.lax.dynamic_slice(cache.pages, at, size)[0]
        row = begin + jnp.arange(block)
        filled = (row >= i * block) & (row < end[:, None])
        kv = jnp.where(filled[:, :, None, None], kv, 0)  # unused rows may hold anything
        keys, values = rearrange(kv, "r c (g two) h -> two r g c h", two=2)
        s = jnp.einsum("rgqh,rgch->rgqc", q, keys, preferred_element_type=jnp.float32) * scale
        seen = filled[:, None, None, :] & (row <= last)
        s = jnp.where(seen, s, _MASKED)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        decay = jnp.exp(top - new_top)
        probs = jnp.exp(s - new_top)  # rows that see nothing yet are of nobody: row 0 is seen first
        weighed = jnp.einsum(
            "rgqc,rgch->rgqh", probs.astype(values.dtype), values,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        total = total * decay + probs.sum(axis=-1, keepdims=True)
        return new_top, total, out * decay + weighed

    none = jnp.zeros((*q.shape[:3], 1), jnp.float32)
    carry = (none + _MASKED, none, jnp.zeros(q.shape, jnp.float32))
    blocks = (jnp.max(end) + block - 1) // block
    _, total, out = jax.lax.fori_loop(0, blocks, step, carry)
    out = rearrange(out / total, "r g (n w) h -> r w (g n) h", n=per_group)
    return packing.pack(out).astype(q.dtype)
