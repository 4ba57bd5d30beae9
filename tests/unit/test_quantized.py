"""FP4, FP8 and E8M0 numbers, and the reader that hides them."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.quantized import (
    DequantisingReader,
    decode_scales,
    dequantise_fp4,
    dequantise_fp8,
    unpack_fp4,
)
from dspark_jax.checkpoint.safetensors import TensorReader

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)  # codes 0..15


def test_every_fp4_code_in_both_nibbles():
    packed = np.arange(256, dtype=np.uint8).view(np.int8).reshape(4, 64)
    values = unpack_fp4(packed)
    assert values.shape == (4, 128) and values.dtype == np.float32
    for byte in range(256):
        low, high = values.reshape(-1)[2 * byte : 2 * byte + 2]
        expected = np.array([E2M1[byte % 16], E2M1[byte // 16]], np.float32)
        np.testing.assert_array_equal([low, high], expected)
        assert (np.signbit([low, high]) == np.signbit(expected)).all()


def test_every_scale_byte():
    scales = decode_scales(np.arange(256, dtype=np.uint8))
    for byte in range(255):
        assert scales[byte] == 2.0 ** (byte - 127), byte
    assert np.isnan(scales[255])
    of_type = decode_scales(np.array([1.0, 0.25, 8.0]).astype(jnp.float8_e8m0fnu))
    np.testing.assert_array_equal(of_type, [1.0, 0.25, 8.0])


@pytest.mark.parametrize("block", [(32, 32), (128, 128), (3, 5)])
@pytest.mark.parametrize("shape", [(64, 128), (37, 70), (1, 129), (130, 3)])
def test_fp8_blocks_with_ragged_edges(block, shape, rng):
    values = rng.normal(0, 50, shape).astype(jnp.float8_e4m3fn)
    grid = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    exponents = rng.integers(100, 150, grid).astype(np.uint8)
    out = dequantise_fp8(values, exponents, block)
    assert out.shape == shape and out.dtype == np.float32
    for i, j in np.ndindex(shape):
        scale = 2.0 ** (int(exponents[i // block[0], j // block[1]]) - 127)
        assert out[i, j] == float(values[i, j]) * scale


@pytest.mark.parametrize("columns", [32, 64, 70, 2])
def test_fp4_groups_with_ragged_edges(columns, rng):
    packed = rng.integers(-128, 128, (5, columns // 2)).astype(np.int8)
    exponents = rng.integers(100, 150, (5, -(-columns // 32))).astype(np.uint8)
    out = dequantise_fp4(packed, exponents)
    assert out.shape == (5, columns)
    for i, j in np.ndindex(out.shape):
        byte = int(packed[i, j // 2]) % 256
        code = byte % 16 if j % 2 == 0 else byte // 16
        assert out[i, j] == np.float32(E2M1[code]) * 2.0 ** (int(exponents[i, j // 32]) - 127)


def _write(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> TensorReader:
    """A file of zeros with tensors of any stored type: name -> (type, shape)."""
    sizes = {"F32": 4, "BF16": 2}
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * sizes.get(dtype, 1)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(end)
    (folder / "model.safetensors").write_bytes(data)
    return TensorReader(folder)


GOOD = {
    "a.weight": ("F8_E4M3", (40, 70)),
    "a.scale": ("F8_E8M0", (2, 3)),
    "b.weight": ("I8", (6, 35)),
    "b.scale": ("F8_E8M0", (6, 3)),
    "c.norm.weight": ("BF16", (5,)),
    "hc_attn_scale": ("F32", (3,)),
    "d.engram.embed.weight": ("F8_E4M3", (40, 64)),
    "d.engram.embed.scale": ("F8_E8M0", (40, 2)),
}


def test_reader_hides_scales_and_gives_true_shapes(tmp_path):
    reader = DequantisingReader(_write(tmp_path, GOOD), block=(32, 32))
    names = {"a.weight", "b.weight", "c.norm.weight", "hc_attn_scale", "d.engram.embed.weight"}
    assert reader.names() == names
    shapes = {name: reader.shape(name) for name in names}
    assert shapes["a.weight"] == (40, 70) and shapes["b.weight"] == (6, 70)
    assert all(reader.read(name).shape == shapes[name] for name in names)
    assert reader.dtype("b.weight") == "F32" and reader.dtype("c.norm.weight") == "BF16"
    assert reader.read("b.weight").dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a.scale": None}, r"a\.weight is F8_E4M3 but has no a\.scale"),
        ({"b.weight": None}, r"b\.scale is a scale without a quantised weight"),
        ({"a.scale": ("F8_E8M0", (40, 3))}, r"a\.scale has shape \[40, 3\], expected \[2, 3\]"),
        ({"b.scale": ("F8_E8M0", (6, 2))}, r"b\.scale has shape \[6, 2\], expected \[6, 3\]"),
        ({"a.scale": ("F32", (2, 3))}, r"a\.scale is F32, expected one of"),
        ({"a.weight": ("F8_E5M2", (40, 70))}, r"a\.weight is F8_E5M2, expected one of"),
        ({"b.weight": ("I8", (6, 5, 7))}, r"b\.weight is I8 .*expected a matrix"),
    ],
)
def test_reader_refuses_what_does_not_fit(tmp_path, changes, message):
    tensors = {k: v for k, v in (GOOD | changes).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        DequantisingReader(_write(tmp_path, tensors), block=(32, 32))


def test_fp8_needs_a_block_size(tmp_path):
    with pytest.raises(ValueError, match="config.json gives no weight_block_size"):
        DequantisingReader(_write(tmp_path, GOOD), block=None)
