"""Several processes, one mesh: one of them decides, and all run the same programs in order.

Every process holds an engine over the same mesh. An engine is a function of what it is told, as
what it reads from the devices is the same everywhere; so the process that takes requests passes on
what it tells its own: submit, cancel, step.
"""

import dataclasses

import jax

from dspark_jax.engine.core import Engine
from dspark_jax.engine.processes import exchange
from dspark_jax.engine.requests import Emission, Request, Sequence


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
