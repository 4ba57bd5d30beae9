"""Arrays of a converted directory: Zarr, uncompressed, in files that suit a mesh."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

ARRAYS = "params"  # the Orbax checkpoint in a converted directory
CHUNK_BYTES = 128 << 20  # a file of an array holds no more than this


class ArrayWriter:
    """One array being written, from its first rows to its last.

    Args:
      directory: the converted directory.
      name: of the array.
      shape: its shape.
      dtype: its type.
      chunk: of `chunk_shape`.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        chunk: tuple[int, ...],
    ):
        self.name, self._shape, self._done = name, shape, 0
        self._step = chunk[0] if chunk else 1
        self._digest = hashlib.sha256()
        metadata = {
            "shape": list(shape), "chunks": list(chunk), "dtype": _zarr_type(dtype),
            "compressor": None, "fill_value": None,
        }  # fmt: skip
        self._store = open_array(directory / ARRAYS / name, metadata)

    def write(self, rows: np.ndarray) -> None:
        """Appends rows of the first axis (the whole, for a scalar).

        Raises:
          OSError: the disk is full or not writable.
        """
        rows = np.ascontiguousarray(rows).reshape(rows.shape)
        count = rows.shape[0] if rows.shape else 1
        try:
            if not rows.shape:
                self._store.write(rows).result()
            for begin in range(0, count, self._step) if rows.shape else ():  # the rows of a file
                part, at = rows[begin : begin + self._step], self._done + begin
                self._store[at : at + len(part)].write(part).result()
        except Exception as error:  # the storage layer reports a full disk in several types
            raise OSError(
                f"could not write {self.name}: {error}; free some space, or choose another disk."
            ) from error
        self._digest.update(raw_bytes(rows))
        self._done += count

    def finish(self) -> str:
        """Hex sha256 of all rows.

        Raises:
          ValueError: rows are missing.
        """
        expected = self._shape[0] if self._shape else 1
        if self._done != expected:
            raise ValueError(f"{self.name}: {self._done} of {expected} rows were written.")
        return self._digest.hexdigest()


def chunk_shape(
    shape: tuple[int, ...], itemsize: int, *, entries: int = 0, parts: Sequence[int] = ()
) -> tuple[int, ...]:
    """How an array is cut into files.

    Args:
      shape: of the array.
      itemsize: bytes of an element.
      entries: rows of the first axis written at a time; 0 is all of them.
      parts: along each axis, the number of devices it is spread over; () is one.

    Returns:
      Shape of a file: no device needs a part of one, and none is above `CHUNK_BYTES` unless a
      single row is.
    """
    parts = tuple(parts) or (1,) * len(shape)
    chunk = [max(1, -(-size // count)) for size, count in zip(shape, parts, strict=True)]
    if entries and shape:
        chunk[0] = math.gcd(chunk[0], entries)
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        axis = next((i for i, size in enumerate(chunk) if size > 1 and size % 2 == 0), None)
        if axis is None:
            axis = max(range(len(chunk)), key=chunk.__getitem__)
            if parts[axis] > 1:  # an odd part cannot be halved without straddling devices
                break
        chunk[axis] = -(-chunk[axis] // 2)
    return tuple(chunk)


def open_array(path: Path, metadata: Mapping[str, Any] | None = None) -> ts.TensorStore:
    """Opens an array; with metadata, a new one."""
    files = {"driver": "file", "path": f"{path}/", "file_io_sync": False}
    spec = {"driver": "zarr", "kvstore": files}
    if metadata is None:
        return ts.open(spec).result()
    return ts.open(spec | {"metadata": dict(metadata)}, create=True, delete_existing=True).result()


def _zarr_type(dtype: np.dtype) -> str:
    own = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    return dtype.name if dtype in map(np.dtype, own) else dtype.str


def raw_bytes(value: np.ndarray) -> memoryview:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
