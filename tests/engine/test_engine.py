"""The engine against its plain twin, and its bookkeeping of slots, limits and ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine import programs
from dspark_jax.engine.core import Engine
from dspark_jax.engine.profile import measure_steps_per_s
from dspark_jax.engine.requests import FinishReason, Request, RequestError, Sequence
from dspark_jax.kv_cache import KVCache
from dspark_jax.pending import ROWS_AT_ONCE
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.state import Decoder
from dspark_jax.target.llama import LlamaTarget, split_layers
from dspark_jax.types import PairParams, RoundOutput

VOCAB, BLOCK, CAPACITY, SLOTS = 61, 4, 96, 2
DIMS = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(),
}


def _models() -> tuple[LlamaTarget, DenseDraft]:
    target = TargetConfig(
        model_type="llama", num_hidden_layers=2, tie_word_embeddings=False, qk_norm=False, **DIMS
    )
    draft = DraftConfig(
        num_hidden_layers=1, block_size=BLOCK, mask_token_id=0, target_layer_ids=(-1, 0),
        markov_rank=24, markov_head_type="vanilla", enable_confidence_head=True,
        confidence_head_with_markov=True, **DIMS,
    )  # fmt: skip
    return LlamaTarget(config=target, tap_layer_ids=(-1, 0)), DenseDraft(config=draft)


def _scaled(params: dict, factor: float) -> dict:
    """Kernels made larger, so that distributions are neither flat nor certain."""
    return jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, params)


@pytest.fixture(scope="module")
def pair() -> tuple[LlamaTarget, DenseDraft, PairParams]:
    target, draft = _models()
    params = split_layers(_scaled(jax.jit(target.init)(jax.random.key(1)), 8.0))
    return (
        target,
        draft,
        PairParams(
            target=params,
            draft=_scaled(jax.jit(draft.init)(jax.random.key(2)), 8.0),
            shared=target.shared_head(params),
        ),
    )


@pytest.fixture(scope="module")
def perfect() -> tuple[LlamaTarget, DenseDraft, PairParams]:
    """A target that looks at the last token only, and a Markov head that knows it by heart."""
    target, draft = _models()
    params = split_layers(_scaled(jax.jit(target.init)(jax.random.key(3)), 20.0))
    for layer in params["layers"]:
        layer["o"] = jnp.zeros_like(layer["o"])
        layer["mlp"]["down"] = jnp.zeros_like(layer["mlp"]["down"])
    embedding = params["embedding"]
    scale = jax.lax.rsqrt(jnp.mean(embedding**2, axis=1, keepdims=True) + DIMS["rms_norm_eps"])
    drafted = jax.jit(draft.init)(jax.random.key(4))
    drafted["norm"]["weight"] = jnp.zeros_like(drafted["norm"]["weight"])
    drafted["markov"] = {"w1": embedding * scale, "w2": params["head"]}
    return (
        target,
        draft,
        PairParams(target=params, draft=drafted, shared=target.shared_head(params)),
    )


_ENGINES: dict[tuple, Engine] = {}  # idle engines are as good as new, and compiling is slow


def _engine(
    pair: tuple,
    *,
    plain: bool = False,
    slots: int = SLOTS,
    fresh: bool = False,
    full_width: bool = False,
    **decoder: object,
) -> Engine:
    """Of `full_width` where rounds for fewer requests than slots would show nothing new."""
    target, draft, params = pair
    made = Decoder(target=target, draft=None if plain else draft, **decoder)
    key = (id(params), slots, full_width, made)
    if fresh or key not in _ENGINES:
        with pytest.MonkeyPatch.context() as patch:
            if full_width:
                patch.setattr(programs, "row_widths", lambda slots: (slots,))
            _ENGINES[key] = Engine(made, params, slots=slots, capacity=CAPACITY)
    _ENGINES[key].reset_counters()
    return _ENGINES[key]


def _requests(count: int, **fields: object) -> list[Request]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCAB, rng.integers(1, 40)) for _ in range(count)]
    return [
        Request(prompt_ids=tuple(map(int, p)), max_tokens=int(rng.integers(1, 30)), **fields)
        for p in prompts
    ]


def _mixed(requests: list[Request]) -> list[Request]:
    """Different ways of drawing in one batch."""
    ways = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "seed": 2**63 + 1},
        {"temperature": 1.3, "top_p": 0.8, "seed": 4},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 9, "top_p": 0.9, "seed": 5},
        {"temperature": 1e-6},
    )
    return [dataclasses.replace(r, **ways[i % len(ways)]) for i, r in enumerate(requests)]


def _tokens(engine: Engine, requests: list[Request]) -> list[list[int]]:
    return [sequence.token_ids for sequence in engine.run(requests)]


@pytest.fixture(scope="module")
def plain_engine(pair: tuple) -> Engine:
    return _engine(pair, plain=True)


SCHEDULES = (
    ScheduleConfig(),
    ScheduleConfig(policy="threshold", confidence_threshold=0.5),
    ScheduleConfig(policy="threshold", confidence_threshold=0.3, threshold_kind="cumulative"),
    ScheduleConfig(policy="early_stop"),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.policy}-{s.threshold_kind}")
def test_greedy_tokens_equal_plain_decoding(
    pair: tuple, plain_engine: Engine, schedule: ScheduleConfig
) -> None:
    engine = _engine(pair, schedule=schedule, full_width=schedule.policy != "full")
    if schedule.policy == "early_stop":
        measure_steps_per_s(engine)
    requests = _requests(7)
    assert _tokens(engine, requests) == _tokens(plain_engine, requests)


@pytest.mark.parametrize("policy", ["full", "global"])
def test_coupled_text_equals_plain_sampling_with_the_same_seed(
    pair: tuple, plain_engine: Engine, policy: str
) -> None:
    schedule = ScheduleConfig(policy=policy)
    engine = _engine(
        pair, schedule=schedule, rejection_sample_method="coupled", full_width=policy != "full"
    )
    requests = _mixed(_requests(12))
    assert _tokens(engine, requests) == _tokens(plain_engine, requests)


def test_standard_sampling_depends_on_the_seed_and_not_on_the_company(pair: tuple) -> None:
    engine = _engine(pair)
    requests = _mixed(_requests(6))
    together = _tokens(engine, requests)
    alone = [_tokens(engine, [request])[0] for request in requests]
    assert together == alone
    reseeded = [dataclasses.replace(r, seed=r.seed + 1, max_tokens=29) for r in requests]
    changed = _tokens(engine, reseeded)
    longer = _tokens(engine, [dataclasses.replace(r, max_tokens=29) for r in requests])
    drawn = [i for i, r in enumerate(requests) if r.temperature > 1e-3]
    assert any(changed[i] != longer[i] for i in drawn)


def test_a_slot_carries_nothing_over_to_the_next_request(pair: tuple) -> None:
    engine = _engine(pair, slots=1)
    first, second = _requests(2)
    fresh = engine.run([second])[0]
    engine.run([first])
    # Whatever lies in unused rows must never be read.
    engine._state = engine._state.replace(
        target_kv=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._state.target_kv),
        context_kv=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._state.context_kv),
    )
    again = engine.run([second])[0]
    assert again.token_ids == fresh.token_ids
    assert (again.rounds, again.accepted) == (fresh.rounds, fresh.accepted)


def test_prefill_in_chunks_equals_one_shot(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests(5)
    whole = _tokens(_engine(pair), requests)
    accepted = [s.accepted for s in _engine(pair).run(requests)]
    monkeypatch.setattr("dspark_jax.engine.programs.PREFILL_CHUNKS", (3,))
    chunked = _engine(pair, fresh=True).run(requests)
    assert [s.token_ids for s in chunked] == whole
    assert [s.accepted for s in chunked] == accepted  # the draft's context is the same too


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_a_perfect_draft_is_always_accepted_and_lengths_are_exact(
    perfect: tuple, temperature: float, rule: str
) -> None:
    engine = _engine(perfect, rejection_sample_method=rule)
    for max_tokens in range(1, 2 * BLOCK + 4):
        request = Request(
            prompt_ids=(7, 8, 9), max_tokens=max_tokens, temperature=temperature, seed=max_tokens
        )
        (sequence,) = engine.run([request])
        assert len(sequence.token_ids) == max_tokens
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.accepted == sequence.drafted
        assert sequence.rounds == -(-max_tokens // (BLOCK + 1))


def test_an_end_token_inside_an_accepted_block_ends_the_text_there(perfect: tuple) -> None:
    engine = _engine(perfect)
    request = Request(prompt_ids=(7, 8, 9), max_tokens=20)
    (free,) = engine.run([request])
    for at in range(8):
        end = free.token_ids[at]
        cut = free.token_ids.index(end)
        (sequence,) = engine.run([dataclasses.replace(request, stop_ids=(end,))])
        assert sequence.token_ids == free.token_ids[: cut + 1]
        assert sequence.finish_reason is FinishReason.STOP
    at_limit = dataclasses.replace(request, stop_ids=(free.token_ids[0],), max_tokens=1)
    assert engine.run([at_limit])[0].finish_reason is FinishReason.STOP
    ignoring = dataclasses.replace(request, stop_ids=(free.token_ids[0],), ignore_eos=True)
    assert engine.run([ignoring])[0].token_ids == free.token_ids


def test_a_prompt_that_fills_its_slot_is_decoded_to_the_last_row(pair: tuple) -> None:
    engine, plain = _engine(pair), _engine(pair, plain=True)
    requests = [
        Request(prompt_ids=tuple(range(1, 1 + CAPACITY - new)), max_tokens=new)
        for new in (36, 37, 40)
    ]
    requests = [
        dataclasses.replace(r, prompt_ids=tuple(i % VOCAB for i in r.prompt_ids)) for r in requests
    ]
    assert _tokens(engine, requests) == _tokens(plain, requests)


def test_cancelling_frees_the_slot_for_the_next(pair: tuple) -> None:
    engine = _engine(pair, slots=1)
    first, second = (dataclasses.replace(r, max_tokens=25) for r in _requests(2))
    expected = engine.run([second])[0].token_ids
    long, waiting = engine.submit(first), engine.submit(second)
    engine.step()
    engine.cancel(long)
    assert long.finish_reason is FinishReason.CANCELLED
    while engine.has_work:
        engine.step()
    assert waiting.token_ids == expected
    assert engine.num_running == engine.num_waiting == 0


def test_requests_that_cannot_be_served_name_the_field(pair: tuple) -> None:
    engine = _engine(pair)
    for prompt, field in (((1,) * CAPACITY, "prompt"), ((1, 2, VOCAB), "prompt")):
        with pytest.raises(RequestError) as error:
            engine.submit(Request(prompt_ids=prompt, max_tokens=4))
        assert error.value.field == field
    with pytest.raises(RequestError, match="at most 96 tokens"):
        engine.submit(Request(prompt_ids=(1,), max_tokens=CAPACITY))
    bad = {"max_tokens": 0, "temperature": -1.0, "top_k": -1, "top_p": 0.0, "min_p": 2.0,
           "seed": -1}  # fmt: skip
    for field, value in bad.items():
        with pytest.raises(RequestError, match=field):
            Request(**({"prompt_ids": (1,), "max_tokens": 4} | {field: value}))


def test_global_is_refused_with_standard_verification(pair: tuple) -> None:
    with pytest.raises(ValueError, match="distribution would change"):
        _engine(pair, schedule=ScheduleConfig(policy="global"))


@pytest.mark.parametrize("plain", [True, False])
def test_the_cache_is_updated_in_place(
    pair: tuple, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PREFILL_CHUNKS", (512,))
    target, draft, params = pair
    decoder = Decoder(target=target, draft=None if plain else draft)
    capacity = 1 << 17  # a cache far larger than everything else in the program
    engine = Engine(decoder, params, slots=1, capacity=capacity)
    program = engine.programs.plain[1] if plain else engine.programs.round[1]
    cache = sum(x.nbytes for x in jax.tree.leaves(engine._state.target_kv))
    for compiled in (program, engine.programs.prefill[512]):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= cache
        assert memory.temp_size_in_bytes < cache / 2


def test_counters_agree_with_the_sequences(pair: tuple) -> None:
    engine = _engine(pair)
    sequences = engine.run(_requests(6))
    counters = engine.counters
    assert counters.generation_tokens == sum(len(s.token_ids) for s in sequences)
    assert counters.num_drafts == sum(s.rounds for s in sequences)
    assert counters.num_accepted_tokens == sum(s.accepted for s in sequences)
    assert counters.num_accepted_tokens == sum(counters.num_accepted_tokens_per_pos)
    assert counters.num_draft_tokens == sum(counters.num_draft_tokens_per_pos)
    assert counters.generation_tokens == counters.num_accepted_tokens + counters.num_drafts


def test_measured_steps_per_s_form_a_staircase(pair: tuple) -> None:
    engine = _engine(pair, schedule=ScheduleConfig(policy="early_stop"), full_width=True)
    tables = measure_steps_per_s(engine)
    for rows, table in tables.items():
        assert np.all(np.diff(table[rows:]) <= 0)
        steps = set(np.flatnonzero(np.diff(table[rows:])) + rows)
        assert steps <= set(engine.programs.buckets(rows))


PLANNING = {
    "lagged": ScheduleConfig(policy="lagged", lag=1, min_verify_len=1),
    "presampled": ScheduleConfig(
        policy="presampled", min_predicted_gain=0.05, probe_every=5, max_verify_len=3
    ),
}


def _planning(pair: tuple, name: str) -> Engine:
    """An engine whose rounds slow down with every row, so that schedules vary."""
    engine = _engine(pair, schedule=PLANNING[name], rejection_sample_method="coupled")
    for rows, table in engine.steps_per_s.items():
        over = np.maximum(np.arange(len(table)) - rows, 0) / rows
        engine.steps_per_s[rows] = (1.0 / (1.0 + 0.4 * over)).astype(np.float32)
        engine.steps_per_s[rows][0] = 1.1
    return engine


def _watched(engine: Engine, requests: list[Request]) -> tuple[list[list[int]], list[RoundOutput]]:
    """Tokens of the requests, and what every round told the host."""
    outputs = []

    def see(sequence: Sequence, output: RoundOutput, row: int) -> None:
        if not outputs or outputs[-1] is not output:
            outputs.append(output)

    engine.on_round = see
    tokens = _tokens(engine, requests)
    engine.on_round = None
    return tokens, outputs


@pytest.mark.parametrize("name", PLANNING)
def test_planned_rounds_keep_the_text_and_compute_no_row_that_is_not_scheduled(
    pair: tuple, plain_engine: Engine, name: str
) -> None:
    engine, schedule = _planning(pair, name), PLANNING[name]
    requests = _mixed(_requests(12))
    tokens, outputs = _watched(engine, requests)
    assert tokens == _tokens(plain_engine, requests)
    scheduled, buckets = 0, set()
    for output in outputs:
        active = output.emit_len > 0
        rows = int((1 + output.verify_len)[active].sum())
        fits = [b for b in engine.programs.buckets(len(active)) if b >= rows]
        assert output.verify_rows == min(fits)
        scheduled += rows
        buckets.add(int(output.verify_rows))
        if not output.probe:
            assert output.verify_len.max() <= (schedule.max_verify_len or BLOCK)
        if output.bypassed:
            assert rows == active.sum() and not output.probe
    assert len(buckets) > 2
    counters = engine.counters
    assert counters.rounds == len(outputs)
    assert counters.scheduled_rows == scheduled
    assert counters.verified_rows == sum(int(o.verify_rows) for o in outputs)
    emitted = sum(int(o.emit_len.sum()) for o in outputs)
    assert counters.wasted_rows == counters.verified_rows - emitted
    request_rounds = counters.num_drafts + counters.num_bypassed
    assert counters.generation_tokens == counters.num_accepted_tokens + request_rounds
    assert (counters.num_bypassed > 0) == (schedule.min_predicted_gain is not None)
    assert (counters.num_probes > 0) == (schedule.probe_every > 0)
    assert all(0 < error < 1 for error in counters.survival_error_mean_per_pos[:2])


def test_rounds_planned_by_the_host_run_ahead_and_keep_the_text(
    pair: tuple, plain_engine: Engine
) -> None:
    schedule = ScheduleConfig(policy="lagged", lag=3, planner="host")
    engine = _engine(pair, schedule=schedule, rejection_sample_method="coupled", slots=2)
    for rows, table in engine.steps_per_s.items():
        over = np.maximum(np.arange(len(table)) - rows, 0) / rows
        engine.steps_per_s[rows] = (1.0 / (1.0 + 0.4 * over)).astype(np.float32)
    requests = _mixed(_requests(6))
    expected = _tokens(plain_engine, requests)
    tokens, outputs = _watched(engine, requests)
    assert tokens == expected
    sizes = set()
    for output in outputs:
        active = output.emit_len > 0
        assert (1 + output.verify_len)[active].sum() <= output.verify_rows
        assert output.verify_rows in engine.programs.buckets(len(active))
        sizes.add(int(output.verify_rows))
    assert len(sizes) > 2
    counters = engine.counters
    assert counters.generation_tokens == sum(map(len, expected))
    assert counters.rounds >= len(outputs)

    sequences = [engine.submit(request) for request in requests]  # and one of them goes away
    while not sequences[0].token_ids:
        engine.step()
    assert len(engine._flying) == schedule.lag - 1
    engine.cancel(sequences[0])
    while engine.has_work:
        engine.step()
    assert [s.token_ids for s in sequences[1:]] == expected[1:]
    assert sequences[0].token_ids == expected[0][: len(sequences[0].token_ids)]
    assert sequences[0].finish_reason is FinishReason.CANCELLED


def test_rounds_without_drafts_keep_the_draft_context(pair: tuple) -> None:
    engine = _planning(pair, "presampled")
    request = Request(prompt_ids=(5, 6, 7), max_tokens=30)
    rows, contexts, tokens, pending = 3 + 30 - 1, [], [], []
    for undrafted in (1e9, 0.0):  # steps per second without drafts: always wins, never wins
        for table in engine.steps_per_s.values():
            table[0] = undrafted
        engine.reset_counters()
        tokens.append(_tokens(engine, [request])[0])
        pending.append(int(engine._state.pending.count[0]))
        contexts.append([np.asarray(x[:, 0, :, :rows]) for x in jax.tree.leaves(_context(engine))])
        assert (engine.counters.num_bypassed > 15) == (undrafted > 1)
    assert tokens[0] == tokens[1] and 0 <= pending[0] <= ROWS_AT_ONCE and pending[1] == 0
    for kept, drafted in zip(*contexts, strict=True):  # but for what no block has asked for yet
        made = rows - pending[0]
        np.testing.assert_allclose(kept[:, :, :made], drafted[:, :, :made], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plain_width", [1, 2])
def test_rounds_are_plain_as_long_as_asking_anew_would_say_so(
    pair: tuple, monkeypatch: pytest.MonkeyPatch, plain_width: int
) -> None:
    engine, asked, rounds = _planning(pair, "presampled"), [], []
    programs, start = dict(engine.programs.bypassed), engine._start_round
    for width, program in programs.items():
        engine.steps_per_s[width][0] = 1e9 if width == plain_width else 0.0

        def ask(*args, program=program):
            asked.append(program)
            return program(*args)

        monkeypatch.setitem(engine.programs.bypassed, width, ask)

    def watched():
        tables = {width: engine.tables(engine.steps_per_s[width]) for width in programs}
        anew = {w: int(program(engine._state, tables[w])) for w, program in programs.items()}
        flight = start()
        rounds.append((anew[len(flight.output.emit_len)] > 0, bool(flight.output.bypassed)))
        return flight

    monkeypatch.setattr(engine, "_start_round", watched)
    engine.run(_requests(6))
    assert all(anew == bypassed for anew, bypassed in rounds)
    assert 0 < sum(bypassed for _, bypassed in rounds) and len(asked) < len(rounds)


def _context(engine: Engine) -> KVCache:
    return engine._state.context_kv


def test_a_slots_history_starts_afresh_and_temperatures_are_data(pair: tuple) -> None:
    engine = _planning(pair, "lagged")
    first, second = (dataclasses.replace(r, max_tokens=25) for r in _requests(2))
    outputs = _watched(engine, [first])[1]
    _watched(engine, [second])
    again = _watched(engine, [first])[1]
    for a, b in zip(outputs, again, strict=True):
        assert a.verify_len[0] == b.verify_len[0]
    engine.sts_temperatures = np.full(BLOCK, 2.0, np.float32)
    calmer = _watched(engine, [first])[1]
    engine.sts_temperatures = np.ones(BLOCK, np.float32)

    def logits(output: RoundOutput) -> np.ndarray:
        return np.log(output.confidence[0] / (1 - output.confidence[0]))

    np.testing.assert_allclose(2 * logits(calmer[0]), logits(outputs[0]), rtol=1e-3)


def test_block_verification_by_online_confidences(perfect: tuple) -> None:
    online = ScheduleConfig(policy="early_stop", confidence_source="online")
    engine = _engine(perfect, rejection_sample_method="block", schedule=online, slots=1)
    request = Request(prompt_ids=(7, 8, 9), max_tokens=2 * BLOCK + 2, temperature=1.0, seed=3)
    (sequence,) = engine.run([request])
    assert sequence.accepted == sequence.drafted == 2 * BLOCK
    greedy = dataclasses.replace(request, temperature=0.0)
    tokens, outputs = _watched(engine, [greedy])
    assert tokens == _tokens(_engine(perfect, plain=True, slots=1), [greedy])
    assert all((output.confidence == 1.0).all() for output in outputs)  # nothing ever failed
    engine.steps_per_s[1] = np.full(BLOCK + 2, 0.01, np.float32)
    engine.steps_per_s[1][:2] = 1.0  # one row is all that is worth its time
    trimmed, outputs = _watched(engine, [greedy])
    assert trimmed == tokens and all(output.verify_rows == 1 for output in outputs)
