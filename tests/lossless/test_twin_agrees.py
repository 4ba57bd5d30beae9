"""The jitted scheduler and acceptance decide as the float64 twin does, ties included.

Confidences, probabilities, speeds and uniforms are dyadic rationals of few bits, so every product
and sum is exact in float32 and "equal" means equal on both sides.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.schedule import Evidence, ScheduleConfig, predicted_gain, schedule_prefixes
from dspark_jax.verify import accept_block, accept_coupled, accept_standard
from tests.lossless import twin

CASES = 1000  # per test
ACCEPTANCES = 1500
SHAPES = [(1, 2), (3, 3), (5, 7)]
POLICIES = {
    "full": {},
    "threshold": {},
    "per_position": {"policy": "threshold", "confidence_threshold": 0.75},
    "cumulative": {
        "policy": "threshold", "confidence_threshold": 0.5, "threshold_kind": "cumulative",
    },
    "early_stop": {},
    "lagged": {},
    "presampled": {},
    "global": {},
    "bounded_threshold": {
        "policy": "threshold", "confidence_threshold": 0.75, "min_verify_len": 1,
        "max_verify_len": 2,
    },
    "bounded_early_stop": {"policy": "early_stop", "min_verify_len": 1, "max_verify_len": 2},
    "bounded_lagged": {"policy": "lagged", "min_verify_len": 1, "max_verify_len": 2},
}  # fmt: skip


@functools.cache
def jitted_schedule(name: str):
    config = ScheduleConfig(**{"policy": name, **POLICIES[name]})
    return config, jax.jit(jax.vmap(lambda evidence: schedule_prefixes(evidence, config)))


def evidence_of(confidence, limit, active, sps, older=None) -> Evidence:
    """Evidence on the device; `older` stands for both lagged and presampled confidences."""
    current = jnp.asarray(confidence, jnp.float32)
    older = current[::-1] if older is None else jnp.asarray(older, jnp.float32)
    return Evidence(
        confidence=current, lagged=older, presampled=older,
        limit=jnp.asarray(limit, jnp.int32), active=jnp.asarray(active),
        steps_per_s=jnp.asarray(sps, jnp.float32),
    )  # fmt: skip


def twin_schedule(config: ScheduleConfig, confidence, older, limit, active, sps) -> list[int]:
    """The twin's answer for one case of arrays."""
    return twin.schedule_numpy(
        config.policy, confidence.tolist(), limit.tolist(), active.tolist(), sps.tolist(),
        threshold=config.confidence_threshold, cumulative=config.threshold_kind == "cumulative",
        lagged=older.tolist(), presampled=older.tolist(), floor=config.min_verify_len,
        ceiling=config.max_verify_len,
    )  # fmt: skip


def schedules_agree(name: str, confidence, limit, active, sps) -> np.ndarray:
    """Compares case by case, with the confidences in reverse as the older ones.

    Returns:
      The jitted answer int[cases, R].
    """
    config, jitted = jitted_schedule(name)
    older = np.asarray(confidence)[::-1]
    got = np.asarray(jitted(evidence_of(confidence, limit, active, sps)))
    for i in range(len(got)):
        want = twin_schedule(config, confidence[i], older[i], limit[i], active[i], sps[i])
        assert got[i].tolist() == want, (confidence[i], older[i], limit[i], active[i], sps[i])
    return got


