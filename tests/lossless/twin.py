"""The scheduler and the acceptance rules once more, as plain float64 loops.

Written from the formulas, not from the jitted code, and slow on purpose. The enumeration harness
asks these functions for every decision; the jitted code is compared with them decision by
decision.
"""

import math
from collections.abc import Sequence

Row = Sequence[float]


def survival(confidence: Row) -> list[float]:
    """Cumulative products of one request's confidences: a_j = c_1 * .. * c_j."""
    out, product = [], 1.0
    for c in confidence:
        product *= c
        out.append(product)
    return out


def ranked_drafts(
    confidence: Sequence[Row], limit: Sequence[int], active: Sequence[bool]
) -> list[tuple[float, int, int]]:
    """Candidates (survival, draft index from 0, request) in the order they are admitted.

    Survival descending; equal survivals by position, then by request. Drafts of survival 0, drafts
    at or past `limit` and requests that are not active are left out.
    """
    drafts = []
    for r, row in enumerate(confidence):
        if active[r]:
            for j, a in enumerate(survival(row)):
                if a > 0 and j < limit[r]:
                    drafts.append((-a, j, r))
    drafts.sort()
    return [(-negative, j, r) for negative, j, r in drafts]


def throughputs(drafts: list[tuple[float, int, int]], requests: int, sps: Row) -> list[float]:
    """Theta after 0, 1, 2, .. admissions: (requests + sum of survivals) * SPS(verify tokens)."""
    tau = float(requests)
    out = [tau * sps[requests]]
    for n, (a, _, _) in enumerate(drafts, start=1):
        tau += a
        out.append(tau * sps[requests + n])
    return out


def climb(theta: Row) -> int:
    """Algorithm 1: admissions until the first Theta that is not above the best so far."""
    n = 0
    while n + 1 < len(theta) and theta[n + 1] > theta[n]:
        n += 1
    return n


def peak(theta: Row) -> int:
    """Admissions at the largest Theta anywhere, the fewest of them if it occurs twice."""
    best = 0
    for n, value in enumerate(theta):
        if value > theta[best]:
            best = n
    return best


def lengths(drafts: list[tuple[float, int, int]], count: int, requests: int) -> list[int]:
    """verify_len per request when the first `count` drafts are admitted."""
    out = [0] * requests
    for _, j, r in drafts[:count]:
        out[r] = max(out[r], j + 1)
    return out


def threshold_len(confidence: Row, limit: int, threshold: float, *, cumulative: bool) -> int:
    """Drafts before the first confidence, or the first survival, below the threshold."""
    values = survival(confidence) if cumulative else confidence
    n = 0
    while n < limit and values[n] >= threshold:
        n += 1
    return n


def schedule_numpy(
    policy: str,
    confidence: Sequence[Row],
    limit: Sequence[int],
    active: Sequence[bool],
    sps: Row,
    *,
    threshold: float = 0.0,
    cumulative: bool = False,
) -> list[int]:
    """verify_len of every request under one policy.

    Args:
      policy: "full", "threshold", "early_stop" or "global".
      confidence: float[R][K].
      limit: int[R], most drafts each request may send.
      active: bool[R].
      sps: float[R*(K+1)+1], steps per second at that many verify tokens.
      threshold: for "threshold".
      cumulative: for "threshold": compare the survival and not each confidence.

    Returns:
      int[R].

    Source: paper Algorithm 1; DeepSpec's per-position threshold.
    """
    requests = len(confidence)
    bound = [min(limit[r], len(confidence[r])) if active[r] else 0 for r in range(requests)]
    if policy == "full":
        return bound
    if policy == "threshold":
        return [
            threshold_len(confidence[r], bound[r], threshold, cumulative=cumulative)
            for r in range(requests)
        ]
    drafts = ranked_drafts(confidence, bound, active)
    theta = throughputs(drafts, sum(map(bool, active)), sps)
    count = {"early_stop": climb, "global": peak}[policy](theta)
    return lengths(drafts, count, requests)


def accept_prefix(
    tokens: Sequence[int],
    q: Sequence[Row],
    p: Sequence[Row],
    verify_len: int,
    uniforms: Row,
) -> tuple[int, list[float]]:
    """Token-wise rejection for one request, up to the draw of the last token.

    Args:
      tokens: int[K], the drafts.
      q: float[K][V], what each was drawn from.
      p: float[K+1][V], the target after each prefix of the drafts.
      verify_len: drafts sent.
      uniforms: float[K] in [0, 1).

    Returns:
      Accepted drafts, and the weights [V] that the target's own token is drawn in proportion to.

    Source: Leviathan et al. 2023, theorem 1.
    """
    for j in range(verify_len):
        x = tokens[j]
        if not uniforms[j] * q[j][x] < p[j][x]:
            residual = [max(0.0, a - b) for a, b in zip(p[j], q[j], strict=True)]
            return j, residual if sum(residual) > 0 else list(p[j])
    return verify_len, list(p[verify_len])


def gumbel_max(weights: Row, noise: Row) -> int:
    """The index with the largest log weight plus noise; weights of 0 never win."""
    best, best_score = -1, -math.inf
    for v, weight in enumerate(weights):
        score = math.log(weight) + noise[v] if weight > 0 else -math.inf
        if score > best_score:
            best, best_score = v, score
    return best


def accept_standard(
    tokens: Sequence[int],
    q: Sequence[Row],
    p: Sequence[Row],
    verify_len: int,
    uniforms: Row,
    noise: Row,
) -> tuple[int, int]:
    """`accept_prefix`, then the target's own token drawn with Gumbel noise [V]."""
    accept_len, weights = accept_prefix(tokens, q, p, verify_len, uniforms)
    return accept_len, gumbel_max(weights, noise)


def accept_coupled(
    tokens: Sequence[int], target_tokens: Sequence[int], verify_len: int
) -> tuple[int, int]:
    """Accepts while draft and target agree; the target's token at the first row that differs.

    Args:
      tokens: int[K], the drafts.
      target_tokens: int[K+1], what plain sampling with the same noise draws at each row.
      verify_len: drafts sent.

    Returns:
      Accepted drafts and the target's own token.
    """
    n = 0
    while n < verify_len and tokens[n] == target_tokens[n]:
        n += 1
    return n, target_tokens[n]
