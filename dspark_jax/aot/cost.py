"""What a compiled TPU program moves and computes, loops multiplied by how often they run.

XLA's own `cost_analysis` counts the body of every loop once and sums neither by phase nor by
memory. Here the compiled text is walked instead: bytes are those of main memory only, operands that
a fusion slices count by the slice, and every instruction belongs to the `named_scope` that it, or
what reads it, came from. Operations are those of matrix units; vector work is not counted.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable

from dspark_jax.aot.hlo import Array, Computation, Instruction, Module, is_mosaic
from dspark_jax.aot.loops import trip_count
from dspark_jax.chips import COLLECTIVE_LATENCY_S, Chip

PHASES = (
    "draft.backbone", "draft.markov", "draft.presample", "schedule", "target.verify", "accept",
    "commit", "train.backbone", "train.vocabulary",
)  # fmt: skip
OTHER = "other"
_PHASE = re.compile("|".join(re.escape(phase) for phase in PHASES))
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done", "slice-done",
    "after-all", "opt-barrier", "partition-id", "replica-id", "async-update", "async-done",
    "add-dependency",
}  # fmt: skip
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "Sharding"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip


@dataclasses.dataclass
class Cost:
    """Totals of a program or a part of it, on one device.

    Attributes:
      flops: operations of matrix units.
      hbm_bytes: main memory, read and written.
      cycles: the compiler's own estimates, where it left any.
      kernels: runs of Pallas kernels.
      collectives: kind -> [runs, bytes of the larger of what goes in and comes out].
      link_bytes: what rings of these collectives send per device.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    cycles: float = 0.0
    kernels: float = 0.0
    link_bytes: float = 0.0
    collectives: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Adds another part that runs `times` times."""
        for name in ("flops", "hbm_bytes", "cycles", "kernels", "link_bytes"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for kind, (runs, size) in other.collectives.items():
            mine = self.collectives.setdefault(kind, [0.0, 0.0])
            mine[0] += times * runs
            mine[1] += times * size

    @property
    def collective_runs(self) -> float:
        """Collectives of all kinds."""
        return sum(runs for runs, _ in self.collectives.values())

    def seconds(self, chip: Chip) -> float:
        """Roofline: max(flops / peak, bytes / bandwidth) + sent / links + runs * latency."""
        seconds = max(self.flops / chip.flops_per_s, self.hbm_bytes / chip.bytes_per_s)
        if self.collectives and chip.link_bytes_per_s:
            seconds += self.link_bytes / chip.link_bytes_per_s
            seconds += self.collective_runs * COLLECTIVE_LATENCY_S
        return seconds


Phases = dict[str, Cost]


def total(phases: Phases) -> Cost:
    """All phases together; its `seconds` is less than the sum of theirs."""
    whole = Cost()
    for cost in phases.values():
        whole.add(cost)
    return whole


def seconds(phases: Phases, chip: Chip) -> float:
    """Modelled time of a program: its phases one after another."""
    return sum(cost.seconds(chip) for cost in phases.values())


class ProgramCost:
    """Costs of one compiled program under different circumstances.

    Args:
      module: the program.
      chip: decides which branch is the cheaper one.
      dynamic_trips: runs of a loop whose number is not in the program, by the loop's `op_name`.
      buckets: branches of the switch over verified rows; 1 when there is no switch.
      bucket: which of them is run.
      dearest: run the dearest branch of every other conditional instead of the cheapest.
      kernel_share: part of an operand that a Pallas kernel reads, for caches of which it reads
        what is filled; a kernel that declares its bytes is not asked.
    """

    def __init__(
        self,
        module: Module,
        chip: Chip,
        *,
        dynamic_trips: Callable[[str], int],
        buckets: int = 1,
        bucket: int = 0,
        dearest: bool = False,
        kernel_share: Callable[[Array], float] = lambda array: 1.0,
    ):
        self._computations = module.computations
        self._chip, self._trips = chip, dynamic_trips
        self._buckets, self._bucket, self._dearest = buckets, bucket, dearest
        self._share = kernel_share
        self._known: dict[tuple[str, str], Phases] = {}
        self.phases = self._of(module.entry, OTHER)

    def _of(self, name: str, around: str) -> Phases:
        if (name, around) in self._known:
            return self._known[name, around]
        computation = self._computations[name]
        phases: Phases = collections.defaultdict(Cost)
        scopes = _scopes(computation, around)
        for instruction in computation.instructions.values():
            scope = scopes[instruction.name]
            if instruction.opcode == "while":
                trips = trip_count(self._computations, computation, instruction)
                times = self._trips(instruction.op_name) if trips is None else trips
                _add(phases, self._of(instruction.called["body"], scope), times)
            elif instruction.opcode == "conditional":
                _add(phases, self._branch(instruction, scope))
            elif instruction.opcode == "call":
                _add(phases, self._of(instruction.called["to_apply"], scope))
            elif instruction.opcode == "async-start":
                _add(phases, self._of(instruction.called["calls"], scope))
            elif instruction.opcode not in _FREE:
                phases[scope].add(self._single(computation, instruction))
        self._known[name, around] = dict(phases)
        return self._known[name, around]

    def _branch(self, instruction: Instruction, scope: str) -> Phases:
        branches = instruction.branches
        is_switch = scope == "target.verify" and len(branches) == self._buckets > 1
        if is_switch and instruction.op_name.endswith("target.verify/cond"):
            return self._of(branches[self._bucket], scope)
        costs = [self._of(name, scope) for name in branches]
        pick = max if self._dearest else min
        return pick(costs, key=lambda phases: seconds(phases, self._chip))

    def _single(self, computation: Computation, instruction: Instruction) -> Cost:
        cost = Cost(cycles=instruction.numbers.get("estimated_cycles", 0))
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            _collective(cost, computation, instruction, kind)
        elif opcode.endswith("-done") or instruction.target in _FREE_CALLS:
            return cost
        elif is_mosaic(instruction):
            cost.kernels = 1
            cost.flops = instruction.numbers.get("flops", 0)
            read = [a for o in instruction.operands for a in computation.arrays(o)]
            moved = sum(a.hbm_bytes * self._share(a) for a in read)
            moved += sum(a.hbm_bytes for a in instruction.arrays)
            cost.hbm_bytes = instruction.numbers.get("bytes_accessed", moved)
        elif opcode == "fusion":
            fused = self._computations[instruction.called["calls"]]
            cost.hbm_bytes = self._fusion_bytes(computation, instruction, fused)
            self._inside(fused, cost)
        else:
            cost.hbm_bytes = _instruction_bytes(computation, instruction)
            cost.flops = matrix_flops(computation, instruction)
        return cost

    def _inside(self, fused: Computation, cost: Cost) -> None:
        """Adds matrix operations and collectives in a fusion, and in those nested in it."""
        for instruction in fused.instructions.values():
            if instruction.opcode == "fusion":
                self._inside(self._computations[instruction.called["calls"]], cost)
            elif instruction.opcode in _COLLECTIVES:
                _collective(cost, fused, instruction, instruction.opcode)
            else:
                cost.flops += matrix_flops(fused, instruction)

    def _fusion_bytes(
        self, computation: Computation, instruction: Instruction, fused: Computation
    ) -> float:
        moved = self._written(fused, instruction.arrays)
        for number, operand in enumerate(instruction.operands):
            size = sum(a.hbm_bytes for a in computation.arrays(operand))
            if size:
                moved += min(size, self._read(fused, number, size))
        return moved

    def _written(self, fused: Computation, arrays: tuple[Array, ...]) -> float:
        """Bytes a fusion writes: an array updated in place counts by the update."""
        root = fused.root
        while root.opcode == "bitcast":
            root = fused.instructions[root.operands[0]]
        parts = root.operands if root.opcode == "tuple" else (root.name,)
        written = 0.0
        for part, array in zip(parts, arrays, strict=False):
            source = fused.instructions.get(part)
            while source is not None and source.opcode == "bitcast":
                source = fused.instructions.get(source.operands[0])
            written += self._update_bytes(fused, source, array.hbm_bytes)
        return written

    def _update_bytes(
        self, fused: Computation, source: Instruction | None, otherwise: float
    ) -> float:
        if not otherwise or source is None:
            return otherwise
        if source.opcode == "dynamic-update-slice":
            return sum(a.bytes for a in fused.arrays(source.operands[1]))
        if source.opcode == "scatter":
            return sum(a.bytes for a in fused.arrays(source.operands[-1]))
        if source.opcode == "fusion" and len(source.arrays) == 1:
            inner = self._computations[source.called["calls"]]
            return self._update_bytes(inner, inner.root, otherwise)
        return otherwise

    def _read(self, fused: Computation, number: int, whole: float) -> float:
        """Bytes of a fusion's parameter that are read: slices of it, where only slices are."""
        if number not in fused.parameters:
            return whole
        return self._read_by_users(fused, fused.parameters[number].name, whole)

    def _read_by_users(self, fused: Computation, name: str, whole: float) -> float:
        read = 0.0
        for user in fused.users[name]:
            if user.opcode in _SLICES and user.operands[0] == name:
                read += sum(a.bytes for a in user.arrays)
            elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                continue
            elif user.opcode == "bitcast":
                read += self._read_by_users(fused, user.name, whole)
            elif user.opcode == "fusion":
                inner = self._computations[user.called["calls"]]
                read += self._read(inner, user.operands.index(name), whole)
            else:
                return whole
        return read


