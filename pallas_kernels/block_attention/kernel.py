"""Attention of a few rows per request over paged context, on a TPU.

One step of the grid is one page of one request, for all KV heads. A page comes into VMEM once and
serves all rows and query heads of the block; pages outside the request's length or window are
not fetched, since a step that repeats a page index costs no transfer. There are as many steps as
the longest request of the batch has pages.

Memory comes in lines of 128 numbers. Rows narrower than that the compiler stores column by column,
and so the kernel reads them: any other view of a cache would be a copy of it.
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
    table, lens, q, new_k, new_v, k_page, v_page, out, top, total, acc, *, block, causal, window,
    scale, turned,
):  # fmt: skip
    """One page; `top`, `total` and `acc` carry the running softmax of a request.

    Keys and values are [rows, H], or `turned` [H, rows].
    """
    del table
    request, step = pl.program_id(0), pl.program_id(1)
    row_axis = int(turned)
    groups, page_size, length = k_page.shape[1], k_page.shape[2 + row_axis], lens[request]
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    begin = (jax.lax.div(first, jnp.int32(page_size)) + step) * page_size

    def merge(g: int, keys: jax.Array, values: jax.Array, seen: jax.Array, fresh: bool) -> None:
        s = jnp.where(seen, dot(q[0, g], keys, contract=1 - row_axis) * scale, _MASKED)
        old = jnp.full((s.shape[0], 1), _MASKED) if fresh else top[g][:, :1]
        peak = jnp.maximum(old, s.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(s - peak), 0.0)
        mass = weights.sum(axis=1, keepdims=True)
        sums = dot(weights.astype(values.dtype), values, contract=row_axis)
        if not fresh:
            decay = jnp.exp(old - peak)
            mass, sums = mass + total[g][:, :1] * decay, sums + acc[g] * decay
        top[g] = jnp.broadcast_to(peak, top.shape[1:])
        total[g] = jnp.broadcast_to(mass, total.shape[1:])
        acc[g] = sums

    @pl.when(step == 0)
    def _own_rows():
        shape = (q.shape[2] if causal else 1, new_k.shape[2 + row_axis])
        seen = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        if causal:  # a line is a row of the block for one query head; heads lead
            row = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(block))
            seen = seen <= row
        else:
            seen = seen < block
        for g in range(groups):
            merge(g, new_k[0, g], new_v[0, g], seen, fresh=True)

    @pl.when(begin < length)
    def _context_page():
        column = begin + jax.lax.broadcasted_iota(jnp.int32, (1, page_size), 1)
        shape = (1, page_size) if turned else (page_size, 1)
        line = begin + jax.lax.broadcasted_iota(jnp.int32, shape, row_axis)
        for g in range(groups):
            values = v_page[0, g]
            values = jnp.where(line < length, values, jnp.zeros_like(values))
            merge(g, k_page[0, g], values, (column >= first) & (column < length), fresh=False)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        for g in range(groups):
            out[0, g] = (acc[g] / total[g][:, :1]).astype(out.dtype)


@functools.partial(
    jax.jit, static_argnames=("page_size", "scale", "window", "causal", "sizes", "interpret")
)
def block_attention(
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
    causal: bool,
    sizes: BlockSizes,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """The kernel; arguments and result as in `ref.block_attention`.

    Raises:
      NotImplementedError: pages that do not start on a tile of the cache's memory, or more rows
        than are held at a time.
    """
    requests, block, heads, head_dim = q.shape
    groups, stretch = k_store.shape[1:3]
    per_group = heads // groups
    sublanes = 8 * 4 // k_store.dtype.itemsize
    turned = _is_turned(stretch, head_dim)
    page_size, tile = min(page_size, stretch), _LANES if turned else sublanes
    if page_size % tile and page_size != stretch:
        raise NotImplementedError(
            f"page_size {page_size} is no multiple of {tile} for {k_store.dtype}"
        )
    pages = -(-stretch // page_size)
    first = jnp.zeros_like(cache_len) if window is None else jnp.maximum(cache_len - window, 0)
    filled = (cache_len + page_size - 1) // page_size - first // page_size
    steps = jnp.maximum(filled.max(), 1)

    def heads_first(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        x = jnp.swapaxes(x, 1, 2).astype(dtype)
        spare = round_up(block, _LANES if turned else sublanes) - block
        return as_stored(jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0))))

    def as_stored(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 2, 3) if turned else x

    lines = round_up(per_group * block, 16)
    if groups * lines > sizes.query_lines:
        raise NotImplementedError(
            f"{block} rows of {heads} heads are {groups * lines} lines; at most {sizes.query_lines}"
        )
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
        at = jax.lax.rem(page, jnp.int32(pages))
        return jax.lax.div(page, jnp.int32(pages)), 0, *((0, at) if turned else (at, 0))

    own = pl.BlockSpec((1, *new_k.shape[1:]), request_at)
    page_shape = (head_dim, page_size) if turned else (page_size, head_dim)
    page = pl.BlockSpec((1, groups, *page_shape), page_at)
    line = pl.BlockSpec((1, groups, lines, head_dim), request_at)
    out = pl.pallas_call(
        functools.partial(
            _body, block=block, causal=causal, window=window, scale=scale, turned=turned
        ),
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
        name="block_attention",
    )(
        page_table.reshape(-1), cache_len, rows, new_k, new_v, as_stored(k_store),
        as_stored(v_store),
    )  # fmt: skip
    out = out[:, :, : per_group * block].reshape(requests, groups, per_group, block, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _is_turned(rows: int, head_dim: int) -> bool:
    """Whether the compiler stores [.., rows, H] by columns: where that leaves fewer gaps."""
    by_rows = round_up(rows, 8) * round_up(head_dim, _LANES)
    return round_up(head_dim, 8) * round_up(rows, _LANES) < by_rows
