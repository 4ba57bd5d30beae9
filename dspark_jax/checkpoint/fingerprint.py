"""Which target a draft was trained for: a digest that costs a few reads and survives a cast.

A draft loaded beside another target still runs, and is still lossless, but hardly a draft is
accepted. The fingerprint in its `config.json` turns that into an error.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.orbax_layout import Manifest, is_converted
from dspark_jax.checkpoint.rules import TensorRule, leaf_at
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.checkpoint.target import target_rules
from dspark_jax.config import TargetConfig, read_config_json
from dspark_jax.types import Params

FINGERPRINT_KEY = "dspark_target"  # in a draft's config.json
SAMPLED_ROWS = 8  # of every sampled tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFingerprint:
    """Identity of a target's weights.

    Attributes:
      name: for people; not compared.
      sha256: digest of evenly spaced rows of the weights, rounded to bfloat16.
      hidden_size: D.
      num_hidden_layers: L.
      vocab_size: V.
    """

    name: str
    sha256: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int

    def to_json(self) -> dict[str, Any]:
        """The value stored under `dspark_target`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TargetFingerprint":
        """Reads the value stored under `dspark_target`.

        Raises:
          ValueError: a field is missing.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in fields if name not in value]
        if missing:
            raise ValueError(
                f"{FINGERPRINT_KEY} in config.json lacks {missing}; got {sorted(value)}. "
                f"Remove {FINGERPRINT_KEY} to skip the check."
            )
        return cls(**{name: value[name] for name in fields})

    def matches(self, other: "TargetFingerprint") -> bool:
        """Are these the same weights, whatever they are called?"""
        return dataclasses.replace(self, name=other.name) == other


def fingerprint_target(directory: str | Path, *, name: str | None = None) -> TargetFingerprint:
    """Fingerprint of a checkpoint directory, from a small part of its files.

    Args:
      directory: the target in the Hugging Face layout, or converted: then what was found when it
        was made, also where the conversion rounded the weights.
      name: what to call it; by default the directory's own name.

    Returns:
      The fingerprint; equal to `fingerprint_params` of the loaded target.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: the architecture is unknown, or a tensor is missing.
    """
    if is_converted(directory):
        stored = Manifest.read(Path(directory)).fingerprint
        if stored is None:
            raise ValueError(f"{directory} is a converted draft; expected a target.")
        known = TargetFingerprint.from_json(stored)
        return known if name is None else dataclasses.replace(known, name=name)
    config = TargetConfig.from_hf(read_config_json(directory))
    reader = TensorReader(directory)
    have = reader.names()

    def rows_of(rule: TensorRule, index: int) -> np.ndarray:
        stored = rule.names[index]
        if stored not in have:
            raise ValueError(f"target checkpoint {directory} lacks tensor {stored}.")
        return reader.read_rows(stored, _sample(rule.shapes[index]))

    return _fingerprint(config, rows_of, name or Path(directory).resolve().name)


def fingerprint_params(config: TargetConfig, params: Params, *, name: str) -> TargetFingerprint:
    """Fingerprint of a target in memory.

    Args:
      config: its architecture.
      params: its tree, layers split or stacked, float32 or bfloat16.
      name: what to call it.

    Returns:
      The fingerprint; equal to `fingerprint_target` of the directory it was loaded from.
    """

    def rows_of(rule: TensorRule, index: int) -> np.ndarray:
        stored = rule.unpack(np.asarray(leaf_at(params, rule.path)))[index]
        return stored[_sample(rule.shapes[index])]

    return _fingerprint(config, rows_of, name)


def _fingerprint(
    config: TargetConfig, rows_of: Callable[[TensorRule, int], np.ndarray], name: str
) -> TargetFingerprint:
    digest = hashlib.sha256()
    for rule in target_rules(config):
        for index in sorted({0, len(rule.names) - 1}):  # of many experts the first and the last
            rows = rows_of(rule, index).astype(ml_dtypes.bfloat16)
            digest.update(f"{rule.names[index]} {rule.shapes[index]}\n".encode())
            digest.update(np.ascontiguousarray(rows).tobytes())
    return TargetFingerprint(
        name=name,
        sha256=digest.hexdigest(),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
    )


def _sample(shape: tuple[int, ...]) -> np.ndarray:
    """Evenly spaced indices into the first axis; all of a short vector."""
    count = SAMPLED_ROWS if len(shape) > 1 else 1024
    return np.unique(np.linspace(0, shape[0] - 1, min(count, shape[0])).astype(np.int64))
