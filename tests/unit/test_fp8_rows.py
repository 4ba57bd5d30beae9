"""Rows rounded as an FP8 window would hold them, against NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.layers import round_to_fp8
from tests.deepseek_models import deepseek_config, deepseek_params

# family -> head_dim, rotated, rounded dimensions, group
FORMATS = {"deepseek_v41": (64, 8, 64, 32), "deepseek_v4": (136, 8, 128, 64)}


def _round(row: np.ndarray, group: int) -> np.ndarray:
    """One row, group by group, with Python's own powers of two."""
    out = []
    for values in np.split(row.astype(np.float32), len(row) // group):
        largest = max(float(np.abs(values).max()), 1e-4)
        scale = 2.0 ** math.ceil(math.log2(np.float32(largest) / np.float32(448)))
        codes = np.clip(values / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        out.append(codes.astype(np.float32) * np.float32(scale))
    return np.concatenate(out)


@pytest.mark.parametrize("group", [32, 64])
def test_rounding_against_numpy(group, rng):
    rows = rng.normal(size=(40, 128)) * 10.0 ** rng.integers(-7, 6, (40, 1))
    rows[0], rows[1, ::7] = 0, 448 * 2.0**5  # nothing, and exactly the largest code
    rows = rows.astype(np.float32)
    got = np.asarray(jax.jit(round_to_fp8, static_argnums=1)(rows, group))
    np.testing.assert_array_equal(got, np.stack([_round(row, group) for row in rows]))
    again = np.asarray(round_to_fp8(got, group))
    np.testing.assert_array_equal(again, got)  # already on the grid
    assert 0.01 < np.abs(got - rows).max() / np.abs(rows).max() < 0.1


def test_half_precision_rows_stay_half(rng):
    row = rng.normal(size=(1, 64)).astype(jnp.bfloat16)
    got = round_to_fp8(jnp.asarray(row), 32)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32)[0], _round(row[0], 32))


@pytest.mark.parametrize("family", FORMATS)
def test_the_switch_rounds_the_rows_a_family_rounds(family, rng):
    head_dim, rotated, rounded, group = FORMATS[family]
    config = deepseek_config(family, stages=1, head_dim=head_dim, qk_rope_head_dim=rotated)
    plain = DeepseekDraft(config=config)
    switched = DeepseekDraft(config=dataclasses.replace(config, round_kv_to_fp8=True))
    params = deepseek_params(config, rng)
    taps = rng.normal(size=(1, 5, 2 * config.hidden_size)).astype(np.float32)
    positions = np.arange(5)[None]
    before, after = (
        np.asarray(jax.jit(draft.context_kv)(params, taps, positions)[0][0, 0])
        for draft in (plain, switched)
    )
    expected = before.copy()
    expected[:, :rounded] = [_round(row, group) for row in before[:, :rounded]]
    np.testing.assert_array_equal(after, expected)
    assert (after[:, :rounded] != before[:, :rounded]).mean() > 0.5


def test_sizes_that_have_no_such_format_are_refused():
    config = deepseek_config("deepseek_v4")
    with pytest.raises(ValueError, match="6 rounded dimensions of a row to be a multiple of 64"):
        dataclasses.replace(config, round_kv_to_fp8=True)
