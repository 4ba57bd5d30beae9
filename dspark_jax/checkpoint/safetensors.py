"""Safetensors files, single or sharded, read one tensor at a time."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

FLOAT_TYPES = ("F32", "F16", "BF16")
NUMPY_TYPES = {
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}


class TensorReader:
    """The tensors of a checkpoint directory by name, opened lazily.

    Args:
      directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
      strip: prefixes removed from stored names, as often as one matches. What `torch.compile`
        inserts (`_orig_mod.`) is removed wherever it stands.

    Raises:
      FileNotFoundError: no weights, or a shard named by the index is missing.
      ValueError: a file is truncated or damaged, or a name occurs in two files.
    """

    def __init__(self, directory: str | Path, *, strip: tuple[str, ...] = ()):
        self.directory = Path(directory)
        self._files = {}  # our name -> (file, stored name, path)
        self._offsets = {}  # path -> stored name -> bounds in bytes, for what is read raw
        for path in _weight_files(self.directory):
            file = _open(path)
            for stored in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                name = stored.replace("_orig_mod.", "")
                while any(name.startswith(prefix) for prefix in strip):
                    for prefix in strip:
                        name = name.removeprefix(prefix)
                if name in self._files:
                    raise ValueError(
                        f"tensor {name} occurs twice in {self.directory} (the second as {stored} "
                        f"in {path.name}); remove one of them."
                    )
                self._files[name] = (file, stored, path)

    def names(self) -> set[str]:
        """All tensor names, prefixes stripped."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape of one tensor."""
        file, stored, _ = self._files[name]
        return tuple(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """Stored type in safetensors' words, such as BF16."""
        file, stored, _ = self._files[name]
        return file.get_slice(stored).get_dtype()

    def stored_name(self, name: str) -> str:
        """The name in the file, prefixes included."""
        return self._files[name][1]

    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted({path for _, _, path in self._files.values()})

    def read(self, name: str) -> np.ndarray:
        """One tensor as a NumPy array (bfloat16 and float8 by ml_dtypes).

        The bytes are read, not mapped, so that what is no longer needed is not counted as used.

        Raises:
          KeyError: no such tensor.
          ValueError: of a type NumPy does not have, or the file was cut while it was open.
        """
        return self._read(name, 0, None).reshape(self.shape(name))

    def _read(self, name: str, first: int, count: int | None) -> np.ndarray:
        """Values of a tensor from `first` on, in C order; None is all."""
        _, stored, path = self._files[name]
        if (kind := self.dtype(name)) not in NUMPY_TYPES:
            raise ValueError(f"{path}: {stored} is {kind}; expected one of {sorted(NUMPY_TYPES)}.")
        if path not in self._offsets:
            self._offsets[path] = _data_offsets(path)
        begin, end = self._offsets[path][stored]
        dtype = NUMPY_TYPES[kind]
        count = (end - begin) // dtype.itemsize if count is None else count
        at, size = begin + first * dtype.itemsize, count * dtype.itemsize
        data = np.fromfile(path, np.uint8, count=size, offset=at)
        if data.size != size:
            raise ValueError(f"{path} was cut while it was being read; fetch it again.")
        return data.view(dtype)

    def read_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of one tensor, without reading the rest.

        Args:
          name: the tensor.
          rows: i64[n], indices into its first axis.

        Returns:
          [n, ..], in the stored type.
        """
        rest = self.shape(name)[1:]
        width = math.prod(rest)
        parts = [self._read(name, int(row) * width, width) for row in rows]
        return np.stack(parts).reshape(len(rows), *rest)


def save_tensors(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one safetensors file, whole or not at all.

    Args:
      path: the file to write; a temporary beside it is renamed into place.
      tensors: name -> array.

    Raises:
      OSError: the disk is full or the directory is not writable; an older file stays as it was.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(
            {name: np.asarray(value, order="C") for name, value in tensors.items()},
            partial,
            metadata={"format": "pt"},
        )
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"could not write {path}: {error}; free some space or choose another directory."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is damaged ({error!r}); fetch it again.") from error
        missing = [name for name in shards if not (directory / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{directory} lacks the shards {missing} named by {index.name}; fetch them."
            )
        return [directory / name for name in shards]
    if single.is_file():
        return [single]
    raise FileNotFoundError(
        f"{directory} has no model.safetensors and no model.safetensors.index.json; "
        "expected weights in the Hugging Face layout."
    )


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); fetch it again."
        ) from error


def _data_offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor begins and ends in a file that was opened without complaint."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    start = 8 + size
    return {
        name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in header.items()
    }
