"""How computed arrays are compared with golden ones."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

LOGITS_TOLERANCE = 2e-4  # absolute; hidden states: of their largest value, if that is above 1

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How one array compares.

    Attributes:
      name: of the array.
      ok: within tolerance, or skipped.
      detail: the errors, or what is wrong.
      skipped: not compared, because it needs a part this version does not have.
    """

    name: str
    ok: bool
    detail: str
    skipped: bool = False


def compare(name: str, got: jax.Array | None, expected: np.ndarray, *, tolerance: float) -> Result:
    """Compares floating-point values.

    Args:
      name: of the array.
      got: ours, None if this model has no such output.
      expected: the golden values.
      tolerance: largest absolute difference allowed.

    Returns:
      The result; values that are not finite never pass.
    """
    if got is None or got.shape != expected.shape:
        shape = None if got is None else list(got.shape)
        return Result(name=name, ok=False, detail=f"got shape {shape}, not {list(expected.shape)}")
    error = np.abs(np.asarray(got, np.float64) - expected)
    worst = float(error.max(initial=0.0))
    relative = float((error / np.maximum(np.abs(expected), 1e-12)).max(initial=0.0))
    detail = f"max abs {worst:.2e}  max rel {relative:.2e}  tolerance {tolerance:.1e}"
    return Result(name=name, ok=worst <= tolerance, detail=detail)


def compare_hidden(name: str, got: jax.Array | None, expected: np.ndarray) -> Result:
    """Compares hidden states, whose size grows with the model's."""
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    return compare(name, got, expected, tolerance=LOGITS_TOLERANCE * scale)


def compare_logits(name: str, got: jax.Array | None, expected: np.ndarray) -> Result:
    """Compares logits."""
    return compare(name, got, expected, tolerance=LOGITS_TOLERANCE)


def compare_tokens(name: str, got: jax.Array, expected: np.ndarray) -> Result:
    """Compares token ids, exactly."""
    if got.shape != expected.shape:
        detail = f"got shape {list(got.shape)}, not {list(expected.shape)}"
        return Result(name=name, ok=False, detail=detail)
    wrong = int((np.asarray(got) != expected).sum())
    return Result(name=name, ok=wrong == 0, detail=f"{wrong} of {expected.size} tokens differ")


def unknown_arrays(golden: Arrays, known: set[str], prefix: str) -> list[Result]:
    """A failure for every golden array that nobody compared.

    Args:
      golden: all arrays.
      known: names that were compared or used.
      prefix: names that begin with it were compared too; "" for none.

    Returns:
      One failed result each.
    """
    compared = {name for name in golden if prefix and name.startswith(prefix)}
    left = sorted(set(golden) - known - compared)
    return [Result(name=name, ok=False, detail="not known to this version") for name in left]


def golden_array(golden: Arrays, name: str) -> np.ndarray:
    """One golden array.

    Raises:
      ValueError: it is not there.
    """
    if name not in golden:
        raise ValueError(f"the golden vectors lack {name}; got {sorted(golden)}.")
    return golden[name]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a safetensors file.

    Raises:
      ValueError: the file is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again.") from error
