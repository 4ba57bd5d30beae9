"""The verification rule of a round, from the target's logits to what is emitted.

The rules themselves are in `verify.py`, on log-probabilities. Work grows with the rows that were
verified, as this runs inside the branch that verified them. `pallas_kernels.speculative_accept`
does the same from logits alone, but the TPU compiler ends on some rounds that hold it in a branch
("required assignment is not equal to preferred offset"), so rounds do not call it.
"""

import jax
import jax.numpy as jnp

from dspark_jax.sampling import (
    Purpose,
    any_sampled,
    draw,
    gumbel,
    position_keys,
    round_keys,
    sample,
    sample_plain,
    warp,
)
from dspark_jax.types import AcceptResult, Block, Packing, SamplingParams, SharedHead
from dspark_jax.verify import accept_block, accept_coupled, accept_standard


def accept(
    block: Block,
    target_logits: jax.Array,
    packing: Packing,
    verify_len: jax.Array,
    *,
    sampling: SamplingParams,
    anchor_pos: jax.Array,
    round_index: jax.Array,
    shared: SharedHead,
    method: str,
) -> AcceptResult:
    """Applies the verification rule; a batch without sampling only compares argmaxes.

    Args:
      block: what was drafted.
      target_logits: f32[T, V], of the flat rows that were verified; work grows with T.
      packing: which request and row each flat row is.
      verify_len: i32[R], drafts sent to the target, 0..K.
      sampling: per-request settings, those the block was drafted with.
      anchor_pos: i32[R], position of the last committed token.
      round_index: i32[R], rounds each request has run.
      shared: with the ids of the draft's vocabulary, where that is reduced.
      method: "standard", "block" or "coupled".

    Returns:
      accept_len and the bonus token.
    """
    (total, vocab), (requests, width) = target_logits.shape, packing.index.shape

    def greedy() -> AcceptResult:
        best = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
        return accept_coupled(block.draft_tokens, packing.unpack(best), verify_len)

    def log_probs() -> jax.Array:
        return warp(target_logits, jax.tree.map(lambda x: x[packing.request], sampling))

    def sampled_coupled() -> AcceptResult:
        position = anchor_pos[packing.request] + 1 + packing.offset
        keys = position_keys(sampling.seed[packing.request], position)

        def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            return draw(row[0], jax.random.gumbel(row[1], (vocab,)))

        tokens = jax.lax.map(one, (log_probs(), keys), batch_size=min(requests, total))
        return accept_coupled(block.draft_tokens, packing.unpack(tokens), verify_len)

    def sampled_independently() -> AcceptResult:
        draft_log_probs = expand_vocabulary(block.draft_log_probs, shared)
        uniforms = _uniforms(sampling, anchor_pos, round_index, width - 1)
        keys = _residual_keys(sampling, anchor_pos, round_index)
        rule = {"standard": accept_standard, "block": accept_block}[method]
        return rule(
            block.draft_tokens, draft_log_probs, packing.unpack(log_probs()), verify_len,
            uniforms, gumbel(keys, vocab),
        )  # fmt: skip

    sampled = sampled_coupled if method == "coupled" else sampled_independently
    return jax.lax.cond(any_sampled(sampling), sampled, greedy)


def sample_undrafted(
    target_logits: jax.Array,
    *,
    sampling: SamplingParams,
    anchor_pos: jax.Array,
    round_index: jax.Array,
    method: str,
) -> jax.Array:
    """The target's token where no draft is verified: what `accept` gives for verify_len 0.

    Args:
      target_logits: f32[R, V], of the anchors' rows.
      sampling: per-request settings.
      anchor_pos: i32[R], position of the last committed token.
      round_index: i32[R], rounds each request has run.
      method: "standard", "block" or "coupled".

    Returns:
      i32[R].
    """
    if method == "coupled":
        return sample_plain(target_logits, sampling, anchor_pos + 1)
    return sample(target_logits, sampling, _residual_keys(sampling, anchor_pos, round_index))


def _uniforms(
    sampling: SamplingParams, anchor_pos: jax.Array, round_index: jax.Array, drafts: int
) -> jax.Array:
    """A number f32[R, K] for every draft."""

    def one(k: int) -> jax.Array:
        keys = round_keys(sampling.seed, round_index, anchor_pos + 1 + k, Purpose.ACCEPT)
        return jax.vmap(jax.random.uniform)(keys)

    return jnp.stack([one(k) for k in range(drafts)], axis=1)


def _residual_keys(
    sampling: SamplingParams, anchor_pos: jax.Array, round_index: jax.Array
) -> jax.Array:
    """key[R] of the token after the accepted drafts."""
    return round_keys(sampling.seed, round_index, anchor_pos, Purpose.RESIDUAL)


def expand_vocabulary(scores: jax.Array, shared: SharedHead) -> jax.Array:
    """A draft's logits or log-probabilities over the target's vocabulary.

    Args:
      scores: f32[.., Vd].
      shared: with `draft_ids` when the draft's vocabulary is reduced.

    Returns:
      f32[.., V], -inf for tokens that the draft cannot propose.
    """
    if shared.draft_ids is None:
        return scores
    return scores.at[..., shared.draft_ids].get(mode="fill", fill_value=-jnp.inf)
