"""Tapped states that the draft has not read yet.

A round without drafts needs no draft context, so it only keeps what the target's layers said. The
context is made of many such rows at once, which costs a fraction of making it row by row, and no
later than before the next block is drafted.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.kv_cache import KVCache, WindowCache, write_rows
from dspark_jax.when import when

PENDING_ROWS = 16  # rows kept at most


@flax.struct.dataclass
class Pending:
    """Of S slots: the rows behind the end of a slot's draft context, oldest first."""

    features: jax.Array  # [S, PENDING_ROWS, M*D]
    count: jax.Array  # i32[S]


def init_pending(slots: int, width: int, dtype: jnp.dtype) -> Pending:
    """Nothing pending.

    Args:
      slots: S.
      width: M*D, of the tapped states of one row.
      dtype: theirs.

    Returns:
      A buffer of zeros.
    """
    return Pending(
        features=jnp.zeros((slots, PENDING_ROWS, width), dtype),
        count=jnp.zeros(slots, jnp.int32),
    )


def keep_row(pending: Pending, features: jax.Array, kept: jax.Array) -> Pending:
    """Adds a row each of slots 0..R-1.

    Args:
      pending: of S slots, with room.
      features: [R, M*D].
      kept: bool[R], whose row counts.

    Returns:
      The buffer, a row longer where kept.
    """
    slot = jnp.arange(kept.shape[0])
    at = jnp.where(kept, pending.count[slot], PENDING_ROWS)
    return Pending(
        features=pending.features.at[slot, at].set(
            features.astype(pending.features.dtype), mode="drop"
        ),
        count=pending.count.at[slot].add(kept.astype(jnp.int32)),
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
    """Makes draft context of the pending rows, if that is needed now or the buffer is full.

    Args:
      pending: of S slots.
      cache: the draft's, rows 0..end-count-1 valid.
      context_kv: from features [R, W, M*D] and positions i32[R, W] to rows of the cache.
      needed: a block is about to be drafted.
      active: bool[R], of slots 0..R-1; what the others left is dropped.
      end: i32[R], position after the last pending row.

    Returns:
      The buffer, empty where it was settled, and the cache.
    """
    rows = active.shape[0]
    count = jnp.where(active, pending.count[:rows], 0)
    due = jnp.any(count > 0 if needed else count == PENDING_ROWS)

    start = end - count

    def store(cache: KVCache | WindowCache, features: jax.Array, start: jax.Array) -> Any:
        k, v = context_kv(features, start[:, None] + jnp.arange(PENDING_ROWS))
        return write_rows(cache, k, v, first_slot=0, start=start, count=count)

    cache = when(due, store, cache, pending.features[:rows], start)
    count = jnp.where(due, 0, count)
    return pending.replace(count=pending.count.at[:rows].set(count)), cache
