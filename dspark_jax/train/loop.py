"""The training loop: batches in, checkpoints, curves and an exported draft out."""

import functools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tensorboardX import SummaryWriter

from dspark_jax.train.batches import make_batches, validation_batches
from dspark_jax.train.blocks import TrainBatch
from dspark_jax.train.checkpoints import Checkpoints, has_checkpoint
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.export import export_draft
from dspark_jax.train.prepare import Prepared, prepare
from dspark_jax.train.spread import compile_on, place_run, train_mesh
from dspark_jax.train.step import (
    Candidates,
    TrainState,
    make_optimizer,
    measure_step,
    summarize,
    train_step,
)
from dspark_jax.train.vocabulary import CandidateSampler

CHECKPOINTS = "checkpoints"  # under output_dir


class Trainer:
    """One run: build it, `run` it, look at `state`.

    Args:
      config: the run.
      prepared: of `prepare(config)`.
      progress: called with one line per log interval.
    """

    def __init__(
        self, config: TrainConfig, prepared: Prepared, progress: Callable[[str], None] = print
    ):
        self.config, self._prepared, self._progress = config, prepared, progress
        optimizer = make_optimizer(config.optimizer, config.steps // config.optimizer.accumulate)
        params = jax.tree.map(jnp.array, prepared.params)
        self.state = TrainState(
            params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32)
        )
        self.directory = Path(config.output_dir)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._checkpoints = Checkpoints(self.directory / CHECKPOINTS, keep=config.keep_checkpoints)
        self._batches = make_batches(config, prepared)
        self._frozen = prepared.frozen
        mesh = train_mesh(data=config.data_parallel, model=config.model_parallel)
        if mesh is not None:
            self.state, self._frozen = place_run(mesh, config, self.state, prepared.frozen)
        step = functools.partial(train_step, prepared.draft, config.loss, optimizer, mesh=mesh)
        self._step = compile_on(mesh, step, state=self.state)
        measure = functools.partial(measure_step, prepared.draft, config.loss)
        self._measure = compile_on(mesh, measure)
        self._sampler = None
        if config.candidates is not None:
            self._sampler = CandidateSampler(
                config.candidates,
                prepared.row_counts,
                np.asarray(prepared.frozen.shared.draft_ids)
                if prepared.frozen.shared.draft_ids is not None
                else np.arange(len(prepared.row_counts)),
            )
        self._anchors, self._seconds, self._stop = 0, 0.0, False

    def resume(self) -> int:
        """Goes on from the newest checkpoint, if there is one.

        Returns:
          Micro-steps already done.
        """
        if self._checkpoints.latest() is None:
            return 0
        self.state, data = self._checkpoints.restore(self.state)
        self._batches.set_state(data["batches"])
        self._anchors, self._seconds = data["anchors"], data["seconds"]
        return int(self.state.step)

    def run(self, *, stop_after: int | None = None) -> None:
        """Trains to the last step, or until `stop_after`, SIGINT or SIGTERM; then checkpoints.

        Args:
          stop_after: micro-step to stop after; None runs to the end.

        Raises:
          OSError: a checkpoint could not be written; the message says which one is good.
        """
        last = self.config.steps if stop_after is None else min(stop_after, self.config.steps)
        handlers = self._catch_signals()
        try:
            with SummaryWriter(str(self.directory / "tensorboard")) as writer:
                self._run(last, writer)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _catch_signals(self) -> dict:
        def stop(number: int, frame: Any) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            self._progress("stopping after this step; once more to stop at once")

        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            return {number: signal.signal(number, stop) for number in numbers}
        except ValueError:  # not the main thread: whoever runs it there stops it
            return {}

    def _run(self, last: int, writer: SummaryWriter) -> None:
        config, step, sums = self.config, int(self.state.step), None
        if config.measure_every and step == 0:
            self._log("validation", step, self.measure(), 0.0, writer)
        began = time.monotonic()
        while step < last and not self._stop:
            measured = self._one(step)
            step += 1
            sums = measured if sums is None else jax.tree.map(np.add, sums, measured)
            if step % config.log_every == 0 or step == last:
                now = time.monotonic()
                self._seconds += now - began
                self._log("train", step, sums, now - began, writer)
                began, sums = now, None
            if config.measure_every and step % config.measure_every == 0:
                self._log("validation", step, self.measure(), 0.0, writer)
                self._seconds += time.monotonic() - began
                began = time.monotonic()
            if step % config.checkpoint_every == 0:
                self.save()
        self._seconds += time.monotonic() - began
        self.save()

    def _one(self, step: int) -> dict[str, np.ndarray]:
        arrays = next(self._batches)
        candidates = None
        if self._sampler is not None:
            rng = np.random.default_rng([self.config.seed, step])
            candidates = Candidates(*self._sampler.draw(arrays["tokens"], rng))
        self.state, measured = self._step(
            self.state, self._frozen, TrainBatch(**arrays), candidates
        )
        self._anchors += int(arrays["keep"].sum())
        return jax.device_get(measured) | {"steps": 1.0, "tokens": arrays["loss_mask"].sum()}

    def measure(self) -> dict[str, np.ndarray]:
        """Sums over the validation batches, scored on the draft's whole vocabulary."""
        sums = None
        for arrays in validation_batches(self.config, self._prepared):
            got = jax.device_get(
                self._measure(self.state.params, self._frozen, TrainBatch(**arrays))
            )
            got |= {"steps": 1.0}
            sums = got if sums is None else jax.tree.map(np.add, sums, got)
        if sums is None:
            raise ValueError(
                "data.validation_samples is too small for one validation batch; raise it or set "
                "measure_every to 0."
            )
        return sums

    def _log(self, kind: str, step: int, sums: dict, seconds: float, writer: SummaryWriter) -> None:
        """One line for people, one JSON line, and TensorBoard scalars."""
        values = summarize(sums)
        record = {"kind": kind, "step": step, **values, "anchors_seen": self._anchors}
        record["minutes"] = self._seconds / 60
        if seconds:
            record["anchors_per_s"] = values.get("anchors", 0.0) / seconds
            record["tokens_per_s"] = float(sums["tokens"]) / seconds
        with (self.directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if isinstance(value, list):
                for k, x in enumerate(value):
                    writer.add_scalar(f"{kind}/{name}@{k + 1}", x, step)
            elif name not in ("kind", "step"):
                writer.add_scalar(f"{kind}/{name}", value, step)
        self._progress(_line(kind, step, self.config.steps, record))

    def save(self) -> None:
        """Writes a checkpoint of the present state."""
        data = {
            "batches": self._batches.get_state(),
            "anchors": self._anchors,
            "seconds": self._seconds,
        }
        self._checkpoints.save(self.state, data)

    def export(self, directory: str | Path) -> None:
        """Writes the present draft in DeepSpec's layout."""
        prepared = self._prepared
        export_draft(
            directory,
            prepared.draft.config,
            self.state.params,
            prepared.frozen.shared,
            prepared.fingerprint,
        )


def open_run(config: TrainConfig, progress: Callable[[str], None] = print) -> Trainer:
    """Builds a run and goes to its newest checkpoint, if it has one.

    Args:
      config: the run.
      progress: called with one line now and then.

    Returns:
      The trainer.

    Raises:
      FileNotFoundError, ValueError: of `prepare`.
    """
    begun = has_checkpoint(Path(config.output_dir) / CHECKPOINTS)
    trainer = Trainer(config, prepare(config, progress, warm_start=not begun), progress)
    if begun:
        progress(f"resuming after step {trainer.resume()}")
    return trainer


def train(config: TrainConfig, *, progress: Callable[[str], None] = print) -> Trainer:
    """Runs a config to its end, going on from its last checkpoint, and exports the draft.

    Args:
      config: the run; the draft lands in `output_dir`/draft.
      progress: called with one line now and then.

    Returns:
      The trainer, at the end or where a signal stopped it.

    Raises:
      FileNotFoundError, ValueError: of `prepare`.
      OSError: the disk is full.
    """
    trainer = open_run(config, progress)
    trainer.run()
    trainer.export(trainer.directory / "draft")
    progress(f"draft of step {int(trainer.state.step)} in {trainer.directory / 'draft'}")
    return trainer


def _line(kind: str, step: int, steps: int, record: dict[str, Any]) -> str:
    parts = [f"{kind} {step}/{steps}"]
    for name in ("loss", "hidden", "ce_loss", "l1_loss", "tau_probabilistic", "tau_greedy"):
        if name in record:
            parts.append(f"{name} {record[name]:.3f}")
    for name in ("accept_rate", "greedy_match"):
        if name in record:
            parts.append(f"{name} " + "/".join(f"{x:.2f}" for x in record[name]))
    if "anchors_per_s" in record:
        parts.append(f"{record['anchors_per_s']:.0f} anchors/s {record['tokens_per_s']:.0f} tok/s")
    return "  ".join(parts)
