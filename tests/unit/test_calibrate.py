"""Calibration measures against plain loops, and temperatures recovered from made-up rounds."""

import json

import numpy as np
import pytest

from dspark_jax.calibrate import (
    Calibration,
    Traces,
    auc,
    brier_score,
    ece_floor,
    expected_calibration_error,
    fit_temperatures,
    judge,
    load_calibration,
    load_traces,
    logits_of,
)
from tools.calibrate import main

TRUE = np.array([2.0, 1.0, 0.5, 3.0])


def made_up(rounds: int, temperatures: np.ndarray, seed: int = 0) -> Traces:
    """Rounds whose confidences are right once their logits are divided by `temperatures`."""
    rng = np.random.default_rng(seed)
    right = rng.normal(1.0, 1.5, (rounds, len(temperatures)))
    passed = rng.random(right.shape) < 1 / (1 + np.exp(-right))
    verify_len = np.where(rng.random(rounds) < 0.1, 2, len(temperatures))
    accept_len = np.minimum(np.cumprod(passed, axis=1).sum(axis=1), verify_len)
    return Traces(
        confidence_logits=(right * temperatures).astype(np.float32),
        accept_len=accept_len.astype(np.int32),
        verify_len=verify_len.astype(np.int32),
        prompt=(np.arange(rounds) // 50).astype(np.int32),
        source={"model": "made up"},
    )


def columns(traces: Traces) -> tuple:
    return traces.confidence_logits, traces.accept_len, traces.verify_len


def test_temperatures_are_recovered_and_help_on_held_out_prompts():
    fit, held_out = made_up(30_000, TRUE).split(0.6)
    found = fit_temperatures(*columns(fit))
    np.testing.assert_allclose(found, TRUE, rtol=0.15)
    before = judge(*columns(held_out), np.ones(4))
    after = judge(*columns(held_out), found)
    assert np.mean(after["ece"]) < 1.3 * np.mean(after["ece_floor"])
    assert np.mean(after["ece"]) < 0.4 * np.mean(before["ece"])
    assert np.mean(after["brier"]) < np.mean(before["brier"])
    assert after["auc"][0] == pytest.approx(before["auc"][0])  # order within a position stays


def test_right_confidences_are_left_alone():
    found = fit_temperatures(*columns(made_up(30_000, np.ones(2))))
    np.testing.assert_allclose(found, 1.0, rtol=0.1)


def test_order_matters_later_positions_build_on_earlier_temperatures():
    """Fitting position 1 with position 0 left over-confident gives another temperature."""
    traces = made_up(20_000, np.array([4.0, 1.0]))
    sequential = fit_temperatures(*columns(traces))
    wrong = traces.confidence_logits.copy()
    wrong[:, 0] = 16.0  # as if position 0 always passed
    blind = fit_temperatures(wrong, traces.accept_len, traces.verify_len)
    assert abs(np.log(sequential[1])) < 0.15 < abs(np.log(blind[1]))


def test_positions_never_verified_keep_one():
    traces = made_up(500, TRUE)
    found = fit_temperatures(
        traces.confidence_logits, np.minimum(traces.accept_len, 2), np.full(500, 2)
    )
    assert found[2:].tolist() == [1.0, 1.0]
    figures = judge(traces.confidence_logits, np.zeros(500, int), np.full(500, 2), np.ones(4))
    assert figures["num_samples"] == [500, 500, 0, 0]
    assert np.isnan(figures["ece"][2:]).all() and np.isnan(figures["auc"]).all()


@pytest.fixture(scope="module")
def events():
    rng = np.random.default_rng(5)
    predicted = np.round(rng.random(400), 2)  # many ties, bin edges included
    predicted[:3] = [0.0, 1.0, 1.0]
    return predicted, rng.random(400) < predicted**2


def test_ece_against_a_loop(events):
    predicted, happened = events
    total = 0.0
    for b in range(20):
        last = b == 19
        inside = [
            i for i, p in enumerate(predicted)
            if int(p * 20) == b or (last and p == 1.0)
        ]  # fmt: skip
        if inside:
            total += abs(sum(predicted[i] for i in inside) - sum(happened[i] for i in inside))
    assert expected_calibration_error(predicted, happened) == pytest.approx(total / 400, abs=1e-12)


def test_ece_floor_is_what_right_predictions_get(events):
    predicted, _ = events
    rng = np.random.default_rng(9)
    seen = [
        expected_calibration_error(predicted, rng.random(400) < predicted) for _ in range(200)
    ]  # fmt: skip
    assert ece_floor(predicted) == pytest.approx(np.mean(seen), rel=0.1)
    assert ece_floor(np.array([0.0, 1.0])) == 0.0


def test_ece_by_hand():
    predicted, happened = np.array([0.51, 0.53, 0.96, 0.99]), np.array([True, False, True, True])
    by_hand = (2 * abs(0.52 - 0.5) + 2 * abs(0.975 - 1.0)) / 4
    assert expected_calibration_error(predicted, happened) == pytest.approx(by_hand)
    assert brier_score(predicted, happened) == pytest.approx(
        (0.49**2 + 0.53**2 + 0.04**2 + 0.01**2) / 4
    )


def test_auc_against_all_pairs(events):
    predicted, happened = events
    wins = [
        (a > b) + 0.5 * (a == b) for a in predicted[happened] for b in predicted[~happened]
    ]  # fmt: skip
    assert auc(predicted, happened) == pytest.approx(np.mean(wins), abs=1e-12)
    assert auc(predicted, ~happened) == pytest.approx(1 - np.mean(wins), abs=1e-12)


def test_logits_of_probabilities():
    probabilities = np.array([0.25, 0.5, 1.0, 0.0], np.float32)
    np.testing.assert_allclose(logits_of(probabilities), [-np.log(3), 0, 16, -16], rtol=1e-6)


def test_split_shares_no_prompt():
    first, second = made_up(1000, TRUE).split(0.75, seed=3)
    assert not set(first.prompt) & set(second.prompt)
    assert (len(set(first.prompt)), len(set(second.prompt))) == (15, 5)
    with pytest.raises(ValueError, match="two prompts"):
        made_up(20, TRUE).split(0.5)


def test_traces_round_trip(tmp_path):
    traces = made_up(100, TRUE)
    traces.save(tmp_path / "t.npz")
    loaded = load_traces(tmp_path / "t.npz")
    for a, b in zip(columns(loaded), columns(traces), strict=True):
        np.testing.assert_array_equal(a, b)
    assert loaded.presampled_logits is None and loaded.source == {"model": "made up"}
    np.savez(tmp_path / "bad.npz", prompt=np.zeros(3))
    with pytest.raises(ValueError, match="expected"):
        load_traces(tmp_path / "bad.npz")
    with pytest.raises(FileNotFoundError, match="save-traces"):
        load_traces(tmp_path / "none.npz")


def test_impossible_traces_are_refused():
    with pytest.raises(ValueError, match="accept no more"):
        Traces(confidence_logits=np.zeros((1, 2)), accept_len=np.array([2]),
               verify_len=np.array([1]), prompt=np.array([0]))  # fmt: skip
    with pytest.raises(ValueError, match="expected \\[N, K\\]"):
        Traces(confidence_logits=np.zeros((2, 2)), accept_len=np.array([1]),
               verify_len=np.array([1]), prompt=np.array([0]))  # fmt: skip


def test_calibration_round_trip_and_both_keys(tmp_path):
    path = tmp_path / "sts.json"
    made = Calibration(
        temperatures=(2.0, 1.5), dataset="mine", num_samples=7,
        ece_before=(0.1, None), ece_after=(0.01, None),
    )  # fmt: skip
    made.save(path, auc_after=[0.8, float("nan")])
    assert load_calibration(path, 2) == made
    data = json.loads(path.read_text())
    assert data["temperatures"] == data["sts_temperatures"] == [2.0, 1.5]
    assert data["auc_after"] == [0.8, None]
    for name in ("temperatures", "sts_temperatures"):
        path.write_text(json.dumps({name: [1.25, 2.5]}))
        assert load_calibration(path).temperatures == (1.25, 2.5)


def test_tool_fits_on_some_prompts_and_judges_on_others(tmp_path, monkeypatch, capsys):
    made_up(20_000, TRUE).save(tmp_path / "rounds.npz")
    arguments = ["calibrate", "--load-traces", str(tmp_path / "rounds.npz")]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path / "sts")])
    main()
    data = json.loads((tmp_path / "sts" / "sts.json").read_text())
    found = load_calibration(tmp_path / "sts" / "sts.json", 4)
    np.testing.assert_allclose(found.temperatures, TRUE, rtol=0.3)
    assert data["num_prompts"] == {"fit": 200, "held_out": 200}
    assert data["num_samples"] == 10_000
    assert data["ece_before"] == data["held_out_before"]["ece"]
    assert np.mean(data["ece_after"]) < 0.4 * np.mean(data["ece_before"])
    assert (tmp_path / "sts" / "reliability.png").stat().st_size > 10_000
    assert len(capsys.readouterr().out.splitlines()) == 7


@pytest.mark.parametrize(
    "data, words",
    [
        ({"scales": [1.0]}, "must hold"),
        ({"temperatures": [1.0, 2.0], "sts_temperatures": [1.0, 3.0]}, "the same numbers"),
        ({"temperatures": [1.0, 2.0, 3.0]}, "3 temperatures, the draft proposes 2"),
        ({"temperatures": [1.0, 0.0]}, "positive"),
        ([1.0, 2.0], "must hold"),
    ],
)
def test_bad_calibrations_are_explained(tmp_path, data, words):
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=words):
        load_calibration(path, 2)
