"""SPS tables: three file formats, what is refused, and the staircase."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax.chips import CHIPS
from dspark_jax.sps import Curve, SpsKey, SpsTable, load_sps_table, roofline_table

KEY = SpsKey(
    device="1x cpu", model="tiny", draft="1 layer, 4 drafts", dtype="float32",
    versions=(("jax", "0.10.2"),),
)  # fmt: skip


def table(**fields) -> SpsTable:
    """Two widths, two context lengths, made for KEY."""
    curves = (
        Curve.of(2, 0, {2: 0.010, 6: 0.011, 10: 0.016}),
        Curve.of(4, 0, {4: 0.012, 12: 0.014, 20: 0.020}),
        Curve.of(2, 100, {2: 0.020, 6: 0.021, 10: 0.026}),
        Curve.of(4, 100, {4: 0.022, 12: 0.024, 20: 0.030}),
    )
    return SpsTable(**{"key": KEY, "source": "measured", "curves": curves} | fields)


def test_staircase_pays_for_the_bucket_it_needs():
    steps = table().steps_per_s(2, 4, context_len=0)
    assert steps.dtype == np.float32 and steps.shape == (11,)
    np.testing.assert_allclose(1 / steps[:3], 0.010, rtol=1e-6)
    np.testing.assert_allclose(1 / steps[3:7], 0.011, rtol=1e-6)
    np.testing.assert_allclose(1 / steps[7:], 0.016, rtol=1e-6)


def test_entry_0_is_a_round_without_drafts_if_that_was_timed():
    curve = Curve.of(2, 0, {2: 0.010, 10: 0.016}, 0.008)
    made = table(curves=(curve,))
    np.testing.assert_allclose(1 / made.steps_per_s(2, 4)[:4], [0.008, 0.01, 0.01, 0.016],
                               rtol=1e-6)  # fmt: skip
    with pytest.raises(ValueError, match="positive"):
        Curve.of(2, 0, {2: 0.010}, 0.0)


def test_requests_between_widths_pay_for_the_wider_program():
    steps = table().steps_per_s(3, 4, context_len=0)
    assert steps.shape == (16,)
    np.testing.assert_allclose(1 / steps[[3, 4, 5, 12, 13, 15]], [.012, .012, .014, .014, .02, .02],
                               rtol=1e-6)  # fmt: skip


def test_context_is_interpolated_and_clamped():
    seconds = [table().seconds(2, np.array([7]), c)[0] for c in (0, 25, 100, 1000)]
    np.testing.assert_allclose(seconds, [0.016, 0.0185, 0.026, 0.026])


@pytest.mark.parametrize("requests, num_drafts", [(5, 1), (4, 5)])
def test_what_was_not_profiled_is_not_invented(requests, num_drafts):
    with pytest.raises(ValueError, match="do not fit. Profile again"):
        table().steps_per_s(requests, num_drafts)


def test_noise_cannot_make_a_bucket_cheaper_than_a_smaller_one():
    curve = Curve.of(1, 0, {5: 0.9, 1: 1.0, 3: 1.2})
    assert curve.verify_tokens == (1, 3, 5)
    assert curve.seconds == (1.0, 1.2, 1.2)
    with pytest.raises(ValueError, match="more rows take less time"):
        Curve(requests=1, context_len=0, verify_tokens=(1, 3), seconds=(1.0, 0.9))


@pytest.mark.parametrize(
    "tokens, seconds, words",
    [
        ((1, 3), (1.0,), "2 verify_tokens and 1 seconds"),
        ((3, 3), (1.0, 2.0), "must increase"),
        ((0, 3), (1.0, 2.0), "from 1 up"),
        ((1, 3), (0.0, 2.0), "positive"),
        ((1, 3), (1.0, float("nan")), "positive"),
    ],
)
def test_curves_that_are_none(tokens, seconds, words):
    with pytest.raises(ValueError, match=words):
        Curve(requests=1, context_len=0, verify_tokens=tokens, seconds=seconds)


def test_grid_must_be_complete():
    with pytest.raises(ValueError, match="expected each of"):
        table(curves=table().curves[:3])


def test_round_trip(tmp_path):
    table().save(tmp_path / "sps.json")
    assert load_sps_table(tmp_path / "sps.json") == table()
    assert json.loads((tmp_path / "sps.json").read_text())["key"]["versions"] == {"jax": "0.10.2"}


def read(tmp_path, data) -> SpsTable:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    return load_sps_table(path)


def test_sglang_table_is_rounded_down(tmp_path):
    loaded = read(tmp_path, {
        "sample_batch_tokens": [8, 16, 32], "sample_steps_per_sec": [100.0, 110.0, 50.0],
        "max_batch_tokens": 64,
    })  # fmt: skip
    steps = loaded.steps_per_s(4, 7)
    np.testing.assert_allclose(steps[[4, 8, 15, 16, 31, 32]], [100, 100, 100, 100, 100, 50])


def test_sglang_additive(tmp_path):
    loaded = read(tmp_path, {
        "bias_seconds": 0.001, "bs_probes": [1, 5], "alpha_seconds": [0.002, 0.004],
        "m_probes": [4, 8, 16], "theta_seconds": [0.01, 0.02, 0.03],
    })  # fmt: skip
    seconds = loaded.seconds(3, np.array([3, 4, 6, 12, 40]))
    np.testing.assert_allclose(seconds, 0.001 + 0.003 + np.array([0.01, 0.01, 0.015, 0.025, 0.03]))
    np.testing.assert_allclose(loaded.seconds(9, np.array([8])), 0.001 + 0.004 + 0.02)


def test_tensorrt_llm(tmp_path):
    data = {
        "token_counts": [10, 20], "step_time_ms": [4.0, 8.0], "fixed_overhead_ms": 1.0,
        "batch_sizes": [2, 4], "batch_overhead_ms": [0.5, 1.5],
    }  # fmt: skip
    np.testing.assert_allclose(read(tmp_path, data).seconds(3, np.array([15])), 0.008)
    bare = {k: data[k] for k in ("token_counts", "step_time_ms")}
    np.testing.assert_allclose(read(tmp_path, bare).seconds(9, np.array([15])), 0.006)


@pytest.mark.parametrize(
    "data, words",
    [
        ({"steps": [1]}, "has the keys"),
        ([1, 2], "has the keys"),
        ({"format": "other", "curves": []}, "damaged.*format 'other'"),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0]}, "equally long"),
        ({"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0]}, "damaged"),
        ({"token_counts": [], "step_time_ms": []}, "not empty"),
    ],
)
def test_bad_files_are_explained(tmp_path, data, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, data)


def test_missing_file_and_no_json(tmp_path):
    with pytest.raises(FileNotFoundError, match="profile_sps"):
        load_sps_table(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_sps_table(tmp_path / "bad.json")


@pytest.mark.parametrize("field", ["device", "model", "draft", "dtype"])
def test_a_table_for_something_else_is_refused_with_the_reason(field):
    other = dataclasses.replace(KEY, **{field: "another"})
    with pytest.raises(ValueError, match=f"made for {field} '.*', this is 'another'"):
        table().check(other, print)


def test_check_tells_what_it_lets_pass():
    told = []
    table().check(KEY, told.append)
    assert told == []
    table().check(dataclasses.replace(KEY, versions=(("jax", "9"),)), told.append)
    assert len(told) == 1 and "'jax': '9'" in told[0]
    told.clear()
    table(key=SpsKey(), source="modelled").check(KEY, told.append)
    assert [("does not say" in t, "modelled" in t) for t in told] == [(True, False), (False, True)]


def test_flat_table_is_refused():
    flat = table(curves=(Curve.of(2, 0, {2: 0.01, 10: 0.01}),))
    assert flat.is_flat
    with pytest.raises(ValueError, match="flat"):
        flat.check(KEY, print)


def test_roofline_is_the_longer_of_moving_and_computing():
    chip, told = CHIPS["v5e"], []
    costs = {
        (64, 2, 2): {"flops": 0.1e-3 * chip.flops_per_s, "bytes accessed": 2e-3 * chip.bytes_per_s},
        (64, 2, 10): {"flops": 5e-3 * chip.flops_per_s, "bytes accessed": 2e-3 * chip.bytes_per_s},
    }
    made = roofline_table(costs, chip, KEY, told.append, overhead_s=1e-3)
    np.testing.assert_allclose(made.seconds(2, np.array([2, 3, 10])), [3e-3, 6e-3, 6e-3])
    assert made.source == "modelled" and made.key.device == chip.name
    assert len(told) == 1 and told[0].startswith("warning")
    del costs[64, 2, 10]
    roofline_table(costs, chip, KEY, told.append)
    assert "verify all" in told[-1]
    with pytest.raises(ValueError, match="no cost analysis"):
        roofline_table({(0, 1, 1): {}}, chip, KEY, told.append)
