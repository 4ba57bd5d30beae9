"""Compiled programs as text, read into computations, instructions and shapes.

Only what costs anything is read: operands, called computations, where arrays live (TPU layouts mark
on-chip memory with `S(n)`), and the numbers the compiler left in `backend_config`.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "s4": 0.5, "u4": 0.5, "s2": 0.25,
    "u2": 0.25, "f4e2m1fn": 0.5,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^{}]*\})?")
_HEAD = re.compile(r"^(?:ENTRY )?%?([^\s(]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_OPERAND = re.compile(r"%([^\s,(){}]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation)=%([^\s,]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NUMBER = re.compile(r'"(estimated_cycles|flops|bytes_accessed)":"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape: its element type, sizes, and whether it lies in main memory."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @functools.cached_property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    @property
    def bytes(self) -> float:
        """Bytes without padding."""
        return self.size * _BYTES.get(self.dtype, 1)

    @property
    def hbm_bytes(self) -> float:
        """The same, 0 on chip."""
        return self.bytes if self.in_hbm else 0.0


def parse_arrays(text: str) -> tuple[Array, ...]:
    """All arrays of a shape, tuples flattened: `(f32[8]{0:T(128)S(1)}, s32[])` has two."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype in _BYTES or dtype.startswith("f8"):
            sizes = tuple(int(d) for d in dims.split(",") if d)
            found.append(Array(dtype, sizes, "S(" not in layout))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str  # attributes, metadata, backend_config
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of the result."""
        return parse_arrays(self.shape)

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """Role (`calls`, `body`, ..) -> computation."""
        return dict(_CALLED.findall(self.rest))

    @functools.cached_property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional, in order of its index; a predicate's false first."""
        if match := _BRANCHES.search(self.rest):
            return tuple(_OPERAND.findall(match.group(1)))
        pair = [self.called.get(f"{side}_computation") for side in ("false", "true")]
        return tuple(name for name in pair if name)

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the Python program it comes from."""
        match = _OP_NAME.search(self.rest)
        return match.group(1) if match else ""

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Cycles the compiler estimated; flops and bytes a custom call was declared with."""
        return {name: int(value) for name, value in _NUMBER.findall(self.rest)}

    @functools.cached_property
    def target(self) -> str:
        """Of a custom call."""
        match = _TARGET.search(self.rest)
        return match.group(1) if match else ""

    def attribute(self, name: str) -> str:
        """Text of a bare attribute such as `dim_labels=..`; empty if there is none."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^\s,]+)", self.rest)
        return match.group(1) if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instruction -> those that read it."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                if operand in found:
                    found[operand].append(instruction)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter number -> instruction."""
        return {
            int(i.rest.split(")")[0]): i
            for i in self.instructions.values()
            if i.opcode == "parameter"
        }

    def arrays(self, operand: str) -> tuple[Array, ...]:
        """Arrays of an operand."""
        found = self.instructions.get(operand)
        return found.arrays if found else ()


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str

    @property
    def mosaic_kernels(self) -> int:
        """Calls of Pallas kernels in the text, each counted once however often it runs."""
        return sum(1 for i in self._all() if is_mosaic(i))

    def _all(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions.values()


def is_mosaic(instruction: Instruction) -> bool:
    """Whether an instruction runs a Pallas TPU kernel."""
    return instruction.opcode == "custom-call" and instruction.target == "tpu_custom_call"


def parse_module(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Args:
      text: optimised HLO.

    Returns:
      The program.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", {}
    for line in text.splitlines():
        if not line.startswith(" "):
            if match := _HEAD.match(line):
                name, lines = match.group(1), {}
                entry = name if line.startswith("ENTRY") else entry
            elif line.startswith("}") and name:
                computations[name] = Computation(name, lines)
                name = ""
        elif name and (match := _LINE.match(line)):
            instruction = _parse_line(bool(match.group(1)), match.group(2), match.group(3))
            lines[instruction.name] = instruction
    if not entry:
        raise ValueError("this text has no ENTRY computation; expected compiled.as_text().")
    return Module(computations, entry)


def _parse_line(is_root: bool, name: str, text: str) -> Instruction:
    """`SHAPE opcode(operands), attributes` taken apart."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, after = rest.partition("(")
    close = _closing("(" + after, 0) - 1
    inner, attributes = _COMMENT.sub("", after[: close - 1]), after[close:]
    if opcode in ("parameter", "constant"):
        return Instruction(name, opcode, shape, (), inner + ")" + attributes, is_root)
    return Instruction(name, opcode, shape, tuple(_OPERAND.findall(inner)), attributes, is_root)


def _closing(text: str, start: int) -> int:
    """Index just past the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)
