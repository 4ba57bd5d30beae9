"""What was compiled, for people and as JSON."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.aot.compiled import Compiled, gib
from dspark_jax.aot.cost import Cost
from dspark_jax.aot.fit import Fit
from dspark_jax.aot.hlo import Array
from dspark_jax.attention import CONTEXT_BLOCK
from dspark_jax.config_deepseek import DeepseekDraftConfig
from dspark_jax.kv_cache import PAGE_SIZE
from dspark_jax.moe import EXCHANGE
from dspark_jax.sps import FORMAT, Curve, SpsKey, SpsTable

FORMULA = (
    "sum over phases of max(matrix flops / peak, HBM bytes / bandwidth) + bytes sent / link "
    "bandwidth + 2 us per collective; per device, loops multiplied out; vector work, dispatch and "
    "overlap left out"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """The modelled cost of one program at one context length.

    Attributes:
      program: what was compiled.
      context: rows of context per request.
      bucket: verified rows; 0 where the program has no buckets.
      phases: costs by phase.
      seconds: modelled.
    """

    program: Compiled
    context: int
    bucket: int
    phases: dict[str, Cost]
    seconds: float

    def share(self, phase: str) -> tuple[float, float]:
        """Part of a phase in the modelled time, and in the compiler's own estimate of cycles."""
        cost, whole = self.phases.get(phase, Cost()), self.program.whole(self.phases)
        return (
            cost.seconds(self.program.chip) / self.seconds,
            cost.cycles / whole.cycles if whole.cycles else math.nan,
        )


def loop_trips(
    context: int, requests: int, draft: Any, *, expert_devices: int = 1
) -> Callable[[str], int]:
    """Runs of the loops whose number a program does not say.

    Args:
      context: rows of context per request: attention walks them in blocks.
      requests: R, for the experts that their rows meet.
      draft: its config.
      expert_devices: that the experts are split over.

    Returns:
      Name of a loop -> runs.
    """
    experts = 1
    if isinstance(draft, DeepseekDraftConfig):
        moe, rows = draft.moe, requests * draft.block_size
        missed = (1 - moe.num_experts_per_tok / moe.num_experts) ** rows
        experts = max(math.ceil(moe.num_experts / expert_devices * (1 - missed)), 1)

    def trips(name: str) -> int:
        if name.endswith(f"{EXCHANGE}/while"):
            return 1  # routing as even as its messages have room for
        if "moe" in name:
            return experts
        return math.ceil(context / CONTEXT_BLOCK) if "Layer/while" in name else 1

    return trips


def filled_share(
    context: int, requests: int, draft: Any, capacity: int
) -> Callable[[Array], float]:
    """Part of an operand that an attention kernel reads: of caches, R slots of one layer.

    Args:
      context: rows of context per request.
      requests: R.
      draft: its config.
      capacity: C of caches [.., G, C, H].

    Returns:
      Array -> part.
    """
    window, pages = (0, 0), math.ceil(capacity / PAGE_SIZE)
    if isinstance(draft, DeepseekDraftConfig):
        window = (draft.sliding_window, draft.head_dim)

    def share(array: Array) -> float:
        dims = array.dims
        if len(dims) == 4 and dims[1] == PAGE_SIZE and dims[0] % pages == 0:
            return min(requests * math.ceil(context / PAGE_SIZE) / dims[0], 1.0)
        if len(dims) >= 4 and dims[-2] == capacity:
            return min(requests / math.prod(dims[:-3]), 1.0) * min(context / capacity, 1.0)
        if len(dims) >= 3 and dims[-2:] == window:
            return min(requests / math.prod(dims[:-2]), 1.0)
        return 1.0

    return share


def cost_points(
    programs: Sequence[Compiled],
    contexts: Sequence[int],
    draft: Any,
    *,
    capacity: int,
    dearest: bool,
    expert_devices: int = 1,
) -> list[Point]:
    """Costs of every program that fits, per bucket and context length.

    Args:
      programs: compiled.
      contexts: rows of context per request.
      draft: its config, or None.
      capacity: C, tokens per slot.
      dearest: take the dearest way through conditionals instead of the cheapest.
      expert_devices: that the experts are split over.

    Returns:
      The points.
    """
    points = []
    for program in programs:
        if program.module is None:
            continue
        for context in contexts:
            requests = 1 if program.kind == "prefill" else program.rows
            trips = loop_trips(context, requests, draft, expert_devices=expert_devices)
            share = filled_share(context, requests, draft, capacity)
            for index, bucket in enumerate(program.buckets or (0,)):
                phases = program.phases(trips, bucket=index, dearest=dearest, kernel_share=share)
                points.append(Point(
                    program=program, context=context, bucket=bucket, phases=phases,
                    seconds=program.modelled_seconds(phases),
                ))  # fmt: skip
    return points


