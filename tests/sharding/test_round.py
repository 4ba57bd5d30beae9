"""The round over eight devices: the same tokens as on one, and little talk between them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax import moe
from dspark_jax.draft.propose import propose
from dspark_jax.engine import programs
from dspark_jax.engine.core import Engine
from dspark_jax.engine.counters import Counters
from dspark_jax.engine.fit import fit_draft, fit_target
from dspark_jax.engine.spread import place_pair
from dspark_jax.kv_cache import PAGE_SIZE
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sharding import make_mesh, parse_mesh
from dspark_jax.types import PairParams, SamplingParams
from tests.sharding.models import (
    BLOCK,
    CAPACITY,
    SLOTS,
    VOCAB,
    Pair,
    collectives,
    make_engine,
    requests,
    tiny_pair,
)

WIDTH = 32
PRESAMPLED = {"schedule": ScheduleConfig(policy="presampled")}
LIKELIEST = 64  # candidates of each device that `presampled` compares


@pytest.fixture(scope="module")
def dense() -> Pair:
    return tiny_pair()


@pytest.fixture(scope="module")
def expected(dense) -> tuple[list, float]:
    return _run(make_engine(dense, None, **PRESAMPLED))


def _run(engine: Engine) -> tuple[list, float]:
    tokens = [sequence.token_ids for sequence in engine.run(requests())]
    return tokens, engine.counters.acceptance_length


def _check_talk(engine: Engine, *, model: int, candidates: int = 0) -> None:
    """No collective of a round is larger than the rows it is about, whatever the vocabulary.

    A reduction is of hidden rows, at most [R*(K+1), D]. A gather is of a value and an index per
    row and device, of the likeliest tokens `presampled` compares, or of the round's small output.
    """
    (rows,) = engine.programs.widths
    text = engine.programs.round[rows].as_text()
    found = collectives(text)
    reduced = [c for c in found if c.kind == "all-reduce"]
    gathered = [c for c in found if c.kind == "all-gather"]
    assert len(reduced) + len(gathered) == len(found), found
    assert max(c.size for c in reduced) == rows * (BLOCK + 1) * WIDTH
    output = SLOTS * (BLOCK + 1)
    limit = max(rows * (BLOCK + 1) * model, output, rows * (BLOCK - 1) * candidates * model)
    assert max(c.size for c in gathered) <= limit < rows * VOCAB
    in_layers = [c for c in reduced if "target.verify" in c.where and "DecoderLayer" in c.where]
    assert len(in_layers) == 2  # a scanned layer: after attention, and after the MLP


@pytest.mark.parametrize("mesh", ["data=2,model=4", "model=8"])
def test_a_dense_pair_decodes_the_same(dense, expected, mesh):
    engine = make_engine(dense, mesh, **PRESAMPLED)
    tokens, tau = _run(engine)
    assert tokens == expected[0]
    assert tau == expected[1] > 1.1  # some drafts pass, some do not
    model = parse_mesh(mesh).model
    cache = engine.programs.new_state().target_kv.k
    assert cache.addressable_shards[0].data.size == cache.size // 8
    _check_talk(engine, model=model, candidates=LIKELIEST)


@pytest.fixture(scope="module")
def hardly_drafted(dense) -> tuple[list, Counters]:
    return _run_where_drafts_hardly_pay(dense, None)


@pytest.mark.parametrize("mesh", ["data=2,model=4", "model=8"])
def test_rounds_without_drafts_decode_the_same(dense, hardly_drafted, mesh):
    """Where one group of slots drafts, all do; `coupled`, as its text depends on no decision."""
    whole, split = hardly_drafted, _run_where_drafts_hardly_pay(dense, mesh)
    assert split[0] == whole[0]
    for _, counters in (whole, split):
        assert 0 < counters.num_bypassed < counters.generation_tokens
        assert counters.num_accepted_tokens > 0
    if "data" not in mesh:
        assert split[1].num_bypassed == whole[1].num_bypassed


def _run_where_drafts_hardly_pay(dense: Pair, mesh: str | None) -> tuple[list, Counters]:
    schedule = ScheduleConfig(policy="lagged", min_predicted_gain=0.0)
    engine = make_engine(dense, mesh, schedule=schedule, rejection_sample_method="coupled")
    for speeds in engine.steps_per_s.values():
        speeds[0] = 2.0  # twice as fast as a round with drafts
    tokens = [sequence.token_ids for sequence in engine.run(requests())]
    return tokens, engine.counters


def test_pages_over_devices_decode_the_same(dense, expected, monkeypatch):
    """Heads of a page lie on the devices that hold them, and no layer moves any of the cache."""
    target, draft, params = dense
    paged = (dataclasses.replace(target, paged=True), draft, params)
    schedule = ScheduleConfig(policy="lagged", planner="host")
    monkeypatch.setattr(programs, "row_buckets", lambda rows, k, adaptive: (rows * (k + 1),))
    engine = make_engine(paged, "data=2,model=4", schedule=schedule)
    tokens = [sequence.token_ids for sequence in engine.run(requests())]
    assert tokens == expected[0]
    pages = engine.programs.new_state().target_kv.pages
    assert pages.addressable_shards[0].data.shape == (2, SLOTS // 2, PAGE_SIZE, 2 * 8 // 4, 8)
    (program,) = engine.programs.planned.values()
    rows = SLOTS // 2 * (BLOCK + 1)
    in_layers = [c for c in collectives(program.as_text()) if "DecoderLayer" in c.where]
    assert [c.kind for c in in_layers] == ["all-reduce"] * 2
    assert {c.size for c in in_layers} == {rows * WIDTH}


def test_experts_over_devices_decode_the_same(monkeypatch):
    """Also where tokens are sent to their experts, which a chunk of a prompt does here."""
    pair = tiny_pair(moe=True)
    tokens, _ = _run(make_engine(pair, None))
    monkeypatch.setattr(moe, "ALL_TO_ALL_TOKENS", CAPACITY)
    engine = make_engine(pair, "data=4,expert=2")
    gate_up = engine.params.target["layers"]["mlp"]["gate_up"]
    assert gate_up.addressable_shards[0].data.shape[1] == 4  # of 8 experts
    assert _run(engine)[0] == tokens
    (rows,) = engine.programs.widths
    talk = collectives(engine.programs.round[rows].as_text())
    experts = [c for c in talk if "moe.experts" in c.where]
    assert [c.kind for c in experts] == ["all-reduce"]  # one sum a layer
    assert max(c.size for c in talk) <= rows * (BLOCK + 1) * WIDTH
    (chunk,) = engine.programs.prefill.values()
    experts = [c for c in collectives(chunk.as_text()) if "moe.experts" in c.where]
    assert {"all-to-all", "all-gather"} <= {c.kind for c in experts}


def test_logits_are_the_same_where_heads_do_not_divide(rng):
    target, draft, params = tiny_pair(kv_heads=3, heads=6)
    tokens = jnp.array(rng.integers(0, VOCAB, (2, 7)), jnp.int32)
    ints, zeros = jnp.zeros(2, jnp.int32), jnp.zeros(2)
    sampling = SamplingParams(
        temperature=zeros, top_k=ints, top_p=zeros + 1, min_p=zeros, seed=ints.astype(jnp.uint32)
    )  # fmt: skip

    def run(target, draft, params: PairParams) -> tuple:
        cache = target.make_cache(2, 8, jnp.float32)
        out = target.forward(params.target, tokens, cache, cache_len=ints)
        context = draft.make_cache(2, 8, jnp.float32)
        block = propose(
            draft, params.draft, params.shared, context, anchor=tokens[:, 0], anchor_pos=ints,
            round_index=ints, sampling=sampling, coupled=False,
        )  # fmt: skip
        return target.logits(params.target, out.hidden), block.draft_logits, block.draft_tokens

    want = jax.jit(run, static_argnums=(0, 1))(target, draft, params)
    mesh = make_mesh(parse_mesh("data=2,model=4"))
    config, target_params = fit_target(target.config, params.target, 4)
    draft_config, draft_params = fit_draft(draft.config, params.draft, 4)
    assert (config.num_key_value_heads, config.num_attention_heads) == (4, 8)
    fitted = (type(target)(config=config, tap_layer_ids=(-1, 0)), type(draft)(config=draft_config))
    placed = place_pair(mesh, params.replace(target=target_params, draft=draft_params))
    with jax.set_mesh(mesh):
        got = jax.jit(run, static_argnums=(0, 1))(*fitted, placed)
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)
    np.testing.assert_array_equal(got[2], want[2])


def test_a_gathered_vocabulary_would_be_found():
    mesh = make_mesh(parse_mesh("model=8"))
    split = NamedSharding(mesh, PartitionSpec(None, "model"))
    logits = jax.ShapeDtypeStruct((SLOTS, VOCAB), np.float32, sharding=split)
    text = jax.jit(lambda x: jnp.sort(x, axis=-1)).lower(logits).compile().as_text()
    assert max(c.size for c in collectives(text)) >= SLOTS * VOCAB // 8
    assert any(c.kind in ("all-gather", "all-to-all") for c in collectives(text))
