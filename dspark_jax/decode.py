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

from dspark_jax.acceptance import accept
from dspark_jax.draft.propose import propose
from dspark_jax.history import bypassed_rounds, is_probe, remember, remember_idle
from dspark_jax.kv_cache import KVCache, PagedCache, write_rows
from dspark_jax.pending import keep_row, settle
from dspark_jax.sampling import sample_plain
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

    It is also the round in which drafts do not pay. What the layers said is then kept for the
    draft, which makes context of it later; otherwise the draft's context is not written.

    Args:
      decoder: the models.
      params: parameters.
      state: donated.
      rows: static R; slots 0..R-1 take part.

    Returns:
      The state one token further, and the tokens with emit_len 1 where active.
    """
    view = SlotView.of(state, rows)
    bypassing = state.pending is not None
    count = view.active.astype(jnp.int32)
    with jax.named_scope("target.verify"):
        out = decoder.target.forward(
            params.target, view.anchor[:, None], state.target_kv, cache_len=view.anchor_pos,
            count=count,
        )  # fmt: skip
        logits = decoder.target.logits(params.target, out.hidden[:, 0])
    with jax.named_scope("accept"):
        token = sample_plain(logits, view.sampling, view.anchor_pos + 1)
    zeros = jnp.zeros_like(token)
    with jax.named_scope("commit"):
        target_kv = _stored(
            state.target_kv, out,
            first_slot=0, start=view.anchor_pos, count=_after_reading(count, out),
        )  # fmt: skip
        state = state.replace(target_kv=target_kv)
        if bypassing:
            state = state.replace(
                pending=keep_row(
                    state.pending, out.context_features[:, 0],
                    position=view.anchor_pos, kept=view.active,
                ),  # fmt: skip
                history=remember_idle(state.history, active=view.active),
            )  # settled afterwards: the other way round, XLA copies the pending rows
            end = view.anchor_pos + count
            state = _settled(decoder, params, state, view.active, end, needed=False)
        state = commit(state, view, AcceptResult(accept_len=zeros, bonus_token=token))
    nothing = jnp.ones((rows, 0))
    return state, RoundOutput(
        tokens=token[:, None], emit_len=count, accept_len=zeros, verify_len=zeros,
        confidence=nothing, presampled=nothing, verify_rows=jnp.int32(rows),
        probe=jnp.zeros((), bool), bypassed=jnp.full((), bypassing),
    )  # fmt: skip


def rounds_to_bypass(
    decoder: Decoder,
    state: DecodeState,
    tables: ScheduleTables,
    rows: int,
    buckets: tuple[int, ...],
) -> jax.Array:
    """How many coming rounds should be plain steps, as drafts do not pay? Asks older rounds only.

    Args:
      decoder: with a draft and a schedule that has `min_predicted_gain`.
      state: before the first of them.
      tables: as a round's.
      rows: static R.
      buckets: static, as a round's.

    Returns:
      i32[]; it holds until a request ends or begins. 0: the coming round drafts.
    """
    evidence = _older_evidence(decoder, state, SlotView.of(state, rows), tables, buckets)
    usual = state.history.usual(rows, tables.neutral_confidence)
    return bypassed_rounds(state.history, evidence.replace(lagged=usual), decoder.schedule)


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
    if (state.pending is None) != (decoder.schedule.min_predicted_gain is None):
        raise ValueError("the state was made by init_state for a decoder of another schedule.")
    view = SlotView.of(state, rows)
    if state.pending is not None:
        state = _settled(decoder, params, state, view.active, view.anchor_pos, needed=True)
    block = propose(
        decoder.draft, params.draft, params.shared, state.context_kv,
        anchor=view.anchor, anchor_pos=view.anchor_pos, round_index=view.round_index,
        sampling=view.sampling, coupled=decoder.rejection_sample_method == "coupled",
        presample=decoder.schedule.policy == "presampled",
    )  # fmt: skip
    with jax.named_scope("schedule"):
        evidence = _older_evidence(decoder, state, view, tables, buckets)
        acceptance = state.history.acceptance[:rows]
        evidence = _with_confidences(decoder, evidence, block, tables, acceptance)
        verify_len = schedule_prefixes(evidence, decoder.schedule)
        probe = is_probe(state.history, decoder.schedule)
        verify_len = jnp.where(probe, jnp.where(view.active, evidence.limit, 0), verify_len)
    result, made, verified_rows = _verify(
        decoder, params, state.target_kv, view, block, verify_len, buckets
    )
    emitted = jnp.where(view.active, result.accept_len + 1, 0)
    with jax.named_scope("commit"):
        where = dict(first_slot=0, start=view.anchor_pos, count=emitted)
        history = remember(
            state.history, active=view.active, confidence=evidence.confidence,
            verify_len=verify_len, accept_len=result.accept_len,
        )  # fmt: skip
        state = state.replace(
            target_kv=_stored(state.target_kv, made, **where),
            context_kv=write_rows(state.context_kv, *made.context, **where),
            history=history,
        )
        state = commit(state, view, result)
    offset = jnp.arange(decoder.num_drafts + 1)
    drafts = jnp.pad(block.draft_tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(offset == result.accept_len[:, None], result.bonus_token[:, None], drafts)
    return state, RoundOutput(
        tokens=tokens, emit_len=emitted, accept_len=result.accept_len, verify_len=verify_len,
        confidence=evidence.confidence, presampled=evidence.presampled,
        verify_rows=verified_rows, probe=probe, bypassed=jnp.zeros((), bool),
    )  # fmt: skip


def _settled(
    decoder: Decoder,
    params: PairParams,
    state: DecodeState,
    active: jax.Array,
    end: jax.Array,
    *,
    needed: bool,
) -> DecodeState:
    """The state without pending rows, if the draft's context is needed or there is no more room.

    Args:
      decoder: the models.
      params: parameters.
      state: with pending rows.
      active: bool[R].
      end: i32[R], position after the last pending row.
      needed: by a block that is about to be drafted.

    Returns:
      The state.
    """
    pending, context_kv = settle(
        state.pending, state.context_kv,
        functools.partial(decoder.draft.context_kv, params.draft),
        needed=needed, active=active, end=end,
    )  # fmt: skip
    return state.replace(pending=pending, context_kv=context_kv)


@flax.struct.dataclass
class _NewRows:
    """Rows of a round, of which the caches keep the first of every request (W = K + 1)."""

    new_k: jax.Array | None  # [L, R, W, G, H], of the target
    new_v: jax.Array | None
    cache: PagedCache | None  # the target's, if paged: it has them already
    context: tuple[jax.Array, jax.Array]  # [L', R, W, ..], of the draft


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
    verify_len: jax.Array,
    buckets: tuple[int, ...],
) -> tuple[AcceptResult, _NewRows, jax.Array]:
    """Runs the smallest compiled bucket that holds the schedule, and accepts among its rows.

    Everything that grows with the rows is inside the bucket; branches only read the caches.
    """
    width = decoder.num_drafts + 1
    tokens = jnp.concatenate([view.anchor[:, None], block.draft_tokens], axis=1)

    def run(total: int) -> tuple[AcceptResult, _NewRows, jax.Array]:
        packing = pack_rows(verify_len, view.active, width, total)
        out = decoder.target.forward_packed(
            params.target, packing.pack(tokens), cache, packing, cache_len=view.anchor_pos
        )
        logits = decoder.target.logits(params.target, out.hidden[0])
        with jax.named_scope("accept"):
            result = accept(
                block, logits, packing, verify_len, sampling=view.sampling,
                anchor_pos=view.anchor_pos, round_index=view.round_index, shared=params.shared,
                method=decoder.rejection_sample_method,
            )  # fmt: skip
        positions = view.anchor_pos[packing.request] + packing.offset
        context = decoder.draft.context_kv(params.draft, out.context_features, positions[None])
        made = _NewRows(
            new_k=out.new_k, new_v=out.new_v, cache=out.cache,
            context=tuple(jax.vmap(packing.unpack)(rows[:, 0]) for rows in context),
        )  # fmt: skip
        return result, made, jnp.int32(total)

    scheduled = jnp.where(view.active, verify_len + 1, 0).sum()
    choice = jnp.searchsorted(jnp.array(buckets), scheduled)
    with jax.named_scope("target.verify"):
        return jax.lax.switch(choice, [lambda total=total: run(total) for total in buckets])


def _stored(
    cache: KVCache | PagedCache, made: TargetOutput | _NewRows, **where: jax.Array | int
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
