"""Pallas kernels, each beside the plain reference that defines its answer.

One folder per operation: `ref.py` is the answer in plain JAX, `kernel.py` the Pallas body, and
`ops.py` the public function, which checks its arguments and picks an implementation. The package
stands alone: it never imports `dspark_jax`.

  block_attention      a few rows per request over contiguous or paged context and each other
  window_attention     a DeepSeek draft's block over its window, with sinks
  markov_sample        bias of the token before, temperature and sample, without a [R, V] bias
  speculative_accept   accepted prefix and bonus token, from logits that are read once

Shared by them: `dispatch` (which implementation runs), `chips` (block sizes), `vocab` (what a pass
over a row of logits leaves behind, and how shards of it merge), `noise`, `matmul`.
"""
