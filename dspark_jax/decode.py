"""The compiled programs of decoding: prefill, the plain step, and the DSpark round.

A round is propose -> schedule -> verify -> accept -> commit in one program. Everything a slot
needs between rounds lives in `DecodeState`, which is donated: caches are updated in place.

The anchor is the last committed token; the target has KV, and the draft has context, for the
rows before it and no others. A prompt of P tokens therefore prefills P - 1 rows, and its last
token is the first anchor.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.draft.propose import propose
from dspark_jax.history import bypasses, is_probe, remember
from dspark_jax.kv_cache import KVCache, write_rows
from dspark_jax.sampling import (
    Purpose,
    any_sampled,
    gumbel,
    position_keys,
    round_keys,
    sample_plain,
    warp,
)
from dspark_jax.schedule import Evidence, schedule_prefixes, staircase
from dspark_jax.state import Decoder, DecodeState, SlotView, commit
from dspark_jax.types import (
    AcceptResult,
    Block,
    Packing,
    PairParams,
    RoundOutput,
    ScheduleTables,
    SharedHead,
    TargetOutput,
)
from dspark_jax.verify import accept_block, accept_coupled, accept_standard


def prefill(
    decoder: Decoder,
    params: PairParams,
    state: DecodeState,
    slot: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> DecodeState:
    """Runs a chunk of one prompt: target KV and draft context for its rows.

    Args:
      decoder: the models.
      params: their parameters.
      state: donated.
      slot: i32[], which slot.
      tokens: i32[W], the chunk, padded.
      start: i32[], position of its first token = rows already in the slot.
      count: i32[], real tokens in the chunk, 0..W.

    Returns:
      The state with rows start .. start+count-1 written.
    """
    begin = start[None]
    out = decoder.target.forward(
        params.target, tokens[None], state.target_kv, cache_len=begin, first_slot=slot
    )
    rows = _after_reading(count[None], out)
    target_kv = write_rows(
        state.target_kv, out.new_k, out.new_v, first_slot=slot, start=begin, count=rows
    )
    if decoder.draft is None:
        return state.replace(target_kv=target_kv)
    positions = (start + jnp.arange(tokens.shape[0]))[None]
    k, v = decoder.draft.context_kv(params.draft, out.context_features, positions)
    context_kv = write_rows(
        state.context_kv, k, v, first_slot=slot, start=begin, count=rows
    )
    return state.replace(target_kv=target_kv, context_kv=context_kv)


def plain_step(
    decoder: Decoder, params: PairParams, state: DecodeState, rows: int
) -> tuple[DecodeState, RoundOutput]:
    """One token per request from the target alone: the twin every round is compared with.

    Args:
      decoder: `draft` may be set; it is not used and its context is not written.
      params: parameters.
      state: donated.
      rows: static R; slots 0..R-1 take part.

    Returns:
      The state one token further, and the tokens with emit_len 1 where active.
    """
    view = SlotView.of(state, rows)
    out = decoder.target.forward(
        params.target, view.anchor[:, None], state.target_kv, cache_len=view.anchor_pos
    )
    logits = decoder.target.logits(params.target, out.hidden[:, 0])
    token = sample_plain(logits, view.sampling, view.anchor_pos + 1)
    zeros = jnp.zeros_like(token)
    result = AcceptResult(accept_len=zeros, bonus_token=token)
    target_kv = write_rows(
        state.target_kv, out.new_k, out.new_v,
        first_slot=0, start=view.anchor_pos,
        count=_after_reading(view.active.astype(jnp.int32), out),
    )  # fmt: skip
    state = commit(state.replace(target_kv=target_kv), view, result)
    no, nothing = jnp.zeros((), bool), jnp.ones((rows, 0))
    output = RoundOutput(
        tokens=token[:, None], emit_len=view.active.astype(jnp.int32), accept_len=zeros,
        verify_len=zeros, confidence=nothing, presampled=nothing,
        verify_rows=jnp.int32(rows), probe=no, bypassed=no,
    )  # fmt: skip
    return state, output


def decode_round(
    decoder: Decoder,
    params: PairParams,
    state: DecodeState,
    tables: ScheduleTables,
    rows: int,
    buckets: tuple[int, ...],
) -> tuple[DecodeState, RoundOutput]:
    """One DSpark round for slots 0..R-1.

    Args:
      decoder: models with a draft.
      params: parameters.
      state: donated.
      tables: speeds for the policies that use them, and temperatures of the confidences.
      rows: static R.
      buckets: static, increasing numbers of flat rows to compile. The smallest that holds the
        schedule is run, so rows that are not scheduled are not computed. The last holds every
        schedule, but for policies that fit theirs to it (those that plan how many drafts in all).

    Returns:
      The state 1..K+1 tokens further, and what was emitted.
    """
    view = SlotView.of(state, rows)
    with jax.named_scope("schedule"):
        evidence = _older_evidence(decoder, state, view, tables.steps_per_s, buckets)
        bypassed = bypasses(state.history, evidence, decoder.schedule)
    block = _propose(decoder, params, state, view, bypassed)
    with jax.named_scope("schedule"):
        acceptance = state.history.acceptance[:rows]
        evidence = _with_confidences(decoder, evidence, block, tables, acceptance)
        verify_len = schedule_prefixes(evidence, decoder.schedule)
        probe = is_probe(state.history, decoder.schedule)
        verify_len = jnp.where(probe, jnp.where(view.active, evidence.limit, 0), verify_len)
        verify_len = jnp.where(bypassed, 0, verify_len)
    with jax.named_scope("target.verify"):
        verified = _verify(decoder, params, state.target_kv, view, block, verify_len, buckets)
    with jax.named_scope("accept"):
        result = _accept(
            view, block, verified.logits, verify_len, params.shared,
            decoder.rejection_sample_method,
        )  # fmt: skip
    with jax.named_scope("commit"):
        kept = jnp.where(view.active, result.accept_len + 1, 0)
        target_kv = write_rows(
            state.target_kv, verified.new_k, verified.new_v,
            first_slot=0, start=view.anchor_pos, count=kept,
        )  # fmt: skip
        positions = view.anchor_pos[:, None] + jnp.arange(decoder.num_drafts + 1)
        k, v = decoder.draft.context_kv(params.draft, verified.context_features, positions)
        context_kv = write_rows(
            state.context_kv, k, v, first_slot=0, start=view.anchor_pos, count=kept
        )
        history = remember(
            state.history, active=view.active, bypassed=bypassed,
            confidence=evidence.confidence, verify_len=verify_len, accept_len=result.accept_len,
        )  # fmt: skip
        state = state.replace(target_kv=target_kv, context_kv=context_kv, history=history)
        state = commit(state, view, result)
    offset = jnp.arange(decoder.num_drafts + 1)
    drafts = jnp.pad(block.draft_tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(
        offset == result.accept_len[:, None], result.bonus_token[:, None], drafts
    )
    return state, RoundOutput(
        tokens=tokens, emit_len=kept, accept_len=result.accept_len, verify_len=verify_len,
        confidence=evidence.confidence, presampled=evidence.presampled,
        verify_rows=verified.rows, probe=probe, bypassed=bypassed,
    )  # fmt: skip


def _older_evidence(
    decoder: Decoder,
    state: DecodeState,
    view: SlotView,
    steps_per_s: jax.Array,
    buckets: tuple[int, ...],
) -> Evidence:
    """What is known before the block is drafted; lagged confidences stand in for the others."""
    rows = view.anchor.shape[0]
    room = state.target_kv.capacity - 1 - view.anchor_pos
    lagged = state.history.confidence[:rows, 0]
    return Evidence(
        confidence=lagged, presampled=lagged, lagged=lagged,
        limit=jnp.clip(jnp.minimum(view.remaining - 1, room), 0, decoder.num_drafts),
        active=view.active, steps_per_s=staircase(steps_per_s, buckets),
        max_rows=jnp.int32(buckets[-1]),
    )  # fmt: skip


def _propose(
    decoder: Decoder,
    params: PairParams,
    state: DecodeState,
    view: SlotView,
    bypassed: jax.Array,
) -> Block:
    """The block; of zeros, and for nothing, in a round that bypasses the draft."""

    def draft() -> Block:
        return propose(
            decoder.draft, params.draft, params.shared, state.context_kv,
            anchor=view.anchor, anchor_pos=view.anchor_pos, round_index=view.round_index,
            sampling=view.sampling, coupled=decoder.rejection_sample_method == "coupled",
            presample=decoder.schedule.policy == "presampled",
        )  # fmt: skip

    if decoder.schedule.min_predicted_gain is None:
        return draft()
    shapes = jax.eval_shape(draft)
    return jax.lax.cond(
        bypassed, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), draft
    )


def _with_confidences(
    decoder: Decoder,
    evidence: Evidence,
    block: Block,
    tables: ScheduleTables,
    acceptance: jax.Array,
) -> Evidence:
    """Adds what this round's block says of itself, or what became of earlier ones."""
    if decoder.schedule.confidence_source == "online":
        return evidence.replace(confidence=acceptance, presampled=acceptance)
    if block.confidence_logits is None:
        sure = jnp.ones(block.draft_tokens.shape)
        return evidence.replace(confidence=sure, presampled=sure)
    confidence = jax.nn.sigmoid(block.confidence_logits / tables.sts_temperatures)
    presampled = confidence
    if block.presampled_logits is not None:
        presampled = jax.nn.sigmoid(
            block.presampled_logits / tables.sts_temperatures_presampled
        )
    return evidence.replace(confidence=confidence, presampled=presampled)


