"""The compiled programs of decoding: prefill, the plain step, and the DSpark round.

A round is propose -> schedule -> verify -> accept -> commit in one program. Everything a slot
needs between rounds lives in `DecodeState`, which is donated: caches are updated in place.

The anchor is the last committed token; the target has KV, and the draft has context or pending
states, for the rows before it and no others. A prompt of P tokens therefore prefills P - 1 rows,
and its last token is the first anchor.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.acceptance import accept, sample_undrafted
from dspark_jax.draft.propose import propose
from dspark_jax.history import bypasses, is_probe, remember
from dspark_jax.kv_cache import KVCache, PagedCache, write_rows
from dspark_jax.pending import keep_row, settle
from dspark_jax.sampling import (
    sample_plain,
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
    TargetOutput,
)


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
        params.target, tokens[None], state.target_kv, cache_len=begin, first_slot=slot,
        count=count[None],
    )  # fmt: skip
    rows = _after_reading(count[None], out)
    target_kv = _stored(state.target_kv, out, first_slot=slot, start=begin, count=rows)
    if decoder.draft is None:
        return state.replace(target_kv=target_kv)
    positions = (start + jnp.arange(tokens.shape[0]))[None]
    k, v = decoder.draft.context_kv(params.draft, out.context_features, positions)
    context_kv = write_rows(state.context_kv, k, v, first_slot=slot, start=begin, count=rows)
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
    count = view.active.astype(jnp.int32)
    out = decoder.target.forward(
        params.target, view.anchor[:, None], state.target_kv, cache_len=view.anchor_pos,
        count=count,
    )  # fmt: skip
    logits = decoder.target.logits(params.target, out.hidden[:, 0])
    token = sample_plain(logits, view.sampling, view.anchor_pos + 1)
    zeros = jnp.zeros_like(token)
    result = AcceptResult(accept_len=zeros, bonus_token=token)
    target_kv = _stored(
        state.target_kv, out,
        first_slot=0, start=view.anchor_pos, count=_after_reading(count, out),
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
    if decoder.target.paged and len(buckets) > 1:
        raise ValueError(f"buckets={buckets}: with a paged cache, a round has one number of rows.")
    view = SlotView.of(state, rows)
    with jax.named_scope("schedule"):
        evidence = _older_evidence(decoder, state, view, tables, buckets)
        bypassed = bypasses(state.history, evidence, decoder.schedule)

    def drafted() -> _Turn:
        return _drafted(decoder, params, state, tables, view, evidence, buckets)

    if (state.pending is None) != (decoder.schedule.min_predicted_gain is None):
        raise ValueError("the state was made by init_state for a decoder of another schedule.")
    if state.pending is None:
        turn = drafted()
    else:
        pending, context_kv = settle(
            state.pending, state.context_kv,
            functools.partial(decoder.draft.context_kv, params.draft),
            needed=~bypassed, active=view.active, end=view.anchor_pos,
        )  # fmt: skip
        state = state.replace(context_kv=context_kv, pending=pending)
        turn = jax.lax.cond(
            bypassed, lambda: _undrafted(decoder, params, state, view, evidence), drafted
        )
    plan, result = turn.plan, turn.result
    with jax.named_scope("commit"):
        kept = jnp.where(view.active, result.accept_len + 1, 0)
        state = _store(state, turn, view, kept, bypassed)
        history = remember(
            state.history, active=view.active, bypassed=bypassed,
            confidence=plan.confidence, verify_len=plan.verify_len, accept_len=result.accept_len,
        )  # fmt: skip
        state = commit(state.replace(history=history), view, result)
    offset = jnp.arange(decoder.num_drafts + 1)
    drafts = jnp.pad(turn.draft_tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(offset == result.accept_len[:, None], result.bonus_token[:, None], drafts)
    return state, RoundOutput(
        tokens=tokens, emit_len=kept, accept_len=result.accept_len, verify_len=plan.verify_len,
        confidence=plan.confidence, presampled=plan.presampled,
        verify_rows=turn.verified_rows, probe=plan.probe, bypassed=bypassed,
    )  # fmt: skip


@flax.struct.dataclass
class _Plan:
    """What a round decided to verify, and by what."""

    verify_len: jax.Array  # i32[R]
    confidence: jax.Array  # f32[R, K]
    presampled: jax.Array  # f32[R, K]
    probe: jax.Array  # bool[]


@flax.struct.dataclass
class _BlockRows:
    """What a round with drafts adds to the caches, beside the target's rows of the anchors."""

    new_k: jax.Array | None  # [L, R, K, G, H], the target's, of the drafts
    new_v: jax.Array | None
    context_k: jax.Array  # [L', R, K+1, ..], the draft's, of anchors and drafts
    context_v: jax.Array


