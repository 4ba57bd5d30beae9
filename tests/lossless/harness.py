"""The exact law of what several requests emit, when one schedule decides for all of them.

Requests are independent but for the schedule. So their joint state is a matrix of masses over
pairs of nodes (`rules.py`), and a round multiplies it, for every pair of visible draft paths,
with both requests' transitions under the verify_lens that the scheduler gives that pair.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tests.lossless import twin
from tests.lossless.rules import Rule
from tests.lossless.world import Law, Tokens

View = tuple[Tokens, tuple]  # a request as the scheduler knows it: tokens, earlier rounds


class Chain:
    """All nodes one request can reach, and its transitions as arrays, grouped by view.

    Attributes:
      rule: the request and its verification rule.
      nodes: reachable nodes; 0 is the start.
      members: view -> indices of its nodes.
      paths: view -> draft paths.
      targets: view -> indices of the nodes that can follow.
      moves: view -> float[K+1, paths, members, targets].
    """

    def __init__(self, rule: Rule, start):
        self.rule = rule
        self.nodes, self.index = [start], {start: 0}
        found = []
        for node in self.nodes:  # grows while it is walked
            paths = rule.paths(node)
            steps = [
                [rule.expand(node, path, length) for path in paths]
                for length in range(rule.request.block + 1)
            ]
            for outcomes in (o for row in steps for o in row):
                for after in outcomes:
                    if after not in self.index:
                        self.index[after] = len(self.nodes)
                        self.nodes.append(after)
            found.append(steps)
        self.members: dict[View, list[int]] = {}
        for i, node in enumerate(self.nodes):
            self.members.setdefault((node.tokens, node.past), []).append(i)
        self.paths = {v: rule.paths(self.nodes[m[0]]) for v, m in self.members.items()}
        self.targets, self.moves = {}, {}
        for view, members in self.members.items():
            self._fill(view, members, found)

    def _fill(self, view: View, members: list[int], found: list) -> None:
        reached = {a for i in members for row in found[i] for o in row for a in o}
        columns = sorted(self.index[a] for a in reached)
        place = {i: c for c, i in enumerate(columns)}
        moves = np.zeros(
            (self.rule.request.block + 1, len(self.paths[view]), len(members), len(columns))
        )
        for m, i in enumerate(members):
            for length, row in enumerate(found[i]):
                for y, outcomes in enumerate(row):
                    for after, mass in outcomes.items():
                        moves[length, y, m, place[self.index[after]]] = mass
        self.targets[view], self.moves[view] = columns, moves

    def is_done(self, view: View) -> bool:
        """Has it emitted all the tokens that are followed?"""
        return len(view[0]) >= self.rule.horizon


class Scheduler:
    """The twin's schedule as a function of what it may see, remembered.

    Attributes:
      policy: as in `twin.schedule_numpy`.
      sps: SPS by verify tokens, for all requests active.
      confidences: per request, (tokens, drafts) -> c_1..c_K.
      block: K.
      room: tokens a request may emit in all; None lets a block run past the horizon.
      lag: rounds back to the confidences that `lagged` and the bypass go by; the rules must keep
        as many.
      presampled: per request, tokens -> estimates of c_1..c_K from before any draft.
      min_gain: a round that promises less by lagged confidences sends nothing; None always sends.
      seen: all answers so far with everybody active, to show that a test exercised something.
      gains: what the bypass judged by, so far.
    """

    def __init__(
        self,
        policy: str,
        confidences: Sequence[Callable[[Tokens, Tokens], Law]],
        sps: Law,
        *,
        block: int,
        room: int | None = None,
        horizon: int = 3,
        lag: int = 0,
        presampled: Sequence[Callable[[Tokens], Law]] = (),
        min_gain: float | None = None,
        **kwargs,
    ):
        self.policy, self.confidences, self.sps, self.block = policy, confidences, sps, block
        self.room, self.horizon, self.kwargs = room, horizon, kwargs
        self.lag, self.presampled, self.min_gain = lag, presampled, min_gain
        self.seen: set[tuple[int, ...]] = set()
        self.gains: set[float] = set()
        self._made: dict = {}
        self._decided: dict = {}

    def lengths(self, views: Sequence[View], paths: Sequence[Sequence[Tokens]]) -> np.ndarray:
        """verify_len for every combination of draft paths: int[paths of 1, .., of R, R]."""
        key = tuple(views)
        if key not in self._made:
            rows = [
                [self.row(r, view, path) for path in paths[r]] for r, view in enumerate(views)
            ]
            limit = [self.limit(r, view[0]) for r, view in enumerate(views)]
            active = [len(view[0]) < self.horizon for view in views]
            out = [
                self.decide(views, drafts, list(confidence), limit, active)
                for confidence, drafts in zip(
                    itertools.product(*rows), itertools.product(*paths), strict=True
                )
            ]
            if all(active):
                self.seen.update(map(tuple, out))
            shape = (*(len(p) for p in paths), len(views))
            self._made[key] = np.array(out).reshape(shape)
        return self._made[key]

    def row(self, r: int, view: View, path: Tokens) -> Law:
        """Confidences of request r; a finished one has none."""
        return self.confidences[r](view[0], path) if len(view[0]) < self.horizon else ()

    def limit(self, r: int, tokens: Tokens) -> int:
        """Most drafts that request r may send."""
        return self.block if self.room is None else min(self.block, self.room - len(tokens) - 1)

    def decide(self, views, drafts, confidence, limit, active) -> Sequence[int]:
        """One schedule. `drafts` are for deliberately broken schedulers only."""
        lagged = tuple(self.older(r, view) for r, view in enumerate(views))
        tokens = tuple(view[0] if self.presampled else () for view in views)
        key = (tuple(confidence), lagged, tokens, tuple(limit), tuple(active))
        if key not in self._decided:
            presampled = [
                table(view[0]) if active[r] else ()
                for r, (table, view) in enumerate(zip(self.presampled, views, strict=False))
            ]
            self._decided[key] = self._decide(confidence, lagged, presampled, limit, active)
        return self._decided[key]

    def older(self, r: int, view: View) -> Law:
        """Request r's confidences of `lag` rounds ago, ones in its first rounds."""
        tokens, past = view
        if len(tokens) >= self.horizon:
            return ()
        if self.lag == 0 or len(past) < self.lag:
            return (1.0,) * self.block
        return self.confidences[r](*past[-self.lag])

    def _decide(self, confidence, lagged, presampled, limit, active) -> Sequence[int]:
        if self.min_gain is not None:
            planned = twin.schedule_numpy(
                self.policy, lagged, limit, active, self.sps, lagged=lagged, presampled=lagged,
                **self.kwargs,
            )
            gain = twin.gain(planned, lagged, active, self.sps) if any(active) else 0.0
            self.gains.add(gain)
            if gain < self.min_gain:
                return [0] * len(confidence)
        return twin.schedule_numpy(
            self.policy, confidence, limit, active, self.sps, lagged=lagged,
            presampled=presampled, **self.kwargs,
        )  # fmt: skip


