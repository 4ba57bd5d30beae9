"""The target of DeepSeek V4 and V4.1 checkpoints: all that is not the draft's."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.deepseek import block_rules, mix_rules, weight_block
from dspark_jax.checkpoint.engram_classes import read_token_classes
from dspark_jax.checkpoint.quantized import DequantisingReader
from dspark_jax.checkpoint.rules import TensorRule, load_params, reshaped, same
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.config import read_config_json
from dspark_jax.config_deepseek_target import (
    OVERLAPPING_RATIO,
    DeepseekTargetConfig,
    deepseek_target_from_hf,
)
from dspark_jax.types import Params

# The draft, and the image encoder with its rows: present, and no part of the language model.
_OTHERS = re.compile(r"(mtp|vision|aligner)\..*|image_(start|end|newline)")


def load_deepseek_target(
    directory: str | Path, *, token_classes: np.ndarray | None = None
) -> tuple[DeepseekTargetConfig, Params]:
    """Loads a V4 or V4.1 target, dequantised to float32.

    Args:
      directory: `config.json` and safetensors, single or sharded, quantised or not.
      token_classes: i32[V], Engram's class of every token; None reads `tokenizer.json`.

    Returns:
      The config and the parameters of `DeepseekTarget`.

    Raises:
      FileNotFoundError: files are missing, `tokenizer.json` among them if it is needed.
      ValueError: not a V4 or V4.1 checkpoint, tensors are missing, left over or of another shape
        or type, or tables of experts or token classes do not fit.
    """
    hf = read_config_json(directory)
    reader = TensorReader(directory, strip=("model.",))
    config = read_target_config(hf, reader.names())
    tables = {i: f"layers.{i}.ffn.gate.tid2eid" for i in range(config.num_hash_layers)}
    names = {name for name in reader.names() if not _OTHERS.fullmatch(name)}
    names -= set(tables.values())
    plain = DequantisingReader(reader, block=weight_block(hf), names=names)
    params = load_params(plain, target_rules(config), dtype=jnp.float32, what="target")
    for i, name in tables.items():
        params["layers"][i]["moe"]["expert_ids"] = _expert_ids(reader, name, config)
    if config.engram:
        if token_classes is None:
            token_classes = read_token_classes(directory, config.engram, config.vocab_size)
        _check_classes(token_classes, config)
        params["token_classes"] = jnp.asarray(token_classes, jnp.int32)
    return config, params


def read_target_config(hf: Mapping[str, Any], names: set[str]) -> DeepseekTargetConfig:
    """The target's config.

    Args:
      hf: the decoded `config.json`.
      names: all stored tensors; they tell whether gates have a bias for image tokens.

    Returns:
      The config.

    Raises:
      ValueError: not a V4 or V4.1 model, or the config is not supported.
    """
    return deepseek_target_from_hf(hf, has_vision_bias="layers.0.ffn.gate.bias_vl" in names)


def _expert_ids(reader: TensorReader, name: str, config: DeepseekTargetConfig) -> jnp.ndarray:
    """Experts of every token, i32[V, k]."""
    shape, limit = (config.vocab_size, config.moe.num_experts_per_tok), config.moe.num_experts
    if name not in reader.names():
        raise ValueError(f"target checkpoint {reader.directory} lacks {name}, its experts' table.")
    if reader.shape(name) != shape or reader.dtype(name) not in ("I32", "I64"):
        raise ValueError(
            f"{name} of {reader.directory} is {reader.dtype(name)} {list(reader.shape(name))}; "
            f"expected integers of shape {list(shape)}."
        )
    ids = reader.read(name)
    if ids.min() < 0 or ids.max() >= limit:
        raise ValueError(
            f"{name} of {reader.directory} names experts {ids.min()}..{ids.max()}; this model has "
            f"0..{limit - 1}."
        )
    return jnp.asarray(ids, jnp.int32)


def _check_classes(classes: np.ndarray, config: DeepseekTargetConfig) -> None:
    limit, shape = config.engram.num_classes, np.shape(classes)
    if shape != (config.vocab_size,) or np.min(classes) < 0 or np.max(classes) >= limit:
        raise ValueError(
            f"token classes have shape {list(shape)} and values {np.min(classes)}.."
            f"{np.max(classes)}; expected one in 0..{limit - 1} for each of {config.vocab_size} "
            "tokens."
        )


def target_rules(config: DeepseekTargetConfig) -> list[TensorRule]:
    """Rules from the names outside `mtp.*` to the tree of `DeepseekTarget`.

    Args:
      config: the target's architecture.

    Returns:
      One rule per stored parameter.

    Source: DeepSeek V4 and V4.1 inference code, state dict of `Transformer`.
    """
    table = (config.vocab_size, config.hidden_size)
    rules = [
        same(("embedding",), "embed.weight", table),
        same(("head",), "head.weight", table),
        same(("norm", "weight"), "norm.weight", (config.hidden_size,)),
    ]
    if not config.single_pass:
        rules += mix_rules(config, ("hc_head",), "hc_head_", config.hc_mult, 1)
    for i in range(config.num_hidden_layers):
        common = block_rules(config, i, f"layers.{i}.")
        hashed = i < config.num_hash_layers  # experts are not chosen by scores and a bias
        rules += [rule for rule in common if not hashed or rule.path[-2:] != ("moe", "bias")]
        if i in config.kv_source_layer_ids:
            rules += _row_rules(config, i) if config.single_pass else _placed_row_rules(config, i)
        if i in config.index_source_layer_ids:
            rules += _index_rules(config, i)
        if config.engram and i in config.engram.layer_ids:
            rules += _engram_rules(config, i)
    return rules


def _row_rules(config: DeepseekTargetConfig, i: int) -> list[TensorRule]:
    """Compressed rows and their index keys."""
    width, head_dim, key_dim = config.hidden_size, config.head_dim, config.index_head_dim
    rows, keys = ("layers", i, "attn", "compressor"), ("layers", i, "attn", "index_keys")
    stored, index = f"layers.{i}.attn.compressor.", f"layers.{i}.attn.indexer."
    kernels = {"kv": "wkv"} | ({"gate": "wgate"} if config.compress_ratios[i] > 1 else {})
    matrix = (head_dim, width)
    rules = [
        reshaped((*rows, ours), f"{stored}{name}.weight", matrix, matrix[::-1])
        for ours, name in kernels.items()
    ]
    return rules + [
        same((*rows, "norm", "weight"), stored + "norm.weight", (head_dim,)),
        reshaped((*keys, "k"), index + "wk.weight", (key_dim, head_dim), (head_dim, key_dim)),
        same((*keys, "k_norm", "weight"), index + "k_norm.weight", (key_dim,)),
    ]


def _placed_row_rules(config: DeepseekTargetConfig, i: int) -> list[TensorRule]:
    """V4's compressed rows, and index keys made in the same way."""
    ratio, width = config.compress_ratios[i], config.hidden_size
    wanted = [("compressor", "compressor.", config.head_dim)]
    if i in config.index_source_layer_ids:
        wanted.append(("index_keys", "indexer.compressor.", config.index_head_dim))
    rules = []
    for ours, stored, size in wanted:
        path, name = ("layers", i, "attn", ours), f"layers.{i}.attn.{stored}"
        channels = size * (2 if ratio == OVERLAPPING_RATIO else 1)
        matrix = (channels, width)
        rules += [
            reshaped((*path, "kv"), name + "wkv.weight", matrix, matrix[::-1]),
            reshaped((*path, "gate"), name + "wgate.weight", matrix, matrix[::-1]),
            same((*path, "bias"), name + "ape", (ratio, channels), exact=True),
            same((*path, "norm", "weight"), name + "norm.weight", (size,)),
        ]
    return rules


