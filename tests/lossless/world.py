"""Small random worlds to enumerate: a target process, a draft, confidences and SPS tables.

Every table is over whole prefixes, so context matters, and is made on first use from a seed and
the prefix, so no order of use can change it.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

Tokens = tuple[int, ...]
Law = tuple[float, ...]

CONFIDENCES = ("random", "adversarial", "coarse")
SPS_SHAPES = ("smooth", "staircase", "jagged")


class Request:
    """One prompt: p(. | tokens so far) and q(. | tokens so far, drafts of this block so far).

    Attributes:
      vocab: V.
      block: K, drafts per round.
    """

    def __init__(
        self,
        vocab: int,
        block: int,
        seed: int,
        warp: Callable[[Law], Law] | None = None,
        draft_vocab: int | None = None,
    ):
        """`warp`: p and q are sampled after it. `draft_vocab`: the draft knows tokens below it."""
        self.vocab, self.block = vocab, block
        self._seed, self._draft_vocab = seed, draft_vocab or vocab
        self._warp = warp or (lambda law: law)
        self._raw: dict = {}
        self._warped: dict = {}

    def p(self, tokens: Tokens) -> Law:
        """The target's next-token law, warped."""
        return self._law(("p", tokens))

    def q(self, tokens: Tokens, drafts: Tokens) -> Law:
        """The law of the draft that follows `drafts` in a block anchored after `tokens`, warped."""
        return self._law(("q", tokens, drafts))

    def raw_q(self, tokens: Tokens, drafts: Tokens) -> Law:
        """The draft's law before the warp."""
        return self._unwarped(("q", tokens, drafts))

    def _law(self, key: tuple) -> Law:
        if key not in self._warped:
            self._warped[key] = self._warp(self._unwarped(key))
        return self._warped[key]

    def _unwarped(self, key: tuple) -> Law:
        if key not in self._raw:
            self._raw[key] = self._make(*key)
        return self._raw[key]

    def _make(self, kind: str, tokens: Tokens, drafts: Tokens = ()) -> Law:
        """Random p; q is the target's law there, disturbed, so that drafts are often right."""
        entropy = [self._seed, kind == "q", len(tokens), *tokens, *drafts]
        law = np.random.default_rng(entropy).dirichlet(np.ones(self.vocab))
        if kind == "q":
            law = 0.5 * law + 0.5 * np.array(self._unwarped(("p", tokens + drafts)))
            law[self._draft_vocab :] = 0.0
            law /= law.sum()
        return tuple(float(x) for x in law)


class Scripted(Request):
    """A request whose first laws are given; later ones are uniform."""

    def __init__(self, block: int, p: Law, q: Law):
        super().__init__(len(p), block, seed=0)
        self._first = {("p", ()): p, ("q", (), ()): q}

    def _make(self, kind: str, tokens: Tokens, drafts: Tokens = ()) -> Law:
        key = ("p", tokens) if kind == "p" else ("q", tokens, drafts)
        return self._first.get(key, (1.0 / self.vocab,) * self.vocab)


def confidence_table(request: Request, kind: str, seed: int) -> Callable[[Tokens, Tokens], Law]:
    """A confidence head: (tokens, drafts of the block) -> c_1..c_K, where c_k reads drafts < k.

    Args:
      request: its world.
      kind: "random"; "adversarial": almost sure after a draft that the target likes less than
        the draft model does, hopeless otherwise (Appendix A's trap); "coarse": few values, so
        that ties, certainties and zeros abound.
      seed: of the random values.

    Returns:
      A function of (tokens, drafts); drafts may be any number from K-1 on.
    """
    made: dict[tuple[Tokens, Tokens], float] = {}

    def one(tokens: Tokens, before: Tokens) -> float:
        rng = np.random.default_rng([seed, len(tokens), *tokens, *before])
        if kind == "coarse":
            return float(rng.choice([0.0, 0.5, 0.75, 1.0]))
        if kind == "adversarial" and before:
            x = before[-1]
            over = request.q(tokens, before[:-1])[x] > request.p(tokens + before[:-1])[x]
            return 0.98 if over else 0.02
        if kind == "adversarial":
            return 0.8
        return float(rng.uniform(0.05, 0.99))

    def confidences(tokens: Tokens, drafts: Tokens) -> Law:
        out = []
        for k in range(request.block):
            key = (tokens, drafts[:k])
            if key not in made:
                made[key] = one(*key)
            out.append(made[key])
        return tuple(out)

    return confidences


def presampled_table(request: Request, seed: int) -> Callable[[Tokens], Law]:
    """Estimates of c_1..c_K that read the tokens before the block and none of its drafts."""

    def estimates(tokens: Tokens) -> Law:
        rng = np.random.default_rng([seed, 1, len(tokens), *tokens])
        return tuple(float(x) for x in rng.uniform(0.2, 1.0, request.block))

    return estimates


def sps_table(shape: str, requests: int, block: int, seed: int) -> Law:
    """SPS(B) for B = 0..R*(K+1).

    Args:
      shape: "smooth": 1 / (1 + b B); "staircase": constant up to a bucket, then a step;
        "jagged": independent values, neither monotone nor unimodal.
      requests: R.
      block: K.
      seed: of slope, steps or values.

    Returns:
      float[R*(K+1)+1].
    """
    rng = np.random.default_rng([seed, SPS_SHAPES.index(shape)])
    rows = np.arange(requests * (block + 1) + 1)
    if shape == "smooth":
        table = 1.0 / (1.0 + rng.uniform(0.1, 0.5) * rows)
    elif shape == "staircase":
        step = int(rng.integers(2, 4))
        table = rng.uniform(0.6, 0.8) ** np.ceil(rows / step)
    else:
        table = rng.uniform(0.8, 1.0, rows.size) / (1.0 + 0.1 * rows)
    return tuple(float(x) for x in table)


def nucleus(temperature: float, top_p: float) -> Callable[[Law], Law]:
    """A warp: temperature, then the likeliest tokens up to a mass of top_p."""

    def warp(law: Law) -> Law:
        scaled = np.array(law) ** (1.0 / temperature)
        scaled /= scaled.sum()
        order = np.argsort(-scaled)
        before = np.concatenate([[0.0], np.cumsum(scaled[order])[:-1]])
        scaled[order[before >= top_p]] = 0.0
        return tuple(float(x) for x in scaled / scaled.sum())

    return warp


def greedy(law: Law) -> Law:
    """A warp: temperature 0."""
    return tuple(float(v == int(np.argmax(law))) for v in range(len(law)))


def target_law(request: Request, length: int) -> np.ndarray:
    """Law of the first `length` tokens of plain decoding: float[V, .., V]."""
    law = np.zeros((request.vocab,) * length)
    for tokens in itertools.product(range(request.vocab), repeat=length):
        mass = 1.0
        for k, x in enumerate(tokens):
            mass *= request.p(tokens[:k])[x]
        law[tokens] = mass
    return law


def joint_target_law(requests: Sequence[Request], length: int) -> np.ndarray:
    """Requests do not know of each other: the outer product of their target laws."""
    law = np.ones(())
    for request in requests:
        law = np.multiply.outer(law, target_law(request, length))
    return law
