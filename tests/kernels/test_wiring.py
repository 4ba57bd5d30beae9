"""The drafts' TPU branches, run here: the same attention as through plain JAX."""

import functools

import jax
import numpy as np
import pytest

from dspark_jax.draft import deepseek, dense
from dspark_jax.kv_cache import KVCache, WindowCache

LENS = np.array([0, 3, 9], np.int32)
LAYER = 1


@pytest.fixture
def take_kernels(monkeypatch):
    """Makes a draft take its TPU branch, with the kernel on a simulated TPU."""

    def kernel_only(kernel, reference, *operands, specs):
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
    take_kernels(dense, "draft_attention")
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
