"""Exact probabilities of several Gumbel-max draws that share their noise.

argmax(log w + g) with Gumbel g is argmin(E / w) with E iid Exp(1), and E / sum(E) is uniform on
the simplex. So the event "w draws x" is the part of the simplex with s_j w_x >= s_x w_j for every
j, a polytope, and the probability that several weight vectors draw given winners from ONE noise
vector is the volume of an intersection of such polytopes. The simplex is cut into simplices whose
volumes follow from the cutting ratios alone: no sampling, no quadrature.
"""

from collections.abc import Sequence
from functools import cache

Weights = tuple[float, ...]
Vertex = tuple[float, ...]
Piece = tuple[float, tuple[Vertex, ...]]  # volume (the whole simplex has 1) and corners
Draw = tuple[Weights, int]  # weights, and the token they draw

_SNAP = 1e-15  # a corner this close to a cutting plane lies on it


def probability(draws: Sequence[Draw]) -> float:
    """Probability that every draw has its winner, all with the same noise."""
    return _volume(tuple(draws))


@cache
def _volume(draws: tuple[Draw, ...]) -> float:
    return sum(volume for volume, _ in _region(draws))


@cache
def _region(draws: tuple[Draw, ...]) -> tuple[Piece, ...]:
    """The part of the simplex in which every draw has its winner."""
    if not draws:
        raise ValueError("no draw given: the size of the vocabulary is unknown")
    weights, winner = draws[-1]
    size = len(weights)
    if len(draws) > 1:
        pieces = _region(draws[:-1])
    else:
        corners = tuple(tuple(float(i == j) for j in range(size)) for i in range(size))
        pieces = ((1.0, corners),)
    if weights[winner] <= 0:
        return ()
    for other in range(size):
        if other != winner and weights[other] > 0:
            pieces = tuple(
                kept
                for volume, corners in pieces
                for kept in _clip(
                    volume,
                    corners,
                    tuple(
                        c[other] * weights[winner] - c[winner] * weights[other] for c in corners
                    ),
                )
            )
    return pieces


def _clip(volume: float, corners: tuple[Vertex, ...], heights: tuple[float, ...]) -> list[Piece]:
    """Splits a simplex along the plane of height 0 and keeps what lies above.

    An edge that crosses the plane is cut there; the two simplices that share the cut have the
    volumes of the two parts of the edge, and one crossing less each.
    """
    low, high = min(heights), max(heights)
    if low >= -_SNAP:
        return [(volume, corners)]
    if high <= _SNAP:
        return []
    down, up = heights.index(low), heights.index(high)
    share = high / (high - low)  # of the edge, on the kept side
    cut = tuple(
        a + share * (b - a) for a, b in zip(corners[up], corners[down], strict=True)
    )
    out = []
    for index, part in ((down, share), (up, 1.0 - share)):
        out += _clip(
            volume * part,
            (*corners[:index], cut, *corners[index + 1 :]),
            (*heights[:index], 0.0, *heights[index + 1 :]),
        )
    return out