def random_inputs(requests: int, block: int, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([seed, requests, block])
    values = np.array([0.0, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0, 1.0])
    confidence = rng.choice(values, (CASES, requests, block))
    limit = rng.integers(0, block + 1, (CASES, requests))
    limit[: CASES // 2] = block
    active = rng.random((CASES, requests)) < 0.8
    rows = requests * (block + 1) + 1
    steps = rng.integers(0, 3, (CASES, rows)) * (rng.random((CASES, rows)) < 0.3)
    staircase = np.maximum(15 - np.cumsum(steps, axis=1), 1) / 16  # flat, then a step
    jagged = rng.integers(1, 16, (CASES, rows)) / 16
    sps = np.where(rng.random((CASES, 1)) < 0.7, staircase, jagged)
    return confidence, limit, active, sps


@pytest.mark.parametrize("requests,block", SHAPES)
@pytest.mark.parametrize("name", POLICIES)
def test_random_schedules(name: str, requests: int, block: int):
    got = schedules_agree(name, *random_inputs(requests, block, seed=1))
    assert len(np.unique(got, axis=0)) > 2


@pytest.mark.parametrize("name", POLICIES)
def test_all_confidences_zero(name: str):
    confidence, limit, active, sps = random_inputs(3, 3, seed=2)
    got = schedules_agree(name, np.zeros_like(confidence), limit, active, sps)
    if name in ("per_position", "cumulative", "early_stop", "lagged", "presampled", "global"):
        assert (got == 0).all()
    if "bounded" in name:
        np.testing.assert_array_equal(got, np.where(active, np.minimum(limit, 1), 0))


@pytest.mark.parametrize("name", POLICIES)
def test_everything_ties(name: str):
    """Sure drafts and a flat table: all have survival 1, limits decide."""
    confidence, limit, active, sps = random_inputs(3, 3, seed=3)
    flat = np.ones_like(sps)
    got = schedules_agree(name, np.ones_like(confidence), limit, active, flat)
    most = 2 if "bounded" in name else 3
    np.testing.assert_array_equal(got, np.where(active, np.minimum(limit, most), 0))


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_active(name: str):
    confidence, limit, active, sps = random_inputs(3, 3, seed=4)
    got = schedules_agree(name, confidence, limit, np.zeros_like(active), sps)
    assert (got == 0).all()


@pytest.mark.parametrize("name", POLICIES)
def test_inactive_slots_change_nothing_for_the_others(name: str):
    """Whatever an idle slot holds, NaN included, the others are scheduled as if it were gone."""
    confidence, limit, active, sps = random_inputs(3, 3, seed=5)
    active[:] = True
    alone = schedules_agree(name, confidence, limit, active, sps)
    config, jitted = jitted_schedule(name)
    idle_first = ((0, 0), (1, 0))
    padded = np.pad(confidence, (*idle_first, (0, 0)), constant_values=np.nan)
    got = jitted(
        evidence_of(
            padded,
            np.pad(limit, idle_first, constant_values=3),
            np.pad(active, idle_first),
            np.pad(sps, ((0, 0), (0, 4)), constant_values=1.0),
        )
    )
    np.testing.assert_array_equal(np.asarray(got), np.pad(alone, idle_first))


def test_equal_theta():
    """Theta equal by construction stops Algorithm 1 and does not move the global peak."""
    sps = np.array([[0, 1.0, 0.5, 0.5, 0.5]])
    confidence, limit, active = np.ones((1, 1, 3)), np.array([[3]]), np.array([[True]])
    assert schedules_agree("early_stop", confidence, limit, active, sps).tolist() == [[0]]
    assert schedules_agree("global", confidence, limit, active, sps).tolist() == [[3]]


def dyadic_laws(rng: np.random.Generator, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    """Random laws in sixteenths with many zeros, as after top-k: float64[*shape, V]."""
    count = int(np.prod(shape))
    laws = np.zeros((count, vocab))
    for row in laws:
        kept = rng.choice(vocab, rng.integers(1, vocab + 1), replace=False)
        cuts = np.sort(rng.integers(0, 17, len(kept) - 1))
        row[kept] = np.diff(np.concatenate([[0], cuts, [16]])) / 16
    return laws.reshape(*shape, vocab)


def logs(x: np.ndarray) -> jax.Array:
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(x), jnp.float32)


def acceptance_inputs(requests: int, block: int, vocab: int, seed: int) -> dict:
    rng = np.random.default_rng([seed, vocab])
    q = dyadic_laws(rng, (requests, block), vocab)
    p = dyadic_laws(rng, (requests, block + 1), vocab)
    same = rng.random((requests, block)) < 0.3
    p[:, :-1][same] = q[same]
    drafts = np.array([[rng.choice(vocab, p=row) for row in rows] for rows in q])
    return dict(
        drafts=drafts, q=q, p=p,
        verify_len=rng.integers(0, block + 1, requests),
        uniforms=rng.integers(0, 64, (requests, block)) / 64,
        noise=rng.gumbel(size=(requests, vocab)),
    )  # fmt: skip


def jitted_standard(case: dict) -> tuple[list[int], list[int]]:
    result = jax.jit(accept_standard)(
        jnp.asarray(case["drafts"], jnp.int32), logs(case["q"]), logs(case["p"]),
        jnp.asarray(case["verify_len"], jnp.int32), jnp.asarray(case["uniforms"], jnp.float32),
        jnp.asarray(case["noise"], jnp.float32),
    )  # fmt: skip
    return result.accept_len.tolist(), result.bonus_token.tolist()


def separated(case: dict, r: int) -> bool:
    """Is u q(x) = p(x) nowhere? There float32 logarithms may fall on either side."""
    for j, x in enumerate(case["drafts"][r]):
        a, b = case["uniforms"][r, j] * case["q"][r, j, x], case["p"][r, j, x]
        if a == b and b > 0:
            return False
    return True


@pytest.mark.parametrize("vocab,block", [(3, 2), (4, 3), (9, 7)])
def test_random_acceptances(vocab: int, block: int):
    case = acceptance_inputs(ACCEPTANCES, block, vocab, seed=block)
    lengths, last = jitted_standard(case)
    compared = 0
    for r in range(ACCEPTANCES):
        if separated(case, r):
            want = twin.accept_standard(*(case[k][r].tolist() for k in case))
            assert (lengths[r], last[r]) == want, {k: v[r] for k, v in case.items()}
            compared += 1
    assert compared > ACCEPTANCES // 2
    assert set(lengths) == set(range(max(lengths) + 1)) and max(lengths) >= 2


def test_emitted_tokens_lie_in_the_support_of_p():
    case = acceptance_inputs(ACCEPTANCES, 3, 5, seed=1)
    lengths, last = jitted_standard(case)
    for r in range(ACCEPTANCES):
        emitted = [*case["drafts"][r][: lengths[r]], last[r]]
        for j, x in enumerate(emitted):
            assert case["p"][r, j, x] > 0


def test_no_residual_falls_back_to_p():
    """With p == q and u = 1 - eps; a q above p everywhere then forces the rejection."""
    requests, vocab = 400, 4
    case = acceptance_inputs(requests, 2, vocab, seed=2)
    case["p"][:, :-1] = case["q"]
    case["uniforms"][:] = 1 - 2.0**-24
    case["verify_len"][:] = 2
    lengths, last = jitted_standard(case)
    for r in range(requests):
        assert (lengths[r], last[r]) == twin.accept_standard(*(case[k][r].tolist() for k in case))
    assert set(lengths) == {2}
    case["q"] = case["q"] * 2  # not a law: every residual is empty and u = 1 - eps rejects
    lengths, last = jitted_standard(case)
    assert set(lengths) == {0}
    for r in range(requests):
        assert last[r] == twin.gumbel_max(case["p"][r, 0].tolist(), case["noise"][r].tolist())


def test_drafts_past_verify_len_are_ignored():
    case = acceptance_inputs(500, 3, 4, seed=3)
    before = jitted_standard(case)
    for r, n in enumerate(case["verify_len"]):
        case["drafts"][r, n:] = (case["drafts"][r, n:] + 1) % 4
        case["uniforms"][r, n:] = 0.0
        case["q"][r, n:] = np.nan
    assert jitted_standard(case) == before


def test_coupled_random():
    rng = np.random.default_rng(0)
    drafts = rng.integers(0, 3, (4000, 4))
    target = np.where(rng.random((4000, 5)) < 0.7, np.pad(drafts, ((0, 0), (0, 1))), 2)
    lengths = rng.integers(0, 5, 4000)
    got = jax.jit(accept_coupled)(
        jnp.asarray(drafts, jnp.int32), jnp.asarray(target, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
    )  # fmt: skip
    want = [
        twin.accept_coupled(d.tolist(), t.tolist(), int(n))
        for d, t, n in zip(drafts, target, lengths, strict=True)
    ]
    assert list(zip(got.accept_len.tolist(), got.bonus_token.tolist(), strict=True)) == want
    assert {a for a, _ in want} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", ["full", "early_stop", "lagged", "bounded_lagged"])
def test_predicted_gain(name: str):
    """By lagged confidences alone: this round's are not numbers here."""
    older, limit, active, sps = random_inputs(3, 3, seed=6)
    active[:, 0] = True
    sps[:, 0] = np.random.default_rng(0).integers(1, 16, CASES) / 16
    config, _ = jitted_schedule(name)
    evidence = evidence_of(np.full_like(older, np.nan), limit, active, sps, older)
    got = jax.jit(jax.vmap(lambda evidence: predicted_gain(evidence, config)))(evidence)
    want = []
    for i in range(CASES):
        plan = twin_schedule(config, older[i], older[i], limit[i], active[i], sps[i])
        want.append(twin.gain(plan, older[i].tolist(), active[i].tolist(), sps[i].tolist()))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert min(want) < 0 < max(want)


def jitted_block(case: dict) -> tuple[list[int], list[int]]:
    result = jax.jit(accept_block)(
        jnp.asarray(case["drafts"], jnp.int32), logs(case["q"]), logs(case["p"]),
        jnp.asarray(case["verify_len"], jnp.int32), jnp.asarray(case["uniforms"], jnp.float32),
        jnp.asarray(case["noise"], jnp.float32),
    )  # fmt: skip
    return result.accept_len.tolist(), result.bonus_token.tolist()


@pytest.mark.parametrize("vocab,block", [(3, 2), (4, 3), (9, 7)])
def test_random_block_acceptances(vocab: int, block: int):
    """Uniforms off the grid that probabilities lie on, so that none falls on a threshold."""
    case = acceptance_inputs(ACCEPTANCES, block, vocab, seed=20 + block)
    case["uniforms"] = np.random.default_rng(block).random(case["uniforms"].shape)
    lengths, last = jitted_block(case)
    for r in range(ACCEPTANCES):
        want = twin.accept_block(*(case[k][r].tolist() for k in case))
        assert (lengths[r], last[r]) == want, {k: v[r] for k, v in case.items()}
    assert set(lengths) == set(range(max(lengths) + 1)) and max(lengths) >= 2
    for r in range(ACCEPTANCES):
        emitted = [*case["drafts"][r][: lengths[r]], last[r]]
        assert all(case["p"][r, j, x] > 0 for j, x in enumerate(emitted))


def test_block_ignores_drafts_past_verify_len_and_takes_certain_ones():
    case = acceptance_inputs(500, 3, 4, seed=3)
    before = jitted_block(case)
    for r, n in enumerate(case["verify_len"]):
        case["drafts"][r, n:] = (case["drafts"][r, n:] + 1) % 4
        case["uniforms"][r, n:] = 0.0
        case["q"][r, n:] = np.nan
    assert jitted_block(case) == before
    case = acceptance_inputs(500, 3, 4, seed=4)
    case["p"][:, :-1] = case["q"]
    case["uniforms"][:] = 1 - 2.0**-24
    assert jitted_block(case)[0] == case["verify_len"].tolist()
