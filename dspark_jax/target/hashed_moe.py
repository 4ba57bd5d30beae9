"""Experts that go by the token alone: the first layers of DeepSeek V4."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.config_deepseek import DeepseekMoeConfig
from dspark_jax.layers import KERNEL_INIT
from dspark_jax.moe import clamped_experts, clamped_gate, over_experts


class HashedMoe(nn.Module):
    """`DeepseekMoe` with a table expert_ids i32[V, k] in place of the choice by scores.

    The scores still weigh the experts.

    Source: DeepSeek V4 inference code, `Gate` with `tid2eid`.
    """

    config: DeepseekMoeConfig
    vocab_size: int  # V

    @nn.compact
    def __call__(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """Maps x [.., D] to [.., D]; tokens i32[..]."""
        cfg, width, hidden = self.config, x.shape[-1], self.config.moe_intermediate_size
        experts, k = cfg.num_experts, cfg.num_experts_per_tok
        table = self.param("expert_ids", nn.initializers.zeros_init(), (self.vocab_size, k), int)
        router = self.param("router", KERNEL_INIT, (width, experts))
        gate_up = self.param("gate_up", KERNEL_INIT, (experts, width, 2, hidden))
        down = self.param("down", KERNEL_INIT, (experts, hidden, width))
        shared = cfg.num_shared_experts * hidden
        shared_gate_up = self.param("shared_gate_up", KERNEL_INIT, (width, 2, shared))
        shared_down = self.param("shared_down", KERNEL_INIT, (shared, width))
        rows, chosen = x.reshape(-1, width), table[tokens.reshape(-1)]
        scores = jax.nn.softplus(rows.astype(jnp.float32) @ router.astype(jnp.float32))
        weight = jnp.take_along_axis(jnp.sqrt(scores), chosen, axis=-1)
        total = weight.sum(axis=-1, keepdims=True) + cfg.weight_sum_eps
        weight = weight / total * cfg.routed_scaling_factor
        compute = functools.partial(clamped_experts, limit=cfg.swiglu_limit)
        out = over_experts(compute, rows, chosen, weight, gate_up, down)
        y = jnp.einsum("td,dcf->tcf", rows, shared_gate_up)
        y = clamped_gate(y[:, 0], y[:, 1], cfg.swiglu_limit).astype(x.dtype)
        out = out + (y @ shared_down).astype(jnp.float32)
        return out.astype(x.dtype).reshape(x.shape)
