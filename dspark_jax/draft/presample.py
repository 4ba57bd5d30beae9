"""Confidence before a single draft is drawn.

The confidence head wants the embedding of the token before draft k. Hidden states and base logits
of a block do not depend on any draft (the backbone runs once), so the expected embedding under the
base logits stands in for it. What comes out is a function of the context and the anchor only.
"""

import jax
import jax.numpy as jnp

from dspark_jax.draft.confidence import confidence_logits
from dspark_jax.sampling import GREEDY_BELOW
from dspark_jax.sharding import axis_size, spec_here, split_axes
from dspark_jax.types import Params, SharedHead

LIKELIEST = 64  # tokens the expectation is taken over
GROUP = 16  # logits compared first, which is cheaper than ranking a whole vocabulary


def presampled_logits(
    params: Params,
    shared: SharedHead,
    *,
    anchor: jax.Array,
    block_hidden: jax.Array,
    base_logits: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Confidence logits of a block whose drafts do not exist yet.

    The expectation leaves out the Markov bias, as the token it depends on is not known (and with
    it the state of the `rnn` head, which acts through the bias alone), and top-k, top-p and min-p.
    The temperatures that calibrate these logits are therefore a set of their own.

    Args:
      params: the draft's, with a confidence head.
      shared: for the ids of a reduced vocabulary.
      anchor: i32[R].
      block_hidden: [R, K, D].
      base_logits: f32[R, K, Vd].
      temperature: f32[R], of the draws; 0 takes the likeliest token.

    Returns:
      f32[R, K].

    Source: paper eq. 7 with W1[x_{k-1}] replaced by its expectation.
    """
    head = params["confidence"]
    if head["weight"].shape[0] == block_hidden.shape[-1]:  # it does not look at tokens
        return confidence_logits(head, block_hidden, None)
    table = params["markov"]["w1"]
    before = base_logits[:, :-1]
    values, rows = likeliest(before, LIKELIEST)
    cooled = values / jnp.maximum(temperature, GREEDY_BELOW)[:, None, None]
    weights = jax.nn.softmax(cooled, axis=-1).astype(table.dtype)
    ids = rows if shared.target_ids is None else shared.target_ids[rows]
    expected = jnp.einsum("rkn,rknq->rkq", weights, table[ids])
    embedding = jnp.concatenate([table[anchor][:, None], expected], axis=1)
    return confidence_logits(head, block_hidden, embedding)


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits of each row, by way of the groups with the largest maxima.

    At most count - 1 logits exceed one of the `count` largest, so no more groups can come before
    its own: looking into `count` groups finds them all.

    Args:
      logits: f32[.., V].
      count: at least 1; all of V if that is less.

    Returns:
      Values f32[.., count], descending, and indices i32[.., count].
    """
    size, shards = logits.shape[-1], axis_size("vocab")
    if shards > 1 and size % shards == 0:
        return _likeliest_of_parts(logits, count)
    return _likeliest(logits, count)


def _likeliest_of_parts(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`likeliest` of a vocabulary that is split over devices: each finds its own, all compare."""
    (axis,) = spec_here("vocab")

    def part(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = _likeliest(logits, count)
        ids = ids + logits.shape[-1] * jax.lax.axis_index(axis)
        last = logits.ndim - 1
        values, ids = (jax.lax.all_gather(x, axis, axis=last, tiled=True) for x in (values, ids))
        values, best = jax.lax.top_k(values, min(count, values.shape[-1]))
        return values, jnp.take_along_axis(ids, best, axis=-1)

    return jax.shard_map(
        part,
        in_specs=spec_here(*[None] * (logits.ndim - 1), "vocab"),
        out_specs=spec_here(),
        axis_names=set(split_axes()),
        check_vma=False,
    )(logits)


def _likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    size = logits.shape[-1]
    if size <= count * GROUP:
        return jax.lax.top_k(logits, min(count, size))
    margins = [(0, 0)] * (logits.ndim - 1) + [(0, -size % GROUP)]
    padded = jnp.pad(logits, margins, constant_values=-jnp.inf)
    groups = padded.reshape(*logits.shape[:-1], GROUP, -1)
    _, best = jax.lax.top_k(groups.max(axis=-2), count)
    candidates = jnp.take_along_axis(groups, best[..., None, :], axis=-1)
    values, place = jax.lax.top_k(candidates.reshape(*best.shape[:-1], -1), count)
    group = jnp.take_along_axis(best, place % count, axis=-1)
    return values, place // count * groups.shape[-1] + group
