"""Training batches from stored features: short crops of documents, every position an anchor.

A draft with a sliding window sees only the last rows before an anchor, so a crop of window +
anchors + block rows gives exactly what the whole document would, at a cost that does not depend
on its length. Neighbouring anchors share their context rows and the target's logits.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from dspark_jax.train.features import FeatureStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crop:
    """Anchors first..first+count-1 of one document."""

    document: int
    first: int
    count: int


def list_crops(store: FeatureStore, documents: Sequence[int], anchors: int) -> list[Crop]:
    """Cuts the anchor positions of documents into runs.

    Args:
      store: the features.
      documents: which samples.
      anchors: most anchors of a crop.

    Returns:
      Crops that cover every position whose token and next token the target wrote, once.
    """
    crops = []
    for d in documents:
        mask = store.loss_mask[store.offsets[d] : store.offsets[d + 1]]
        valid = np.flatnonzero(mask[:-1] & mask[1:])
        at = 0
        while at < len(valid):
            run = valid[at : at + anchors]
            inside = run < run[0] + anchors
            crops.append(Crop(document=d, first=int(run[0]), count=int(inside.sum())))
            at += int(inside.sum())
    return crops


class CropSource(grain.sources.RandomAccessDataSource):
    """Crops as arrays of one length, for Grain.

    Args:
      store: the features.
      crops: of `list_crops`.
      window: context rows before the first anchor.
      anchors: A, slots for anchors.
      block_size: K.
      taps: columns of the store's taps to use, in units of layers.
    """

    def __init__(
        self,
        store: FeatureStore,
        crops: Sequence[Crop],
        *,
        window: int,
        anchors: int,
        block_size: int,
        taps: Sequence[int],
    ):
        self._store, self._crops = store, crops
        self._window, self._anchors = window, anchors
        self._length = window + anchors + block_size
        self._taps = list(taps)

    def __len__(self) -> int:
        return len(self._crops)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One crop: the fields of `TrainBatch` without the batch axis."""
        crop, store = self._crops[index], self._store
        start, stop = store.offsets[crop.document], store.offsets[crop.document + 1]
        begin = max(0, crop.first - self._window)
        rows = slice(start + begin, min(start + begin + self._length, stop))
        used = rows.stop - rows.start
        width = store.hidden.shape[1]
        taps = np.asarray(store.taps[rows]).reshape(used, -1, width)[:, self._taps]

        def padded(values: np.ndarray, dtype: type) -> np.ndarray:
            out = np.zeros((self._length, *values.shape[1:]), dtype)
            out[:used] = values
            return out

        anchors = np.arange(crop.first, crop.first + self._anchors) - begin
        keep = np.arange(self._anchors) < crop.count
        return {
            "tokens": padded(store.tokens[rows], np.int32),
            "loss_mask": padded(store.loss_mask[rows], bool),
            "positions": begin + np.arange(self._length, dtype=np.int32),
            "segments": padded(np.ones(used), np.int32),
            "context_features": padded(taps.reshape(used, -1), np.float32),
            "target_hidden": padded(store.hidden[rows], np.float32),
            "anchors": np.where(keep, anchors, 0).astype(np.int32),
            "keep": keep,
        }


def crop_batches(source: CropSource, *, batch_size: int, seed: int) -> grain.DatasetIterator:
    """An endless, resumable stream of shuffled batches; every epoch has its own order.

    Args:
      source: the crops.
      batch_size: crops of a batch.
      seed: of the order.

    Returns:
      An iterator of dicts of stacked arrays, with `get_state` and `set_state`.
    """
    dataset = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    return iter(dataset.batch(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1)))


def sequential_batches(
    source: CropSource, *, batch_size: int, limit: int
) -> Iterator[dict[str, np.ndarray]]:
    """The first `limit` whole batches in order, for validation."""
    for i in range(min(limit, len(source) // batch_size)):
        items = [source[j] for j in range(i * batch_size, (i + 1) * batch_size)]
        yield {name: np.stack([item[name] for item in items]) for name in items[0]}
