"""Configurations of the DeepSeek V4 and V4.1 draft stacks, read from Hugging Face `config.json`."""

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


def text_fields(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], Callable[[str], Any]]:
    """The language model's part of a `config.json`, with the settings common to all checked.

    Args:
      hf: the decoded file; V4.1 nests the language model in `text_config`.

    Returns:
      Its fields, and a function that gives one or raises.

    Raises:
      ValueError: a setting that changes the result is not supported.
    """
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


def moe_config(
    hf: Mapping[str, Any], sizes: tuple[int, int], *, has_vision_bias: bool
) -> DeepseekMoeConfig:
    """Experts of the draft or of the target, which differ in their number only.

    Args:
      hf: the decoded `config.json`.
      sizes: routed experts, and how many of them a token takes.
      has_vision_bias: the checkpoint's gates have a bias for image tokens.

    Returns:
      The config.

    Raises:
      ValueError: a field is missing, or the sizes contradict each other.
    """
    text, need = text_fields(hf)
    return DeepseekMoeConfig(
        num_experts=sizes[0],
        num_experts_per_tok=sizes[1],
        moe_intermediate_size=need("moe_intermediate_size"),
        num_shared_experts=text.get("n_shared_experts", 1),
        routed_scaling_factor=float(need("routed_scaling_factor")),
        swiglu_limit=float(need("swiglu_limit")),
        weight_sum_eps=1e-20 if hf["model_type"] == "deepseek_v41" else 0.0,
        has_vision_bias=has_vision_bias,
    )


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
    text, need = text_fields(hf)
    if text.get("dspark_target_layer_ids") is None:
        raise ValueError(
            "config.json has no dspark_target_layer_ids: this checkpoint has no DSpark draft "
            "(the first releases came with a one-token MTP layer); use a -DSpark release."
        )
    first = 1 if family == "deepseek_v41" else 0
    sizes = tuple(
        text[own] if text.get(own) is not None else need(targets)
        for own, targets in (
            ("dspark_n_routed_experts", "n_routed_experts"),
            ("dspark_num_experts_per_tok", "num_experts_per_tok"),
        )
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
        moe=moe_config(hf, sizes, has_vision_bias=has_vision_bias),
        hc_eps=float(need("hc_eps")),
        block_size=need("dspark_block_size"),
        mask_token_id=need("dspark_noise_token_id"),
        target_layer_ids=tuple(i - first for i in need("dspark_target_layer_ids")),
        markov_rank=need("dspark_markov_rank"),
        num_target_layers=need("num_hidden_layers"),
        max_position_embeddings=text.get("max_position_embeddings", 4096),
    )
