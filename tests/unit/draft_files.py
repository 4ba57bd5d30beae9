"""Draft checkpoints for tests: golden pairs read as plain dicts, rewritten in other layouts."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint.target import load_target
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.draft.propose import propose
from dspark_jax.kv_cache import write_rows
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import Block, Params, SamplingParams, SharedHead

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FROZEN = ("embed_tokens.weight", "lm_head.weight")
# what Qwen3Config holds; the rest of a DeepSpec config is DSpark's
TRANSFORMER_KEYS = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
    "sliding_window", "use_sliding_window", "vocab_size",
)  # fmt: skip


def read_files(directory: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """`config.json` and the tensors of a directory."""
    hf = json.loads((directory / "config.json").read_text())
    return hf, load_file(directory / "model.safetensors")


def write_files(directory: Path, hf: Mapping, tensors: Mapping, *, shards: int = 1) -> Path:
    """Writes a checkpoint directory, sharded by name when `shards` > 1."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    weight_map = {}
    for i in range(shards):
        part = sorted(tensors)[i::shards]
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({key: tensors[key] for key in part}, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def golden_target(name: str) -> tuple[TargetConfig, SharedHead]:
    """Config and shared head of a golden pair's target."""
    config, params = load_target(GOLDEN / name / "target")
    return config, LlamaTarget(config=config).shared_head(params)


def to_speculators(hf: Mapping, tensors: Mapping, *, ids: np.ndarray | None = None) -> tuple:
    """A DeepSpec checkpoint as speculators would have saved it.

    Args:
      hf: DeepSpec's config.
      tensors: DeepSpec's tensors.
      ids: target tokens of a reduced vocabulary; None keeps all.

    Returns:
      Config and tensors.
    """
    heads = {key: hf[key] for key in hf if key.startswith(("markov_", "enable_", "confidence_"))}
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {key: hf[key] for key in TRANSFORMER_KEYS},
        "aux_hidden_state_layer_ids": [i + 1 for i in hf["target_layer_ids"]],
        "block_size": hf["block_size"],
        "draft_vocab_size": hf["vocab_size"] if ids is None else len(ids),
        "mask_token_id": hf["mask_token_id"],
        "sample_from_anchor": True,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": hf["block_size"]}
            ],
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        **heads,
    }
    out = {key: value for key, value in tensors.items() if key not in FROZEN}
    if ids is not None:
        mask = np.zeros(hf["vocab_size"], bool)
        mask[ids] = True
        out |= {"d2t": ids - np.arange(len(ids)), "t2d": mask}
        out["lm_head.weight"] = tensors["lm_head.weight"][ids]
        if hf["markov_rank"]:
            out["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][ids]
    return config, out


def to_specforge(hf: Mapping, tensors: Mapping) -> tuple[dict, dict]:
    """A DeepSpec checkpoint as SpecForge would have saved it: heads nested, nothing frozen."""
    nested = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type")
    nested += ("enable_confidence_head", "confidence_head_with_markov")
    config = {key: hf[key] for key in TRANSFORMER_KEYS}
    config |= {
        "architectures": ["DSparkDraftModel"],
        "block_size": hf["block_size"],
        "num_target_layers": hf["num_target_layers"],
        "dflash_config": {
            "attention_mode": "gqa",
            "projector_type": "dspark",
            "confidence_head_alpha": 1.0,
            **{key: hf[key] for key in nested if key in hf},
        },
    }
    return config, {key: value for key, value in tensors.items() if key not in FROZEN}


def draft_from(
    config: DraftConfig,
    params: Params,
    shared: SharedHead,
    *,
    spoil_before: int = 0,
    context: int | None = None,
) -> Block:
    """Drafts a block after the context of `qwen3_vanilla`'s golden vectors.

    Args:
      config: the draft's architecture.
      params: its parameters.
      shared: its head.
      spoil_before: context rows that are filled with other values, from row 0 on.
      context: rows of context used; None takes all.

    Returns:
      The block, drafted greedily.
    """
    golden = load_file(GOLDEN / "qwen3_vanilla" / "block_forward.safetensors")
    features = golden["context_features"][:, :context].copy()
    features[:, :spoil_before] = 7.0
    length = features.shape[1]
    draft = DenseDraft(config=config)
    k, v = draft.context_kv(params, jnp.asarray(features), jnp.arange(length)[None])
    zero, count = jnp.zeros(1, jnp.int32), jnp.full(1, length, jnp.int32)
    cache = draft.make_cache(1, length, jnp.float32)
    cache = write_rows(cache, k, v, first_slot=0, start=zero, count=count)
    greedy = SamplingParams(
        temperature=jnp.zeros(1), top_k=zero, top_p=jnp.ones(1), min_p=jnp.zeros(1),
        seed=jnp.zeros(1, jnp.uint32),
    )  # fmt: skip
    return propose(
        draft, params, shared, cache,
        anchor=jnp.asarray(golden["token_ids"][:, length]).astype(jnp.int32), anchor_pos=count,
        round_index=zero, sampling=greedy, coupled=False,
    )  # fmt: skip
