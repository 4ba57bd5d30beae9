"""The TPU branches of drafts and of acceptance, run here: the same as through plain JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import acceptance, attention
from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.decode import decode_round, pack_rows
from dspark_jax.draft import deepseek, dense, propose
from dspark_jax.engine.load import random_draft_config
from dspark_jax.engine.programs import schedule_table_shapes
from dspark_jax.kv_cache import KVCache, WindowCache
from dspark_jax.sampling import warp
from dspark_jax.state import Decoder, DecodeState, admit, init_state
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import (
    AcceptResult,
    Block,
    PairParams,
    RoundOutput,
    SamplingParams,
    SharedHead,
)

LENS = np.array([0, 3, 9], np.int32)
LAYER = 1


@pytest.fixture
def take_kernels(monkeypatch):
    """Makes a module take its TPU branch, with the kernel on a simulated TPU."""

    def kernel_only(kernel, reference, *operands):
        return kernel(*operands)

    def on(module, name: str) -> None:
        operation = getattr(module, name)

        def simulated(*args, impl: str, **kwargs) -> Any:
            assert impl == "pallas"
            return operation(*args, impl="interpret", **kwargs)

        monkeypatch.setattr(module, "on_tpu", kernel_only)
        monkeypatch.setattr(module, name, simulated)

    return on


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal, take_kernels, rng):
    """A dense draft's block, and a target's rows."""
    requests = len(LENS)
    q, k, v = (_normal(rng, requests, 3, heads, 8) for heads in (4, 2, 2))
    cache = KVCache(*_normal(rng, 2, 2, requests + 1, 2, 12, 8))
    static = dict(causal=causal, scale=0.4, window=4)

    def run() -> np.ndarray:
        attend = functools.partial(attention.attend, layer=LAYER, first_slot=1, **static)
        return np.asarray(jax.jit(attend)(q, k, v, cache, cache_len=LENS))

    expected = run()
    take_kernels(attention, "block_attention")
    np.testing.assert_allclose(run(), expected, atol=2e-6)


def test_deepseek_draft(take_kernels, rng):
    requests = len(LENS)
    q, new_kv, sink = _normal(rng, requests, 3, 4, 8), _normal(rng, requests, 3, 8), _normal(rng, 4)
    cache = WindowCache(kv=_normal(rng, 2, requests, 6, 8))

    def run() -> np.ndarray:
        attend = functools.partial(deepseek._attend_block, layer=LAYER, scale=0.4)
        return np.asarray(jax.jit(attend)(q, new_kv, cache, cache_len=LENS, sink=sink))

    expected = run()
    take_kernels(deepseek, "window_attention")
    np.testing.assert_allclose(run(), expected, atol=2e-6)


@pytest.mark.parametrize(("coupled", "reduced"), [(False, False), (True, True)])
def test_markov_step(coupled, reduced, take_kernels, rng):
    """Sampled and greedy requests in a batch; a reduced vocabulary takes the target's noise."""
    requests, vocab, rank = 5, 40, 6
    own = vocab // 2 if reduced else vocab
    ids = jnp.asarray(rng.permutation(vocab)[:own].astype(np.int32)) if reduced else None
    shared = SharedHead(embedding=np.zeros((vocab, 1)), head=np.zeros((own, 1)), target_ids=ids)
    params = {"w1": _normal(rng, vocab, rank), "w2": _normal(rng, own, rank)}
    latent, logits = _normal(rng, requests, rank), _normal(rng, requests, own)
    counts = jnp.arange(requests, dtype=jnp.int32)

    def run(top_k: int) -> tuple[np.ndarray, ...]:
        sampling = SamplingParams(
            temperature=np.array([0, 1, 0.5, 0, 2], np.float32), seed=counts.astype(np.uint32),
            top_k=np.full(requests, top_k, np.int32), top_p=np.ones(requests, np.float32),
            min_p=np.zeros(requests, np.float32),
        )  # fmt: skip
        pick = functools.partial(
            propose._pick_biased, params, shared=shared, sampling=sampling, round_index=counts,
            position=counts + 7, coupled=coupled,
        )  # fmt: skip
        return jax.device_get(jax.jit(pick)(latent, logits))

    expected = {top_k: run(top_k) for top_k in (0, 3)}
    take_kernels(propose, "sample_latent")
    for top_k, (token, log_probs, biased) in expected.items():
        got = run(top_k)
        np.testing.assert_array_equal(got[0], token)
        np.testing.assert_allclose(got[1], log_probs, atol=2e-6)
        np.testing.assert_allclose(got[2], biased, atol=2e-6)
        assert (np.isneginf(log_probs[1]).sum() > 0) == (top_k > 0)