@flax.struct.dataclass
class _Turn:
    """What a round found out, with or without drafts; nothing is stored yet."""

    draft_tokens: jax.Array  # i32[R, K]
    plan: _Plan
    result: AcceptResult
    new_k: jax.Array | None  # [L, R, 1, G, H], the target's, of the anchors
    new_v: jax.Array | None
    features: jax.Array  # [R, M*D], tapped states of the anchors
    block_rows: _BlockRows
    verified_rows: jax.Array  # i32[], flat rows the target computed
    cache: PagedCache | None = None  # the target's, that has its rows already


def _drafted(
    decoder: Decoder,
    params: PairParams,
    state: DecodeState,
    tables: ScheduleTables,
    view: SlotView,
    evidence: Evidence,
    buckets: tuple[int, ...],
) -> _Turn:
    """Propose, schedule, verify and accept."""
    block = propose(
        decoder.draft, params.draft, params.shared, state.context_kv,
        anchor=view.anchor, anchor_pos=view.anchor_pos, round_index=view.round_index,
        sampling=view.sampling, coupled=decoder.rejection_sample_method == "coupled",
        presample=decoder.schedule.policy == "presampled",
    )  # fmt: skip
    with jax.named_scope("schedule"):
        acceptance = state.history.acceptance[: view.anchor.shape[0]]
        evidence = _with_confidences(decoder, evidence, block, tables, acceptance)
        verify_len = schedule_prefixes(evidence, decoder.schedule)
        probe = is_probe(state.history, decoder.schedule)
        verify_len = jnp.where(probe, jnp.where(view.active, evidence.limit, 0), verify_len)
    plan = _Plan(
        verify_len=verify_len, confidence=evidence.confidence, presampled=evidence.presampled,
        probe=probe,
    )  # fmt: skip
    return _verify(decoder, params, state.target_kv, view, block, plan, buckets)


def _undrafted(
    decoder: Decoder, params: PairParams, state: DecodeState, view: SlotView, evidence: Evidence
) -> _Turn:
    """A plain step, whose tapped states the draft reads later."""
    with jax.named_scope("target.verify"):
        out = decoder.target.forward(
            params.target, view.anchor[:, None], state.target_kv, cache_len=view.anchor_pos
        )
        logits = decoder.target.logits(params.target, out.hidden[:, 0])
    with jax.named_scope("accept"):
        token = sample_undrafted(
            logits, sampling=view.sampling, anchor_pos=view.anchor_pos,
            round_index=view.round_index, method=decoder.rejection_sample_method,
        )  # fmt: skip
    zeros, width = jnp.zeros_like(token), decoder.num_drafts + 1

    def none(like: jax.Array, rows: int) -> jax.Array:  # [L, R, rows, ..]
        return jnp.zeros((*like.shape[:2], rows, *like.shape[3:]), like.dtype)

    k, v = jax.eval_shape(
        functools.partial(decoder.draft.context_kv, params.draft),
        out.context_features, view.anchor_pos[:, None],
    )  # fmt: skip
    return _Turn(
        draft_tokens=jnp.zeros((*token.shape, width - 1), jnp.int32),
        plan=_Plan(
            verify_len=zeros, confidence=evidence.confidence, presampled=evidence.presampled,
            probe=jnp.zeros((), bool),
        ),
        result=AcceptResult(accept_len=zeros, bonus_token=token),
        new_k=out.new_k, new_v=out.new_v, features=out.context_features[:, 0],
        block_rows=_BlockRows(
            new_k=none(out.new_k, width - 1), new_v=none(out.new_v, width - 1),
            context_k=none(k, width), context_v=none(v, width),
        ),
        verified_rows=jnp.int32(view.anchor.shape[0]),
    )  # fmt: skip


def _older_evidence(
    decoder: Decoder,
    state: DecodeState,
    view: SlotView,
    tables: ScheduleTables,
    buckets: tuple[int, ...],
) -> Evidence:
    """What is known before the block is drafted; lagged confidences stand in for the others."""
    rows = view.anchor.shape[0]
    room = state.target_kv.capacity - 1 - view.anchor_pos
    lagged = state.history.lagged(rows, tables.neutral_confidence)
    return Evidence(
        confidence=lagged, presampled=lagged, lagged=lagged,
        limit=jnp.clip(jnp.minimum(view.remaining - 1, room), 0, decoder.num_drafts),
        active=view.active, steps_per_s=staircase(tables.steps_per_s, buckets),
        max_rows=jnp.int32(buckets[-1]),
    )  # fmt: skip


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
        presampled = jax.nn.sigmoid(block.presampled_logits / tables.sts_temperatures_presampled)
    return evidence.replace(confidence=confidence, presampled=presampled)


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
    return Packing.of(jnp.where(active, verify_len + 1, 0), width, total)