def _add(phases: Phases, more: Phases, times: float = 1.0) -> None:
    for phase, cost in more.items():
        phases[phase].add(cost, times)


def _scopes(computation: Computation, around: str) -> dict[str, str]:
    """Phase of each instruction: its innermost, that of what reads it, or of what is around."""
    scopes: dict[str, str] = {}
    for instruction in reversed(computation.instructions.values()):
        own = _PHASE.findall(instruction.op_name)
        readers = (scopes.get(user.name, around) for user in computation.users[instruction.name])
        scopes[instruction.name] = own[-1] if own else next(readers, around)
    return scopes


def _moved(computation: Computation, instruction: Instruction) -> float:
    read = (a.hbm_bytes for o in instruction.operands for a in computation.arrays(o))
    return sum(read) + sum(a.hbm_bytes for a in instruction.arrays)


def _instruction_bytes(computation: Computation, instruction: Instruction) -> float:
    """Bytes of an instruction that stands alone."""
    opcode, arrays = instruction.opcode, instruction.arrays
    if opcode == "copy-start":  # (destination, source, context)
        return sum(a.hbm_bytes for a in arrays[:2])
    if opcode == "slice-start":  # ((sources), destination, context)
        taken = arrays[len(instruction.operands)]
        return taken.hbm_bytes + (taken.bytes if arrays[0].in_hbm else 0)
    if opcode in _SLICES:
        taken = sum(a.bytes for a in arrays)
        source = computation.arrays(instruction.operands[0])
        return (taken if _any_hbm(source) else 0) + (taken if _any_hbm(arrays) else 0)
    if opcode in ("dynamic-update-slice", "scatter"):
        update = instruction.operands[1 if opcode == "dynamic-update-slice" else -1]
        return 2 * sum(a.bytes for a in computation.arrays(update)) * _any_hbm(arrays)
    return _moved(computation, instruction)


