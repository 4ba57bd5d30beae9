"""The DSpark draft stack of DeepSeek V4 and V4.1: the blocks under `mtp.*`.

K rows (the anchor and K - 1 masks) pass a few blocks once: hyper-connections around latent
attention and routed experts. The context is a window of the target's tapped states, projected
once for all blocks; it enters as keys, which are the values too, and never as queries.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dspark_jax.attention import attend_window
from dspark_jax.config_deepseek import DeepseekDraftConfig
from dspark_jax.hyper_connections import (
    HyperConnection,
    StreamHead,
    first_stream,
    read_streams,
    write_streams,
)
from dspark_jax.kv_cache import WindowCache
from dspark_jax.layers import (
    KERNEL_INIT,
    RmsNorm,
    rope_angles,
    rotate_tail,
    round_to_fp8,
)
from dspark_jax.moe import DeepseekMoe
from dspark_jax.products import score_vocabulary
from dspark_jax.sharding import spec_here, whole
from dspark_jax.types import Params, SharedHead
from pallas_kernels.dispatch import on_tpu, per_shard
from pallas_kernels.window_attention.ops import window_attention

_FLOAT32 = {"attn_mix", "ffn_mix", "hc_head", "sink", "bias", "bias_vision"}
_QUERY_EPS = 1e-6  # of the per-head query norm, whatever rms_norm_eps is


def keeps_float32(path: tuple) -> bool:
    """Whether the parameter at this path of the tree is float32 whatever the others are.

    Source: DeepSeek V4 checkpoints store hyper-connections, sinks and gate biases in float32;
    the inference code raises the Markov output and the confidence weights to it.
    """
    return not _FLOAT32.isdisjoint(path) or path[-2:] == ("markov", "w2") or "confidence" in path


class LatentAttention(nn.Module):
    """Queries through a low rank, one key-value row per token, outputs through groups.

    Kernels: q_a [D, r], q_b [r, N, H], kv [D, H], sink [N], o_a [O, N/O*H, o] and o_b [O, o, D]
    with O output groups of rank o.

    Source: DeepSeek V4 and V4.1 inference code, `DSparkAttention`.
    """

    config: DeepseekDraftConfig

    def setup(self):
        cfg = self.config
        width, heads, head_dim = cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim
        groups, rank = cfg.o_groups, cfg.o_lora_rank
        self.q_a = self.param("q_a", KERNEL_INIT, (width, cfg.q_lora_rank))
        self.q_b = self.param("q_b", KERNEL_INIT, (cfg.q_lora_rank, heads, head_dim))
        self.kv = self.param("kv", KERNEL_INIT, (width, head_dim))
        self.sink = self.param("sink", nn.initializers.zeros_init(), (heads,))
        self.o_a = self.param("o_a", KERNEL_INIT, (groups, heads // groups * head_dim, rank))
        self.o_b = self.param("o_b", KERNEL_INIT, (groups, rank, width))
        self.q_norm = RmsNorm(cfg.rms_norm_eps, round_last=True)
        self.kv_norm = RmsNorm(cfg.rms_norm_eps, round_last=True)

    def keys_values(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """Rotated rows [.., H] of context or block rows x [.., D]."""
        cfg = self.config
        kv = self.kv_norm(jnp.einsum("...d,dh->...h", x, self.kv))
        kv = rotate_tail(kv[..., None, :], angles)[..., 0, :]
        if not cfg.round_kv_to_fp8:
            return kv
        rounded = round_to_fp8(kv[..., : cfg.fp8_kv_dims], cfg.fp8_kv_group)
        return jnp.concatenate([rounded, kv[..., cfg.fp8_kv_dims :]], axis=-1)

    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        cache: WindowCache,
        layer: int,
        cache_len: jax.Array,
    ) -> jax.Array:
        """Attention of the block rows.

        Args:
          x: [R, K, D].
          angles: f32[R, K, 2, rope/2].
          cache: WindowCache [L, R, C, H].
          layer: this block's index into L.
          cache_len: i32[R], context positions written so far.

        Returns:
          [R, K, D].
        """
        cfg = self.config
        q = self.q_norm(jnp.einsum("rkd,dq->rkq", x, self.q_a))
        q = jnp.einsum("rkq,qnh->rknh", q, self.q_b)
        if cfg.normalise_queries:
            size = jnp.mean(jnp.square(q.astype(jnp.float32)), axis=-1, keepdims=True)
            q = (q * jax.lax.rsqrt(size + _QUERY_EPS)).astype(x.dtype)
        out = _attend_block(
            rotate_tail(q, angles), self.keys_values(x, angles), cache, layer, cache_len,
            sink=self.sink, scale=cfg.head_dim**-0.5,
        )  # fmt: skip
        out = rotate_tail(out, angles, inverse=True)
        out = out.reshape(*x.shape[:2], cfg.o_groups, -1)
        out = jnp.einsum("rkgi,gio->rkgo", out, self.o_a)
        return jnp.einsum("rkgo,god->rkd", out, self.o_b)


def _attend_block(
    q: jax.Array,
    new_kv: jax.Array,
    cache: WindowCache,
    layer: int,
    cache_len: jax.Array,
    *,
    sink: jax.Array,
    scale: float,
) -> jax.Array:
    """`attend_window`; on a TPU a kernel, under a mesh one per shard of the heads."""

    def reference(
        q: jax.Array, new_kv: jax.Array, cache: WindowCache, cache_len: jax.Array, sink: jax.Array
    ) -> jax.Array:
        return attend_window(
            q, new_kv, cache, layer, first_slot=0, cache_len=cache_len, sink=sink, scale=scale
        )

    def kernel(
        q: jax.Array, new_kv: jax.Array, cache: WindowCache, cache_len: jax.Array, sink: jax.Array
    ) -> jax.Array:
        return window_attention(
            q, new_kv, cache.kv, layer, 0, cache_len, sink, scale=scale, impl="pallas"
        )

    rows, each = spec_here(None, None, "heads", None), PartitionSpec()
    in_specs = (rows, each, each, each, spec_here("heads"))
    return on_tpu(per_shard(kernel, in_specs, rows), reference, q, new_kv, cache, cache_len, sink)


class DeepseekBlock(nn.Module):
    """One block: hyper-connections around attention, then around experts.

    Source: DeepSeek V4 and V4.1 inference code, `Block` and `DSparkBlock`.
    """

    config: DeepseekDraftConfig

    def setup(self):
        cfg = self.config
        mix = dict(
            streams=cfg.hc_mult, iterations=cfg.hc_sinkhorn_iters,
            norm_eps=cfg.rms_norm_eps, eps=cfg.hc_eps,
        )  # fmt: skip
        self.attn_mix = HyperConnection(**mix)
        self.ffn_mix = HyperConnection(**mix)
        self.attn_norm = RmsNorm(cfg.rms_norm_eps, round_last=True)
        self.ffn_norm = RmsNorm(cfg.rms_norm_eps, round_last=True)
        self.attn = LatentAttention(cfg)
        self.moe = DeepseekMoe(cfg.moe)

    def keys_values(self, context: jax.Array, angles: jax.Array) -> jax.Array:
        """Rotated rows [.., H] of the projected context [.., D]."""
        return self.attn.keys_values(context, angles)

    def __call__(
        self, residual: jax.Array, pre: jax.Array, angles: jax.Array, cache: WindowCache,
        layer: int, cache_len: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Runs the block rows.

        Args:
          residual: [R, K, n, D], n streams.
          pre: f32[R, K, n], weights the last sublayer before this block left; V4 ignores them.
          angles: f32[R, K, 2, rope/2].
          cache: WindowCache [L, R, C, H].
          layer: this block's index into L.
          cache_len: i32[R].

        Returns:
          The residual, and the weights for the sublayer that follows.
        """
        delayed = self.config.single_pass
        mix = self.attn_mix(residual)
        x = self.attn_norm(read_streams(residual, pre if delayed else mix.pre))
        x = whole(self.attn(x, angles, cache, layer, cache_len))
        residual, pre = write_streams(x, residual, mix), mix.pre
        mix = self.ffn_mix(residual)
        x = self.ffn_norm(read_streams(residual, pre if delayed else mix.pre))
        return write_streams(whole(self.moe(x)), residual, mix), mix.pre


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekDraft:
    """A V4 or V4.1 draft as functions of its parameters.

    The tree: context_proj [M*D, D], context_norm, layers (a tuple), norm, markov (w1 and w2 of
    [V, Q]), confidence (weight [D + Q]) and, in V4, hc_head. Embedding and LM head come in a
    `SharedHead`.
    """

    config: DeepseekDraftConfig

    def init(self, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
        """Random parameters."""
        cfg = self.config
        keys = jax.random.split(key, cfg.num_stages + 5)
        residual = jnp.zeros((1, cfg.block_size, cfg.hc_mult, cfg.hidden_size))
        angles = jnp.zeros((1, cfg.block_size, 2, cfg.qk_rope_head_dim // 2))
        rest = (first_stream(residual), angles, self.make_cache(1, 1, jnp.float32), 0, jnp.zeros(1))
        rows, pair = len(cfg.target_layer_ids) * cfg.hidden_size, (cfg.vocab_size, cfg.markov_rank)
        params = {
            "context_proj": KERNEL_INIT(keys[0], (rows, cfg.hidden_size)),
            "context_norm": {"weight": jnp.ones(cfg.hidden_size)},
            "layers": tuple(
                DeepseekBlock(cfg).init(k, residual, *rest)["params"] for k in keys[5:]
            ),
            "norm": {"weight": jnp.ones(cfg.hidden_size)},
            "markov": {"w1": KERNEL_INIT(keys[1], pair), "w2": KERNEL_INIT(keys[2], pair)},
            "confidence": {"weight": KERNEL_INIT(keys[3], (cfg.hidden_size + cfg.markov_rank,))},
        }
        if not cfg.single_pass:
            params["hc_head"] = self._head().init(keys[4], residual)["params"]

        def cast(path: tuple, leaf: jax.Array) -> jax.Array:
            names = tuple(getattr(part, "key", None) for part in path)
            return leaf.astype(jnp.float32 if keeps_float32(names) else dtype)

        return jax.tree_util.tree_map_with_path(cast, params)

    def make_cache(self, slots: int, capacity: int, dtype: jnp.dtype) -> WindowCache:
        """An empty window for each of `slots` slots, however long the requests (`capacity`)."""
        del capacity
        cfg = self.config
        shape = (cfg.num_stages, slots, cfg.sliding_window, cfg.head_dim)
        return WindowCache(kv=jnp.zeros(shape, dtype))

    def project_context(self, params: Params, context_features: jax.Array) -> jax.Array:
        """What all blocks see of the context: [.., D] from the taps [.., M*D]."""
        x = whole(jnp.einsum("...m,md->...d", context_features, params["context_proj"]))
        return self._norm(params["context_norm"], x)

    def context_kv(
        self, params: Params, context_features: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Every block's rows of the context, to be stored by `write_rows`.

        Args:
          params: the draft's tree.
          context_features: [R, W, M*D].
          positions: i32[R, W], absolute.

        Returns:
          Rotated rows [L, R, W, H], twice: they are the keys and the values.
        """
        context, angles = self.project_context(params, context_features), self._angles(positions)
        block = DeepseekBlock(self.config)
        rows = [
            block.apply({"params": layer}, context, angles, method="keys_values")
            for layer in params["layers"]
        ]
        return (jnp.stack(rows),) * 2

    def backbone(
        self,
        params: Params,
        shared: SharedHead,
        cache: WindowCache,
        *,
        anchor: jax.Array,
        anchor_pos: jax.Array,
    ) -> jax.Array:
        """The one parallel pass: h_k for every draft of the block.

        Args:
          params: the draft's tree.
          shared: the target's embedding.
          cache: WindowCache [L, R, C, H] with positions 0..anchor_pos-1 written.
          anchor: i32[R], last committed token.
          anchor_pos: i32[R], its position; block row k sits at anchor_pos + k.

        Returns:
          block_hidden [R, K, D], before the final norm: the confidence head reads it so.
        """
        cfg = self.config
        masks = jnp.full((anchor.shape[0], cfg.block_size - 1), cfg.mask_token_id, anchor.dtype)
        x = whole(shared.embedding[jnp.concatenate([anchor[:, None], masks], axis=1)])
        angles = self._angles(anchor_pos[:, None] + jnp.arange(cfg.block_size))
        residual = jnp.broadcast_to(
            x[:, :, None], (*x.shape[:2], cfg.hc_mult, cfg.hidden_size)
        )
        pre = first_stream(residual)
        for i, layer in enumerate(params["layers"]):
            residual, pre = DeepseekBlock(cfg).apply(
                {"params": layer}, residual, pre, angles, cache, i, anchor_pos
            )
        if cfg.single_pass:
            return read_streams(residual, pre)
        return self._head().apply({"params": params["hc_head"]}, residual)

    def base_logits(self, params: Params, shared: SharedHead, block_hidden: jax.Array) -> jax.Array:
        """U_k: f32[.., V] from h_k, before the Markov bias."""
        return score_vocabulary(self._norm(params["norm"], block_hidden), shared.head)

    def _norm(self, params: Params, x: jax.Array) -> jax.Array:
        return RmsNorm(self.config.rms_norm_eps, round_last=True).apply({"params": params}, x)

    def _head(self) -> StreamHead:
        cfg = self.config
        return StreamHead(streams=cfg.hc_mult, norm_eps=cfg.rms_norm_eps, eps=cfg.hc_eps)

    def _angles(self, positions: jax.Array) -> jax.Array:
        return rope_angles(self.config.rope, self.config.qk_rope_head_dim, positions)
