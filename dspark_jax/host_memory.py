"""Memory of the host that XLA's programs use between their arguments and results."""

import ctypes
import importlib.util
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_ACCELERATORS = ("libtpu", "jax_plugins")  # packages of JAX's backends beside the CPU


def keep_freed_memory() -> bool:
    """Lets the process keep memory it has freed, where programs run on the CPU.

    XLA takes the temporary memory of a program from malloc at every call and frees it afterwards.
    From 32 MiB on, glibc gives that back to the system each time, and every page of it is fetched
    and zeroed anew: some thousand page faults a round. Call this before threads are started; the
    process then stays as large as it ever was.

    Returns:
      Whether it took effect: not where JAX has an accelerator's package, whose programs have
      memory of their own, nor without glibc.
    """
    if sys.platform != "linux" or any(map(importlib.util.find_spec, _ACCELERATORS)):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1))
    return all(mallopt(option, value) == 1 for option, value in settings)
