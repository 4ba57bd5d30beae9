"""Key and value caches: one contiguous run of C rows per slot and layer, or a ring of the last.

A forward only reads the cache and returns the K/V of its own rows; `write_rows` stores them
afterwards. So a donated cache is updated in place, and rows that were rejected need no undoing:
what lies at or past a slot's length is never read.

A paged cache is in the layout of JAX's paged attention kernel, which finds a forward's own rows in
it: they are stored layer by layer, before that layer's attention.
"""

import flax.struct
import jax
import jax.numpy as jnp

KV_CACHES = ("contiguous", "paged")  # of a target
PAGE_SIZE = 128  # Z, rows of a page


@flax.struct.dataclass
class KVCache:
    """Rotated keys and values, [L, S, G, C, H]: a head's rows are contiguous."""

    k: jax.Array
    v: jax.Array

    @property
    def capacity(self) -> int:
        """C, rows per slot."""
        return self.k.shape[3]


@flax.struct.dataclass
class WindowCache:
    """The last C positions of each slot, [L, S, C, H]; a row is key and value of all heads.

    The row of position p lies at p % C. The rows of positions 0..length-1 having been written,
    rows 0..min(C, length)-1 are the visible ones: their order does not matter to attention, and
    what an earlier request left in the slot lies past them.
    """

    kv: jax.Array

    @property
    def capacity(self) -> int:
        """C, the window."""
        return self.kv.shape[2]


@flax.struct.dataclass
class PagedCache:
    """Rotated keys and values in pages of Z rows, [L, S, C', 2*G, H].

    A row holds k and v of KV head 0, then of head 1, and so on. A slot owns C' / Z neighbouring
    pages, C' being C rounded up to whole pages. With the first three axes seen as [pages, Z], this
    is the layout of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.
    """

    pages: jax.Array
    capacity: int = flax.struct.field(pytree_node=False)  # C

    def table(self, layer: jax.Array | int, slot: jax.Array) -> jax.Array:
        """The pages of slots i32[R] in a layer, i32[R, C' / Z], numbered over all layers."""
        slots, rows = self.pages.shape[1:3]
        count = rows // PAGE_SIZE
        return (layer * slots + slot)[:, None] * count + jnp.arange(count)


def make_paged_cache(
    layers: int, slots: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> PagedCache:
    """An empty paged cache.

    Args:
      layers: L.
      slots: S.
      kv_heads: G.
      capacity: C, rows per slot.
      head_dim: H.
      dtype: type of the stored keys and values.

    Returns:
      A cache of zeros, 2*L*S*G*C'*H values.
    """
    rows = -(-capacity // PAGE_SIZE) * PAGE_SIZE
    shape = (layers, slots, rows, 2 * kv_heads, head_dim)
    return PagedCache(pages=jnp.zeros(shape, dtype), capacity=capacity)


def write_pages(
    cache: PagedCache,
    layer: jax.Array | int,
    new_k: jax.Array,
    new_v: jax.Array,
    *,
    slot: jax.Array,
    position: jax.Array,
) -> PagedCache:
    """Stores flat rows of one layer.

    Args:
      cache: PagedCache [L, S, C', 2*G, H].
      layer: index into L.
      new_k: [T, G, H], rotated.
      new_v: [T, G, H].
      slot: i32[T].
      position: i32[T]; a row at or past C' is dropped.

    Returns:
      The cache with the rows replaced.
    """
    rows, groups, head_dim = new_k.shape
    new = jnp.stack([new_k, new_v], axis=2).reshape(rows, 2 * groups, head_dim)
    new = new.astype(cache.pages.dtype)
    return cache.replace(pages=cache.pages.at[layer, slot, position].set(new, mode="drop"))


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
    cache: KVCache | WindowCache,
    new_k: jax.Array,
    new_v: jax.Array,
    *,
    first_slot: jax.Array | int,
    start: jax.Array,
    count: jax.Array,
) -> KVCache | WindowCache:
    """Stores rows of R neighbouring slots.

    Args:
      cache: KVCache [L, S, G, C, H]; or a WindowCache, see `write_window`.
      new_k: [L, R, W, G, H]; for a WindowCache its rows [L, R, W, H].
      new_v: [L, R, W, G, H]; not used for a WindowCache, whose rows are values too.
      first_slot: the slot of row 0; row r belongs to first_slot + r.
      start: i32[R], position of the first row of each slot.
      count: i32[R], rows to store, 0..W; the rest is dropped, as is anything past C.

    Returns:
      The cache with rows start .. start+count-1 replaced.
    """
    if isinstance(cache, WindowCache):
        return write_window(cache, new_k, first_slot=first_slot, start=start, count=count)
    _, rows, width = new_k.shape[:3]
    offset = jnp.arange(width)
    position = jnp.where(offset < count[:, None], start[:, None] + offset, cache.capacity)
    slot = (first_slot + jnp.arange(rows))[:, None]

    def store(buffer: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.moveaxis(new, 0, 2).astype(buffer.dtype)  # indexed axes lead: [R, W, L, G, H]
        return buffer.at[:, slot, :, position].set(new, mode="drop")

    return KVCache(k=store(cache.k, new_k), v=store(cache.v, new_v))


def write_window(
    cache: WindowCache,
    new: jax.Array,
    *,
    first_slot: jax.Array | int,
    start: jax.Array,
    count: jax.Array,
) -> WindowCache:
    """Stores the rows of R neighbouring slots that stay inside the window.

    Args:
      cache: WindowCache [L, S, C, H].
      new: [L, R, W, H], rotated; W may be more than C.
      first_slot: the slot of row 0; row r belongs to first_slot + r.
      start: i32[R], position of the first row of each slot.
      count: i32[R], rows that are real, 0..W; the last C of them are stored, the rest dropped.

    Returns:
      The cache with positions start .. start+count-1 written.
    """
    _, rows, width, _ = new.shape
    capacity = cache.capacity
    offset = jnp.arange(width)
    kept = (offset < count[:, None]) & (offset >= count[:, None] - capacity)
    at = jnp.where(kept, (start[:, None] + offset) % capacity, capacity)
    slot = (first_slot + jnp.arange(rows))[:, None]
    return WindowCache(kv=cache.kv.at[:, slot, at].set(new.astype(cache.kv.dtype), mode="drop"))
