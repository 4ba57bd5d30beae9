"""Proposing a block: the backbone once, then one cheap serial step per draft."""

import jax
import jax.numpy as jnp

from dspark_jax.draft.confidence import confidence_logits
from dspark_jax.draft.markov import initial_state, markov_bias, markov_step
from dspark_jax.draft.presample import presampled_logits
from dspark_jax.draft.protocol import Draft
from dspark_jax.kv_cache import KVCache, WindowCache
from dspark_jax.sampling import (
    Purpose,
    any_sampled,
    draw,
    gumbel,
    position_keys,
    round_keys,
    warp,
)
from dspark_jax.types import Block, Params, SamplingParams, SharedHead


def propose(
    draft: Draft,
    params: Params,
    shared: SharedHead,
    cache: KVCache | WindowCache,
    *,
    anchor: jax.Array,
    anchor_pos: jax.Array,
    round_index: jax.Array,
    sampling: SamplingParams,
    coupled: bool,
    presample: bool = False,
) -> Block:
    """Drafts one block per request.

    Args:
      draft: the draft model.
      params: its parameters.
      shared: embedding and (possibly reduced) LM head of the target.
      cache: draft context, rows 0..anchor_pos-1 valid.
      anchor: i32[R], last committed token.
      anchor_pos: i32[R], its position.
      round_index: i32[R], rounds each request has run.
      sampling: per-request settings, the same that verification uses.
      coupled: draw with the noise of plain decoding at the same position.
      presample: also estimate confidences from what is known before the first draft.

    Returns:
      The block. `draft_log_probs` is the distribution each draft was drawn from; in a batch
      where every request is greedy it is not computed and holds the logits.
    """
    with jax.named_scope("draft.backbone"):
        block_hidden = draft.backbone(params, shared, cache, anchor=anchor, anchor_pos=anchor_pos)
        base_logits = draft.base_logits(params, shared, block_hidden)
    markov, confidence = params.get("markov"), params.get("confidence")

    def step(carry: tuple, inputs: tuple) -> tuple:
        previous, state = carry
        hidden, logits, k = inputs
        embedding = None
        if markov is not None:
            latent, embedding, state = markov_step(markov, previous, hidden, state)
            logits = logits + markov_bias(markov, latent)
        at = anchor_pos + 1 + k
        token, log_probs = _pick(logits, shared, sampling, round_index, at, coupled)
        trust = None
        if confidence is not None:
            trust = confidence_logits(confidence, hidden, embedding)
        return (token, state), (token, log_probs, logits, trust)

    with jax.named_scope("draft.markov"):
        state = initial_state(markov, anchor.shape) if markov is not None else None
        rows = (
            jnp.moveaxis(block_hidden, 1, 0),
            jnp.moveaxis(base_logits, 1, 0),
            jnp.arange(block_hidden.shape[1]),
        )
        _, (tokens, log_probs, logits, trust) = jax.lax.scan(step, (anchor, state), rows)

    presampled = None
    if presample and confidence is not None:
        with jax.named_scope("draft.presample"):
            presampled = presampled_logits(
                params, shared, anchor=anchor, block_hidden=block_hidden,
                base_logits=base_logits, temperature=sampling.temperature,
            )  # fmt: skip

    def rows_first(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1)

    return Block(
        draft_tokens=rows_first(tokens),
        draft_log_probs=rows_first(log_probs),
        draft_logits=rows_first(logits),
        base_logits=base_logits,
        block_hidden=block_hidden,
        confidence_logits=None if trust is None else rows_first(trust),
        presampled_logits=presampled,
    )


def _pick(
    logits: jax.Array,
    shared: SharedHead,
    sampling: SamplingParams,
    round_index: jax.Array,
    position: jax.Array,
    coupled: bool,
) -> tuple[jax.Array, jax.Array]:
    """Draws one draft per request from logits [R, Vd]: target ids i32[R], and log q."""

    def sampled(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_probs = warp(logits, sampling)
        if coupled:
            noise = gumbel(position_keys(sampling.seed, position), shared.embedding.shape[0])
            noise = noise if shared.target_ids is None else noise[:, shared.target_ids]
        else:
            keys = round_keys(sampling.seed, round_index, position, Purpose.DRAFT)
            noise = gumbel(keys, logits.shape[-1])
        return draw(log_probs, noise), log_probs

    def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits

    row, log_probs = jax.lax.cond(any_sampled(sampling), sampled, greedy, logits)
    return row if shared.target_ids is None else shared.target_ids[row], log_probs
