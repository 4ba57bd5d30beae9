"""What is known to be biased is seen to be biased, and the worked examples come out exactly."""

import itertools

import numpy as np
import pytest

from tests.lossless import races, twin
from tests.lossless.harness import Chain, Scheduler, emitted_law
from tests.lossless.rules import Block, Coupled, Node, Rule, Standard
from tests.lossless.world import (
    Request,
    Scripted,
    confidence_table,
    joint_target_law,
    nucleus,
    sps_table,
)

EXACT = 1e-12
CAUGHT = 1e-3
P, Q = (0.7, 0.3), (0.5, 0.5)
APPENDIX = {  # c_1, c_2 after A, c_2 after B, SPS(1..3)
    "appendix_a": (0.8, 0.9, 0.0, (1.0, 0.5, 0.45)),
    "second": (0.6, 0.9, 0.1, (1.0, 0.6, 0.55)),
}


def first_token_law(policy: str, rule: type[Rule], case: str) -> np.ndarray:
    c1, after_a, after_b, sps = APPENDIX[case]

    def confidence(tokens, drafts):
        return (c1, after_a if drafts[0] == 0 else after_b)

    scheduler = Scheduler(
        policy, [confidence], (0.0, *sps), block=2, horizon=1,
        presampled=[lambda tokens: (c1, (after_a + after_b) / 2)],
    )  # fmt: skip
    return emitted_law([Chain(rule(Scripted(2, P, Q), horizon=1), Node())], scheduler)


@pytest.mark.parametrize("case", APPENDIX)
def test_appendix_a(case: str):
    leaky = first_token_law("global", Standard, case)
    np.testing.assert_allclose(leaky, (0.85, 0.15), rtol=0, atol=EXACT)
    np.testing.assert_allclose(first_token_law("global", Coupled, case), P, rtol=0, atol=EXACT)
    for policy, rule in itertools.product(
        ("full", "threshold", "early_stop", "lagged", "presampled"), (Standard, Block, Coupled)
    ):
        law = first_token_law(policy, rule, case)
        np.testing.assert_allclose(law, P, rtol=0, atol=EXACT)


def bias(scheduler: Scheduler, rules: list[Rule]) -> float:
    law = emitted_law([Chain(rule, Node()) for rule in rules], scheduler)
    return float(np.abs(law - joint_target_law([r.request for r in rules], 3)).max())


def scheduler(kind: type[Scheduler], requests: list[Request], conf: str, shape: str) -> Scheduler:
    tables = [confidence_table(r, conf, seed=5 + i) for i, r in enumerate(requests)]
    block = requests[0].block
    sps = sps_table(shape, len(requests), block, seed=3)
    return kind("early_stop", tables, sps, block=block)


class RankByFuture(Scheduler):
    """Ranks each draft by the survival of the next one, which reads the draft itself."""

    def decide(self, views, drafts, confidence, limit, active):
        shifted = [(row[0] * row[1], *row[2:], 1.0) if row else () for row in confidence]
        return super().decide(views, drafts, shifted, limit, active)


class CurrentCapacity(Scheduler):
    """Spends the capacity that looks best after all drafts are known."""

    def decide(self, views, drafts, confidence, limit, active):
        return twin.schedule_numpy("global", confidence, limit, active, self.sps)


class CurrentBypass(Scheduler):
    """Gives a round up when the drafts just made look poor."""

    def decide(self, views, drafts, confidence, limit, active):
        expected = sum(sum(twin.survival(row)) for row in confidence)
        if expected < sum(active):
            return [0] * len(confidence)
        return super().decide(views, drafts, confidence, limit, active)


class TiesByValue(Scheduler):
    """Breaks equal survivals by the drafted tokens; the best draft alone is verified."""

    def decide(self, views, drafts, confidence, limit, active):
        ranked = twin.ranked_drafts(confidence, limit, active)
        ranked.sort(key=lambda item: (-item[0], item[1], -drafts[item[2]][item[1]]))
        return twin.lengths(ranked, 1, len(confidence))


@pytest.mark.parametrize(
    "kind,conf,shape,seen",
    [
        (RankByFuture, "random", "smooth", None),
        (CurrentCapacity, "adversarial", "staircase", None),
        (CurrentBypass, "adversarial", "smooth", None),
        (TiesByValue, "coarse", "smooth", 2),
    ],
)
@pytest.mark.parametrize("rule,vocab", [(Standard, 3), (Standard, 4), (Block, 3)])
def test_leaky_schedules_are_caught(
    kind: type[Scheduler], conf: str, shape: str, seen: int | None, rule: type[Rule], vocab: int
):
    requests = [Request(vocab, 2, seed=31 + r) for r in range(2)]
    leaky = scheduler(kind, requests, conf, shape)
    assert bias(leaky, [rule(r, seen=seen) for r in requests]) > CAUGHT
    honest = scheduler(Scheduler, requests, conf, shape)
    assert bias(honest, [rule(r, seen=seen) for r in requests]) < EXACT


