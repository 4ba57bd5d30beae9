"""Several processes, one mesh: one of them decides, and all run the same programs in order.

Every process holds an engine over the same mesh. An engine is a function of what it is told, as
what it reads from the devices is the same everywhere; so the process that takes requests passes on
what it tells its own: submit, cancel, step. Messages travel as a collective of their own, which
puts them in the same order as the programs.
"""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dspark_jax.engine.core import Engine
from dspark_jax.engine.requests import Emission, Request, Sequence

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
        return process_id == 0
    return jax.process_index() == 0


def agree(values: np.ndarray) -> np.ndarray:
    """What process 0 has; every process calls it at the same point."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


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


class SharedEngine(Engine):
    """An engine whose likes run in every process; arguments as for `Engine`.

    Until `lead` is called, all processes tell their engines the same by themselves.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._leading = False
        self._submitted: list[dict] = []  # and not passed on yet

    def lead(self) -> None:
        """From here on this process decides, and the others `follow`."""
        self._leading = True

    def submit(self, request: Request) -> Sequence:
        """As `Engine.submit`; passed on with whatever comes next."""
        sequence = super().submit(request)
        if self._leading:
            asked = dataclasses.asdict(request)
            self._submitted.append({"do": "submit", "id": sequence.id, "request": asked})
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """As `Engine.cancel`, in every process."""
        if sequence.finish_reason is None:
            self._pass_on({"do": "cancel", "id": sequence.id})
        super().cancel(sequence)

    def step(self) -> list[Emission]:
        """As `Engine.step`, in every process."""
        self._pass_on({"do": "step", "generated": self.counters.generation_tokens})
        return super().step()

    def idle(self) -> None:
        """Tells the others that this process is there, so that they do not give it up."""
        self._pass_on({"do": "wait"})

    def close(self) -> None:
        """Ends `follow` in the others."""
        self._pass_on({"do": "stop"})
        self._leading = False

    def _pass_on(self, action: dict) -> None:
        if self._leading:
            exchange([*self._submitted, action])
            self._submitted = []


def follow(engine: Engine) -> None:
    """Does in this process what the leading one does, until it closes its engine.

    Args:
      engine: told the same so far as the leading process's.

    Raises:
      RuntimeError: this engine has come to other tokens than the leading one.
    """
    sequences: dict[int, Sequence] = {}
    while True:
        for action in exchange():
            if action["do"] == "submit":
                sequences[action["id"]] = engine.submit(_request(action["request"]))
            elif action["do"] == "cancel":
                engine.cancel(sequences.pop(action["id"]))
            elif action["do"] == "stop":
                return
            elif action["do"] == "step":
                if action["generated"] != engine.counters.generation_tokens:
                    raise RuntimeError(
                        f"process {jax.process_index()} has generated "
                        f"{engine.counters.generation_tokens} tokens and process 0 "
                        f"{action['generated']}: their programs or devices differ."
                    )
                engine.step()
                sequences = {i: s for i, s in sequences.items() if s.finish_reason is None}


def _request(fields: dict) -> Request:
    """A request that has been through JSON, which has lists only."""
    return Request(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
