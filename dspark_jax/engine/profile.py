"""SPS(B): how many rounds a second the compiled programs run, by verified rows.

Measured on the device at hand, read from a table made earlier, or modelled from what the programs
say they cost.
"""

import functools
import os
import platform
import time
from collections.abc import Callable, Iterable

import jax
import numpy as np

from dspark_jax import __version__
from dspark_jax.calibrate import load_calibration
from dspark_jax.config_deepseek import DeepseekDraftConfig
from dspark_jax.decode import decode_round
from dspark_jax.draft.protocol import Draft
from dspark_jax.engine.core import Engine
from dspark_jax.engine.load import Pair
from dspark_jax.engine.processes import agree
from dspark_jax.engine.programs import (
    row_buckets,
    row_widths,
    schedule_table_shapes,
    shapes_of,
)
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sps import Chip, Curve, SpsKey, SpsTable, load_sps_table, roofline_table
from dspark_jax.state import DecodeState, init_state

REPEATS = 5  # chains timed per bucket; the median counts
CHAIN = 3  # rounds started without waiting for one another


def sps_key(pair: Pair) -> SpsKey:
    """What a table for this device and these models is made for.

    The draft counts by what sets its cost, so that training it further leaves tables valid.
    """
    kind = jax.devices()[0].device_kind
    if kind == "cpu":
        kind = f"{os.cpu_count()}-core {platform.machine()} cpu"
    if pair.mesh is not None:
        axes = ",".join(f"{axis}={size}" for axis, size in pair.mesh.shape.items())
        kind = f"{kind} as {axes}"
    return SpsKey(
        device=f"{jax.device_count()}x {kind}", model=pair.name, draft=draft_key(pair.draft),
        dtype=np.dtype(pair.dtype).name,
        versions=(("dspark_jax", __version__), ("jax", jax.__version__)),
    )  # fmt: skip


def draft_key(draft: Draft | None) -> str:
    """What of a draft sets its cost, in words."""
    if draft is None:
        return "none"
    config = draft.config
    if isinstance(config, DeepseekDraftConfig):
        layers, kind = config.num_stages, "vanilla"
    else:
        layers, kind = config.num_hidden_layers, config.markov_head_type or "no"
    return (
        f"{layers} layers of width {config.hidden_size}, {config.num_drafts} drafts, "
        f"{kind} Markov head of rank {config.markov_rank}"
    )


def measure_table(
    engine: Engine,
    key: SpsKey,
    context_lens: Iterable[int],
    progress: Callable[[str], None] = lambda message: None,
    temperature: float = 1.0,
) -> SpsTable:
    """Times every bucket of every round program on the device at hand.

    The rounds are real ones over idle caches, draft and acceptance included; the number of rows
    is set by the tokens each request still wants.

    Args:
      engine: warm and without requests; its requests' state is not touched.
      key: what the table is made for.
      context_lens: context rows per request while timing, cut to the engine's capacity.
      progress: told each median, and of buckets that could not be filled.
      temperature: of the requests; sampling costs more than taking the likeliest token.

    Returns:
      A monotone staircase over the engine's widths and buckets.

    Raises:
      ValueError: the engine has no draft, or has work.
    """
    if engine.decoder.draft is None or engine.has_work:
        raise ValueError("steps per second are measured on an idle engine with a draft.")
    longest = max(engine.capacity - 2 - engine.decoder.num_drafts, 1)
    curves = []
    state = engine.programs.new_state()
    for context_len in sorted({min(c, longest) for c in context_lens}):
        for rows in engine.programs.widths:
            seconds = {}
            for bucket in engine.programs.buckets(rows):
                state, seconds[bucket], filled = _time_bucket(
                    engine, state, rows, bucket, context_len, temperature
                )
                short = "" if filled == bucket else f" (only {filled} rows scheduled)"
                progress(
                    f"context {context_len}, {rows} requests, {bucket} rows{short}: "
                    f"{1e3 * seconds[bucket]:.2f} ms"
                )
            undrafted = None
            if engine.programs.bypassed:
                state, undrafted, _ = _time_bucket(engine, state, rows, 0, context_len, temperature)
                progress(
                    f"context {context_len}, {rows} requests, undrafted: {1e3 * undrafted:.2f} ms"
                )
            curves.append(Curve.of(rows, context_len, seconds, undrafted))
    return SpsTable(key=key, source="measured", curves=tuple(curves))


