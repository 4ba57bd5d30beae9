"""The law of the first three tokens is the target's, exactly, whatever the schedule.

Nothing is sampled: drafts, acceptances, residuals and shared Gumbel noise are enumerated or
integrated over real rounds until three tokens are out.
"""

import numpy as np
import pytest

from tests.lossless import races
from tests.lossless.cases import EXACT, HORIZON, error_of
from tests.lossless.world import CONFIDENCES, SPS_SHAPES

RULES = ("standard", "coupled")
POLICIES = ("full", "per_position", "cumulative", "early_stop", "global")


def settings(policy: str, *, thorough: bool) -> list[tuple[str, str]]:
    """(confidence, SPS) pairs worth telling apart for a policy."""
    if policy == "full":
        return [("random", "smooth")]
    if policy in ("per_position", "cumulative"):
        return [(conf, "smooth") for conf in CONFIDENCES[: 3 if thorough else 1]]
    if thorough:
        return [(conf, shape) for conf in CONFIDENCES for shape in SPS_SHAPES]
    return [("adversarial", "staircase"), ("coarse", "jagged"), ("random", "smooth")]


def is_lossless(rule: str, policy: str) -> bool:
    return policy != "global" or rule == "coupled"


ALLOWED = [(rule, policy) for rule in RULES for policy in POLICIES if is_lossless(rule, policy)]


@pytest.mark.parametrize("vocab,block", [(3, 2), (3, 3), (4, 2), (4, 3)])
@pytest.mark.parametrize("rule,policy", ALLOWED)
def test_one_request_has_the_target_law(rule: str, policy: str, vocab: int, block: int):
    varied = []
    for conf, shape in settings(policy, thorough=True):
        for room in (HORIZON, None):
            error, scheduler = error_of(
                rule, policy, conf, shape, room, vocab=vocab, block=block
            )
            assert error < EXACT, (conf, shape, room)
            varied.append(len(scheduler.seen) > 1)
    assert policy == "full" or np.mean(varied) > 0.5


@pytest.mark.parametrize("vocab,block", [(3, 2), (3, 3), (4, 2), (4, 3)])
@pytest.mark.parametrize("rule,policy", ALLOWED)
def test_two_requests_have_the_joint_target_law(rule: str, policy: str, vocab: int, block: int):
    varied = []
    for conf, shape in settings(policy, thorough=vocab == 3):
        room = HORIZON if conf == "random" else None
        error, scheduler = error_of(
            rule, policy, conf, shape, room, vocab=vocab, block=block, requests=2
        )
        assert error < EXACT, (conf, shape, room)
        varied.append(len(scheduler.seen) > 1)
    assert policy == "full" or np.mean(varied) > 0.5


@pytest.mark.parametrize("world", ["top_p", "greedy", "reduced"])
@pytest.mark.parametrize("rule,policy", ALLOWED)
def test_warped_and_reduced_vocabularies(rule: str, policy: str, world: str):
    for requests, block in ((1, 3), (2, 2)):
        for conf, shape in settings(policy, thorough=False):
            error, _ = error_of(
                rule, policy, conf, shape, world=world, vocab=4 if requests == 1 else 3,
                block=block, requests=requests,
            )  # fmt: skip
            assert error < EXACT, (requests, conf, shape)


def test_global_is_exact_with_standard_only_at_temperature_zero():
    case = dict(rule="standard", policy="global", conf="adversarial", shape="staircase")
    assert error_of(**case, world="greedy", block=3, requests=2)[0] < EXACT
    assert error_of(**case, block=3, requests=2)[0] > 1e-3


def test_every_schedule_can_occur_under_early_stop():
    seen = set()
    for conf in ("coarse", "random"):
        _, scheduler = error_of("standard", "early_stop", conf, "smooth", block=3, requests=2)
        seen |= scheduler.seen
    assert len(seen) == 16


@pytest.mark.parametrize("vocab", [3, 4])
def test_race_probabilities_are_exact(vocab: int):
    rng = np.random.default_rng(vocab)
    laws = [tuple(map(float, rng.dirichlet(np.ones(vocab)))) for _ in range(3)]
    laws.append((*laws[0][:-1], 0.0))  # a token that cannot be drawn
    every = np.stack(np.meshgrid(*[range(vocab)] * 4, indexing="ij"), -1).reshape(-1, 4)
    exact = np.array(
        [races.probability(list(zip(laws, map(int, xs), strict=True))) for xs in every]
    )
    assert abs(exact.sum() - 1) < EXACT
    p, q = laws[:2]
    for i in range(vocab):
        ratio = sum(max(p[j] / p[i], q[j] / q[i]) for j in range(vocab))
        assert abs(races.probability([(p, i), (q, i)]) - 1 / ratio) < EXACT
        assert abs(races.probability([(p, i)]) - p[i]) < EXACT
    draws = 200_000
    clocks = rng.exponential(size=(draws, vocab))
    with np.errstate(divide="ignore"):
        winners = np.stack([np.argmin(clocks / np.array(w), axis=1) for w in laws], -1)
    counts = np.array([(winners == xs).all(axis=1).sum() for xs in every])
    deviation = np.abs(counts - draws * exact) / np.sqrt(np.maximum(draws * exact, 1.0))
    assert deviation.max() < 5
    assert (counts[exact < 1e-12] == 0).all()
