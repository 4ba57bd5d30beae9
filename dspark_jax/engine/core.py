"""The engine: waiting requests, slots, and one step of the host loop.

It is synchronous and single-threaded: `step` does one prefill chunk and one round, and returns
what every request gained. Who calls it, and who waits for what, is the server's business.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.engine.bypass import Bypass
from dspark_jax.engine.counters import Counters
from dspark_jax.engine.planner import RowPlanner
from dspark_jax.engine.programs import Programs, sampling_of
from dspark_jax.engine.requests import (
    Emission,
    FinishReason,
    PromptTooLongError,
    Request,
    RequestError,
    Sequence,
)
from dspark_jax.engine.spread import split_output
from dspark_jax.layouts import place_layouts
from dspark_jax.state import Decoder
from dspark_jax.tokenizer import Tokenizer
from dspark_jax.types import PairParams, RoundOutput, ScheduleTables


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A round that was started: whom it is for, by slot, and its output, perhaps not there yet."""

    sequences: dict[int, Sequence]
    output: RoundOutput


class Engine:
    """Serves requests on a fixed number of slots.

    Args:
      decoder: the models and the rules.
      params: their parameters.
      slots: requests decoded together.
      capacity: tokens per slot, prompt and answer.
      dtype: type of the caches.
      tokenizer: for text and stop strings; None serves token ids only.
      progress: told what is being compiled.
      mesh: that `params` lie on (see `place_pair`); None uses one device.

    Attributes:
      on_round: called after every round with each request it was for, the output of its group on
        the host, and its row there; None calls nobody.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: PairParams,
        *,
        slots: int,
        capacity: int,
        dtype: jnp.dtype = jnp.float32,
        tokenizer: Tokenizer | None = None,
        progress: Callable[[str], None] = lambda message: None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        if slots < 1 or capacity < 2:
            raise ValueError(
                f"slots={slots} and capacity={capacity}; expected at least 1 slot of 2 tokens."
            )
        if jax.default_backend() == "tpu":
            params = place_layouts(params)
        self.decoder, self.params, self.tokenizer = decoder, params, tokenizer
        self.slots, self.capacity = slots, capacity
        self.programs = Programs(
            decoder, params, slots=slots, capacity=capacity, dtype=dtype, progress=progress,
            mesh=mesh,
        )  # fmt: skip
        self.reset_counters()
        self.steps_per_s = {
            rows: np.ones(rows * (decoder.num_drafts + 1) + 1, np.float32)
            for rows in self.programs.widths
        }
        self.sts_temperatures = np.ones(decoder.num_drafts, np.float32)
        self.sts_temperatures_presampled = np.ones(decoder.num_drafts, np.float32)
        self.neutral_confidence = np.ones(decoder.num_drafts, np.float32)
        self.on_round: Callable[[Sequence, RoundOutput, int], None] | None = None
        self._bypass = Bypass()
        self._planner = None
        if self.programs.planned:
            self._planner = RowPlanner(decoder.schedule, slots, decoder.num_drafts)
        self._state = self.programs.new_state()
        self._flying: collections.deque[_Flight] = collections.deque()  # oldest first
        self._running: dict[int, Sequence] = {}  # slot -> sequence
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._prefilling: tuple[int, Sequence] | None = None

    def reset_counters(self) -> None:
        """Starts counting afresh."""
        self.counters = Counters.zero(self.decoder.num_drafts)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running) + (self._prefilling is not None)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Would `step` do anything?"""
        return self.num_running + self.num_waiting > 0

    def submit(self, request: Request) -> Sequence:
        """Queues a request.

        Args:
          request: what to generate.

        Returns:
          The sequence to watch; its emissions come from `step`.

        Raises:
          RequestError: prompt and answer do not fit a slot, or a token id does not exist.
        """
        self.check(request)
        sequence = Sequence(request, self.tokenizer, time.monotonic())
        self._waiting.append(sequence)
        return sequence

    def check(self, request: Request) -> None:
        """Raises RequestError if this engine cannot serve the request."""
        prompt = len(request.prompt_ids)
        if prompt + request.max_tokens > self.capacity:
            expected = (
                f"at most {self.capacity} tokens with the answer (prompt {prompt}, max_tokens "
                f"{request.max_tokens}); shorten the prompt or lower max_tokens"
            )
            if prompt >= self.capacity:
                raise PromptTooLongError("prompt", f"{prompt} tokens", expected)
            raise RequestError("max_tokens", request.max_tokens, expected)
        vocab = self.decoder.target.config.vocab_size
        bad = [i for i in request.prompt_ids if not 0 <= i < vocab]
        if bad:
            raise RequestError("prompt", bad[:5], f"token ids between 0 and {vocab - 1}")

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request wherever it is; its slot is free at once."""
        sequence.cancel()
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if self._prefilling and self._prefilling[1] is sequence:
            self._prefilling = None
        for slot, running in list(self._running.items()):
            if running is sequence:
                self._free(slot)

    def step(self) -> list[Emission]:
        """One prefill chunk for a newcomer, and one round for those who are ready.

        Returns:
          One emission for each request that gained tokens or ended.
        """
        self._prefill_some()
        if not self._running:
            self._flying.clear()  # rounds that turned out to be for nobody
            return []
        begin = time.perf_counter()
        ahead = self.decoder.schedule.lag - 1 if self._planner else 0
        while len(self._flying) <= ahead:
            self._flying.append(self._start_round())
        flight = self._flying.popleft()
        output = jax.device_get(flight.output)
        self.counters.round_s += time.perf_counter() - begin
        grouped = self.programs.spread is not None
        outputs = split_output(output, self.programs.groups) if grouped else [output]
        return self._commit(flight.sequences, outputs)

    def idle(self) -> None:
        """Called now and then while there is no work; nothing to do for a process on its own."""

    def close(self) -> None:
        """Called when there is no more work to come; nothing to do for a process on its own."""

    def run(self, requests: Iterable[Request]) -> list[Sequence]:
        """Runs requests to their end, batched into the slots.

        Args:
          requests: what to generate.

        Returns:
          Finished sequences, in order.
        """
        sequences = [self.submit(request) for request in requests]
        while self.has_work:
            self.step()
        return sequences

    def tables(self, steps_per_s: np.ndarray) -> ScheduleTables:
        """What a round schedules by: speeds f32[R*(K+1)+1], and the engine's calibration."""
        return ScheduleTables(
            steps_per_s=steps_per_s,
            sts_temperatures=self.sts_temperatures,
            sts_temperatures_presampled=self.sts_temperatures_presampled,
            neutral_confidence=self.neutral_confidence,
        )

    def _place(self, slot: int) -> tuple[int, int]:
        """The group of a slot, and its row there."""
        return divmod(slot, self.programs.group_slots)

    def _start_round(self) -> "_Flight":
        """Starts one round of all groups and does not wait for it."""
        highest = max(self._place(slot)[1] for slot in self._running)
        rows = next(w for w in self.programs.widths if w > highest)
        steps = self.steps_per_s[rows]
        if self._starts_plain(rows, steps):
            self._state, output = self.programs.plain[rows](self.params, self._state)
            return _Flight(dict(self._running), output)
        bucket = self._plan(rows, steps) if self._planner is not None else 0
        program = self.programs.round_of(rows, bucket)
        self._state, output = program(self.params, self._state, self.tables(steps))
        return _Flight(dict(self._running), output)

    def _starts_plain(self, rows: int, steps_per_s: np.ndarray) -> bool:
        """Is the round that starts now a plain step? Where one group of slots drafts, all do."""
        if self.decoder.draft is None:
            return True
        if not self.programs.bypassed:
            return False

        def rounds_to_bypass() -> int:
            rounds = self.programs.bypassed[rows](self._state, self.tables(steps_per_s))
            return int(np.min(jax.device_get(rounds)))

        return self._bypass.begins(rounds_to_bypass)

    def _plan(self, rows: int, steps_per_s: np.ndarray) -> int:
        """Rows of every group in the next round: as the group needs that wants most."""
        buckets = self.programs.buckets(rows)
        groups: dict[int, list[int]] = {}
        for slot in self._running:
            groups.setdefault(self._place(slot)[0], []).append(slot)
        known = steps_per_s, buckets, self.neutral_confidence
        return max(self._planner.plan(group, *known) for group in groups.values())

    def _prefill_some(self) -> None:
        if self._prefilling is None:
            if not self._waiting or len(self._running) == self.slots:
                return
            free = set(range(self.slots)) - set(self._running)
            slot = min(free, key=lambda slot: self._place(slot)[::-1])  # groups take turns
            self._prefilling = (slot, self._waiting.popleft())
        slot, sequence = self._prefilling
        prompt = sequence.request.prompt_ids
        left = len(prompt) - 1 - sequence.prefilled
        if left > 0:
            chunks = self.programs.chunks
            chunk = next((c for c in chunks if c >= left), chunks[-1])
            count = min(left, chunk)
            tokens = np.zeros(chunk, np.int32)
            tokens[:count] = prompt[sequence.prefilled : sequence.prefilled + count]
            begin = time.perf_counter()
            self._state = self.programs.prefill[chunk](
                self.params, self._state, np.int32(slot), tokens,
                np.int32(sequence.prefilled), np.int32(count),
            )  # fmt: skip
            jax.block_until_ready(self._state.anchor)
            self.counters.prefill_s += time.perf_counter() - begin
            sequence.prefilled += count
            if sequence.prefilled < len(prompt) - 1:
                return
        self._admit(slot, sequence)
        self._prefilling = None

    def _admit(self, slot: int, sequence: Sequence) -> None:
        request = sequence.request
        sampling = sampling_of(request, self.decoder.target.config.vocab_size)
        position = len(request.prompt_ids) - 1
        self._state = self.programs.admit(
            self._state, np.int32(slot), np.int32(request.prompt_ids[-1]), np.int32(position),
            np.int32(request.max_tokens), sampling,
        )  # fmt: skip
        self.counters.prompt_tokens += len(request.prompt_ids)
        self._running[slot] = sequence
        self._bypass.forget()
        if self._planner is not None:
            self._planner.admit(slot)

    def _commit(self, sequences: dict[int, Sequence], outputs: list[RoundOutput]) -> list[Emission]:
        emissions = []
        self.counters.count_round(outputs)
        for slot, sequence in sorted(sequences.items()):
            if sequence.finish_reason is not None:  # ended while the round was on its way
                continue
            group, row = self._place(slot)
            output = outputs[group]
            if self._planner is not None:
                self._planner.observe(slot, output, row)
            if self.on_round is not None:
                self.on_round(sequence, output, row)
            before = len(sequence.token_ids)
            for token in output.tokens[row, : int(output.emit_len[row])]:
                sequence.commit(int(token))
            gained = len(sequence.token_ids) - before
            accepted = min(int(output.accept_len[row]), gained)  # none past the end
            sequence.rounds += 1
            sequence.drafted += int(output.verify_len[row])
            sequence.accepted += accepted
            self.counters.count_request(output, row, accepted, gained)
            if sequence.finish_reason is not None:
                self._free(slot)
                self.counters.finished += 1
            emissions.append(sequence.take_emission())
        return emissions

    def _free(self, slot: int) -> None:
        sequence = self._running.pop(slot)
        self._bypass.forget()
        if sequence.finish_reason is not FinishReason.LENGTH:  # at the limit it goes idle itself
            self._state = self.programs.release(self._state, np.int32(slot))
