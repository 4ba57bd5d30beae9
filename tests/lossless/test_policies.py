"""Policies that plan by older rounds or by what precedes the drafts, bounds, bypass: all exact.

Two rounds and more are enumerated, so that what one round leaves behind decides in the next.
"""

import numpy as np
import pytest

from tests.lossless import twin
from tests.lossless.cases import EXACT, HORIZON, RULES, chain_of, error_of
from tests.lossless.harness import Scheduler, emitted_law
from tests.lossless.world import joint_target_law, sps_table

PLANNED = ("lagged", "presampled")  # capacity from elsewhere, rank from this round
EVERY = ("full", "per_position", "cumulative", "early_stop", *PLANNED)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lag", [1, 2])
def test_lagged_capacity_is_exact(rule: str, lag: int):
    varied = []
    cases = [(1, 2, "random", "staircase"), (1, 3, "adversarial", "smooth")]
    if rule == "standard" or lag == 1:
        cases.append((2, 2, "coarse", "staircase"))
    for requests, block, conf, shape in cases:
        error, scheduler = error_of(
            rule, "lagged", conf, shape, block=block, requests=requests, lag=lag
        )
        assert error < EXACT, (requests, block, conf, shape)
        varied.append(len(scheduler.seen))
    assert max(varied) > 2


@pytest.mark.parametrize("rule", RULES)
def test_presampled_capacity_is_exact(rule: str):
    varied = []
    for requests, block in ((1, 2), (1, 3), (2, 2), (2, 3)):
        for conf, shape in (("adversarial", "staircase"), ("coarse", "jagged")):
            error, scheduler = error_of(
                rule, "presampled", conf, shape, block=block, requests=requests
            )
            assert error < EXACT, (requests, block, conf, shape)
            varied.append(len(scheduler.seen))
    assert max(varied) > 5


@pytest.mark.parametrize("world", ["top_p", "greedy", "reduced"])
@pytest.mark.parametrize("policy", PLANNED)
@pytest.mark.parametrize("rule", RULES)
def test_warped_and_reduced_vocabularies(rule: str, policy: str, world: str):
    for requests, conf, shape in ((1, "random", "jagged"), (2, "coarse", "staircase")):
        error, _ = error_of(
            rule, policy, conf, shape, world=world, requests=requests,
            lag=1 if policy == "lagged" else 0,
        )  # fmt: skip
        assert error < EXACT, (requests, conf, shape)


@pytest.mark.parametrize("policy", [*EVERY, "global"])
@pytest.mark.parametrize("rule", RULES)
def test_a_bypass_that_goes_by_the_round_before_is_exact(rule: str, policy: str):
    if policy == "global" and rule != "coupled":
        pytest.skip("refused")
    least = -0.2 if policy == "full" else -0.1
    error, scheduler = error_of(
        rule, policy, "coarse", "staircase", requests=2, lag=1, min_gain=least
    )
    assert error < EXACT
    assert min(scheduler.gains) < least < max(scheduler.gains)
    assert (0, 0) in scheduler.seen and len(scheduler.seen) > 1


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("rule", RULES)
def test_floor_and_ceiling_are_exact(rule: str, policy: str):
    for floor, ceiling in ((1, None), (1, 2), (0, 1)):
        error, scheduler = error_of(
            rule, policy, "adversarial", "staircase", block=3, floor=floor, ceiling=ceiling,
            lag=1 if policy == "lagged" else 0,
        )  # fmt: skip
        assert error < EXACT, (floor, ceiling)
        assert all(floor <= n <= (ceiling or 3) for (n,) in scheduler.seen)
    error, _ = error_of(
        rule, policy, "coarse", "staircase", requests=2, floor=1,
        lag=1 if policy == "lagged" else 0,
    )  # fmt: skip
    assert error < EXACT


@pytest.mark.parametrize("policy", ["full", "per_position", "cumulative", "early_stop"])
def test_block_verification_under_every_schedule(policy: str):
    for requests, block, vocab in ((1, 3, 3), (2, 2, 3), (1, 2, 4)):
        for conf, shape in (("adversarial", "staircase"), ("coarse", "jagged")):
            error, _ = error_of(
                "block", policy, conf, shape, vocab=vocab, block=block, requests=requests
            )
            assert error < EXACT, (requests, block, conf, shape)
    for world in ("top_p", "greedy", "reduced"):
        error, _ = error_of("block", policy, "coarse", "smooth", world=world, requests=2)
        assert error < EXACT, world


def test_a_fixed_capacity_goes_to_this_rounds_likeliest_drafts():
    ones = [(1.0, 0.0), (1.0, 0.0)]  # pay for two drafts
    sps = (0, 0, 1.0, 0.9, 0.8, 0.1, 0.1)
    for confidence, wanted in (
        ([(0.9, 0.9), (0.5, 0.5)], [2, 0]),
        ([(0.5, 0.5), (0.9, 0.9)], [0, 2]),
        ([(0.6, 0.1), (0.9, 0.6)], [1, 1]),
    ):
        got = twin.schedule_numpy("lagged", confidence, (2, 2), (True, True), sps, lagged=ones)
        assert got == wanted


def test_capacity_goes_to_the_end_of_its_stair():
    """One draft is worth the step to three rows; the third row is paid for, so it is filled."""
    sps = (0, 1.0, 0.6, 0.6, 0.1)
    older = [(1.0, 0.0, 0.0)]
    plan = twin.schedule_numpy(
        "lagged", [(0.9, 0.9, 0.9)], (3,), (True,), sps, lagged=older
    )
    assert plan == [2]
    assert np.argmax(twin.throughputs(twin.ranked_drafts(older, (3,), (True,)), 1, sps)) == 1


class Online(Scheduler):
    """Confidence from how many drafts the round before got accepted, and from nothing newer."""

    def row(self, r, view, path):
        tokens, past = view
        if len(tokens) >= self.horizon:
            return ()
        if not past:
            return (1.0,) * self.block
        accepted = len(tokens) - len(past[-1][0]) - 1
        return tuple(0.9 if k < accepted else 0.3 + 0.1 * r for k in range(self.block))


@pytest.mark.parametrize("policy", ["early_stop", "global"])
@pytest.mark.parametrize("rule", RULES)
def test_confidences_from_earlier_outcomes_are_exact_even_with_global(rule: str, policy: str):
    for shape in ("staircase", "jagged"):
        schedule = Online(policy, (), sps_table(shape, 2, 2, seed=4), block=2)
        chains = [chain_of(rule, "plain", 3, 2, r, 1) for r in range(2)]
        law = emitted_law(chains, schedule)
        target = joint_target_law([c.rule.request for c in chains], HORIZON)
        assert np.abs(law - target).max() < EXACT
        assert policy == "early_stop" or len(schedule.seen) > 1
