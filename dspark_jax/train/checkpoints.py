"""Training state on disk (Orbax): parameters, optimiser, step and data position."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dspark_jax.train.step import TrainState


def has_checkpoint(directory: str | Path) -> bool:
    """Is there a complete checkpoint to resume from?"""
    directory = Path(directory)
    return directory.is_dir() and any(path.name.isdigit() for path in directory.iterdir())


class Checkpoints:
    """Numbered checkpoints in one directory; the newest complete one is resumed from.

    Args:
      directory: where they lie.
      keep: how many to keep.
    """

    def __init__(self, directory: str | Path, *, keep: int):
        self.directory = Path(directory).resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """Micro-steps done in the newest checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data: dict[str, Any]) -> None:
        """Writes a checkpoint.

        Args:
          state: after a step.
          data: JSON state of the data iterator.

        Raises:
          OSError: it could not be written; earlier checkpoints stay good.
        """
        step = int(state.step)
        if step == self.latest():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
        try:
            self._manager.save(step, args=args)
        except Exception as error:  # the storage layer wraps a full disk in several types
            raise OSError(
                f"could not write the checkpoint of step {step} to {self.directory}: {error}. The "
                f"last good one is of step {self.latest()}; free some space and resume."
            ) from error

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict]:
        """Reads a checkpoint.

        Args:
          like: a state of the same structure.
          step: which; None is the newest.

        Returns:
          The state and the data iterator's state.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it was written by a run with another architecture or optimiser.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self.directory}.")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(shapes), data=ocp.args.JsonRestore()
        )
        try:
            got = self._manager.restore(step, args=args)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint {step} in {self.directory} does not fit this config ({error}); use "
                "the config it was written with, or another output_dir."
            ) from error
        return got["state"], got["data"]

    def close(self) -> None:
        """Releases the directory."""
        self._manager.close()
