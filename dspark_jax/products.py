"""Products of rows with weights, in forms in which each platform reads the weights fast.

A few rows leave a product waiting for memory. XLA for CPU shares the plain form of it badly between
cores, so there a product of few rows is written as a batch of equal parts, which run side by side.
"""

import math

import jax
import jax.numpy as jnp

from dspark_jax.sharding import is_split

# Found by timing the demo's products on two cores.
_LARGE = 2**18  # weights; fewer stay in a core's cache, and parts gain nothing
_INNER_PARTS = 4  # of the contracted axis
_SINGLE_ROWS = 2  # up to so many rows are multiplied one after another, in parts
_HEAD_PARTS = 8  # of the vocabulary
_HEAD_ROWS = 64  # up to so many rows meet the vocabulary in parts


def project(x: jax.Array, kernel: jax.Array, *, inner: int = 1) -> jax.Array:
    """A matrix product over the last axes of x and the first of the kernel, as one 2-D matmul.

    The same as an einsum; but with one row XLA for CPU runs an einsum over split axes at a third
    of the speed of the flat product.

    Args:
      x: [.., *contracted].
      kernel: [*contracted, *out].
      inner: how many axes are contracted.

    Returns:
      [.., *out].
    """
    if is_split():  # flattened, an axis that is split would have to be gathered
        return jnp.tensordot(x, kernel, axes=inner)
    batch, out = x.shape[: x.ndim - inner], kernel.shape[inner:]
    size = math.prod(kernel.shape[:inner])
    rows, matrix = x.reshape(-1, size), kernel.reshape(size, -1)
    if rows.shape[0] <= _SINGLE_ROWS and matrix.size >= _LARGE:
        y = jax.lax.platform_dependent(rows, matrix, cpu=_multiply_in_parts, default=jnp.matmul)
    else:
        y = rows @ matrix
    return y.reshape(*batch, *out)


def _multiply_in_parts(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """[R, K] times [K, N]: every row a sum of products over parts of K."""
    parts = math.gcd(_INNER_PARTS, matrix.shape[0])
    split = matrix.reshape(parts, -1, matrix.shape[1])

    def multiply(row: jax.Array) -> jax.Array:
        sums = jnp.einsum(
            "pk,pkn->pn", row.reshape(parts, -1), split, preferred_element_type=jnp.float32
        )
        return sums.sum(axis=0).astype(row.dtype)

    return jnp.stack([multiply(row) for row in rows])


def score_vocabulary(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """LM head: float32 logits from hidden states.

    A single row is a product and a sum, which XLA for CPU runs on all cores at the speed of memory;
    its matrix-vector product takes twice as long.

    Args:
      hidden: [.., D].
      head: [V, D].

    Returns:
      f32[.., V].
    """
    batch = hidden.shape[:-1]
    rows = math.prod(batch)
    if rows == 1:
        row = jnp.vecdot(head, hidden.reshape(-1), preferred_element_type=jnp.float32)
        return row.reshape(*batch, -1)
    if rows > _HEAD_ROWS or head.size < _LARGE or is_split():
        return _score(hidden, head)
    return jax.lax.platform_dependent(hidden, head, cpu=_score_in_parts, default=_score)


def _score(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def _score_in_parts(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """`_score` over equal parts of the vocabulary."""
    size, width = head.shape
    split = head.reshape(math.gcd(_HEAD_PARTS, size), -1, width)
    rows = hidden.reshape(-1, width)
    logits = jnp.einsum("rd,pvd->prv", rows, split, preferred_element_type=jnp.float32)
    return jnp.swapaxes(logits, 0, 1).reshape(*hidden.shape[:-1], size)
