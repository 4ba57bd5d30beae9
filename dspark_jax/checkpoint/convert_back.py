"""From converted directories back to Hugging Face safetensors, under the names of the source."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.deepseek import deepseek_rules, read_deepseek_config, shared_rules
from dspark_jax.checkpoint.draft import rules_and_extras
from dspark_jax.checkpoint.draft_layouts import read_draft_config
from dspark_jax.checkpoint.orbax_layout import (
    EXTRA,
    MANIFEST,
    TYPE_NAMES,
    Leaf,
    OrbaxReader,
    dequantise,
    is_packed,
)
from dspark_jax.checkpoint.quantized import scale_of
from dspark_jax.checkpoint.rules import TensorRule, same
from dspark_jax.checkpoint.safetensors import FLOAT_TYPES, NUMPY_TYPES
from dspark_jax.checkpoint.safetensors_shards import (
    SHARD_BYTES,
    Entry,
    entry_bytes,
    plan_shards,
    write_index,
    write_shard,
)
from dspark_jax.checkpoint.target import target_rules
from dspark_jax.checkpoint.workplace import Workplace, copy_side_files
from dspark_jax.checkpoint.zarr_arrays import raw_bytes
from dspark_jax.config import TargetConfig, read_config_json


def convert_back(
    directory: str | Path,
    destination: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Writes a converted directory as safetensors.

    What was kept as stored comes out with the bytes of the source; what was dequantised, or put
    into FP8 by the conversion, as plain float32 or bfloat16 without scales.

    Args:
      directory: made by `convert`.
      destination: a directory that does not exist yet.
      shard_bytes: of tensors in a file.
      say: called with a line of progress.

    Returns:
      The number of tensors, and of their bytes.

    Raises:
      FileNotFoundError: arrays are missing.
      FileExistsError: the destination exists, or another process is writing it.
      ValueError: an array is not what was written.
      OSError: the disk is full or not writable; complete files are used by the next attempt.
    """
    reader = OrbaxReader(directory)
    leaves = [(reader.leaf(rule.path), rule) for rule in _rules(reader)]
    entries = [entry for leaf, rule in leaves for entry in _entries(reader, leaf, rule)]
    shards = plan_shards(entries, shard_bytes)
    total = sum(map(entry_bytes, entries))
    settings = {"shard_bytes": shard_bytes}
    with Workplace(destination, [reader.directory / MANIFEST], settings, total, say) as work:
        todo = {e[0] for file in shards if file not in work.sha256 for e in shards[file]}
        tensors = _tensors(reader, leaves, todo)
        for file, part in shards.items():
            nbytes = sum(map(entry_bytes, part))
            path, dtypes = work.directory / file, {name: dtype for name, dtype, _ in part}

            def write(path: Path = path, part: list[Entry] = part, dtypes: dict = dtypes) -> dict:
                return {path.name: write_shard(path, part, lambda n: _next(tensors, n, dtypes))}

            work.keep(f"{file}  {len(part)} tensors", (file,), nbytes, write)
        copy_side_files(reader.directory, work.directory)
        _correct_config(work.directory / "config.json", entries)
        write_index(work.directory, shards)
        work.move_into_place()
    return len(entries), total


def _rules(reader: OrbaxReader) -> list[TensorRule]:
    hf, kind = read_config_json(reader.directory), reader.manifest.kind
    if kind == "target":
        return target_rules(TargetConfig.from_hf(hf))
    if kind == "deepseek draft":
        config = read_deepseek_config(hf, reader.names())
        return deepseek_rules(config) + shared_rules(config)
    rules, extras, _ = rules_and_extras(read_draft_config(hf, reader), reader.names())
    return rules + [same((EXTRA, name), name, reader.shape(name)) for name in extras]


