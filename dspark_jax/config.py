"""Model configurations: frozen, validated, read from Hugging Face `config.json`.

Field names are those of `transformers`, so a config reads like the file it came from.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TARGET_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and optional context-length scaling."""

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None derives it from `factor`
    interleaved: bool = False  # pairs (2i, 2i+1) instead of (i, i + H/2)

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type={self.rope_type!r} is not supported; expected one of {ROPE_TYPES}."
            )
        if self.rope_theta <= 0 or self.factor <= 0:
            raise ValueError(
                f"rope_theta={self.rope_theta} and factor={self.factor} must be positive."
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

        Args:
          hf: the decoded `config.json`.

        Returns:
          The rotary settings.

        Raises:
          ValueError: no base frequency is given, or the scaling is of an unknown kind.
        """
        params = dict(hf.get("rope_parameters") or {})
        if not params:
            params = dict(hf.get("rope_scaling") or {})
            if "type" in params:
                params.setdefault("rope_type", params["type"])
        theta = params.get("rope_theta", hf.get("rope_theta"))
        if theta is None:
            raise ValueError(
                "config.json has neither rope_parameters.rope_theta nor rope_theta; "
                "add the base frequency the model was trained with."
            )
        partial = params.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ValueError(
                f"partial_rotary_factor={partial} is not supported; expected 1.0 for this family."
            )
        kind = params.get("rope_type") or "default"
        keys = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        known = {k: float(params[k]) for k in keys if params.get(k) is not None}
        if kind in ("llama3", "yarn"):
            original = params.get("original_max_position_embeddings")
            original = hf.get("max_position_embeddings", 8192) if original is None else original
            known["original_max_position_embeddings"] = int(original)
        return cls(
            rope_theta=float(theta),
            rope_type=kind,
            attention_factor=params.get("attention_factor"),
            interleaved=not hf.get("rope_is_neox_style", True),
            **known,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed experts of one layer (Qwen3-MoE: softmax scores, no shared expert)."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool

    def __post_init__(self):
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be between 1 and "
                f"num_experts={self.num_experts}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A decoder-only target: Llama, Qwen3 or Qwen3-MoE."""

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # L
    num_attention_heads: int  # N
    num_key_value_heads: int  # G
    head_dim: int  # H
    intermediate_size: int  # F
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool = False
    moe: MoeConfig | None = None
    max_position_embeddings: int = 4096  # tokens
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        _check_heads(self)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "TargetConfig":
        """Builds the config from a decoded `config.json`.

        Args:
          hf: the decoded `config.json` of transformers 4 or 5.

        Returns:
          The target config.

        Raises:
          ValueError: the architecture is unknown, a field is missing, or a feature that changes
            the result (MLP bias, another activation, mixed dense and sparse layers) is asked for.
        """
        names = hf.get("architectures") or []
        known = [n for n in names if n in TARGET_ARCHITECTURES]
        if not known:
            raise ValueError(
                f"target architecture {names} is not supported; expected one of "
                f"{sorted(TARGET_ARCHITECTURES)} in config.json `architectures`."
            )
        model_type = TARGET_ARCHITECTURES[known[0]]
        _refuse(hf, "mlp_bias", (None, False))
        _refuse(hf, "hidden_act", (None, "silu"))
        _refuse(hf, "use_sliding_window", (None, False))
        moe = None
        if model_type == "qwen3_moe":
            _refuse(hf, "decoder_sparse_step", (None, 1))
            _refuse(hf, "mlp_only_layers", (None, [], ()))
            experts = hf.get("num_local_experts", hf.get("num_experts"))
            if experts is None:
                raise ValueError("config.json of a MoE target lacks num_experts.")
            moe = MoeConfig(
                num_experts=experts,
                num_experts_per_tok=_need(hf, "num_experts_per_tok"),
                moe_intermediate_size=_need(hf, "moe_intermediate_size"),
                norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
            )
        eos = hf.get("eos_token_id")
        eos = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        return cls(
            model_type=model_type,
            **_dense_dims(hf),
            rope=RopeConfig.from_hf(hf),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=model_type != "llama",
            attention_bias=bool(hf.get("attention_bias", False)),
            moe=moe,
            max_position_embeddings=int(hf.get("max_position_embeddings", 4096)),
            eos_token_ids=eos,
            bos_token_id=hf.get("bos_token_id"),
        )


MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A dense DSpark draft in DeepSpec's terms.

    `target_layer_ids` always means the OUTPUT of that target layer (-1: the embedding); other
    conventions are converted where the checkpoint is read.
    """

    vocab_size: int  # V, the target's
    hidden_size: int  # D, the target's
    num_hidden_layers: int  # draft layers
    num_attention_heads: int  # N
    num_key_value_heads: int  # G
    head_dim: int  # H
    intermediate_size: int  # F
    rms_norm_eps: float
    rope: RopeConfig
    block_size: int  # K rows
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int  # Q; 0 is DFlash
    markov_head_type: str | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_vocab_size: int | None = None  # fewer output tokens than the target, by a d2t map
    sample_from_anchor: bool = True  # the anchor's row is itself a prediction row
    attention_bias: bool = False
    sliding_window: int | None = None  # context rows each block sees; None sees all
    num_target_layers: int | None = None
    max_position_embeddings: int = 4096

    def __post_init__(self):
        _check_heads(self)
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1:
            raise ValueError(
                f"target_layer_ids={list(ids)} must be strictly increasing and at least -1."
            )
        if self.num_target_layers is not None and ids[-1] >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids={list(ids)} names a layer past the target's last, "
                f"{self.num_target_layers - 1}."
            )
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be at least 1.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size}; it must be a row of the target's embedding."
            )
        if self.markov_rank > 0 and self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"markov_head_type={self.markov_head_type!r} with markov_rank="
                f"{self.markov_rank}; expected one of {MARKOV_HEAD_TYPES}."
            )
        if self.markov_rank == 0 and self.enable_confidence_head:
            if self.confidence_head_with_markov:
                raise ValueError(
                    "confidence_head_with_markov=true needs a Markov head, but markov_rank is 0; "
                    "set confidence_head_with_markov to false or give a rank."
                )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be positive or null.")

    @property
    def num_drafts(self) -> int:
        """Drafts per block: K, or K - 1 when the anchor's row predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def output_vocab_size(self) -> int:
        """Tokens the draft can propose."""
        return self.draft_vocab_size or self.vocab_size


def _dense_dims(hf: Mapping[str, Any]) -> dict[str, Any]:
    heads = _need(hf, "num_attention_heads")
    width = _need(hf, "hidden_size")
    return {
        "vocab_size": _need(hf, "vocab_size"),
        "hidden_size": width,
        "num_hidden_layers": _need(hf, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or width // heads,
        "intermediate_size": _need(hf, "intermediate_size"),
        "rms_norm_eps": float(_need(hf, "rms_norm_eps")),
    }


def dense_draft_from_hf(hf: Mapping[str, Any], **draft_fields: Any) -> DraftConfig:
    """Builds a `DraftConfig` from the transformer fields of `hf` and DSpark's own fields.

    Args:
      hf: decoded config with the transformer fields (flat, as Qwen3's).
      **draft_fields: the fields of `DraftConfig` that `hf` does not carry under their own name.

    Returns:
      The draft config.

    Raises:
      ValueError: a field is missing or contradicts another.
    """
    _refuse(hf, "hidden_act", (None, "silu"))
    _refuse(hf, "mlp_bias", (None, False))
    return DraftConfig(
        **_dense_dims(hf),
        rope=RopeConfig.from_hf(hf),
        attention_bias=bool(hf.get("attention_bias", False)),
        max_position_embeddings=int(hf.get("max_position_embeddings", 4096)),
        **draft_fields,
    )


def read_config_json(directory: str | Path) -> dict[str, Any]:
    """Reads `config.json` of a checkpoint directory.

    Args:
      directory: the checkpoint directory.

    Returns:
      The decoded JSON object.

    Raises:
      FileNotFoundError: the directory or the file is missing.
      ValueError: the file is not a JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} not found; expected a checkpoint directory in the Hugging Face layout."
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _need(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"config.json lacks `{key}`; got keys {sorted(hf)}.")
    return hf[key]


def _refuse(hf: Mapping[str, Any], key: str, allowed: tuple) -> None:
    if hf.get(key) not in allowed:
        raise ValueError(
            f"config.json has {key}={hf[key]!r}, which is not supported; expected "
            f"{' or '.join(map(repr, allowed[1:]))}."
        )


def _check_heads(config: TargetConfig | DraftConfig) -> None:
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be positive.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}."
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} must be even for rotary embedding.")