def emitted_law(chains: Sequence[Chain], schedule: Scheduler) -> np.ndarray:
    """Joint law of the first `horizon` tokens of one or two requests.

    Args:
      chains: one per request, same vocabulary and horizon.
      schedule: decides for all of them.

    Returns:
      float[V, .., V], one axis per token of the first request, then of the second.
    """
    if len(chains) == 1:
        state = np.zeros((len(chains[0].nodes), 1))
        step = _step_one
    else:
        state = np.zeros(tuple(len(c.nodes) for c in chains))
        step = _step_two
    state[0, 0] = 1.0
    horizon = chains[0].rule.horizon
    for _ in range(horizon):  # every round emits at least one token
        state = step(chains, schedule, state)
    shape = tuple(c.rule.request.vocab for c in chains for _ in range(horizon))
    law = np.zeros(shape)
    for at in zip(*np.nonzero(state), strict=True):
        nodes = [c.nodes[i] for c, i in zip(chains, at, strict=False)]
        law[tuple(x for node in nodes for x in node.tokens)] += state[at]
    return law


def _step_one(chains: Sequence[Chain], schedule: Scheduler, state: np.ndarray) -> np.ndarray:
    (chain,) = chains
    out = np.zeros_like(state)
    for view, members in chain.members.items():
        mass = state[members, 0]
        if not mass.any():
            continue
        lengths = schedule.lengths([view], [chain.paths[view]])[:, 0]
        moved = chain.moves[view][lengths, np.arange(len(lengths))].sum(axis=0)
        out[chain.targets[view], 0] += mass @ moved
    return out


def _step_two(chains: Sequence[Chain], schedule: Scheduler, state: np.ndarray) -> np.ndarray:
    first, second = chains
    out = np.zeros_like(state)
    for view1, members1 in first.members.items():
        rows = state[members1]
        if not rows.any():
            continue
        for view2, members2 in second.members.items():
            mass = rows[:, members2]
            if not mass.any():
                continue
            lengths = schedule.lengths(
                [view1, view2], [first.paths[view1], second.paths[view2]]
            )
            out[np.ix_(first.targets[view1], second.targets[view2])] += _move(
                mass, first.moves[view1], second.moves[view2], lengths
            )
    return out


def _move(
    mass: np.ndarray, moves1: np.ndarray, moves2: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Sum over path pairs of moves1[l1, y1]^T mass moves2[l2, y2].

    Args:
      mass: float[n1, n2].
      moves1: float[K+1, y1, n1, c1].
      moves2: float[K+1, y2, n2, c2].
      lengths: int[y1, y2, 2].

    Returns:
      float[c1, c2].
    """
    left = moves1.swapaxes(-1, -2) @ mass  # [K+1, y1, c1, n2]
    out = np.zeros((moves1.shape[-1], moves2.shape[-1]))
    every = np.arange(lengths.shape[0])
    for y2 in range(lengths.shape[1]):
        chosen = left[lengths[:, y2, 0], every]
        for l2 in np.unique(lengths[:, y2, 1]):
            out += chosen[lengths[:, y2, 1] == l2].sum(axis=0) @ moves2[l2, y2]
    return out
