"""A Markov step with its sample: loops, the project's head, the kernel, shards, candidates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax.draft.markov import markov_bias, markov_step
from dspark_jax.sampling import draw, gumbel, warp
from dspark_jax.types import SamplingParams
from pallas_kernels.chips import BLOCK_SIZES
from pallas_kernels.markov_sample import kernel, ops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    temperature: tuple[float, ...]
    vocab: int = 37  # two tiles and five columns
    rank: int = 6
    dtype: str = "float32"
    keyed: bool = True  # noise from keys, made in the kernel
    keep_logits: bool = False


CASES = {
    "ragged_vocabulary": Case(
        temperature=(1.0, 0.0, 0.5, 2.0, 1.0, 0.0, 1.0, 1.0, 0.7, 1.0, 1.0), keep_logits=True
    ),
    "one_request_bfloat16": Case(temperature=(0.8,), dtype="bfloat16", vocab=32, keyed=False),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16 columns in two parts, groups of 8 requests."""
    sizes = dataclasses.replace(BLOCK_SIZES["v5e"], vocab_columns=16, vector_columns=8)
    monkeypatch.setattr(ops, "block_sizes", lambda: sizes)
    monkeypatch.setattr(kernel, "_GROUP", 8)


def _operands(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    requests, dtype = len(case.temperature), jnp.dtype(case.dtype)
    noise = rng.gumbel(size=(requests, case.vocab)).astype(np.float32)
    if case.keyed:
        noise = rng.integers(0, 2**32, size=(requests, 2), dtype=np.uint32)
    return dict(
        previous=rng.integers(0, case.vocab, size=requests).astype(np.int32),
        w1=rng.normal(size=(case.vocab, case.rank)).astype(dtype),
        w2=rng.normal(size=(case.vocab, case.rank)).astype(dtype),
        base_logits=rng.normal(size=(requests, case.vocab)).astype(np.float32),
        temperature=np.array(case.temperature, np.float32),
        noise=noise,
    )


def _noise(x: dict[str, np.ndarray]) -> np.ndarray:
    """The noise of JAX for the same keys."""
    if x["noise"].dtype == np.float32:
        return x["noise"]
    keys = jax.random.wrap_key_data(x["noise"], impl="threefry2x32")
    return np.asarray(
        jax.vmap(lambda key: jax.random.gumbel(key, x["base_logits"].shape[1:]))(keys)
    )


def _loops(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Token, its logit, the log-normaliser and the logits, in float64, token by token."""
    noise, rows = _noise(x), []
    for r, temperature in enumerate(x["temperature"]):
        latent = x["w1"][x["previous"][r]].astype(np.float64)
        logits = np.array(
            [
                u + latent @ w
                for u, w in zip(x["base_logits"][r], x["w2"].astype(float), strict=True)
            ]
        )
        scaled = logits / temperature if temperature else logits
        token = int(np.argmax(scaled + noise[r] if temperature else scaled))
        normaliser = np.log(np.sum(np.exp(scaled - scaled.max()))) + scaled.max()
        rows.append((token, scaled[token], normaliser, logits))
    names = ("token", "token_logit", "log_normaliser", "logits")
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}


def _assert_sample(sample: ops.MarkovSample, expected: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(sample.token, expected["token"])
    np.testing.assert_allclose(sample.token_logit, expected["token_logit"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        sample.log_normaliser, expected["log_normaliser"], rtol=1e-5, atol=1e-5
    )
    if sample.logits is not None:
        np.testing.assert_allclose(sample.logits, expected["logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["ref", "interpret"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_reference_and_kernel_equal_loops(case, impl, rng, capfd):
    x = _operands(case, rng)
    run = functools.partial(ops.markov_sample, keep_logits=case.keep_logits, impl=impl)
    sample = jax.device_get(jax.jit(run)(**x))
    assert (sample.logits is not None) == case.keep_logits
    _assert_sample(sample, _loops(x))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_without_noise_every_request_is_greedy(rng):
    x = _operands(CASES["ragged_vocabulary"], rng)
    x["temperature"] = np.zeros_like(x["temperature"])
    expected = _loops(x)
    del x["noise"], x["temperature"]
    _assert_sample(jax.jit(ops.markov_sample)(**x), expected)


def test_equals_the_vanilla_head_warped_and_drawn_from(rng):
    x = _operands(CASES["ragged_vocabulary"], rng)
    requests = len(x["previous"])
    zeros = np.zeros(requests, np.int32)
    sampling = SamplingParams(
        temperature=x["temperature"], top_k=zeros, top_p=zeros + np.float32(1),
        min_p=zeros * np.float32(0), seed=zeros.astype(np.uint32),
    )  # fmt: skip
    keys = jax.random.wrap_key_data(x["noise"], impl="threefry2x32")

    @jax.jit
    def head(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        params = {"w1": x["w1"], "w2": x["w2"]}
        latent, _, _ = markov_step(params, x["previous"], None, None)
        log_probs = warp(x["base_logits"] + markov_bias(params, latent), sampling)
        return draw(log_probs, gumbel(keys, log_probs.shape[-1])), log_probs

    token, log_probs = head(x)
    sample = jax.jit(functools.partial(ops.markov_sample, impl="auto"))(**x)
    np.testing.assert_array_equal(sample.token, token)
    sampled = x["temperature"] > 0
    log_q = np.take_along_axis(np.asarray(log_probs), np.asarray(token)[:, None], axis=1)[:, 0]
    got = sample.token_logit - sample.log_normaliser
    np.testing.assert_allclose(got[sampled], log_q[sampled], atol=2e-5)


@pytest.mark.parametrize(("shards", "impl"), [(4, "ref"), (2, "interpret")])
def test_shards_of_the_vocabulary_exchange_five_numbers_per_request(shards, impl, rng):
    case = Case(temperature=(1.0, 0.0, 0.6), vocab=40)
    x = _operands(case, rng)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("model",))
    specs = {k: P() for k in x} | {"w2": P("model"), "base_logits": P(None, "model")}

    def run(x: dict[str, jax.Array]) -> ops.MarkovSample:
        return ops.markov_sample(**x, keep_logits=True, axis_name="model", impl=impl)

    out_specs = ops.MarkovSample(P(), P(), P(), P(None, "model"))
    sharded = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    )
    _assert_sample(sharded(x), _loops(x))
    program = sharded.lower(x).as_text()
    gathers = [line for line in program.splitlines() if "stablehlo.all_gather" in line]
    assert len(gathers) == 1
    assert f"-> tensor<{shards}x5x3xi32>" in gathers[0]
    assert "all_reduce" not in program and "collective_permute" not in program


def test_candidates_draw_what_the_whole_vocabulary_draws_when_it_is_among_them(rng):
    x = _operands(CASES["ragged_vocabulary"], rng)
    whole = _loops(x)
    others = np.stack([rng.permutation(37)[:8] for _ in whole["token"]])
    others[:, 0] = np.where((others[:, 1:] == whole["token"][:, None]).any(1), others[:, 0],
                            whole["token"])  # fmt: skip
    candidates = np.sort(others, axis=1).astype(np.int32)
    logits = np.take_along_axis(whole["logits"], candidates, axis=1)
    divisor = np.where(x["temperature"] > 0, x["temperature"], 1)[:, None]
    latent = x.pop("w1")[x.pop("previous")]
    for noise in (x["noise"], _noise(x)):
        sample = jax.jit(ops.sample_candidates)(
            latent, candidates=candidates, **x | {"noise": noise}
        )
        expected = dict(
            token=whole["token"], token_logit=whole["token_logit"], logits=logits,
            log_normaliser=np.log(np.exp(logits / divisor).sum(axis=1)),
        )  # fmt: skip
        _assert_sample(sample, expected)


def test_what_does_not_fit_is_named(rng):
    x = _operands(CASES["ragged_vocabulary"], rng)
    with pytest.raises(ValueError, match=r"w2 is \(36, 6\); expected \[V, Q\] = \(37, 6\)"):
        ops.markov_sample(**x | {"w2": x["w2"][:36]})
    with pytest.raises(ValueError, match="noise is uint32"):
        ops.markov_sample(**x | {"noise": x["noise"][:5]})
    with pytest.raises(ValueError, match=r"temperature is \(3,\)"):
        ops.markov_sample(**x | {"temperature": x["temperature"][:3]})
