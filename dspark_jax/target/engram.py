"""Engram: embeddings of n-grams, looked up by hashes of the last tokens, gated into the residual.

A token's class (tokens that differ in case, accents or blanks share one) is multiplied by an odd
number per distance; the products of an n-gram are joined by exclusive or and reduced modulo a
prime per hash head. The products have up to 63 bits. JAX has 32 unless told otherwise, so a number
is held as eight digits of base 256 in uint32: every step below stays under 2^32.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config_deepseek_target import EngramConfig
from dspark_jax.layers import KERNEL_INIT

_SEED_STEP = 10007
_DIGITS, _BASE = 8, 256
_LEAST_DOT = 1e-6  # under the square root of the gate


def hash_multipliers(config: EngramConfig) -> np.ndarray:
    """Odd numbers that the classes at distance 0, 1, .. are multiplied by.

    Args:
      config: which layers, how many classes.

    Returns:
      i64[layers, max_ngram_size]; a product with a class is below 2^63.

    Source: DeepSeek V4.1 inference code, hashing of `Engram`.
    """
    bound = (2**63 - 1) // config.num_classes // 2
    rows = [
        np.random.default_rng(_SEED_STEP * layer).integers(
            0, bound, size=config.max_ngram_size, dtype=np.int64
        )
        for layer in config.layer_ids
    ]
    return np.stack(rows) * 2 + 1


def hash_primes(config: EngramConfig) -> np.ndarray:
    """Rows of every hash head's part of the table: primes, all different.

    Args:
      config: where they begin, how many are needed.

    Returns:
      i64[layers, max_ngram_size - 1, heads], ascending in this order.

    Source: DeepSeek V4.1 inference code, hashing of `Engram`.
    """
    shape = (len(config.layer_ids), config.max_ngram_size - 1, config.num_heads)
    found, number = [], config.vocab_size
    while len(found) < np.prod(shape):
        if _is_prime(number):
            found.append(number)
        number += 1
    return np.array(found, np.int64).reshape(shape)


def hash_offsets(config: EngramConfig) -> np.ndarray:
    """First row of every hash head's part: i64[layers, (max_ngram_size - 1) * heads]."""
    sizes = hash_primes(config).reshape(len(config.layer_ids), -1)
    return np.cumsum(sizes, axis=1) - sizes


def ngram_rows(config: EngramConfig, layer: int, classes: jax.Array, pad: jax.Array) -> jax.Array:
    """Rows of the table to look up for every token.

    Args:
      config: the hash.
      layer: which of `config.layer_ids`, by its place there.
      classes: i32[R, T], token classes from position 0 on.
      pad: i32[], the class that stands before position 0.

    Returns:
      i32[R, T, columns]: n = 2 first, its heads side by side.
    """
    multipliers, primes = hash_multipliers(config)[layer], hash_primes(config)[layer]
    width = classes.shape[1]
    filler = jnp.full((classes.shape[0], config.max_ngram_size - 1), pad, classes.dtype)
    padded = jnp.concatenate([filler, classes], axis=1).astype(jnp.uint32)
    first = config.max_ngram_size - 1
    mixed = _times(padded[:, first : first + width], int(multipliers[0]))
    columns = []
    for distance in range(1, config.max_ngram_size):
        begin = first - distance
        mixed = mixed ^ _times(padded[:, begin : begin + width], int(multipliers[distance]))
        columns.append(_modulo(mixed, primes[distance - 1]))
    rows = jnp.concatenate(columns, axis=-1)
    return rows.astype(jnp.int32) + hash_offsets(config)[layer].astype(np.int32)


def _times(x: jax.Array, factor: int) -> jax.Array:
    """u32[.., 8] digits, lowest first, of x (below 2^24) times a number, modulo 2^64."""
    carry, digits = jnp.zeros_like(x), []
    for i in range(_DIGITS):
        total = x * np.uint32((factor >> (8 * i)) & (_BASE - 1)) + carry
        digits.append(total & np.uint32(_BASE - 1))
        carry = total >> np.uint32(8)
    return jnp.stack(digits, axis=-1)


def _modulo(digits: jax.Array, primes: np.ndarray) -> jax.Array:
    """u32[.., p]: the number with these digits, modulo each of p primes below 2^24."""
    primes = primes.astype(np.uint32)
    rest = jnp.zeros((*digits.shape[:-1], len(primes)), jnp.uint32)
    for i in reversed(range(_DIGITS)):
        rest = (rest * np.uint32(_BASE) + digits[..., i, None]) % primes
    return rest


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    divisors = np.arange(2, int(number**0.5) + 1)
    return bool((number % divisors).all())


class Engram(nn.Module):
    """One layer's lookup: table [rows, h], kv [columns * h, n + 1, D], q_scale and k_scale [n, D].

    The n streams have a key each and share a value.

    Source: DeepSeek V4.1 inference code, `Engram`.
    """

    config: EngramConfig
    place: int  # in config.layer_ids
    norm_eps: float

    @nn.compact
    def __call__(self, residual: jax.Array, classes: jax.Array, pad: jax.Array) -> jax.Array:
        """Adds the gated value of every token's n-grams to its streams.

        Args:
          residual: [R, T, n, D].
          classes: i32[R, T].
          pad: i32[], class before position 0.

        Returns:
          [R, T, n, D].
        """
        cfg, (streams, width) = self.config, residual.shape[-2:]
        size, ones = cfg.num_embeddings[self.place], nn.initializers.ones_init()
        table = self.param("table", KERNEL_INIT, (size, cfg.head_dim))
        inner = cfg.num_columns * cfg.head_dim
        kv = self.param("kv", KERNEL_INIT, (inner, streams + 1, width))
        scale = self.param("q_scale", ones, (streams, width)).astype(jnp.float32)
        scale = scale * self.param("k_scale", ones, (streams, width)).astype(jnp.float32)
        found = table[ngram_rows(cfg, self.place, classes, pad)]
        found = found.reshape(*classes.shape, inner)
        y = jnp.einsum("rti,ind->rtnd", found, kv).astype(jnp.float32)
        keys, value, x = y[..., :streams, :], y[..., streams:, :], residual.astype(jnp.float32)
        sizes = self._inverse_size(x) * self._inverse_size(keys)
        dot = jnp.sum(x * keys * scale, axis=-1, keepdims=True) * sizes * width**-0.5
        gate = jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), _LEAST_DOT))
        return (x + jax.nn.sigmoid(gate) * value).astype(residual.dtype)

    def _inverse_size(self, x: jax.Array) -> jax.Array:
        return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.norm_eps)


def check_tables(config: EngramConfig) -> None:
    """Compares the tables' sizes with what the hash can reach.

    Args:
      config: sizes as the checkpoint has them.

    Raises:
      ValueError: a table is smaller; the hash would point beyond it.
    """
    for layer, needed, size in zip(
        config.layer_ids, hash_primes(config).sum(axis=(1, 2)), config.num_embeddings, strict=True
    ):
        if size < needed:
            raise ValueError(
                f"engram_num_embeddings gives layer {layer} {size} rows, but its hash reaches "
                f"{needed}; check engram_vocab_size={config.vocab_size}, engram_max_ngram_size and "
                "engram_n_heads."
            )
