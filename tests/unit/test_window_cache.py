"""The window of a DeepSeek draft: many rows at once, wrapped rings, chunks, neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.kv_cache import WindowCache, write_rows, write_window
from tests.deepseek_models import deepseek_config, deepseek_params

ROUNDS = 200
SLOTS = 3


def _ring(rows: np.ndarray, window: int) -> np.ndarray:
    """Where the rows [L, P, H] of one slot lie once positions 0..P-1 are written; NaN elsewhere."""
    ring = np.full((rows.shape[0], window, rows.shape[2]), np.nan, np.float32)
    for position in range(rows.shape[1]):
        ring[:, position % window] = rows[:, position]
    return ring


@pytest.mark.parametrize("window", [1, 4, 7])
def test_one_shot_and_chunked_prefill_fill_the_ring_by_position(window, rng):
    """Prompts shorter and longer than the window, padded to one width; the middle slot of three."""
    longest = 29
    write = jax.jit(functools.partial(write_window, first_slot=1))
    empty = WindowCache(kv=jnp.asarray(np.full((2, SLOTS, window, 5), np.nan, np.float32)))
    rows = rng.normal(size=(2, 1, longest + 3, 5)).astype(np.float32)
    for length in (0, 1, 3, 4, 7, 8, 13, longest):
        start, count = np.zeros(1, np.int32), np.full(1, length, np.int32)
        whole = write(empty, rows, start=start, count=count)
        chunks = empty
        for begin in range(0, length, 3):
            part, count = rows[:, :, begin : begin + 3], np.minimum(3, length - begin)
            chunks = write(chunks, part, start=start + begin, count=np.full(1, count))
        expected = _ring(rows[:, 0, :length], window)
        for cache in (whole, chunks):
            np.testing.assert_array_equal(cache.kv[:, 1], expected)
            assert np.isnan(cache.kv[:, 0]).all() and np.isnan(cache.kv[:, 2]).all()


class _Stack:
    """A small draft with its compiled programs."""

    def __init__(self, family: str, stages: int = 1):
        self.config = deepseek_config(family, stages=stages)
        self.draft = DeepseekDraft(config=self.config)
        self.params = deepseek_params(self.config, np.random.default_rng(1))
        self.taps = len(self.config.target_layer_ids) * self.config.hidden_size
        table = jax.random.normal(jax.random.key(1), (61, self.config.hidden_size))
        self.shared = type("Shared", (), {"embedding": table})
        self.empty = self.draft.make_cache(SLOTS, 0, jnp.float32)

    @functools.cached_property
    def refill(self):
        """(cache, features [S, W, taps], start [S], count [S]) -> cache."""

        @jax.jit
        def run(cache: WindowCache, features, start, count) -> WindowCache:
            positions = start[:, None] + jnp.arange(features.shape[1])
            k, v = self.draft.context_kv(self.params, features, positions)
            return write_rows(cache, k, v, first_slot=0, start=start, count=count)

        return run

    @functools.cached_property
    def hidden(self):
        """(cache, anchor [S], anchor_pos [S]) -> h_k [S, K, D]."""

        @jax.jit
        def run(cache: WindowCache, anchor, anchor_pos) -> jax.Array:
            return self.draft.backbone(
                self.params, self.shared, cache, anchor=anchor, anchor_pos=anchor_pos
            )

        return run


@pytest.fixture(scope="module")
def stack() -> _Stack:
    """A V4.1 draft of two stages, window 6, blocks of 4."""
    return _Stack("deepseek_v41", stages=2)


def test_refill_of_many_rows_equals_the_sequential_calls(stack, rng):
    """Random acceptance over many rounds, every slot at a position and pace of its own."""
    width = stack.config.block_size + 1
    at_once = one_by_one = last_only = stack.empty
    position = np.zeros(SLOTS, np.int32)
    differs = 0
    for round_index in range(ROUNDS):
        features = rng.normal(size=(SLOTS, width, stack.taps)).astype(np.float32)
        count = rng.integers(0, width + 1, SLOTS).astype(np.int32)  # 0: the slot is idle
        spoiled = np.where((np.arange(width) < count[:, None])[..., None], features, np.nan)
        at_once = stack.refill(at_once, np.nan_to_num(spoiled, nan=1e3), position, count)
        for j in range(width):
            one = (j < count).astype(np.int32)
            one_by_one = stack.refill(one_by_one, features[:, j : j + 1], position + j, one)
        last = np.maximum(count - 1, 0)
        row = np.take_along_axis(features, last[:, None, None], axis=1)
        last_only = stack.refill(last_only, row, position + last, (count > 0).astype(np.int32))
        position = position + count
        np.testing.assert_allclose(at_once.kv, one_by_one.kv, atol=1e-5)
        if round_index % 5:
            continue
        anchor = rng.integers(0, 61, SLOTS)
        hidden = stack.hidden(at_once, anchor, position)
        np.testing.assert_allclose(hidden, stack.hidden(one_by_one, anchor, position), atol=1e-5)
        differs += np.abs(hidden - stack.hidden(last_only, anchor, position)).max() > 1e-2
    assert position.min() > 40 * stack.config.sliding_window
    assert differs > ROUNDS // 5 - 3


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7, 20])
def test_drafts_right_after_prefill_see_the_last_window_rows(stack, rng, length):
    """Nothing before the anchor (a one-token prompt), less than the window, and more."""
    width = stack.config.block_size + 1
    features = rng.normal(size=(SLOTS, 20 + width, stack.taps)).astype(np.float32)
    window = stack.config.sliding_window
    chunked = cut = stack.empty
    count = np.full(SLOTS, length, np.int32)
    one_shot = stack.refill(stack.empty, features, np.zeros(SLOTS, np.int32), count)
    for begin in range(0, length, width):
        part = features[:, begin : begin + width]
        count = np.full(SLOTS, min(width, length - begin), np.int32)
        chunked = stack.refill(chunked, part, np.full(SLOTS, begin, np.int32), count)
    first = max(0, length - window)
    for p in range(first, length):
        start = np.full(SLOTS, p, np.int32)
        cut = stack.refill(cut, features[:, p : p + 1], start, np.ones(SLOTS, np.int32))
    anchor, at = np.full(SLOTS, 9), np.full(SLOTS, length)
    expected = stack.hidden(one_shot, anchor, at)
    assert np.isfinite(expected).all()
    for cache in (chunked, cut):
        np.testing.assert_allclose(stack.hidden(cache, anchor, at), expected, atol=1e-5)


def test_requests_do_not_see_each_other(stack, rng):
    """A reused slot, a neighbour with broken rows and another batch change nothing."""
    prompt = rng.normal(size=(SLOTS, 4, stack.taps)).astype(np.float32)
    zeros, count = np.zeros(SLOTS, np.int32), np.array([4, 2, 3], np.int32)
    anchor = np.array([5, 6, 7])
    clean = stack.refill(stack.empty, prompt, zeros, count)
    expected = stack.hidden(clean, anchor, count)
    used = WindowCache(kv=jnp.full_like(stack.empty.kv, jnp.nan))
    reused = stack.refill(used, prompt, zeros, count)
    np.testing.assert_array_equal(stack.hidden(reused, anchor, count), expected)
    broken = WindowCache(kv=reused.kv.at[:, 2].set(jnp.nan))
    other = stack.hidden(broken, np.array([5, 6, 0]), np.array([4, 2, 60]))
    np.testing.assert_array_equal(other[:2], expected[:2])
    assert np.isnan(other[2]).all()


def test_every_row_of_a_block_sees_the_whole_window_and_block(stack, rng):
    """Changing any visible row changes every row of the block; nothing else does."""
    window, block = stack.config.sliding_window, stack.config.block_size
    features = rng.normal(size=(SLOTS, window + 2, stack.taps)).astype(np.float32)
    zeros, length = np.zeros(SLOTS, np.int32), np.full(SLOTS, window + 2, np.int32)
    anchor = np.full(SLOTS, 3)
    cache = stack.refill(stack.empty, features, zeros, length)
    hidden = stack.hidden(cache, anchor, length)
    for position in range(window + 2):
        other = features.copy()
        other[:, position] += 1
        moved = stack.hidden(stack.refill(stack.empty, other, zeros, length), anchor, length)
        change = np.abs(moved - hidden).max(axis=-1)
        assert (change == 0).all() if position < 2 else (change > 1e-6).all(), position
    other = stack.hidden(cache, np.full(SLOTS, 4), length)  # the anchor is row 0 of the block
    assert other.shape[1] == block
    assert (np.abs(other - hidden).max(axis=-1) > 1e-6).all()
