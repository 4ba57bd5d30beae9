"""Configurations of DeepSeek V4 and V4.1 drafts and V4.1 targets, read from `config.json`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.config import RopeConfig

FAMILIES = ("deepseek_v4", "deepseek_v41")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekMoeConfig:
    """Experts of one layer: sqrt-softplus scores, a bias that only chooses, a shared expert."""

    num_experts: int  # E
    num_experts_per_tok: int
    moe_intermediate_size: int  # F
    num_shared_experts: int
    routed_scaling_factor: float  # sum of a token's expert weights
    swiglu_limit: float
    weight_sum_eps: float  # added to the sum that the weights are divided by
    has_vision_bias: bool  # the checkpoint has a second bias, for image tokens

    def __post_init__(self):
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be between 1 and the "
                f"draft's {self.num_experts} experts."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekDraftConfig:
    """The `mtp.*` stack of DeepSeek V4 or V4.1.

    `target_layer_ids` means, as everywhere here, the residual after that layer (-1: the
    embedding). V4.1 names the layers whose INPUT it reads, so its ids are one higher on disk.
    """

    model_type: str  # "deepseek_v4" or "deepseek_v41"
    vocab_size: int  # V, the target's
    hidden_size: int  # D, the target's
    num_stages: int  # blocks of the stack, as the checkpoint has them
    num_attention_heads: int  # N
    head_dim: int  # H, of queries and of the one key that is also the value
    qk_rope_head_dim: int  # the last of the H dimensions, rotated
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int  # context rows a block sees
    rope: RopeConfig
    rms_norm_eps: float
    moe: DeepseekMoeConfig
    hc_mult: int  # residual streams
    hc_sinkhorn_iters: int
    hc_eps: float
    block_size: int  # K rows
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int  # Q
    num_target_layers: int
    max_position_embeddings: int  # tokens
    round_kv_to_fp8: bool = False  # the window holds what the reference's FP8 cache holds

    def __post_init__(self):
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type={self.model_type!r}; expected one of {FAMILIES}.")
        for name in ("num_stages", "block_size", "sliding_window", "markov_rank", "hc_mult"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"o_groups={self.o_groups}."
            )
        if self.qk_rope_head_dim % 2 or not 2 <= self.qk_rope_head_dim <= self.head_dim:
            raise ValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even and at most "
                f"head_dim={self.head_dim}."
            )
        if self.round_kv_to_fp8 and self.fp8_kv_dims % self.fp8_kv_group:
            raise ValueError(
                f"round_kv_to_fp8 needs the {self.fp8_kv_dims} rounded dimensions of a row to be "
                f"a multiple of {self.fp8_kv_group}; leave it off for this model."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"dspark_noise_token_id={self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size}; it must be a row of the target's embedding."
            )
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1:
            raise ValueError(f"dspark_target_layer_ids must be strictly increasing; got {ids}.")
        if ids[-1] >= self.num_target_layers:
            raise ValueError(
                f"dspark_target_layer_ids reads past the target's {self.num_target_layers} layers."
            )

    @property
    def single_pass(self) -> bool:
        """V4.1: sublayers read with the weights of the one before, and there is no hc_head."""
        return self.model_type == "deepseek_v41"

    @property
    def normalise_queries(self) -> bool:
        """V4: every query head is divided by its root mean square."""
        return self.model_type == "deepseek_v4"

    @property
    def fp8_kv_dims(self) -> int:
        """First dimensions of a row that FP8 storage rounds: all in V4.1, the unrotated in V4."""
        return self.head_dim - (0 if self.single_pass else self.qk_rope_head_dim)

    @property
    def fp8_kv_group(self) -> int:
        """Dimensions that share a scale in FP8 storage of a row."""
        return 32 if self.single_pass else 64

    @property
    def enable_confidence_head(self) -> bool:
        """Every draft of these families has one."""
        return True

    @property
    def num_drafts(self) -> int:
        """Drafts per block: the anchor's row is a prediction row."""
        return self.block_size

    @property
    def output_vocab_size(self) -> int:
        """Tokens the draft can propose."""
        return self.vocab_size