@pytest.mark.parametrize("kind", [RankByFuture, CurrentCapacity, CurrentBypass, TiesByValue])
def test_coupled_verification_does_not_care_how_leaky_the_schedule_is(kind: type[Scheduler]):
    requests = [Request(3, 2, seed=31 + r) for r in range(2)]
    leaky = scheduler(kind, requests, "coarse", "staircase")
    assert bias(leaky, [Coupled(r, seen=2) for r in requests]) < EXACT


class FreshNoise(Coupled):
    """Draws a position again with new noise in a later round."""

    def _draws(self, node, offset):
        return ()


def test_coupled_needs_the_same_noise_in_every_round():
    def confidence(tokens, drafts):  # verify all three or none, by the value of the second
        return (0.5, 0.9, 1.0 if drafts[1] == 0 else 0.0)

    request = Request(3, 3, seed=31)
    leaky = Scheduler("global", [confidence], (0.0, 1.0, 0.5, 0.45, 0.45), block=3)
    assert bias(leaky, [FreshNoise(request)]) > CAUGHT
    assert bias(leaky, [Coupled(request)]) < EXACT
    assert leaky.seen == {(0,), (3,)}


def residual_after_truncation(tokens, q, p, verify_len, uniforms):
    """Treats the first draft that was not sent as if it had been rejected."""
    count, weights = twin.accept_prefix(tokens, q, p, verify_len, uniforms)
    if count == verify_len < len(q):
        weights = [max(0.0, a - b) for a, b in zip(p[count], q[count], strict=True)]
    return count, weights


def bonus_from_wrong_row(tokens, q, p, verify_len, uniforms):
    """Takes the last token from the row before, when every draft passed."""
    count, weights = twin.accept_prefix(tokens, q, p, verify_len, uniforms)
    return (count, list(p[count - 1])) if count == verify_len > 0 else (count, weights)


def target_after_rejection(tokens, q, p, verify_len, uniforms):
    """Draws from p, not from the residual, after a rejection."""
    count, _ = twin.accept_prefix(tokens, q, p, verify_len, uniforms)
    return count, list(p[count])


def residual_with_draft_noise(q, draft, weights):
    """Law of the last token when its Gumbel noise is the one that chose the rejected draft."""
    seen = races.probability([(q, draft)])
    return [races.probability([(q, draft), (tuple(weights), z)]) / seen for z in range(len(q))]


@pytest.mark.parametrize(
    "change",
    [
        {"accept": residual_after_truncation},
        {"accept": bonus_from_wrong_row},
        {"accept": target_after_rejection},
        {"last_token_law": residual_with_draft_noise},
    ],
    ids=lambda change: next(iter(change.values())).__name__,
)
@pytest.mark.parametrize("vocab", [3, 4])
def test_wrong_acceptance_is_caught(change: dict, vocab: int):
    request = Request(vocab, 2, seed=31)
    honest = scheduler(Scheduler, [request], "coarse", "smooth")
    assert bias(honest, [Standard(request, **change)]) > CAUGHT
    assert bias(honest, [Standard(request)]) < EXACT


class EqualityAcceptance(Standard):
    """Accepts a draft when a token drawn from the target equals it, else takes the residual."""

    def _verify(self, start, drafts, drawn_from, verify_len, mass):
        for j in range(verify_len):
            p = self.request.p(start + drafts[:j])
            residual = [max(0.0, a - b) for a, b in zip(p, drawn_from[j], strict=True)]
            for z, weight in enumerate(residual):
                if weight > 0:
                    share = weight / sum(residual)
                    yield drafts[:j] + (z,), (), mass * (1 - p[drafts[j]]) * share
            mass *= p[drafts[j]]
        for z, share in enumerate(self.request.p(start + drafts[:verify_len])):
            yield drafts[:verify_len] + (z,), (), mass * share


def test_equality_acceptance_is_caught():
    request = Request(3, 2, seed=31)
    honest = scheduler(Scheduler, [request], "coarse", "smooth")
    assert bias(honest, [EqualityAcceptance(request)]) > CAUGHT


