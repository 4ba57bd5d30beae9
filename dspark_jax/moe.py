"""Routed experts (Qwen3-MoE): softmax scores, top-k, grouped matmuls."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.config import MoeConfig
from dspark_jax.layers import KERNEL_INIT


class MoeMlp(nn.Module):
    """Softmax-routed SwiGLU experts with kernels [E, D, 2, F] and [E, F, D].

    Source: transformers Qwen3MoeSparseMoeBlock.
    """

    config: MoeConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [.., D] to [.., D]."""
        cfg, width = self.config, x.shape[-1]
        experts, hidden = cfg.num_experts, cfg.moe_intermediate_size
        router = self.param("router", KERNEL_INIT, (width, experts))
        gate_up = self.param("gate_up", KERNEL_INIT, (experts, width, 2, hidden))
        down = self.param("down", KERNEL_INIT, (experts, hidden, width))
        tokens = x.reshape(-1, width)
        scores = jnp.einsum("td,de->te", tokens, router, preferred_element_type=jnp.float32)
        weight, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), cfg.num_experts_per_tok)
        if cfg.norm_topk_prob:
            weight = weight / weight.sum(axis=-1, keepdims=True)
        out = routed_experts(tokens, chosen, weight, gate_up, down)
        return out.reshape(x.shape)


def routed_experts(
    tokens: jax.Array, chosen: jax.Array, weight: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Sends each token through its experts and sums the weighted results.

    Args:
      tokens: [T, D].
      chosen: i32[T, k], expert of each assignment.
      weight: f32[T, k].
      gate_up: [E, D, 2, F].
      down: [E, F, D].

    Returns:
      [T, D] in tokens' type.
    """
    count, per_token = chosen.shape
    experts, width, _, hidden = gate_up.shape
    order = jnp.argsort(chosen.reshape(-1))  # stable: grouped by expert, tokens in order
    source = order // per_token
    sizes = jnp.bincount(chosen.reshape(-1), length=experts).astype(jnp.int32)
    y = jax.lax.ragged_dot(tokens[source], gate_up.reshape(experts, width, 2 * hidden), sizes)
    y = jax.nn.silu(y[:, :hidden]) * y[:, hidden:]
    y = jax.lax.ragged_dot(y, down, sizes)
    y = y * weight.reshape(-1)[order][:, None].astype(y.dtype)
    return jnp.zeros((count, width), tokens.dtype).at[source].add(y)
