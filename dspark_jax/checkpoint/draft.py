"""Dense draft checkpoints in DeepSpec's layout."""

import numpy as np

from dspark_jax.checkpoint.rules import TensorRule, paired, reshaped, same
from dspark_jax.config import DraftConfig


def draft_rules(config: DraftConfig) -> list[TensorRule]:
    """Rules from DeepSpec's tensor names to the tree of `DenseDraft`.

    Args:
      config: the draft's architecture.

    Returns:
      One rule per parameter. The frozen copies of embedding and LM head are not parameters.

    Source: DeepSpec Qwen3DSparkModel state dict.
    """
    width, rank = config.hidden_size, config.markov_rank
    taps = len(config.target_layer_ids) * width
    rules = [
        reshaped(("context_proj",), "fc.weight", (width, taps), (taps, width)),
        same(("context_norm", "weight"), "hidden_norm.weight", (width,)),
        same(("norm", "weight"), "norm.weight", (width,)),
    ]
    for i in range(config.num_hidden_layers):
        rules += _layer_rules(config, i)
    if rank:
        rules += _markov_rules(config)
    if config.enable_confidence_head:
        size = width + (rank if config.confidence_head_with_markov else 0)
        name = "confidence_head.proj."
        rules += [
            reshaped(("confidence", "weight"), name + "weight", (1, size), (size,)),
            reshaped(("confidence", "bias"), name + "bias", (1,), (), transpose=False),
        ]
    return rules


def _markov_rules(config: DraftConfig) -> list[TensorRule]:
    width, rank = config.hidden_size, config.markov_rank
    head = "markov_head."
    rules = [
        same(("markov", "w1"), head + "markov_w1.weight", (config.vocab_size, rank)),
        same(("markov", "w2"), head + "markov_w2.weight", (config.output_vocab_size, rank)),
    ]
    joined = {
        "gated": ("gate", "gate_proj.", width + rank, rank),
        "rnn": ("joint", "joint_proj.", width + 2 * rank, 3 * rank),
    }
    if config.markov_head_type in joined:
        ours, stored, rows, columns = joined[config.markov_head_type]
        path, name = ("markov", ours), head + stored
        rules += [
            reshaped((*path, "kernel"), name + "weight", (columns, rows), (rows, columns)),
            same((*path, "bias"), name + "bias", (columns,)),
        ]
    return rules


def _layer_rules(config: DraftConfig, i: int) -> list[TensorRule]:
    width, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    groups, size = config.num_key_value_heads, config.intermediate_size
    stored, ours = f"layers.{i}.", ("layers", i)
    attention, mlp = stored + "self_attn.", stored + "mlp."
    kv_names = (attention + "k_proj.weight", attention + "v_proj.weight")
    mlp_names = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    rules = [
        same((*ours, "attn_norm", "weight"), stored + "input_layernorm.weight", (width,)),
        same((*ours, "mlp_norm", "weight"), stored + "post_attention_layernorm.weight", (width,)),
        same((*ours, "q_norm", "weight"), attention + "q_norm.weight", (head_dim,)),
        same((*ours, "k_norm", "weight"), attention + "k_norm.weight", (head_dim,)),
        reshaped(
            (*ours, "q"), attention + "q_proj.weight", (heads * head_dim, width),
            (width, heads, head_dim),
        ),
        paired((*ours, "kv"), kv_names, groups * head_dim, width, (groups, head_dim)),
        reshaped(
            (*ours, "o"), attention + "o_proj.weight", (width, heads * head_dim),
            (heads, head_dim, width),
        ),
        paired((*ours, "mlp", "gate_up"), mlp_names, size, width, (size,)),
        reshaped((*ours, "mlp", "down"), mlp + "down_proj.weight", (width, size), (size, width)),
    ]  # fmt: skip
    if config.attention_bias:
        biases = tuple(f"{attention}{x}_proj.bias" for x in "kv")
        rules += [
            reshaped(
                (*ours, "q_bias"), attention + "q_proj.bias", (heads * head_dim,),
                (heads, head_dim), transpose=False,
            ),
            _paired_bias((*ours, "kv_bias"), biases, groups, head_dim),
            same((*ours, "o_bias"), attention + "o_proj.bias", (width,)),
        ]  # fmt: skip
    return rules


def _paired_bias(path: tuple, names: tuple[str, str], groups: int, head_dim: int) -> TensorRule:
    flat = groups * head_dim
    return TensorRule(
        path=path,
        names=names,
        shapes=((flat,), (flat,)),
        pack=lambda k, v: np.stack([k, v]).reshape(2, groups, head_dim),
        unpack=lambda x: tuple(x.reshape(2, flat)),
    )
