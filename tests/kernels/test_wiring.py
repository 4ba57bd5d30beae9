"""The drafts' TPU branches, run here: the same attention as through plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.draft import deepseek, dense, propose
from dspark_jax.kv_cache import KVCache, WindowCache
from dspark_jax.types import SamplingParams, SharedHead

LENS = np.array([0, 3, 9], np.int32)
LAYER = 1


@pytest.fixture
def take_kernels(monkeypatch):
    """Makes a draft take its TPU branch, with the kernel on a simulated TPU."""

    def kernel_only(kernel, reference, *operands):
        return kernel(*operands)

    def on(module, name: str) -> None:
        attention = getattr(module, name)

        def simulated(*args, impl: str, **kwargs) -> jax.Array:
            assert impl == "pallas"
            return attention(*args, impl="interpret", **kwargs)

        monkeypatch.setattr(module, "on_tpu", kernel_only)
        monkeypatch.setattr(module, name, simulated)

    return on


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def test_dense_draft(take_kernels, rng):
    requests = len(LENS)
    q, k, v = (_normal(rng, requests, 3, heads, 8) for heads in (4, 2, 2))
    cache = KVCache(*_normal(rng, 2, 2, requests, 2, 12, 8))
    static = dict(layer=LAYER, scale=0.4, window=4)

    def run() -> np.ndarray:
        attend = functools.partial(dense._attend_block, **static)
        return np.asarray(jax.jit(attend)(q, k, v, cache, cache_len=LENS))

    expected = run()
    take_kernels(dense, "block_attention")
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
    counts = np.arange(requests, dtype=np.int32)

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
