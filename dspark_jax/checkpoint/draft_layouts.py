"""The layouts dense drafts are stored in, each read into one `DraftConfig`; DeepSpec's is written.

The layout is told by keys and tensors, never by the class name: `DSparkDraftModel` is used for
unlike models by different projects. Conventions are converted here and nowhere else.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.config import DraftConfig, RopeConfig, dense_draft_from_hf

Layout = Literal["deepspec", "speculators", "specforge"]
Lookup = Callable[[str], Any]  # key -> value, None where absent

_NESTED = ("dspark_config", "dflash_config")
_PREFIXED = (
    "dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids",
)  # fmt: skip
_W1 = "markov_head.markov_w1.weight"
_CONFIDENCE = "confidence_head.proj.weight"
# tensors that betray a model of another kind
_FOREIGN = {
    "mtp.": "the DSpark stages inside a DeepSeek-V4 target",
    "midlayer.": "an EAGLE-3 draft",
    "layers.0.pre_feedforward_layernorm.": "a Gemma draft",
    "layers.0.self_attn.kv_a_proj_with_mqa.": "a draft with latent attention",
    "layers.0.mlp.experts.": "a mixture-of-experts draft",
}


def detect_layout(hf: Mapping[str, Any], reader: TensorReader) -> Layout:
    """Which layout a draft checkpoint is in.

    Args:
      hf: its decoded `config.json`.
      reader: its tensors, prefixes stripped.

    Returns:
      The layout's name.

    Raises:
      ValueError: it is not a dense DSpark or DFlash draft, or its weights are quantised.
    """
    names = reader.names()
    for prefix, kind in _FOREIGN.items():
        if any(name.startswith(prefix) for name in names):
            raise ValueError(
                f"{reader.directory} holds {kind} (tensor {prefix}..), not a dense DSpark draft; "
                f"config.json says architectures {hf.get('architectures')}."
            )
    if hf.get("quantization_config") or hf.get("quantization"):
        raise ValueError(
            f"draft {reader.directory} is quantised (quantization_config in config.json); expected "
            "float32, float16 or bfloat16 weights: fetch the unquantised draft."
        )
    if "transformer_layer_config" in hf or "speculators_model_type" in hf:
        return "speculators"
    if any(key in hf for key in (*_NESTED, *_PREFIXED)):
        return "specforge"
    if "target_layer_ids" in hf and "block_size" in hf:
        return "deepspec"
    raise ValueError(
        f"config.json of {reader.directory} (architectures {hf.get('architectures')}) is not a "
        "known draft layout; expected target_layer_ids and block_size (DeepSpec), "
        "transformer_layer_config (speculators) or dflash_config/dspark_config (SpecForge)."
    )


def read_draft_config(hf: Mapping[str, Any], reader: TensorReader) -> DraftConfig:
    """The draft's architecture in DeepSpec's terms, from any layout.

    Args:
      hf: the decoded `config.json`.
      reader: the tensors; consulted only for what the config leaves out.

    Returns:
      The draft config.

    Raises:
      ValueError: the layout is unknown, a field is missing or contradicts another, or a feature
        that changes the result is not supported.

    Source: DeepSpec build_draft_config; speculators DSparkSpeculatorConfig; SpecForge DSparkConfig.
    """
    layout = detect_layout(hf, reader)
    if layout == "speculators":
        return _from_speculators(hf, reader)
    if layout == "specforge":
        return _from_specforge(hf, reader)
    return _from_deepspec(hf, reader)


def deepspec_config_json(config: DraftConfig, *, dtype: str) -> dict[str, Any]:
    """`config.json` of a draft in DeepSpec's layout, as transformers 5 writes it.

    Args:
      config: the draft's architecture.
      dtype: type of the stored weights, such as "bfloat16".

    Returns:
      A JSON object; `read_draft_config` gives `config` back.

    Source: DeepSpec Qwen3 build_draft_config.
    """
    sliding = config.sliding_window is not None
    kind = "sliding_attention" if sliding else "full_attention"
    hf = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "enable_confidence_head": config.enable_confidence_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": [kind] * config.num_hidden_layers,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": 0 if sliding else config.num_hidden_layers,
        "num_anchors": 512,  # read by DeepSpec's trainer only
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope_parameters(config.rope),
        "sliding_window": config.sliding_window,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
        "vocab_size": config.vocab_size,
    }
    if config.num_target_layers is not None:
        hf["num_target_layers"] = config.num_target_layers
    if config.markov_rank:
        hf["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        hf["confidence_head_with_markov"] = config.confidence_head_with_markov
    if config.rope.interleaved:
        hf["rope_is_neox_style"] = False
    if not config.sample_from_anchor:
        hf |= {"sample_from_anchor": False, "dspark_bonus_anchor": True}
    if config.draft_vocab_size is not None:
        hf["draft_vocab_size"] = config.draft_vocab_size
    return dict(sorted(hf.items()))


def _from_deepspec(hf: Mapping[str, Any], reader: TensorReader) -> DraftConfig:
    return _build(
        hf,
        hf.get,
        reader,
        target_layer_ids=_ids(hf.get, "target_layer_ids"),
        mask_token_id=_need(hf.get, "mask_token_id"),
        sample_from_anchor=_anchor_flag(hf.get, default=True),
    )


def _from_specforge(hf: Mapping[str, Any], reader: TensorReader) -> DraftConfig:
    get = _nested_lookup(hf)
    _refuse(get, "causal", (None, False))
    _refuse(get, "attention_mode", (None, "gqa"))
    _refuse(get, "projector_type", (None, "dspark", "dflash"))
    mask = get("mask_token_id")
    return _build(
        hf,
        get,
        reader,
        target_layer_ids=_ids(get, "target_layer_ids"),
        mask_token_id=_need(get, "noise_token_id") if mask is None else mask,
        sample_from_anchor=_anchor_flag(get, default=True),
    )


def _from_speculators(hf: Mapping[str, Any], reader: TensorReader) -> DraftConfig:
    kind = str(hf.get("speculators_model_type", "dspark")).lower()
    if kind not in ("dspark", "dflash"):
        raise ValueError(
            f"speculators_model_type={kind!r} of {reader.directory} is not supported; expected "
            "'dspark' or 'dflash'."
        )
    base = hf.get("transformer_layer_config")
    if not isinstance(base, Mapping):
        raise ValueError(
            f"config.json of {reader.directory} lacks transformer_layer_config; got {sorted(hf)}."
        )
    for flag in ("enable_correction_head", "topk_context", "draft_adapter_rank"):
        _refuse(hf.get, flag, (None, False, 0))
    _refuse(hf.get, "projector_type", (None, "dflash"))
    _refuse(hf.get, "target_hidden_size", (None, base.get("hidden_size")))
    block_size, tokens = _need(hf.get, "block_size"), _proposed_tokens(hf)
    default = tokens == block_size if tokens is not None else kind == "dspark"
    from_anchor = _anchor_flag(hf.get, default=default)
    most = block_size if from_anchor else block_size - 1
    if tokens is not None and tokens > most:
        raise ValueError(
            f"speculators_config proposes {tokens} tokens, but block_size={block_size} with "
            f"sample_from_anchor={from_anchor} has {most} prediction rows; correct one of them."
        )
    if kind == "dflash":
        hf = {**hf, "markov_rank": 0, "enable_confidence_head": False}
    config = _build(
        base,
        hf.get,
        reader,
        target_layer_ids=tuple(i - 1 for i in _ids(hf.get, "aux_hidden_state_layer_ids")),
        mask_token_id=_need(hf.get, "mask_token_id"),
        sample_from_anchor=from_anchor,
    )
    if config.sliding_window is not None and not hf.get("sliding_window_non_causal", False):
        raise ValueError(
            f"draft {reader.directory} has sliding layers whose block rows see only earlier rows "
            "(sliding_window_non_causal=false), which is not supported; expected true."
        )
    return config


def _build(base: Mapping[str, Any], get: Lookup, reader: TensorReader, **fields) -> DraftConfig:
    """Joins the transformer fields of `base` with DSpark's own, looked up by `get`."""
    base = dict(base)
    norm = "layers.0.self_attn.q_norm.weight"
    if base.get("head_dim") is None and norm in reader.names():
        base["head_dim"] = reader.shape(norm)[0]  # D / N would be a guess
    draft_vocab = get("draft_vocab_size")
    return dense_draft_from_hf(
        base,
        block_size=_need(get, "block_size"),
        draft_vocab_size=None if draft_vocab == base.get("vocab_size") else draft_vocab,
        num_target_layers=get("num_target_layers"),
        sliding_window=_sliding_window(base),
        **_heads(base, get, reader),
        **fields,
    )


