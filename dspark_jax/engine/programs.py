"""The compiled programs of an engine: all of them before the first request, none after."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import decode_round, plain_step, prefill, rounds_to_bypass
from dspark_jax.engine.requests import Request
from dspark_jax.engine.spread import Spread
from dspark_jax.layouts import keep_layouts
from dspark_jax.paged_attention import check_pages
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.state import Decoder, DecodeState, admit, init_state, release
from dspark_jax.types import PairParams, SamplingParams, ScheduleTables

PREFILL_CHUNKS = (32, 128, 512)  # prompt rows per prefill program
FIXED_FRACTIONS = (0.0, 0.5, 1.0)
ADAPTIVE_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)


def row_buckets(rows: int, num_drafts: int, *, adaptive: bool) -> tuple[int, ...]:
    """Numbers of flat verify rows to compile for R requests.

    Args:
      rows: R.
      num_drafts: K.
      adaptive: more steps, for policies that vary the verify length.

    Returns:
      Increasing row counts from R to R*(K+1).
    """
    fractions = ADAPTIVE_FRACTIONS if adaptive else FIXED_FRACTIONS
    return tuple(sorted({rows + math.ceil(f * rows * num_drafts) for f in fractions}))


def row_widths(slots: int) -> tuple[int, ...]:
    """Batch widths R to compile: powers of two up to the number of slots."""
    powers = [2**i for i in range(slots.bit_length()) if 2**i < slots]
    return (*powers, slots)


def schedule_buckets(rows: int, num_drafts: int, schedule: ScheduleConfig) -> tuple[int, ...]:
    """Numbers of flat verify rows to compile for R requests of a policy.

    Args:
      rows: R.
      num_drafts: K.
      schedule: the policy and its bounds; probes verify every draft whatever the bounds.

    Returns:
      Increasing row counts; the last holds every schedule.
    """
    longest = num_drafts
    if schedule.max_verify_len is not None and schedule.probe_every == 0:
        longest = min(longest, schedule.max_verify_len)
    return row_buckets(rows, longest, adaptive=schedule.policy != "full")


def schedule_table_shapes(rows: int, num_drafts: int) -> ScheduleTables:
    """Shapes of the tables a round of R requests and K drafts takes."""
    by_position = jax.ShapeDtypeStruct((num_drafts,), np.float32)
    return ScheduleTables(
        steps_per_s=jax.ShapeDtypeStruct((rows * (num_drafts + 1) + 1,), np.float32),
        sts_temperatures=by_position,
        sts_temperatures_presampled=by_position,
        neutral_confidence=by_position,
    )


def sampling_of(request: Request, vocab_size: int) -> SamplingParams:
    """A request's settings as the scalars that `admit` takes."""
    return SamplingParams(
        temperature=np.float32(request.temperature),
        top_k=np.int32(min(request.top_k, vocab_size)),
        top_p=np.float32(request.top_p),
        min_p=np.float32(request.min_p),
        seed=np.uint32(request.seed32),
    )


