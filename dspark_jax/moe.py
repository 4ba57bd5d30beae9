"""Routed experts, by grouped matmuls: Qwen3-MoE (softmax scores) and DeepSeek V4 (noaux bias)."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.config import MoeConfig
from dspark_jax.config_deepseek import DeepseekMoeConfig
from dspark_jax.layers import KERNEL_INIT
from dspark_jax.packed import PackedKernel, packed_dot
from dspark_jax.sharding import is_split, spec_here, split_axes


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
        out = over_experts(routed_experts, tokens, chosen, weight, gate_up, down)
        return out.reshape(x.shape)


def over_experts(
    compute: Callable, tokens: jax.Array, chosen: jax.Array, weight: jax.Array,
    gate_up: jax.Array, down: jax.Array,
) -> jax.Array:  # fmt: skip
    """Runs `compute` with the experts split over the mesh it is traced under, if there is one.

    Every device has all tokens, computes the assignments to its own experts, with its part of
    their width, and one sum over the devices completes the result.

    Args:
      compute: `routed_experts` or `clamped_experts`.
      tokens: [T, D].
      chosen: i32[T, k].
      weight: f32[T, k].
      gate_up: [E, D, 2, F].
      down: [E, F, D].

    Returns:
      [T, D], what `compute` returns without a mesh.
    """
    if not is_split():
        return compute(tokens, chosen, weight, gate_up, down)
    axes = split_axes()

    def part(*args: jax.Array) -> jax.Array:
        tokens, chosen, weight, gate_up, down = args
        own = gate_up.shape[0]
        place = jax.lax.axis_index("expert") if "expert" in axes else 0
        local = chosen - place * own
        local = jnp.where((local >= 0) & (local < own), local, own)  # own: another device's
        out = compute(tokens, local, weight, gate_up, down, partial=True)
        return jax.lax.psum(out, axes)

    kernels = (("experts", None, None, "expert_mlp"), ("experts", "expert_mlp", None))
    if isinstance(gate_up, PackedKernel):
        kernels = (("experts", None, "expert_mlp", None), ("experts", None, "expert_mlp"))
    whole = spec_here()
    with jax.named_scope("moe.experts"):
        return jax.shard_map(
            part,
            in_specs=(whole, whole, whole, *(spec_here(*names) for names in kernels)),
            out_specs=whole,
            axis_names=set(axes),
            check_vma=False,
        )(tokens, chosen, weight, gate_up, down)


def routed_experts(
    tokens: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    partial: bool = False,
) -> jax.Array:
    """Sends each token through its experts and sums the weighted results.

    Args:
      tokens: [T, D].
      chosen: i32[T, k], expert of each assignment.
      weight: f32[T, k].
      gate_up: [E, D, 2, F].
      down: [E, F, D].
      partial: assignments to E, which is no expert here, add nothing.

    Returns:
      [T, D] in tokens' type.
    """
    count, width = tokens.shape
    order, source, sizes = _group_by_expert(chosen, gate_up.shape[0])
    gate, up = _gate_up(tokens[source], gate_up, sizes)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
    y = y * weight.reshape(-1)[order][:, None].astype(y.dtype)
    y = _own_rows(y, sizes) if partial else y
    return jnp.zeros((count, width), tokens.dtype).at[source].add(y)


class DeepseekMoe(nn.Module):
    """DeepSeek V4's experts: routed kernels [E, D, 2, F] and [E, F, D], and a shared expert.

    `bias` [E] takes part in choosing experts, not in their weights. `bias_vision` [E] replaces it
    for image tokens; text never uses it.

    Source: DeepSeek V4 and V4.1 inference code, `Gate`, `Expert` and `MoE`.
    """

    config: DeepseekMoeConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [.., D] to [.., D]."""
        cfg, width, zeros = self.config, x.shape[-1], nn.initializers.zeros_init()
        experts, hidden = cfg.num_experts, cfg.moe_intermediate_size
        router = self.param("router", KERNEL_INIT, (width, experts))
        bias = self.param("bias", zeros, (experts,))
        if cfg.has_vision_bias:
            self.param("bias_vision", zeros, (experts,))
        gate_up = self._kernel("gate_up", (experts, width, 2, hidden))
        down = self._kernel("down", (experts, hidden, width))
        shared = cfg.num_shared_experts * hidden
        shared_gate_up = self.param("shared_gate_up", KERNEL_INIT, (width, 2, shared))
        shared_down = self.param("shared_down", KERNEL_INIT, (shared, width))
        tokens = x.reshape(-1, width)
        chosen, weight = route(tokens, router, bias, cfg)
        compute = functools.partial(clamped_experts, limit=cfg.swiglu_limit)
        out = over_experts(compute, tokens, chosen, weight, gate_up, down)
        y = jnp.einsum("td,dcf->tcf", tokens, shared_gate_up)
        y = clamped_gate(y[:, 0], y[:, 1], cfg.swiglu_limit).astype(x.dtype)
        out = out + (y @ shared_down).astype(jnp.float32)
        return out.astype(x.dtype).reshape(x.shape)

    def _kernel(self, name: str, shape: tuple[int, ...]) -> jax.Array | PackedKernel:
        """A parameter that may have been loaded packed."""
        loaded = self.get_variable("params", name)
        if isinstance(loaded, PackedKernel):
            return loaded
        return self.param(name, KERNEL_INIT, shape)


