"""One request under one verification rule, as a finite Markov chain over what rounds leave behind.

A node is what the future depends on: the tokens emitted so far and, for `coupled`, what earlier
drafts revealed about the noise at positions not yet emitted. A block's PATH is the part of its
drafts that the scheduler can see (the first K-1: c_K reads no further). From a node, every path
and every verify_len lead to next nodes with exact probabilities. `standard` and `block` integrate
the acceptance uniforms and the residual draw; `coupled` integrates Gumbel noise shared between
draft, target and later rounds. Decisions are the twin's.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.lossless import races, twin
from tests.lossless.world import Law, Request, Tokens

_EDGE = 1e-9  # relative distance of the probed uniforms from the acceptance threshold


class Node(NamedTuple):
    """Where a request stands between rounds."""

    tokens: Tokens = ()
    noise: tuple = ()  # per position from len(tokens) on: the draws made there so far
    past: tuple = ()  # (tokens, path) of earlier rounds, oldest first, for lagged policies


Outcomes = dict[Node, float]


class Rule:
    """What all rules share.

    Attributes:
      request: the world.
      horizon: tokens to follow; whatever is emitted beyond is dropped.
      seen: drafts of a block that the scheduler can see.
      lag: earlier rounds a policy may look back on.
    """

    def __init__(self, request: Request, horizon: int = 3, seen: int | None = None, lag: int = 0):
        self.request, self.horizon, self.lag = request, horizon, lag
        self.seen = request.block - 1 if seen is None else seen

    def paths(self, node: Node) -> list[Tokens]:
        """All drafts the scheduler may see; a finished request drafts nothing."""
        if len(node.tokens) >= self.horizon:
            return [()]
        return list(itertools.product(range(self.request.vocab), repeat=self.seen))

    def expand(self, node: Node, path: Tokens, verify_len: int) -> Outcomes:
        """Mass of (this path, next node) from `node`; over all paths it adds up to 1."""
        if len(node.tokens) >= self.horizon:
            return {node: 1.0}
        out: Outcomes = {}
        past = (*node.past, (node.tokens, path))[-self.lag :] if self.lag else ()
        for emitted, noise, mass in self._outcomes(node, path, verify_len):
            tokens = (node.tokens + emitted)[: self.horizon]
            done = len(tokens) == self.horizon
            after = Node(tokens, () if done else noise, () if done else past)
            out[after] = out.get(after, 0.0) + mass
        return out

    def _outcomes(
        self, node: Node, path: Tokens, verify_len: int
    ) -> Iterator[tuple[Tokens, tuple, float]]:
        raise NotImplementedError


class Standard(Rule):
    """Token-wise rejection.

    Attributes:
      accept: stands in for `twin.accept_prefix`.
      declared_q: the q that acceptance is told, (tokens, drafts) -> law, if not the true one.
      last_token_law: law of the target's own token after a rejection, (q, draft, weights) -> law,
        if not the weights, normalised.
    """

    def __init__(
        self,
        request: Request,
        accept: Callable = twin.accept_prefix,
        declared_q: Callable[[Tokens, Tokens], Law] | None = None,
        last_token_law: Callable[[Law, int, Law], Law] | None = None,
        **kwargs,
    ):
        super().__init__(request, **kwargs)
        self.accept = accept
        self.declared_q = declared_q or request.q
        self.last_token_law = last_token_law

    def _outcomes(self, node, path, verify_len):
        start, block, vocab = node.tokens, self.request.block, self.request.vocab
        for rest in itertools.product(range(vocab), repeat=block - len(path)):
            drafts = path + rest
            drawn_from = [self.request.q(start, drafts[:k]) for k in range(block)]
            mass = 1.0
            for x, law in zip(drafts, drawn_from, strict=True):
                mass *= law[x]
            if mass > 0:
                yield from self._verify(start, drafts, drawn_from, verify_len, mass)

    def _verify(self, start, drafts, drawn_from, verify_len, mass):
        block = len(drafts)
        q = [self.declared_q(start, drafts[:k]) for k in range(block)]
        p = [self.request.p(start + drafts[:k]) for k in range(block + 1)]
        uniforms = [0.5] * block
        for j in range(verify_len + 1):
            x = drafts[j] if j < verify_len else None
            passes = min(1.0, p[j][x] / q[j][x]) if x is not None and q[j][x] > 0 else 1.0
            failing = mass * (1.0 - passes) if x is not None else mass
            if failing > 0:
                if x is not None:
                    uniforms[j] = passes * (1 + _EDGE)
                count, weights = self.accept(drafts, q, p, verify_len, uniforms)
                law = [w / sum(weights) for w in weights]
                if count < verify_len and self.last_token_law is not None:
                    law = self.last_token_law(drawn_from[count], drafts[count], law)
                for z, share in enumerate(law):
                    if share > 0:
                        yield drafts[:count] + (z,), (), failing * share
            mass *= passes
            if x is None or mass == 0:
                return
            uniforms[j] = passes * (1 - _EDGE)


class Block(Standard):
    """Block verification: every prefix is tried by itself, and the longest that passes stands."""

    def __init__(self, request: Request, accept: Callable = twin.accept_block_prefix, **kwargs):
        super().__init__(request, accept, **kwargs)

    @staticmethod
    def passing(drafts: Tokens, q: list[Law], p: list[Law], verify_len: int) -> list[float]:
        """Probability that each prefix 0..verify_len passes block verification, tried by itself."""
        weights = [1.0]
        for k in range(verify_len):
            weights.append(min(1.0, weights[-1] * p[k][drafts[k]] / q[k][drafts[k]]))
        out = [1.0]
        for k in range(1, verify_len):
            pairs = zip(p[k], q[k], strict=True)
            rest = sum(max(0.0, weights[k] * a - b) for a, b in pairs)
            whole = rest + 1.0 - weights[k]
            out.append(rest / whole if whole > 0 else 1.0)
        return out + [weights[-1]] if verify_len else out

    def _verify(self, start, drafts, drawn_from, verify_len, mass):
        p = [self.request.p(start + drafts[:k]) for k in range(len(drafts) + 1)]
        passing = self.passing(drafts, drawn_from, p, verify_len)
        uniforms = [0.5] * len(drafts)
        for count in range(verify_len, -1, -1):
            passes = passing[count]
            if count:
                uniforms[count - 1] = passes * (1 - _EDGE)
            if passes > 0:
                got, weights = self.accept(drafts, drawn_from, p, verify_len, uniforms)
                for z, weight in enumerate(weights):
                    if weight > 0:
                        yield drafts[:got] + (z,), (), mass * passes * weight / sum(weights)
            mass *= 1.0 - passes
            if mass <= 0:
                return
            uniforms[count - 1] = passes * (1 + _EDGE)


class Coupled(Rule):
    """Draft and target share the noise of a position, in this round and in every later one."""

    def _outcomes(self, node, path, verify_len):
        yield from self._reveal(node, path, (), verify_len, 1.0)

    def _reveal(self, node, drafts, rows, verify_len, mass):
        """Draws the target's token of one more row, and the draft there if it was not seen."""
        j = len(rows)
        start, vocab = node.tokens, self.request.vocab
        if j < verify_len and j == len(drafts):
            options = [(*drafts, x) for x in range(vocab)]
        else:
            options = [drafts]
        for known in options:
            past = self._draws(node, j)
            context = past
            if j < len(known):
                context = (*past, (self.request.q(start, known[:j]), known[j]))
            before = races.probability(past) if past else 1.0
            target = self.request.p(start + known[:j])
            for z in range(vocab):
                share = races.probability((*context, (target, z))) / before
                if share > 0:
                    yield from self._decide(node, known, (*rows, z), verify_len, mass * share)

    def _decide(self, node, drafts, rows, verify_len, mass):
        j, block = len(rows) - 1, self.request.block
        tokens = drafts + (-1,) * (block - len(drafts))
        target_tokens = rows + (-2,) * (block + 1 - len(rows))
        count, last = twin.accept_coupled(tokens, target_tokens, verify_len)
        if count > j:
            yield from self._reveal(node, drafts, rows, verify_len, mass)
            return
        emitted = drafts[:count] + (last,)
        noise = []  # what is now known of the positions after the emitted ones
        for k in range(len(emitted), max(len(drafts), len(node.noise))):
            past = self._draws(node, k)
            context = past
            if k < len(drafts):
                context = (*past, (self.request.q(node.tokens, drafts[:k]), drafts[k]))
                mass *= races.probability(context) / (races.probability(past) if past else 1.0)
            noise.append(context)
        if mass > 0:
            yield emitted, tuple(noise), mass

    def _draws(self, node: Node, offset: int) -> tuple:
        return node.noise[offset] if offset < len(node.noise) else ()
