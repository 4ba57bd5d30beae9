"""Processes that share a mesh: how they find each other and pass messages.

Messages travel as a collective of their own, which puts them in the same order as the programs.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AUTO = "auto"  # the address of a coordinator that the cluster knows
_FIRST = 1024  # int32 values of a message's first part


def join_hosts(coordinator: str | None, num_processes: int | None, process_id: int | None) -> bool:
    """Joins the processes that share a mesh. Call it before JAX touches a device.

    Args:
      coordinator: HOST:PORT of process 0; "auto" where JAX finds out by itself (TPU pods, GKE,
        Slurm); None for a process on its own.
      num_processes: how many there are; not with "auto".
      process_id: this one, from 0; not with "auto".

    Returns:
      Whether this process leads: the only one, or process 0.

    Raises:
      ValueError: the three do not fit together.
    """
    numbers = (num_processes, process_id)
    if coordinator is None or coordinator == AUTO:
        if numbers != (None, None):
            raise ValueError(
                f"num_processes={num_processes} and process_id={process_id} go with the address "
                f"of a coordinator, HOST:PORT; got coordinator={coordinator!r}."
            )
        if coordinator is None:
            return True
        jax.distributed.initialize()
    else:
        fine = None not in numbers and 0 <= process_id < num_processes and ":" in coordinator
        if not fine:
            raise ValueError(
                f"coordinator={coordinator!r} with num_processes={num_processes} and "
                f"process_id={process_id}; expected HOST:PORT of process 0, the number of "
                "processes, and which of them this is, counted from 0."
            )
        jax.distributed.initialize(coordinator, num_processes, process_id)
    exchange()  # while all are here: some transports give a first meeting half a minute
    return jax.process_index() == 0


def agree(values: np.ndarray) -> np.ndarray:
    """What process 0 has; every process calls it at the same point."""
    if jax.process_count() == 1:
        return values
    by_process, add = _meeting()
    mine = values if jax.process_index() == 0 else np.zeros_like(values)
    spread = jax.make_array_from_process_local_data(by_process, mine[None])
    return np.asarray(add(spread))


@functools.cache
def _meeting() -> tuple[NamedSharding, Callable]:
    """Where every process has a row of its own, and the sum of the rows for all.

    Made once: a message a round must not cost a compilation's worth of Python.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    shape = (jax.process_count(), -1)
    mesh = Mesh(np.array(devices).reshape(shape), ("processes", "devices"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    add = jax.jit(lambda rows: rows.sum(axis=0, dtype=rows.dtype), out_shardings=everywhere)
    return NamedSharding(mesh, PartitionSpec("processes")), add


def exchange(message: Any = None) -> Any:
    """Passes a message from process 0 to all; every process calls it at the same point.

    Args:
      message: what JSON can say; only process 0's counts.

    Returns:
      Process 0's message.
    """
    data = json.dumps(message).encode()
    words = np.zeros(-(-len(data) // 4), np.int32)
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    first = np.zeros(_FIRST, np.int32)
    first[0] = len(data)
    head = words[: _FIRST - 1]
    first[1 : 1 + len(head)] = head
    first = agree(first)
    length = int(first[0])
    size = -(-length // 4)
    if size <= _FIRST - 1:
        whole = first[1 : 1 + size]
    else:  # once more, in one of few sizes, so that few programs are compiled
        whole = np.zeros(1 << (size - 1).bit_length(), np.int32)
        if jax.process_index() == 0:
            whole[:size] = words
        whole = agree(whole)[:size]
    return json.loads(np.ascontiguousarray(whole).tobytes()[:length])
