"""Programs on the CPU reuse their temporary memory."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from dspark_jax.host_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("no")
    sys.exit()
import jax, jax.numpy as jnp
x = jnp.ones((4096, 64))
step = jax.jit(lambda x: jax.lax.optimization_barrier(x @ x.T) @ x)  # 64 MiB between
faults = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # the heap takes some calls to settle
"""


def _faults(mode: str) -> str:
    command = [sys.executable, "-c", PROGRAM, mode]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_no_page_of_it_is_fetched_again():
    kept = _faults("keep")
    if kept == "no":
        pytest.skip("not on Linux with glibc and the CPU alone")
    left = int(_faults("leave"))
    assert left > 1000
    assert int(kept) < left / 10
