"""A server under load, replayed from recorded rounds against any SPS table.

R requests are always running; each walks through the recorded rounds of one prompt after another.
A round of all requests is scheduled by the very code the engine compiles, emits the drafts it
verified and the recording accepted, and takes the time the table says.

What is simplified: a request goes on to its next recorded round however many drafts were verified,
so that every policy sees the same blocks; context does not grow; prompts cost nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import Calibration, Traces
from dspark_jax.schedule import Evidence, ScheduleConfig, schedule_prefixes
from dspark_jax.sps import Curve, SpsKey, SpsTable

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))  # searched by the oracle
CAPACITIES = 64  # numbers of drafts in all that the oracle tries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """Which recorded round each of R requests is in, for a number of rounds; K drafts each."""

    confidence: np.ndarray  # f32[rounds, R, K]
    presampled: np.ndarray | None  # f32[rounds, R, K]
    lagged: np.ndarray  # f32[rounds, R, K], ones in the first rounds of a request
    accept_len: np.ndarray  # i32[rounds, R], drafts accepted of a whole block
    limit: np.ndarray  # i32[rounds, R], drafts that fitted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a policy made of a load.

    Attributes:
      tokens_per_s: of all requests.
      tokens_per_s_per_user: of one.
      verify_tokens_per_request: rows the target computes per request and round, anchor included,
        padding up to the bucket left out.
      tau: tokens per request and round.
      acceptance_rate: drafts accepted by drafts verified; None if none was.
    """

    tokens_per_s: float
    tokens_per_s_per_user: float
    verify_tokens_per_request: float
    tau: float
    acceptance_rate: float | None


def walk_traces(
    traces: Traces,
    requests: int,
    rounds: int,
    *,
    lag: int = 2,
    calibration: Calibration | None = None,
    seed: int = 0,
) -> Walk:
    """Sends R requests through recorded rounds, each starting somewhere and in an order of its own.

    Args:
      traces: rounds with whole blocks verified.
      requests: R.
      rounds: how many each request runs.
      lag: age of the confidences `lagged` sees.
      calibration: temperatures for the confidences; None believes them as they are.
      seed: of the orders.

    Returns:
      The walk.
    """
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(np.diff(traces.prompt, prepend=traces.prompt[0] - 1))
    lengths = np.diff(starts, append=len(traces.prompt))
    index = np.empty((rounds, requests), np.int64)
    age = np.empty((rounds, requests), np.int64)
    for r in range(requests):
        path, ages, have = [], [], 0
        skip = None
        while have < rounds:
            for prompt in rng.permutation(len(starts)):
                skip = int(rng.integers(lengths[prompt])) if skip is None else 0
                ages.append(np.arange(skip, lengths[prompt]))
                path.append(starts[prompt] + ages[-1])
                have += len(ages[-1])
        index[:, r] = np.concatenate(path)[:rounds]
        age[:, r] = np.concatenate(ages)[:rounds]
    ones = np.ones(traces.num_drafts)
    temperatures = np.array(calibration.temperatures) if calibration else ones
    confidence = _sigmoid(traces.confidence_logits / temperatures)
    presampled = None
    if traces.presampled_logits is not None:
        early = calibration.presampled_temperatures if calibration else ()
        early_temperatures = np.array(early) if early else ones
        presampled = _sigmoid(traces.presampled_logits / early_temperatures)[index]
    lagged = np.where((age >= lag)[..., None], confidence[np.maximum(index - lag, 0)], 1.0)
    return Walk(
        confidence=confidence[index],
        presampled=presampled,
        lagged=lagged.astype(np.float32),
        accept_len=traces.accept_len[index],
        limit=traces.verify_len[index],
    )


def schedule(walk: Walk, steps_per_s: np.ndarray, config: ScheduleConfig) -> np.ndarray:
    """verify_len i32[rounds, R] under a policy of the engine.

    Args:
      walk: the rounds.
      steps_per_s: f32[R*(K+1)+1].
      config: the policy.

    Raises:
      ValueError: `presampled`, and the traces hold no estimates from before drafting.
    """
    if config.policy == "presampled" and walk.presampled is None:
        raise ValueError(
            "these traces hold no presampled confidences; record them with "
            "tools/calibrate.py --policy presampled --save-traces."
        )
    early = walk.confidence if walk.presampled is None else walk.presampled
    plan = _schedule_all(
        walk.confidence, early, walk.lagged, walk.limit, jnp.asarray(steps_per_s), config
    )
    return np.asarray(plan)


@functools.partial(jax.jit, static_argnums=5)
def _schedule_all(confidence, presampled, lagged, limit, steps_per_s, config) -> jax.Array:
    def one(rows: tuple) -> jax.Array:
        confidence, presampled, lagged, limit = rows
        evidence = Evidence(
            confidence=confidence, presampled=presampled, lagged=lagged, limit=limit,
            active=jnp.ones(limit.shape, bool), steps_per_s=steps_per_s,
        )  # fmt: skip
        return schedule_prefixes(evidence, config)

    return jax.lax.map(one, (confidence, presampled, lagged, limit))


