"""Block-quantised tensors of DeepSeek V4 checkpoints, read as if they were plain.

FP8 matrices carry one power-of-two scale per square block, FP4 matrices two codes per byte and
one scale per 32 columns of a row, FP8 embedding tables (Engram) one per 32 columns of a row. The
scale of `X.weight` is `X.scale`.
"""

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.rules import TensorRule, pack_groups, read_parameter
from dspark_jax.checkpoint.safetensors import FLOAT_TYPES, TensorReader

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # e2m1 codes 0..7; bit 3 is sign
ROW_GROUP = (1, 32)  # rows and columns that share a scale in FP4 matrices and FP8 tables
_CODES = np.concatenate([FP4_VALUES, -FP4_VALUES])
_SCALES = np.append(2.0 ** np.arange(-127, 128), np.nan).astype(np.float32)  # by byte
# codes, scales (bytes), "fp4" or "fp8", block
Packed = tuple[np.ndarray, np.ndarray, str, tuple[int, int]]
_FP8_LARGEST = 448.0
_PACKED_TYPES = ("I8", "U8")
_FP8_TYPES = ("F8_E4M3",)
_SCALE_TYPES = ("F8_E8M0", "U8")
_FP8_TABLE = ".engram.embed.weight"


def decode_scales(stored: np.ndarray) -> np.ndarray:
    """E8M0 bytes b as 2^(b - 127).

    Args:
      stored: one byte per scale, of any type.

    Returns:
      f32 of the same shape; byte 255 is NaN, byte 0 the subnormal 2^-127.
    """
    return _SCALES[stored.view(np.uint8)]


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """The values of packed e2m1 codes, the low nibble of a byte first.

    Args:
      packed: one byte per two values, [.., n].

    Returns:
      f32[.., 2n].
    """
    codes = packed.view(np.uint8)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1)
    return _CODES[pairs].reshape(*packed.shape[:-1], -1)


def dequantise_fp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """An FP4 matrix.

    Args:
      packed: [out, in/2] bytes.
      scales: E8M0 bytes [out, ceil(in/32)].

    Returns:
      f32[out, in].
    """
    values = unpack_fp4(packed)
    per_column = np.repeat(decode_scales(scales), ROW_GROUP[1], axis=1)
    return values * per_column[:, : values.shape[1]]


