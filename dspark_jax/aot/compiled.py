"""One program compiled for a topology: what it needs, and what it does."""

import dataclasses
import re
import time
from collections.abc import Callable

import jax

from dspark_jax.aot.cost import Cost, ProgramCost, seconds, total
from dspark_jax.aot.hlo import Array, Module, parse_module
from dspark_jax.chips import Chip

_GIB = 2.0**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of main memory on one device while a program runs."""

    arguments: int
    temporaries: int
    new_outputs: int  # results that do not replace a donated argument
    code: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.temporaries + self.new_outputs + self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program that the TPU compiler was given.

    Attributes:
      name: for people.
      kind: "prefill", "plain", "round", "draft", "context" or "train".
      rows: R, or tokens of a prefill chunk.
      buckets: numbers of verified rows it has a branch for.
      chip: figures of a device.
      seconds: spent compiling.
      memory: None where it does not fit.
      module: None where it does not fit, or where the compiler gives no text.
      refusal: what the compiler said if it does not fit.
    """

    name: str
    kind: str
    rows: int
    buckets: tuple[int, ...] = ()
    chip: Chip
    seconds: float
    memory: Memory | None = None
    module: Module | None = None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether the compiler found room for it."""
        return self.memory is not None

    @property
    def mosaic_kernels(self) -> int | None:
        """Pallas kernels in its text; None without a text."""
        return None if self.module is None else self.module.mosaic_kernels

    def phases(
        self,
        trips: Callable[[str], int],
        *,
        bucket: int = 0,
        dearest: bool = False,
        kernel_share: Callable[[Array], float] = lambda array: 1.0,
    ) -> dict[str, Cost]:
        """Costs by phase.

        Args:
          trips: name of a loop in the program -> its runs, where the program does not say.
          bucket: index into `buckets`.
          dearest: take the dearest way through conditionals instead of the cheapest.
          kernel_share: part of an operand that a Pallas kernel reads.

        Returns:
          Phase -> cost on one device.

        Raises:
          ValueError: it does not fit, or has no text.
        """
        if self.module is None:
            raise ValueError(f"{self.name} has no compiled text to read costs from.")
        walked = ProgramCost(
            self.module, self.chip, dynamic_trips=trips, buckets=len(self.buckets), bucket=bucket,
            dearest=dearest, kernel_share=kernel_share,
        )  # fmt: skip
        return walked.phases

    def modelled_seconds(self, phases: dict[str, Cost]) -> float:
        """Roofline, phases one after another."""
        return seconds(phases, self.chip)

    def whole(self, phases: dict[str, Cost]) -> Cost:
        """Sum of all phases."""
        return total(phases)


def compile_program(
    lower: Callable[[], jax.stages.Lowered],
    *,
    name: str,
    kind: str,
    rows: int,
    chip: Chip,
    buckets: tuple[int, ...] = (),
) -> Compiled:
    """Lowers and compiles.

    Args:
      lower: lowers the program under the mesh of the topology.
      name: for people.
      kind: of program.
      rows: R, or tokens.
      chip: of the topology.
      buckets: numbers of verified rows with a branch each.

    Returns:
      The program, with `refusal` set if it needs more memory than there is.

    Raises:
      jax.errors.JaxRuntimeError: the compiler failed for another reason.
    """
    begin = time.perf_counter()
    facts = dict(name=name, kind=kind, rows=rows, buckets=buckets, chip=chip)
    try:
        executable = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(**facts, seconds=time.perf_counter() - begin, refusal=shortage(str(error)))
    stats = executable.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        new_outputs=max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0),
        code=stats.generated_code_size_in_bytes,
    )
    try:
        text = executable.as_text()
    except jax.errors.JaxRuntimeError:  # the compiler cannot print some TPU7x programs
        text = None
    return Compiled(
        **facts, seconds=time.perf_counter() - begin, memory=memory,
        module=parse_module(text) if text else None,
    )  # fmt: skip


def shortage(message: str) -> str:
    """The part of the compiler's message that says how much memory is missing."""
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", message)
    if used:
        return f"needs {used.group(1)} of {used.group(2)}"
    needs = re.search(r"\(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", message)
    if needs:
        return f"needs more than {needs.group(1)} of {needs.group(2)}"
    return message.split("\n", 1)[0][:200]


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / _GIB:.2f}"
