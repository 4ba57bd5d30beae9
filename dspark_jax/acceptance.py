"""The verification rule of a round, from the target's logits to what is emitted.

The rules themselves are in `verify.py`, on log-probabilities. On a TPU a kernel reads the logits
instead, in tiles, and two rows of them per request are all that is written (a draft's reduced
vocabulary is spread over the target's before). It serves every batch in which no request drops
tokens, under all rules but `block`. Work grows with the rows that were verified, as this runs
inside the branch that verified them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dspark_jax.sampling import (
    Purpose,
    any_sampled,
    draw,
    gumbel,
    position_keys,
    round_keys,
    warp,
)
from dspark_jax.sharding import axis_size, spec_here
from dspark_jax.types import AcceptResult, Block, Packing, SamplingParams, SharedHead
from dspark_jax.verify import accept_block, accept_coupled, accept_standard
from pallas_kernels.dispatch import on_tpu, per_shard
from pallas_kernels.speculative_accept.ops import speculative_accept_packed


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
    keys = dict(sampling=sampling, anchor_pos=anchor_pos, round_index=round_index, shared=shared)
    plain = functools.partial(_plain, **keys, method=method)
    operands = (block, target_logits, packing, verify_len)
    if method == "block":
        return plain(*operands)
    kernels = [functools.partial(_fused, **keys, method=name) for name in ("greedy", method)]

    def on_chip(*operands: Any) -> AcceptResult:
        dropping = (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
        case = jnp.where(any_sampled(sampling), 1 + jnp.any(dropping), 0)
        return jax.lax.switch(case, [*kernels, plain], *operands)

    return on_tpu(on_chip, plain, *operands)


def _plain(
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
    """From log-probabilities of the verified rows."""
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


def _fused(
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
    """By the kernel, under a mesh on every shard of the vocabulary; the same draws.

    Drafts are judged by the log-probabilities they were drawn from. Their logits would do as well,
    but a branch of the Markov step would have to return them that also passes them to a branch of
    its own, and the TPU compiler ends on rounds where such an array lies in fast memory ("required
    assignment is not equal to preferred offset").
    """
    width = packing.index.shape[1]
    operands = dict(
        target_logits=target_logits, request=packing.request, offset=packing.offset,
        index=packing.index, draft_tokens=block.draft_tokens, verify_len=verify_len,
    )  # fmt: skip
    if method != "greedy":
        operands["temperature"] = sampling.temperature
    if method == "coupled":
        keys = [position_keys(sampling.seed, anchor_pos + 1 + w) for w in range(width)]
        operands["noise"] = jax.random.key_data(jnp.stack(keys, axis=1))
    if method == "standard":
        keys = _residual_keys(sampling, anchor_pos, round_index)
        operands["noise"] = jax.random.key_data(keys)
        operands["uniforms"] = _uniforms(sampling, anchor_pos, round_index, width - 1)
        operands["draft_logits"] = expand_vocabulary(block.draft_log_probs, shared)
        operands["draft_temperature"] = jnp.ones_like(sampling.temperature)
    axis = spec_here("vocab")[0] if axis_size("vocab") > 1 else None
    specs = dict.fromkeys(operands, PartitionSpec()) | dict(target_logits=PartitionSpec(None, axis))
    if method == "standard":
        specs["draft_logits"] = PartitionSpec(None, None, axis)

    def kernel(operands: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return tuple(
            speculative_accept_packed(**operands, method=method, axis_name=axis, impl="pallas")
        )

    accept_len, token = per_shard(kernel, (specs,), PartitionSpec())(operands)
    return AcceptResult(accept_len=accept_len, bonus_token=token)


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
