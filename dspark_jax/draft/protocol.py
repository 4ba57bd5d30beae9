"""What decoding asks of a draft: `DenseDraft` and `DeepseekDraft` both answer it."""

from typing import Protocol

import jax
import jax.numpy as jnp

from dspark_jax.kv_cache import KVCache, WindowCache
from dspark_jax.types import Params, SharedHead


class DraftShape(Protocol):
    """What decoding reads in a draft's config."""

    target_layer_ids: tuple[int, ...]  # tapped layers of the target, by their output
    sliding_window: int | None  # context rows a block sees; None sees all

    @property
    def num_drafts(self) -> int:
        """K, drafts per block."""

    @property
    def output_vocab_size(self) -> int:
        """Vd, tokens it can propose."""

    @property
    def enable_confidence_head(self) -> bool:
        """Whether it judges its drafts."""


class Draft(Protocol):
    """A draft as functions of its parameters; hashable, so that programs can be keyed by it."""

    config: DraftShape

    def init(self, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
        """Random parameters."""

    def make_cache(self, slots: int, capacity: int, dtype: jnp.dtype) -> KVCache | WindowCache:
        """An empty context cache for slots of up to `capacity` tokens."""

    def context_kv(
        self, params: Params, context_features: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rows of the context [R, W, M*D] at positions i32[R, W], for `write_rows`."""

    def backbone(
        self,
        params: Params,
        shared: SharedHead,
        cache: KVCache | WindowCache,
        *,
        anchor: jax.Array,
        anchor_pos: jax.Array,
    ) -> jax.Array:
        """h_k [R, K, D]: what `base_logits` and the Markov and confidence heads read."""

    def base_logits(self, params: Params, shared: SharedHead, block_hidden: jax.Array) -> jax.Array:
        """U_k: f32[.., Vd] from h_k."""