@flax.struct.dataclass
class _Verified:
    """The target's answer on the scheduled rows, back in [R, W] form (W = K + 1)."""

    logits: jax.Array  # f32[R, W, V]
    context_features: jax.Array  # [R, W, M*D]
    new_k: jax.Array  # [L, R, W, G, H]
    new_v: jax.Array
    rows: jax.Array  # i32[], flat rows computed


def pack_rows(verify_len: jax.Array, active: jax.Array, width: int, total: int) -> Packing:
    """Lays the scheduled rows of all requests end to end.

    Args:
      verify_len: i32[R]; an active request has 1 + verify_len rows (the anchor's first).
      active: bool[R].
      width: W = K + 1.
      total: T, flat rows; at least the number scheduled.

    Returns:
      The packing.
    """
    rows = jnp.where(active, verify_len + 1, 0)
    ends = jnp.cumsum(rows)
    flat = jnp.arange(total)
    request = jnp.searchsorted(ends, flat, side="right").astype(jnp.int32)
    real = flat < ends[-1]
    request = jnp.where(real, request, 0)
    starts = ends - rows
    offset = jnp.arange(width)
    index = jnp.where(offset < rows[:, None], starts[:, None] + offset, total)
    return Packing(
        request=request,
        offset=jnp.where(real, flat - starts[request], 0).astype(jnp.int32),
        index=index,
    )


