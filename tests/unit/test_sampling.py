"""The warp against a sort-based float64 twin, and what random keys depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import (
    GREEDY_BELOW,
    Purpose,
    any_sampled,
    draw,
    gumbel,
    position_keys,
    round_keys,
    sample_plain,
    warp,
)
from dspark_jax.types import SamplingParams

V = 11
jitted_warp = jax.jit(warp)


def sampling_of(rows: list[dict]) -> SamplingParams:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    rows = [{**neutral, **row} for row in rows]

    def column(name: str, dtype) -> jax.Array:
        return jnp.asarray([row[name] for row in rows], dtype)

    return SamplingParams(
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        seed=column("seed", jnp.uint32),
    )


def warped(logits, rows: list[dict]) -> np.ndarray:
    """Probabilities out of the jitted warp, one row of settings per request."""
    log_probs = np.asarray(jitted_warp(jnp.asarray(logits), sampling_of(rows)))
    assert not np.isnan(log_probs).any()
    return np.exp(log_probs.astype(np.float64))


def warp_numpy(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Sorts, cuts and renormalises one row; equal logits stand or fall together."""
    logits = np.asarray(logits, np.float64)
    if temperature < GREEDY_BELOW:
        return np.eye(len(logits))[np.argmax(logits)]
    x = logits / temperature
    kept = np.ones(len(x), bool)
    if top_k > 0:
        kept &= x >= np.sort(x)[::-1][min(top_k, len(x)) - 1]
    probs = np.where(kept, np.exp(x - x.max()), 0.0)
    probs /= probs.sum()
    if top_p < 1:
        mass, edge = 0.0, np.inf
        for value in np.unique(x[kept])[::-1]:  # level by level, ties at once
            if mass >= top_p:
                break
            mass += probs[x == value].sum()
            edge = value
        kept &= x >= edge
    kept &= probs >= min_p * probs.max()
    probs = np.where(kept, probs, 0.0)
    return probs / probs.sum()


def compare(logits: np.ndarray, rows: list[dict]) -> None:
    got = warped(np.asarray(logits, np.float32), rows)
    for row, settings, probs in zip(logits, rows, got, strict=True):
        want = warp_numpy(row, **settings)
        np.testing.assert_array_equal(probs > 0, want > 0, err_msg=f"{settings} {row}")
        np.testing.assert_allclose(probs, want, rtol=2e-5, atol=1e-7, err_msg=f"{settings}")


