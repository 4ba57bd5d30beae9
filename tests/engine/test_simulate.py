"""The load simulator on rounds small enough to add up by hand."""

import json

import numpy as np
import pytest

from dspark_jax.calibrate import Calibration, Traces, logits_of
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.simulate import (
    Walk,
    acceptance_by_threshold,
    example_table,
    fixed_lengths,
    oracle,
    outcome,
    schedule,
    threshold_lengths,
    walk_traces,
)
from dspark_jax.sps import Curve, SpsKey, SpsTable
from tests.lossless.twin import schedule_numpy
from tools.simulate import main


def walk(confidence, accept_len, limit=None, **more) -> Walk:
    """A walk from [rounds, R, K] and [rounds, R] lists."""
    confidence = np.array(confidence, np.float32)
    accept_len = np.array(accept_len)
    limit = np.full(accept_len.shape, confidence.shape[2]) if limit is None else np.array(limit)
    fields = {"presampled": None, "lagged": np.ones_like(confidence)} | more
    return Walk(confidence=confidence, accept_len=accept_len, limit=limit, **fields)


# Two rounds of two requests, two drafts each. Rows 2, 3, 4, 5, 6 take 1, 1, 2, 2, 4 seconds.
CONFIDENCE = [[[0.9, 0.8], [0.5, 0.9]], [[0.6, 0.5], [0.8, 0.1]]]
ACCEPTED = [[2, 0], [1, 2]]
STEPS = 1 / np.array([1, 1, 1, 1, 2, 2, 4], np.float32)


def by_hand(found, tokens, seconds, verified, accepted):
    assert found.tokens_per_s == pytest.approx(tokens / seconds)
    assert found.tokens_per_s_per_user == pytest.approx(tokens / seconds / 2)
    assert found.verify_tokens_per_request == pytest.approx(1 + verified / 4)
    assert found.tau == pytest.approx(tokens / 4)
    rate = accepted / verified if verified else None
    assert found.acceptance_rate == (pytest.approx(rate) if verified else None)


def test_full_none_and_fixed_by_hand():
    rounds = walk(CONFIDENCE, ACCEPTED)
    full = schedule(rounds, STEPS, ScheduleConfig(policy="full"))
    assert full.tolist() == [[2, 2], [2, 2]]
    by_hand(outcome(rounds, full, STEPS), tokens=9, seconds=8, verified=8, accepted=5)
    by_hand(outcome(rounds, fixed_lengths(rounds, 1), STEPS), 7, 4, 4, 3)
    by_hand(outcome(rounds, fixed_lengths(rounds, 0), STEPS), 4, 2, 0, 0)


def test_threshold_by_hand():
    rounds = walk(CONFIDENCE, ACCEPTED)
    plan = threshold_lengths(rounds, 0.6, cumulative=False)
    assert plan.tolist() == [[2, 0], [1, 1]]
    by_hand(outcome(rounds, plan, STEPS), tokens=8, seconds=4, verified=4, accepted=4)
    plan = threshold_lengths(rounds, 0.75, cumulative=True)
    assert plan.tolist() == [[1, 0], [0, 1]]
    assert acceptance_by_threshold(rounds, (0.0, 0.6, 1.0)) == [5 / 8, 1.0, None]


def test_limits_hold_for_everybody():
    rounds = walk(CONFIDENCE, [[1, 0], [1, 2]], limit=[[1, 0], [2, 2]])
    for plan in (
        schedule(rounds, STEPS, ScheduleConfig(policy="full")),
        fixed_lengths(rounds, 2),
        threshold_lengths(rounds, 0.0, cumulative=False),
    ):
        assert plan.tolist() == [[1, 0], [2, 2]]


def test_oracle_finds_what_is_best_here():
    """Capacity 1: the likelier draft of each round, accepted both times, costs nothing more."""
    rounds = walk(CONFIDENCE, ACCEPTED)
    found = oracle(rounds, STEPS)
    assert found["best fixed K"][0] == "K=0"  # 2 tokens/s; one draft each gives 7/4
    assert found["best fixed K"][1].tokens_per_s == pytest.approx(2.0)
    assert found["oracle"][1].tokens_per_s == pytest.approx(6 / 2)