def _index_rules(config: DeepseekTargetConfig, i: int) -> list[TensorRule]:
    """Queries that choose rows."""
    width, rank = config.hidden_size, config.q_lora_rank
    heads, key_dim = config.index_n_heads, config.index_head_dim
    ours, stored = ("layers", i, "attn", "index_scores"), f"layers.{i}.attn.indexer."
    queries = (heads * key_dim, rank)
    return [
        reshaped((*ours, "q"), stored + "wq_b.weight", queries, (rank, heads, key_dim)),
        reshaped(
            (*ours, "weights"), stored + "weights_proj.weight", (heads, width), (width, heads)
        ),
    ]


def _engram_rules(config: DeepseekTargetConfig, i: int) -> list[TensorRule]:
    engram, width, streams = config.engram, config.hidden_size, config.hc_mult
    ours, stored = ("layers", i, "engram"), f"layers.{i}.engram."
    rows, inner = engram.num_embeddings[engram.layer_ids.index(i)], engram.num_columns
    inner, outer = inner * engram.head_dim, (streams + 1) * width
    per_stream = (streams, width)
    return [
        same((*ours, "table"), stored + "embed.weight", (rows, engram.head_dim)),
        reshaped((*ours, "kv"), stored + "wkv.weight", (outer, inner), (inner, streams + 1, width)),
        same((*ours, "q_scale"), stored + "q_weight", per_stream),
        same((*ours, "k_scale"), stored + "k_weight", per_stream),
    ]