@pytest.mark.parametrize("vocab", [3, 4])
def test_q_before_the_warp_is_caught(vocab: int):
    request = Request(vocab, 2, seed=31, warp=nucleus(0.7, 0.9))
    honest = scheduler(Scheduler, [request], "coarse", "smooth")
    assert bias(honest, [Standard(request, declared_q=request.raw_q)]) > CAUGHT
    assert bias(honest, [Standard(request)]) < EXACT


def test_argmax_draft_with_softmax_q():
    request = Scripted(1, p=(0.5, 0.3, 0.2), q=(1.0, 0.0, 0.0))
    chain = Chain(
        Standard(request, horizon=1, declared_q=lambda tokens, drafts: (0.6, 0.3, 0.1)), Node()
    )
    full = Scheduler("full", [lambda tokens, drafts: (1.0,)], (), block=1, horizon=1)
    law = emitted_law([chain], full)
    np.testing.assert_allclose(law, (5 / 6, 0.0, 1 / 6), rtol=0, atol=EXACT)


def test_token_after_truncation_follows_p():
    """One sure draft is sent of two: the second token is drawn from p, not from a residual."""
    p2 = (0.2, 0.3, 0.5)

    class World(Request):
        def _make(self, kind, tokens, drafts=()):
            if len(tokens) + len(drafts) == 0:
                return (1.0, 0.0, 0.0)
            return p2 if kind == "p" else (0.6, 0.3, 0.1)

    chain = Chain(Standard(World(3, 2, seed=0), horizon=2), Node())
    one = Scheduler("full", [lambda t, d: (1.0, 1.0)], (), block=2, horizon=2, room=2)
    law = emitted_law([chain], one)
    assert one.seen == {(1,)}
    np.testing.assert_allclose(law[0], p2, rtol=0, atol=EXACT)


def test_coupled_acceptance_formula():
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    request = Scripted(1, p, q)
    outcomes = Coupled(request, horizon=2).expand(Node(), (), 1)
    accepted = sum(mass for node, mass in outcomes.items() if len(node.tokens) == 2)
    formula = sum(
        1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(3)) for i in range(3)
    )
    assert abs(accepted - formula) < EXACT
    same = Coupled(Scripted(1, p, p), horizon=2).expand(Node(), (), 1)
    assert abs(sum(m for n, m in same.items() if len(n.tokens) == 2) - 1) < EXACT


def test_algorithm_1_traced_by_hand():
    # R = 2: Theta 2 * .50 = 1.0; +.9: 2.9 * .40 = 1.16; +.8: 3.7 * .35 = 1.295;
    # +.72: 4.42 * .30 = 1.326; +.4: 4.82 * .275 = 1.3255, not better: stop.
    confidence = [(0.9, 0.8), (0.8, 0.5)]
    sps = (0.0, 0.9, 0.5, 0.4, 0.35, 0.3, 0.275)
    schedule = twin.schedule_numpy("early_stop", confidence, (2, 2), (True, True), sps)
    assert schedule == [2, 1]
    assert twin.schedule_numpy("early_stop", confidence, (1, 2), (True, True), sps) == [1, 1]
    # R = 1: .9; 1.9 * .5 = .95; 2.62 * .4 = 1.048
    assert twin.schedule_numpy("early_stop", confidence, (2, 2), (True, False), sps) == [2, 0]


def test_drafts_without_survival_never_enter_and_ties_stop():
    rising = tuple(range(9))
    assert twin.schedule_numpy("early_stop", [(1, 0, 1)], [3], [True], rising) == [1]
    assert twin.schedule_numpy("global", [(1, 0, 1)], [3], [True], rising) == [1]
    # one sure draft at half the speed: Theta stays 1, so it is not admitted
    assert twin.schedule_numpy("early_stop", [(1, 1)], [2], [True], (0, 1, 0.5, 0.5)) == [0]
    assert twin.schedule_numpy("global", [(1, 1)], [2], [True], (0, 1, 0.5, 0.5)) == [2]


def test_equal_survivals_enter_by_position_then_request():
    ranked = twin.ranked_drafts([(1.0, 1.0), (1.0, 0.5)], (2, 2), (True, True))
    assert [(j, r) for _, j, r in ranked] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_threshold_semantics():
    row = (0.9, 0.9, 0.9)
    assert twin.threshold_len(row, 3, 0.75, cumulative=False) == 3
    assert twin.threshold_len(row, 3, 0.75, cumulative=True) == 2
    assert twin.threshold_len(row, 1, 0.75, cumulative=True) == 1
