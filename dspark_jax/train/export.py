"""A trained draft as a checkpoint directory in DeepSpec's layout."""

import json
import os
from pathlib import Path

import jax.numpy as jnp

from dspark_jax.checkpoint.draft import draft_rules
from dspark_jax.checkpoint.draft_layouts import deepspec_config_json
from dspark_jax.checkpoint.draft_vocab import vocabulary_tensors
from dspark_jax.checkpoint.fingerprint import FINGERPRINT_KEY, TargetFingerprint
from dspark_jax.checkpoint.rules import stored_tensors
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.config import DraftConfig
from dspark_jax.types import Params, SharedHead


def export_draft(
    directory: str | Path,
    config: DraftConfig,
    params: Params,
    shared: SharedHead,
    fingerprint: TargetFingerprint,
    *,
    dtype: jnp.dtype = jnp.bfloat16,
) -> None:
    """Writes config.json and model.safetensors, without copies of the target's tables.

    Args:
      directory: where to; made when missing, an earlier export is replaced file by file.
      config: the draft's architecture.
      params: its parameters.
      shared: the head it was trained with; gives the token map of a reduced vocabulary.
      fingerprint: of the target.
      dtype: type of the stored weights.

    Raises:
      OSError: the disk is full or not writable.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = stored_tensors(params, draft_rules(config), dtype)
    if shared.target_ids is not None:
        tensors |= vocabulary_tensors(shared)
    hf = deepspec_config_json(config, dtype=jnp.dtype(dtype).name)
    hf |= {FINGERPRINT_KEY: fingerprint.to_json()}
    save_tensors(directory / "model.safetensors", tensors)
    partial = directory / f".config.json.{os.getpid()}"
    partial.write_text(json.dumps(dict(sorted(hf.items())), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, directory / "config.json")
