"""DeepSeek V4 and V4.1 checkpoints: the `mtp.*` draft stack, the embedding and the LM head."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.orbax_layout import OrbaxReader, open_checkpoint
from dspark_jax.checkpoint.quantized import DequantisingReader
from dspark_jax.checkpoint.rules import (
    TensorRule,
    check_stored,
    load_params,
    read_parameter,
    reshaped,
    same,
)
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.config import TargetConfig, read_config_json
from dspark_jax.config_deepseek import DeepseekDraftConfig, deepseek_draft_from_hf
from dspark_jax.config_deepseek_target import DeepseekTargetConfig
from dspark_jax.packed import SCALE_BYTES, PackedKernel
from dspark_jax.types import Params, SharedHead

_BlockConfig = DeepseekDraftConfig | DeepseekTargetConfig
EXPERT_FORMS = ("packed", "bfloat16", "float32")
_STAGE = re.compile(r"mtp\.(\d+)\.")
_COMPARED_ROWS = 64
_ALIASES = re.compile(r"mtp\.\d+\.(embed|head)\.weight")  # the target's own, if stored again
_MARKOV = {  # w1 and w2
    "deepseek_v41": ("markov_head.embed.weight", "markov_head.head.weight"),
    "deepseek_v4": ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
}


def load_deepseek_draft(
    directory: str | Path,
    *,
    dtype: jnp.dtype = jnp.float32,
    experts: str | None = None,
    target: tuple[TargetConfig, SharedHead] | None = None,
) -> tuple[DeepseekDraftConfig, Params, SharedHead]:
    """Loads the draft that travels inside a DeepSeek V4 or V4.1 checkpoint.

    Args:
      directory: `config.json` and safetensors, single or sharded, quantised or not.
      dtype: float32 or bfloat16; what the reference keeps in float32 stays so.
      experts: "packed" leaves the routed experts' matrices in FP4 or FP8 and dequantises each as
        it is used; "float32" or "bfloat16" is their type; None gives them `dtype`.
      target: the config and tables of the target it will draft for; the draft is refused unless
        it was made for it.

    Returns:
      The config, the parameters of `DeepseekDraft`, and the target's embedding and LM head.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: the checkpoint has no DSpark draft, tensors are missing, left over or of
        another shape or type, or it was made for another target.
    """
    hf = read_config_json(directory)
    reader = open_checkpoint(directory, strip=("model.",))
    config = read_deepseek_config(hf, reader.names())
    if target is not None:
        _check_target(directory, config, target[0])
    draft, rules = draft_reader(hf, reader, config), deepseek_rules(config)
    if experts is None:
        params = load_params(draft, rules, dtype=dtype, what="draft")
    else:
        params = _with_experts(draft, rules, dtype, experts)
    tables = {"embed.weight", "head.weight"} & reader.names()
    plain = DequantisingReader(reader, block=None, names=tables)
    shared = load_params(plain, shared_rules(config), dtype=dtype, what="target")
    shared = SharedHead(**shared["shared"])
    if target is not None:
        _check_tables(directory, shared, target[1])
    return config, params, shared


def _check_target(directory: str | Path, config: DeepseekDraftConfig, target: TargetConfig) -> None:
    pairs = {
        "vocab_size": (config.vocab_size, target.vocab_size),
        "hidden_size": (config.hidden_size, target.hidden_size),
        "num_hidden_layers": (config.num_target_layers, target.num_hidden_layers),
    }
    differing = [f"{k} {a} against {b}" for k, (a, b) in pairs.items() if a != b]
    if differing:
        raise ValueError(
            f"draft {directory} reads layers {list(config.target_layer_ids)} of its own "
            f"{config.model_type} target and does not fit this {target.model_type} target: "
            f"{', '.join(differing)}. Load the target it was trained with."
        )


def _check_tables(directory: str | Path, theirs: SharedHead, target: SharedHead) -> None:
    """Compares a few rows of embedding and head with the target's."""
    for name in ("embedding", "head"):
        a, b = getattr(theirs, name), getattr(target, name)
        rows = np.unique(np.linspace(0, a.shape[0] - 1, _COMPARED_ROWS).astype(np.int64))
        got, expected = (np.asarray(x[rows]).astype(np.float32) for x in (a, b))
        if np.abs(got - expected).max() > 2.0**-7 * np.abs(expected).max():
            raise ValueError(
                f"the {name} stored with draft {directory} is not that of this target; load the "
                "target the draft was trained with."
            )


