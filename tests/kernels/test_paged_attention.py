"""Attention over pages: the plain form equals a loop in NumPy, and the kernel's own definition.

`test_aot_rounds.py` counts the kernel in compiled rounds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    dynamic_validate_inputs,
    ref_ragged_paged_attention,
)

from dspark_jax import paged_attention
from dspark_jax.kv_cache import PAGE_SIZE, PagedCache, make_paged_cache, write_pages
from dspark_jax.paged_attention import attend_pages, check_pages
from dspark_jax.types import Packing

LAYER, LAYERS = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Requests with new rows behind a context."""

    rows: tuple[int, ...]  # new, of each request
    context: tuple[int, ...]
    padding: int = 0  # flat rows of nobody
    kv_heads: int = 2
    heads: int = 4
    head_dim: int = 8
    pages: int = 3  # of a slot

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


CASES = {
    "one row each": Case(rows=(1, 1, 1), context=(0, 127, 128)),
    "some without rows": Case(rows=(3, 0, 4, 0), context=(126, 9, 380, 0), padding=2),
    "none has rows": Case(rows=(0, 0), context=(0, 0), padding=3),
    "a chunk of a prompt": Case(rows=(130,), context=(200,), padding=6),
    "one head": Case(rows=(2, 5), context=(255, 256), kv_heads=1, heads=1),
}


def _operands(case: Case, rng: np.random.Generator) -> tuple:
    """Random rows in a cache that holds NaN wherever nothing has been written."""
    requests, first_slot = len(case.rows), 1
    cache = make_paged_cache(
        LAYERS, requests + 2, case.kv_heads, case.pages * PAGE_SIZE - 5, case.head_dim, jnp.float32
    )
    cache = cache.replace(pages=jnp.full_like(cache.pages, jnp.nan))

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    for request, (rows, context) in enumerate(zip(case.rows, case.context, strict=True)):
        count = rows + context
        k, v = normal(2, count, case.kv_heads, case.head_dim)
        slot = jnp.full(count, first_slot + request)
        cache = write_pages(cache, LAYER, k, v, slot=slot, position=jnp.arange(count))
    total = sum(case.rows) + case.padding
    packing = Packing.of(jnp.array(case.rows), max(*case.rows, 4), total)
    q = normal(total, case.heads, case.head_dim)
    cache_len = jnp.array(case.context)
    where = dict(first_slot=jnp.int32(first_slot), cache_len=cache_len, scale=case.scale)
    return q, cache, packing, where


def _loop(case: Case, q: np.ndarray, pages: np.ndarray, first_slot: int) -> np.ndarray:
    """One row and one head at a time."""
    out, flat = np.zeros(q.shape), 0
    for request, (rows, context) in enumerate(zip(case.rows, case.context, strict=True)):
        for row in range(rows):
            for head in range(case.heads):
                group = head // (case.heads // case.kv_heads)
                kv = pages[LAYER, first_slot + request, : context + row + 1].astype(np.float64)
                scores = np.exp(case.scale * kv[:, 2 * group] @ q[flat, head])
                out[flat, head] = scores @ kv[:, 2 * group + 1] / scores.sum()
            flat += 1
    return out


def _attend(q: jax.Array, cache: PagedCache, packing: Packing, where: dict) -> np.ndarray:
    attend = jax.jit(functools.partial(attend_pages, scale=where["scale"]))
    arrays = {name: where[name] for name in ("first_slot", "cache_len")}
    return np.asarray(attend(q, cache, jnp.int32(LAYER), packing, **arrays))


@pytest.mark.parametrize("name", CASES)
def test_the_plain_form_is_attention(name, rng):
    case = CASES[name]
    q, cache, packing, where = _operands(case, rng)
    expected = _loop(case, np.asarray(q), np.asarray(cache.pages), 1)
    got = _attend(q, cache, packing, where)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert not got[sum(case.rows) :].any()


def _definition(q: jax.Array, *operands: jax.Array, sm_scale: float, **static: int) -> jax.Array:
    """What JAX says its kernel computes; a row that it does not compute is NaN here."""
    dynamic_validate_inputs(q, *operands, sm_scale=sm_scale, **static)
    _, kv_lens, _, ends, (count,) = operands
    assert count > 0 and (kv_lens[:count] > 0).all() and (np.diff(ends)[:count] > 0).all()
    assert static["vmem_limit_bytes"] > 0
    out = ref_ragged_paged_attention(q, *operands, sm_scale=sm_scale)
    return jnp.full_like(q, jnp.nan).at[: len(out)].set(out)


@pytest.mark.parametrize("name", list(CASES)[:3])
def test_the_kernel_is_given_the_rows_and_their_pages(name, rng, monkeypatch):
    """Neither interpreter of Pallas runs it, so its definition stands in."""
    case = dataclasses.replace(CASES[name], head_dim=128)
    q, cache, packing, where = _operands(case, rng)
    expected = _attend(q, cache, packing, where)
    monkeypatch.setattr(paged_attention, "on_tpu", lambda kernel, reference, *x: kernel(*x))
    monkeypatch.setattr(paged_attention, "ragged_paged_attention", _definition)
    got = attend_pages(q, cache, LAYER, packing, **where)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_rows_past_the_pages_of_a_slot_are_dropped(rng):
    cache = make_paged_cache(2, 2, 1, 100, 4, jnp.float32)
    assert cache.capacity == 100 and cache.pages.shape == (2, 2, PAGE_SIZE, 2, 4)
    new = jnp.asarray(rng.normal(size=(2, 2, 1, 4)).astype(np.float32))
    slots, positions = jnp.array([0, 1]), jnp.array([PAGE_SIZE, 99])
    pages = np.array(write_pages(cache, 1, *new, slot=slots, position=positions).pages)
    np.testing.assert_array_equal(pages[1, 1, 99], new[:, 1, 0])
    pages[1, 1, 99] = 0
    assert not pages.any()


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "words"),
    [
        (8, 128, jnp.bfloat16, ""),
        (1, 256, jnp.bfloat16, ""),
        (2, 128, jnp.float32, ""),
        (3, 64, jnp.bfloat16, "heads of width 64, only multiples of 128"),
        (3, 128, jnp.bfloat16, "3 KV heads a device in bfloat16"),
        (12, 128, jnp.bfloat16, "12 KV heads a device in bfloat16"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused_for_a_tpu(kv_heads, head_dim, dtype, words):
    if not words:
        check_pages(kv_heads, head_dim, dtype)
        return
    with pytest.raises(ValueError, match=f"{words}.*contiguous"):
        check_pages(kv_heads, head_dim, dtype)