def _verify(
    decoder: Decoder,
    params: PairParams,
    cache: KVCache | PagedCache,
    view: SlotView,
    block: Block,
    plan: _Plan,
    buckets: tuple[int, ...],
) -> _Turn:
    """Runs the smallest compiled bucket that holds the schedule, and accepts among its rows.

    Everything that grows with the rows is inside the bucket; branches only read the caches.
    """
    width = decoder.num_drafts + 1
    tokens = jnp.concatenate([view.anchor[:, None], block.draft_tokens], axis=1)

    def run(total: int) -> _Turn:
        packing = pack_rows(plan.verify_len, view.active, width, total)
        out = decoder.target.forward_packed(
            params.target, packing.pack(tokens), cache, packing, cache_len=view.anchor_pos
        )
        logits = decoder.target.logits(params.target, out.hidden[0])
        with jax.named_scope("accept"):
            result = accept(
                block, logits, packing, plan.verify_len, sampling=view.sampling,
                anchor_pos=view.anchor_pos, round_index=view.round_index, shared=params.shared,
                method=decoder.rejection_sample_method,
            )  # fmt: skip
        positions = view.anchor_pos[packing.request] + packing.offset
        context = decoder.draft.context_kv(params.draft, out.context_features, positions[None])
        k, v = (jax.vmap(packing.unpack)(rows[:, 0]) for rows in context)
        new = (out.new_k, out.new_v)
        new_k, new_v = jax.tree.map(lambda x: x[:, :, :1], new)
        block_k, block_v = jax.tree.map(lambda x: x[:, :, 1:], new)
        return _Turn(
            draft_tokens=block.draft_tokens, plan=plan, result=result, new_k=new_k, new_v=new_v,
            features=packing.unpack(out.context_features[0])[:, 0],
            block_rows=_BlockRows(new_k=block_k, new_v=block_v, context_k=k, context_v=v),
            verified_rows=jnp.int32(total), cache=out.cache,
        )  # fmt: skip

    scheduled = jnp.where(view.active, plan.verify_len + 1, 0).sum()
    choice = jnp.searchsorted(jnp.array(buckets), scheduled)
    with jax.named_scope("target.verify"):
        return jax.lax.switch(choice, [lambda total=total: run(total) for total in buckets])


def _store(
    state: DecodeState, turn: _Turn, view: SlotView, kept: jax.Array, bypassed: jax.Array
) -> DecodeState:
    """The caches with the first `kept` i32[R] rows of every request."""
    rows, start = turn.block_rows, view.anchor_pos
    target_kv = _stored(state.target_kv, turn, first_slot=0, start=start, count=kept)

    def step(_: int, caches: tuple) -> tuple:
        target_kv, context_kv = caches
        if turn.cache is None:
            target_kv = write_rows(
                target_kv, rows.new_k, rows.new_v, first_slot=0, start=start + 1, count=kept - 1
            )
        return target_kv, write_rows(
            context_kv, rows.context_k, rows.context_v, first_slot=0, start=start, count=kept
        )

    caches = (target_kv, state.context_kv)
    if state.pending is None:
        target_kv, context_kv = step(0, caches)
        return state.replace(target_kv=target_kv, context_kv=context_kv)
    # A loop of at most one step: a branch that writes would copy the caches.
    drafted = (~bypassed).astype(jnp.int32)
    target_kv, context_kv = jax.lax.fori_loop(0, drafted, step, caches)
    pending = keep_row(state.pending, turn.features, view.active & bypassed)
    return state.replace(target_kv=target_kv, context_kv=context_kv, pending=pending)


def _stored(
    cache: KVCache | PagedCache, made: TargetOutput | _Turn, **where: jax.Array | int
) -> KVCache | PagedCache:
    """The target's cache with new rows; a paged one has them, those not kept past its end."""
    if made.cache is not None:
        return made.cache
    return write_rows(cache, made.new_k, made.new_v, **where)


def _after_reading(count: jax.Array, out: TargetOutput) -> jax.Array:
    """`count` i32[R], made to depend on the end of the forward.

    The last layer's K/V are known before its attention has read the cache; stored that early they
    would cost a copy of the whole cache. (A NaN here means broken weights: nothing is stored.)
    """
    return jnp.where(jnp.isnan(out.hidden[:, 0, 0]), 0, count)
