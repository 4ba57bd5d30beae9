"""Attention of a few rows per request over paged context: the definition."""

import jax
import jax.numpy as jnp


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
) -> jax.Array:
    """Every row of a block sees the context its request has, and the block or what is before it.

    Args:
      q: [R, K, N, H], rotated.
      new_k: [R, K, G, H], rotated keys of the block rows.
      new_v: [R, K, G, H].
      k_store: [X, G, Y, H], X stretches of Y rows each, cut into pages of Z rows.
      v_store: [X, G, Y, H].
      page_table: i32[R, B], page x * ceil(Y / Z) + y is rows y*Z .. y*Z+Z-1 of stretch x.
      cache_len: i32[R], context rows of each request, 0..B*Z.
      page_size: Z.
      scale: factor on the scores.
      window: only the last `window` context rows are visible; None shows all.
      causal: row k sees rows 0..k of its block; otherwise all of them.

    Returns:
      [R, K, N, H] in q's type; scores and sums are float32.

    Source: DSpark paper eq. 3 (a draft's rows attend to context and block alike).
    """
    requests, block, heads, head_dim = q.shape
    groups, stretch = k_store.shape[1], k_store.shape[2]
    pages = -(-stretch // page_size)

    def context(store: jax.Array) -> jax.Array:
        spare = pages * page_size - stretch
        store = jnp.pad(store, ((0, 0), (0, 0), (0, spare), (0, 0)))
        store = store.reshape(-1, groups, pages, page_size, head_dim)
        rows = store[page_table // pages, :, page_table % pages]  # [R, B, G, Z, H]
        return jnp.moveaxis(rows, 2, 1).reshape(requests, groups, -1, head_dim)

    keys, values = context(k_store), context(v_store)
    row = jnp.arange(keys.shape[2])
    seen = row < cache_len[:, None]
    if window is not None:
        seen &= row >= cache_len[:, None] - window
    values = jnp.where(seen[:, None, :, None], values, 0)  # unused rows may hold anything
    keys = jnp.concatenate([keys, jnp.swapaxes(new_k, 1, 2).astype(keys.dtype)], axis=2)
    values = jnp.concatenate([values, jnp.swapaxes(new_v, 1, 2).astype(values.dtype)], axis=2)
    own = jnp.ones((block, block), bool)
    seen = jnp.concatenate([
        jnp.broadcast_to(seen[:, None], (requests, block, seen.shape[1])),
        jnp.broadcast_to(jnp.tril(own) if causal else own, (requests, block, block)),
    ], axis=2)  # fmt: skip
    q = q.reshape(requests, block, groups, heads // groups, head_dim)
    scores = jnp.einsum("rkgnh,rgch->rgnkc", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * scale, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    out = jnp.einsum(
        "rgnkc,rgch->rgnkh",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    out = out / weights.sum(axis=-1, keepdims=True)
    return jnp.moveaxis(out, 3, 1).reshape(requests, block, heads, head_dim).astype(q.dtype)
