"""Tapped states that the draft has not read yet.

A round without drafts needs no draft context, so it only keeps what the target's layers said. The
context is made of many such rows at once, which costs a fraction of making it row by row, and no
later than before the next block is drafted. A draft with a window reads the last rows only: of
what has left the window, no context is ever made.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.kv_cache import KVCache, WindowCache, write_rows

ROWS_AT_ONCE = 16  # per slot, of which context is made in one go
WIDEST_WINDOW = 256  # that is kept whole


@flax.struct.dataclass
class Pending:
    """Of S slots: the last rows, which the draft context lacks; that of position p at p % depth."""

    features: jax.Array  # [S, depth, M*D]
    count: jax.Array  # i32[S]
    windowed: bool = flax.struct.field(pytree_node=False)  # may forget what does not fit

    @property
    def depth(self) -> int:
        """Rows of a slot at most."""
        return self.features.shape[1]


def init_pending(slots: int, width: int, dtype: jnp.dtype, window: int | None) -> Pending:
    """Nothing pending.

    Args:
      slots: S.
      width: M*D, of the tapped states of one row.
      dtype: theirs.
      window: context rows that a block of the draft sees; None sees all.

    Returns:
      A buffer of zeros: as deep as the window, or for wider ones and none, of ROWS_AT_ONCE rows.
    """
    windowed = window is not None and window <= WIDEST_WINDOW
    depth = window if windowed else ROWS_AT_ONCE
    return Pending(
        features=jnp.zeros((slots, depth, width), dtype),
        count=jnp.zeros(slots, jnp.int32),
        windowed=windowed,
    )


def keep_row(
    pending: Pending, features: jax.Array, *, position: jax.Array, kept: jax.Array
) -> Pending:
    """Adds a row each of slots 0..R-1.

    Args:
      pending: of S slots, with room unless it is windowed.
      features: [R, M*D].
      position: i32[R], that after the newest pending row's.
      kept: bool[R], whose row counts.

    Returns:
      The buffer, a row longer where kept; where a windowed one is full, the oldest row is gone.
    """
    slot = jnp.arange(kept.shape[0])
    at = jnp.where(kept, position % pending.depth, pending.depth)
    count = jnp.minimum(pending.count[slot] + kept, pending.depth)
    features = features.astype(pending.features.dtype)
    return pending.replace(
        features=pending.features.at[slot, at].set(features, mode="drop"),
        count=pending.count.at[slot].set(count),
    )


def settle(
    pending: Pending,
    cache: KVCache | WindowCache,
    context_kv: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    *,
    needed: bool,
    active: jax.Array,
    end: jax.Array,
) -> tuple[Pending, KVCache | WindowCache]:
    """Makes draft context of the pending rows, if that is needed now or there is no more room.

    Args:
      pending: of S slots.
      cache: the draft's; the rows before the pending ones are there, or out of its window.
      context_kv: from features [R, W, M*D] and positions i32[R, W] to rows of the cache.
      needed: a block is about to be drafted.
      active: bool[R], of slots 0..R-1; what the others left is dropped.
      end: i32[R], position after the last pending row.

    Returns:
      The buffer, empty where it was settled, and the cache.
    """
    if pending.windowed and not needed:
        return pending, cache
    slots = active.shape[0]
    count = jnp.where(active, pending.count[:slots], 0)
    due = needed | jnp.any(count == pending.depth)
    width = min(ROWS_AT_ONCE, pending.depth)
    slot = jnp.arange(slots)[:, None]

    def store(i: jax.Array, cache: KVCache | WindowCache) -> KVCache | WindowCache:
        # A loop, of no step where nothing is due: the result of a branch would be a copy.
        start = end - count + i * width
        positions = start[:, None] + jnp.arange(width)
        k, v = context_kv(pending.features[slot, positions % pending.depth], positions)
        left = jnp.clip(count - i * width, 0, width)
        return write_rows(cache, k, v, first_slot=0, start=start, count=left)

    steps = jnp.where(due, -(-jnp.max(count) // width), 0)
    cache = jax.lax.fori_loop(0, steps, store, cache)
    count = jnp.where(due, 0, count)
    return pending.replace(count=pending.count.at[:slots].set(count)), cache
