"""How long something takes, and on what machine."""

import os
import platform
import time
from collections.abc import Callable

import jax
import numpy as np


def machine() -> str:
    """Architecture, backend and cores, to be kept with every figure."""
    return f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores"


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Of a call, to the end of what it starts on the device.

    Args:
      function: what to time; it is called once more than counts.
      repeats: calls that count.

    Returns:
      The median.
    """
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))