def _with_experts(
    reader: DequantisingReader, rules: list[TensorRule], dtype: jnp.dtype, form: str
) -> Params:
    """Loads the routed experts in a form of their own."""
    if form not in EXPERT_FORMS:
        raise ValueError(f"experts={form!r}; expected one of {EXPERT_FORMS}.")
    routed = [rule for rule in rules if rule.path[-2:] in (("moe", "gate_up"), ("moe", "down"))]
    names = tuple(name for rule in routed for name in rule.names)
    rest = [rule for rule in rules if rule not in routed]
    params = load_params(reader, rest, dtype=dtype, ignore=names, what="draft")
    for rule in routed:
        _, layer, _, name = rule.path
        value = (
            _packed_kernel(reader, rule)
            if form == "packed"
            else jnp.asarray(read_parameter(reader, rule, jnp.dtype(form)))
        )
        params["layers"][layer]["moe"][name] = value
    return params


def _packed_kernel(reader: DequantisingReader, rule: TensorRule) -> PackedKernel:
    codes, scales, form, block = reader.packed(rule)
    low, high = SCALE_BYTES
    if scales.min() < low or scales.max() > high:
        raise ValueError(
            f"{'.'.join(map(str, rule.path))} of {reader.directory} has scales 2^"
            f"{int(scales.min()) - 127}..2^{int(scales.max()) - 127}, which cannot be multiplied "
            "in float32 without loss; load the experts as float32 or bfloat16."
        )
    return PackedKernel(
        codes=jnp.asarray(codes), scales=jnp.asarray(scales), form=form, block=block
    )


def shared_rules(config: DeepseekDraftConfig) -> list[TensorRule]:
    """Rules of the tables that the draft takes from its target: embedding and LM head."""
    table = (config.vocab_size, config.hidden_size)
    return [
        same(("shared", "embedding"), "embed.weight", table),
        same(("shared", "head"), "head.weight", table),
    ]


def draft_reader(
    hf: Mapping[str, Any], reader: TensorReader | OrbaxReader, config: DeepseekDraftConfig
) -> DequantisingReader:
    """The draft's tensors, checked against its config by their headers.

    Args:
      hf: the decoded `config.json`.
      reader: all stored tensors.
      config: of `read_deepseek_config`.

    Returns:
      A reader of the `mtp.*` tensors, the copies of the target's own left out.

    Raises:
      ValueError: tensors are missing, left over, of another shape or type.
    """
    names = {n for n in reader.names() if _STAGE.match(n) and not _ALIASES.fullmatch(n)}
    draft = DequantisingReader(reader, block=weight_block(hf), names=names)
    check_stored(draft, deepseek_rules(config), what="draft")
    return draft


def read_deepseek_config(hf: Mapping[str, Any], names: set[str]) -> DeepseekDraftConfig:
    """The draft's config, its stages counted in the checkpoint.

    Args:
      hf: the decoded `config.json`.
      names: all stored tensors.

    Returns:
      The config.

    Raises:
      ValueError: there is no draft, a stage is missing, or the config is not supported.
    """
    stages = sorted({int(m[1]) for name in names if (m := _STAGE.match(name))})
    if not stages or stages != list(range(len(stages))):
        found = [f"mtp.{i}" for i in stages] or "none"
        raise ValueError(
            f"the checkpoint should have the draft's blocks mtp.0, mtp.1, ..; found {found}. "
            "Fetch the shards that hold them, or a release with a DSpark draft."
        )
    return deepseek_draft_from_hf(
        hf, num_stages=len(stages), has_vision_bias="mtp.0.ffn.gate.bias_vl" in names
    )


