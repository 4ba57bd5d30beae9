"""Attention of draft blocks over a window, on a TPU.

One step of the grid is one request: its window and its block come into VMEM once and serve all
rows and heads, as keys and as values. Heads go by in groups, which bounds the scores in flight.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import BlockSizes, round_up
from pallas_kernels.matmul import dot

_MASKED = -1e30
_LINES = 128  # rows of queries (block rows times heads) at a time


def _body(index, lens, q, new_kv, window, sink, out, *, block: int, lines: int, scale: float):
    del index
    length = lens[pl.program_id(0)]
    capacity = window.shape[1]
    column = jax.lax.broadcasted_iota(jnp.int32, (1, capacity), 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (capacity, 1), 0)
    context = jnp.where(row < length, window[0], jnp.zeros_like(window[0]))
    own = new_kv[0]
    is_own = jax.lax.broadcasted_iota(jnp.int32, (1, own.shape[0]), 1) < block

    def step(i: jax.Array, carry: None) -> None:
        at = pl.ds(pl.multiple_of(i * lines, lines), lines)
        queries, drain = q[0, at, :], sink[at, :]
        far = jnp.where(column < length, dot(queries, context, contract=1) * scale, _MASKED)
        near = jnp.where(is_own, dot(queries, own, contract=1) * scale, _MASKED)
        top = jnp.maximum(far.max(axis=1, keepdims=True), near.max(axis=1, keepdims=True))
        top = jnp.maximum(top, drain)
        far = jnp.where(column < length, jnp.exp(far - top), 0.0)
        near = jnp.where(is_own, jnp.exp(near - top), 0.0)
        total = far.sum(axis=1, keepdims=True) + near.sum(axis=1, keepdims=True)
        total = total + jnp.exp(drain - top)
        sums = dot(far.astype(context.dtype), context, contract=0) + dot(
            near.astype(own.dtype), own, contract=0
        )
        out[0, at, :] = (sums / total).astype(out.dtype)
        return carry

    jax.lax.fori_loop(0, q.shape[1] // lines, step, None)


@functools.partial(jax.jit, static_argnames=("scale", "sizes", "interpret"))
def window_attention(
    q: jax.Array,
    new_kv: jax.Array,
    windows: jax.Array,
    window_index: jax.Array,
    cache_len: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
    sizes: BlockSizes,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """The kernel; arguments and result as in `ref.window_attention`.

    Raises:
      NotImplementedError: a window that does not fit into VMEM at once.
    """
    requests, block, heads, head_dim = q.shape
    capacity = windows.shape[1]
    if capacity * head_dim * windows.dtype.itemsize > sizes.vmem_limit_bytes // 8:
        raise NotImplementedError(f"a window of {capacity} rows of {head_dim} is too large")
    lines = min(_LINES, round_up(block * heads, 16))
    padded = round_up(block * heads, lines)
    queries = q.reshape(requests, block * heads, head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, padded - block * heads), (0, 0)))
    sinks = jnp.pad(jnp.tile(sink.astype(jnp.float32), block), (0, padded - block * heads))
    spare = round_up(block, 8 * 4 // windows.dtype.itemsize) - block
    own = jnp.pad(new_kv.astype(windows.dtype), ((0, 0), (0, spare), (0, 0)))

    line = pl.BlockSpec((1, padded, head_dim), lambda r, index, lens: (r, 0, 0))
    out = pl.pallas_call(
        functools.partial(_body, block=block, lines=lines, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(requests,),
            in_specs=[
                line,
                pl.BlockSpec((1, *own.shape[1:]), lambda r, index, lens: (r, 0, 0)),
                pl.BlockSpec((1, capacity, head_dim), lambda r, index, lens: (index[r], 0, 0)),
                pl.BlockSpec((padded, 1), lambda r, index, lens: (0, 0)),
            ],
            out_specs=line,
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=sizes.vmem_limit_bytes
        ),
        interpret=interpret,
        name="window_attention",
    )(window_index, cache_len, queries, own, windows, sinks[:, None])
    return out[:, : block * heads].reshape(q.shape)
