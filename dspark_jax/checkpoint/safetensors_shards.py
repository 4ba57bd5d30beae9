"""Safetensors shards written one tensor at a time, none of them held in memory with another."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.safetensors import NUMPY_TYPES

SHARD_BYTES = 5_000_000_000
SINGLE = "model.safetensors"
INDEX = SINGLE + ".index.json"

Entry = tuple[str, str, tuple[int, ...]]  # name, type in safetensors' words, shape


def plan_shards(entries: Sequence[Entry], limit: int = SHARD_BYTES) -> dict[str, list[Entry]]:
    """Distributes tensors over files, in order.

    Args:
      entries: what will be written.
      limit: bytes of tensors a file may hold, unless a single one is larger.

    Returns:
      File name -> its tensors; `model.safetensors` alone when they all fit.
    """
    groups, size = [[]], 0
    for entry in entries:
        if groups[-1] and size + entry_bytes(entry) > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry_bytes(entry)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": g for i, g in enumerate(groups, start=1)}


def entry_bytes(entry: Entry) -> int:
    """Bytes of one tensor."""
    return math.prod(entry[2]) * NUMPY_TYPES[entry[1]].itemsize


def write_shard(path: Path, entries: Sequence[Entry], read: Callable[[str], np.ndarray]) -> str:
    """Writes one file, whole or not at all.

    Args:
      path: the file.
      entries: its tensors, in order.
      read: gives a tensor by its name; called once each, in order.

    Returns:
      Hex sha256 of the file.

    Raises:
      OSError: the disk is full or not writable.
      ValueError: a tensor is not of the size announced.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in entries:
        begin, end = end, end + entry_bytes((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, partial = hashlib.sha256(), path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            digest.update(part)
        for entry in entries:
            data = np.ascontiguousarray(read(entry[0])).reshape(-1).view(np.uint8).data
            if data.nbytes != entry_bytes(entry):
                raise ValueError(
                    f"{entry[0]} has {data.nbytes} bytes, expected {entry_bytes(entry)}."
                )
            file.write(data)
            digest.update(data)
    os.replace(partial, path)
    return digest.hexdigest()


def write_index(directory: Path, shards: Mapping[str, Sequence[Entry]]) -> None:
    """Writes the index that sharded checkpoints have.

    Args:
      directory: where the shards are.
      shards: of `plan_shards`; nothing is written for a single file.
    """
    if list(shards) == [SINGLE]:
        return
    total = sum(entry_bytes(entry) for entries in shards.values() for entry in entries)
    places = {entry[0]: name for name, entries in shards.items() for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
