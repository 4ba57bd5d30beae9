"""What one pass over a row of logits leaves behind: enough to normalise, look up and sample.

The same five numbers come from a whole row, from tiles folded one after the other, and from shards
of the vocabulary, which exchange only these.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

GREEDY_BELOW = 1e-5  # temperatures below this are exactly greedy
_FAR = 2**31 - 1


class RowStats(NamedTuple):
    """Per row of logits; the shape of all is that of the rows, in kernels with a 1 behind."""

    top: jax.Array  # f32, the largest scaled logit
    total: jax.Array  # f32, sum of exp(scaled - top)
    chosen: jax.Array  # f32, the scaled logit of the token asked for; -inf if not in this shard
    best_value: jax.Array  # f32, the largest of scaled + noise; of the logits, where greedy
    best: jax.Array  # i32, its token; the lowest of equals

    @property
    def log_normaliser(self) -> jax.Array:
        """log of the sum of exp(scaled)."""
        return self.top + jnp.log(self.total)


def scale(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """float32 logits over the temperature; as they are where that is greedy."""
    return logits.astype(jnp.float32) / jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)


def perturb(scaled: jax.Array, temperature: jax.Array, noise: jax.Array) -> jax.Array:
    """What the drawn token maximises."""
    return jnp.where(temperature < GREEDY_BELOW, scaled, scaled + noise)


def empty_stats(shape: tuple[int, ...]) -> RowStats:
    """Stats of no columns at all."""
    low = jnp.full(shape, -jnp.inf)
    zero = jnp.zeros(shape, jnp.float32)
    return RowStats(low, zero, low, low, jnp.zeros(shape, jnp.int32))


def fold_columns(
    stats: RowStats,
    scaled: jax.Array,
    perturbed: jax.Array,
    column: jax.Array,
    token: jax.Array,
    valid: jax.Array,
) -> RowStats:
    """Stats after some more columns, later ones than any before.

    Args:
      stats: so far, each [.., 1].
      scaled: f32[.., v].
      perturbed: f32[.., v].
      column: i32[.., v], the tokens these columns belong to.
      token: i32[.., 1], whose logit is asked for.
      valid: bool[.., v]; other columns may hold anything.

    Returns:
      The stats, each [.., 1].
    """
    scaled = jnp.where(valid, scaled, -jnp.inf)
    top = jnp.maximum(stats.top, scaled.max(axis=-1, keepdims=True))
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    total = jnp.exp(scaled - safe).sum(axis=-1, keepdims=True)
    hit = jnp.where(column == token, scaled, -jnp.inf).max(axis=-1, keepdims=True)
    best_value, best = fold_best(stats.best_value, stats.best, perturbed, column, valid)
    return RowStats(
        top=top,
        total=stats.total * jnp.exp(stats.top - safe) + total,
        chosen=jnp.maximum(stats.chosen, hit),
        best_value=best_value,
        best=best,
    )


def fold_best(
    best_value: jax.Array, best: jax.Array, value: jax.Array, column: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Running argmax [.., 1] over some more columns [.., v]; the first of equals stays."""
    value = jnp.where(valid, value, -jnp.inf)
    peak = value.max(axis=-1, keepdims=True)
    at = jnp.where(value == peak, column, _FAR).min(axis=-1, keepdims=True)
    better = peak > best_value
    return jnp.where(better, peak, best_value), jnp.where(better, at, best)


def whole_row(
    scaled: jax.Array, perturbed: jax.Array, token: jax.Array, first: jax.Array | int
) -> RowStats:
    """Stats of all columns at once: the definition.

    Args:
      scaled: f32[.., v].
      perturbed: f32[.., v].
      token: i32[..].
      first: the token of column 0.

    Returns:
      The stats, each [..].
    """
    column = jnp.arange(scaled.shape[-1])
    inside = column == (token - first)[..., None]
    top = scaled.max(axis=-1)
    safe = jnp.where(top == -jnp.inf, 0.0, top)[..., None]
    return RowStats(
        top=top,
        total=jnp.exp(scaled - safe).sum(axis=-1),
        chosen=jnp.where(inside, scaled, -jnp.inf).max(axis=-1),
        best_value=perturbed.max(axis=-1),
        best=first + jnp.argmax(perturbed, axis=-1).astype(jnp.int32),
    )


def merge_shards(stats: RowStats, axis_name: str | None) -> RowStats:
    """Stats over the whole vocabulary from those of its shards, with one all-gather of 5 numbers.

    Args:
      stats: of this shard; `best` counts tokens of the whole vocabulary.
      axis_name: mesh axis the vocabulary is sharded over, in order; None if it is not.

    Returns:
      The same on every shard.
    """
    if axis_name is None:
        return stats
    every = RowStats(*gather_shards(stats, axis_name))
    top = every.top.max(axis=0)
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    winner = jnp.argmax(every.best_value, axis=0)[None]
    return RowStats(
        top=top,
        total=(every.total * jnp.exp(every.top - safe)).sum(axis=0),
        chosen=every.chosen.max(axis=0),
        best_value=every.best_value.max(axis=0),
        best=jnp.take_along_axis(every.best, winner, axis=0)[0],
    )


def gather_shards(arrays: tuple[jax.Array, ...], axis_name: str) -> tuple[jax.Array, ...]:
    """Each array with an axis of shards before it; float32 and int32 in one all-gather."""
    bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays]
    every = jax.lax.all_gather(jnp.stack(bits), axis_name)
    return tuple(jax.lax.bitcast_convert_type(every[:, i], x.dtype) for i, x in enumerate(arrays))


def first_column(columns: int, axis_name: str | None) -> jax.Array | int:
    """The token of this shard's first column."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name) * columns
