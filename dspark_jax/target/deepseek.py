"""The language models of DeepSeek V4 and V4.1, whole sequences at a time.

A reference: it holds no cache, so every call computes all positions from 0 on, in memory that
grows with the square of their number, on one device. Being causal, one call gives what a prefill
and any number of decode steps after it give. It is what a target with caches has to agree with,
and what drafts are checked against; it does not serve. Text only: image tokens are not known.

Index keys are at hand for every token, as in the reference's prefill. (The decode steps of V4.1's
reference score stale keys between two complete rows.) Caches are not rounded to FP8 or FP4.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.config_deepseek_target import DeepseekTargetConfig
from dspark_jax.hyper_connections import (
    HyperConnection,
    StreamHead,
    first_stream,
    read_streams,
    write_streams,
)
from dspark_jax.layers import RmsNorm, rope_angles
from dspark_jax.moe import DeepseekMoe
from dspark_jax.products import score_vocabulary
from dspark_jax.target.compressed import Compressed, TargetAttention
from dspark_jax.target.engram import Engram, check_tables
from dspark_jax.target.hashed_moe import HashedMoe
from dspark_jax.types import Params, SharedHead


class TargetBlock(nn.Module):
    """One layer: hyper-connections around attention, then around experts.

    In V4.1 each sublayer reads with the weights of the one before it.

    Source: DeepSeek V4 and V4.1 inference code, `Block`.
    """

    config: DeepseekTargetConfig
    layer: int

    @nn.compact
    def __call__(
        self, residual: jax.Array, pre: jax.Array, angles: jax.Array,
        compressed: Compressed | None, tokens: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Compressed | None]:  # fmt: skip
        """Runs all tokens of a sequence.

        Args:
          residual: [R, T, n, D], n streams.
          pre: f32[R, T, n], weights the last sublayer before this layer left; V4 ignores them.
          angles: f32[1, T, 2, rope/2].
          compressed: what the layers before left.
          tokens: i32[R, T].

        Returns:
          The residual, the weights for the sublayer that follows, and the compressed context.
        """
        cfg, delayed = self.config, self.config.single_pass
        mix = self._mix("attn_mix")(residual)
        x = self._norm("attn_norm")(read_streams(residual, pre if delayed else mix.pre))
        x, compressed = TargetAttention(cfg, self.layer, name="attn")(x, angles, compressed)
        residual, pre = write_streams(x, residual, mix), mix.pre
        mix = self._mix("ffn_mix")(residual)
        x = self._norm("ffn_norm")(read_streams(residual, pre if delayed else mix.pre))
        if self.layer < cfg.num_hash_layers:
            x = HashedMoe(cfg.moe, cfg.vocab_size, name="moe")(x, tokens)
        else:
            x = DeepseekMoe(cfg.moe, name="moe")(x)
        return write_streams(x, residual, mix), mix.pre, compressed

    def _mix(self, name: str) -> HyperConnection:
        cfg = self.config
        return HyperConnection(
            streams=cfg.hc_mult, iterations=cfg.hc_sinkhorn_iters,
            norm_eps=cfg.rms_norm_eps, eps=cfg.hc_eps, name=name,
        )  # fmt: skip

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.config.rms_norm_eps, round_last=True, name=name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekTarget:
    """A V4 or V4.1 target as functions of its parameters.

    The tree: embedding and head [V, D], norm, layers (a tuple; `engram` in some of them); with
    Engram token_classes i32[V], and in V4 hc_head.
    """

    config: DeepseekTargetConfig

    def __post_init__(self):
        if self.config.engram:
            check_tables(self.config.engram)

    def shared_head(self, params: Params) -> SharedHead:
        """The embedding and LM head that a draft borrows."""
        return SharedHead(embedding=params["embedding"], head=params["head"])

    def forward(self, params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits and context features of whole sequences.

        Args:
          params: tree of `load_deepseek_target`.
          tokens: i32[R, T], positions 0..T-1; row t sees rows 0..t, so that padding at the end
            changes nothing before it.

        Returns:
          f32[R, T, V] and [R, T, M*D]: the mean of the streams that enter each tapped layer in
          V4.1, that leave it in V4.

        Raises:
          ValueError: T is 0 or beyond `max_position_embeddings`.

        Source: DeepSeek V4 and V4.1 inference code, `Transformer`.
        """
        cfg, length = self.config, tokens.shape[1]
        if not 1 <= length <= cfg.max_position_embeddings:
            raise ValueError(
                f"got {length} tokens; expected 1 to max_position_embeddings="
                f"{cfg.max_position_embeddings}."
            )
        positions = jnp.arange(length)[None]
        plain, other = (
            rope_angles(rope, cfg.qk_rope_head_dim, positions)
            for rope in (cfg.rope, cfg.compress_rope)
        )
        x = params["embedding"][tokens]
        residual = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], cfg.hc_mult, cfg.hidden_size))
        pre, compressed, taps = first_stream(residual), None, []
        for i, layer in enumerate(params["layers"]):
            residual = self._add_engram(params, i, residual, tokens)
            entering = residual
            angles = other if cfg.compress_ratios[i] else plain
            own = {name: value for name, value in layer.items() if name != "engram"}
            residual, pre, compressed = TargetBlock(cfg, i).apply(
                {"params": own}, residual, pre, angles, compressed, tokens
            )
            if i in cfg.tap_layer_ids:
                tapped = entering if cfg.single_pass else residual
                taps.append(tapped.astype(jnp.float32).mean(axis=2).astype(x.dtype))
        norm = RmsNorm(cfg.rms_norm_eps, round_last=True)
        hidden = norm.apply({"params": params["norm"]}, self._collapse(params, residual, pre))
        features = jnp.concatenate(taps, axis=-1) if taps else x[..., :0]
        return score_vocabulary(hidden, params["head"]), features

    def _collapse(self, params: Params, residual: jax.Array, pre: jax.Array) -> jax.Array:
        """The last sum over the streams."""
        cfg = self.config
        if cfg.single_pass:
            return read_streams(residual, pre)
        head = StreamHead(streams=cfg.hc_mult, norm_eps=cfg.rms_norm_eps, eps=cfg.hc_eps)
        return head.apply({"params": params["hc_head"]}, residual)

    def _add_engram(
        self, params: Params, layer: int, residual: jax.Array, tokens: jax.Array
    ) -> jax.Array:
        engram = self.config.engram
        if engram is None or layer not in engram.layer_ids:
            return residual
        classes = params["token_classes"]
        module = Engram(engram, engram.layer_ids.index(layer), self.config.rms_norm_eps)
        return module.apply(
            {"params": params["layers"][layer]["engram"]},
            residual, classes[tokens], classes[engram.pad_token_id],
        )  # fmt: skip
