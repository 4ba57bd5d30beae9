"""Target checkpoints in the Hugging Face layout."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.orbax_layout import open_checkpoint
from dspark_jax.checkpoint.rules import TensorRule, load_params, paired, reshaped, same
from dspark_jax.config import TargetConfig, read_config_json
from dspark_jax.types import Params


def target_rules(config: TargetConfig) -> list[TensorRule]:
    """Rules from transformers' tensor names to the tree of `LlamaTarget`, layers split.

    Args:
      config: the target's architecture.

    Returns:
      One rule per parameter.

    Source: transformers LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM.
    """
    width, vocab = config.hidden_size, config.vocab_size
    rules = [
        same(("embedding",), "model.embed_tokens.weight", (vocab, width)),
        same(("norm", "weight"), "model.norm.weight", (width,)),
    ]
    if not config.tie_word_embeddings:
        rules.append(same(("head",), "lm_head.weight", (vocab, width)))
    for i in range(config.num_hidden_layers):
        rules += _layer_rules(config, i)
    return rules


def load_target(
    directory: str | Path, *, dtype: jnp.dtype = jnp.float32
) -> tuple[TargetConfig, Params]:
    """Loads a target.

    Args:
      directory: `config.json` and safetensors, single or sharded.
      dtype: float32 or bfloat16.

    Returns:
      The config and the parameters with split layers (see `stack_layers`).

    Raises:
      FileNotFoundError: files are missing.
      ValueError: the architecture is unknown or the tensors do not match the config.
    """
    config = TargetConfig.from_hf(read_config_json(directory))
    reader = open_checkpoint(directory)
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    buffers = tuple(n for n in reader.names() if n.endswith("rotary_emb.inv_freq"))
    rules = target_rules(config)
    params = load_params(reader, rules, dtype=dtype, ignore=tied + buffers, what="target")
    return config, params


def _layer_rules(config: TargetConfig, i: int) -> list[TensorRule]:
    width, head_dim, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    per_group = config.num_attention_heads // groups
    stored, ours = f"model.layers.{i}.", ("layers", i)
    attention = stored + "self_attn."
    q_rows, kv_rows = groups * per_group * head_dim, groups * head_dim
    rules = [
        same((*ours, "attn_norm", "weight"), stored + "input_layernorm.weight", (width,)),
        same((*ours, "mlp_norm", "weight"), stored + "post_attention_layernorm.weight", (width,)),
        _qkv(config, (*ours, "qkv"), tuple(f"{attention}{x}_proj.weight" for x in "qkv")),
        reshaped(
            (*ours, "o"), attention + "o_proj.weight", (width, q_rows),
            (groups, per_group, head_dim, width),
        ),
    ]  # fmt: skip
    if config.qk_norm:
        for x in "qk":
            norm = f"{attention}{x}_norm.weight"
            rules.append(same((*ours, f"{x}_norm", "weight"), norm, (head_dim,)))
    if config.attention_bias:
        rules.append(
            TensorRule(
                path=(*ours, "qkv_bias"),
                names=tuple(f"{attention}{x}_proj.bias" for x in "qkv"),
                shapes=((q_rows,), (kv_rows,), (kv_rows,)),
                pack=lambda q, k, v: _group_qkv(config, q, k, v),
                unpack=lambda x: _ungroup_qkv(config, x),
            )
        )
        rules.append(same((*ours, "o_bias"), attention + "o_proj.bias", (width,)))
    if config.moe:
        return rules + _expert_rules(config, i)
    mlp, size = stored + "mlp.", config.intermediate_size
    names = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    rules.append(paired((*ours, "mlp", "gate_up"), names, size, width, (size,)))
    rules.append(
        reshaped((*ours, "mlp", "down"), mlp + "down_proj.weight", (width, size), (size, width))
    )
    return rules


def _expert_rules(config: TargetConfig, i: int) -> list[TensorRule]:
    moe, width, mlp = config.moe, config.hidden_size, f"model.layers.{i}.mlp."
    experts, size, ours = moe.num_experts, moe.moe_intermediate_size, ("layers", i, "mlp")
    gates = [f"{mlp}experts.{e}.{x}_proj.weight" for e in range(experts) for x in ("gate", "up")]
    downs = [f"{mlp}experts.{e}.down_proj.weight" for e in range(experts)]

    def pack_gates(*stored: np.ndarray) -> np.ndarray:
        return np.stack(stored).reshape(-1, 2, size, width).transpose(0, 3, 1, 2)

    def unpack_gates(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(x.transpose(0, 2, 3, 1).reshape(-1, size, width))

    return [
        reshaped((*ours, "router"), mlp + "gate.weight", (experts, width), (width, experts)),
        TensorRule(
            path=(*ours, "gate_up"), names=tuple(gates), shapes=((size, width),) * len(gates),
            pack=pack_gates, unpack=unpack_gates, group=2,
        ),
        TensorRule(
            path=(*ours, "down"), names=tuple(downs), shapes=((width, size),) * experts,
            pack=lambda *x: np.stack(x).transpose(0, 2, 1),
            unpack=lambda x: tuple(x.transpose(0, 2, 1)), group=1,
        ),
    ]  # fmt: skip


def _qkv(config: TargetConfig, path: tuple, names: tuple[str, ...]) -> TensorRule:
    width, head_dim, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    q_rows = config.num_attention_heads * head_dim
    return TensorRule(
        path=path,
        names=names,
        shapes=((q_rows, width), (groups * head_dim, width), (groups * head_dim, width)),
        pack=lambda q, k, v: np.moveaxis(_group_qkv(config, q, k, v), -1, 0),
        unpack=lambda x: _ungroup_qkv(config, np.moveaxis(x, 0, -1)),
    )


def _group_qkv(config: TargetConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Rows of Q, K and V regrouped by KV head: [G, N/G + 2, H, ..]."""
    groups, head_dim = config.num_key_value_heads, config.head_dim
    parts = [x.reshape(groups, -1, head_dim, *x.shape[1:]) for x in (q, k, v)]
    return np.concatenate(parts, axis=1)


def _ungroup_qkv(config: TargetConfig, x: np.ndarray) -> tuple[np.ndarray, ...]:
    per_group = config.num_attention_heads // config.num_key_value_heads
    parts = (x[:, :per_group], x[:, per_group], x[:, per_group + 1])
    rest = x.shape[3:]
    return tuple(part.reshape(-1, *rest) for part in parts)