def weight_block(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of an FP8 block; None when the config names no quantisation.

    Args:
      hf: the decoded `config.json`.

    Returns:
      The block, [32, 32] in V4.1 and [128, 128] in V4.

    Raises:
      ValueError: another kind of quantisation.
    """
    settings = hf.get("quantization_config") or (hf.get("text_config") or {}).get(
        "quantization_config"
    )
    if not settings:
        return None
    expected = {"quant_method": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    for key, value in expected.items():
        if settings.get(key, value) != value:
            raise ValueError(
                f"quantization_config.{key}={settings[key]!r} is not supported; expected {value!r}."
            )
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or min(block) < 1:
        raise ValueError(f"weight_block_size={block!r}; expected two positive numbers.")
    return block[0], block[1]


def deepseek_rules(config: DeepseekDraftConfig) -> list[TensorRule]:
    """Rules from the `mtp.*` names to the tree of `DeepseekDraft`.

    Args:
      config: the draft's architecture.

    Returns:
      One rule per parameter.

    Source: DeepSeek V4 and V4.1 inference code, state dict of `DSparkBlock`.
    """
    width, last = config.hidden_size, f"mtp.{config.num_stages - 1}."
    taps = len(config.target_layer_ids) * width
    w1, w2 = (last + name for name in _MARKOV[config.model_type])
    table, joined = (config.vocab_size, config.markov_rank), width + config.markov_rank
    rules = [
        reshaped(("context_proj",), "mtp.0.main_proj.weight", (width, taps), (taps, width)),
        same(("context_norm", "weight"), "mtp.0.main_norm.weight", (width,)),
        same(("norm", "weight"), last + "norm.weight", (width,)),
        same(("markov", "w1"), w1, table),
        same(("markov", "w2"), w2, table, exact=True),
        reshaped(
            ("confidence", "weight"), last + "confidence_head.proj.weight", (1, joined), (joined,),
            transpose=False, exact=True,
        ),
    ]  # fmt: skip
    if not config.single_pass:
        rules += mix_rules(config, ("hc_head",), last + "hc_head_", config.hc_mult, 1)
    for i in range(config.num_stages):
        rules += block_rules(config, i, f"mtp.{i}.")
    return rules


def block_rules(config: _BlockConfig, i: int, stored: str) -> list[TensorRule]:
    """Rules of what a block of the draft and a layer of the target have in common.

    Args:
      config: the architecture.
      i: the block or layer, by its place in the tree.
      stored: what its tensors' names begin with.

    Returns:
      Rules of attention, experts, norms and hyper-connections.
    """
    rules = _attention_rules(config, i, stored) + _expert_rules(config, i, stored)
    count = config.hc_mult * (2 + config.hc_mult)
    for part in ("attn", "ffn"):
        path, norm = ("layers", i, f"{part}_norm", "weight"), f"{stored}{part}_norm.weight"
        rules += mix_rules(config, ("layers", i, f"{part}_mix"), f"{stored}hc_{part}_", count, 3)
        rules.append(same(path, norm, (config.hidden_size,)))
    return rules


def mix_rules(
    config: _BlockConfig, path: tuple, stored: str, outputs: int, scales: int
) -> list[TensorRule]:
    """Rules of one hyper-connection.

    Args:
      config: the architecture.
      path: where its parameters lie.
      stored: what its tensors' names begin with.
      outputs: rows of `fn`.
      scales: entries of `scale`.

    Returns:
      Rules of fn, base and scale.
    """
    streams, width = config.hc_mult, config.hidden_size
    return [
        reshaped(
            (*path, "fn"), stored + "fn", (outputs, streams * width), (outputs, streams, width),
            transpose=False, exact=True,
        ),
        same((*path, "base"), stored + "base", (outputs,), exact=True),
        same((*path, "scale"), stored + "scale", (scales,), exact=True),
    ]  # fmt: skip


def _attention_rules(config: _BlockConfig, i: int, block: str) -> list[TensorRule]:
    width, head_dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    q_rank, groups, rank = config.q_lora_rank, config.o_groups, config.o_lora_rank
    ours, stored = ("layers", i, "attn"), block + "attn."
    inner = heads // groups * head_dim
    return [
        same((*ours, "sink"), stored + "attn_sink", (heads,), exact=True),
        reshaped((*ours, "q_a"), stored + "wq_a.weight", (q_rank, width), (width, q_rank)),
        same((*ours, "q_norm", "weight"), stored + "q_norm.weight", (q_rank,)),
        reshaped(
            (*ours, "q_b"), stored + "wq_b.weight", (heads * head_dim, q_rank),
            (q_rank, heads, head_dim),
        ),
        reshaped((*ours, "kv"), stored + "wkv.weight", (head_dim, width), (width, head_dim)),
        same((*ours, "kv_norm", "weight"), stored + "kv_norm.weight", (head_dim,)),
        TensorRule(
            path=(*ours, "o_a"),
            names=(stored + "wo_a.weight",),
            shapes=((groups * rank, inner),),
            pack=lambda x: x.reshape(groups, rank, inner).swapaxes(1, 2),
            unpack=lambda x: (x.swapaxes(1, 2).reshape(groups * rank, inner),),
        ),
        reshaped(
            (*ours, "o_b"), stored + "wo_b.weight", (width, groups * rank), (groups, rank, width)
        ),
    ]  # fmt: skip


def _expert_rules(config: _BlockConfig, i: int, block: str) -> list[TensorRule]:
    moe, width, stored = config.moe, config.hidden_size, block + "ffn."
    experts, size, ours = moe.num_experts, moe.moe_intermediate_size, ("layers", i, "moe")
    shared = moe.num_shared_experts * size
    gates = [f"{stored}experts.{e}.{x}.weight" for e in range(experts) for x in ("w1", "w3")]
    downs = [f"{stored}experts.{e}.w2.weight" for e in range(experts)]
    shared_gates = tuple(f"{stored}shared_experts.{x}.weight" for x in ("w1", "w3"))

    def pack_gates(*matrices: np.ndarray) -> np.ndarray:
        return np.stack(matrices).reshape(-1, 2, size, width).transpose(0, 3, 1, 2)

    def unpack_gates(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(x.transpose(0, 2, 3, 1).reshape(-1, size, width))

    rules = [
        reshaped((*ours, "router"), stored + "gate.weight", (experts, width), (width, experts)),
        same((*ours, "bias"), stored + "gate.bias", (experts,), exact=True),
        TensorRule(
            path=(*ours, "gate_up"), names=tuple(gates), shapes=((size, width),) * len(gates),
            pack=pack_gates, unpack=unpack_gates, group=2,
        ),
        TensorRule(
            path=(*ours, "down"), names=tuple(downs), shapes=((width, size),) * experts,
            pack=lambda *x: np.stack(x).transpose(0, 2, 1),
            unpack=lambda x: tuple(x.transpose(0, 2, 1)), group=1,
        ),
        TensorRule(
            path=(*ours, "shared_gate_up"), names=shared_gates, shapes=((shared, width),) * 2,
            pack=lambda a, b: np.stack([a.T, b.T], axis=1),
            unpack=lambda x: (x[:, 0].T, x[:, 1].T),
        ),
        reshaped(
            (*ours, "shared_down"), stored + "shared_experts.w2.weight", (width, shared),
            (shared, width),
        ),
    ]  # fmt: skip
    if moe.has_vision_bias:
        rules.append(same((*ours, "bias_vision"), stored + "gate.bias_vl", (experts,), exact=True))
    return rules
