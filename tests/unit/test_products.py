"""Products with weights: every form against NumPy in float64, and which platform takes which."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.products import project, score_vocabulary


def arrays(*shapes, dtype=jnp.float32):
    """Random arrays of the given shapes."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def assert_product(got, x, kernel, dtype):
    """got [.., *out] is x [.., K] times kernel [K, *out].

    The error is that of K float32 additions in any order, and of one rounding to the type.
    """
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    exact = np.tensordot(x, kernel, axes=1)
    sizes = np.tensordot(np.abs(x), np.abs(kernel), axes=1)
    assert got.shape == exact.shape
    bound = x.shape[-1] / 2 * jnp.finfo(jnp.float32).eps + jnp.finfo(dtype).eps
    assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= float(bound) * sizes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [(1, 1), (2,), (3,)])
@pytest.mark.parametrize(("width", "out"), [(520, 520), (518, 520), (517, 520), (8, 5)])
def test_project_is_the_product(rows, width, out, dtype):
    x, kernel = arrays((*rows, width), (width, 2, out // 2), dtype=dtype)
    got = jax.jit(project)(x, kernel)
    assert got.dtype == dtype
    assert_product(got, x, kernel, dtype)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_project_over_several_axes(rows):
    x, kernel = arrays((rows, 2, 3, 100), (2, 3, 100, 500))
    got = jax.jit(lambda x, kernel: project(x, kernel, inner=3))(x, kernel)
    assert_product(got, x.reshape(rows, 600), kernel.reshape(600, 500), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [(1,), (2, 5), (64,), (65,)])
@pytest.mark.parametrize("vocabulary", [2640, 2636, 2633, 16])
def test_logits_are_the_product(rows, vocabulary, dtype):
    hidden, head = arrays((*rows, 100), (vocabulary, 100), dtype=dtype)
    got = jax.jit(score_vocabulary)(hidden, head)
    assert got.dtype == jnp.float32
    assert_product(got, hidden, head.T, jnp.float32)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_have_the_gradients_of_products(rows):
    x, kernel, head = arrays((rows, 512), (512, 520), (600, 520))
    kernel, head = kernel / 30, head / 30

    def formed(x, kernel, head):
        return jnp.sum(jnp.sin(score_vocabulary(project(x, kernel), head)))

    def plain(x, kernel, head):
        return jnp.sum(jnp.sin(x @ kernel @ head.T))

    got, want = (jax.grad(f, argnums=(0, 1, 2))(x, kernel, head) for f in (formed, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("function", "shapes", "batched"),
    [
        (project, ((1, 512), (512, 512)), {"cpu": 1, "tpu": 0}),
        (project, ((2, 512), (512, 512)), {"cpu": 2, "tpu": 0}),
        (project, ((3, 512), (512, 512)), {"cpu": 0, "tpu": 0}),
        (project, ((1, 512), (512, 511)), {"cpu": 0, "tpu": 0}),
        (score_vocabulary, ((64, 64), (4096, 64)), {"cpu": 1, "tpu": 0}),
        (score_vocabulary, ((65, 64), (4096, 64)), {"cpu": 0, "tpu": 0}),
        (score_vocabulary, ((64, 64), (4088, 64)), {"cpu": 0, "tpu": 0}),
    ],
)
def test_only_a_cpu_multiplies_few_rows_in_parts(function, shapes, batched):
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    for platform, expected in batched.items():
        text = jax.jit(function).trace(*specs).lower(lowering_platforms=(platform,)).as_text()
        # Products over batches name them; rank 3 is that of the split weights.
        found = re.findall(r"dot_general.*\(.*tensor<\d+x\d+x\d+xf32>", text)
        assert len(found) == expected, (platform, text)
