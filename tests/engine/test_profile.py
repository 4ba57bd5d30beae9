"""SPS tables measured and used by an engine, and the rounds an engine records."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from dspark_jax.calibrate import Calibration
from dspark_jax.chips import CHIPS
from dspark_jax.engine.core import Engine
from dspark_jax.engine.load import Pair, load_pair
from dspark_jax.engine.profile import (
    CHAIN,
    REPEATS,
    measure_steps_per_s,
    measure_table,
    modelled_table,
    prepare_schedule,
    profiled_points,
    sps_key,
    use_table,
)
from dspark_jax.engine.record import RecordingEngine
from dspark_jax.engine.requests import Request
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sps import Curve, SpsTable, load_sps_table
from tests.models import write_draft, write_target
from tools.profile_sps import main

SLOTS, CAPACITY, DRAFTS = 1, 40, 2
PROBING = ScheduleConfig(policy="presampled", probe_every=1)


@pytest.fixture(scope="module", autouse=True)
def few_row_buckets() -> None:
    """Every number of rows is compiled here, as every one is timed."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "tiny", layers=2)
    draft = write_draft(folder / "tiny-draft", target, block_size=DRAFTS)
    return load_pair(str(target), str(draft))


@pytest.fixture(scope="module")
def engine(pair) -> RecordingEngine:
    return RecordingEngine(pair.decoder(PROBING), pair.params, slots=SLOTS, capacity=CAPACITY)


def requests(count: int) -> list[Request]:
    return [
        Request(prompt_ids=(5, 6 + i), max_tokens=11 + i, temperature=1.0, seed=i)
        for i in range(count)
    ]  # fmt: skip


def test_table_has_every_bucket_and_fills_it(engine, pair):
    told: list[str] = []
    table = measure_table(engine, sps_key(pair), [8, 1000, 2000], told.append)
    assert table.source == "measured" and table.requests == engine.programs.widths == (1,)
    assert table.context_lens == (8, CAPACITY - 2 - DRAFTS)
    for curve in table.curves:
        assert curve.verify_tokens == engine.programs.buckets(curve.requests)
    assert len(told) == 2 * len(engine.programs.buckets(1)) == 6
    assert not [t for t in told if "only" in t]


def test_rounds_are_chained_and_the_median_counts(engine, pair, monkeypatch):
    clock = iter(np.arange(1000.0))
    calls = []
    real = engine.programs.round[1]
    monkeypatch.setattr("dspark_jax.engine.profile.time.perf_counter", lambda: next(clock))
    monkeypatch.setitem(engine.programs.round, 1, lambda *a: calls.append(1) or real(*a))
    monkeypatch.setattr(engine.programs, "widths", (1,))
    table = measure_table(engine, sps_key(pair), [8])
    assert set(table.curves[0].seconds) == {1 / CHAIN}  # the clock ticks once per chain
    assert len(calls) == len(engine.programs.buckets(1)) * CHAIN * (REPEATS + 1)


def made_for(pair: Pair, **key) -> SpsTable:
    curves = (Curve.of(1, 32, {1: 0.01, 3: 0.04}),)
    return SpsTable(
        key=dataclasses.replace(sps_key(pair), **key), source="measured", curves=curves
    )


def test_table_on_file_is_used_at_the_buckets_the_engine_runs(engine, pair, tmp_path):
    path = tmp_path / "sps.json"
    made_for(pair).save(path)
    prepare_schedule(engine, pair, sps_table=str(path))
    np.testing.assert_allclose(engine.steps_per_s[1], [100, 100, 25, 25])


def test_rows_cost_what_the_bucket_costs_that_the_engine_runs(engine, pair, monkeypatch):
    curve = Curve.of(1, 32, {1: 0.01, 2: 0.02, 3: 0.04})
    monkeypatch.setattr(engine.programs, "buckets", lambda rows: (1, 3))
    use_table(engine, SpsTable(key=sps_key(pair), source="measured", curves=(curve,)))
    np.testing.assert_allclose(engine.steps_per_s[1], [100, 100, 25, 25])