def _verify(
    decoder: Decoder,
    params: PairParams,
    cache: KVCache,
    view: SlotView,
    block: Block,
    verify_len: jax.Array,
    buckets: tuple[int, ...],
) -> _Verified:
    """Runs the smallest compiled bucket that holds the schedule; branches only read the cache."""
    width = decoder.num_drafts + 1
    tokens = jnp.concatenate([view.anchor[:, None], block.draft_tokens], axis=1)

    def run(total: int) -> _Verified:
        packing = pack_rows(verify_len, view.active, width, total)
        out = decoder.target.forward_packed(
            params.target, packing.pack(tokens), cache, packing, cache_len=view.anchor_pos
        )
        return _Verified(
            logits=packing.unpack(decoder.target.logits(params.target, out.hidden[0])),
            context_features=packing.unpack(out.context_features[0]),
            new_k=out.new_k,
            new_v=out.new_v,
            rows=jnp.int32(total),
        )

    scheduled = jnp.where(view.active, verify_len + 1, 0).sum()
    choice = jnp.searchsorted(jnp.array(buckets), scheduled)
    return jax.lax.switch(choice, [lambda total=total: run(total) for total in buckets])


def _accept(
    view: SlotView,
    block: Block,
    target_logits: jax.Array,
    verify_len: jax.Array,
    shared: SharedHead,
    method: str,
) -> AcceptResult:
    """Applies the verification rule; a batch without sampling only compares argmaxes."""
    requests, width, vocab = target_logits.shape
    sampling = view.sampling

    def greedy() -> AcceptResult:
        best = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
        return accept_coupled(block.draft_tokens, best, verify_len)

    def sampled_coupled() -> AcceptResult:
        target_log_probs = warp(target_logits, sampling)

        def row(w: jax.Array) -> jax.Array:
            keys = position_keys(sampling.seed, view.anchor_pos + 1 + w)
            return jnp.argmax(target_log_probs[:, w] + gumbel(keys, vocab), axis=-1)

        tokens = jax.lax.map(row, jnp.arange(width)).T.astype(jnp.int32)
        return accept_coupled(block.draft_tokens, tokens, verify_len)

    def sampled_independently() -> AcceptResult:
        target_log_probs = warp(target_logits, sampling)
        draft_log_probs = expand_vocabulary(block.draft_log_probs, shared)

        def uniforms(k: jax.Array) -> jax.Array:
            keys = round_keys(
                sampling.seed, view.round_index, view.anchor_pos + 1 + k, Purpose.ACCEPT
            )
            return jax.vmap(jax.random.uniform)(keys)

        u = jnp.stack([uniforms(k) for k in range(width - 1)], axis=1)
        keys = round_keys(
            sampling.seed, view.round_index, view.anchor_pos, Purpose.RESIDUAL
        )
        rule = {"standard": accept_standard, "block": accept_block}[method]
        return rule(
            block.draft_tokens, draft_log_probs, target_log_probs, verify_len, u,
            gumbel(keys, vocab),
        )  # fmt: skip

    sampled = sampled_coupled if method == "coupled" else sampled_independently
    return jax.lax.cond(any_sampled(sampling), sampled, greedy)


def expand_vocabulary(log_probs: jax.Array, shared: SharedHead) -> jax.Array:
    """Draft log-probabilities over the target's vocabulary, -inf for tokens it cannot propose.

    Args:
      log_probs: f32[.., Vd].
      shared: with `draft_ids` when the draft's vocabulary is reduced.

    Returns:
      f32[.., V].
    """
    if shared.draft_ids is None:
        return log_probs
    return log_probs.at[..., shared.draft_ids].get(mode="fill", fill_value=-jnp.inf)


def _after_reading(count: jax.Array, out: TargetOutput) -> jax.Array:
    """`count` i32[R], made to depend on the end of the forward.

    The last layer's K/V are known before its attention has read the cache; stored that early they
    would cost a copy of the whole cache. (A NaN here means broken weights: nothing is stored.)
    """
    return jnp.where(jnp.isnan(out.hidden[:, 0, 0]), 0, count)