def _any_hbm(arrays: Iterable[Array]) -> bool:
    return any(a.in_hbm for a in arrays)


def _collective(cost: Cost, computation: Computation, instruction: Instruction, kind: str) -> None:
    entering = sum(a.bytes for o in instruction.operands for a in computation.arrays(o))
    leaving = sum(a.bytes for a in instruction.arrays)
    if instruction.opcode.endswith("-start"):  # the result holds the operands as well
        leaving = max(leaving - entering, entering)
    payload = max(entering, leaving)
    ring = (2.0 if kind == "all-reduce" else 1.0) * (1 - 1 / max(_group_size(instruction), 1))
    cost.collectives[kind] = [1.0, payload]
    cost.link_bytes += payload if kind == "collective-permute" else ring * payload


def _group_size(instruction: Instruction) -> int:
    groups = re.search(r"replica_groups=\[(\d+),(\d+)\]", instruction.rest)
    if groups:
        return int(groups.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.rest)
    return len(listed.group(1).split(",")) if listed else 2


def matrix_flops(computation: Computation, instruction: Instruction) -> float:
    """Operations of a dot or a convolution, a multiplication and an addition counting two.

    TPU programs write batched products as convolutions over padded or dilated axes; only positions
    where both operands have an element count.

    Args:
      computation: holds the operands.
      instruction: any.

    Returns:
      The number; 0 for other opcodes.
    """
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    left = computation.arrays(instruction.operands[0])[0]
    out = instruction.arrays[0]
    if instruction.opcode == "dot":
        contracted = instruction.attribute("lhs_contracting_dims").strip("{}")
        dims = [left.dims[int(d)] for d in contracted.split(",") if d]
        return 2.0 * out.size * math.prod(dims)
    right = computation.arrays(instruction.operands[1])[0]
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    sizes = [
        dict(zip(text, array.dims, strict=True))
        for text, array in zip(labels, (left, right, out), strict=True)
    ]
    window = _window(instruction)
    pairs = 1.0
    for axis in sorted(label for label in sizes[2] if label.isdigit()):
        at = int(axis)
        pairs *= _valid_pairs(sizes[0][axis], sizes[1][axis], sizes[2][axis], at, window)
    return 2.0 * pairs * sizes[2]["b"] * sizes[2]["f"] * sizes[1]["i"]


def _window(instruction: Instruction) -> dict[str, list[str]]:
    text = instruction.attribute("window").strip("{}")
    return {k: v.split("x") for k, _, v in (part.partition("=") for part in text.split())}


def _valid_pairs(left: int, kernel: int, out: int, axis: int, window: dict[str, list[str]]) -> int:
    """Pairs of an output and a kernel position that meet an element of the left operand."""

    def setting(name: str, default: int) -> int:
        values = window.get(name)
        return int(values[axis].split("_")[0]) if values else default

    stride, low = setting("stride", 1), setting("pad", 0)
    dilate, spread = setting("lhs_dilate", 1), setting("rhs_dilate", 1)
    last = (left - 1) * dilate
    count = 0
    for position in range(kernel):
        shift = position * spread - low
        if stride == dilate == 1:
            count += max(min(out, left - shift) - max(0, -shift), 0)
            continue
        places = (o * stride + shift for o in range(out))
        count += sum(1 for p in places if 0 <= p <= last and p % dilate == 0)
    return count
