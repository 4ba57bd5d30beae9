"""Where a run's batches come from: stored features or the target itself."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from dspark_jax.train.config import TrainConfig
from dspark_jax.train.crops import CropSource, crop_batches, list_crops, sequential_batches
from dspark_jax.train.online import OnlineBatches
from dspark_jax.train.prepare import Prepared


class Batches(Protocol):
    """An endless stream of `TrainBatch` fields whose position can be stored."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


def make_batches(config: TrainConfig, prepared: Prepared) -> Batches:
    """The training stream of a config.

    Args:
      config: the run.
      prepared: its data.

    Returns:
      Crops of stored features where the config has them, else whole samples with the target run
      online.
    """
    first = config.data.validation_samples
    if prepared.store is None:
        return OnlineBatches(config, prepared, prepared.samples[first:])
    documents = range(first, len(prepared.samples))
    source = _crops(config, prepared, documents, config.data.skip_repeats)
    return crop_batches(source, batch_size=config.data.batch_size, seed=config.seed)


def validation_batches(config: TrainConfig, prepared: Prepared) -> Iterator[dict[str, np.ndarray]]:
    """The same few batches of held-out samples every time."""
    held_out = config.data.validation_samples
    if prepared.store is None:
        stream = OnlineBatches(config, prepared, prepared.samples[:held_out])
        count = min(config.measure_batches, held_out // config.data.batch_size)
        return (next(stream) for _ in range(count))
    source = _crops(config, prepared, range(held_out))
    return sequential_batches(
        source, batch_size=config.data.batch_size, limit=config.measure_batches
    )


def _crops(
    config: TrainConfig, prepared: Prepared, documents: range, skip_repeats: int = 0
) -> CropSource:
    draft, store = prepared.draft.config, prepared.store
    return CropSource(
        store,
        prepared.samples,
        list_crops(prepared.samples, documents, config.data.num_anchors, skip_repeats=skip_repeats),
        window=draft.sliding_window,
        anchors=config.data.num_anchors,
        block_size=draft.block_size,
        taps=[store.tap_layer_ids.index(i) for i in draft.target_layer_ids],
    )
