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
    confidence: Sequence[Row], limit: Sequence[int], active: Sequence[bool], floor: int = 0
) -> list[tuple[float, int, int]]:
    """Candidates (survival, draft index from 0, request) in the order they are admitted.

    The first `floor` drafts of every request, then by survival, descending; equal survivals by
    position, then by request. Other drafts of survival 0, drafts at or past `limit` and requests
    that are not active are left out.
    """
    drafts = []
    for r, row in enumerate(confidence):
        if active[r]:
            for j, a in enumerate(survival(row)):
                if j < limit[r] and (a > 0 or j < floor):
                    drafts.append((j >= floor, 0.0 if j < floor else -a, j, r, a))
    drafts.sort()
    return [(a, j, r) for _, _, j, r, a in drafts]


def throughputs(drafts: list[tuple[float, int, int]], requests: int, sps: Row) -> list[float]:
    """Theta after 0, 1, 2, .. admissions: (requests + sum of survivals) * SPS(verify tokens)."""
    tau = float(requests)
    out = [tau * sps[requests]]
    for n, (a, _, _) in enumerate(drafts, start=1):
        tau += a
        out.append(tau * sps[requests + n])
    return out


def climb(theta: Row, least: int = 0) -> int:
    """Algorithm 1: from `least` admissions until the first Theta not above the best so far."""
    n = least
    while n + 1 < len(theta) and theta[n + 1] > theta[n]:
        n += 1
    return n


def peak(theta: Row, least: int = 0) -> int:
    """Admissions at the largest Theta from `least` on, the fewest of them if it occurs twice."""
    best = least
    for n in range(least, len(theta)):
        if theta[n] > theta[best]:
            best = n
    return best


def end_of_stair(count: int, requests: int, sps: Row) -> int:
    """The most admissions that are no slower than `count`, nor any in between."""
    n = count
    while requests + n + 1 < len(sps) and sps[requests + n + 1] >= sps[requests + count]:
        n += 1
    return n


def capacity_of(
    confidence: Sequence[Row], limit: Sequence[int], active: Sequence[bool], sps: Row, floor: int
) -> int:
    """Drafts that these confidences pay for, and those that come for free with them."""
    drafts = ranked_drafts(confidence, limit, active, floor)
    requests = sum(map(bool, active))
    least = sum(min(floor, n) for n in limit)
    return end_of_stair(peak(throughputs(drafts, requests, sps), least), requests, sps)


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
    lagged: Sequence[Row] = (),
    presampled: Sequence[Row] = (),
    floor: int = 0,
    ceiling: int | None = None,
) -> list[int]:
    """verify_len of every request under one policy.

    Args:
      policy: "full", "threshold", "early_stop", "lagged", "presampled" or "global".
      confidence: float[R][K].
      limit: int[R], most drafts each request may send.
      active: bool[R].
      sps: float[R*(K+1)+1], steps per second at that many verify tokens.
      threshold: for "threshold".
      cumulative: for "threshold": compare the survival and not each confidence.
      lagged: float[R][K], confidences of an older round, for "lagged".
      presampled: float[R][K], confidences from before any draft, for "presampled".
      floor: drafts of each request that are sent in any case.
      ceiling: most drafts of each request.

    Returns:
      int[R].

    Source: paper Algorithm 1 and section 5.2; DeepSpec's per-position threshold.
    """
    requests = len(confidence)
    bound = [min(limit[r], len(confidence[r])) if active[r] else 0 for r in range(requests)]
    bound = [n if ceiling is None else min(n, ceiling) for n in bound]
    if policy == "full":
        return bound
    if policy == "threshold":
        passed = [
            threshold_len(confidence[r], bound[r], threshold, cumulative=cumulative)
            for r in range(requests)
        ]
        return [min(max(n, floor), most) for n, most in zip(passed, bound, strict=True)]
    drafts = ranked_drafts(confidence, bound, active, floor)
    theta = throughputs(drafts, sum(map(bool, active)), sps)
    if policy == "early_stop":
        count = climb(theta, sum(min(floor, n) for n in bound))
    else:
        source = {"lagged": lagged, "presampled": presampled, "global": confidence}[policy]
        count = capacity_of(source, bound, active, sps, floor)
    return lengths(drafts, count, requests)


def gain(plan: Sequence[int], confidence: Sequence[Row], active: Sequence[bool], sps: Row) -> float:
    """Tokens per second that a plan promises, over a round without drafts (at sps[0]), less 1."""
    tau = requests = sum(map(bool, active))
    for r, n in enumerate(plan):
        tau += sum(survival(confidence[r])[:n])
    return tau * sps[requests + sum(plan)] / (requests * sps[0]) - 1.0


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


def accept_block_prefix(
    tokens: Sequence[int],
    q: Sequence[Row],
    p: Sequence[Row],
    verify_len: int,
    uniforms: Row,
) -> tuple[int, list[float]]:
    """Block verification for one request, up to the draw of the last token.

    Arguments and result as of `accept_prefix`.

    Source: Sun et al. 2024 (arXiv 2403.10444), Algorithm 2.
    """
    weight, count, kept = 1.0, 0, 1.0
    for i in range(verify_len):
        weight = min(1.0, weight * p[i][tokens[i]] / q[i][tokens[i]])
        if i + 1 == verify_len:
            passed = uniforms[i] < weight
        else:
            pairs = zip(p[i + 1], q[i + 1], strict=True)
            rest = sum(max(0.0, weight * a - b) for a, b in pairs)
            whole = rest + 1.0 - weight
            passed = whole <= 0.0 or uniforms[i] < rest / whole
        if passed:
            count, kept = i + 1, weight
    if count == verify_len:
        return count, list(p[count])
    residual = [max(0.0, kept * a - b) for a, b in zip(p[count], q[count], strict=True)]
    return count, residual if sum(residual) > 0 else list(p[count])


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


def accept_block(
    tokens: Sequence[int],
    q: Sequence[Row],
    p: Sequence[Row],
    verify_len: int,
    uniforms: Row,
    noise: Row,
) -> tuple[int, int]:
    """`accept_block_prefix`, then the target's own token drawn with Gumbel noise [V]."""
    accept_len, weights = accept_block_prefix(tokens, q, p, verify_len, uniforms)
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