def _entries(reader: OrbaxReader, leaf: Leaf, rule: TensorRule) -> Iterator[Entry]:
    """Names (those of the source), types and shapes of what a leaf becomes, in order."""
    stored = reader.manifest.tensors
    for name, shape in zip(leaf.names, rule.shapes, strict=True):
        dtype, original_shape, original = stored[name]
        if _is_kept(reader, leaf):
            yield original, dtype, original_shape
            scale = stored[scale_of(name)]
            yield scale[2], scale[0], scale[1]
        elif leaf.form != "plain":
            yield original, "BF16", tuple(shape)
        elif reader.manifest.dtype in ("as-stored", "float8") and dtype in FLOAT_TYPES:
            yield original, dtype, tuple(shape)
        else:
            yield original, TYPE_NAMES[np.dtype(leaf.dtype)], tuple(shape)


def _is_kept(reader: OrbaxReader, leaf: Leaf) -> bool:
    """Whether a leaf holds the source's own codes and scales."""
    stored = reader.manifest.tensors
    kinds = {
        "fp4" if is_packed(name, stored[name][0], stored) else stored[name][0]
        for name in leaf.names
    }
    return (leaf.form, kinds) in (("fp4", {"fp4"}), ("fp8", {"F8_E4M3"}))


def _tensors(
    reader: OrbaxReader, leaves: list[tuple[Leaf, TensorRule]], todo: set[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors to write, in order; experts are read one at a time."""
    for leaf, rule in leaves:
        names = [entry[0] for entry in _entries(reader, leaf, rule)]
        count = len(leaf.names) // rule.group if rule.group else 1
        arrays, per_piece = tuple(leaf.arrays()), len(names) // count
        digests, whole = {array: hashlib.sha256() for array in arrays}, True
        for i in range(count):
            own = names[i * per_piece : (i + 1) * per_piece]
            if todo.isdisjoint(own):
                whole = False
                continue
            if rule.group:
                parts = [reader.rows(array, i, i + 1) for array in arrays]
            else:
                parts = reader.arrays(leaf)
            for array, part in zip(arrays, parts, strict=True):
                digests[array].update(raw_bytes(part))
            values = _unpack(reader, leaf, rule, parts)
            yield from ((n, v) for n, v in zip(own, values, strict=True) if n in todo)
        expected = {array: reader.manifest.sha256[array] for array in arrays}
        if whole and {array: d.hexdigest() for array, d in digests.items()} != expected:
            raise ValueError(
                f"{reader.directory}: {', '.join(arrays)} is not what was written; convert again."
            )


def _unpack(
    reader: OrbaxReader, leaf: Leaf, rule: TensorRule, parts: list[np.ndarray]
) -> list[np.ndarray]:
    """Stored tensors of (some rows of) a leaf's arrays."""
    if leaf.form == "plain":
        return list(rule.unpack(parts[0]))
    pairs = leaf.matrices(*parts)
    if _is_kept(reader, leaf):
        return [array for pair in pairs for array in pair]
    return [dequantise(codes, scales, leaf) for codes, scales in pairs]


def _next(
    tensors: Iterator[tuple[str, np.ndarray]], name: str, dtypes: dict[str, str]
) -> np.ndarray:
    found, value = next(tensors)
    if found != name:
        raise ValueError(f"tensors came out of order: {found} in place of {name}.")
    dtype = NUMPY_TYPES[dtypes[name]]
    if value.dtype == np.uint8 and dtype.itemsize == 1:
        return value
    return value.astype(dtype, copy=False)


def _correct_config(path: Path, entries: list[Entry]) -> None:
    """Makes `config.json` say what the weights are now; leaves it alone where it does."""
    hf = json.loads(path.read_text(encoding="utf-8"))
    kinds = {entry[1] for entry in entries}
    quantised = bool(kinds & {"F8_E4M3", "I8", "U8"})
    single = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    floats = kinds & {*FLOAT_TYPES}
    changed = _correct(hf, quantised, single[floats.pop()] if len(floats) == 1 else None)
    if isinstance(hf.get("text_config"), dict):
        changed |= _correct(hf["text_config"], quantised, None)
    if changed:
        path.write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")


def _correct(hf: dict[str, Any], quantised: bool, dtype: str | None) -> bool:
    before = dict(hf)
    if not quantised:
        hf.pop("quantization_config", None)
    for key in ("dtype", "torch_dtype"):
        if dtype and key in hf:
            hf[key] = dtype
    return hf != before
