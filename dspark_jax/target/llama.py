"""Llama, Qwen3 and Qwen3-MoE targets: one decoder, differing in norms on Q/K and in the MLP.

Layers are either stacked (leaves [L, ..], run by `lax.scan`: one layer is compiled) or a tuple of
per-layer trees (unrolled: on CPU a scan copies every layer's weights out of the stack first).
The maths is the same; `stack_layers` and `split_layers` convert.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.attention import attend
from dspark_jax.config import TargetConfig
from dspark_jax.kv_cache import (
    KVCache,
    PagedCache,
    make_cache,
    make_paged_cache,
    write_pages,
)
from dspark_jax.layers import KERNEL_INIT, GatedMlp, RmsNorm, apply_rope, rope_angles
from dspark_jax.moe import MoeMlp
from dspark_jax.paged_attention import attend_pages
from dspark_jax.products import project, score_vocabulary
from dspark_jax.sharding import whole
from dspark_jax.types import Packing, Params, SharedHead, TargetOutput

AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any, Any]]


class DecoderLayer(nn.Module):
    """One pre-norm layer. Q, K and V share a kernel [D, G, N/G + 2, H], grouped by KV head."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: jax.Array, attend_fn: AttendFn
    ) -> tuple[jax.Array, Any, Any]:
        """Runs the layer.

        Args:
          x: [R, W, D].
          angles: f32[R, W, 2, H/2].
          attend_fn: maps q [R, W, N, H] and k, v [R, W, G, H], rotated, to [R, W, N, H] and two
            more results.

        Returns:
          x [R, W, D] after the layer, and the other results of `attend_fn`.
        """
        cfg = self.config
        groups, head_dim, width = cfg.num_key_value_heads, cfg.head_dim, cfg.hidden_size
        per_group = cfg.num_attention_heads // groups
        qkv = self.param("qkv", KERNEL_INIT, (width, groups, per_group + 2, head_dim))
        out = self.param("o", KERNEL_INIT, (groups, per_group, head_dim, width))
        y = project(RmsNorm(cfg.rms_norm_eps, name="attn_norm")(x), qkv)
        if cfg.attention_bias:
            zeros = nn.initializers.zeros_init()
            y = y + self.param("qkv_bias", zeros, (groups, per_group + 2, head_dim))
        q = y[..., :per_group, :].reshape(*x.shape[:2], cfg.num_attention_heads, head_dim)
        k, v = y[..., per_group, :], y[..., per_group + 1, :]
        if cfg.qk_norm:
            q = RmsNorm(cfg.rms_norm_eps, name="q_norm")(q)
            k = RmsNorm(cfg.rms_norm_eps, name="k_norm")(k)
        q = apply_rope(q, angles, interleaved=cfg.rope.interleaved)
        k = apply_rope(k, angles, interleaved=cfg.rope.interleaved)
        y, new, cache = attend_fn(q, k, v)
        y = y.reshape(*x.shape[:2], groups, per_group, head_dim)
        y = project(y, out, inner=3)
        if cfg.attention_bias:
            y = y + self.param("o_bias", nn.initializers.zeros_init(), (width,))
        x = whole(x + y)
        mlp = (
            MoeMlp(cfg.moe, name="mlp") if cfg.moe else GatedMlp(cfg.intermediate_size, name="mlp")
        )
        return whole(x + mlp(RmsNorm(cfg.rms_norm_eps, name="mlp_norm")(x))), new, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaTarget:
    """A target as functions of its parameters: `forward`, `logits`, `make_cache`.

    Attributes:
      config: the architecture.
      tap_layer_ids: layers whose output is returned as context features; -1 is the embedding.
      paged: the cache is a `PagedCache`, in which a forward stores its rows before attention.
    """

    config: TargetConfig
    tap_layer_ids: tuple[int, ...] = ()
    paged: bool = False

    def __post_init__(self):
        last = self.config.num_hidden_layers - 1
        bad = [i for i in self.tap_layer_ids if not -1 <= i <= last]
        if bad:
            raise ValueError(
                f"tap layers {bad} do not exist: this target has layers 0..{last} (-1: embedding)."
            )

    def init(self, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
        """Random parameters with stacked layers, for tests and shape inference."""
        cfg = self.config
        layer_key, embed_key, head_key = jax.random.split(key, 3)
        x = jnp.zeros((1, 1, cfg.hidden_size))
        angles = jnp.zeros((1, 1, 2, cfg.head_dim // 2))

        def init_layer(key: jax.Array) -> Params:
            return DecoderLayer(cfg).init(key, x, angles, lambda q, k, v: (q, None, None))["params"]

        params = {
            "embedding": KERNEL_INIT(embed_key, (cfg.vocab_size, cfg.hidden_size)),
            "layers": jax.vmap(init_layer)(jax.random.split(layer_key, cfg.num_hidden_layers)),
            "norm": {"weight": jnp.ones(cfg.hidden_size)},
        }
        if not cfg.tie_word_embeddings:
            params["head"] = KERNEL_INIT(head_key, (cfg.vocab_size, cfg.hidden_size))
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def make_cache(self, slots: int, capacity: int, dtype: jnp.dtype) -> KVCache | PagedCache:
        """An empty KV cache of `capacity` rows for each of `slots` slots."""
        cfg = self.config
        make = make_paged_cache if self.paged else make_cache
        return make(
            cfg.num_hidden_layers, slots, cfg.num_key_value_heads, capacity, cfg.head_dim, dtype
        )

    def shared_head(self, params: Params) -> SharedHead:
        """The embedding and LM head that a draft borrows."""
        head = params["embedding"] if self.config.tie_word_embeddings else params["head"]
        return SharedHead(embedding=params["embedding"], head=head)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """f32[.., V] from final hidden states [.., D]."""
        return score_vocabulary(hidden, self.shared_head(params).head)

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        cache: KVCache | PagedCache,
        *,
        cache_len: jax.Array,
        first_slot: jax.Array | int = 0,
        count: jax.Array | None = None,
    ) -> TargetOutput:
        """Runs W rows per request after its cached context; prefill and verify are this call.

        Args:
          params: tree of `init`, layers stacked or split.
          tokens: i32[R, W]; row w sits at position cache_len + w and sees rows 0..w.
          cache: KVCache [L, S, G, C, H], read only; or a PagedCache.
          cache_len: i32[R], rows already cached.
          first_slot: slot of request 0; request r uses slot first_slot + r.
          count: i32[R], real rows of each request, which come first; None is all. A KVCache does
            not ask: the others are computed as well.

        Returns:
          Hidden states, context features and the rows' K/V (to be stored by `write_rows`). Of a
          PagedCache: the cache with the real rows in place of K/V, and zeros for the others.
        """
        if isinstance(cache, PagedCache):
            return self._forward_paged(params, tokens, cache, cache_len, first_slot, count)
        positions = cache_len[:, None] + jnp.arange(tokens.shape[1])

        def attend_fn(layer: jax.Array | int, _: None, q: jax.Array, k: jax.Array, v: jax.Array):
            out = attend(
                q, k, v, cache, layer,
                first_slot=first_slot, cache_len=cache_len, causal=True, scale=self._scale,
            )  # fmt: skip
            return out, (k, v), None

        return self._run(params, tokens, positions, attend_fn)

    def _forward_paged(
        self,
        params: Params,
        tokens: jax.Array,
        cache: PagedCache,
        cache_len: jax.Array,
        first_slot: jax.Array | int,
        count: jax.Array | None,
    ) -> TargetOutput:
        """`forward` by way of flat rows."""
        requests, width = tokens.shape
        count = jnp.full(requests, width) if count is None else count
        packing = Packing.of(count, width, requests * width)
        out = self.forward_packed(
            params, packing.pack(tokens), cache, packing, cache_len=cache_len,
            first_slot=first_slot,
        )  # fmt: skip
        return out.replace(
            hidden=packing.unpack(out.hidden[0]),
            context_features=packing.unpack(out.context_features[0]),
        )

    def forward_packed(
        self,
        params: Params,
        tokens: jax.Array,
        cache: KVCache | PagedCache,
        packing: Packing,
        *,
        cache_len: jax.Array,
        first_slot: jax.Array | int = 0,
    ) -> TargetOutput:
        """Runs T flat rows that belong to R requests; every matmul costs T rows, not R*W.

        Args:
          params: tree of `init`.
          tokens: i32[T].
          cache: KVCache [L, S, G, C, H], read only; or a PagedCache.
          packing: which request and row each flat row is.
          cache_len: i32[R], rows already cached.
          first_slot: slot of request 0; request r uses slot first_slot + r.

        Returns:
          As `forward`: hidden [1, T, D] and context features stay flat, new K/V are [L, R, W, G, H]
          with zeros where a request has no such row; or the PagedCache that has them.
        """
        positions = cache_len[packing.request] + packing.offset
        where = dict(first_slot=first_slot, cache_len=cache_len, scale=self._scale)

        def attend_fn(layer: jax.Array | int, _: None, *rows: jax.Array):
            q, k, v = (packing.unpack(x[0]) for x in rows)
            out = attend(q, k, v, cache, layer, causal=True, **where)
            return packing.pack(out)[None], rows[1:], None

        def attend_stored(layer: jax.Array | int, stored: PagedCache, *rows: jax.Array):
            q, k, v = (x[0] for x in rows)
            position = jnp.where(packing.real, positions, stored.pages.shape[2])
            slot = first_slot + packing.request
            stored = write_pages(stored, layer, k, v, slot=slot, position=position)
            out = attend_pages(q, stored, layer, packing, **where)
            return out[None], (None, None), stored

        if isinstance(cache, PagedCache):
            return self._run(params, tokens[None], positions[None], attend_stored, cache)
        out = self._run(params, tokens[None], positions[None], attend_fn)
        unpack_layers = jax.vmap(packing.unpack)
        return out.replace(
            new_k=unpack_layers(out.new_k[:, 0]), new_v=unpack_layers(out.new_v[:, 0])
        )

    @property
    def _scale(self) -> float:
        return self.config.head_dim**-0.5

    def _run(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend_fn: Callable,
        cache: PagedCache | None = None,
    ) -> TargetOutput:
        """The layers; a paged cache goes from each to the next."""
        cfg = self.config
        x = whole(params["embedding"][tokens])
        angles = rope_angles(cfg.rope, cfg.head_dim, positions)

        def run_layer(
            x: jax.Array, layer_params: Params, layer: jax.Array | int, cache: PagedCache | None
        ) -> tuple:
            return DecoderLayer(cfg).apply(
                {"params": layer_params}, x, angles, functools.partial(attend_fn, layer, cache)
            )

        taps = {-1: x} if -1 in self.tap_layer_ids else {}
        if isinstance(params["layers"], dict):
            x, (new_k, new_v), cache, taps = self._scan(run_layer, x, params["layers"], cache, taps)
        else:
            rows = []
            for i, layer_params in enumerate(params["layers"]):
                x, new, cache = run_layer(x, layer_params, i, cache)
                rows.append(new)
                if i in self.tap_layer_ids:
                    taps[i] = x
            # A barrier: fused with what follows, every element would look for its layer.
            new_k, new_v = jax.lax.optimization_barrier(
                jax.tree.map(lambda *x: jnp.stack(x), *rows)
            )
        hidden = RmsNorm(cfg.rms_norm_eps).apply({"params": params["norm"]}, x)
        features = [taps[i] for i in self.tap_layer_ids]
        context = whole(jnp.concatenate(features, axis=-1)) if features else x[..., :0]
        return TargetOutput(
            hidden=hidden, context_features=context, new_k=new_k, new_v=new_v, cache=cache
        )

    def _scan(
        self,
        run_layer: Callable,
        x: jax.Array,
        layers: Params,
        cache: PagedCache | None,
        taps: dict,
    ) -> tuple:
        """Scans the stacked layers; taps are kept in the carry, one buffer of [M', R, W, D]."""
        ids = jnp.array([i for i in self.tap_layer_ids if i >= 0], jnp.int32)
        kept = jnp.zeros((len(ids), *x.shape), x.dtype)

        def body(carry: tuple, inputs: tuple) -> tuple:
            x, kept, cache = carry
            layer_params, layer = inputs
            x, new, cache = run_layer(x, layer_params, layer, cache)
            kept = jnp.where((ids == layer)[:, None, None, None], x, kept)
            return (x, kept, cache), new

        steps = jnp.arange(self.config.num_hidden_layers)
        (x, kept, cache), new = jax.lax.scan(body, (x, kept, cache), (layers, steps))
        real = [i for i in self.tap_layer_ids if i >= 0]
        return x, new, cache, taps | {i: kept[n] for n, i in enumerate(real)}


def split_layers(params: Params) -> Params:
    """Stacked layers [L, ..] as a tuple of per-layer trees."""
    layers = params["layers"]
    count = jax.tree.leaves(layers)[0].shape[0]
    split = [jax.tree.map(operator.itemgetter(i), layers) for i in range(count)]
    return params | {"layers": tuple(split)}


def stack_layers(params: Params) -> Params:
    """A tuple of per-layer trees as stacked layers [L, ..]."""
    return params | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}
