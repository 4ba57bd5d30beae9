"""Key and value cache: one contiguous run of C rows per slot and layer.

A forward only reads the cache and returns the K/V of its own rows; `write_rows` stores them
afterwards. So a donated cache is updated in place, and rows that were rejected need no undoing:
what lies at or past a slot's length is never read.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
    """Rotated keys and values, [L, S, G, C, H]: a head's rows are contiguous."""

    k: jax.Array
    v: jax.Array

    @property
    def capacity(self) -> int:
        """C, rows per slot."""
        return self.k.shape[3]


def make_cache(
    layers: int, slots: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache.

    Args:
      layers: L.
      slots: S.
      kv_heads: G.
      capacity: C, rows per slot.
      head_dim: H.
      dtype: type of the stored keys and values.

    Returns:
      A cache of zeros, 2*L*S*G*C*H values.
    """
    shape = (layers, slots, kv_heads, capacity, head_dim)
    return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write_rows(
    cache: KVCache,
    new_k: jax.Array,
    new_v: jax.Array,
    *,
    first_slot: jax.Array | int,
    start: jax.Array,
    count: jax.Array,
) -> KVCache:
    """Stores rows of R neighbouring slots.

    Args:
      cache: KVCache [L, S, G, C, H].
      new_k: [L, R, W, G, H].
      new_v: [L, R, W, G, H].
      first_slot: the slot of row 0; row r belongs to first_slot + r.
      start: i32[R], position of the first row of each slot.
      count: i32[R], rows to store, 0..W; the rest is dropped, as is anything past C.

    Returns:
      The cache with rows start .. start+count-1 replaced.
    """
    _, rows, width = new_k.shape[:3]
    offset = jnp.arange(width)
    position = jnp.where(offset < count[:, None], start[:, None] + offset, cache.capacity)
    slot = (first_slot + jnp.arange(rows))[:, None]

    def store(buffer: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.moveaxis(new, 0, 2).astype(buffer.dtype)  # indexed axes lead: [R, W, L, G, H]
        return buffer.at[:, slot, :, position].set(new, mode="drop")

    return KVCache(k=store(cache.k, new_k), v=store(cache.v, new_v))
