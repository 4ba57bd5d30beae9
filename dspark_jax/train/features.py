"""Hidden states of the frozen target, computed once and kept on disk for small corpora.

For a demo-sized corpus the target costs more than the draft, so its tapped states and its last
hidden state (after the final norm, before the LM head) are stored as float16. Nothing of the size
of the vocabulary is stored (paper 5.1).
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.target.llama import LlamaTarget
from dspark_jax.train.data import Sample
from dspark_jax.types import Params

VERSION = 1
_LIMIT = 65504.0  # largest float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureStore:
    """Features of many samples, memory-mapped; rows of one sample are contiguous.

    Attributes:
      tap_layer_ids: layers whose output is stored.
      tokens: i32[T].
      offsets: i64[n + 1], first row of each sample.
      ids: the samples' ids.
      taps: f16[T, M*D].
      hidden: f16[T, D], the target's last hidden state after the final norm.
      done: samples whose rows are filled; they are the first ones.
    """

    tap_layer_ids: tuple[int, ...]
    tokens: np.ndarray
    offsets: np.ndarray
    ids: tuple[str, ...]
    taps: np.ndarray
    hidden: np.ndarray
    done: int


def hidden_states(
    target: LlamaTarget, params: Params, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the draft is trained on, of whole sequences.

    Args:
      target: with the wanted `tap_layer_ids`.
      params: its parameters.
      tokens: i32[B, S].

    Returns:
      Context features [B, S, M*D] and the last hidden state [B, S, D].
    """
    cache = target.make_cache(tokens.shape[0], 1, params["embedding"].dtype)
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    out = target.forward(params, tokens, cache, cache_len=start)
    return out.context_features, out.hidden


def extract_features(
    target: LlamaTarget,
    params: Params,
    samples: Sequence[Sample],
    directory: str | Path,
    *,
    rows_per_batch: int = 2048,
    progress: Callable[[str], None] = print,
) -> None:
    """Runs the target over the samples and stores its hidden states; resumes where it stopped.

    Args:
      target: with the wanted `tap_layer_ids`.
      params: its parameters, layers split.
      samples: in the order to process.
      directory: receives tokens.npy, offsets.npy, taps.bin, hidden.bin, meta.json.
      rows_per_batch: padded tokens of one forward.
      progress: called with one line now and then.

    Raises:
      ValueError: the directory holds features of other samples or layers.
      OSError: the disk is full; what was finished stays usable.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    width = target.config.hidden_size
    offsets = np.cumsum([0] + [len(s.tokens) for s in samples]).astype(np.int64)
    meta = {
        "version": VERSION,
        "tap_layer_ids": list(target.tap_layer_ids),
        "hidden_size": width,
        "ids": [s.id for s in samples],
        "done": 0,
    }
    done = _start(directory, meta, samples, offsets)
    shape = (int(offsets[-1]), len(target.tap_layer_ids) * width)
    taps = np.memmap(directory / "taps.bin", np.float16, mode="r+", shape=shape)
    hidden = np.memmap(directory / "hidden.bin", np.float16, mode="r+", shape=(shape[0], width))

    @jax.jit
    def forward(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        states = hidden_states(target, params, tokens)
        return tuple(jnp.clip(x, -_LIMIT, _LIMIT).astype(jnp.float16) for x in states)

    began, first = time.monotonic(), int(offsets[done])
    while done < len(samples):
        group = range(done, min(done + 64, len(samples)))
        for batch in _batches(samples, group, rows_per_batch):
            width_tokens = _padded(max(len(samples[i].tokens) for i in batch))
            tokens = np.zeros((max(rows_per_batch // width_tokens, 1), width_tokens), np.int32)
            for row, i in enumerate(batch):
                tokens[row, : len(samples[i].tokens)] = samples[i].tokens
            got_taps, got_hidden = (np.asarray(x) for x in forward(tokens))
            for row, i in enumerate(batch):
                span = slice(offsets[i], offsets[i + 1])
                taps[span] = got_taps[row, : len(samples[i].tokens)]
                hidden[span] = got_hidden[row, : len(samples[i].tokens)]
        done = group.stop
        taps.flush()
        hidden.flush()
        _write_json(directory / "meta.json", meta | {"done": done})
        rate = (int(offsets[done]) - first) / (time.monotonic() - began)
        progress(f"features: {done}/{len(samples)} samples, {rate:.0f} tokens/s")


def open_features(directory: str | Path) -> FeatureStore:
    """Opens stored features for reading, finished or not.

    Args:
      directory: of `extract_features`.

    Returns:
      The store.

    Raises:
      FileNotFoundError: there are none.
      ValueError: a file is shorter than it should be.
    """
    directory = Path(directory)
    if not (directory / "meta.json").is_file():
        raise FileNotFoundError(f"{directory} holds no features (meta.json is missing).")
    meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    offsets = np.load(directory / "offsets.npy")
    rows, width = int(offsets[-1]), meta["hidden_size"]
    shapes = {"taps": (rows, len(meta["tap_layer_ids"]) * width), "hidden": (rows, width)}
    maps = {}
    for name, shape in shapes.items():
        path = directory / f"{name}.bin"
        if not path.is_file() or path.stat().st_size != 2 * shape[0] * shape[1]:
            raise ValueError(f"{path} is missing or truncated; delete {directory} and run again.")
        maps[name] = np.memmap(path, np.float16, mode="r", shape=shape)
    return FeatureStore(
        tap_layer_ids=tuple(meta["tap_layer_ids"]),
        tokens=np.load(directory / "tokens.npy"),
        offsets=offsets,
        ids=tuple(meta["ids"]),
        done=meta["done"],
        **maps,
    )


def _start(directory: Path, meta: dict, samples: Sequence[Sample], offsets: np.ndarray) -> int:
    """Prepares an empty store, or returns how far an existing one is."""
    if (directory / "meta.json").is_file():
        old = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        if {**old, "done": 0} != meta:
            raise ValueError(
                f"{directory} holds features of other samples or layers; choose another directory "
                "or delete it."
            )
        return old["done"]
    rows, width = int(offsets[-1]), meta["hidden_size"]
    np.save(directory / "tokens.npy", np.concatenate([s.tokens for s in samples]))
    np.save(directory / "offsets.npy", offsets)
    for name, columns in (("taps", len(meta["tap_layer_ids"]) * width), ("hidden", width)):
        with (directory / f"{name}.bin").open("wb") as file:
            file.truncate(2 * rows * columns)
    _write_json(directory / "meta.json", meta)
    return 0


def _batches(samples: Sequence[Sample], group: range, rows: int) -> list[list[int]]:
    """Splits a group into batches of similar length with at most `rows` padded tokens."""
    batches = []
    for i in sorted(group, key=lambda i: -len(samples[i].tokens)):
        head = batches[-1][0] if batches else None
        if head is None or (len(batches[-1]) + 1) * _padded(len(samples[head].tokens)) > rows:
            batches.append([])
        batches[-1].append(i)
    return batches


def _padded(length: int) -> int:
    return -(-length // 64) * 64


def _write_json(path: Path, value: dict) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value), encoding="utf-8")
    os.replace(partial, path)