def test_table_for_another_model_is_refused(engine, pair, tmp_path):
    path = tmp_path / "sps.json"
    made_for(pair, model="another").save(path)
    before = engine.steps_per_s[1].copy()
    with pytest.raises(ValueError, match="made for model 'another', this is 'tiny'"):
        prepare_schedule(engine, pair, sps_table=str(path))
    np.testing.assert_array_equal(engine.steps_per_s[1], before)


def test_temperatures_on_file_are_used(engine, pair, tmp_path, monkeypatch):
    for name in ("sts_temperatures", "sts_temperatures_presampled"):
        monkeypatch.setattr(engine, name, np.ones(DRAFTS, np.float32))  # put back afterwards
    monkeypatch.setattr(engine, "steps_per_s", dict(engine.steps_per_s))
    path, table = tmp_path / "sts.json", tmp_path / "sps.json"
    made_for(pair).save(table)
    path.write_text(json.dumps({"sts_temperatures": [2.0, 3.0]}))
    told: list[str] = []
    files = {"sps_table": str(table), "confidence_sts": str(path)}
    prepare_schedule(engine, pair, **files, progress=told.append)
    assert engine.sts_temperatures.tolist() == [2.0, 3.0]
    assert engine.sts_temperatures_presampled.tolist() == [1.0, 1.0]
    assert len(told) == 1 and "no presampled_temperatures" in told[0]
    Calibration(temperatures=(2.0, 3.0), presampled_temperatures=(4.0, 5.0)).save(path)
    prepare_schedule(engine, pair, **files, progress=told.append)
    assert engine.sts_temperatures_presampled.tolist() == [4.0, 5.0]
    assert len(told) == 1
    path.write_text(json.dumps({"temperatures": [2.0, 3.0, 4.0]}))
    with pytest.raises(ValueError, match="3 temperatures, the draft proposes 2"):
        prepare_schedule(engine, pair, **files)


def test_without_a_table_only_a_policy_that_needs_one_has_it_measured(pair, engine, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "dspark_jax.engine.profile.measure_steps_per_s",
        lambda engine, progress: measured.append(engine),
    )
    monkeypatch.setattr(engine, "decoder", pair.decoder(ScheduleConfig(policy="full")))
    prepare_schedule(engine, pair)
    assert measured == []
    monkeypatch.setattr(engine, "decoder", pair.decoder(ScheduleConfig(policy="early_stop")))
    prepare_schedule(engine, pair)
    assert measured == [engine]


def test_a_bound_on_the_drafts_bounds_what_is_measured(pair):
    schedule = ScheduleConfig(policy="early_stop", max_verify_len=1)
    engine = Engine(pair.decoder(schedule), pair.params, slots=SLOTS, capacity=CAPACITY)
    prepare_schedule(engine, pair)
    speeds = engine.steps_per_s[1]
    assert engine.programs.buckets(1) == (1, 2) and len(speeds) == DRAFTS + 2
    assert speeds[1] >= speeds[2] == speeds[3] > 0


@pytest.mark.slow
def test_rounds_that_draft_nothing_are_timed_as_such(pair, monkeypatch):
    schedule = ScheduleConfig(policy="early_stop", min_predicted_gain=0.0)
    engine = Engine(pair.decoder(schedule), pair.params, slots=SLOTS, capacity=CAPACITY)
    outputs = []

    def keep(real, *args):
        state, output = real(*args)
        outputs.append((int(output.verify_rows), bool(output.bypassed)))
        return state, output

    for programs in (engine.programs.round, engine.programs.plain):
        monkeypatch.setitem(programs, 1, functools.partial(keep, programs[1]))
    curves = measure_table(engine, sps_key(pair), [8, 12]).curves
    assert len(curves) == 2 and all(curve.undrafted_seconds is not None for curve in curves)
    kinds = [(1, False), (2, False), (3, False), (1, True)]
    timed = CHAIN * (REPEATS + 1)
    assert outputs == [kind for kind in kinds for _ in range(timed)] * 2


@pytest.mark.slow
def test_modelled_table_costs_more_with_more_rows(pair):
    told: list[str] = []
    table = modelled_table(pair, [(1, 1), (1, DRAFTS + 1)], 16, CHIPS["v6e"], told.append)
    assert table.source == "modelled" and not table.is_flat
    assert "not measured" in told[-1]