@pytest.mark.parametrize("policy", ["full", "threshold", "early_stop", "lagged", "presampled"])
def test_policies_are_the_engines(policy):
    rng = np.random.default_rng(1)
    confidence, early, lagged = rng.random((3, 5, 3, 4)).astype(np.float32)
    rounds = walk(
        confidence, np.zeros((5, 3), int), rng.integers(0, 5, (5, 3)),
        presampled=early, lagged=lagged,
    )  # fmt: skip
    steps = (1 / (1 + np.repeat(np.arange(6), 3)[:16] ** 1.5 / 9)).astype(np.float32)
    config = ScheduleConfig(policy=policy, confidence_threshold=0.4)
    got = schedule(rounds, steps, config)
    for t in range(5):
        want = schedule_numpy(
            policy, confidence[t].tolist(), rounds.limit[t].tolist(), [True] * 3, steps.tolist(),
            threshold=0.4, lagged=lagged[t].tolist(), presampled=early[t].tolist(),
        )  # fmt: skip
        assert got[t].tolist() == want
    if policy == "threshold":
        np.testing.assert_array_equal(got, threshold_lengths(rounds, 0.4, cumulative=False))


def test_presampled_needs_its_own_estimates():
    with pytest.raises(ValueError, match="no presampled confidences"):
        schedule(walk(CONFIDENCE, ACCEPTED), STEPS, ScheduleConfig(policy="presampled"))


def traces() -> Traces:
    """Prompts of 3, 4 and 5 rounds; round i has confidence (i + 1) / 20 at both positions."""
    value = (np.arange(12, dtype=np.float32)[:, None] + 1) / 20
    return Traces(
        confidence_logits=logits_of(np.repeat(value, 2, axis=1)),
        accept_len=(np.arange(12) % 3).astype(np.int32),
        verify_len=np.full(12, 2, np.int32),
        prompt=np.repeat([0, 1, 2], [3, 4, 5]).astype(np.int32),
        source={"model": "made up"},
    )


def test_walks_follow_prompts_and_look_back_within_them():
    made = walk_traces(traces(), 4, 40, lag=2)
    row = np.round(made.confidence[..., 0] * 20).astype(int) - 1
    behind = np.round(made.lagged[..., 0] * 20).astype(int) - 1
    start_of = np.repeat([0, 3, 7], [3, 4, 5])
    ends = {2, 6, 11}
    for r in range(4):
        for t in range(40):
            if t:
                follows = row[t - 1, r] not in ends and row[t, r] == row[t - 1, r] + 1
                starts = row[t - 1, r] in ends and row[t, r] in (0, 3, 7)
                assert follows or starts
            old_enough = row[t, r] - 2 >= start_of[row[t, r]]
            assert behind[t, r] == (row[t, r] - 2 if old_enough else 19)  # 19: confidence 1
        assert set(row[:, r]) == set(range(12))
    np.testing.assert_array_equal(made.accept_len, row % 3)
    assert len({tuple(row[:, r]) for r in range(4)}) == 4


def test_calibration_divides_the_logits():
    calibration = Calibration(temperatures=(2.0, 1.0))
    plain, scaled = (walk_traces(traces(), 1, 5, calibration=c) for c in (None, calibration))
    logits = np.log(plain.confidence / (1 - plain.confidence))
    np.testing.assert_allclose(scaled.confidence[..., 0], 1 / (1 + np.exp(-logits[..., 0] / 2)),
                               rtol=1e-5)  # fmt: skip
    np.testing.assert_array_equal(scaled.confidence[..., 1], plain.confidence[..., 1])


def test_example_tables():
    smooth, stairs = example_table("smooth"), example_table("staircase")
    rows = np.array([1, 48, 64])
    np.testing.assert_allclose(smooth.seconds(1, rows), 8e-3 + 1e-5 * rows)
    np.testing.assert_allclose(stairs.seconds(1, rows), 8e-3 + 1e-5 * np.array([1, 64, 64]))
    np.testing.assert_allclose(example_table("v7x").seconds(20, np.array([33])), 11.13e-3)
    with pytest.raises(ValueError, match="no table 'flat'"):
        example_table("flat")


@pytest.mark.slow
def test_tool_writes_figures_and_leaves_out_what_the_table_lacks(tmp_path, monkeypatch, capsys):
    traces().save(tmp_path / "rounds.npz")
    curves = tuple(Curve.of(r, 0, {r: 0.01, 3 * r: 0.01 + 0.002 * r}) for r in (1, 2))
    SpsTable(key=SpsKey(), source="measured", curves=curves).save(tmp_path / "mine.json")
    arguments = [
        "simulate", "--traces", str(tmp_path / "rounds.npz"), "--rounds", "20",
        "--table", str(tmp_path / "mine.json"), "--requests", "1", "2", "4",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", arguments)
    main()
    assert "4 requests left out" in capsys.readouterr().err
    report = json.loads((tmp_path / "out/simulation.json").read_text())
    assert set(report["mine"]) == {"1", "2"}
    for row in report["mine"].values():
        for policy, found in row.items():
            assert 0 < found["tokens_per_s"] <= row["oracle"]["tokens_per_s"] or policy == "global"
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {
        "tokens_per_s_mine.png", "verify_tokens_per_request_mine.png",
        "acceptance_by_threshold.png",
    }  # fmt: skip