SETTINGS = {
    "neutral": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "top_k 1": {"top_k": 1},
    "top_k 4": {"top_k": 4},
    "top_k V": {"top_k": V},
    "top_k > V": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "top_p tiny": {"top_p": 1e-6},
    "top_p almost 1": {"top_p": 0.9999},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "top_k then top_p": {"top_k": 5, "top_p": 0.7},
    "all": {"temperature": 0.8, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
    "all, hot": {"temperature": 1.7, "top_k": 3, "top_p": 0.95, "min_p": 0.3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_warp_of_random_logits(name: str):
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2.0, size=(200, V)).astype(np.float32)
    compare(logits, [SETTINGS[name]] * 200)


@pytest.mark.parametrize("name", SETTINGS)
def test_warp_of_tied_logits(name: str):
    """Few values: k-th place and nucleus edge fall inside groups of equal logits."""
    rng = np.random.default_rng(1)
    logits = np.log2(rng.integers(1, 4, (200, V))).astype(np.float32)
    if name == "greedy":  # the first of the best
        assert (warped(logits, [{"temperature": 0.0}] * 200).argmax(-1) == logits.argmax(-1)).all()
    compare(logits, [SETTINGS[name]] * 200)


@pytest.mark.parametrize("name", SETTINGS)
def test_warp_of_forbidden_tokens(name: str):
    """Logits of -inf stay at probability 0, also when only one token is left."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(200, V)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.6] = -np.inf
    logits[:, 3] = 0.25
    logits[0, np.arange(V) != 3] = -np.inf
    got = warped(logits, [SETTINGS[name]] * 200)
    assert (got[np.isneginf(logits)] == 0).all()
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-5)
    for row, probs in zip(logits, got, strict=True):
        want = warp_numpy(row, **SETTINGS[name])
        np.testing.assert_allclose(probs, want, rtol=2e-5, atol=1e-7)


def test_settings_mix_in_one_batch():
    rng = np.random.default_rng(3)
    rows = [dict(row) for row in SETTINGS.values()] * 20
    compare(rng.normal(scale=2.0, size=(len(rows), V)).astype(np.float32), rows)


def test_a_neighbours_settings_change_nothing():
    """A row warped beside truncating neighbours equals the row warped among neutral ones."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(4, V)).astype(np.float32)
    among = [{"top_k": 2}, {"temperature": 0.7}, {"top_p": 0.3}, {"temperature": 0.0}]
    got = warped(logits, among)[1]
    np.testing.assert_array_equal(got, warped(logits, [{"temperature": 0.7}] * 4)[1])


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_top_p_edge(kept: int, below: bool):
    """Just under the mass of the first n tokens keeps n; just over it takes one more."""
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    edge = probs[:kept].sum() + (-1e-4 if below else 1e-4)
    got = warped(np.log(probs)[None].astype(np.float32), [{"top_p": edge}])[0]
    assert (got > 0).sum() == kept + (not below)


def test_top_p_takes_at_least_the_asked_mass_of_what_top_k_left():
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    got = warped(np.log(probs)[None].astype(np.float32), [{"top_k": 2, "top_p": 0.5}])[0]
    np.testing.assert_allclose(got, [1, 0, 0, 0], atol=1e-6)  # .4 of .7 is above one half
    got = warped(np.log(probs)[None].astype(np.float32), [{"top_p": 0.5}])[0]
    np.testing.assert_allclose(got, [4 / 7, 3 / 7, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}])
def test_zeros_of_either_sign_tie(settings: dict):
    """-0.0 equals 0.0: equal logits are kept or dropped together."""
    logits = np.array([[0.0, -0.0, -0.0, -3.0], [-0.0, 0.0, 0.0, -3.0]], np.float32)
    got = warped(logits, [settings] * 2)
    np.testing.assert_allclose(got[:, :3], 1 / 3, rtol=1e-5)


def test_temperatures_zero_tiny_and_one_in_one_batch():
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=30.0, size=(3, V)).astype(np.float32)
    rows = [{"temperature": t} for t in (0.0, 1e-6, 1.0)]
    got = warped(logits, rows)
    for r in (0, 1):
        np.testing.assert_array_equal(got[r], np.eye(V)[logits[r].argmax()])
    np.testing.assert_allclose(got[2], warp_numpy(logits[2]), rtol=2e-5, atol=1e-7)
    assert bool(any_sampled(sampling_of(rows)))
    assert not bool(any_sampled(sampling_of(rows[:2])))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 2e-5, 0.01, 1.0, 100.0])
def test_no_nan_at_any_scale(scale: float, temperature: float):
    rng = np.random.default_rng(6)
    logits = (scale * rng.normal(size=(len(SETTINGS), V))).astype(np.float32)
    rows = [{**row, "temperature": temperature} for row in SETTINGS.values()]
    got = warped(logits, rows)
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 4, 16, 500])
def test_min_p_of_one_keeps_the_best_token_whatever_the_rounding(batch: int):
    """The best token is the reference itself, also when logits / T rounds differently twice."""
    rng = np.random.default_rng(11)
    for _ in range(5):
        logits = rng.normal(scale=3, size=(batch, V)).astype(np.float32)
        rows = [{"min_p": 1.0, "temperature": t} for t in rng.uniform(0.05, 3, batch)]
        np.testing.assert_array_equal(warped(logits, rows), np.eye(V)[logits.argmax(-1)])


def test_greedy_draws_use_no_noise():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]])
    row = warp(logits, sampling_of([{"temperature": 0.0}]))
    for noise in (0.0, 50.0, -50.0):
        assert int(draw(row, jnp.array([[noise, 0.0, 50.0, noise]]))[0]) == 1