def _heads(base: Mapping[str, Any], get: Lookup, reader: TensorReader) -> dict[str, Any]:
    """Markov and confidence heads: what the config says, else what the tensors show."""
    names = reader.names()
    rank = get("markov_rank")
    if rank is None:
        rank = reader.shape(_W1)[1] if _W1 in names else 0
    kind = get("markov_head_type") if rank else None
    if rank and kind is None:
        shown = {"gate_proj": "gated", "joint_proj": "rnn"}
        found = [k for part, k in shown.items() if f"markov_head.{part}.weight" in names]
        kind = found[0] if found else "vanilla"
    enabled = get("enable_confidence_head")
    if enabled is None:
        enabled = get("use_confidence_head")
    if enabled is None:
        enabled = _CONFIDENCE in names
    with_markov = get("confidence_head_with_markov")
    if with_markov is None:
        wide = _CONFIDENCE not in names or reader.shape(_CONFIDENCE)[-1] > base["hidden_size"]
        with_markov = rank > 0 and wide
    return {
        "markov_rank": rank,
        "markov_head_type": kind.lower() if isinstance(kind, str) else kind,
        "enable_confidence_head": bool(enabled),
        "confidence_head_with_markov": bool(enabled and with_markov),
    }


def _sliding_window(base: Mapping[str, Any]) -> int | None:
    """The window all layers share; null, 0 or a false use_sliding_window show the whole context.

    Source: transformers Qwen3Config.
    """
    layers, kinds = base.get("num_hidden_layers") or 0, base.get("layer_types")
    window, switch = base.get("sliding_window") or None, base.get("use_sliding_window")
    unknown = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if unknown or (kinds is not None and len(kinds) != layers):
        raise ValueError(
            f"layer_types={kinds} is not supported for a draft of {layers} layers; expected one "
            "full_attention or sliding_attention per layer."
        )
    if window is None or switch is False:
        return None
    if kinds is None:
        first = base.get("max_window_layers") or 0 if switch else 0
        sliding = [i >= first for i in range(layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not all(sliding):
        raise ValueError(
            f"layer_types={kinds} with sliding_window={window}: drafts that mix full and sliding "
            "layers are not supported; expected one kind in all layers."
        )
    return int(window) if any(sliding) else None


def _nested_lookup(hf: Mapping[str, Any]) -> Lookup:
    """Looks a key up as dspark_KEY, in dspark_config, in dflash_config, then at the top level."""

    def get(key: str) -> Any:
        found = {f"dspark_{key}": hf.get(f"dspark_{key}")}
        found |= {f"{where}.{key}": (hf.get(where) or {}).get(key) for where in _NESTED}
        found[key] = hf.get(key)
        found = {where: value for where, value in found.items() if value is not None}
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise ValueError(f"config.json contradicts itself: {found}; make them agree.")
        return values[0] if values else None

    return get


def _anchor_flag(get: Lookup, *, default: bool) -> bool:
    """Does the anchor's row predict? `dspark_bonus_anchor` is the same flag, negated."""
    flag, bonus = get("sample_from_anchor"), get("dspark_bonus_anchor")
    if flag is not None and bonus is not None and bool(flag) == bool(bonus):
        raise ValueError(
            f"sample_from_anchor={flag} and dspark_bonus_anchor={bonus} contradict each other; "
            "exactly one of them is true."
        )
    if flag is None and bonus is not None:
        return not bonus
    return default if flag is None else bool(flag)


def _proposed_tokens(hf: Mapping[str, Any]) -> int | None:
    methods = (hf.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def _ids(get: Lookup, key: str) -> tuple[int, ...]:
    ids = _need(get, key)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"config.json has {key}={ids!r}; expected a list of layer numbers.")
    return tuple(ids)


def _need(get: Lookup, key: str) -> Any:
    value = get(key)
    if value is None:
        raise ValueError(f"config.json of the draft lacks `{key}`; add the value it was made with.")
    return value


def _refuse(get: Lookup, key: str, allowed: tuple) -> None:
    if get(key) not in allowed:
        raise ValueError(
            f"config.json of the draft has {key}={get(key)!r}, which is not supported; expected "
            f"{' or '.join(map(repr, allowed))}."
        )


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    keys = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
        ),
        "yarn": (
            "factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
            "attention_factor",
        ),
    }[rope.rope_type]  # fmt: skip
    scaling = {key: getattr(rope, key) for key in keys if getattr(rope, key) is not None}
    return {"rope_theta": rope.rope_theta, "rope_type": rope.rope_type, **scaling}