def is_deepseek(hf: Mapping[str, Any]) -> bool:
    """Whether a decoded `config.json` is of DeepSeek V4 or V4.1."""
    return hf.get("model_type") in FAMILIES


def _text_fields(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], Callable[[str], Any]]:
    """The language model's fields and a way to demand one; settings nobody supports are refused."""
    text = hf.get("text_config") or hf

    def need(key: str) -> Any:
        if text.get(key) is None:
            family = hf.get("model_type")
            raise ValueError(f"config.json of {family} lacks `{key}`; got keys {sorted(text)}.")
        return text[key]

    expected = {
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "hidden_act": "silu",
        "norm_topk_prob": True, "num_key_value_heads": 1,
    }  # fmt: skip
    for key, value in expected.items():
        if text.get(key, value) != value:
            raise ValueError(f"{key}={text[key]!r} is not supported; expected {value!r}.")
    return text, need


def deepseek_draft_from_hf(
    hf: Mapping[str, Any], *, num_stages: int, has_vision_bias: bool
) -> DeepseekDraftConfig:
    """Builds the draft's config from its target's `config.json`.

    Args:
      hf: the decoded file; V4.1 nests the language model in `text_config`.
      num_stages: blocks found in the checkpoint. `num_nextn_predict_layers` is not read: released
        checkpoints with three stages say 1.
      has_vision_bias: the checkpoint's gates have a bias for image tokens.

    Returns:
      The config.

    Raises:
      ValueError: not a DeepSeek V4 config, a field is missing, the draft is not a DSpark draft,
        or a setting that changes the result is not supported.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config.json has model_type={family!r}; expected one of {FAMILIES}.")
    text, need = _text_fields(hf)
    if text.get("dspark_target_layer_ids") is None:
        raise ValueError(
            "config.json has no dspark_target_layer_ids: this checkpoint has no DSpark draft "
            "(the first releases came with a one-token MTP layer); use a -DSpark release."
        )
    first = 1 if family == "deepseek_v41" else 0
    default_experts = (text.get("n_routed_experts"), text.get("num_experts_per_tok"))
    experts = text.get("dspark_n_routed_experts", default_experts[0])
    per_token = text.get("dspark_num_experts_per_tok", default_experts[1])
    moe = DeepseekMoeConfig(
        num_experts=need("n_routed_experts") if experts is None else experts,
        num_experts_per_tok=need("num_experts_per_tok") if per_token is None else per_token,
        moe_intermediate_size=need("moe_intermediate_size"),
        num_shared_experts=text.get("n_shared_experts", 1),
        routed_scaling_factor=float(need("routed_scaling_factor")),
        swiglu_limit=float(need("swiglu_limit")),
        weight_sum_eps=1e-20 if family == "deepseek_v41" else 0.0,
        has_vision_bias=has_vision_bias,
    )
    same_names = (
        "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim",
        "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "hc_mult",
        "hc_sinkhorn_iters",
    )  # fmt: skip
    return DeepseekDraftConfig(
        model_type=family,
        **{name: need(name) for name in same_names},
        num_stages=num_stages,
        rope=RopeConfig(rope_theta=float(need("rope_theta")), interleaved=True),
        rms_norm_eps=float(need("rms_norm_eps")),
        moe=moe,
        hc_eps=float(need("hc_eps")),
        block_size=need("dspark_block_size"),
        mask_token_id=need("dspark_noise_token_id"),
        target_layer_ids=tuple(i - first for i in need("dspark_target_layer_ids")),
        markov_rank=need("dspark_markov_rank"),
        num_target_layers=need("num_hidden_layers"),
        max_position_embeddings=text.get("max_position_embeddings", 4096),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Embeddings of n-grams, looked up by hashes of the last tokens' classes."""

    layer_ids: tuple[int, ...]  # layers whose input they are added to
    num_embeddings: tuple[int, ...]  # rows of each of these layers' tables
    vocab_size: int  # every hash head has a prime number of rows from here on
    max_ngram_size: int  # n-grams of 2 to so many tokens
    num_heads: int  # hashes per n
    head_dim: int
    pad_token_id: int  # its class stands in for tokens before the first
    num_classes: int  # token classes: tokens that differ in case or accents share one

    def __post_init__(self):
        if self.max_ngram_size < 2 or self.num_heads < 1:
            raise ValueError(
                f"engram_max_ngram_size={self.max_ngram_size} must be at least 2 and "
                f"engram_n_heads={self.num_heads} at least 1."
            )
        ids = self.layer_ids
        if list(ids) != sorted(set(ids)) or len(self.num_embeddings) != len(ids):
            raise ValueError(
                f"engram_layer_ids={ids} must be strictly increasing, with one entry each in "
                f"engram_num_embeddings={self.num_embeddings}."
            )
        if not 1 <= self.num_classes < 2**24 or not 2 <= self.vocab_size < 2**24 - 2**16:
            raise ValueError(
                f"engram_compressed_vocab_size={self.num_classes} and engram_vocab_size="
                f"{self.vocab_size} are hashed in 24 bits and must be positive and well below 2^24."
            )

    @property
    def num_columns(self) -> int:
        """Rows looked up per token and layer."""
        return (self.max_ngram_size - 1) * self.num_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekTargetConfig:
    """The language model of DeepSeek V4.1.

    A layer attends to a window of tokens and, where its compression ratio is above 0, to one row
    for every `ratio` tokens. `kv_source_layer_ids` make these rows, `index_source_layer_ids`
    choose which of them a token sees; the layers up to the next source use the same.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # L
    num_attention_heads: int  # N
    head_dim: int  # H, of queries and of the one key that is also the value
    qk_rope_head_dim: int  # the last of the H dimensions, rotated
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int  # tokens, the own one included
    rope: RopeConfig  # of layers without compressed rows
    compress_rope: RopeConfig  # of all others
    compress_ratios: tuple[int, ...]  # per layer, tokens per compressed row; 0: none
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # compressed rows a token sees at most
    candidate_source_layer_id: int | None  # its blocks of rows limit what later sources choose
    candidate_topk_blocks: int
    candidate_block_size: int  # compressed rows
    rms_norm_eps: float
    moe: DeepseekMoeConfig
    hc_mult: int  # residual streams
    hc_sinkhorn_iters: int
    hc_eps: float
    engram: EngramConfig | None
    tap_layer_ids: tuple[int, ...]  # layers whose INPUT is a context feature, Engram added
    max_position_embeddings: int  # tokens

    def __post_init__(self):
        layers = self.num_hidden_layers
        if len(self.compress_ratios) != layers or min(self.compress_ratios, default=0) < 0:
            raise ValueError(
                f"compress_ratios={self.compress_ratios} must give a ratio for each of the "
                f"{layers} layers."
            )
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"o_groups={self.o_groups}."
            )
        narrowest = min(self.head_dim, self.index_head_dim)
        if self.qk_rope_head_dim % 2 or not 2 <= self.qk_rope_head_dim <= narrowest:
            raise ValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even and at most "
                f"head_dim={self.head_dim} and index_head_dim={self.index_head_dim}."
            )
        named = {
            "kv_source_layer_ids": self.kv_source_layer_ids,
            "index_source_layer_ids": self.index_source_layer_ids,
            "dspark_target_layer_ids": self.tap_layer_ids,
            "engram_layer_ids": self.engram.layer_ids if self.engram else (),
        }
        for name, ids in named.items():
            if any(not 0 <= i < layers for i in ids):
                raise ValueError(f"{name}={ids}: this target has layers 0..{layers - 1}.")
        self._check_sources()

    def _check_sources(self) -> None:
        """Every layer with compressed rows needs rows of its ratio and a choice among them."""
        kv, index = set(self.kv_source_layer_ids), set(self.index_source_layer_ids)
        if not kv <= index:
            raise ValueError(
                f"kv_source_layer_ids={sorted(kv)} must be in index_source_layer_ids="
                f"{sorted(index)}: a choice among rows does not outlive them."
            )
        made = 0
        for i, ratio in enumerate(self.compress_ratios):
            made = ratio if i in kv else made
            if (ratio and made != ratio) or (not ratio and i in index):
                raise ValueError(
                    f"layer {i} has compress_ratio {ratio} but the rows at hand have {made or None}"
                    f"; check compress_ratios, kv_source_layer_ids={sorted(kv)} and "
                    f"index_source_layer_ids={sorted(index)}."
                )
        source = self.candidate_source_layer_id
        if source is not None and source not in index:
            raise ValueError(
                f"candidate_source_layer_id={source} is not in index_source_layer_ids="
                f"{sorted(index)}."
            )


def deepseek_target_from_hf(
    hf: Mapping[str, Any], *, has_vision_bias: bool
) -> DeepseekTargetConfig:
    """Builds the config of a V4.1 target from its `config.json`.

    Args:
      hf: the decoded file; the language model is nested in `text_config`.
      has_vision_bias: the checkpoint's gates have a bias for image tokens.

    Returns:
      The config.

    Raises:
      ValueError: not a DeepSeek V4.1 config, a field is missing, or fields contradict each other.
    """
    if hf.get("model_type") != "deepseek_v41":
        raise ValueError(
            f"config.json has model_type={hf.get('model_type')!r}; the target is implemented for "
            "'deepseek_v41'."
        )
    text, need = _text_fields(hf)
    theta, scaling = float(need("compress_rope_theta")), dict(text.get("rope_scaling") or {})
    if scaling.get("rope_type", "yarn") != "yarn":
        raise ValueError(f"rope_scaling.rope_type={scaling['rope_type']!r}; expected 'yarn'.")
    compress_rope = RopeConfig(rope_theta=theta, interleaved=True)
    if scaling:
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        compress_rope = dataclasses.replace(
            compress_rope, rope_type="yarn", attention_factor=1.0,
            **{name: scaling[name] for name in names if name in scaling},
        )  # fmt: skip
    moe = DeepseekMoeConfig(
        num_experts=need("n_routed_experts"),
        num_experts_per_tok=need("num_experts_per_tok"),
        moe_intermediate_size=need("moe_intermediate_size"),
        num_shared_experts=text.get("n_shared_experts", 1),
        routed_scaling_factor=float(need("routed_scaling_factor")),
        swiglu_limit=float(need("swiglu_limit")),
        weight_sum_eps=1e-20,
        has_vision_bias=has_vision_bias,
    )
    engram = None
    if text.get("engram_layer_ids"):
        engram = EngramConfig(
            layer_ids=tuple(need("engram_layer_ids")),
            num_embeddings=tuple(need("engram_num_embeddings")),
            vocab_size=need("engram_vocab_size"),
            max_ngram_size=need("engram_max_ngram_size"),
            num_heads=need("engram_n_heads"),
            head_dim=need("engram_head_dim"),
            pad_token_id=need("engram_pad_token_id"),
            num_classes=need("engram_compressed_vocab_size"),
        )
    same_names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window",
        "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters",
    )  # fmt: skip
    lists = ("kv_source_layer_ids", "index_source_layer_ids")
    candidates = text.get("candidate_source_layer_id")
    return DeepseekTargetConfig(
        **{name: need(name) for name in same_names},
        **{name: tuple(need(name)) for name in lists},
        rope=RopeConfig(rope_theta=float(need("rope_theta")), interleaved=True),
        compress_rope=compress_rope,
        compress_ratios=tuple(need("compress_ratios"))[: need("num_hidden_layers")],
        candidate_source_layer_id=candidates,
        candidate_topk_blocks=0 if candidates is None else need("candidate_topk_blocks"),
        candidate_block_size=1 if candidates is None else need("candidate_block_size"),
        rms_norm_eps=float(need("rms_norm_eps")),
        moe=moe,
        hc_eps=float(need("hc_eps")),
        engram=engram,
        tap_layer_ids=tuple(text.get("dspark_target_layer_ids") or ()),
        max_position_embeddings=text.get("max_position_embeddings", 4096),
    )
