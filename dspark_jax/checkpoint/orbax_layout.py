"""Converted checkpoints: parameters as arrays in Orbax's layout, and a manifest beside them.

A directory holds `config.json` and the tokenizer of the source, `dspark_checkpoint.json` (the
manifest) and `params/`, an Orbax checkpoint (Zarr arrays, one per parameter) that
`orbax.checkpoint` restores too, in whole or sharded. A parameter that stays quantised is two
arrays, `codes` and `scales`, in the orientation of the stored matrices.

Source: Orbax checkpoint format, `_METADATA` of PyTreeCheckpointHandler without OCDBT.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.quantized import (
    Packed,
    dequantise_fp4,
    dequantise_fp8,
    not_packed,
)
from dspark_jax.checkpoint.rules import Path as TreePath
from dspark_jax.checkpoint.rules import TensorRule, pack_groups
from dspark_jax.checkpoint.safetensors import NUMPY_TYPES, TensorReader
from dspark_jax.checkpoint.zarr_arrays import ARRAYS, open_array, raw_bytes

MANIFEST = "dspark_checkpoint.json"
VERSION = 1
EXTRA = "extra"  # stored tensors that are no parameters are kept under it as they are
TYPE_NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One parameter as it is kept.

    Attributes:
      path: where it lies in the tree.
      names: the stored tensors it was made from.
      form: "plain" (one array), or "fp4" or "fp8" (codes and scales).
      shape: of the array, or of the codes.
      dtype: of the array, in NumPy's words; codes are uint8.
      block: rows and columns that share a scale; None for plain.
      heights: rows of each matrix, where unlike ones lie one below the other; () elsewhere.
    """

    path: TreePath
    names: tuple[str, ...]
    form: str
    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, int] | None = None
    heights: tuple[int, ...] = ()

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Name -> shape and type of the arrays it consists of."""
        name = ".".join(map(str, self.path))
        if self.form == "plain":
            return {name: (self.shape, np.dtype(self.dtype))}
        *lead, rows, columns = self.shape
        width = columns * (2 if self.form == "fp4" else 1)
        grid = (sum(self._scale_rows(rows)), -(-width // self.block[1]))
        byte = np.dtype(np.uint8)
        return {f"{name}.codes": (self.shape, byte), f"{name}.scales": ((*lead, *grid), byte)}

    def matrices(self, codes: np.ndarray, scales: np.ndarray) -> list[tuple[np.ndarray, ...]]:
        """Codes and scales of each stored matrix, from arrays or some of their experts' rows."""
        if self.heights:
            pair = ((codes, self.heights), (scales, self._scale_rows(0)))
            return list(zip(*(np.split(x, np.cumsum(n)[:-1]) for x, n in pair), strict=True))
        parts = (x.reshape(-1, *x.shape[-2:]) for x in (codes, scales))
        return list(zip(*parts, strict=True))

    def _scale_rows(self, rows: int) -> list[int]:
        return [-(-height // self.block[0]) for height in self.heights or (rows,)]

    def describe(self) -> str:
        """Name, type and shape, for people."""
        what = self.dtype if self.form == "plain" else self.form
        return f"{'.'.join(map(str, self.path))}  {what}{list(self.shape)}"

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays().values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a converted directory is.

    Attributes:
      kind: "target", "dense draft" or "deepseek draft".
      dtype: the form that was asked for, such as "bfloat16".
      mesh: axis -> size the arrays were cut for; empty if for none.
      tensors: stored tensor -> its type, shape and name in the source, scales included.
      leaves: the parameters.
      left_out: stored tensors that were not converted.
      sha256: array -> digest of its values in C order.
      fingerprint: of a target, as in a draft's config.json; None for drafts.
    """

    kind: str
    dtype: str
    mesh: dict[str, int]
    tensors: dict[str, tuple[str, tuple[int, ...], str]]
    leaves: tuple[Leaf, ...]
    left_out: tuple[str, ...]
    sha256: dict[str, str]
    fingerprint: dict[str, Any] | None

    def write(self, directory: Path) -> None:
        """Writes the manifest and Orbax's own description of the arrays."""
        text = json.dumps({"version": VERSION} | dataclasses.asdict(self), indent=1)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")
        names = [name for leaf in self.leaves for name in leaf.arrays()]
        paths = {tuple(_array_path(leaf, name)) for leaf in self.leaves for name in leaf.arrays()}
        if len(paths) != len(names):
            raise ValueError(f"{directory}: two parameters share a name.")
        tree = {
            str(path): {
                "key_metadata": [{"key": key, "key_type": 2} for key in path],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
            for path in sorted(paths)
        }
        metadata = {
            "tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True, "custom_metadata": None,
        }  # fmt: skip
        (directory / ARRAYS / "_METADATA").write_text(json.dumps(metadata), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Reads the manifest of a converted directory.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is damaged or of another version.
        """
        path = directory / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{directory} has no {MANIFEST}; expected a directory made by tools/convert.py."
            )
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored.pop("version") != VERSION:
                raise ValueError(f"its version is not {VERSION}")
            stored["leaves"] = tuple(_leaf(leaf) for leaf in stored["leaves"])
            stored["left_out"] = tuple(stored["left_out"])
            stored["tensors"] = {
                name: (dtype, tuple(shape), original)
                for name, (dtype, shape, original) in stored["tensors"].items()
            }
            return cls(**stored)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error}); convert again.") from error


def is_converted(directory: str | Path) -> bool:
    """Whether a directory was made by the converter."""
    return (Path(directory) / MANIFEST).is_file()


def open_checkpoint(
    directory: str | Path, *, strip: tuple[str, ...] = ()
) -> "TensorReader | OrbaxReader":
    """The tensors of a checkpoint directory, converted or in the Hugging Face layout.

    Args:
      directory: of either kind.
      strip: prefixes removed from stored names; a converted directory has them removed already.

    Returns:
      The reader.

    Raises:
      FileNotFoundError: no weights, or some are missing.
      ValueError: a file is damaged.
    """
    return (
        OrbaxReader(directory) if is_converted(directory) else TensorReader(directory, strip=strip)
    )


class OrbaxReader:
    """The parameters of a converted directory; to what checks headers, a reader like the others.

    Args:
      directory: made by the converter.

    Raises:
      FileNotFoundError: the manifest or an array is missing.
      ValueError: the manifest is damaged.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self._leaves = {leaf.path: leaf for leaf in self.manifest.leaves}
        self._of_name = {name: leaf for leaf in self.manifest.leaves for name in leaf.names}
        arrays = [name for leaf in self.manifest.leaves for name in leaf.arrays()]
        missing = [n for n in arrays if not (self.directory / ARRAYS / n / ".zarray").is_file()]
        if missing:
            raise FileNotFoundError(f"{self.directory} lacks the arrays {missing}; convert again.")

    def names(self) -> set[str]:
        """The stored tensors that were converted, scales aside."""
        return set(self._of_name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor, of its values if it is quantised."""
        kind, shape, _ = self.manifest.tensors[name]
        return (
            (*shape[:-1], 2 * shape[-1]) if is_packed(name, kind, self.manifest.tensors) else shape
        )

    def dtype(self, name: str) -> str:
        """The type it is kept in, in safetensors' words; F32 for what is quantised."""
        leaf = self._of_name[name]
        return "F32" if leaf.form != "plain" else TYPE_NAMES[np.dtype(leaf.dtype)]

    def leaf(self, path: TreePath) -> Leaf:
        """How the parameter at a path is kept.

        Raises:
          ValueError: there is none.
        """
        if path not in self._leaves:
            raise ValueError(f"{self.directory} has no parameter {'.'.join(map(str, path))}.")
        return self._leaves[path]

    def read(self, name: str) -> np.ndarray:
        """A stored tensor that was kept as it is (parameters are read by `parameter`).

        Raises:
          ValueError: it became part of a parameter, or the array is damaged.
        """
        leaf = self._of_name[name]
        if leaf.path[0] != EXTRA:
            raise ValueError(f"{name} of {self.directory} is part of parameter {leaf.path}.")
        return self.arrays(leaf)[0]

    def read_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a stored tensor that was kept as it is, without reading the rest."""
        (array,) = self._of_name[name].arrays()
        store = open_array(self.directory / ARRAYS / array)
        return np.concatenate([store[int(r) : int(r) + 1].read().result() for r in rows])

    def arrays(self, leaf: Leaf) -> list[np.ndarray]:
        """The arrays of a parameter, read whole: one, or codes and scales.

        Raises:
          ValueError: they are not what was written.
        """
        out = []
        for name, (shape, dtype) in leaf.arrays().items():
            try:
                value = np.asarray(open_array(self.directory / ARRAYS / name).read().result())
            except (ValueError, OSError) as error:
                raise ValueError(f"{self.directory}: {name} is damaged ({error}).") from error
            found = hashlib.sha256(raw_bytes(value)).hexdigest()
            if found != self.manifest.sha256[name] or value.shape != shape or value.dtype != dtype:
                raise ValueError(
                    f"{self.directory}: {name} is not what was written (sha256 {found[:12]}.., "
                    f"expected {self.manifest.sha256[name][:12]}..); convert again."
                )
            out.append(value)
        return out

    def rows(self, array: str, begin: int, end: int) -> np.ndarray:
        """Some rows of the first axis of an array, their checksum not compared."""
        return np.asarray(open_array(self.directory / ARRAYS / array)[begin:end].read().result())

    def parameter(self, rule: TensorRule, dtype: np.dtype) -> np.ndarray:
        """The parameter of a rule, dequantised if it is kept quantised."""
        leaf = self.leaf(rule.path)
        if leaf.form == "plain":
            return self.arrays(leaf)[0].astype(dtype, copy=False)
        stored = dict(zip(leaf.names, leaf.matrices(*self.arrays(leaf)), strict=True))
        return pack_groups(rule, lambda name: dequantise(*stored[name], leaf), dtype)

    def packed(self, rule: TensorRule) -> Packed:
        """Codes and scales of a parameter that is kept quantised.

        Raises:
          ValueError: it is not.
        """
        leaf = self.leaf(rule.path)
        if leaf.form == "plain":
            raise ValueError(not_packed(self.directory, rule, leaf.dtype))
        codes, scales = self.arrays(leaf)
        return codes, scales, leaf.form, leaf.block


def is_packed(name: str, kind: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a stored tensor holds two FP4 codes a byte: it is of bytes and has a scale."""
    return kind in ("I8", "U8") and f"{name.removesuffix('weight')}scale" in tensors


def dequantise(codes: np.ndarray, scales: np.ndarray, leaf: Leaf) -> np.ndarray:
    """The values f32[out, in] of one stored matrix of a quantised parameter."""
    if leaf.form == "fp4":
        return dequantise_fp4(codes, scales)
    return dequantise_fp8(codes.view(jnp.float8_e4m3fn), scales, leaf.block)


def verify(directory: str | Path, say: Callable[[str], None]) -> int:
    """Reads every array of a converted directory and compares its checksum.

    Args:
      directory: made by the converter.
      say: called with a line per parameter.

    Returns:
      The number of arrays.

    Raises:
      FileNotFoundError: an array is missing.
      ValueError: one is not what was written.
    """
    reader = OrbaxReader(directory)
    count = 0
    for leaf in reader.manifest.leaves:
        count += len(reader.arrays(leaf))
        say(f"ok  {', '.join(leaf.arrays())}")
    return count


def _array_path(leaf: Leaf, name: str) -> Iterable[str]:
    path = [str(part) for part in leaf.path]
    return path if leaf.form == "plain" else [*path, name.rpartition(".")[2]]


def _leaf(stored: Mapping[str, Any]) -> Leaf:
    lists = {"path", "names", "shape", "block", "heights"}
    return Leaf(**{k: tuple(v) if k in lists and v is not None else v for k, v in stored.items()})
