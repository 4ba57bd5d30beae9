"""Batches of whole samples whose hidden states come from the target as they are needed."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grain
import jax
import numpy as np

from dspark_jax.train.blocks import sample_anchors
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.crops import EPOCHS
from dspark_jax.train.data import Sample
from dspark_jax.train.features import hidden_states

if TYPE_CHECKING:
    from dspark_jax.train.prepare import Prepared

_BUCKET = 64  # padded lengths are multiples of this


class OnlineBatches:
    """Padded samples in a shuffled, resumable order; the frozen target runs before each step.

    Args:
      config: the run.
      prepared: its target and draft.
      samples: what to draw from.
    """

    def __init__(self, config: TrainConfig, prepared: "Prepared", samples: Sequence[Sample]):
        self._config, self._prepared, self._samples = config, prepared, samples
        dataset = grain.MapDataset.range(len(samples)).seed(config.seed).shuffle().repeat(EPOCHS)
        dataset = dataset.batch(config.data.batch_size)
        self._order = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1)))
        self._count = 0
        self._forward = jax.jit(functools.partial(hidden_states, prepared.target))
        self._anchors = jax.jit(sample_anchors, static_argnums=3)

    def __iter__(self) -> "OnlineBatches":
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch: fields of `TrainBatch`."""
        chosen = [self._samples[i] for i in next(self._order)]
        length = -(-max(len(s.tokens) for s in chosen) // _BUCKET) * _BUCKET
        tokens = np.zeros((len(chosen), length), np.int32)
        mask = np.zeros((len(chosen), length), bool)
        segments = np.zeros((len(chosen), length), np.int32)
        for row, sample in enumerate(chosen):
            used = len(sample.tokens)
            tokens[row, :used], mask[row, :used] = sample.tokens, sample.loss_mask
            segments[row, :used] = 1
        key = jax.random.fold_in(jax.random.key(self._config.seed), self._count)
        anchors, keep = self._anchors(key, mask, segments, self._config.data.num_anchors)
        features, hidden = self._forward(self._prepared.target_params, tokens)
        self._count += 1
        return {
            "tokens": tokens,
            "loss_mask": mask,
            "positions": np.tile(np.arange(length, dtype=np.int32), (len(chosen), 1)),
            "segments": segments,
            "context_features": features,
            "target_hidden": hidden,
            "anchors": anchors,
            "keep": np.asarray(keep),
        }

    def get_state(self) -> dict[str, Any]:
        """Position in the order and number of batches drawn."""
        return {"order": self._order.get_state(), "count": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes back to a position of `get_state`."""
        self._order.set_state(state["order"])
        self._count = state["count"]