def test_profile_covers_every_program_of_an_adaptive_engine():
    rows = {1: (1, 2, 3, 4, 5), 2: (2, 4, 6, 8, 10)}
    assert profiled_points(2, 4) == [(r, b) for r, buckets in rows.items() for b in buckets]


def test_recorded_rounds_add_up_to_the_text(engine):
    asked = requests(3)
    told: list[str] = []
    traces = engine.record(asked, {"model": "tiny"}, told.append)
    assert told == [f"{i}/3 prompts decoded" for i in (1, 2, 3)]
    assert traces.num_drafts == DRAFTS
    assert np.all(np.diff(traces.prompt) >= 0) and set(traces.prompt) == {0, 1, 2}
    for i, request in enumerate(asked):
        emitted = (traces.accept_len[traces.prompt == i] + 1).sum()
        assert emitted == request.max_tokens
        wanted = traces.verify_len[traces.prompt == i]
        assert np.all(wanted[:-1] > 0) and wanted[0] == DRAFTS
    for logits in (traces.confidence_logits, traces.presampled_logits):
        assert np.isfinite(logits).all() and logits.std() > 0


def test_recorded_logits_are_those_before_the_engines_temperatures(engine, monkeypatch):
    plain = engine.record(requests(2), {})
    monkeypatch.setattr(engine, "sts_temperatures", np.array([2.0, 0.5], np.float32))
    monkeypatch.setattr(engine, "sts_temperatures_presampled", np.array([0.5, 2.0], np.float32))
    scaled = engine.record(requests(2), {})
    for name in ("confidence_logits", "presampled_logits"):
        np.testing.assert_allclose(getattr(scaled, name), getattr(plain, name), atol=1e-4)


def test_trimming_policies_are_not_recorded(engine, monkeypatch):
    trimming = ScheduleConfig(policy="threshold", confidence_threshold=0.5)
    monkeypatch.setattr(
        engine, "decoder", dataclasses.replace(engine.decoder, schedule=trimming)
    )
    with pytest.raises(ValueError, match="policy 'full' or probe_every=1"):
        engine.record(requests(1), {})


def test_confidences_that_are_not_the_drafts_are_not_recorded(engine, pair, monkeypatch):
    online = ScheduleConfig(policy="full", confidence_source="online")
    monkeypatch.setattr(engine, "decoder", pair.decoder(online))
    with pytest.raises(ValueError, match="confidence head"):
        engine.record(requests(1), {})


def test_a_flat_measurement_is_not_silent(engine, monkeypatch):
    monkeypatch.setattr(engine, "steps_per_s", dict(engine.steps_per_s))
    told: list[str] = []
    clock = iter(np.arange(1000.0))  # every chain takes one second
    monkeypatch.setattr("dspark_jax.engine.profile.time.perf_counter", lambda: next(clock))
    steps = measure_steps_per_s(engine, progress=told.append)
    np.testing.assert_allclose(steps[1], CHAIN)
    assert len(told) == 1 and "verify every draft" in told[0]


def test_written_table_loads(engine, pair, tmp_path):
    table = measure_table(engine, sps_key(pair), [8])
    table.save(tmp_path / "sps.json")
    assert load_sps_table(tmp_path / "sps.json") == table


@pytest.mark.slow
def test_profiler_writes_a_table_the_front_ends_take(tmp_path, monkeypatch, capsys):
    target = write_target(tmp_path / "tiny", layers=2)
    draft = write_draft(tmp_path / "tiny-draft", target, block_size=DRAFTS)
    out = tmp_path / "sps.json"
    arguments = ["profile_sps", "--model", str(target), "--draft", str(draft), "--slots", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--context", "8", "24", "--out", str(out)])
    main()
    table = load_sps_table(out)
    assert table.context_lens == (8, 24) and table.requests == (1,)
    assert all(curve.undrafted_seconds for curve in table.curves)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured on") and len(lines) == 3
    table.check(sps_key(load_pair(str(target), str(draft))), print)
