"""Chi-square tests on what the jitted pieces of a round sample, one seed per request.

Draft draws, acceptance, residual and bonus with the keys of `dspark_jax.sampling`, on a tiny
vocabulary with K = 2. A hundred thousand requests with one seed each share one program. A
threshold of 1e-4 and fixed seeds: what passes once passes always, and a biased variant of the same
round must fail.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dspark_jax.sampling import Purpose, draw, gumbel, position_keys, round_keys, warp
from dspark_jax.types import AcceptResult, SamplingParams
from dspark_jax.verify import accept_block, accept_coupled, accept_standard

SAMPLES = 120_000
V, K = 6, 2
LEVEL = 1e-4
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7, "temperature": 1.4},
    "min_p": {"min_p": 0.25},
    "all": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
}


def sampling_of(count: int, **settings) -> SamplingParams:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    return SamplingParams(
        temperature=jnp.full(count, values["temperature"], jnp.float32),
        top_k=jnp.full(count, values["top_k"], jnp.int32),
        top_p=jnp.full(count, values["top_p"], jnp.float32),
        min_p=jnp.full(count, values["min_p"], jnp.float32),
        seed=jnp.arange(count, dtype=jnp.uint32),
    )


@functools.cache
def logits_of(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Target logits [1+V+V*V, V] by prefix, draft logits [1+V, V], spread and partly alike."""
    rng = np.random.default_rng(7)
    target = rng.normal(scale=1.2, size=(1 + V + V * V, V))
    draft = 0.6 * target[: 1 + V] + rng.normal(scale=0.9, size=(1 + V, V))
    return tuple(np.asarray(jnp.asarray(x, dtype)) for x in (target, draft))


def row_of(prefix: list[jax.Array]) -> jax.Array:
    """Row of a table by prefix: 0; 1 + x; 1 + V + V x + y."""
    if not prefix:
        return jnp.int32(0)
    return 1 + prefix[0] if len(prefix) == 1 else 1 + V + V * prefix[0] + prefix[1]


def accept_after_truncation(drafts, q, p, verify_len, uniforms, noise):
    """Broken: the residual, though the draft was not sent."""
    full = jnp.full_like(verify_len, K)
    closed = jnp.where(jnp.arange(K) < verify_len[:, None], uniforms, 2.0**20)
    return accept_standard(drafts, q, p, full, closed, noise)


def one_round(
    tables: tuple[jax.Array, jax.Array],
    sampling: SamplingParams,
    verify_len: jax.Array,
    *,
    coupled: bool = False,
    accept: Callable = accept_standard,
    residual: Purpose = Purpose.RESIDUAL,
    sharpen_q: float = 1.0,
) -> tuple[AcceptResult, jax.Array]:
    """One round at position 0 for every request; the keywords below `coupled` break it."""
    target, draft = tables
    seed, zero = sampling.seed, jnp.zeros(sampling.seed.shape, jnp.int32)
    drafts, q, uniforms = [], [], []
    for k in range(K):
        logits = jnp.broadcast_to(draft[row_of(drafts)], (*zero.shape, V))
        q.append(warp(logits, sampling))
        keys = round_keys(seed, zero, zero + k, Purpose.DRAFT)
        keys = position_keys(seed, zero + k) if coupled else keys
        drafts.append(draw(q[-1], gumbel(keys, V)))
        keys = round_keys(seed, zero, zero + k, Purpose.ACCEPT)
        uniforms.append(jax.vmap(jax.random.uniform)(keys))
    p = []
    for k in range(K + 1):
        logits = jnp.broadcast_to(target[row_of(drafts[:k])], (*zero.shape, V))
        p.append(warp(logits, sampling))
    tokens, q, p = (jnp.stack(x, axis=1) for x in (drafts, q, p))
    if coupled:
        noise = [gumbel(position_keys(seed, zero + k), V) for k in range(K + 1)]
        return accept_coupled(tokens, draw(p, jnp.stack(noise, axis=1)), verify_len), tokens
    noise = gumbel(round_keys(seed, zero, zero, residual), V)
    result = accept(
        tokens, jax.nn.log_softmax(q * sharpen_q), p, verify_len, jnp.stack(uniforms, 1), noise
    )
    return result, tokens


@functools.cache
def jitted_round(**broken) -> Callable:
    return jax.jit(functools.partial(one_round, **broken))


