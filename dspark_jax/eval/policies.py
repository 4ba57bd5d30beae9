"""Scheduling policies side by side: the same prompts, a steady load, one process, in turns.

In every heat, each contender starts from a copy of the same prefilled slots and decodes until so
many tokens have come out. Turns are short, so that a slow spell of the machine hits all of them,
and their order is drawn anew every time. End marks are ignored: a request that ended early would
change the load.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import Calibration
from dspark_jax.decode import decode_round, plain_step, prefill, rounds_to_bypass
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


def chosen(field: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Those of the field with these names.

    Raises:
      ValueError: a name is not of the field.
    """
    known = [contender.name for contender in field]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no contenders {unknown}; choose from {known}.")
    return [contender for contender in field if contender.name in names]


class Lane:
    """A contender with its compiled round and its own slots.

    Args:
      contender: how to decode.
      pair: the models.
      rows: R, all slots.
      capacity: C of the slots.
      tables: what rounds are scheduled by.
    """

    def __init__(
        self,
        contender: Contender,
        pair: Pair,
        rows: int,
        capacity: int,
        tables: ScheduleTables,
    ):
        self.contender = contender
        decoder = pair.decoder(
            contender.schedule or ScheduleConfig(), contender.rejection_sample_method
        )
        self._empty = functools.partial(init_state, decoder, rows, capacity, pair.dtype)
        params, begin = shapes_of(pair.params), jax.eval_shape(self._empty)
        self._plain = self._round = self._bypassed = None
        if contender.schedule is None or begin.pending is not None:
            step = functools.partial(plain_step, decoder, rows=rows)
            self._plain = jax.jit(step, donate_argnums=1).lower(params, begin).compile()
        if contender.schedule is not None:
            buckets = schedule_buckets(rows, decoder.num_drafts, decoder.schedule)
            static, speeds = dict(rows=rows, buckets=buckets), shapes_of(tables)
            step = functools.partial(decode_round, decoder, **static)
            self._round = jax.jit(step, donate_argnums=1).lower(params, begin, speeds).compile()
            if begin.pending is not None:
                asks = functools.partial(rounds_to_bypass, decoder, **static)
                self._bypassed = jax.jit(asks).lower(begin, speeds).compile()
        self._params, self._tables, self._num_drafts = pair.params, tables, decoder.num_drafts
        self._state, self.left, self._plain_rounds = None, 0, 0
        self.tokens = self.rounds = self.rows = self.bypassed = 0
        self.seconds = 0.0

    def begin(self, state: DecodeState, tokens: int) -> None:
        """Starts from a copy of these prefilled slots; `tokens` are to come out of them."""
        self._state = None  # its memory is the copy's
        empty = self._empty()
        copied = jax.tree.map(jnp.copy, state.replace(history=None, pending=None))
        self._state = copied.replace(history=empty.history, pending=empty.pending)
        self.left, self._plain_rounds = tokens, 0

    def warm_up(self, state: DecodeState) -> None:
        """Runs every branch once from prefilled slots, since the first run of one is slow."""
        tables = self._tables.replace(steps_per_s=np.ones_like(self._tables.steps_per_s))
        for wanted in range(self._num_drafts + 1) if self._round else ():
            self.begin(state.replace(remaining=jnp.full_like(state.remaining, wanted + 1)), 0)
            self._round(self._params, self._state, tables)
        if self._plain:
            self.begin(state, 0)
            self._plain(self._params, self._state)
        self.begin(state, 0)
        self._run()
        self._state = None

    def turn(self) -> None:
        """Some rounds, as long as there are tokens to come."""
        begin = time.perf_counter()
        for _ in range(TURN):
            if self.left > 0:
                output = self._run()
                emitted = int(output.emit_len.sum())
                self.tokens += emitted
                self.left -= emitted
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
        if self._bypassed and self._plain_rounds == 0:
            self._plain_rounds = int(self._bypassed(self._state, self._tables))
        if self._round is None or self._plain_rounds > 0:
            self._plain_rounds = max(self._plain_rounds - 1, 0)
            self._state, output = self._plain(self._params, self._state)
        else:
            self._state, output = self._round(self._params, self._state, self._tables)
        return jax.device_get(output)


def race(
    pair: Pair,
    field: Sequence[Contender],
    heats: Sequence[Sequence[Request]],
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
      heats: R requests each, decoded together; one heat after another.
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
    rows, drafts = len(heats[0]), pair.draft.config.num_drafts
    longest = max(len(request.prompt_ids) for heat in heats for request in heat)
    capacity = longest + 2 * tokens + 2 * (drafts + 1)
    tables = ScheduleTables(
        steps_per_s=sps.steps_per_s(rows, drafts, longest + tokens // 2),
        **calibration.tables(),
    )
    prefilled = _prefiller(pair, rows, capacity, longest)
    lanes = []
    for i, contender in enumerate(field):
        progress(f"compiling {i + 1}/{len(field)}: {rows} requests, {contender.name}")
        lanes.append(Lane(contender, pair, rows, capacity, tables))
    state = prefilled(heats[0])
    for lane in lanes:
        lane.warm_up(state)
    draw = np.random.default_rng(0)
    for i, heat in enumerate(heats):
        progress(
            f"{rows} requests, heat {i + 1}/{len(heats)}: {len(lanes)} contenders, {tokens} "
            "tokens per request each"
        )
        state = prefilled(heat)
        for lane in lanes:
            lane.begin(state, tokens * rows)
        while any(lane.left > 0 for lane in lanes):
            for lane in draw.permutation(lanes):  # what ran before says how warm the caches are
                lane.turn()
    return [lane.outcome() for lane in lanes]


def _prefiller(
    pair: Pair, rows: int, capacity: int, width: int
) -> Callable[[Sequence[Request]], DecodeState]:
    """Fills slots with prompts of at most `width` tokens, about to decode to their slots' end."""
    decoder = pair.decoder()
    fill = jax.jit(functools.partial(prefill, decoder), donate_argnums=1)
    enter = jax.jit(admit, donate_argnums=0)

    def prefilled(requests: Sequence[Request]) -> DecodeState:
        state = init_state(decoder, rows, capacity, pair.dtype)
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

    return prefilled