def _sampling(temperature: list[float], top_k: int) -> SamplingParams:
    requests = len(temperature)
    return SamplingParams(
        temperature=np.array(temperature, np.float32),
        seed=np.arange(requests, dtype=np.uint32),
        top_k=np.full(requests, top_k, np.int32), top_p=np.ones(requests, np.float32),
        min_p=np.zeros(requests, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "reduced"), [("standard", False), ("standard", True), ("coupled", False)]
)
def test_acceptance(method, reduced, take_kernels, rng):
    """Greedy and sampled requests in a batch, greedy ones alone, and one that drops tokens."""
    requests, drafts, vocab = 6, 2, 20
    own = 15 if reduced else vocab
    ids = rng.permutation(vocab)[:own].astype(np.int32)
    shared = SharedHead(embedding=np.zeros((vocab, 1)), head=np.zeros((own, 1)))
    if reduced:
        back = np.full(vocab, own, np.int32)
        back[ids] = np.arange(own)
        shared = shared.replace(target_ids=ids, draft_ids=back)
    target = _normal(rng, requests, drafts + 1, vocab) * 2
    draft_logits = target[:, :-1, ids] if reduced else target[:, :-1]
    draft_logits = draft_logits + _normal(rng, *draft_logits.shape)
    verify_len = np.array([2, 2, 2, 2, 1, 0], np.int32)
    counts = jnp.arange(requests, dtype=jnp.int32)
    drawn = rng.gumbel(size=draft_logits.shape).astype(np.float32)

    def blocks(sampling: SamplingParams) -> Block:
        log_probs = np.asarray(warp(draft_logits, sampling))
        rows = np.argmax(log_probs + drawn, axis=-1).astype(np.int32)
        return Block(
            draft_tokens=ids[rows] if reduced else rows, draft_log_probs=log_probs,
            draft_logits=draft_logits, base_logits=draft_logits,
            block_hidden=np.zeros((requests, drafts, 1), np.float32), confidence_logits=None,
        )  # fmt: skip

    active = np.ones(requests, bool)
    packing = pack_rows(verify_len, active, drafts + 1, requests * (drafts + 1))
    rows = packing.pack(target)

    def results(batches: list[SamplingParams]) -> list[AcceptResult]:
        accept = functools.partial(
            acceptance.accept, anchor_pos=counts + 7, round_index=counts, shared=shared,
            method=method,
        )  # fmt: skip
        accept = jax.jit(accept)
        return [
            jax.device_get(accept(blocks(sampling), rows, packing, verify_len, sampling=sampling))
            for sampling in batches
        ]

    mixed = [0.0, 1.0, 0.5, 0.7, 2.0, 0.8]
    batches = [_sampling(mixed, 0), _sampling([0.0] * requests, 0), _sampling(mixed, 3)]
    expected = results(batches)
    take_kernels(acceptance, "speculative_accept_packed")
    for got, wanted in zip(results(batches), expected, strict=True):
        np.testing.assert_array_equal(got.accept_len, wanted.accept_len)
        np.testing.assert_array_equal(got.bonus_token, wanted.bonus_token)
        assert 0 < wanted.accept_len.sum() < verify_len.sum()


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_rounds_emit_the_same_tokens(method, take_kernels):
    """Whole rounds with every kernel and with none, from the same noise."""
    config = TargetConfig(
        model_type="qwen3", vocab_size=24, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=16,
        rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=False, qk_norm=True,
    )  # fmt: skip
    draft_config = dataclasses.replace(
        random_draft_config(config), num_hidden_layers=1, block_size=2
    )
    decoder = Decoder(
        target=LlamaTarget(config=config, tap_layer_ids=draft_config.target_layer_ids),
        draft=dense.DenseDraft(config=draft_config), rejection_sample_method=method,
    )  # fmt: skip
    target = jax.jit(decoder.target.init)(jax.random.key(0))
    target["head"] *= 10
    draft = jax.jit(decoder.draft.init)(jax.random.key(1))
    params = PairParams(target=target, draft=draft, shared=decoder.target.shared_head(target))
    requests = 3
    shapes = schedule_table_shapes(requests, decoder.num_drafts)
    tables = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)

    def start() -> DecodeState:
        state = init_state(decoder, requests, 12, jnp.float32)
        for slot, temperature in enumerate([0.0, 1.0, 0.7]):
            sampling = jax.tree.map(lambda x: x[0], _sampling([temperature], 0))
            state = admit(state, slot, 5 + slot, 0, 9, sampling.replace(seed=np.uint32(slot)))
        return state

    def run() -> list[RoundOutput]:
        state = jax.jit(start)()
        step = functools.partial(decode_round, decoder, rows=requests, buckets=(9,))
        step, outputs = jax.jit(step), []
        for _ in range(3):
            state, output = step(params, state, tables)
            outputs.append(jax.device_get(output))
        return outputs

    expected = run()
    for module, name in [
        (attention, "block_attention"), (propose, "sample_latent"),
        (acceptance, "speculative_accept_packed"),
    ]:  # fmt: skip
        take_kernels(module, name)
    for got, wanted in zip(run(), expected, strict=True):
        np.testing.assert_array_equal(got.accept_len, wanted.accept_len)
        np.testing.assert_array_equal(got.tokens, wanted.tokens)
    accepted = sum(output.accept_len.sum() for output in expected)
    assert 0 < accepted < sum(output.verify_len.sum() for output in expected)
