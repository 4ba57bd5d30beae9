"""Pallas kernels, each beside the plain reference that defines its answer.

One folder per operation: `ref.py` is the answer in plain JAX, `kernel.py` the Pallas body, and
`ops.py` the public function, which checks its arguments and picks an implementation. The package
stands alone: it never imports `dspark_jax`.
"""
