"""Attention over a window with sinks: loops, the project's own, the kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.attention import attend_window
from dspark_jax.kv_cache import WindowCache
from pallas_kernels.window_attention import kernel, ops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    lens: tuple[int, ...]
    block: int = 3
    heads: int = 4
    head_dim: int = 16
    capacity: int = 8
    dtype: str = "float32"


CASES = {
    # Nothing, one row, just short of the window, just full, wrapped, long wrapped.
    "window_edges": Case(lens=(0, 1, 7, 8, 9, 1000)),
    "one_request_bfloat16": Case(lens=(5,), block=5, heads=3, capacity=16, dtype="bfloat16"),
}
LAYER, FIRST_SLOT = 1, 2


def _operands(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Operands; rows that no request may read hold NaN."""
    requests, dtype = len(case.lens), jnp.dtype(case.dtype)
    shape = (2, FIRST_SLOT + requests + 1, case.capacity, case.head_dim)
    cache = np.full(shape, np.nan)
    for r, length in enumerate(case.lens):
        rows = min(length, case.capacity)
        cache[LAYER, FIRST_SLOT + r, :rows] = rng.normal(size=(rows, case.head_dim))
    return dict(
        q=rng.normal(size=(requests, case.block, case.heads, case.head_dim)).astype(dtype),
        new_kv=rng.normal(size=(requests, case.block, case.head_dim)).astype(dtype),
        cache=cache.astype(dtype),
        cache_len=np.array(case.lens, np.int32),
        sink=(3 * rng.normal(size=case.heads)).astype(np.float32),
    )


def _loops(x: dict[str, np.ndarray], scale: float) -> np.ndarray:
    """The same in float64, row by row and head by head."""
    x = {k: v.astype(np.int32 if k == "cache_len" else np.float64) for k, v in x.items()}
    out = np.zeros(x["q"].shape)
    for r, k, n in np.ndindex(*out.shape[:3]):
        ring = x["cache"][LAYER, FIRST_SLOT + r]
        rows = np.concatenate([ring[: x["cache_len"][r]], x["new_kv"][r]])
        scores = np.exp(np.array([x["q"][r, k, n] @ row for row in rows]) * scale)
        out[r, k, n] = scores @ rows / (scores.sum() + np.exp(x["sink"][n]))
    return out


@pytest.mark.parametrize("impl", ["ref", "interpret"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_reference_and_kernel_equal_loops(case, impl, rng, capfd, monkeypatch):
    monkeypatch.setattr(kernel, "_LINES", 16)  # more than one step over the heads, one padded
    x = _operands(case, rng)
    run = functools.partial(
        ops.window_attention, layer=LAYER, first_slot=FIRST_SLOT, scale=0.3, impl=impl
    )
    out = np.asarray(jax.jit(run)(**x))
    assert out.dtype == case.dtype
    tolerance = 2e-2 if case.dtype == "bfloat16" else 3e-6
    np.testing.assert_allclose(out.astype(np.float32), _loops(x, 0.3), atol=tolerance)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_equals_the_attention_of_the_draft(rng):
    x = _operands(CASES["window_edges"], rng)
    at = dict(layer=LAYER, first_slot=FIRST_SLOT, scale=0.3)
    got = jax.jit(functools.partial(ops.window_attention, impl="auto", **at))(**x)
    cache = WindowCache(kv=x.pop("cache"))
    expected = jax.jit(functools.partial(attend_window, cache=cache, **at))(**x)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_what_does_not_fit_is_named(rng):
    x = _operands(CASES["window_edges"], rng)
    run = functools.partial(ops.window_attention, layer=0, first_slot=0, scale=1.0)
    with pytest.raises(ValueError, match=r"sink is \(3,\); expected \(4,\)"):
        run(**x | {"sink": x["sink"][:3]})
    with pytest.raises(ValueError, match=r"new_kv is \(6, 2, 16\)"):
        run(**x | {"new_kv": x["new_kv"][:, :2]})
    with pytest.raises(ValueError, match=r"cache is \(2, 9, 8, 8\)"):
        run(**x | {"cache": x["cache"][..., :8]})
