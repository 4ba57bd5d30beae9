"""Attention of draft blocks over paged context, on a TPU.

One step of the grid is one page of one request, for all KV heads. A page comes into VMEM once and
serves all rows and query heads of the block; pages outside the request's length or window are
not fetched, since a step that repeats a page index costs no transfer.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import BlockSizes, round_up
from pallas_kernels.matmul import dot

_MASKED = -1e30  # finite, so that a fully masked step leaves no NaN
_LANES = 128


def _body(
    table, lens, q, new_k, new_v, k_page, v_page, out, top, total, acc, *, block, window, scale
):
    """One page; `top`, `total` and `acc` carry the running softmax of a request."""
    del table
    request, step = pl.program_id(0), pl.program_id(1)
    groups, page_size, length = k_page.shape[1], k_page.shape[2], lens[request]
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    begin = (jax.lax.div(first, jnp.int32(page_size)) + step) * page_size

    def merge(g: int, keys: jax.Array, values: jax.Array, seen: jax.Array, fresh: bool) -> None:
        s = jnp.where(seen, dot(q[0, g], keys, contract=1) * scale, _MASKED)
        old = jnp.full((s.shape[0], 1), _MASKED) if fresh else top[g][:, :1]
        peak = jnp.maximum(old, s.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(s - peak), 0.0)
        mass = weights.sum(axis=1, keepdims=True)
        sums = dot(weights.astype(values.dtype), values, contract=0)
        if not fresh:
            decay = jnp.exp(old - peak)
            mass, sums = mass + total[g][:, :1] * decay, sums + acc[g] * decay
        top[g] = jnp.broadcast_to(peak, top.shape[1:])
        total[g] = jnp.broadcast_to(mass, total.shape[1:])
        acc[g] = sums

    @pl.when(step == 0)
    def _own_rows():
        column = jax.lax.broadcasted_iota(jnp.int32, (1, new_k.shape[2]), 1)
        for g in range(groups):
            merge(g, new_k[0, g], new_v[0, g], column < block, fresh=True)

    @pl.when(begin < length)
    def _context_page():
        column = begin + jax.lax.broadcasted_iota(jnp.int32, (1, page_size), 1)
        line = begin + jax.lax.broadcasted_iota(jnp.int32, (page_size, 1), 0)
        for g in range(groups):
            values = v_page[0, g]
            values = jnp.where(line < length, values, jnp.zeros_like(values))
            merge(g, k_page[0, g], values, (column >= first) & (column < length), fresh=False)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        for g in range(groups):
            out[0, g] = (acc[g] / total[g][:, :1]).astype(out.dtype)


@functools.partial(jax.jit, static_argnames=("page_size", "scale", "window", "sizes", "interpret"))
def draft_attention(
    q: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    k_store: jax.Array,
    v_store: jax.Array,
    page_table: jax.Array,
    cache_len: jax.Array,
    *,
    page_size: int,
    scale: float,
    window: int | None,
    sizes: BlockSizes,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """The kernel; arguments and result as in `ref.draft_attention`.

    Raises:
      NotImplementedError: pages that do not start on a tile of the cache's memory.
    """
    requests, block, heads, head_dim = q.shape
    groups, stretch = k_store.shape[1:3]
    per_group = heads // groups
    sublanes = 8 * 4 // k_store.dtype.itemsize
    page_size = min(page_size, stretch)
    if page_size % sublanes and page_size != stretch:
        raise NotImplementedError(
            f"page_size {page_size} is no multiple of {sublanes} for {k_store.dtype}"
        )
    pages, steps = -(-stretch // page_size), page_table.shape[1]
    if window is not None:
        steps = min(steps, (window + page_size - 2) // page_size + 1)

    def heads_first(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        x = jnp.swapaxes(x, 1, 2).astype(dtype)
        spare = round_up(block, 8 * 4 // x.dtype.itemsize) - block
        return jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0)))

    lines = round_up(per_group * block, 16)
    rows = q.reshape(requests, block, groups, per_group, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(requests, groups, -1, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, lines - per_group * block), (0, 0)))
    new_k, new_v = heads_first(new_k, k_store.dtype), heads_first(new_v, v_store.dtype)

    def request_at(r, b, table, lens):
        return r, 0, 0, 0

    def page_at(r, b, table, lens):
        size, length = jnp.int32(page_size), lens[r]
        first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
        last = jax.lax.div(jnp.maximum(length - 1, 0), size)
        page = table[r * page_table.shape[1] + jnp.minimum(jax.lax.div(first, size) + b, last)]
        return jax.lax.div(page, jnp.int32(pages)), 0, jax.lax.rem(page, jnp.int32(pages)), 0

    own = pl.BlockSpec((1, *new_k.shape[1:]), request_at)
    page = pl.BlockSpec((1, groups, page_size, head_dim), page_at)
    line = pl.BlockSpec((1, groups, lines, head_dim), request_at)
    out = pl.pallas_call(
        functools.partial(_body, block=block, window=window, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(requests, steps),
            in_specs=[line, own, own, page, page],
            out_specs=line,
            scratch_shapes=[
                pltpu.VMEM((groups, lines, _LANES), jnp.float32),
                pltpu.VMEM((groups, lines, _LANES), jnp.float32),
                pltpu.VMEM((groups, lines, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_limit_bytes,
        ),
        interpret=interpret,
        name="draft_attention",
    )(page_table.reshape(-1), cache_len, rows, new_k, new_v, k_store, v_store)
    out = out[:, :, : per_group * block].reshape(requests, groups, per_group, block, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
