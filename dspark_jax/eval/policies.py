"""Scheduling policies side by side: the same prompts, a steady load, one process, in turns.

In every heat, each contender starts from a copy of the same prefilled slots and decodes until so
many tokens have come out. Turns are short, so that a slow spell of the machine hits all of them,
and their order is drawn anew every time. End marks are ignored: a request that ended early would
change the load. How far to trust a comparison, the heats say: see `speed_ratio`.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import Calibration
from dspark_jax.decode import decode_round, plain_step, prefill, rounds_to_bypass
from dspark_jax.engine.bypass import Bypass
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

TURN = 0.1  # seconds after which no further round begins before the next one's turn


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
      heat_tokens: emitted by all requests together, by heat.
      heat_seconds: of the rounds of each heat, host included.
      rounds: run.
      rows: flat rows that the target computed.
      bypassed: rounds without drafts.
    """

    name: str
    heat_tokens: tuple[int, ...]
    heat_seconds: tuple[float, ...]
    rounds: int
    rows: int
    bypassed: int

    @property
    def tokens(self) -> int:
        """Of all heats."""
        return sum(self.heat_tokens)

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.tokens / sum(self.heat_seconds)


def speed_ratio(outcome: Outcome, reference: Outcome) -> tuple[float, float]:
    """How fast one contender was in units of another's speed.

    Args:
      outcome: of a race.
      reference: of the same race.

    Returns:
      The ratio of tokens/s over all heats, and its standard error by the jackknife, which leaves
      out one heat at a time: prompts and machine together. NaN for a single heat.
    """
    ratio = outcome.tokens_per_s / reference.tokens_per_s
    heats = len(outcome.heat_tokens)
    if heats == 1:
        return ratio, math.nan

    def without_each(o: Outcome) -> np.ndarray:
        tokens, seconds = np.array(o.heat_tokens), np.array(o.heat_seconds)
        return (tokens.sum() - tokens) / (seconds.sum() - seconds)

    ratios = without_each(outcome) / without_each(reference)
    return ratio, math.sqrt((heats - 1) * ratios.var())


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
        empty = functools.partial(init_state, decoder, rows, capacity, pair.dtype)
        params, begin = shapes_of(pair.params), jax.eval_shape(empty)

        def restart(own: DecodeState, state: DecodeState) -> DecodeState:
            """Copies a state to where this contender's lies; nothing is learnt yet."""
            return state.replace(history=empty().history, pending=empty().pending)

        self._restart = jax.jit(restart, donate_argnums=0, keep_unused=True)
        self._plain = self._round = self._asked = None
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
                self._asked = jax.jit(asks).lower(begin, speeds).compile()
        self._params, self._tables, self._num_drafts = pair.params, tables, decoder.num_drafts
        self._state, self.left, self._bypass = jax.jit(empty)(), 0, Bypass()
        self.rounds = self.rows = self.bypassed = 0
        self.heat_tokens, self.heat_seconds = [], []

    def begin(self, state: DecodeState, tokens: int) -> None:
        """Starts a heat from these prefilled slots; `tokens` are to come out of them."""
        self._load(state)
        self.left = tokens
        self.heat_tokens.append(0)
        self.heat_seconds.append(0.0)

    def warm_up(self, state: DecodeState) -> None:
        """Runs every branch once from prefilled slots, since the first run of one is slow."""
        tables = self._tables.replace(steps_per_s=np.ones_like(self._tables.steps_per_s))
        for wanted in range(self._num_drafts + 1) if self._round else ():
            self._load(state.replace(remaining=jnp.full_like(state.remaining, wanted + 1)))
            self._state, _ = self._round(self._params, self._state, tables)
        if self._plain:
            self._load(state)
            self._state, _ = self._plain(self._params, self._state)
        self._load(state)
        self._run()

    def turn(self) -> None:
        """Some rounds, as long as there are tokens to come."""
        begin, passed = time.perf_counter(), 0.0
        while self.left > 0 and passed < TURN:
            output = self._run()
            emitted = int(output.emit_len.sum())
            self.heat_tokens[-1] += emitted
            self.left -= emitted
            self.rounds += 1
            self.rows += int(output.verify_rows)
            self.bypassed += int(output.bypassed)
            passed = time.perf_counter() - begin
        self.heat_seconds[-1] += passed

    def outcome(self) -> Outcome:
        """What it did so far."""
        return Outcome(
            name=self.contender.name, heat_tokens=tuple(self.heat_tokens),
            heat_seconds=tuple(self.heat_seconds), rounds=self.rounds, rows=self.rows,
            bypassed=self.bypassed,
        )  # fmt: skip

    def _load(self, state: DecodeState) -> None:
        self._state = self._restart(self._state, state)
        self._bypass.forget()

    def _run(self) -> RoundOutput:
        plain = self._round is None
        if self._asked:
            plain = self._bypass.begins(lambda: int(self._asked(self._state, self._tables)))
        if plain:
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
    prefilled = _prefiller(pair, capacity, longest)
    lanes = []
    for i, contender in enumerate(field):
        progress(f"compiling {i + 1}/{len(field)}: {rows} requests, {contender.name}")
        lanes.append(Lane(contender, pair, rows, capacity, tables))
    state = prefilled(init_state(pair.decoder(), rows, capacity, pair.dtype), heats[0])
    for lane in lanes:
        lane.warm_up(state)
    draw = np.random.default_rng(0)
    for i, heat in enumerate(heats):
        progress(
            f"{rows} requests, heat {i + 1}/{len(heats)}: {len(lanes)} contenders, {tokens} "
            "tokens per request each"
        )
        state = prefilled(state, heat)
        for lane in lanes:
            lane.begin(state, tokens * rows)
        while running := [lane for lane in lanes if lane.left > 0]:
            for lane in draw.permutation(running):  # what ran before says how warm the caches are
                lane.turn()
    return [lane.outcome() for lane in lanes]


def _prefiller(
    pair: Pair, capacity: int, width: int
) -> Callable[[DecodeState, Sequence[Request]], DecodeState]:
    """Fills slots, whose state it takes, with prompts of at most `width` tokens.

    They are about to decode to their slots' end.
    """
    decoder = pair.decoder()
    fill = jax.jit(functools.partial(prefill, decoder), donate_argnums=1)
    enter = jax.jit(admit, donate_argnums=0)

    def prefilled(state: DecodeState, requests: Sequence[Request]) -> DecodeState:
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
