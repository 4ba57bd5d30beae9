"""Attention of a few rows per request over cached context: paged pools, contiguous caches."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention import kernel, ref
from pallas_kernels.chips import block_sizes
from pallas_kernels.dispatch import Impl, select


def block_attention_paged(
    q: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    cache_len: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    impl: Impl = "auto",
) -> jax.Array:
    """K block rows per request over a pool of pages and over each other.

    Args:
      q: [R, K, N, H], rotated.
      new_k: [R, K, G, H], rotated keys of the block rows, not in the pool.
      new_v: [R, K, G, H].
      k_pages: [P, G, Z, H].
      v_pages: [P, G, Z, H].
      page_table: i32[R, B], the pages of each request in order; entries past its length are not
        read and may be anything.
      cache_len: i32[R], context rows of each request, 0..B*Z.
      scale: factor on the scores.
      window: only the last `window` context rows are visible; None shows all.
      causal: row k sees rows 0..k of its block, as in a target; otherwise all, as in a draft.
        A request with fewer rows has finite ones behind them.
      impl: see `dispatch.select`.

    Returns:
      [R, K, N, H] in q's type; scores and sums are float32.

    Raises:
      ValueError: shapes or types that do not fit each other.
    """
    _check(q, new_k, new_v, k_pages, v_pages, cache_len, window)
    if page_table.ndim != 2 or page_table.shape[0] != q.shape[0]:
        raise ValueError(f"page_table is {page_table.shape}; expected [R={q.shape[0]}, B]")
    return _run(
        q, new_k, new_v, k_pages, v_pages, page_table, cache_len,
        page_size=k_pages.shape[2], scale=scale, window=window, causal=causal, impl=impl,
    )  # fmt: skip


def block_attention(
    q: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    layer: jax.Array | int,
    first_slot: jax.Array | int,
    cache_len: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    impl: Impl = "auto",
) -> jax.Array:
    """K block rows per request over the rows of its slot and over each other.

    Args:
      q: [R, K, N, H], rotated.
      new_k: [R, K, G, H], rotated keys of the block rows, not in the cache.
      new_v: [R, K, G, H].
      k_cache: [L, S, G, C, H].
      v_cache: [L, S, G, C, H].
      layer: index into L.
      first_slot: the rows of request r lie in slot first_slot + r.
      cache_len: i32[R], context rows of each request, 0..C.
      scale: factor on the scores.
      window: only the last `window` context rows are visible; None shows all.
      causal: row k sees rows 0..k of its block, as in a target; otherwise all, as in a draft.
        A request with fewer rows has finite ones behind them.
      impl: see `dispatch.select`.

    Returns:
      [R, K, N, H] in q's type; scores and sums are float32.

    Raises:
      ValueError: shapes or types that do not fit each other.
    """
    if k_cache.ndim != 5 or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"k_cache is {k_cache.shape}, v_cache {v_cache.shape}; expected [L, S, G, C, H] twice"
        )
    slots, capacity = k_cache.shape[1], k_cache.shape[3]
    k_store = k_cache.reshape(-1, *k_cache.shape[2:])
    v_store = v_cache.reshape(-1, *v_cache.shape[2:])
    _check(q, new_k, new_v, k_store, v_store, cache_len, window)
    page_size = min(block_sizes().context_rows, capacity)
    pages = -(-capacity // page_size)
    stretch = layer * slots + first_slot + jnp.arange(q.shape[0])
    table = stretch[:, None] * pages + jnp.arange(pages)
    return _run(
        q, new_k, new_v, k_store, v_store, table, cache_len,
        page_size=page_size, scale=scale, window=window, causal=causal, impl=impl,
    )  # fmt: skip


def _run(
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
    impl: Impl,
) -> jax.Array:
    static = dict(page_size=page_size, scale=scale, window=window, causal=causal)
    pages = k_store.shape[0] * -(-k_store.shape[2] // page_size)
    table = jnp.clip(page_table, 0, pages - 1).astype(jnp.int32)
    lens = jnp.clip(cache_len, 0, page_table.shape[1] * page_size).astype(jnp.int32)
    return select(
        impl,
        functools.partial(kernel.block_attention, sizes=block_sizes(), **static),
        functools.partial(ref.block_attention, **static),
        q, new_k, new_v, k_store, v_store, table, lens,
    )  # fmt: skip


def _check(
    q: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    k_store: jax.Array,
    v_store: jax.Array,
    cache_len: jax.Array,
    window: int | None,
) -> None:
    if q.ndim != 4:
        raise ValueError(f"q is {q.shape}; expected [R, K, N, H]")
    requests, block, heads, head_dim = q.shape
    if k_store.ndim != 4 or k_store.shape[3] != head_dim or v_store.shape != k_store.shape:
        raise ValueError(
            f"keys are {k_store.shape}, values {v_store.shape}; expected [.., G, rows, "
            f"H={head_dim}] twice"
        )
    groups = k_store.shape[1]
    own = (requests, block, groups, head_dim)
    if new_k.shape != own or new_v.shape != own:
        raise ValueError(f"new_k is {new_k.shape}, new_v {new_v.shape}; expected {own} twice")
    if heads % groups:
        raise ValueError(f"{heads} query heads over {groups} KV heads: no whole number each")
    if cache_len.shape != (requests,):
        raise ValueError(f"cache_len is {cache_len.shape}; expected [R={requests}]")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1, or None for no window")
    if k_store.dtype != v_store.dtype or not jnp.issubdtype(k_store.dtype, jnp.floating):
        raise ValueError(f"keys are {k_store.dtype}, values {v_store.dtype}; expected one float")
