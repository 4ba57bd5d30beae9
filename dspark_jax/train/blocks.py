"""Anchors, block rows and labels of a training batch.

An anchor at position a starts a block: row k holds the anchor's token (k = 0) or the mask token,
sits at position a + k, and predicts token a + k + 1. The block sees context rows before a only.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig


@flax.struct.dataclass
class TrainBatch:
    """Sequences with the target's hidden states, and the anchors to train on.

    Several documents may share a row: `segments` tells them apart. A row may also be a crop of a
    document; `positions` are the tokens' places in the whole document.
    """

    tokens: jax.Array  # i32[B, S]
    loss_mask: jax.Array  # bool[B, S], tokens the target wrote
    positions: jax.Array  # i32[B, S], place in the document
    segments: jax.Array  # i32[B, S], document number in the row; 0 is padding
    context_features: jax.Array  # [B, S, M*D]
    target_hidden: jax.Array  # [B, S, D], after the target's final norm
    anchors: jax.Array  # i32[B, A], indices into S
    keep: jax.Array  # bool[B, A]; false marks an unused slot


@flax.struct.dataclass
class BlockRows:
    """The rows of every block and what they are trained on."""

    input_ids: jax.Array  # i32[B, A, K]
    positions: jax.Array  # i32[B, A, K]
    previous: jax.Array  # i32[B, A, K], the token before the one that row k predicts
    labels: jax.Array  # i32[B, A, K]
    supervised: jax.Array  # bool[B, A, K], prefix-closed along K


def sample_anchors(
    key: jax.Array, loss_mask: jax.Array, segments: jax.Array, num_anchors: int
) -> tuple[jax.Array, jax.Array]:
    """Draws anchors uniformly without replacement, in ascending order.

    A position qualifies when the target wrote its token and the next one of the same document, so
    the first token of an answer is an anchor but never a label of row 0.

    Args:
      key: PRNG key.
      loss_mask: bool[B, S].
      segments: i32[B, S].
      num_anchors: A; where fewer positions qualify, the rest is at 0 with `keep` false.

    Returns:
      anchors i32[B, A] and keep bool[B, A].

    Source: DeepSpec's anchor sampling.
    """
    batch, length = loss_mask.shape
    follows = loss_mask[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    valid = jnp.pad(loss_mask[:, :-1] & follows, ((0, 0), (0, 1)))
    noise = jnp.where(valid, jax.random.uniform(key, (batch, length)), 2.0)
    count = min(num_anchors, length)
    chosen = jnp.argsort(noise, axis=1)[:, :count]
    keep = jnp.take_along_axis(valid, chosen, axis=1)
    anchors = jnp.sort(jnp.where(keep, chosen, length), axis=1)
    keep = anchors < length
    anchors = jnp.where(keep, anchors, 0)
    spare = ((0, 0), (0, num_anchors - count))
    return jnp.pad(anchors, spare).astype(jnp.int32), jnp.pad(keep, spare)


def block_rows(config: DraftConfig, batch: TrainBatch) -> BlockRows:
    """Inputs, labels and the evaluation mask of every block.

    A row is supervised when its label lies in the same document, was written by the target, and
    so did every label before it in the block.

    Args:
      config: the draft's architecture (K, mask token).
      batch: see `TrainBatch`.

    Returns:
      The rows [B, A, K].

    Source: DeepSpec (labels ids[a+1..a+B], cumulative evaluation mask).
    """
    length = batch.tokens.shape[1]
    offset = jnp.arange(config.block_size)
    at = batch.anchors[..., None] + offset  # [B, A, K]

    def take(values: jax.Array, index: jax.Array) -> jax.Array:
        flat = jnp.minimum(index, length - 1).reshape(index.shape[0], -1)
        return jnp.take_along_axis(values, flat, axis=1).reshape(index.shape)

    previous = take(batch.tokens, at)
    first = jnp.where(batch.keep[..., None], previous, config.mask_token_id)
    input_ids = jnp.where(offset == 0, first, config.mask_token_id)
    own = take(batch.segments, batch.anchors[..., None])
    same = (at + 1 < length) & (take(batch.segments, at + 1) == own)
    supervised = same & take(batch.loss_mask, at + 1) & batch.keep[..., None]
    return BlockRows(
        input_ids=input_ids,
        positions=take(batch.positions, batch.anchors[..., None]) + offset,
        previous=previous,
        labels=take(batch.tokens, at + 1),
        supervised=jnp.cumprod(supervised, axis=-1).astype(bool),
    )


def slot_hidden(batch: TrainBatch, block_size: int) -> jax.Array:
    """The target's hidden state behind each label: rows a .. a+K-1 of `target_hidden`.

    Returns:
      [B, A, K, D]; rows past the end repeat the last one and are never supervised.
    """
    at = batch.anchors[..., None] + jnp.arange(block_size)
    at = jnp.minimum(at, batch.tokens.shape[1] - 1)
    rows = jnp.arange(batch.tokens.shape[0])[:, None, None]
    return batch.target_hidden[rows, at]
