"""The law of the first three tokens is the target's, exactly, whatever the schedule.

Nothing is sampled: drafts, acceptances, residuals and shared Gumbel noise are enumerated or
integrated over real rounds until three tokens are out.
"""

import functools

import numpy as np
import pytest

from tests.lossless import races, twin
from tests.lossless.harness import Chain, Scheduler, emitted_law
from tests.lossless.rules import Coupled, Node, Standard
from tests.lossless.world import (
    CONFIDENCES,
    SPS_SHAPES,
    Request,
    confidence_table,
    greedy,
    joint_target_law,
    nucleus,
    sps_table,
)

HORIZON = 3
EXACT = 1e-12
RULES = {"standard": Standard, "coupled": Coupled}
POLICIES = ("full", "per_position", "cumulative", "early_stop", "global")
WORLDS = {
    "plain": {},
    "top_p": {"warp": nucleus(0.7, 0.8)},
    "greedy": {"warp": greedy},
    "reduced": {"draft_vocab": 2},
}


@functools.cache
def request_of(world: str, vocab: int, block: int, number: int) -> Request:
    return Request(vocab, block, seed=10 * vocab + number, **WORLDS[world])


@functools.cache
def chain_of(rule: str, world: str, vocab: int, block: int, number: int) -> Chain:
    return Chain(RULES[rule](request_of(world, vocab, block, number)), Node())


@functools.cache
def scheduler_of(
    policy: str, conf: str, shape: str, room: int | None,
    world: str, vocab: int, block: int, requests: int,
) -> Scheduler:  # fmt: skip
    """Shared by both rules: decisions do not depend on the rule."""
    tables = [
        confidence_table(request_of(world, vocab, block, r), conf, seed=5 + r)
        for r in range(requests)
    ]
    sps = sps_table(shape, requests, block, seed=3)
    kwargs = {}
    if policy in ("per_position", "cumulative"):
        kwargs = {"threshold": 0.5, "cumulative": policy == "cumulative"}
        policy = "threshold"
    return Scheduler(policy, tables, sps, block=block, room=room, **kwargs)


def error_of(
    rule: str, policy: str, conf: str, shape: str, room: int | None = None,
    *, world: str = "plain", vocab: int = 3, block: int = 2, requests: int = 1,
) -> tuple[float, Scheduler]:  # fmt: skip
    """Largest deviation of any outcome's probability from the target's, and the scheduler."""
    scheduler = scheduler_of(policy, conf, shape, room, world, vocab, block, requests)
    chains = [chain_of(rule, world, vocab, block, r) for r in range(requests)]
    law = emitted_law(chains, scheduler)
    target = joint_target_law([c.rule.request for c in chains], HORIZON)
    assert abs(law.sum() - 1) < EXACT
    return float(np.abs(law - target).max()), scheduler


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
    _, scheduler = error_of("standard", "early_stop", "coarse", "smooth", block=3, requests=2)
    assert len(scheduler.seen) == 16


class Lagged(Scheduler):
    """Capacity from the confidences of the round before, filled by this round's survival."""

    def decide(self, views, drafts, confidence, limit, active):
        ranked = twin.ranked_drafts(confidence, limit, active)
        old = []
        for r, (_, past) in enumerate(views):
            known = past and active[r]
            old.append(self.confidences[r](*past[-1]) if known else (1.0,) * len(confidence[r]))
        bound = [min(n, len(row)) for n, row in zip(limit, old, strict=True)]
        older = twin.ranked_drafts(old, bound, active)
        capacity = twin.peak(twin.throughputs(older, sum(active), self.sps))
        return twin.lengths(ranked, capacity, len(confidence))


@pytest.mark.parametrize("rule", RULES)
def test_capacity_from_an_older_round_is_exact(rule: str):
    requests = [request_of("plain", 3, 2, r) for r in range(2)]
    tables = [confidence_table(r, "coarse", seed=5 + i) for i, r in enumerate(requests)]
    scheduler = Lagged("lagged", tables, sps_table("staircase", 2, 2, seed=3), block=2)
    law = emitted_law([Chain(RULES[rule](r, lag=1), Node()) for r in requests], scheduler)
    assert np.abs(law - joint_target_law(requests, HORIZON)).max() < EXACT
    assert len(scheduler.seen) > 3


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