def p_values(
    settings: dict, dtype: str = "float32", lengths: tuple[int, ...] = (0, 1, 2), **kwargs
) -> list[float]:
    """First emitted token against p, then the second one, where emitted, against p given it."""
    sampling = sampling_of(SAMPLES, **settings)
    verify_len = jnp.asarray(np.resize(np.array(lengths, np.int32), SAMPLES))
    result, drafts = jitted_round(**kwargs)(logits_of(dtype), sampling, verify_len)
    count, last, drafts = (np.asarray(x) for x in (result.accept_len, result.bonus_token, drafts))
    first = np.where(count >= 1, drafts[:, 0], last)
    second = np.where(count >= 2, drafts[:, 1], last)[count >= 1]
    laws = np.exp(np.asarray(warp(logits_of(dtype)[0], sampling_of(1 + V + V * V, **settings))))
    laws = laws.astype(np.float64)
    out = [chi_square(first, laws[0])]
    for x in range(V):
        rows = first[count >= 1] == x
        if rows.sum() > 2000:
            out.append(chi_square(second[rows], laws[1 + x]))
    return out


def chi_square(tokens: np.ndarray, law: np.ndarray) -> float:
    """p-value of the counts; 0 if a token outside the support occurs."""
    counts = np.bincount(tokens, minlength=V)
    if counts[law == 0].any():
        return 0.0
    kept = law > 0
    expected = law[kept] / law[kept].sum() * counts.sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, max(kept.sum() - 1, 1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_standard_samples_follow_the_target(name: str, dtype: str):
    values = p_values(SETTINGS[name], dtype)
    assert len(values) >= 2
    assert min(values) > LEVEL, values


@pytest.mark.parametrize("name", ["plain", "top_p", "all"])
def test_block_samples_follow_the_target(name: str):
    values = p_values(SETTINGS[name], accept=accept_block)
    assert min(values) > LEVEL, values


def test_block_accepts_more():
    sampling, both = sampling_of(SAMPLES), jnp.full(SAMPLES, K, jnp.int32)
    means = [
        np.asarray(jitted_round(accept=rule)(logits_of("float32"), sampling, both)[0].accept_len)
        for rule in (accept_standard, accept_block)
    ]
    standard, block = (lengths.mean() for lengths in means)
    error = max(lengths.std() for lengths in means) / np.sqrt(SAMPLES)
    assert block > standard + 4 * error


@pytest.mark.parametrize("name", ["plain", "all"])
def test_coupled_samples_follow_the_target(name: str):
    values = p_values(SETTINGS[name], coupled=True, lengths=(2,))
    assert min(values) > LEVEL, values


@pytest.mark.parametrize(
    "name,broken",
    [
        ("plain", {"residual": Purpose.DRAFT}),
        ("plain", {"accept": accept_after_truncation}),
        ("plain", {"sharpen_q": 1.1}),
        ("all", {"sharpen_q": 1.1}),
    ],
    ids=["draft noise reused", "residual after truncation", "another q", "another q, warped"],
)
def test_broken_rounds_fail(name: str, broken: dict):
    assert min(p_values(SETTINGS[name], **broken)) < LEVEL


def test_coupled_emits_what_plain_sampling_emits():
    """Token for token, with any schedule."""
    sampling = sampling_of(SAMPLES, temperature=0.9)
    verify_len = jnp.asarray(np.resize(np.array([0, 1, 2], np.int32), SAMPLES))
    result, drafts = jitted_round(coupled=True)(logits_of("float32"), sampling, verify_len)
    count = np.asarray(result.accept_len)
    padded = np.pad(np.asarray(drafts), ((0, 0), (0, 1)))
    emitted = np.where(
        np.arange(K + 1) == count[:, None], np.asarray(result.bonus_token)[:, None], padded
    )
    target = jnp.asarray(logits_of("float32")[0])
    plain = []
    for k in range(K + 1):
        logits = jnp.broadcast_to(target[row_of(plain)], (SAMPLES, V))
        noise = gumbel(position_keys(sampling.seed, jnp.full(SAMPLES, k)), V)
        plain.append(draw(warp(logits, sampling), noise))
        rows = count >= k
        np.testing.assert_array_equal(emitted[rows, k], np.asarray(plain[-1])[rows])
    assert set(count) == {0, 1, 2}


def test_acceptance_rate_is_the_overlap():
    """Acceptance of the first draft is sum(min(p, q)), not sum(p q) and not 1."""
    sampling = sampling_of(SAMPLES)
    result, _ = jitted_round()(
        logits_of("float32"), sampling, jnp.full(SAMPLES, 1, jnp.int32)
    )
    p, q = (np.exp(np.asarray(jax.nn.log_softmax(x[0]), np.float64)) for x in logits_of("float32"))
    overlap = np.minimum(p, q).sum()
    rate = np.asarray(result.accept_len).mean()
    assert abs(rate - overlap) < 5 * np.sqrt(overlap * (1 - overlap) / SAMPLES)
