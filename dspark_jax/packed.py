"""Experts that stay quantised in memory: their matrices are dequantised one at a time, as used.

The whole stack of a layer's experts never exists in a wider type: a grouped matmul walks over the
experts that got tokens, and holds one dequantised matrix at a time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

TILE = 128  # rows multiplied at a time; an expert with more rows takes several steps
SCALE_BYTES = (10, 245)  # scales outside would make float32 values subnormal or infinite


@struct.dataclass
class PackedKernel:
    """A stack of quantised matrices, in the orientation they are stored in.

    Attributes:
      codes: u8[E, .., out, in / n], n = 2 e2m1 codes a byte (the low nibble first) in "fp4", the
        bits of one float8_e4m3fn in "fp8".
      scales: u8[E, .., ceil(out / rows), ceil(in / columns)], exponents b of 2^(b - 127).
      form: "fp4" or "fp8".
      block: rows and columns that share a scale.
    """

    codes: jax.Array
    scales: jax.Array
    form: str = struct.field(pytree_node=False)
    block: tuple[int, int] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, .., out, in] of the values."""
        *rest, width = self.codes.shape
        return (*rest, width * (2 if self.form == "fp4" else 1))

    def values(self, dtype: jnp.dtype) -> jax.Array:
        """All matrices dequantised, [E, .., out, in]."""
        return dequantise(self.codes, self.scales, form=self.form, block=self.block).astype(dtype)

    def matrix(self, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The matrices of one expert, one below the other: [.. * out, in]."""
        codes, scales = (
            jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
            for x in (self.codes, self.scales)
        )
        values = dequantise(codes, scales, form=self.form, block=self.block)
        return values.reshape(-1, values.shape[-1]).astype(dtype)


def dequantise(
    codes: jax.Array, scales: jax.Array, *, form: str, block: tuple[int, int]
) -> jax.Array:
    """The values of quantised matrices.

    Args:
      codes: u8[.., out, in / n], see `PackedKernel`.
      scales: u8[.., ceil(out / rows), ceil(in / columns)] with bytes within `SCALE_BYTES`.
      form: "fp4" or "fp8".
      block: rows and columns that share a scale.

    Returns:
      f32[.., out, in], exact.
    """
    values = _e2m1(codes) if form == "fp4" else _e4m3(codes)
    full = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    for axis, size in zip((-2, -1), block, strict=True):
        full = jnp.repeat(full, size, axis=axis) if size > 1 else full
    return values * full[..., : values.shape[-2], : values.shape[-1]]


def packed_dot(rows: jax.Array, kernel: PackedKernel, sizes: jax.Array) -> jax.Array:
    """A grouped matmul: `jax.lax.ragged_dot` for a kernel that stays quantised.

    Args:
      rows: [A, in], grouped by expert.
      kernel: of E experts.
      sizes: i32[E], rows of each; rows beyond their sum belong to none.

    Returns:
      f32[A, .. * out]; zeros for rows of no expert.
    """
    width = kernel.codes[0].size // kernel.codes.shape[-1]
    return tiled_dot(rows, lambda index: kernel.matrix(index, rows.dtype), sizes, width=width)


def tiled_dot(
    rows: jax.Array, matrix_of: Callable[[jax.Array], jax.Array], sizes: jax.Array, *, width: int
) -> jax.Array:
    """Multiplies groups of rows with a matrix each, a tile of rows of one group at a time.

    Args:
      rows: [A, in], grouped.
      matrix_of: index of a group -> its matrix [width, in]; called once per tile.
      sizes: i32[E], rows of each group.
      width: of the result.

    Returns:
      f32[A, width]; zeros for rows of no group.
    """
    tile = min(TILE, rows.shape[0])
    ends, tiles = jnp.cumsum(sizes), jnp.cumsum(-(-sizes // tile))
    padded = jnp.pad(rows, ((0, tile), (0, 0)))

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(tiles, index, side="right")
        done = index - jnp.where(group > 0, tiles[group - 1], 0)
        begin = ends[group] - sizes[group] + done * tile
        x = jax.lax.dynamic_slice_in_dim(padded, begin, tile)
        y = jax.lax.dot_general(
            x, matrix_of(group), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        mine = (begin + jnp.arange(tile) < ends[group])[:, None]
        old = jax.lax.dynamic_slice_in_dim(out, begin, tile)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, y, old), begin, axis=0)

    out = jnp.zeros((rows.shape[0] + tile, width), jnp.float32)
    return jax.lax.fori_loop(0, tiles[-1], step, out)[: rows.shape[0]]


def _e2m1(packed: jax.Array) -> jax.Array:
    """f32[.., 2n] of u8[.., n]: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign."""
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    codes = codes.astype(jnp.uint32)
    exponent, mantissa, sign = (codes >> 1) & 3, codes & 1, codes >> 3
    bits = (exponent + 126) << 23 | mantissa << 22
    bits = jnp.where(exponent == 0, jnp.where(mantissa == 1, jnp.uint32(126 << 23), 0), bits)
    return jax.lax.bitcast_convert_type(bits | sign << 31, jnp.float32)


def _e4m3(codes: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
