"""Dense draft checkpoints: DeepSpec, speculators and SpecForge layouts in, DeepSpec's out."""

import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.draft_layouts import deepspec_config_json, read_draft_config
from dspark_jax.checkpoint.draft_vocab import (
    EMBEDDING,
    HEAD,
    SHARED_NAMES,
    share_head,
    vocabulary_tensors,
)
from dspark_jax.checkpoint.fingerprint import FINGERPRINT_KEY, TargetFingerprint
from dspark_jax.checkpoint.orbax_layout import open_checkpoint
from dspark_jax.checkpoint.rules import (
    TensorRule,
    load_params,
    paired,
    reshaped,
    same,
    stored_tensors,
)
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.config import DraftConfig, TargetConfig, read_config_json
from dspark_jax.types import Params, SharedHead

_CONFIDENCE = "confidence_head.proj."
_FILES = {"config.json", "model.safetensors"}


def load_draft(
    directory: str | Path,
    target_config: TargetConfig,
    shared: SharedHead,
    *,
    dtype: jnp.dtype = jnp.float32,
    fingerprint: TargetFingerprint | None = None,
) -> tuple[DraftConfig, Params, SharedHead]:
    """Loads a dense draft for a target.

    Args:
      directory: `config.json` and safetensors, single or sharded, in the layout of DeepSpec,
        speculators or SpecForge.
      target_config: the target's architecture.
      shared: embedding [V, D] and LM head [V, D] of the target (`LlamaTarget.shared_head`).
      dtype: float32 or bfloat16, type of the draft's parameters.
      fingerprint: of the target; compared with the one the draft was saved with, if it has one.

    Returns:
      The config, the parameters of `DenseDraft`, and the head to use with them: the target's own
      arrays, or its rows for a reduced vocabulary.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: the layout is unknown, tensors are missing, left over or of another shape or
        type, or the draft was made for another target.
    """
    hf = read_config_json(directory)
    reader = open_checkpoint(directory, strip=("module.", "model."))
    config = read_draft_config(hf, reader)
    if FINGERPRINT_KEY in hf:
        trained_for = TargetFingerprint.from_json(hf[FINGERPRINT_KEY])
        _check_fingerprint(directory, trained_for, target_config, fingerprint)
    check_target(config, target_config)
    rules, extras, buffers = rules_and_extras(config, reader.names())
    params = load_params(reader, rules, dtype=dtype, ignore=extras + buffers, what="draft")
    if config.enable_confidence_head:
        params["confidence"].setdefault("bias", jnp.zeros((), dtype))
    return config, params, share_head(reader, config, shared)


def rules_and_extras(
    config: DraftConfig, names: set[str]
) -> tuple[list[TensorRule], tuple[str, ...], tuple[str, ...]]:
    """What the tensors of a checkpoint are to a draft.

    Args:
      config: the draft's architecture.
      names: the stored tensors.

    Returns:
      The rules of its parameters (a confidence head may have no bias); the frozen copies and
      token maps that are there; buffers that nothing needs.
    """
    rules = draft_rules(config)
    if _CONFIDENCE + "weight" in names and _CONFIDENCE + "bias" not in names:
        rules = [rule for rule in rules if rule.path != ("confidence", "bias")]
    extras = tuple(name for name in SHARED_NAMES if name in names)
    buffers = tuple(sorted(name for name in names if name.endswith("rotary_emb.inv_freq")))
    return rules, extras, buffers


def check_target(config: DraftConfig, target: TargetConfig) -> None:
    """Refuses a draft whose shapes or tapped layers do not fit a target.

    Args:
      config: the draft's architecture.
      target: the target's architecture.

    Raises:
      ValueError: vocabulary, width or number of layers differ, or a tapped layer is the target's
        last (there references disagree whether the final norm is applied) or beyond it.
    """
    pairs = {
        "vocab_size": (config.vocab_size, target.vocab_size),
        "hidden_size": (config.hidden_size, target.hidden_size),
        "num_target_layers": (
            config.num_target_layers or target.num_hidden_layers, target.num_hidden_layers,
        ),
    }  # fmt: skip
    for name, (got, expected) in pairs.items():
        if got != expected:
            raise ValueError(
                f"this draft was made for another target: {name}={got}, but the target has "
                f"{expected}. Load the target it was trained for, or a draft of this target."
            )
    last = target.num_hidden_layers - 1
    if config.target_layer_ids[-1] >= last:
        raise ValueError(
            f"target_layer_ids={list(config.target_layer_ids)} taps layer "
            f"{config.target_layer_ids[-1]}, but this target's last is {last}; expected layers "
            f"-1..{last - 1}. The last one is refused because references disagree whether its "
            "output is taken before or after the final norm: train with earlier layers."
        )


