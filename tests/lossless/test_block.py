"""Block verification: worked example, never worse than token by token, and wrong forms caught.

That it is exact under every policy is shown beside the other rules, by enumeration.
"""

import numpy as np
import pytest

from tests.lossless import twin
from tests.lossless.harness import Chain, Scheduler, emitted_law
from tests.lossless.rules import Block, Node, Rule, Standard
from tests.lossless.world import Request, joint_target_law

EXACT = 1e-12
CAUGHT = 1e-3


class Memoryless(Request):
    """The same p and the same q after any prefix."""

    def __init__(self, block: int, p: tuple, q: tuple):
        super().__init__(len(p), block, seed=0)
        self._same = {"p": p, "q": q}

    def _make(self, kind, tokens, drafts=()):
        return self._same[kind]


def expected_accepted(rule: Rule, verify_len: int) -> float:
    """Mean accepted drafts of the first round."""
    total, mass = 0.0, 0.0
    for path in rule.paths(Node()):
        for emitted, _, share in rule._outcomes(Node(), path, verify_len):
            total += share * (len(emitted) - 1)
            mass += share
    assert abs(mass - 1) < EXACT
    return total


def test_worked_example():
    """Sun et al., their motivating example: 11/9 drafts accepted against 10/9."""
    world = Memoryless(2, p=(1 / 3, 2 / 3), q=(2 / 3, 1 / 3))
    assert abs(expected_accepted(Standard(world), 2) - 10 / 9) < EXACT
    assert abs(expected_accepted(Block(world), 2) - 11 / 9) < EXACT
    law = emitted_law([Chain(Block(world), Node())], full(world))
    np.testing.assert_allclose(law, joint_target_law([world], 3), rtol=0, atol=EXACT)


def full(request: Request) -> Scheduler:
    """Sends every draft."""
    return Scheduler("full", [lambda tokens, drafts: (1.0,) * request.block], (), block=2)


def test_never_accepts_less_than_token_by_token():
    gains = []
    for seed in range(1000):
        request = Request(3, 2, seed=100 + seed)
        for length in (1, 2):
            block, standard = (
                expected_accepted(rule(request), length) for rule in (Block, Standard)
            )
            gains.append(block - standard)
            if length == 1:
                assert abs(gains[-1]) < EXACT  # one draft leaves nothing to choose
    assert min(gains) > -EXACT
    assert max(gains) > 0.05


def stop_at_first_failure(tokens, q, p, verify_len, uniforms):
    """Takes block verification's tests, but lets a failure end the prefix."""
    for length in range(verify_len + 1):
        # The longest prefix that passes among 0..verify_len, asked one length at a time.
        closed = [u if i < length else 2.0 for i, u in enumerate(uniforms)]
        count, weights = twin.accept_block_prefix(tokens, q, p, verify_len, closed)
        if count < length:
            return count, weights
    return count, weights


def residual_of_one_token(tokens, q, p, verify_len, uniforms):
    """Draws from norm(max(0, p - q)), as token by token, whatever the prefix weighs."""
    count, weights = twin.accept_block_prefix(tokens, q, p, verify_len, uniforms)
    if count < verify_len:
        weights = [max(0.0, a - b) for a, b in zip(p[count], q[count], strict=True)]
        weights = weights if sum(weights) > 0 else list(p[count])
    return count, weights


def last_weight_everywhere(tokens, q, p, verify_len, uniforms):
    """Tests every prefix by its weight alone, as only the longest may be."""
    weight, count = 1.0, 0
    for i in range(verify_len):
        weight = min(1.0, weight * p[i][tokens[i]] / q[i][tokens[i]])
        if uniforms[i] < weight:
            count = i + 1
    closed = [0.0 if i + 1 == count else 2.0 for i in range(len(tokens))]
    return twin.accept_block_prefix(tokens, q, p, verify_len, closed)


@pytest.mark.parametrize(
    "accept", [stop_at_first_failure, residual_of_one_token, last_weight_everywhere]
)
def test_wrong_block_verification_is_caught(accept):
    request = Request(3, 2, seed=33)
    schedule = full(request)
    target = joint_target_law([request], 3)

    def bias(rule: Rule) -> float:
        return float(np.abs(emitted_law([Chain(rule, Node())], schedule) - target).max())

    assert bias(Enumerated(request, accept)) > CAUGHT
    assert bias(Enumerated(request)) < EXACT


class Enumerated(Block):
    """Every pattern of passing and failing prefixes, not only the longest that passes."""

    def _verify(self, start, drafts, drawn_from, verify_len, mass):
        p = [self.request.p(start + drafts[:k]) for k in range(len(drafts) + 1)]
        edges = self.passing(drafts, drawn_from, p, verify_len)[1:]
        for pattern in np.ndindex(*(2,) * verify_len):
            share, uniforms = mass, [0.5] * len(drafts)
            for i, passed in enumerate(pattern):
                share *= edges[i] if passed else 1.0 - edges[i]
                uniforms[i] = edges[i] * (1 - 1e-9 if passed else 1 + 1e-9)
            if share > 0:
                count, weights = self.accept(drafts, drawn_from, p, verify_len, uniforms)
                for z, weight in enumerate(weights):
                    if weight > 0:
                        yield drafts[:count] + (z,), (), share * weight / sum(weights)
