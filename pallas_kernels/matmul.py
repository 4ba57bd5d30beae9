"""The one matrix product kernels use."""

import jax
import jax.numpy as jnp


def dot(a: jax.Array, b: jax.Array, *, contract: int) -> jax.Array:
    """Product of two matrices over a's last axis; float32 operands keep their precision.

    Args:
      a: [m, k].
      b: [k, n], or [n, k] with contract 1.
      contract: b's axis that is summed over.

    Returns:
      f32[m, n].
    """
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