def save_draft(
    directory: str | Path,
    config: DraftConfig,
    params: Params,
    *,
    dtype: jnp.dtype = jnp.float32,
    include_frozen: SharedHead | None = None,
    fingerprint: TargetFingerprint | None = None,
) -> None:
    """Writes a draft in DeepSpec's layout, whole or not at all.

    Args:
      directory: where to; missing parents are made, an earlier draft there is replaced.
      config: the draft's architecture.
      params: its parameters.
      dtype: float32 or bfloat16, type of the stored weights.
      include_frozen: the head the draft runs with. Its embedding and head are stored too, as
        other engines want; with a reduced vocabulary it is needed for the token map.
      fingerprint: of the target the draft was trained for, checked when it is loaded.

    Raises:
      ValueError: the draft has a reduced vocabulary and no map was given.
      FileExistsError: the directory holds something else than a draft.
      OSError: the disk is full or not writable; an earlier draft stays as it was.
    """
    directory = Path(directory).resolve()
    if directory.exists() and {path.name for path in directory.iterdir()} - _FILES:
        raise FileExistsError(
            f"{directory} holds other files than a draft's {sorted(_FILES)}; choose a new "
            "directory, or empty this one."
        )
    hf = deepspec_config_json(config, dtype=jnp.dtype(dtype).name)
    tensors = stored_tensors(params, draft_rules(config), dtype)
    if fingerprint is not None:
        hf["num_target_layers"] = fingerprint.num_hidden_layers
        hf[FINGERPRINT_KEY] = fingerprint.to_json()
    if config.draft_vocab_size is not None:
        if include_frozen is None or include_frozen.target_ids is None:
            raise ValueError(
                f"a draft with draft_vocab_size={config.draft_vocab_size} needs its token map; "
                "pass the SharedHead it was loaded with as include_frozen."
            )
        tensors |= vocabulary_tensors(include_frozen)
    if include_frozen is not None:
        tensors[EMBEDDING] = np.asarray(include_frozen.embedding.astype(dtype))
        tensors[HEAD] = np.asarray(include_frozen.head.astype(dtype))
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        save_tensors(partial / "model.safetensors", tensors)
        text = json.dumps(hf, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
        _move_into_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_into_place(new: Path, directory: Path) -> None:
    """Renames `new` to `directory`, keeping what was there until that has worked."""
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    if directory.exists():
        directory.rename(old)
    try:
        new.rename(directory)
    except OSError:
        if old.exists():
            old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_fingerprint(
    directory: str | Path,
    trained_for: TargetFingerprint,
    target: TargetConfig,
    given: TargetFingerprint | None,
) -> None:
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers")
    differing = [x for x in sizes if getattr(trained_for, x) != getattr(target, x)]
    if differing or (given is not None and not trained_for.matches(given)):
        got = given.name if given is not None else target.model_type
        digests = "" if given is None else f" (sha256 {given.sha256[:12]}..)"
        because = f"; {', '.join(differing)} differ" if differing else ""
        raise ValueError(
            f"draft {directory} was trained for target {trained_for.name!r} (sha256 "
            f"{trained_for.sha256[:12]}..), but this target is {got!r}{digests}{because}. Load "
            f"that target, or remove {FINGERPRINT_KEY} from the draft's config.json to go on "
            "(the text stays right, few drafts will be accepted)."
        )


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
        bias = _CONFIDENCE + "bias"
        rules += [
            reshaped(("confidence", "weight"), _CONFIDENCE + "weight", (1, size), (size,)),
            reshaped(("confidence", "bias"), bias, (1,), (), transpose=False),
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
