"""Tiny DeepSeek V4 and V4.1 checkpoints, made on the spot: real names, random weights."""

import copy
import json
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.deepseek import deepseek_rules
from dspark_jax.checkpoint.rules import load_params
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.config_deepseek import DeepseekDraftConfig, deepseek_draft_from_hf
from dspark_jax.types import Params

TEXT = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 1, "head_dim": 10, "qk_rope_head_dim": 4, "q_lora_rank": 7,
    "o_groups": 3, "o_lora_rank": 5, "sliding_window": 6, "rope_theta": 100.0,
    "rms_norm_eps": 1e-6, "moe_intermediate_size": 9, "n_routed_experts": 7,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "swiglu_limit": 0.5, "hc_mult": 3,
    "hc_sinkhorn_iters": 4, "hc_eps": 1e-3, "dspark_block_size": 4, "dspark_noise_token_id": 60,
    "dspark_target_layer_ids": [1, 4], "dspark_markov_rank": 8, "num_nextn_predict_layers": 1,
    "hidden_act": "silu", "max_position_embeddings": 64,
}  # fmt: skip


def deepseek_hf(family: str, **changes: object) -> dict:
    """A `config.json`: flat for V4, nested in `text_config` for V4.1.

    Args:
      family: "deepseek_v4" or "deepseek_v41".
      **changes: fields of the language model; the V4.1 draft has experts of its own.

    Returns:
      The decoded file.
    """
    text = copy.deepcopy(TEXT) | changes
    if family == "deepseek_v4":
        return {"architectures": ["DeepseekV4ForCausalLM"], "model_type": family} | text
    text = {"dspark_n_routed_experts": 5, "dspark_num_experts_per_tok": 2} | text
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": family,
        "text_config": text | {"rms_norm_eps": changes.get("rms_norm_eps", 1e-20)},
    }


def deepseek_config(family: str, *, stages: int = 2, **changes: object) -> DeepseekDraftConfig:
    """The config of `deepseek_hf` with so many stages."""
    vision = family == "deepseek_v41"
    hf = deepseek_hf(family, **changes)
    return deepseek_draft_from_hf(hf, num_stages=stages, has_vision_bias=vision)


def deepseek_tensors(config: DeepseekDraftConfig, rng: np.random.Generator) -> dict:
    """Random tensors of the draft, the embedding and the head, under their stored names."""
    shapes = {
        name: shape
        for rule in deepseek_rules(config)
        for name, shape in zip(rule.names, rule.shapes, strict=True)
    }
    table = (config.vocab_size, config.hidden_size)
    shapes |= {"embed.weight": table, "head.weight": table}
    tensors = {}
    for name, shape in shapes.items():
        noise = rng.normal(0, 1, shape)
        scale = 1 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.3
        shift = 1.0 if name.endswith(("norm.weight", "_scale")) else 0.0
        tensors[name] = (shift + scale * noise).astype(np.float32)
    return tensors


class _Memory:
    """Tensors in memory, as a checkpoint's reader gives them."""

    directory = "memory"

    def __init__(self, tensors: dict):
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]


def deepseek_params(config: DeepseekDraftConfig, rng: np.random.Generator) -> Params:
    """Random parameters; unlike `DeepseekDraft.init`, there is nothing to compile."""
    tensors = deepseek_tensors(config, rng)
    memory = _Memory({k: v for k, v in tensors.items() if k.startswith("mtp.")})
    return load_params(memory, deepseek_rules(config), dtype=np.float32, what="draft")


def write_deepseek(
    directory: Path, family: str, rng: np.random.Generator, *, stages: int = 2, **changes: object
) -> tuple[dict, dict]:
    """Writes a checkpoint with a draft and no target layers.

    Args:
      directory: where to; must exist.
      family: "deepseek_v4" or "deepseek_v41".
      rng: makes the weights.
      stages: blocks of the draft.
      **changes: fields of the config.

    Returns:
      The flat text config and the tensors.
    """
    tensors = deepseek_tensors(deepseek_config(family, stages=stages, **changes), rng)
    hf = deepseek_hf(family, **changes)
    (directory / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    save_tensors(directory / "model.safetensors", tensors)
    return hf.get("text_config", hf), tensors
