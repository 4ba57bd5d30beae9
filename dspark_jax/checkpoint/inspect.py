"""What a checkpoint is, told from its config and headers; no weights are read."""

import collections
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dspark_jax.checkpoint.deepseek import draft_reader, read_deepseek_config, weight_block
from dspark_jax.checkpoint.draft_layouts import detect_layout, read_draft_config
from dspark_jax.checkpoint.orbax_layout import OrbaxReader, open_checkpoint
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.config import TARGET_ARCHITECTURES, TargetConfig, read_config_json
from dspark_jax.config_deepseek import DeepseekDraftConfig, is_deepseek

BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
}  # fmt: skip
_ANCHOR_PREDICTS = "row k sits at anchor_pos + k and predicts the token after it (the anchor's too)"
_ANCHOR_SILENT = "row k sits at anchor_pos + k; rows 1.. predict their own token, the anchor's none"


def inspect_checkpoint(directory: str | Path) -> dict[str, str]:
    """Describes a checkpoint.

    Args:
      directory: `config.json` and safetensors, single or sharded, or a converted directory.

    Returns:
      What there is to say, label -> text, in the order to print it.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: of no known kind, damaged, without a draft (DeepSeek), or a DeepSeek draft whose
        tensors do not match the config.
    """
    hf = read_config_json(directory)
    reader = open_checkpoint(directory, strip=("module.", "model."))
    if is_deepseek(hf):
        report = _deepseek(hf, reader)
    elif any(name in TARGET_ARCHITECTURES for name in hf.get("architectures") or []):
        report = _target(hf, open_checkpoint(directory))
    else:
        report = _dense_draft(hf, reader)
    if isinstance(reader, OrbaxReader):
        report["layout"] = f"converted to Orbax, {reader.manifest.dtype}" + (
            f", cut for {reader.manifest.mesh}" if reader.manifest.mesh else ""
        )
    return report


def _deepseek(hf: dict[str, Any], reader: TensorReader | OrbaxReader) -> dict[str, str]:
    family = {"deepseek_v4": "DeepSeek V4", "deepseek_v41": "DeepSeek V4.1"}[hf["model_type"]]
    config = read_deepseek_config(hf, reader.names())
    draft = draft_reader(hf, reader, config)
    mine = {name for name in reader.names() if name.startswith("mtp.")}
    block = weight_block(hf)
    stored = "not quantised" if block is None else f"FP8 in blocks of {block[0]}x{block[1]}, FP4"
    out = {
        "kind": f"{family} with a DSpark draft of {config.num_stages} blocks (mtp.*)",
        "weights": stored,
        "draft tensors": f"{len(mine):,}, all of them known",
        "draft parameters": f"{sum(math.prod(draft.shape(n)) for n in draft.names()):,}",
    }
    out |= _draft_facts(config, stored_ids=_stored_ids(hf, config))
    out |= {
        "window": f"{config.sliding_window} context rows",
        "experts": f"{config.moe.num_experts}, {config.moe.num_experts_per_tok} per token",
        "heads": f"Markov (rank {config.markov_rank}), confidence",
    }
    rest = reader.names() - mine
    out |= _sizes("draft", reader, mine) | _sizes("rest", reader, rest)
    out["to run it"] = "--draft with its own target, which is not here yet (tools/parity.py checks)"
    return out


def _stored_ids(hf: dict[str, Any], config: DeepseekDraftConfig) -> str:
    ids = (hf.get("text_config") or hf)["dspark_target_layer_ids"]
    return f"{ids}, the INPUT of each" if config.single_pass else f"{ids}, the output of each"


def _dense_draft(hf: dict[str, Any], reader: TensorReader | OrbaxReader) -> dict[str, str]:
    layout = {"deepspec": "DeepSpec", "specforge": "SpecForge", "speculators": "speculators"}
    config = read_draft_config(hf, reader)
    heads = [f"Markov ({config.markov_head_type}, rank {config.markov_rank})"]
    heads = heads if config.markov_rank else []
    heads += ["confidence"] if config.enable_confidence_head else []
    out = {"kind": f"dense draft, {layout[detect_layout(hf, reader)]} layout"}
    out |= _draft_facts(config, stored_ids=None)
    out["layers"] = str(config.num_hidden_layers)
    out["window"] = (
        f"{config.sliding_window} context rows" if config.sliding_window else "all the context"
    )
    out["vocabulary"] = f"{config.output_vocab_size:,} of the target's {config.vocab_size:,}"
    out["heads"] = ", ".join(heads) or "none (DFlash)"
    out |= _sizes("draft", reader, reader.names())
    out["to run it"] = f"python -m dspark_jax.serve --model TARGET --draft {reader.directory}"
    return out


def _target(hf: dict[str, Any], reader: TensorReader | OrbaxReader) -> dict[str, str]:
    config = TargetConfig.from_hf(hf)
    out = {
        "kind": f"target, {config.model_type}",
        "layers": f"{config.num_hidden_layers}, width {config.hidden_size}",
        "vocabulary": f"{config.vocab_size:,}",
        "context": f"{config.max_position_embeddings:,} tokens",
    }
    out |= _sizes("target", reader, reader.names())
    out["to run it"] = f"python -m dspark_jax.serve --model {reader.directory}"
    return out


def _draft_facts(config: Any, *, stored_ids: str | None) -> dict[str, str]:
    ids = list(config.target_layer_ids)
    speaks = getattr(config, "sample_from_anchor", True)
    return {
        "block": f"{config.block_size} rows, {config.num_drafts} drafts, mask token "
        f"{config.mask_token_id}",
        "slot rule": _ANCHOR_PREDICTS if speaks else _ANCHOR_SILENT,
        "taps": f"target layers {ids}, by their output (-1: the embedding)"
        + (f"; stored as {stored_ids}" if stored_ids else ""),
    }


def _sizes(label: str, reader: TensorReader | OrbaxReader, names: Iterable[str]) -> dict[str, str]:
    """Bytes of some tensors, by stored type."""
    by_type, names = collections.Counter(), set(names)
    if isinstance(reader, OrbaxReader):
        for leaf in reader.manifest.leaves:
            if not names.isdisjoint(leaf.names):
                by_type[leaf.dtype if leaf.form == "plain" else leaf.form] += leaf.nbytes()
        names = set()
    for name in names:
        kind = reader.dtype(name)
        by_type[kind] += math.prod(reader.shape(name)) * BITS.get(kind, 0) // 8
    listed = ", ".join(f"{kind} {size:,}" for kind, size in by_type.most_common())
    return {f"{label} bytes": f"{by_type.total():,}" + (f" ({listed})" if listed else "")}
