"""A target over a paged cache, stored to before attention, emits what it does over a contiguous."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.decode import decode_round, plain_step, prefill
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine import programs
from dspark_jax.engine.core import Engine
from dspark_jax.engine.load import random_draft_config
from dspark_jax.engine.programs import schedule_table_shapes, shapes_of
from dspark_jax.engine.requests import Request
from dspark_jax.kv_cache import PagedCache
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.state import Decoder, DecodeState, admit, init_state
from dspark_jax.target.llama import LlamaTarget, split_layers
from dspark_jax.types import PairParams, RoundOutput, SamplingParams

SLOTS, CAPACITY, CHUNK = 3, 150, 8  # more than a page
PROMPT, BUCKET = 133, 6
HOST = ScheduleConfig(policy="lagged", planner="host")


def _decoder(*, paged: bool, **fields: object) -> Decoder:
    config = TargetConfig(
        model_type="qwen3", vocab_size=24, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=16,
        rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=False, qk_norm=True,
    )  # fmt: skip
    draft_config = dataclasses.replace(
        random_draft_config(config), num_hidden_layers=1, block_size=2
    )
    taps = draft_config.target_layer_ids
    target = LlamaTarget(config=config, tap_layer_ids=taps, paged=paged)
    draft = DenseDraft(config=draft_config)
    return Decoder(**{"target": target, "draft": draft, "schedule": HOST} | fields)


@pytest.fixture(scope="module")
def params() -> PairParams:
    decoder = _decoder(paged=False)
    target = jax.jit(decoder.target.init)(jax.random.key(0))
    target["head"] *= 10
    shared = decoder.target.shared_head(target)
    drafted = jax.jit(decoder.draft.init)(jax.random.key(1))
    return PairParams(target=target, draft=drafted, shared=shared)


def _split(params: PairParams) -> PairParams:
    return params.replace(target=split_layers(params.target))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _admit(state: DecodeState, slot: int, length: int) -> DecodeState:
    sampling = SamplingParams(
        temperature=np.float32(0.8 * (slot > 0)), top_k=np.int32(0), top_p=np.float32(1),
        min_p=np.float32(0), seed=np.uint32(slot),
    )  # fmt: skip
    return admit(state, slot, 5 + slot, length, 16, sampling)


def _run(decoder: Decoder, params: PairParams) -> list[RoundOutput]:
    """A long prompt and none; then rounds, between the chunks of a third prompt; plain steps.

    Where nothing has been written the cache holds NaN.
    """
    tables = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype), schedule_table_shapes(SLOTS, decoder.num_drafts)
    )

    @jax.jit
    def start() -> DecodeState:
        state = init_state(decoder, SLOTS, CAPACITY, jnp.float32)
        poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.target_kv)
        return state.replace(target_kv=poisoned)

    state = start()
    fill = jax.jit(functools.partial(prefill, decoder))
    step = jax.jit(functools.partial(decode_round, decoder, rows=SLOTS, buckets=(BUCKET,)))
    plain = jax.jit(functools.partial(plain_step, decoder, rows=SLOTS))

    def chunk(state: DecodeState, slot: int, start: int, count: int) -> DecodeState:
        tokens = jnp.arange(start, start + CHUNK) % 23 + 1
        return fill(params, state, slot, tokens, start, count)

    for start in range(0, PROMPT, CHUNK):
        state = chunk(state, 1, start, min(CHUNK, PROMPT - start))
    state = _admit(_admit(state, 1, PROMPT), 2, 0)
    outputs = []
    for start in (0, CHUNK):
        state = chunk(state, 0, start, 5 if start else CHUNK)
        state, output = step(params, state, tables)
        outputs.append(output)
    state = _admit(state, 0, CHUNK + 5)
    for _ in range(2):
        state, output = step(params, state, tables)
        outputs.append(output)
    state, output = plain(params, state)
    assert isinstance(state.target_kv, PagedCache) == decoder.target.paged
    return jax.device_get([*outputs, output])


@pytest.fixture(scope="module")
def expected(params) -> list[RoundOutput]:
    return _run(_decoder(paged=False), params)


@pytest.mark.parametrize("layers", ["stacked", "split"])
def test_tokens_are_those_of_a_contiguous_cache(params, expected, layers):
    got_params = params if layers == "stacked" else _split(params)
    for got, wanted in zip(_run(_decoder(paged=True), got_params), expected, strict=True):
        np.testing.assert_array_equal(got.emit_len, wanted.emit_len)
        np.testing.assert_array_equal(got.verify_len, wanted.verify_len)
        kept = np.arange(wanted.tokens.shape[1]) < wanted.emit_len[:, None]
        np.testing.assert_array_equal(got.tokens[kept], wanted.tokens[kept])
        np.testing.assert_allclose(got.confidence, wanted.confidence, atol=1e-5)
    assert [int((output.emit_len > 0).sum()) for output in expected] == [2, 2, 3, 3, 3]
    assert any(output.accept_len.any() for output in expected)


def test_an_engine_over_pages_keeps_the_text(params, monkeypatch):
    monkeypatch.setattr(programs, "PREFILL_CHUNKS", (4 * CHUNK,))
    monkeypatch.setattr(programs, "row_widths", lambda slots: (slots,))
    monkeypatch.setattr(programs, "row_buckets", lambda rows, k, adaptive: (4, rows * (k + 1)))
    requests = [
        Request(
            prompt_ids=tuple(1 + (7 * i + j) % 23 for j in range(1 + 43 * i)), max_tokens=12,
            temperature=float(i % 2), seed=i,
        )
        for i in range(4)
    ]  # fmt: skip

    def run(paged: bool) -> tuple[list, set]:
        decoder = _decoder(paged=paged, rejection_sample_method="coupled")
        engine = Engine(decoder, _split(params), slots=2, capacity=CAPACITY)
        for rows, table in engine.steps_per_s.items():
            engine.steps_per_s[rows] = table / (1 + 0.1 * np.arange(len(table), dtype=np.float32))
        rows = set()
        engine.on_round = lambda sequence, output, row: rows.add(int(output.verify_rows))
        return [sequence.token_ids for sequence in engine.run(requests)], rows

    tokens, rows = run(True)
    assert (tokens, rows) == run(False)
    assert len(rows) > 1


@pytest.mark.parametrize(
    ("name", "layers"),
    [("prefill", "split"), ("plain", "stacked"), ("plain", "split"), ("round", "split")],
)
def test_the_cache_is_updated_in_place(params, name, layers):
    decoder, capacity = _decoder(paged=True), 1 << 15
    params = params if layers == "stacked" else _split(params)
    state = jax.eval_shape(lambda: init_state(decoder, 1, capacity, jnp.float32))
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    program, more = {
        "prefill": (prefill, (scalar, jax.ShapeDtypeStruct((CHUNK,), jnp.int32), scalar, scalar)),
        "plain": (functools.partial(plain_step, rows=1), ()),
        "round": (
            functools.partial(decode_round, rows=1, buckets=(3,)),
            (schedule_table_shapes(1, decoder.num_drafts),),
        ),
    }[name]
    run = jax.jit(functools.partial(program, decoder), donate_argnums=1)
    memory = run.lower(shapes_of(params), state, *more).compile().memory_analysis()
    cache = state.target_kv.pages.size * 4
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache / 8


def test_rounds_that_choose_their_rows_on_the_device_are_refused(params):
    decoder = _decoder(paged=True)
    for schedule in (ScheduleConfig(), ScheduleConfig(policy="lagged")):
        with pytest.raises(ValueError, match="planner='host'"):
            dataclasses.replace(decoder, schedule=schedule)
    with pytest.raises(ValueError, match="without bypass"):
        ScheduleConfig(policy="lagged", planner="host", min_predicted_gain=0.05)
    dataclasses.replace(decoder, draft=None, schedule=ScheduleConfig())  # plain steps have no rows
    state = init_state(decoder, SLOTS, CAPACITY, jnp.float32)
    with pytest.raises(ValueError, match="one number of rows"):
        decode_round(decoder, params, state, None, SLOTS, (SLOTS, BUCKET))


def test_a_tpu_is_not_given_pages_it_cannot_read(params, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match="heads of width 8"):
        programs.Programs(
            _decoder(paged=True), params, slots=1, capacity=CAPACITY, dtype=jnp.float32
        )
