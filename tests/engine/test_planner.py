"""The host's choice of rows."""

import itertools

import numpy as np
import pytest

from dspark_jax.engine.planner import RowPlanner
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.types import RoundOutput

DRAFTS = 3


def said(confidence: np.ndarray) -> RoundOutput:
    """What a round of these confidences f[R, K] tells the host."""
    unused = dict.fromkeys(
        ("tokens", "emit_len", "accept_len", "verify_len", "presampled", "verify_rows", "probe",
         "bypassed")
    )  # fmt: skip
    return RoundOutput(confidence=confidence, **unused)


def by_trying(confidence: np.ndarray, steps: np.ndarray, buckets: list[int], least: int) -> int:
    """The best bucket over every way to give each request a length."""
    requests = len(confidence)
    survival = np.cumprod(confidence, axis=1)
    best = (-1.0, 0)
    for lengths in itertools.product(range(least, DRAFTS + 1), repeat=requests):
        rows = requests + sum(lengths)
        bucket = min(b for b in buckets if b >= rows)
        tokens = requests + sum(s[:n].sum() for s, n in zip(survival, lengths, strict=True))
        best = max(best, (tokens * steps[bucket], -bucket))
    return -best[1]


@pytest.mark.parametrize("least", [0, 1])
def test_the_plan_is_the_best_of_all_lengths(least):
    rng = np.random.default_rng(least)
    schedule = ScheduleConfig(policy="lagged", planner="host", lag=1, min_verify_len=least)
    chosen = set()
    for _ in range(200):
        requests = int(rng.integers(1, 4))
        buckets = sorted({requests + b for b in (0, 1, 2, 5)} | {requests * (DRAFTS + 1)})
        confidence = rng.uniform(0.05, 1.0, (requests, DRAFTS))
        steps = 1 / (1 + rng.uniform(0, 1) * np.arange(requests * (DRAFTS + 1) + 1) ** 1.5)
        planner = RowPlanner(schedule, requests, DRAFTS)
        for slot in range(requests):
            planner.observe(slot, said(confidence), slot)
        plan = planner.plan(range(requests), steps, buckets, np.ones(DRAFTS))
        assert plan == by_trying(confidence, steps, buckets, least)
        chosen.add(plan / requests)
    assert len(chosen) >= 4


def test_plans_go_by_the_newest_confidences_and_forget_the_last_request():
    schedule = ScheduleConfig(policy="lagged", planner="host")
    planner = RowPlanner(schedule, 1, DRAFTS)
    steps, buckets = 1 / (1 + 0.3 * np.arange(DRAFTS + 2)), [1, 2, 3, 4]
    neutral = np.ones(DRAFTS)
    assert planner.plan([0], steps, buckets, neutral) == 4  # nothing known: predictable
    assert planner.plan([0], steps, buckets, neutral / 100) == 1  # or not
    planner.observe(0, said(np.full((1, DRAFTS), 0.01)), 0)
    assert planner.plan([0], steps, buckets, neutral) == 1
    planner.observe(0, said(np.full((1, DRAFTS), 1.0)), 0)
    assert planner.plan([0], steps, buckets, neutral) == 4
    planner.observe(0, said(np.full((1, DRAFTS), 0.01)), 0)
    planner.admit(0)
    assert planner.plan([0], steps, buckets, neutral) == 4


@pytest.mark.parametrize(
    "fields",
    [{"policy": "full"}, {"policy": "early_stop"}, {"min_predicted_gain": 0.0},
     {"confidence_source": "online"}, {"probe_every": 4}],
)  # fmt: skip
def test_only_lagged_can_be_planned_by_the_host(fields):
    with pytest.raises(ValueError, match="planner='host'"):
        ScheduleConfig(**{"policy": "lagged", "planner": "host"} | fields)
