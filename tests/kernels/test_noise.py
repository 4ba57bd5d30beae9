"""Noise made column by column is the noise JAX makes for a whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.noise import check_noise, full_noise


def test_columns_equal_a_row_of_jax_noise():
    keys = jax.random.split(jax.random.key(3), 4)
    data = jax.random.key_data(keys)
    whole = jax.vmap(lambda key: jax.random.gumbel(key, (1000,)))(keys)
    np.testing.assert_array_equal(full_noise(data, 1000), whole)
    np.testing.assert_array_equal(full_noise(data, 77, first=900), whole[:, 900:977])
    np.testing.assert_array_equal(full_noise(whole, 1000), whole)


def test_noise_of_other_rows_is_refused():
    check_noise(jnp.zeros((3, 2), jnp.uint32), (3,), 50)
    check_noise(jnp.zeros((3, 4, 50)), (3, 4), 50)
    with pytest.raises(ValueError, match=r"noise is float32\[3, 2\]"):
        check_noise(jnp.zeros((3, 2)), (3,), 50)
    with pytest.raises(ValueError, match=r"expected float32 noise \[2, 50\]"):
        check_noise(jnp.zeros((3, 2), jnp.uint32), (2,), 50)