def dequantise_fp8(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """An FP8 matrix with a scale per block.

    Args:
      values: float8_e4m3fn[out, in].
      scales: E8M0 bytes [ceil(out/block), ceil(in/block)].
      block: rows and columns of a block; those at the edges may be smaller.

    Returns:
      f32[out, in].
    """
    rows, columns = values.shape
    full = np.repeat(np.repeat(decode_scales(scales), block[0], axis=0), block[1], axis=1)
    return values.astype(np.float32) * full[:rows, :columns]


def stack(parts: Sequence[np.ndarray], group: int) -> np.ndarray:
    """Stored matrices of one parameter as one array.

    Args:
      parts: [out, in] each.
      group: of their `TensorRule`.

    Returns:
      [out, in] of a single matrix, [n, out, in] of several, [n / group, group, out, in] of experts
      with more than one matrix.
    """
    if len(parts) == 1 and not group:
        return parts[0]
    whole = np.stack(parts)
    return whole.reshape(-1, group, *whole.shape[1:]) if group > 1 else whole


def quantise_fp8(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in FP8, with the smallest power-of-two scale per block that loses no large value.

    Args:
      values: f32[out, in], finite.
      block: rows and columns of a block.

    Returns:
      u8[out, in], the bits of float8_e4m3fn, and E8M0 bytes u8[ceil(out/block), ceil(in/block)].

    Raises:
      ValueError: a value is not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("a matrix with infinities or NaN cannot be stored in FP8.")
    rows, columns = values.shape
    pad = [(0, -size % step) for size, step in zip(values.shape, block, strict=True)]
    tiles = np.pad(values, pad)
    tiles = tiles.reshape(tiles.shape[0] // block[0], block[0], -1, block[1])
    largest = np.abs(tiles).max(axis=(1, 3)) / _FP8_LARGEST
    fraction, exponent = np.frexp(largest)  # largest = fraction * 2^exponent, 0.5 <= fraction < 1
    exponent = np.clip(exponent - (fraction == 0.5), -126, 127)
    exponent = np.where(largest == 0, 0, exponent)
    tiles = np.ldexp(tiles, -exponent[:, None, :, None])
    full = tiles.reshape(tiles.shape[0] * block[0], -1)[:rows, :columns]
    codes = full.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, (exponent + 127).astype(np.uint8)


def not_packed(directory: Path, rule: TensorRule, kind: object) -> str:
    """The message for a parameter that should be quantised and is not."""
    name = ".".join(map(str, rule.path))
    return (
        f"{name} of {directory} is {kind}, not quantised in one way, and cannot stay packed; load "
        "it as float32 or bfloat16."
    )


class DequantisingReader:
    """A `TensorReader` whose quantised tensors look like float32 ones of their true shape.

    A scale is consumed with its weight and has no name of its own. A tensor that is not quantised
    passes as it is stored.

    Args:
      reader: the stored tensors.
      block: rows and columns of an FP8 block; None where the checkpoint has none.
      names: the stored tensors to look at; None takes all.

    Raises:
      ValueError: a quantised weight has no scale, one of another shape or type, a scale has no
        weight, or FP8 weights are there without a block size.
    """

    def __init__(
        self,
        reader: TensorReader,
        *,
        block: tuple[int, int] | None,
        names: set[str] | None = None,
    ):
        self.directory = reader.directory
        self._reader, self._block = reader, block
        have = reader.names() if names is None else names
        self._scales = {
            name: scale_of(name)
            for name in have
            if name.endswith(".weight") and reader.dtype(name) not in FLOAT_TYPES
        }
        problems = [p for name in sorted(self._scales) for p in self._problems(name, have)]
        used = set(self._scales.values())
        self._names = have - used
        orphans = sorted(n for n in self._names if n.endswith(".scale"))
        problems += [f"{name} is a scale without a quantised weight" for name in orphans]
        if problems:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ValueError(
                f"{self.directory} is not quantised as expected:\n  "
                + "\n  ".join(problems[:20] + more)
                + "\nCheck that config.json and the weights belong together."
            )

    def names(self) -> set[str]:
        """All tensor names but those of scales."""
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape after dequantisation."""
        stored = self._reader.shape(name)
        if self._is_packed(name):
            return (*stored[:-1], 2 * stored[-1])
        return stored

    def dtype(self, name: str) -> str:
        """F32 for a quantised tensor, else the stored type."""
        return "F32" if name in self._scales else self._reader.dtype(name)

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32 if it was quantised."""
        value = self._reader.read(name)
        if name not in self._scales:
            return value
        scales = self._reader.read(self._scales[name])
        if self._is_packed(name):
            return dequantise_fp4(value, scales)
        return dequantise_fp8(value, scales, self._block_of(name))

    def parameter(self, rule: TensorRule, dtype: np.dtype) -> np.ndarray:
        """The parameter of a rule."""
        if any(name in self._scales for name in rule.names):
            return pack_groups(rule, self.read, dtype)
        return read_parameter(self._reader, rule, dtype)

    def packed(self, rule: TensorRule) -> Packed:
        """Codes and scales of a parameter whose tensors are all quantised in one way.

        Raises:
          ValueError: they are not.
        """
        whole = getattr(self._reader, "packed", None)
        if whole:
            return whole(rule)
        forms = {
            ("fp4" if self._is_packed(name) else "fp8", self._block_of(name))
            if name in self._scales
            else self._reader.dtype(name)
            for name in rule.names
        }
        form = forms.pop()
        if forms or isinstance(form, str):
            raise ValueError(not_packed(self.directory, rule, form))
        codes = [self._reader.read(name).view(np.uint8) for name in rule.names]
        scales = [self._reader.read(self._scales[n]).view(np.uint8) for n in rule.names]
        return stack(codes, rule.group), stack(scales, rule.group), *form

    def _is_packed(self, name: str) -> bool:
        return name in self._scales and self._reader.dtype(name) in _PACKED_TYPES

    def _block_of(self, name: str) -> tuple[int, int] | None:
        row_wise = self._is_packed(name) or name.endswith(_FP8_TABLE)
        return ROW_GROUP if row_wise else self._block

    def _problems(self, name: str, have: set[str]) -> list[str]:
        kind, scale = self._reader.dtype(name), self._scales[name]
        if kind not in (*_PACKED_TYPES, *_FP8_TYPES):
            known = (*FLOAT_TYPES, *_FP8_TYPES, *_PACKED_TYPES)
            return [f"{name} is {kind}, expected one of {known}"]
        if scale not in have:
            return [f"{name} is {kind} but has no {scale}"]
        if self._reader.dtype(scale) not in _SCALE_TYPES:
            got = self._reader.dtype(scale)
            return [f"{scale} is {got}, expected one of {_SCALE_TYPES}"]
        shape = self.shape(name)
        if len(shape) != 2:
            return [f"{name} is {kind} with shape {list(shape)}, expected a matrix"]
        block = self._block_of(name)
        if block is None:
            return [f"{name} is {kind}, but config.json gives no weight_block_size"]
        expected = [-(-size // step) for size, step in zip(shape, block, strict=True)]
        got = list(self._reader.shape(scale))
        return [] if got == expected else [f"{scale} has shape {got}, expected {expected}"]


def scale_of(name: str) -> str:
    """Name of the scale that belongs to a quantised weight."""
    return name.removesuffix("weight") + "scale"
