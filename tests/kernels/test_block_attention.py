"""Attention of blocks over context: the reference and the kernel against loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import kernel, ops, ref
from pallas_kernels.chips import BLOCK_SIZES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    lens: tuple[int, ...]
    block: int = 5
    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    page_size: int = 16
    pages: int = 3  # per request
    window: int | None = None
    causal: bool = False
    dtype: str = "float32"


CASES = {
    # Nothing, one row, a page, a page and a row, everything; heads and rows that fill no tile.
    "ragged": Case(lens=(0, 1, 16, 17, 48), heads=9, groups=3, block=7),
    # Windows that start inside a page, on its edge, before the context and after none of it.
    "window": Case(lens=(0, 3, 15, 16, 18, 32, 33, 48), window=16),
    "one_request_bfloat16": Case(lens=(37,), dtype="bfloat16", window=20, block=1),
    # A target's rows; lines of two rows of a block share a tile.
    "causal": Case(lens=(0, 1, 17, 48), heads=6, block=4, causal=True),
    "causal_bfloat16": Case(lens=(37, 5), dtype="bfloat16", window=20, causal=True),
}
MORE_CASES = {
    "no_context": Case(lens=(0, 0)),
    "window_of_four": Case(lens=(0, 3, 16, 18, 47), window=4),
    "window_wider_than_context": Case(lens=(7, 48), window=1000),
    "causal_row": Case(lens=(0, 20), block=1, causal=True),
}
POISON = np.nan


def _arrays(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Operands; rows that no request may read hold NaN, table entries past a length are absurd."""
    requests, z = len(case.lens), case.page_size
    total = requests * case.pages + 1
    shuffled = rng.permutation(total)[: requests * case.pages].reshape(requests, case.pages)
    pools = np.full((2, total, case.groups, z, case.head_dim), POISON, np.float32)
    table = np.full((requests, case.pages), -1, np.int32)
    for r, length in enumerate(case.lens):
        used = -(-length // z)
        table[r, :used] = shuffled[r, :used]
        if used < case.pages:
            table[r, used] = 10**6
        for row in range(length):
            shape = (2, case.groups, case.head_dim)
            pools[:, shuffled[r, row // z], :, row % z] = rng.normal(size=shape)
    own = (requests, case.block, case.groups, case.head_dim)
    return dict(
        q=rng.normal(size=(requests, case.block, case.heads, case.head_dim)),
        new_k=rng.normal(size=own),
        new_v=rng.normal(size=own),
        k_pages=pools[0],
        v_pages=pools[1],
        page_table=table,
        cache_len=np.array(case.lens, np.int32),
    )


def _loops(case: Case, x: dict[str, np.ndarray], scale: float) -> np.ndarray:
    """The same in float64, row by row and head by head."""
    out = np.zeros(x["q"].shape)
    for r, length in enumerate(case.lens):
        begin = 0 if case.window is None else max(0, length - case.window)
        at = [(x["page_table"][r, c // case.page_size], c % case.page_size) for c in range(length)]
        for n in range(case.heads):
            g = n // (case.heads // case.groups)
            keys = [x["k_pages"][p, g, z] for p, z in at[begin:]]
            values = [x["v_pages"][p, g, z] for p, z in at[begin:]]
            for k in range(case.block):
                own = slice(k + 1 if case.causal else case.block)
                keys_seen = keys + list(x["new_k"][r, own, g])
                values_seen = values + list(x["new_v"][r, own, g])
                scores = np.array([x["q"][r, k, n] @ key for key in keys_seen], np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[r, k, n] = weights @ np.array(values_seen, np.float64) / weights.sum()
    return out


def _cast(case: Case, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kept = {"page_table", "cache_len"}
    return {k: v if k in kept else v.astype(jnp.dtype(case.dtype)) for k, v in x.items()}


def _check(case: Case, impl: str, rng: np.random.Generator) -> None:
    x = _cast(case, _arrays(case, rng))
    as_numpy = {k: np.asarray(v).astype(np.float32 if v.ndim > 2 else int) for k, v in x.items()}
    run = functools.partial(
        ops.block_attention_paged, scale=0.3, window=case.window, causal=case.causal, impl=impl
    )
    out = np.asarray(jax.jit(run)(**x))
    assert out.dtype == case.dtype
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-6
    expected = _loops(case, as_numpy, 0.3)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=tolerance)


@pytest.mark.parametrize("name", CASES | MORE_CASES)
def test_reference_equals_loops(name, rng):
    _check((CASES | MORE_CASES)[name], "ref", rng)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_loops(case, rng, capfd):
    _check(case, "interpret", rng)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_auto_is_the_reference_on_this_machine(rng):
    case = MORE_CASES["window_of_four"]
    x = _cast(case, _arrays(case, rng))

    def run(impl: str) -> jax.Array:
        attention = functools.partial(ops.block_attention_paged, scale=0.3, window=4, impl=impl)
        return jax.jit(attention)(**x)

    np.testing.assert_array_equal(run("auto"), run("ref"))


@pytest.mark.parametrize(
    ("capacity", "head_dim", "rows", "impl"),
    [
        (10, 16, 16, "ref"), (40, 16, 16, "ref"), (48, 16, 16, "ref"),
        (40, 128, 16, "interpret"),
        (300, 16, 128, "interpret"),  # heads so narrow that the compiler stores them by columns
    ],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_contiguous_cache_is_pages_end_to_end(
    capacity, head_dim, rows, impl, causal, rng, monkeypatch, capfd
):
    """Layer 1, slots 1 and 2 of four; the last page may stick out of the slot's capacity."""
    monkeypatch.setattr(
        ops, "block_sizes", lambda: dataclasses.replace(BLOCK_SIZES["v5e"], context_rows=rows)
    )
    lens = (capacity, 3)
    cache = np.full((2, 2, 4, 2, capacity, head_dim), POISON, np.float32)  # (k, v), L, S, G, C, H
    for r, length in enumerate(lens):
        cache[:, 1, 1 + r, :, :length] = rng.normal(size=(2, 2, length, head_dim))
    own = rng.normal(size=(2, 2, 5, 2, head_dim)).astype(np.float32)
    q = rng.normal(size=(2, 5, 6, head_dim)).astype(np.float32)
    window = capacity * 3 // 4
    case = Case(lens=lens, heads=6, page_size=capacity, pages=1, window=window, causal=causal)
    as_pages = dict(
        q=q, new_k=own[0], new_v=own[1], k_pages=cache[0, 1, 1:3], v_pages=cache[1, 1, 1:3],
        page_table=np.array([[0], [1]]),
    )  # fmt: skip
    expected = _loops(case, as_pages, 0.25)
    run = functools.partial(
        ops.block_attention, scale=0.25, window=window, causal=causal, impl=impl
    )
    out = jax.jit(run)(q, own[0], own[1], cache[0], cache[1], 1, 1, np.array(lens))
    np.testing.assert_allclose(out, expected, atol=3e-6)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_what_does_not_fit_is_named(rng):
    x = _arrays(CASES["ragged"], rng)
    run = functools.partial(ops.block_attention_paged, scale=1.0)
    with pytest.raises(ValueError, match=r"new_k is \(5, 4, 3, 16\)"):
        run(**x | {"new_k": x["new_k"][:, :4]})
    with pytest.raises(ValueError, match="4 query heads over 3 KV heads"):
        run(**x | {"q": x["q"][:, :, :4]})
    with pytest.raises(ValueError, match=r"page_table is \(4, 3\)"):
        run(**x | {"page_table": x["page_table"][:4]})
    with pytest.raises(ValueError, match="window is 0"):
        run(**x, window=0)
    with pytest.raises(ValueError, match="impl is 'fast'"):
        run(**x, impl="fast")


def test_pages_off_the_tiles_go_to_the_reference(rng):
    case = Case(lens=(37,), page_size=12, pages=4)
    x = _arrays(case, rng)
    table = np.array([[4, 0, 2, 1]], np.int32)
    stretched = {k: np.concatenate([x[k], x[k]], axis=2) for k in ("k_pages", "v_pages")}
    args = [jnp.asarray(x[k], jnp.float32) for k in ("q", "new_k", "new_v")]
    args += [jnp.nan_to_num(jnp.asarray(v, jnp.float32)) for v in stretched.values()]
    static = dict(page_size=12, scale=1.0, window=None, causal=False)
    with pytest.raises(NotImplementedError, match="page_size 12"):
        kernel.block_attention(
            *args, table, x["cache_len"], sizes=BLOCK_SIZES["v5e"], interpret=False, **static
        )
    out = ops._run(*args, table, jnp.asarray(x["cache_len"]), impl="auto", **static)
    expected = ref.block_attention(*args, table, x["cache_len"], **static)
    np.testing.assert_array_equal(out, expected)


def test_too_many_rows_go_to_the_reference(rng):
    """Rows of a long prompt."""
    few = dataclasses.replace(BLOCK_SIZES["v5e"], query_lines=16)
    x = _cast(MORE_CASES["no_context"], _arrays(MORE_CASES["no_context"], rng))
    args = [x[k] for k in ("q", "new_k", "new_v", "k_pages", "v_pages")]
    static = dict(page_size=16, scale=1.0, window=None, causal=True)
    with pytest.raises(NotImplementedError, match="5 rows of 4 heads are 32 lines; at most 16"):
        kernel.block_attention(
            *args, x["page_table"], x["cache_len"], sizes=few, interpret=False, **static
        )
