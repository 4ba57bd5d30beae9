"""Which implementation runs, and that the simulated TPU of the tests sees a race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import BLOCK_SIZES, block_sizes
from pallas_kernels.dispatch import select


def _double(x: jax.Array, *, interpret: bool | pltpu.InterpretParams) -> jax.Array:
    """2x, where the copy of x into VMEM is waited for too late."""

    def body(source, out, buffer, semaphore):
        copy = pltpu.make_async_copy(source, buffer, semaphore)
        copy.start()
        out[...] = 2 * buffer[...]
        copy.wait()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=interpret,
    )(x)


def test_a_race_is_reported(capfd):
    said = ""
    try:
        jax.block_until_ready(select("interpret", _double, jnp.negative, jnp.ones((8, 128))))
    except jax.errors.JaxRuntimeError as error:  # newer JAX raises, older only prints
        said = str(error)
    assert "RACE DETECTED" in said + "".join(capfd.readouterr())


def test_auto_takes_the_reference_off_tpu_and_for_refused_shapes():
    x = np.ones((8, 128), np.float32)
    np.testing.assert_array_equal(select("auto", _double, jnp.negative, x), -x)

    def refusing(x: jax.Array, *, interpret: bool) -> jax.Array:
        raise NotImplementedError("too odd")

    np.testing.assert_array_equal(select("auto", refusing, jnp.negative, x), -x)
    with pytest.raises(NotImplementedError, match="too odd"):
        select("pallas", refusing, jnp.negative, x)


def test_sizes_are_those_of_the_smallest_chip_where_there_is_none():
    assert block_sizes() == BLOCK_SIZES["v5e"]