def route(
    tokens: jax.Array, router: jax.Array, bias: jax.Array, config: DeepseekMoeConfig
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by biased scores and weighs them by the plain ones.

    Args:
      tokens: [T, D].
      router: [D, E].
      bias: f32[E].
      config: number of experts per token, scale of their weights.

    Returns:
      i32[T, k] chosen experts and f32[T, k] weights, which sum to `routed_scaling_factor`.
    """
    logits = tokens.astype(jnp.float32) @ router.astype(jnp.float32)
    scores = jnp.sqrt(jax.nn.softplus(logits))
    _, chosen = jax.lax.top_k(scores + bias, config.num_experts_per_tok)
    weight = jnp.take_along_axis(scores, chosen, axis=-1)
    total = weight.sum(axis=-1, keepdims=True) + config.weight_sum_eps
    return chosen, weight / total * config.routed_scaling_factor


def clamped_gate(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit), in float32."""
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)


def clamped_experts(
    tokens: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    limit: float,
    partial: bool = False,
) -> jax.Array:
    """`routed_experts` with clamps, weights applied before the down projection, float32 sums.

    Args:
      tokens: [T, D].
      chosen: i32[T, k].
      weight: f32[T, k].
      gate_up: [E, D, 2, F].
      down: [E, F, D].
      limit: of `clamped_gate`.
      partial: as for `routed_experts`.

    Returns:
      f32[T, D].
    """
    count, width = tokens.shape
    order, source, sizes = _group_by_expert(chosen, gate_up.shape[0])
    gate, up = _gate_up(tokens[source], gate_up, sizes)
    y = clamped_gate(gate, up, limit) * weight.reshape(-1)[order][:, None]
    y = y.astype(tokens.dtype)
    if isinstance(down, PackedKernel):
        y = packed_dot(y, down, sizes)
    else:
        y = jax.lax.ragged_dot(y, down, sizes, preferred_element_type=jnp.float32)
    y = _own_rows(y, sizes) if partial else y
    return jnp.zeros((count, width), jnp.float32).at[source].add(y)


def _own_rows(y: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows of a grouped matmul, zero past the last group: those belong to other devices."""
    return jnp.where((jnp.arange(y.shape[0]) < sizes.sum())[:, None], y, 0)


def _group_by_expert(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Order that groups the assignments i32[T, k] by expert, their tokens, the groups' sizes."""
    order = jnp.argsort(chosen.reshape(-1))  # stable: grouped by expert, tokens in order
    sizes = jnp.bincount(chosen.reshape(-1), length=experts).astype(jnp.int32)
    return order, order // chosen.shape[1], sizes


def _gate_up(
    tokens: jax.Array, kernel: jax.Array | PackedKernel, sizes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if isinstance(kernel, PackedKernel):
        y, hidden = packed_dot(tokens, kernel, sizes).astype(tokens.dtype), kernel.shape[2]
        return y[:, :hidden], y[:, hidden:]
    experts, width, _, hidden = kernel.shape
    y = jax.lax.ragged_dot(tokens, kernel.reshape(experts, width, 2 * hidden), sizes)
    return y[:, :hidden], y[:, hidden:]