def shapes_of(tree: Any) -> Any:
    """Arrays as shapes, to compile for."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


class Programs:
    """Every program an engine runs, compiled ahead of time.

    Args:
      decoder: the models and the rules.
      params: parameters, for their shapes.
      slots: S.
      capacity: C, tokens per slot.
      dtype: type of the caches.
      progress: told the name of each program before it is compiled.
      mesh: to spread slots and models over; None uses one device.

    Raises:
      ValueError: the target has a paged cache that no kernel of the TPU at hand can read.

    Attributes:
      groups: of slots that decode on their own, side by side; 1 without a mesh.
      group_slots: slots of each.
      widths: batch widths R of a group's programs.
      round: by width, the round that chooses its verify rows itself.
      planned: by width and verify rows, where the host chooses these; `round` is then empty.
      plain: by width, the plain step, where there is no draft or rounds may do without it.
      bypassed: by width, how many coming rounds should; empty where every round drafts.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: PairParams,
        *,
        slots: int,
        capacity: int,
        dtype: jnp.dtype,
        progress: Callable[[str], None] = lambda message: None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        _check_cache(decoder, dtype, mesh)
        self.decoder = decoder
        self.capacity = capacity
        self.chunks = tuple(c for c in PREFILL_CHUNKS if c < capacity) or (capacity,)
        self.groups, self.group_slots, self.spread = 1, slots, None
        self._params = shapes_of(params)
        if mesh is None:
            self._make_state = functools.partial(init_state, decoder, slots, capacity, dtype)
            self._state = jax.eval_shape(self._make_state)
        else:
            self.spread = Spread(mesh, decoder, slots=slots, capacity=capacity, dtype=dtype)
            self.groups, self.group_slots = self.spread.groups, self.spread.group_slots
            self._params, self._state = self.spread.params(self._params), self.spread.state
        self._params = keep_layouts(self._params, params)
        self.widths = row_widths(self.group_slots)
        self.prefill, self.round, self.planned, self.plain, self.bypassed = {}, {}, {}, {}, {}
        jobs = list(self._jobs())
        for i, (name, table, key, job) in enumerate(jobs):
            progress(f"compiling {i + 1}/{len(jobs)}: {name}")
            table[key] = job()
        self.admit = self._compile(admit, self._state, *_ints(4), _sampling_shape())
        self.release = self._compile(release, self._state, *_ints(1))

    def new_state(self) -> DecodeState:
        """Empty slots."""
        if self.spread is not None:
            return self.spread.new_state()
        return jax.jit(self._make_state)()

    def put_slots(self, values: np.ndarray) -> np.ndarray | jax.Array:
        """An array by slot [S] as the programs take it."""
        return values if self.spread is None else self.spread.put_slots(values)

    def buckets(self, rows: int) -> tuple[int, ...]:
        """Flat verify rows compiled for width `rows`."""
        return schedule_buckets(rows, self.decoder.num_drafts, self.decoder.schedule)

    def round_of(self, rows: int, bucket: int) -> Callable:
        """The round for width `rows`; where the host plans, the one that verifies `bucket` rows."""
        return self.planned[rows, bucket] if self.planned else self.round[rows]

    def _jobs(self) -> Iterator[tuple[str, dict, int, Callable]]:
        prefills = functools.partial(prefill, self.decoder)
        if self.spread is not None:
            prefills = self.spread.prefill()
        for chunk in self.chunks:
            tokens = jax.ShapeDtypeStruct((chunk,), np.int32)
            yield f"prefill of {chunk} tokens", self.prefill, chunk, functools.partial(
                self._compile, prefills,
                self._params, self._state, *_ints(1), tokens, *_ints(2), donate=1,
            )  # fmt: skip
        drafts = self.decoder.draft is not None
        bypassing = self._state.pending is not None
        for rows in self.widths:
            if bypassing or not drafts:
                yield f"plain step of {rows} requests", self.plain, rows, functools.partial(
                    self._compile, self._plain(rows), self._params, self._state,
                    donate=1, output=True,
                )  # fmt: skip
            if not drafts:
                continue
            tables = schedule_table_shapes(rows, self.decoder.num_drafts)
            by_host = self.decoder.schedule.planner == "host"
            buckets = self.buckets(rows)
            if bypassing:
                yield f"bypass of {rows} requests", self.bypassed, rows, functools.partial(
                    self._compile, self._bypassed(rows, buckets), self._state, tables,
                    donate=None, output=True,
                )  # fmt: skip
            for choice in [(b,) for b in buckets] if by_host else [buckets]:
                name = f"round of {rows} requests" + (f", {choice[0]} rows" if by_host else "")
                key = (rows, choice[0]) if by_host else rows
                yield name, self.planned if by_host else self.round, key, functools.partial(
                    self._compile, self._round(rows, choice), self._params, self._state, tables,
                    donate=1, output=True,
                )  # fmt: skip

    def _plain(self, rows: int) -> Callable:
        if self.spread is not None:
            return self.spread.plain_step(rows)
        return functools.partial(plain_step, self.decoder, rows=rows)

    def _round(self, rows: int, buckets: tuple[int, ...]) -> Callable:
        if self.spread is not None:
            return self.spread.decode_round(rows, buckets)
        return functools.partial(decode_round, self.decoder, rows=rows, buckets=buckets)

    def _bypassed(self, rows: int, buckets: tuple[int, ...]) -> Callable:
        if self.spread is not None:
            return self.spread.rounds_to_bypass(rows, buckets)
        return functools.partial(rounds_to_bypass, self.decoder, rows=rows, buckets=buckets)

    def _compile(
        self, function: Callable, *shapes: object, donate: int | None = 0, output: bool = False
    ) -> Callable:
        """Compiles a function that returns the donated state and, where `output`, one for the host.

        Where nothing is donated it returns the output alone.
        """
        if self.spread is not None:
            return self.spread.compile(function, *shapes, donate=donate, output=output)
        return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()


def _check_cache(decoder: Decoder, dtype: jnp.dtype, mesh: jax.sharding.Mesh | None) -> None:
    """Refuses a paged cache that a TPU's kernel could not read, rather than be slow."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if decoder.target.paged and platform == "tpu":
        config, parts = decoder.target.config, 1 if mesh is None else mesh.shape["model"]
        check_pages(config.num_key_value_heads // parts, config.head_dim, dtype)


def _ints(count: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((), np.int32)] * count


def _sampling_shape() -> SamplingParams:
    return SamplingParams(
        temperature=jax.ShapeDtypeStruct((), np.float32),
        top_k=jax.ShapeDtypeStruct((), np.int32),
        top_p=jax.ShapeDtypeStruct((), np.float32),
        min_p=jax.ShapeDtypeStruct((), np.float32),
        seed=jax.ShapeDtypeStruct((), np.uint32),
    )
