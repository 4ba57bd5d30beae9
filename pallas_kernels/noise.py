"""Gumbel noise made where it is used, so that noise of a whole vocabulary never lies in memory.

Written out from the Threefry hash in plain arithmetic, which kernels may use too. Column v of a key
gets the number that `jax.random.gumbel(key, (V,))` has there, for any V.
"""

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_TINY = np.finfo(np.float32).tiny


def gumbel_at(key: tuple[jax.Array, jax.Array], column: jax.Array) -> jax.Array:
    """Noise of given columns.

    Args:
      key: the two words of a Threefry key, u32[..], broadcast against `column`.
      column: i32[..], index into the vocabulary.

    Returns:
      f32[..].

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Threefry-2x32 with
    20 rounds; `jax.random.gumbel` for how bits become a float.
    """
    low = column.astype(jnp.uint32)
    high, low = _threefry(key, (jnp.zeros_like(low), low))
    mantissa = ((high ^ low) >> np.uint32(9)) | np.uint32(0x3F800000)
    uniform = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform + _TINY, _TINY)))


def _threefry(
    key: tuple[jax.Array, jax.Array], count: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    a, b = count[0] + schedule[0], count[1] + schedule[1]
    for turn in range(5):
        for shift in _ROTATIONS[turn % 2]:
            a = a + b
            b = ((b << np.uint32(shift)) | (b >> np.uint32(32 - shift))) ^ a
        a = a + schedule[(turn + 1) % 3]
        b = b + schedule[(turn + 2) % 3] + np.uint32(turn + 1)
    return a, b


def is_key(noise: jax.Array) -> bool:
    """Whether `noise` is the data of keys, u32[.., 2], rather than noise f32[.., V]."""
    return noise.dtype == jnp.uint32


def check_noise(noise: jax.Array, rows: tuple[int, ...], vocab: int) -> None:
    """Refuses noise that does not belong to rows of this shape.

    Raises:
      ValueError: neither f32[*rows, vocab] nor u32[*rows, 2].
    """
    fits = noise.dtype == jnp.float32 and noise.shape == (*rows, vocab)
    if not fits and not (is_key(noise) and noise.shape == (*rows, 2)):
        raise ValueError(
            f"noise is {noise.dtype}{list(noise.shape)}; expected float32 noise "
            f"{[*rows, vocab]}, or uint32 key data {[*rows, 2]}"
        )


def full_noise(noise: jax.Array, columns: int, first: jax.Array | int = 0) -> jax.Array:
    """Noise of columns first .. first+columns-1, f32[.., columns].

    Args:
      noise: those columns' noise already, or the data of keys u32[.., 2].
      columns: how many.
      first: the first of them, where this is a shard of the vocabulary.
    """
    if not is_key(noise):
        return noise
    return gumbel_at((noise[..., :1], noise[..., 1:]), first + jnp.arange(columns))
