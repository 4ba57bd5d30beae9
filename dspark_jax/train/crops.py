"""Training batches from stored features: short crops of documents, every position an anchor.

A draft with a sliding window sees only the last rows before an anchor, so a crop of window +
anchors + block rows gives exactly what the whole document would, at a cost that does not depend
on its length. Neighbouring anchors share their context rows and the target's logits.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from dspark_jax.train.data import Sample
from dspark_jax.train.features import FeatureStore

EPOCHS = 1_000_000  # more than any run makes; Grain cannot count an endless dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crop:
    """Some neighbouring anchors of one document: `first` plus each of `offsets`."""

    document: int
    first: int
    offsets: tuple[int, ...]


def list_crops(
    samples: Sequence[Sample],
    documents: Sequence[int],
    anchors: int,
    *,
    skip_repeats: int = 0,
) -> list[Crop]:
    """Cuts the anchor positions of documents into runs.

    Args:
      samples: all of them; a document is an index.
      documents: which to use.
      anchors: most anchors of a crop.
      skip_repeats: no anchor where this many tokens, from the anchor on, already stood earlier in
        the sample (a target that loops is soon learnt by heart); 0 keeps all.

    Returns:
      Crops of neighbouring positions whose token and next token count for the loss; each position
      once. Positions that are skipped inside a run are not anchors.
    """
    crops = []
    for d in documents:
        mask = samples[d].loss_mask
        valid = np.flatnonzero(mask[:-1] & mask[1:] & ~_repeats(samples[d].tokens, skip_repeats))
        at = 0
        while at < len(valid):
            run = valid[at : at + anchors]
            run = run[run < run[0] + anchors]
            offsets = tuple(int(x) for x in run - run[0])
            crops.append(Crop(document=d, first=int(run[0]), offsets=offsets))
            at += len(run)
    return crops


def _repeats(tokens: np.ndarray, length: int) -> np.ndarray:
    """Positions but the last whose next `length` tokens occurred before; bool[S - 1]."""
    repeated = np.zeros(len(tokens) - 1, bool)
    seen = set()
    for a in range(len(tokens) - length if length else 0):
        gram = tokens[a : a + length].tobytes()
        repeated[a] = gram in seen
        seen.add(gram)
    return repeated


class CropSource(grain.sources.RandomAccessDataSource):
    """Crops as arrays of one length, for Grain.

    Args:
      store: the features.
      samples: their tokens and loss masks.
      crops: of `list_crops`.
      window: context rows before the first anchor.
      anchors: A, slots for anchors.
      block_size: K.
      taps: columns of the store's taps to use, in units of layers.
    """

    def __init__(
        self,
        store: FeatureStore,
        samples: Sequence[Sample],
        crops: Sequence[Crop],
        *,
        window: int,
        anchors: int,
        block_size: int,
        taps: Sequence[int],
    ):
        self._store, self._samples, self._crops = store, samples, crops
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
        sample = self._samples[crop.document]
        own = slice(begin, begin + used)
        taps = np.asarray(store.taps[rows]).reshape(used, -1, width)[:, self._taps]

        def padded(values: np.ndarray, dtype: type) -> np.ndarray:
            out = np.zeros((self._length, *values.shape[1:]), dtype)
            out[:used] = values
            return out

        keep = np.arange(self._anchors) < len(crop.offsets)
        anchors = np.zeros(self._anchors, np.int32)
        anchors[: len(crop.offsets)] = crop.first - begin + np.array(crop.offsets)
        return {
            "tokens": padded(sample.tokens[own], np.int32),
            "loss_mask": padded(sample.loss_mask[own], bool),
            "positions": begin + np.arange(self._length, dtype=np.int32),
            "segments": padded(np.ones(used), np.int32),
            "context_features": padded(taps.reshape(used, -1), np.float32),
            "target_hidden": padded(store.hidden[rows], np.float32),
            "anchors": anchors,
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
    dataset = grain.MapDataset.source(source).seed(seed).shuffle().repeat(EPOCHS)
    return iter(dataset.batch(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1)))


def sequential_batches(
    source: CropSource, *, batch_size: int, limit: int
) -> Iterator[dict[str, np.ndarray]]:
    """The first `limit` whole batches in order, for validation."""
    for i in range(min(limit, len(source) // batch_size)):
        items = [source[j] for j in range(i * batch_size, (i + 1) * batch_size)]
        yield {name: np.stack([item[name] for item in items]) for name in items[0]}