def outcome(walk: Walk, verify_len: np.ndarray, steps_per_s: np.ndarray) -> Outcome:
    """Adds up what a schedule emits and how long it takes.

    Args:
      walk: the rounds.
      verify_len: i32[rounds, R].
      steps_per_s: f32[R*(K+1)+1].

    Returns:
      The totals.
    """
    rounds, requests = verify_len.shape
    accepted = np.minimum(walk.accept_len, verify_len).sum()
    tokens = accepted + rounds * requests
    seconds = (1.0 / steps_per_s[requests + verify_len.sum(axis=1)].astype(np.float64)).sum()
    verified = verify_len.sum()
    return Outcome(
        tokens_per_s=float(tokens / seconds),
        tokens_per_s_per_user=float(tokens / seconds / requests),
        verify_tokens_per_request=float(1 + verified / (rounds * requests)),
        tau=float(tokens / (rounds * requests)),
        acceptance_rate=float(accepted / verified) if verified else None,
    )


def fixed_lengths(walk: Walk, length: int) -> np.ndarray:
    """verify_len i32[rounds, R] when everybody verifies `length` drafts, as far as they fit."""
    return np.minimum(walk.limit, length)


def threshold_lengths(walk: Walk, threshold: float, *, cumulative: bool) -> np.ndarray:
    """verify_len of the policy `threshold`, without compiling it for each threshold."""
    values = np.cumprod(walk.confidence, axis=-1) if cumulative else walk.confidence
    passed = np.cumprod(values >= np.float32(threshold), axis=-1).sum(axis=-1)
    return np.minimum(passed, walk.limit)


def oracle(walk: Walk, steps_per_s: np.ndarray) -> dict[str, tuple[str, Outcome]]:
    """The best that fixed rules reach when they may be chosen knowing this very load.

    Args:
      walk: the rounds.
      steps_per_s: f32[R*(K+1)+1].

    Returns:
      "best fixed K" and "oracle" (lengths, thresholds of both kinds, and fixed capacities filled
      by survival; all lossless), each with the name of the rule and its outcome.
    """
    _, requests, block = walk.confidence.shape
    found: dict[str, Outcome] = {}
    for length in range(block + 1):
        found[f"K={length}"] = outcome(walk, fixed_lengths(walk, length), steps_per_s)
    fixed = max(found, key=lambda name: found[name].tokens_per_s)
    best = {"best fixed K": (fixed, found[fixed])}
    for threshold in THRESHOLDS:
        for cumulative in (False, True):
            plan = threshold_lengths(walk, threshold, cumulative=cumulative)
            name = f"{'survival' if cumulative else 'confidence'}>={threshold}"
            found[name] = outcome(walk, plan, steps_per_s)
    ranks = _ranks(walk)
    for count in np.unique(np.linspace(0, requests * block, CAPACITIES).round().astype(int)):
        plan = np.minimum((ranks < count).sum(axis=-1), walk.limit)
        found[f"capacity={count}"] = outcome(walk, plan, steps_per_s)
    name = max(found, key=lambda name: found[name].tokens_per_s)
    return best | {"oracle": (name, found[name])}


def acceptance_by_threshold(walk: Walk, thresholds: tuple[float, ...]) -> list[float | None]:
    """Drafts accepted by drafts verified, for the per-position policy at each threshold."""
    ones = np.ones(walk.limit.shape[1] * (walk.confidence.shape[-1] + 1) + 1)
    return [
        outcome(walk, threshold_lengths(walk, t, cumulative=False), ones).acceptance_rate
        for t in thresholds
    ]


def example_table(name: str) -> SpsTable:
    """A table to try policies on without a device.

    Args:
      name: "smooth" (8 ms and 10 us a row) and "staircase" (the same, paid in powers of two) are
        made up; "v7x" is published.

    Returns:
      The table.

    Raises:
      ValueError: no such table.

    Source: v7x: qwen3_8b_v7x8_sps_2d.json of a public fork of sglang-jax (primatrix, branch
    epic/dspark-qwen3): medians for Qwen3-8B on eight TPU v7x, per data-parallel rank.
    """
    made = SpsKey(device="made up")
    if name == "smooth":
        seconds = {b: 8e-3 + 1e-5 * b for b in (1, 8192)}
        return SpsTable(
            key=made, source="modelled", lookup="linear", curves=(Curve.of(0, 0, seconds),)
        )
    if name == "staircase":
        seconds = {2**i: 8e-3 + 1e-5 * 2**i for i in range(14)}
        return SpsTable(key=made, source="modelled", curves=(Curve.of(0, 0, seconds),))
    if name == "v7x":
        curves = (
            Curve.of(32, 1024, {32: 10.91e-3, 64: 11.13e-3, 128: 11.18e-3, 256: 11.40e-3}),
            Curve.of(64, 1024, {64: 11.17e-3, 128: 12.12e-3, 256: 13.10e-3, 512: 16.60e-3}),
        )
        key = SpsKey(device="8x TPU v7x", model="Qwen3-8B", dtype="bfloat16")
        return SpsTable(key=key, source="measured", curves=curves)
    raise ValueError(f"no table {name!r}; expected 'smooth', 'staircase', 'v7x', or a file.")


def _ranks(walk: Walk) -> np.ndarray:
    """Place i[rounds, R, K] of every draft by survival; ties by position, then request."""
    survival = np.cumprod(walk.confidence, axis=-1)
    block = survival.shape[-1]
    survival = np.where(np.arange(block) < walk.limit[..., None], survival, -1.0)
    by_position = survival.swapaxes(1, 2).reshape(len(survival), -1)
    order = np.argsort(-by_position, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(order.shape[1])[None], axis=1)
    return places.reshape(len(survival), block, -1).swapaxes(1, 2)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
