"""Scheduling policies side by side: the same prompts, a steady load, one process, in turns.

Every contender starts from a copy of the same prefilled slots and decodes until so many tokens
have come out. Turns are short, so that a slow spell of the machine hits all of them. End marks are
ignored: a request that ended early would change the load.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import Calibration
from dspark_jax.decode import decode_round, is_bypassed, plain_step, prefill
from dspark_jax.engine.load import Pair
from dspark_jax.engine.programs import (
    sampling_of,
    schedule_buckets,
    shapes_of,
)
from dspark_jax.engine.requests import Request
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sps import SpsTable
from dspark_jax.state import DecodeState, admit, init_state
from dspark_jax.types import RoundOutput, ScheduleTables

TURN = 4  # rounds of a contender before the next one's turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to decode.

    Attributes:
      name: for the table.
      schedule: None decodes plainly.
      rejection_sample_method: of its verification.
    """

    name: str
    schedule: ScheduleConfig | None
    rejection_sample_method: str = "standard"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a contender did.

    Attributes:
      name: of the contender.
      tokens: emitted by all requests together.
      rounds: run.
      seconds: of those rounds, host included.
      rows: flat rows that the target computed.
      bypassed: rounds without drafts.
    """

    name: str
    tokens: int
    rounds: int
    seconds: float
    rows: int
    bypassed: int

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds


def contenders(num_drafts: int, *, threshold: float, min_predicted_gain: float) -> list[Contender]:
    """No drafts, every fixed length, and every policy as it would be served.

    Args:
      num_drafts: K.
      threshold: of the policy `threshold`, on the survival.
      min_predicted_gain: of the policies that read speeds.

    Returns:
      "none", "fixed 1" .. "fixed K-1", "full", and the policies.
    """
    fixed = [
        Contender(name=f"fixed {k}", schedule=ScheduleConfig(max_verify_len=k))
        for k in range(1, num_drafts)
    ]
    by_speed = [
        Contender(
            name=policy,
            schedule=ScheduleConfig(policy=policy, min_predicted_gain=min_predicted_gain),
            rejection_sample_method="coupled" if policy == "global" else "standard",
        )
        for policy in ("early_stop", "lagged", "presampled", "global")
    ]
    return [
        Contender(name="none", schedule=None),
        *fixed,
        Contender(name="full", schedule=ScheduleConfig()),
        Contender(
            name="threshold",
            schedule=ScheduleConfig(
                policy="threshold", confidence_threshold=threshold, threshold_kind="cumulative"
            ),
        ),
        *by_speed,
    ]


class Lane:
    """A contender with its compiled round and its own slots.

    Args:
      contender: how to decode.
      pair: the models.
      state: prefilled slots; copied.
      rows: R, all slots.
      tables: what rounds are scheduled by.
    """

    def __init__(
        self,
        contender: Contender,
        pair: Pair,
        state: DecodeState,
        rows: int,
        tables: ScheduleTables,
    ):
        self.contender = contender
        decoder = pair.decoder(
            contender.schedule or ScheduleConfig(), contender.rejection_sample_method
        )
        own = init_state(decoder, rows, state.target_kv.capacity, pair.dtype)
        self._begin = state.replace(history=own.history, pending=own.pending)
        self._plain = self._round = self._is_bypassed = None
        params, begin = shapes_of((pair.params, self._begin))
        if contender.schedule is None or own.pending is not None:
            step = functools.partial(plain_step, decoder, rows=rows)
            self._plain = jax.jit(step, donate_argnums=1).lower(params, begin).compile()
        if contender.schedule is not None:
            buckets = schedule_buckets(rows, decoder.num_drafts, decoder.schedule)
            static, speeds = dict(rows=rows, buckets=buckets), shapes_of(tables)
            step = functools.partial(decode_round, decoder, **static)
            self._round = jax.jit(step, donate_argnums=1).lower(params, begin, speeds).compile()
            if own.pending is not None:
                asks = functools.partial(is_bypassed, decoder, **static)
                self._is_bypassed = jax.jit(asks).lower(begin, speeds).compile()
        self._params, self._state, self._tables = pair.params, None, tables
        self._num_drafts = decoder.num_drafts
        self.tokens = self.rounds = self.rows = self.bypassed = 0
        self.seconds = 0.0

    def warm_up(self) -> None:
        """Runs every branch once, since the first run of one is slow, and begins anew."""
        rows = self._begin.anchor.shape[0]
        tables = self._tables.replace(steps_per_s=np.ones_like(self._tables.steps_per_s))
        for wanted in range(self._num_drafts + 1) if self._round else ():
            self._restart()
            self._state = self._state.replace(remaining=jnp.full(rows, wanted + 1, jnp.int32))
            self._round(self._params, self._state, tables)
        if self._plain:
            self._restart()
            self._plain(self._params, self._state)
        self._restart()
        self._run()
        self._restart()

    def _restart(self) -> None:
        self._state = jax.tree.map(jnp.copy, self._begin)

    def turn(self, until: int) -> None:
        """Some rounds, as long as there are fewer than `until` tokens."""
        begin = time.perf_counter()
        for _ in range(TURN):
            if self.tokens < until:
                output = self._run()
                self.tokens += int(output.emit_len.sum())
                self.rounds += 1
                self.rows += int(output.verify_rows)
                self.bypassed += int(output.bypassed)
        self.seconds += time.perf_counter() - begin

    def outcome(self) -> Outcome:
        """What it did so far."""
        return Outcome(
            name=self.contender.name, tokens=self.tokens, rounds=self.rounds, rows=self.rows,
            seconds=self.seconds, bypassed=self.bypassed,
        )  # fmt: skip

    def _run(self) -> RoundOutput:
        if self._round is None or (
            self._is_bypassed and self._is_bypassed(self._state, self._tables)
        ):
            self._state, output = self._plain(self._params, self._state)
        else:
            self._state, output = self._round(self._params, self._state, self._tables)
        return jax.device_get(output)


def race(
    pair: Pair,
    field: Sequence[Contender],
    requests: Sequence[Request],
    *,
    tokens: int,
    sps: SpsTable,
    calibration: Calibration,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Outcome]:
    """Runs all contenders at a load of one slot per request.

    Args:
      pair: models with a draft.
      field: the contenders.
      requests: R of them, decoded together.
      tokens: per request, to come out of every contender.
      sps: speeds measured on this device.
      calibration: of the confidences.
      progress: told of every compilation.

    Returns:
      One outcome per contender, in order.

    Raises:
      ValueError: there is no draft, or the table does not reach R.
    """
    if pair.draft is None:
        raise ValueError("policies are compared on a pair with a draft; choose one with --draft.")
    rows, drafts = len(requests), pair.draft.config.num_drafts
    longest = max(len(request.prompt_ids) for request in requests)
    capacity = longest + 2 * tokens + 2 * (drafts + 1)
    tables = ScheduleTables(
        steps_per_s=sps.steps_per_s(rows, drafts, longest + tokens // 2),
        **calibration.tables(),
    )
    state = _prefilled(pair, requests, capacity)
    lanes = []
    for i, contender in enumerate(field):
        progress(f"compiling {i + 1}/{len(field)}: {rows} requests, {contender.name}")
        lanes.append(Lane(contender, pair, state, rows, tables))
    for lane in lanes:
        lane.warm_up()
    progress(f"{rows} requests: {len(lanes)} contenders, {tokens} tokens per request each")
    until = tokens * rows
    while min(lane.tokens for lane in lanes) < until:
        for lane in lanes:
            lane.turn(until)
    return [lane.outcome() for lane in lanes]


def _prefilled(pair: Pair, requests: Sequence[Request], capacity: int) -> DecodeState:
    """Slots that hold the prompts, each about to decode with room to the end of its slot."""
    decoder = pair.decoder()
    state = init_state(decoder, len(requests), capacity, pair.dtype)
    width = max(len(request.prompt_ids) for request in requests)
    fill = jax.jit(functools.partial(prefill, decoder), donate_argnums=1)
    enter = jax.jit(admit, donate_argnums=0)
    for slot, request in enumerate(requests):
        ids, count = request.prompt_ids, len(request.prompt_ids) - 1
        tokens = np.zeros(width, np.int32)
        tokens[:count] = ids[:-1]
        state = fill(pair.params, state, np.int32(slot), tokens, np.int32(0), np.int32(count))
        sampling = sampling_of(request, pair.target.config.vocab_size)
        state = enter(
            state, np.int32(slot), np.int32(ids[-1]), np.int32(count),
            np.int32(capacity - len(ids)), sampling,
        )  # fmt: skip
    return state
