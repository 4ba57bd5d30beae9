"""Proposing a block: the backbone once, then one cheap serial step per draft."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dspark_jax.draft.confidence import confidence_logits
from dspark_jax.draft.markov import initial_state, markov_bias, markov_step
from dspark_jax.draft.presample import presampled_logits
from dspark_jax.draft.protocol import Draft
from dspark_jax.kv_cache import KVCache, WindowCache
from dspark_jax.sampling import (
    GREEDY_BELOW,
    Purpose,
    any_sampled,
    draw,
    gumbel,
    position_keys,
    round_keys,
    warp,
)
from dspark_jax.sharding import axis_size, spec_here
from dspark_jax.types import Block, Params, SamplingParams, SharedHead
from pallas_kernels.dispatch import on_tpu, per_shard
from pallas_kernels.markov_sample.ops import MarkovSample, sample_latent


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
        embedding = latent = None
        if markov is not None:
            latent, embedding, state = markov_step(markov, previous, hidden, state)
        token, log_probs, logits = _pick_biased(
            markov, latent, logits, shared, sampling, round_index, anchor_pos + 1 + k, coupled
        )
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


def _pick_biased(
    markov: Params | None,
    latent: jax.Array | None,
    logits: jax.Array,
    shared: SharedHead,
    sampling: SamplingParams,
    round_index: jax.Array,
    position: jax.Array,
    coupled: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`_pick` after the bias of a latent [R, Q]: tokens, log q and the logits with the bias.

    On a TPU, where no request drops tokens, bias, temperature and sample are one kernel; under a
    mesh one per shard of the vocabulary.
    """
    if markov is None:
        return *_pick(logits, shared, sampling, round_index, position, coupled), logits

    def plain(latent: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        biased = logits + markov_bias(markov, latent)
        return *_pick(biased, shared, sampling, round_index, position, coupled), biased

    def fused(latent: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        split = shared.target_ids is None and axis_size("vocab") > 1
        axis = spec_here("vocab")[0] if split else None
        columns, whole_row = PartitionSpec(None, axis), PartitionSpec()

        def kernel(*operands: jax.Array) -> MarkovSample:
            latent, w2, logits, temperature, noise = operands
            return sample_latent(
                latent, w2, logits, temperature=temperature, noise=noise, keep_logits=True,
                axis_name=axis, impl="pallas",
            )  # fmt: skip

        noise = _noise(logits, shared, sampling, round_index, position, coupled, lazily=True)
        in_specs = (whole_row, PartitionSpec(axis), columns, whole_row, whole_row)
        out_specs = MarkovSample(whole_row, whole_row, whole_row, columns)
        sample = per_shard(kernel, in_specs, out_specs)(
            latent, markov["w2"], logits, sampling.temperature, noise
        )
        greedy = sampling.temperature[:, None] < GREEDY_BELOW
        scaled = sample.logits / jnp.where(greedy, 1.0, sampling.temperature[:, None])
        chosen = jnp.arange(logits.shape[-1]) == sample.token[:, None]
        log_probs = jnp.where(
            greedy,
            jnp.where(chosen, 0.0, -jnp.inf),
            scaled - sample.log_normaliser[:, None],
        )
        token = sample.token if shared.target_ids is None else shared.target_ids[sample.token]
        return token, log_probs, sample.logits

    def on_chip(latent: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        dropping = (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
        return jax.lax.cond(jnp.any(dropping), plain, fused, latent, logits)

    return on_tpu(on_chip, plain, latent, logits)


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
        noise = _noise(logits, shared, sampling, round_index, position, coupled)
        return draw(log_probs, noise), log_probs

    def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits

    row, log_probs = jax.lax.cond(any_sampled(sampling), sampled, greedy, logits)
    return row if shared.target_ids is None else shared.target_ids[row], log_probs


def _noise(
    logits: jax.Array,
    shared: SharedHead,
    sampling: SamplingParams,
    round_index: jax.Array,
    position: jax.Array,
    coupled: bool,
    *,
    lazily: bool = False,
) -> jax.Array:
    """Noise f32[R, Vd] of one draft per request; `lazily` key data u32[R, 2] where that will do."""
    if coupled:
        keys = position_keys(sampling.seed, position)
    else:
        keys = round_keys(sampling.seed, round_index, position, Purpose.DRAFT)
    reduced = coupled and shared.target_ids is not None
    if lazily and not reduced:
        return jax.random.key_data(keys)
    noise = gumbel(keys, shared.embedding.shape[0] if coupled else logits.shape[-1])
    return noise[:, shared.target_ids] if reduced else noise