def modelled_sps(points: Sequence[Point], key: SpsKey) -> SpsTable | None:
    """A speed table from the rounds among the points; None if there are none."""
    curves: dict[tuple[int, int], dict[int, float]] = {}
    for point in points:
        if point.program.kind == "round":
            at = (point.context, point.program.rows)
            curves.setdefault(at, {})[point.bucket] = point.seconds
    if not curves:
        return None
    made = tuple(Curve.of(rows, context, found) for (context, rows), found in curves.items())
    return SpsTable(key=key, source="modelled", curves=made)


def memory_lines(programs: Sequence[Compiled]) -> list[str]:
    """A table of what each program needs of a device's memory."""
    lines = [
        f"{'program':44s} {'arguments':>10s} {'temporaries':>12s} {'total':>8s} {'of HBM':>7s}"
        f" {'kernels':>8s} {'compiled in':>12s}"
    ]
    for p in programs:
        if not p.fits:
            lines.append(f"{p.name:44s} does not fit: {p.refusal}")
            continue
        m = p.memory
        kernels = "-" if p.mosaic_kernels is None else str(p.mosaic_kernels)
        lines.append(
            f"{p.name:44s} {gib(m.arguments):>10s} {gib(m.temporaries):>12s} {gib(m.total):>8s} "
            f"{m.total / p.chip.hbm_bytes:>7.0%} {kernels:>8s} {p.seconds:>10.0f} s"
        )
    return [*lines, "(GiB on each device)"]


def cost_lines(points: Sequence[Point]) -> list[str]:
    """A table of modelled costs, one line per program, bucket and context."""
    lines = [
        f"{'program':44s} {'context':>8s} {'verified':>9s} {'GFLOP':>9s} {'HBM GB':>8s}"
        f" {'collectives':>12s} {'MB':>8s} {'ms':>8s} {'Mcycles':>8s} {'Markov':>14s}"
    ]
    for p in points:
        whole = p.program.whole(p.phases)
        runs = whole.collective_runs
        size = sum(size for _, size in whole.collectives.values())
        markov = ""
        if "draft.markov" in p.phases:
            roofline, cycles = p.share("draft.markov")
            markov = f"{roofline:.1%} / {cycles:.1%}"
        lines.append(
            f"{p.program.name:44s} {p.context:8d} {p.bucket or '':>9} {whole.flops / 1e9:9.1f} "
            f"{whole.hbm_bytes / 1e9:8.3f} {runs:12.0f} {size / 1e6:8.2f} {1e3 * p.seconds:8.3f} "
            f"{whole.cycles / 1e6:8.2f} {markov:>14s}"
        )
    return [
        *lines,
        f"(modelled, on each device; ms = {FORMULA}.",
        "Mcycles: the compiler's own estimates, summed. Markov: the serial head's share of ms / of "
        "Mcycles)",
    ]


def phase_lines(points: Sequence[Point]) -> list[str]:
    """Where the time of the last point of each kind goes."""
    last = {p.program.kind: p for p in points}
    lines = []
    for point in last.values():
        parts = sorted(point.phases.items(), key=lambda item: -item[1].seconds(point.program.chip))
        text = ", ".join(
            f"{phase} {1e3 * cost.seconds(point.program.chip):.3f}" for phase, cost in parts
        )
        lines.append(f"{point.program.name}, context {point.context}, ms: {text}")
    return lines


def write_json(
    path: str | Path,
    table: SpsTable | None,
    programs: Sequence[Compiled],
    points: Sequence[Point],
    fit: Fit,
    facts: dict[str, Any],
) -> None:
    """Writes a speed table that also says what it was made from.

    Args:
      path: where to.
      table: of the rounds; without one the file is no speed table.
      programs: compiled.
      points: their costs.
      fit: what there is room for.
      facts: what was asked for.
    """
    data: dict[str, Any] = {"format": "dspark_jax.aot"}
    if table is not None:
        data = {"format": FORMAT, **dataclasses.asdict(table)}
        data["key"]["versions"] = dict(table.key.versions)
    data["formula"] = FORMULA
    data["asked"] = facts
    data["fit"] = dataclasses.asdict(fit)
    data["programs"] = [_program_json(p) for p in programs]
    data["points"] = [_point_json(p) for p in points]
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _program_json(program: Compiled) -> dict[str, Any]:
    memory = dataclasses.asdict(program.memory) if program.fits else None
    return {
        "name": program.name, "kind": program.kind, "rows": program.rows,
        "buckets": program.buckets, "memory_bytes": memory, "refusal": program.refusal,
        "mosaic_kernels": program.mosaic_kernels,
    }  # fmt: skip


def _point_json(point: Point) -> dict[str, Any]:
    return {
        "program": point.program.name, "kind": point.program.kind, "rows": point.program.rows,
        "context": point.context, "bucket": point.bucket, "seconds": point.seconds,
        "phases": {phase: dataclasses.asdict(cost) for phase, cost in point.phases.items()},
    }  # fmt: skip
