"""Dense DSpark draft backbone (DeepSpec's Qwen3DSparkModel).

K rows (the anchor and K - 1 masks) see every context row before the anchor and each other. The
context enters only as keys and values: one projection of the target's tapped states, shared by
all layers, then each layer's own K and V.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.attention import attend
from dspark_jax.config import DraftConfig
from dspark_jax.draft.confidence import init_confidence
from dspark_jax.draft.markov import init_markov
from dspark_jax.kv_cache import KVCache, make_cache
from dspark_jax.layers import KERNEL_INIT, GatedMlp, RmsNorm, apply_rope, rope_angles
from dspark_jax.products import project, score_vocabulary
from dspark_jax.sharding import whole
from dspark_jax.types import Params, SharedHead


class DraftLayer(nn.Module):
    """One draft layer: kernels q [D, N, H], kv [D, 2, G, H], o [N, H, D]."""

    config: DraftConfig

    def setup(self):
        cfg = self.config
        width, heads, head_dim = cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim
        groups, zeros = cfg.num_key_value_heads, nn.initializers.zeros_init()
        self.q = self.param("q", KERNEL_INIT, (width, heads, head_dim))
        self.kv = self.param("kv", KERNEL_INIT, (width, 2, groups, head_dim))
        self.o = self.param("o", KERNEL_INIT, (heads, head_dim, width))
        if cfg.attention_bias:
            self.q_bias = self.param("q_bias", zeros, (heads, head_dim))
            self.kv_bias = self.param("kv_bias", zeros, (2, groups, head_dim))
            self.o_bias = self.param("o_bias", zeros, (width,))
        self.attn_norm = RmsNorm(cfg.rms_norm_eps)
        self.mlp_norm = RmsNorm(cfg.rms_norm_eps)
        self.q_norm = RmsNorm(cfg.rms_norm_eps)
        self.k_norm = RmsNorm(cfg.rms_norm_eps)
        self.mlp = GatedMlp(cfg.intermediate_size)

    def keys_values(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotated K and V [.., G, H] of context or block rows x [.., D]."""
        kv = project(x, self.kv)
        if self.config.attention_bias:
            kv = kv + self.kv_bias
        k = self.k_norm(kv[..., 0, :, :])
        return apply_rope(k, angles, interleaved=self.config.rope.interleaved), kv[..., 1, :, :]

    def __call__(self, x: jax.Array, angles: jax.Array, attend_fn: Callable) -> jax.Array:
        """Runs the block rows.

        Args:
          x: [.., K, D].
          angles: f32[.., K, 2, H/2].
          attend_fn: maps q [.., K, N, H] and the rows' own k, v [.., K, G, H] to [.., K, N, H],
            bringing the context in itself.

        Returns:
          [.., K, D].
        """
        y = self.attn_norm(x)
        q = project(y, self.q)
        if self.config.attention_bias:
            q = q + self.q_bias
        q = apply_rope(self.q_norm(q), angles, interleaved=self.config.rope.interleaved)
        k, v = self.keys_values(y, angles)
        y = project(attend_fn(q, k, v), self.o, inner=2)
        x = whole(x + (y + self.o_bias if self.config.attention_bias else y))
        return whole(x + self.mlp(self.mlp_norm(x)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseDraft:
    """A dense draft as functions of its parameters.

    The tree: context_proj [M*D, D], context_norm, layers (a tuple), norm, and `markov` and
    `confidence` where the config has them. Embedding and LM head come in a `SharedHead`.
    """

    config: DraftConfig

    def init(self, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
        """Random parameters."""
        cfg = self.config
        keys = jax.random.split(key, cfg.num_hidden_layers + 3)
        x = jnp.zeros((1, cfg.block_size, cfg.hidden_size))
        angles = jnp.zeros((1, cfg.block_size, 2, cfg.head_dim // 2))

        def init_layer(key: jax.Array) -> Params:
            return DraftLayer(cfg).init(key, x, angles, lambda q, k, v: q)["params"]

        rows = len(cfg.target_layer_ids) * cfg.hidden_size
        params = {
            "context_proj": KERNEL_INIT(keys[0], (rows, cfg.hidden_size)),
            "context_norm": {"weight": jnp.ones(cfg.hidden_size)},
            "layers": tuple(init_layer(k) for k in keys[3:]),
            "norm": {"weight": jnp.ones(cfg.hidden_size)},
        }
        if cfg.markov_rank:
            params["markov"] = init_markov(keys[1], cfg)
        if cfg.enable_confidence_head:
            params["confidence"] = init_confidence(keys[2], cfg)
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def make_cache(self, slots: int, capacity: int, dtype: jnp.dtype) -> KVCache:
        """An empty context cache of `capacity` rows for each of `slots` slots."""
        cfg = self.config
        return make_cache(
            cfg.num_hidden_layers, slots, cfg.num_key_value_heads, capacity, cfg.head_dim, dtype
        )

    def project_context(self, params: Params, context_features: jax.Array) -> jax.Array:
        """H_ctx [.., D] from the concatenated taps [.., M*D] (paper eq. 2)."""
        x = whole(project(context_features, params["context_proj"]))
        return RmsNorm(self.config.rms_norm_eps).apply({"params": params["context_norm"]}, x)

    def context_kv(
        self, params: Params, context_features: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Every layer's K and V of context rows, to be stored by `write_rows`.

        Args:
          params: the draft's tree.
          context_features: [R, W, M*D].
          positions: i32[R, W], absolute.

        Returns:
          Rotated keys and values, [L, R, W, G, H] each.
        """
        cfg = self.config
        context = self.project_context(params, context_features)
        angles = rope_angles(cfg.rope, cfg.head_dim, positions)
        pairs = [
            DraftLayer(cfg).apply({"params": p}, context, angles, method="keys_values")
            for p in params["layers"]
        ]
        return jnp.stack([k for k, _ in pairs]), jnp.stack([v for _, v in pairs])

    def backbone(
        self,
        params: Params,
        shared: SharedHead,
        cache: KVCache,
        *,
        anchor: jax.Array,
        anchor_pos: jax.Array,
    ) -> jax.Array:
        """The one parallel pass: h_k for every draft of the block.

        Args:
          params: the draft's tree.
          shared: the target's embedding.
          cache: context KVCache [L, R, G, C, H]; rows 0..anchor_pos-1 of each slot are valid.
          anchor: i32[R], last committed token.
          anchor_pos: i32[R], its position; block row k sits at anchor_pos + k.

        Returns:
          block_hidden [R, num_drafts, D], after the final norm.

        Source: DeepSpec modeling of Qwen3DSparkModel (facts: paper eq. 3).
        """
        cfg = self.config
        masks = jnp.full((anchor.shape[0], cfg.block_size - 1), cfg.mask_token_id, anchor.dtype)
        x = whole(shared.embedding[jnp.concatenate([anchor[:, None], masks], axis=1)])
        positions = anchor_pos[:, None] + jnp.arange(cfg.block_size)
        angles = rope_angles(cfg.rope, cfg.head_dim, positions)
        for i, layer_params in enumerate(params["layers"]):

            def attend_fn(q: jax.Array, k: jax.Array, v: jax.Array, i: int = i) -> jax.Array:
                return attend(
                    q, k, v, cache, i, first_slot=0, cache_len=anchor_pos, causal=False,
                    scale=cfg.head_dim**-0.5, window=cfg.sliding_window,
                )  # fmt: skip

            x = DraftLayer(cfg).apply({"params": layer_params}, x, angles, attend_fn)
        hidden = RmsNorm(cfg.rms_norm_eps).apply({"params": params["norm"]}, x)
        return hidden if cfg.sample_from_anchor else hidden[:, 1:]

    def base_logits(self, params: Params, shared: SharedHead, block_hidden: jax.Array) -> jax.Array:
        """U_k: f32[.., Vd] from h_k, before the Markov bias."""
        del params  # h_k is normalised already
        return score_vocabulary(block_hidden, shared.head)
