"""Tiny V4 and V4.1 checkpoints with a target, made on the spot: real names, random weights."""

import json
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.deepseek_target import target_rules
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.config_deepseek_target import DeepseekTargetConfig, deepseek_target_from_hf
from tests.deepseek_models import deepseek_config, deepseek_hf, deepseek_tensors

# Sizes that no golden folder has: three tokens per row, three streams, odd ranks and widths.
BOTH = {
    "num_hidden_layers": 7, "index_n_heads": 16, "index_head_dim": 6, "index_topk": 4,
    "compress_rope_theta": 900.0, "dspark_target_layer_ids": [1, 4],
    "rope_scaling": {
        "rope_type": "yarn", "factor": 3, "original_max_position_embeddings": 16,
        "beta_fast": 4, "beta_slow": 1,
    },
}  # fmt: skip
V4 = BOTH | {
    "compress_ratios": [4, 0, 3, 4, 5, 0, 1, 0, 0], "num_hash_layers": 2, "index_topk": 2,
}  # fmt: skip
V41 = BOTH | {
    "compress_ratios": [3, 3, 0, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [0, 3], "index_source_layer_ids": [0, 1, 3, 5],
    "candidate_source_layer_id": 3, "candidate_topk_blocks": 3, "candidate_block_size": 3,
    "engram_layer_ids": [1, 4], "engram_num_embeddings": [152, 224], "engram_vocab_size": 30,
    "engram_max_ngram_size": 3, "engram_n_heads": 2, "engram_head_dim": 5,
    "engram_pad_token_id": 2, "engram_compressed_vocab_size": 23,
}  # fmt: skip


FIELDS = {"deepseek_v4": V4, "deepseek_v41": V41}


def target_hf(family: str = "deepseek_v41", **changes: object) -> dict:
    """A `config.json` of a model with a target."""
    return deepseek_hf(family, **{**FIELDS[family], **changes})


def target_config(family: str = "deepseek_v41", **changes: object) -> DeepseekTargetConfig:
    """The target's config of `target_hf`."""
    vision = family == "deepseek_v41"
    return deepseek_target_from_hf(target_hf(family, **changes), has_vision_bias=vision)


def target_tensors(config: DeepseekTargetConfig, rng: np.random.Generator) -> dict:
    """Random tensors of the target under their stored names."""
    tensors = {}
    for rule in target_rules(config):
        for name, shape in zip(rule.names, rule.shapes, strict=True):
            scale = 1 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.3
            scale = 1.0 if name.endswith(("embed.weight", "wgate.weight")) else scale
            scale = 1.0 if name.endswith("ape") else scale
            ones = ("norm.weight", "_scale", "q_weight", "k_weight")
            shift = 1.0 if name.endswith(ones) else 0.0
            tensors[name] = (shift + scale * rng.normal(0, 1, shape)).astype(np.float32)
    table = (config.vocab_size, config.moe.num_experts_per_tok)
    for i in range(config.num_hash_layers):
        ids = rng.integers(0, config.moe.num_experts, table)
        tensors[f"layers.{i}.ffn.gate.tid2eid"] = ids.astype(np.int32)
    return tensors


def write_target(
    directory: Path, rng: np.random.Generator, family: str = "deepseek_v41", **changes: object
) -> tuple[dict, dict]:
    """Writes a checkpoint with a target and a draft.

    Args:
      directory: where to; must exist.
      rng: makes the weights.
      family: "deepseek_v4" or "deepseek_v41".
      **changes: fields of the config.

    Returns:
      The flat text config and the tensors.
    """
    hf = target_hf(family, **changes)
    tensors = deepseek_tensors(deepseek_config(family, **{**FIELDS[family], **changes}), rng)
    tensors |= target_tensors(target_config(family, **changes), rng)
    (directory / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    save_tensors(directory / "model.safetensors", tensors)
    return hf.get("text_config", hf), tensors
