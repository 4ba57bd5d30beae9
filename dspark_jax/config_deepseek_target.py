"""Configurations of DeepSeek V4 and V4.1 targets, read from Hugging Face `config.json`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.config import RopeConfig
from dspark_jax.config_deepseek import FAMILIES, DeepseekMoeConfig, moe_config, text_fields

OVERLAPPING_RATIO = 4  # V4: rows of so many tokens also take in those before, and are chosen among


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
    """The language model of DeepSeek V4 or V4.1.

    A layer attends to a window of tokens and, where its compression ratio is above 0, to one row
    for every `ratio` tokens. `kv_source_layer_ids` make these rows, `index_source_layer_ids`
    choose which of them a token sees; in V4.1 the layers up to the next source use the same. In V4
    every layer makes its own rows, and those that do not choose see all.
    """

    model_type: str  # "deepseek_v4" or "deepseek_v41"
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
    num_hash_layers: int  # first layers whose experts go by the token alone
    # Layers whose streams are context features: as they enter in V4.1, Engram added; as they leave
    # in V4.
    tap_layer_ids: tuple[int, ...]
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

    @property
    def single_pass(self) -> bool:
        """V4.1: sublayers read with the weights of the one before, and there is no hc_head."""
        return self.model_type == "deepseek_v41"

    def _check_sources(self) -> None:
        """Every layer with compressed rows needs rows of its ratio and a choice among them."""
        kv, index = set(self.kv_source_layer_ids), set(self.index_source_layer_ids)
        if self.single_pass and not kv <= index:
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


def _compress_rope(text: Mapping[str, Any], need: Callable[[str], Any]) -> RopeConfig:
    """Of layers with compressed rows: a base of its own, and YaRN with no factor on angles."""
    theta, scaling = float(need("compress_rope_theta")), dict(text.get("rope_scaling") or {})
    if scaling.get("rope_type", "yarn") != "yarn":
        raise ValueError(f"rope_scaling.rope_type={scaling['rope_type']!r}; expected 'yarn'.")
    if not scaling:
        return RopeConfig(rope_theta=theta, interleaved=True)
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    given = {name: scaling[name] for name in names if name in scaling}
    return RopeConfig(
        rope_theta=theta, interleaved=True, rope_type="yarn", attention_factor=1.0, **given
    )


def _engram_config(need: Callable[[str], Any]) -> EngramConfig:
    """Engram's settings, all of which must be there."""
    return EngramConfig(
        layer_ids=tuple(need("engram_layer_ids")),
        num_embeddings=tuple(need("engram_num_embeddings")),
        vocab_size=need("engram_vocab_size"),
        max_ngram_size=need("engram_max_ngram_size"),
        num_heads=need("engram_n_heads"),
        head_dim=need("engram_head_dim"),
        pad_token_id=need("engram_pad_token_id"),
        num_classes=need("engram_compressed_vocab_size"),
    )


def deepseek_target_from_hf(
    hf: Mapping[str, Any], *, has_vision_bias: bool
) -> DeepseekTargetConfig:
    """Builds the config of a target from its `config.json`.

    Args:
      hf: the decoded file; V4.1 nests the language model in `text_config`.
      has_vision_bias: the checkpoint's gates have a bias for image tokens.

    Returns:
      The config.

    Raises:
      ValueError: not a DeepSeek V4 config, a field is missing, or fields contradict each other.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config.json has model_type={family!r}; expected one of {FAMILIES}.")
    text, need = text_fields(hf)
    single_pass = family == "deepseek_v41"
    same_names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window",
        "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters",
    )  # fmt: skip
    ratios = tuple(need("compress_ratios"))[: need("num_hidden_layers")]
    if single_pass:
        rows, choices = tuple(need("kv_source_layer_ids")), tuple(need("index_source_layer_ids"))
    else:
        rows = tuple(i for i, ratio in enumerate(ratios) if ratio)
        choices = tuple(i for i in rows if ratios[i] == OVERLAPPING_RATIO)
    candidates = text.get("candidate_source_layer_id")
    sizes = need("n_routed_experts"), need("num_experts_per_tok")
    return DeepseekTargetConfig(
        model_type=family,
        **{name: need(name) for name in same_names},
        kv_source_layer_ids=rows,
        index_source_layer_ids=choices,
        rope=RopeConfig(rope_theta=float(need("rope_theta")), interleaved=True),
        compress_rope=_compress_rope(text, need),
        compress_ratios=ratios,
        candidate_source_layer_id=candidates,
        candidate_topk_blocks=0 if candidates is None else need("candidate_topk_blocks"),
        candidate_block_size=1 if candidates is None else need("candidate_block_size"),
        rms_norm_eps=float(need("rms_norm_eps")),
        moe=moe_config(hf, sizes, has_vision_bias=has_vision_bias),
        hc_eps=float(need("hc_eps")),
        engram=_engram_config(need) if text.get("engram_layer_ids") else None,
        num_hash_layers=0 if single_pass else text.get("num_hash_layers", 0),
        tap_layer_ids=tuple(text.get("dspark_target_layer_ids") or ()),
        max_position_embeddings=text.get("max_position_embeddings", 4096),
    )