def measure_steps_per_s(
    engine: Engine,
    *,
    context_len: int = 256,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[int, np.ndarray]:
    """Measures (see `measure_table`) and lets the engine schedule by the result.

    Args:
      engine: warm and without requests.
      context_len: context rows per request while timing, cut to the engine's capacity.
      progress: told if more rows cost nothing here, so that there is nothing to schedule by.

    Returns:
      Per batch width R, f32[R*(K+1)+1]: steps per second by verified rows, as now stored in
      `engine.steps_per_s`.

    Raises:
      ValueError: the engine has no draft, or has work.
    """
    table = measure_table(engine, SpsKey(), [context_len])
    if table.is_flat:
        progress("warning: no number of rows costs more here; policies will verify every draft")
    use_table(engine, table)
    return engine.steps_per_s


def use_table(engine: Engine, table: SpsTable) -> None:
    """Lets the engine schedule by a table, read at half the engine's capacity as context.

    A number of rows costs what the bucket costs that the engine would run for it.

    Raises:
      ValueError: the table does not reach the engine's widths.
    """
    for rows in engine.programs.widths:
        buckets = np.array(engine.programs.buckets(rows))
        longest = buckets[-1] // rows - 1  # drafts of a request, where no schedule has them all
        steps = table.steps_per_s(rows, int(longest), engine.capacity // 2)
        index = np.searchsorted(buckets, np.arange(len(engine.steps_per_s[rows])))
        table_steps = steps[buckets[np.minimum(index, len(buckets) - 1)]]
        table_steps[0] = steps[0]
        engine.steps_per_s[rows] = agree(table_steps)  # clocks of processes differ


def use_calibration(engine: Engine, path: str, progress: Callable[[str], None]) -> None:
    """Lets the engine divide its confidence logits by the temperatures of a file.

    New requests are then believed to be like those the file was made from.

    Args:
      engine: with a draft.
      path: JSON of tools/calibrate.py, SGLang or TensorRT-LLM.
      progress: told if the policy `presampled` finds no temperatures of its own there.

    Raises:
      FileNotFoundError: no such file.
      ValueError: damaged, or for another number of drafts.
    """
    calibration = load_calibration(path, engine.decoder.num_drafts)
    for name, values in calibration.tables().items():
        setattr(engine, name, values)
    unknown = not calibration.presampled_temperatures
    if unknown and engine.decoder.schedule.policy == "presampled":
        progress(
            f"warning: {path} has no presampled_temperatures; the policy 'presampled' believes "
            "its early estimates as they are. Calibrate with --policy presampled."
        )


def prepare_schedule(
    engine: Engine,
    pair: Pair,
    *,
    sps_table: str | None = None,
    confidence_sts: str | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> None:
    """Gives the engine what its policy schedules by.

    Args:
      engine: warm and without requests.
      pair: its models.
      sps_table: file to use; without one, a policy that needs it has it measured now.
      confidence_sts: file of temperatures; None believes confidences as they are.
      progress: told what is done and doubted.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file is damaged, or made for something else.
    """
    if engine.decoder.draft is None:
        return
    if confidence_sts is not None:
        use_calibration(engine, confidence_sts, progress)
    if sps_table is not None:
        table = load_sps_table(sps_table)
        table.check(sps_key(pair), progress)
        use_table(engine, table)
    elif engine.decoder.schedule.needs_sps:
        progress("measuring steps per second")
        measure_steps_per_s(engine, progress=progress)


def profiled_points(slots: int, num_drafts: int) -> list[tuple[int, int]]:
    """(R, verified rows) of every program an engine with an adaptive policy compiles."""
    return [
        (rows, bucket)
        for rows in row_widths(slots)
        for bucket in row_buckets(rows, num_drafts, adaptive=True)
    ]


def modelled_table(
    pair: Pair,
    points: Iterable[tuple[int, int]],
    context_len: int,
    chip: Chip,
    progress: Callable[[str], None],
) -> SpsTable:
    """A roofline table: rounds are compiled here, and costed with another chip's peaks.

    Args:
      pair: models with a draft.
      points: (R, verified rows) to cost; each is compiled.
      context_len: context rows per request.
      chip: whose peaks count.
      progress: told of each program, and that this is no measurement.

    Returns:
      The table, `source` "modelled".

    Raises:
      ValueError: no draft, or the compiler gives no cost analysis.
    """
    if pair.draft is None:
        raise ValueError("a table of rounds needs a draft; choose one with --draft.")
    decoder = pair.decoder(ScheduleConfig())
    shapes = shapes_of(pair.params)
    capacity = context_len + decoder.num_drafts + 2
    costs = {}
    for rows, bucket in points:
        progress(f"compiling {rows} requests, {bucket} rows")
        state = jax.eval_shape(
            functools.partial(init_state, decoder, rows, capacity, pair.dtype)
        )  # fmt: skip
        table = schedule_table_shapes(rows, decoder.num_drafts)
        function = functools.partial(decode_round, decoder, rows=rows, buckets=(bucket,))
        compiled = jax.jit(function, donate_argnums=1).lower(shapes, state, table).compile()
        costs[context_len, rows, bucket] = compiled.cost_analysis()
    return roofline_table(costs, chip, sps_key(pair), progress)


def _time_bucket(
    engine: Engine,
    state: DecodeState,
    rows: int,
    bucket: int,
    position: int,
    temperature: float,
) -> tuple[DecodeState, float, int]:
    """Times a round of R requests and `bucket` rows, or one that drafts nothing where that is 0.

    Returns the state, median seconds, and the rows that were scheduled.
    """
    undrafted = bucket == 0
    drafts = np.full(rows, max(bucket // rows - 1, 0))
    drafts[: max(bucket - drafts.sum() - rows, 0)] += 1
    programs = engine.programs
    of_group = np.arange(engine.slots) % programs.group_slots  # every group runs the same
    remaining = np.zeros(programs.group_slots, np.int32)
    remaining[:rows] = drafts + 1
    # With these speeds every draft that fits is worth verifying.
    inputs = () if undrafted else (engine.tables(np.ones_like(engine.steps_per_s[rows])),)
    warmth = programs.put_slots(np.full(engine.slots, temperature, np.float32))
    state = state.replace(sampling=state.sampling.replace(temperature=warmth))
    program = programs.plain[rows] if undrafted else programs.round_of(rows, bucket)
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        for _ in range(CHAIN):  # the same round again: small arrays go in, nothing is awaited
            state = state.replace(
                anchor_pos=programs.put_slots(np.full(engine.slots, position, np.int32)),
                remaining=programs.put_slots(np.tile(remaining, programs.groups)),
                active=programs.put_slots(of_group < rows),
            )
            state, output = program(engine.params, state, *inputs)
        jax.block_until_ready(output)
        times.append((time.perf_counter() - begin) / CHAIN)
    scheduled = int(np.asarray(output.verify_len).reshape(-1)[:rows].sum())  # of group 0
    return state, float(np.median(times[1:])), rows + scheduled