def test_bfloat16_logits_are_warped_in_float32():
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(5, V)), jnp.bfloat16)
    out = warp(logits, sampling_of([{"temperature": 0.7}] * 5))
    assert out.dtype == jnp.float32
    wide = warp(logits.astype(jnp.float32), sampling_of([{"temperature": 0.7}] * 5))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(wide))


def test_extra_axes_use_the_settings_of_their_request():
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(3, 4, V)).astype(np.float32)
    rows = [{"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.5, "temperature": 2.0}]
    got = warped(logits, rows)
    for r, row in enumerate(rows):
        np.testing.assert_allclose(got[r], warped(logits[r], [row] * 4), rtol=1e-6)


def data(keys: jax.Array) -> list[tuple[int, ...]]:
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).tolist()]


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def test_keys_do_not_depend_on_slot_or_batch_size():
    seeds = jnp.array([7, 8, 7, 9], jnp.uint32)
    keys = data(position_keys(seeds, ints(5, 5, 5, 6)))
    assert keys[0] == keys[2]
    assert keys[0] == data(position_keys(seeds[:1], ints(5)))[0]
    for purpose in Purpose:
        keys = data(round_keys(seeds, ints(3, 3, 3, 3), ints(5, 5, 5, 6), purpose))
        assert keys[0] == keys[2]
        assert keys[0] == data(round_keys(seeds[2:3], ints(3), ints(5), purpose))[0]


def test_noise_does_not_depend_on_batch_size():
    keys = position_keys(jnp.arange(6, dtype=jnp.uint32), jnp.arange(6))
    whole = np.asarray(gumbel(keys, V))
    for r in range(6):
        np.testing.assert_array_equal(whole[r], np.asarray(gumbel(keys[r : r + 1], V))[0])


def test_all_keys_are_distinct():
    """Purpose, seed, round and position each make another key, and none equals a plain one."""
    grid = np.meshgrid([0, 1, 2**31, 2**32 - 1], [0, 1, 2, 3], [0, 1, 2, 3])
    seeds, rounds, positions = (
        jnp.asarray(x.ravel(), dtype)
        for x, dtype in zip(grid, (jnp.uint32, jnp.int32, jnp.int32), strict=True)
    )
    keys = list(set(data(position_keys(seeds, positions))))
    for purpose in Purpose:
        keys += data(round_keys(seeds, rounds, positions, purpose))
    assert len(keys) == len(set(keys)) == 4 * 64 + 16


def test_sample_plain_is_the_gumbel_max_of_the_warp():
    rng = np.random.default_rng(9)
    logits = jnp.asarray(rng.normal(size=(6, V)), jnp.float32)
    rows = [{"seed": s, "temperature": t} for s in (1, 2, 3) for t in (0.0, 1.3)]
    params, position = sampling_of(rows), jnp.arange(6)
    got = np.asarray(sample_plain(logits, params, position))
    noise = gumbel(position_keys(params.seed, position), V)
    want = np.asarray(draw(warp(logits, params), noise))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got[::2], np.asarray(logits).argmax(-1)[::2])
    alone = [
        int(sample_plain(logits[r : r + 1], sampling_of([rows[r]]), position[r : r + 1])[0])
        for r in range(6)
    ]
    assert got.tolist() == alone


def test_sample_plain_never_leaves_the_nucleus():
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    count = 5000
    params = sampling_of([{"top_p": 0.5, "seed": s} for s in range(count)])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32)), (count, 4))
    tokens = np.asarray(sample_plain(logits, params, jnp.zeros(count, jnp.int32)))
    assert set(tokens) == {0, 1}


def test_all_greedy_batch_takes_the_argmax():
    logits = jnp.asarray(np.random.default_rng(10).normal(size=(4, V)), jnp.float32)
    got = sample_plain(logits, sampling_of([{"temperature": 0.0, "top_k": 3}] * 4), jnp.arange(4))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(logits).argmax(-1))
