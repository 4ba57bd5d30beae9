"""Block sizes as data, one row per TPU generation."""

import dataclasses

from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """How much of each operand a kernel holds in VMEM at a time."""

    context_rows: int = 256  # rows of a contiguous cache per step of the running softmax
    query_lines: int = 4096  # rows times query heads; many more would take minutes to compile
    vocab_columns: int = 4096  # columns of logits per step
    vector_columns: int = 512  # of them in registers at a time; divides vocab_columns
    requests: int = 8  # requests per step over the vocabulary
    vmem_limit_bytes: int = 32 * 2**20  # what the compiler may use


# The smaller chips come first in bandwidth and in FLOP/s, not in VMEM: all but tpu7x have 128 MiB
# of it per core, tpu7x has 64. Faster memory wants longer transfers to stay busy.
BLOCK_SIZES = {
    "v5e": BlockSizes(),
    "v6e": BlockSizes(context_rows=512, vmem_limit_bytes=64 * 2**20),
    "v5p": BlockSizes(context_rows=512, vmem_limit_bytes=64 * 2**20),
    "7x": BlockSizes(context_rows=512, vmem_limit_bytes=48 * 2**20),
}


def block_sizes() -> BlockSizes:
    """Sizes for the chip the program is traced for: the ambient mesh's, else this machine's.

    Returns:
      The chip's row; that of v5e, whose sizes fit everywhere, for other chips and without one.
    """
    try:
        chip = pltpu.get_tpu_info().chip_version
    except (ValueError, AttributeError):
        return BLOCK_SIZES["v5e"]
    return BLOCK_SIZES.get(str(getattr(chip, "value", chip)), BLOCK_SIZES["v5e"])


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def split(size: int, part: int) -> tuple[int, int]:
    """How many equal parts of `part`, and their size; one of all where it does not divide."""
    return (size // part, part) if size % part == 0 else (1, size)
