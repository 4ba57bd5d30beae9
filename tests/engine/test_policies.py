"""Policies side by side at a steady load."""

import dataclasses
import math

import numpy as np
import pytest

from dspark_jax.calibrate import Calibration
from dspark_jax.engine.load import Pair, load_pair
from dspark_jax.engine.requests import Request
from dspark_jax.eval.policies import Outcome, chosen, contenders, race, speed_ratio
from dspark_jax.sps import Curve, SpsKey, SpsTable
from tests.models import write_draft, write_target

DRAFTS, ROWS, TOKENS = 2, 2, 12

pytestmark = pytest.mark.usefixtures("one_width")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "tiny", layers=2)
    return load_pair(str(target), str(write_draft(folder / "draft", target, block_size=DRAFTS)))


def run(pair: Pair, names: tuple[str, ...], *, undrafted_seconds: float) -> dict[str, Outcome]:
    field = contenders(DRAFTS, threshold=1.0, min_predicted_gain=0.0)
    assert [c.name for c in field] == [
        "none", "fixed 1", "full", "threshold", "early_stop", "lagged", "presampled", "global",
    ]  # fmt: skip
    requests = [
        Request(prompt_ids=(5, 6 + i, 7), max_tokens=TOKENS, temperature=1.0, seed=i)
        for i in range(ROWS)
    ]
    seconds = {ROWS: 1.0, ROWS * (DRAFTS + 1): 1.0 + 1e-6}
    curve = Curve.of(ROWS, 8, seconds, undrafted_seconds)
    outcomes = race(
        pair, chosen(field, names), [requests, requests], tokens=TOKENS,
        sps=SpsTable(key=SpsKey(), source="measured", curves=(curve,)),
        calibration=Calibration(temperatures=(1.0,) * DRAFTS),
    )  # fmt: skip
    assert tuple(o.name for o in outcomes) == names
    for o in outcomes:
        assert len(o.heat_tokens) == 2 and min(o.heat_tokens) >= TOKENS * ROWS
        assert len(o.heat_seconds) == 2 and min(o.heat_seconds) > 0
    return {o.name: o for o in outcomes}


def test_rows_and_tokens_of_every_length(pair):
    got = run(pair, ("none", "fixed 1", "full", "threshold"), undrafted_seconds=1e9)
    assert got["none"].tokens == got["none"].rounds * ROWS == got["none"].rows
    assert got["full"].rows == got["full"].rounds * ROWS * (DRAFTS + 1)
    assert got["fixed 1"].rows == got["fixed 1"].rounds * ROWS * 2
    assert got["threshold"].rows == got["threshold"].rounds * ROWS  # nothing is that certain
    assert not any(o.bypassed for o in got.values())


def test_policies_with_speeds_leave_drafts_out_where_these_do_not_pay(pair):
    cheap = run(pair, ("early_stop",), undrafted_seconds=1e-6)["early_stop"]
    dear = run(pair, ("early_stop",), undrafted_seconds=1e9)["early_stop"]
    assert cheap.bypassed >= cheap.rounds - 2 and dear.bypassed == 0
    assert cheap.rows == pytest.approx(cheap.rounds * ROWS, rel=0.25)


def test_a_pair_without_a_draft_is_refused(pair):
    plain = dataclasses.replace(pair, draft=None)
    with pytest.raises(ValueError, match="--draft"):
        race(
            plain, [], [], tokens=1, sps=None, calibration=None,
        )  # fmt: skip


def test_contenders_are_chosen_by_name():
    field = contenders(DRAFTS, threshold=1.0, min_predicted_gain=0.0)
    assert [c.name for c in chosen(field, ["lagged", "none"])] == ["none", "lagged"]
    with pytest.raises(ValueError, match="'early_stop', 'lagged'"):
        chosen(field, ["none", "late_stop"])


def _outcome(tokens: list[int], seconds: list[float]) -> Outcome:
    return Outcome(
        name="x", heat_tokens=tuple(tokens), heat_seconds=tuple(seconds), rounds=1, rows=1,
        bypassed=0,
    )  # fmt: skip


def test_standard_error_of_a_speed_ratio_is_that_of_many_races():
    rng, heats = np.random.default_rng(0), 8
    ratios, errors = [], []
    for _ in range(2000):
        spell = rng.normal(1.0, 0.2, heats)  # of the machine, the same for both
        mine, other = (spell + rng.normal(0.0, 0.03, heats) for _ in range(2))
        ratio, error = speed_ratio(
            _outcome([90] * heats, mine.tolist()), _outcome([100] * heats, other.tolist())
        )
        ratios.append(ratio)
        errors.append(error)
    assert np.mean(ratios) == pytest.approx(0.9, abs=2e-3)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(ratios), rel=0.1)


def test_speed_ratio_of_one_heat_has_no_error():
    ratio, error = speed_ratio(_outcome([30], [2.0]), _outcome([10], [1.0]))
    assert ratio == 1.5 and math.isnan(error)
