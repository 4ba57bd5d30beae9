"""Experts that stay quantised: their numbers, their matmul, what it needs of memory."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.deepseek import load_deepseek_draft
from dspark_jax.checkpoint.quantized import dequantise_fp4, dequantise_fp8, quantise_fp8
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.kv_cache import WindowCache
from dspark_jax.moe import DeepseekMoe
from dspark_jax.packed import SCALE_BYTES, TILE, PackedKernel, dequantise, packed_dot, tiled_dot
from dspark_jax.sharding import MeshShape, make_mesh, param_specs, place
from tests.deepseek_models import deepseek_config, write_deepseek

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v41_tiny_quantized"
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)  # codes 0..15


def test_every_fp4_byte_and_every_usable_scale():
    low, high = SCALE_BYTES
    every = np.arange(low, high + 1, dtype=np.uint8)
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (len(every), 1))
    scales = np.repeat(every, 16)[:, None]  # each with all bytes, 16 bytes a row
    out = np.asarray(dequantise(codes, scales, form="fp4", block=(1, 32)))
    pairs = np.array([(E2M1[b % 16], E2M1[b // 16]) for b in range(256)], np.float32)
    rows = np.tile(pairs.reshape(16, 32), (len(every), 1))
    expected = rows * (2.0 ** (scales - 127.0)).astype(np.float32)
    assert out.tobytes() == expected.tobytes()  # signs of zeros included


@pytest.mark.parametrize("block", [(32, 32), (128, 128), (3, 5)])
@pytest.mark.parametrize("shape", [(64, 128), (37, 70)])
def test_fp8_with_ragged_edges(block, shape, rng):
    values = rng.normal(0, 50, (2, *shape)).astype(jnp.float8_e4m3fn)
    grid = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    scales = rng.integers(100, 150, (2, *grid)).astype(np.uint8)
    out = dequantise(values.view(np.uint8), scales, form="fp8", block=block)
    twin = [dequantise_fp8(v, s, block) for v, s in zip(values, scales, strict=True)]
    np.testing.assert_array_equal(out, np.stack(twin))


def test_fp4_groups_with_ragged_edges(rng):
    codes = rng.integers(0, 256, (7, 35)).astype(np.uint8)
    scales = rng.integers(100, 150, (7, 3)).astype(np.uint8)
    out = dequantise(codes, scales, form="fp4", block=(1, 32))
    np.testing.assert_array_equal(out, dequantise_fp4(codes, scales))


def test_quantised_fp8_is_the_nearest_within_the_smallest_scale(rng):
    values = rng.normal(0, 1, (70, 50)).astype(np.float32) * rng.lognormal(0, 4, (70, 1))
    values = values.astype(np.float32)
    values[:32, :32] = 0
    values[40, 40] = 448 * 2.0**9  # fills its scale exactly
    codes, scales = quantise_fp8(values, (32, 32))
    back = dequantise_fp8(codes.view(jnp.float8_e4m3fn), scales, (32, 32))
    for i, j in np.ndindex(scales.shape):
        cut = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
        scale, largest = 2.0 ** (int(scales[i, j]) - 127), np.abs(values[cut]).max()
        assert largest <= 448 * scale and (largest == 0 or largest > 224 * scale)
        nearest = (values[cut] / np.float32(scale)).astype(jnp.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(back[cut], nearest * np.float32(scale))
    assert back[40, 40] == values[40, 40] and scales[1, 1] == 136
    again, same_scales = quantise_fp8(back, (32, 32))
    np.testing.assert_array_equal(codes, again)
    np.testing.assert_array_equal(scales, same_scales)
    with pytest.raises(ValueError, match="infinities or NaN"):
        quantise_fp8(np.array([[1.0, np.nan]], np.float32), (32, 32))


def _kernel(rng, shape: tuple[int, ...], form: str) -> PackedKernel:
    block = (1, 32) if form == "fp4" else (32, 32)
    *lead, rows, columns = shape
    width = columns // 2 if form == "fp4" else columns
    codes = rng.integers(0, 256, (*lead, rows, width)).astype(np.uint8)
    if form == "fp8":
        codes = rng.normal(0, 9, (*lead, rows, width)).astype(jnp.float8_e4m3fn).view(np.uint8)
    grid = [-(-size // step) for size, step in zip((rows, columns), block, strict=True)]
    scales = rng.integers(118, 124, (*lead, *grid)).astype(np.uint8)
    return PackedKernel(
        codes=jnp.asarray(codes), scales=jnp.asarray(scales), form=form, block=block
    )


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_grouped_matmul_is_that_of_dequantised_matrices_bit_for_bit(form, rng):
    kernel, count = _kernel(rng, (4, 2, 40, 96), form), 3 * TILE + 10
    rows = rng.normal(size=(count, 96)).astype(np.float32)
    stack = kernel.values(jnp.float32).reshape(4, 80, 96)
    packed = jax.jit(packed_dot)

    @jax.jit
    def unpacked(rows, sizes, stack):
        return tiled_dot(rows, lambda index: stack[index], sizes, width=80)

    groups = ([3, 0, 5, 1], [0, 0, 0, count], [0, 0, 0, 0], [TILE, 2 * TILE + 1, 1, 5])
    for sizes in np.array(groups, np.int32):  # what is left of the rows is of no expert
        got = np.asarray(packed(rows, kernel, sizes))
        np.testing.assert_array_equal(got, unpacked(rows, sizes, stack))
        owner = np.repeat(np.arange(4), sizes)
        expected = np.zeros((count, 80))
        for i, expert in enumerate(owner):
            expected[i] = np.asarray(stack[expert], np.float64) @ rows[i]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
        assert not got[len(owner) :].any()


def test_the_dequantised_stack_never_exists(rng):
    """Temporaries of the compiled matmul are a matrix or two, not all of them."""
    experts, out, width = 64, 128, 256
    kernel = _kernel(rng, (experts, out, width), "fp4")
    rows, sizes = jnp.ones((24, width)), jnp.full(experts, 1, jnp.int32)
    compiled = jax.jit(packed_dot).lower(rows, kernel, sizes).compile()
    matrix = out * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * matrix
    first = jax.jit(lambda r, k, s: jax.lax.ragged_dot(r, k.values(r.dtype).swapaxes(1, 2), s))
    unpacked = first.lower(rows, kernel, sizes).compile().memory_analysis()
    assert unpacked.temp_size_in_bytes > experts * matrix  # what is avoided


def test_drafts_of_packed_experts_are_the_same_bit_for_bit(tmp_path, rng):
    """From FP4 as stored, from a converted directory, and from FP8 the converter made of it."""
    config, params, shared = load_deepseek_draft(GOLDEN)
    _, packed, _ = load_deepseek_draft(GOLDEN, experts="packed")
    for form in ("as-stored", "float8"):
        convert(GOLDEN, tmp_path / form, form=form, say=lambda line: None)
    _, converted, _ = load_deepseek_draft(tmp_path / "as-stored", experts="packed")
    _, eight, _ = load_deepseek_draft(tmp_path / "float8", experts="packed")
    kernel = packed["layers"][0]["moe"]["gate_up"]
    assert (kernel.shape, kernel.form) == ((6, 2, 32, 64), "fp4")
    assert eight["layers"][0]["moe"]["gate_up"].form == "fp8"
    jax.tree.map(np.testing.assert_array_equal, packed, converted)
    draft = DeepseekDraft(config=dataclasses.replace(config, num_stages=1, hc_sinkhorn_iters=2))
    window = WindowCache(kv=rng.normal(size=(1, 3, 16, 32)).astype(np.float32))

    @jax.jit
    def hidden(params, anchor, anchor_pos):
        params = params | {"layers": params["layers"][:1]}
        return draft.backbone(params, shared, window, anchor=anchor, anchor_pos=anchor_pos)

    at = np.array([5, 6, 200]), np.array([3, 40, 16])
    expected = hidden(params, *at)
    assert np.abs(expected).max() > 0.1
    for tree in (packed, eight):
        np.testing.assert_array_equal(hidden(tree, *at), expected)
    halved, _ = load_deepseek_draft(GOLDEN, experts="bfloat16")[1:]
    moe = halved["layers"][0]["moe"]
    assert (moe["down"].dtype, moe["shared_down"].dtype) == (jnp.bfloat16, jnp.float32)


def test_packed_experts_over_a_mesh(rng):
    """Experts on four devices, their width on two: the same sums in another order."""
    hf = {"hidden_size": 64, "moe_intermediate_size": 64, "dspark_n_routed_experts": 8}
    config = deepseek_config("deepseek_v41", **hf).moe
    plain = rng.normal(0, 0.1, (64, 8 + 3 * 64)).astype(np.float32)
    params = {
        "router": plain[:, :8],
        "bias": np.zeros(8, np.float32),
        "bias_vision": np.zeros(8, np.float32),
        "gate_up": _kernel(rng, (8, 2, 64, 64), "fp4"),
        "down": _kernel(rng, (8, 64, 64), "fp4"),
        "shared_gate_up": plain[:, 8:136].reshape(64, 2, 64),
        "shared_down": plain[:, 136:].T,
    }
    tokens = rng.normal(size=(12, 64)).astype(np.float32)

    def run(params: dict, tokens: jax.Array) -> jax.Array:
        return DeepseekMoe(config).apply({"params": params}, tokens)

    expected = jax.jit(run)(params, tokens)
    mesh = make_mesh(MeshShape(expert=4, model=2))
    spread = place(mesh, params, param_specs(params))
    assert spread["gate_up"].codes.addressable_shards[0].data.shape == (2, 2, 32, 32)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(spread, tokens)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_stay_packed_is_refused(tmp_path, rng):
    write_deepseek(tmp_path, "deepseek_v41", rng)
    with pytest.raises(ValueError, match=r"layers\.0\.moe\.gate_up of .* is F32, not quantised"):
        load_deepseek_draft(tmp_path, experts="packed")
    with pytest.raises(ValueError, match="experts='fp4'; expected one of"):
        load_deepseek_draft(tmp_path, experts="fp4")
