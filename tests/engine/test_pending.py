"""After rounds without drafts the draft's context is what it would be with drafts all along."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dspark_jax.decode import decode_round, plain_step, prefill, rounds_to_bypass
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.pending import ROWS_AT_ONCE, WIDEST_WINDOW
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.state import Decoder, DecodeState, admit, init_state, release
from dspark_jax.target.llama import split_layers
from dspark_jax.types import PairParams, SamplingParams, ScheduleTables
from tests.engine.test_engine import BLOCK, VOCAB, _models

SLOTS, CAPACITY, WIDTH = 2, 96, 64


def _tables(undrafted: float) -> ScheduleTables:
    """Drafts are free; a round without them is as fast as said."""
    steps = np.ones(SLOTS * (BLOCK + 1) + 1, np.float32)
    steps[0] = undrafted
    ones = np.ones(BLOCK, np.float32)
    return ScheduleTables(
        steps_per_s=steps, sts_temperatures=ones, sts_temperatures_presampled=ones,
        neutral_confidence=ones,
    )  # fmt: skip


class _Slots:
    """Two slots and what has been said in them."""

    def __init__(self, window: int | None = None):
        target, draft = _models()
        draft = DenseDraft(config=dataclasses.replace(draft.config, sliding_window=window))
        params = split_layers(jax.jit(target.init)(jax.random.key(1)))
        drafted = jax.jit(draft.init)(jax.random.key(2))
        self.params = PairParams(target=params, draft=drafted, shared=target.shared_head(params))
        decoder = Decoder(
            target=target, draft=draft, schedule=ScheduleConfig(min_predicted_gain=0.0)
        )
        empty = functools.partial(init_state, decoder, SLOTS, CAPACITY, np.float32)
        self._empty = jax.jit(empty)
        self._admit, self._release = jax.jit(admit), jax.jit(release)
        self._fill = jax.jit(functools.partial(prefill, decoder))
        static = dict(rows=SLOTS, buckets=(SLOTS * (BLOCK + 1),))
        self._bypassed = jax.jit(functools.partial(rounds_to_bypass, decoder, **static))
        self._round = jax.jit(functools.partial(decode_round, decoder, **static))
        self._plain = jax.jit(functools.partial(plain_step, decoder, rows=SLOTS))
        self.state, self.texts = self._empty(), [[], []]

    def fill(self, state: DecodeState, slot: int, text: list[int]) -> DecodeState:
        tokens = np.zeros(WIDTH, np.int32)
        tokens[: len(text) - 1] = text[:-1]
        return self._fill(
            self.params, state, np.int32(slot), tokens, np.int32(0), np.int32(len(text) - 1)
        )

    def admit(self, slot: int, text: list[int]) -> None:
        self.state = self.fill(self._release(self.state, slot), slot, text)
        greedy = SamplingParams(
            temperature=np.float32(0), top_k=np.int32(0), top_p=np.float32(1),
            min_p=np.float32(0), seed=np.uint32(0),
        )  # fmt: skip
        self.state = self._admit(self.state, slot, text[-1], len(text) - 1, 60, greedy)
        self.texts[slot] = list(text)

    def run(self, rounds: int, undrafted: float) -> list[bool]:
        bypassed = []
        history = self.state.history.replace(idle_requests=np.int32(-1))  # the speeds are new
        self.state = self.state.replace(history=history)
        for _ in range(rounds):
            tables = _tables(undrafted)
            self.anchors = [len(text) - 1 for text in self.texts]
            if self._bypassed(self.state, tables):
                self.state, output = self._plain(self.params, self.state)
            else:
                self.state, output = self._round(self.params, self.state, tables)
            for slot, text in enumerate(self.texts):
                text += np.asarray(output.tokens[slot, : output.emit_len[slot]]).tolist()
            bypassed.append(bool(output.bypassed))
        return bypassed

    def check(self, window: int = CAPACITY) -> None:
        """The draft's context against that of the same texts as prompts.

        As far as the last round saw it, whose block drafted at `self.anchors`.
        """
        expected = self._empty()
        for slot, text in enumerate(self.texts):
            expected = self.fill(expected, slot, text)
        for slot, text in enumerate(self.texts):
            first, end = max(self.anchors[slot] - window, 0), len(text) - 1
            for got, want in zip(
                jax.tree.leaves(self.state.context_kv), jax.tree.leaves(expected.context_kv),
                strict=True,
            ):  # fmt: skip
                np.testing.assert_allclose(
                    got[:, slot, :, first:end], want[:, slot, :, first:end], atol=2e-6
                )


def test_context_is_whole_whenever_a_block_is_drafted():
    rng = np.random.default_rng(0)
    slots = _Slots()
    slots.admit(0, rng.integers(1, VOCAB, 5).tolist())
    slots.admit(1, rng.integers(1, VOCAB, 11).tolist())
    assert not any(slots.run(2, undrafted=0.0))
    slots.check()
    assert all(slots.run(7, undrafted=1e9))
    assert slots.state.pending.count.tolist() == [7, 7]
    slots.admit(1, rng.integers(1, VOCAB, 3).tolist())  # what was pending of its slot is forgotten
    assert all(slots.run(ROWS_AT_ONCE - 4, undrafted=1e9))
    assert not any(slots.run(1, undrafted=0.0))
    assert slots.state.pending.count.tolist() == [0, 0]
    slots.check()


def test_a_full_buffer_is_settled_without_drafting():
    slots = _Slots()
    slots.admit(0, [1, 2, 3])
    slots.admit(1, [4, 5, 6, 7])
    assert all(slots.run(2 * ROWS_AT_ONCE + 3, undrafted=1e9))
    assert 0 < slots.state.pending.count[0] <= ROWS_AT_ONCE
    slots.run(1, undrafted=0.0)
    slots.check()


@pytest.mark.parametrize("window", [5, 20])  # less than is made at once, and not a multiple of it
def test_no_context_is_made_of_what_has_left_the_window(window):
    slots = _Slots(window)
    slots.admit(0, [1, 2, 3])
    slots.admit(1, [4, 5, 6, 7])
    assert all(slots.run(window + 8, undrafted=1e9))
    assert slots.state.pending.count.tolist() == [window, window]
    slots.admit(1, [8, 9])
    assert all(slots.run(3, undrafted=1e9))
    assert slots.state.pending.count.tolist() == [window, 3]
    assert not np.asarray(slots.state.context_kv.k[:, 0, :, 2:]).any()  # the prompt's rows are all
    assert not any(slots.run(1, undrafted=0.0))
    assert slots.state.pending.count.tolist() == [0, 0]
    slots.check(window)
    assert not np.asarray(slots.state.context_kv.k[:, 0, :, 2 : slots.anchors[0] - window]).any()


def test_a_wide_window_is_settled_like_none():
    slots = _Slots(WIDEST_WINDOW + 1)
    assert slots.state.pending.depth == ROWS_AT_ONCE
    slots.admit(0, [1, 2, 3])
    slots.admit(1, [4, 5, 6, 7])
    assert all(slots.run(ROWS_AT_ONCE + 3, undrafted=1e9))
    slots.run(1, undrafted=0.0)
    slots.check()
