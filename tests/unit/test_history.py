"""What rounds leave behind for the scheduler, and when a round bypasses the draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.history import (
    EXPLORING_RATE,
    FADING,
    HYSTERESIS,
    NEUTRAL_ROUNDS,
    ONLINE_RATE,
    RECHECK_AFTER,
    RECHECK_AT_MOST,
    History,
    bypassed_rounds,
    bypasses,
    forget,
    init_history,
    is_probe,
    remember,
    remember_idle,
)
from dspark_jax.schedule import Evidence, ScheduleConfig, staircase

SLOTS, K = 3, 4


def step(history: History, confidence: float = 0.5, **changes) -> History:
    """One round of two rows in which both requests verify 3 drafts and accept 1."""
    values = {"active": [True, True], "verify_len": [3, 3], "accept_len": [1, 1], **changes}
    return remember(
        history, confidence=jnp.full((2, K), confidence),
        **{name: jnp.asarray(value) for name, value in values.items()},
    )  # fmt: skip


def idle(history: History) -> History:
    """One round of the same two without drafts."""
    return remember_idle(history, active=jnp.array([True, True]))


NEUTRAL = jnp.array([0.9, 0.8, 0.7, 0.6])


def test_confidences_come_back_after_lag_rounds_and_neutral_ones_before():
    history = init_history(ScheduleConfig(lag=3), SLOTS, K)
    seen = []
    for n in range(5):
        seen.append(history.lagged(2, NEUTRAL)[0])
        history = step(history, confidence=(n + 1) / 10)
    np.testing.assert_array_equal(seen[:3], [NEUTRAL] * 3)
    np.testing.assert_allclose(seen[3:], [[0.1] * K, [0.2] * K], rtol=1e-6)
    np.testing.assert_array_equal(history.lagged(3, NEUTRAL)[2], NEUTRAL)  # not in the rounds
    assert int(history.rounds) == 5


def test_usual_confidences_start_neutral_and_follow_a_fading_mean():
    history = init_history(ScheduleConfig(), SLOTS, K)
    np.testing.assert_allclose(history.usual(2, NEUTRAL), [NEUTRAL] * 2, rtol=1e-6)
    given = np.random.default_rng(0).random(5)
    for confidence in given:
        history = step(history, confidence=confidence)
    weight = FADING ** np.arange(4, -1, -1)
    mean = (NEUTRAL_ROUNDS * NEUTRAL + weight @ given) / (NEUTRAL_ROUNDS + weight.sum())
    np.testing.assert_allclose(history.usual(1, NEUTRAL)[0], mean, rtol=1e-6)
    bypassed = idle(history)
    np.testing.assert_array_equal(bypassed.usual(1, NEUTRAL), history.usual(1, NEUTRAL))
    fresh = forget(history, jnp.int32(0)).usual(2, NEUTRAL)
    np.testing.assert_allclose(fresh[0], NEUTRAL, rtol=1e-6)
    np.testing.assert_allclose(fresh[1], mean, rtol=1e-6)


def test_idle_slots_and_bypassed_rounds_leave_no_trace_and_a_newcomer_starts_afresh():
    history = step(init_history(ScheduleConfig(lag=1), SLOTS, K))
    after = step(history, confidence=0.3, active=[True, False])
    np.testing.assert_allclose(after.confidence[0], 0.3, rtol=1e-6)
    np.testing.assert_array_equal(after.confidence[1], history.confidence[1])
    np.testing.assert_array_equal(after.acceptance[1], history.acceptance[1])
    bypassed = idle(history)
    np.testing.assert_array_equal(bypassed.confidence, history.confidence)
    np.testing.assert_array_equal(bypassed.acceptance, history.acceptance)
    assert int(bypassed.idle_rounds) == 1 and int(after.idle_rounds) == 0
    fresh = forget(history, jnp.int32(0))
    np.testing.assert_array_equal(fresh.lagged(2, NEUTRAL)[0], NEUTRAL)
    np.testing.assert_array_equal(fresh.acceptance[0], 1.0)
    np.testing.assert_array_equal(fresh.confidence[1], history.confidence[1])


def test_online_estimate_follows_what_was_reached():
    """Accepted: up. Rejected: down. Sent behind a rejection: says nothing. Not sent: back to 1."""
    start = init_history(ScheduleConfig(), SLOTS, K)
    start = start.replace(acceptance=jnp.full((SLOTS, K), 0.5))
    got = step(start).acceptance[0]
    up, down, explored = (
        0.5 + ONLINE_RATE * 0.5, 0.5 - ONLINE_RATE * 0.5, 0.5 + EXPLORING_RATE * 0.5,
    )  # fmt: skip
    np.testing.assert_allclose(got, [up, down, 0.5, explored], rtol=1e-6)
    # All that was sent was accepted: the draft behind it was not judged.
    got = step(start, verify_len=[2, 2], accept_len=[2, 2]).acceptance[0]
    np.testing.assert_allclose(got, [up, up, explored, explored], rtol=1e-6)


def test_online_estimate_converges_to_the_acceptance_rate():
    rng = np.random.default_rng(0)
    history, means = init_history(ScheduleConfig(), SLOTS, K), []
    for n in range(300):
        passed = rng.random((2, K)) < [0.9, 0.6, 0.6, 0.6]
        accepted = np.cumprod(passed, axis=1).sum(axis=1)
        history = step(history, verify_len=[K, K], accept_len=accepted)
        if n >= 50:
            means.append(np.asarray(history.acceptance[:2]))
    np.testing.assert_allclose(np.mean(means, axis=(0, 1)), [0.9, 0.6, 0.6, 0.6], atol=0.08)


def evidence(older: float, undrafted: float) -> Evidence:
    """Two requests whose drafts cost nothing; only `undrafted` speed and older ones matter."""
    never = jnp.full((2, K), jnp.nan)
    return Evidence(
        confidence=never, presampled=never, lagged=jnp.full((2, K), older),
        limit=jnp.array([1, 1]), active=jnp.array([True, True]),
        steps_per_s=jnp.ones(2 * (K + 1) + 1).at[0].set(undrafted),
    )  # fmt: skip


def test_bypass_goes_by_older_rounds_with_hysteresis_and_rechecks():
    config = ScheduleConfig(min_predicted_gain=0.1)
    drafting = init_history(config, SLOTS, K)
    resting = drafting.replace(idle_rounds=jnp.int32(1))
    # One draft each at confidence c: gain = (1 + c) / undrafted - 1.
    for gain, while_drafting, while_idle in (
        (0.09, True, True),
        (0.1 + HYSTERESIS / 2, False, True),
        (0.1 + 2 * HYSTERESIS, False, False),
    ):
        case = evidence(0.5, 1.5 / (1 + gain))
        assert bool(bypasses(drafting, case, config)) is while_drafting
        assert bool(bypasses(resting, case, config)) is while_idle
    long_idle = drafting.replace(idle_rounds=jnp.int32(RECHECK_AFTER))
    assert not bypasses(long_idle, evidence(0.0, 2.0), config)
    rechecked = step(long_idle)
    assert int(rechecked.idle_rounds) == 1 and int(step(rechecked).idle_rounds) == 0
    assert bypasses(rechecked, evidence(0.5, 1.5 / (1.1 + HYSTERESIS / 2)), config)
    assert not bypasses(drafting, evidence(0.0, 2.0), ScheduleConfig())


def test_what_was_found_holds_while_the_same_requests_draft_nothing():
    config = ScheduleConfig(min_predicted_gain=0.0)
    poor, rich = evidence(0.0, 2.0), evidence(1.0, 0.1)
    history = init_history(config, SLOTS, K)
    assert bypasses(history, poor, config) and not bypasses(history, rich, config)
    history = idle(history)
    assert bypasses(history, rich, config)
    assert not bypasses(history, rich.replace(active=jnp.array([True, False])), config)
    assert not bypasses(forget(history, jnp.int32(1)), rich, config)
    assert not bypasses(step(history), rich, config)  # a round with drafts


def test_rechecks_that_change_nothing_become_rare_until_drafts_pay_again():
    config = ScheduleConfig(min_predicted_gain=0.0)
    history, poor, waits, rounds = init_history(config, SLOTS, K), evidence(0.0, 2.0), [], 0
    decide = jax.jit(lambda history: bypasses(history, poor, config))
    drafting, resting = jax.jit(step), jax.jit(idle)
    while len(waits) < 7:
        bypassed = decide(history)
        history = (resting if bypassed else drafting)(history)
        waits, rounds = (waits, rounds + 1) if bypassed else ([*waits, rounds], 0)
    doubling = [RECHECK_AFTER * 2**i - (i > 0) for i in range(7)]  # a recheck is idle as well
    assert waits == [min(wait, RECHECK_AT_MOST - 1) for wait in doubling]
    history = step(step(history))  # the round after a recheck drafts as well
    assert int(history.recheck_after) == RECHECK_AFTER and int(history.idle_rounds) == 0


@pytest.mark.parametrize("probe_every", [0, 50])
def test_rounds_without_drafts_are_known_ahead(probe_every: int):
    config = ScheduleConfig(min_predicted_gain=0.0, probe_every=probe_every)
    history, poor = init_history(config, SLOTS, K), evidence(0.0, 2.0)
    ask = jax.jit(lambda h: (bypassed_rounds(h, poor, config), bypasses(h, poor, config)))
    drafting, resting, ahead, said = jax.jit(step), jax.jit(idle), [], []
    for _ in range(3 * RECHECK_AFTER):
        rounds, bypassed = ask(history)
        ahead, said = [*ahead, int(rounds)], [*said, bool(bypassed)]
        history = (resting if bypassed else drafting)(history)
    for i, rounds in enumerate(ahead):
        then = said[i : i + rounds + 1]
        assert all(then[:rounds]) and not any(then[rounds:])
    assert said.count(False) == (1 if probe_every == 0 else len(said) // probe_every)
    assert int(bypassed_rounds(init_history(config, 2, K), evidence(1.0, 0.1), config)) == 0


def test_probes_come_round():
    config = ScheduleConfig(probe_every=3, min_predicted_gain=0.5)
    history = init_history(config, SLOTS, K)
    probes = []
    for _ in range(7):
        probes.append(bool(is_probe(history, config)))
        assert bool(bypasses(history, evidence(0.0, 2.0), config)) is not probes[-1]
        history = step(history)
    assert probes == [False, False, True, False, False, True, False]
    assert not is_probe(history, ScheduleConfig())


def test_a_row_costs_what_its_bucket_costs():
    table = jnp.arange(10.0, 0.0, -1.0)
    np.testing.assert_array_equal(
        staircase(table, (2, 5, 9)), [10, 8, 8, 5, 5, 5, 1, 1, 1, 1]
    )
    np.testing.assert_array_equal(staircase(table, (2, 5))[5:], 5)  # no schedule gets there


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": "best"}, "policy='best' is unknown; expected one of"),
        ({"confidence_source": "oracle"}, "confidence_source='oracle'"),
        ({"lag": 0}, "lag=0 must be at least 1"),
        ({"probe_every": -1}, "probe_every=-1 must be at least 0"),
        ({"min_verify_len": 3, "max_verify_len": 2}, "max_verify_len=2 is below"),
    ],
)
def test_bad_configs_are_explained(fields: dict, words: str):
    with pytest.raises(ValueError, match=words):
        ScheduleConfig(**fields)


def test_a_draft_without_a_confidence_head_needs_another_source():
    for fields in ({"policy": "early_stop"}, {"policy": "threshold"}, {"min_predicted_gain": 0.0}):
        with pytest.raises(ValueError, match="confidence_source='online'"):
            ScheduleConfig(**fields).check_source()
        ScheduleConfig(confidence_source="online", **fields).check_source()
    ScheduleConfig().check_source()


def test_global_is_refused_where_it_would_read_this_rounds_drafts():
    with pytest.raises(ValueError, match="distribution would change"):
        ScheduleConfig(policy="global").check_lossless("block")
    ScheduleConfig(policy="global").check_lossless("coupled")
    ScheduleConfig(policy="global", confidence_source="online").check_lossless("standard")
    with pytest.raises(ValueError, match="rejection_sample_method='none'"):
        ScheduleConfig().check_lossless("none")
