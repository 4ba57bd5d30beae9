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
from dspark_jax.sharding import axis_size, is_split, spec_here, split_axes

# From so many tokens on, devices that split the experts exchange them instead of all handling all.
# A layer of Qwen3-30B-A3B on eight v6e chips is modelled at 258 us (all handle all) and 263 us
# (exchange) for 128 tokens, 290 and 287 us for 512, 516 and 358 us for 2048.
ALL_TO_ALL_TOKENS = 512
EXCHANGE_FACTOR = 2  # room for routing that is uneven, before a second message is needed
EXCHANGE = "exchange"  # names the loop in compiled programs


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
    gate_up: jax.Array, down: jax.Array, *, all_to_all: bool | None = None,
) -> jax.Array:  # fmt: skip
    """Runs `compute` with the experts split over the mesh it is traced under, if there is one.

    Two forms with equal results. For few tokens every device has all of them, computes the
    assignments to its own experts, with its part of their width, and one sum over the devices
    completes the result. For many (`ALL_TO_ALL_TOKENS`) each device along `expert` has a share of
    the tokens, sends them to the devices of their experts and gets the results back
    (`exchange_tokens`), so that none handles rows that are not its own.

    Args:
      compute: `routed_experts` or `clamped_experts`.
      tokens: [T, D].
      chosen: i32[T, k].
      weight: f32[T, k].
      gate_up: [E, D, 2, F].
      down: [E, F, D].
      all_to_all: the form; None goes by the number of tokens. The form for many has no gradient.

    Returns:
      [T, D], what `compute` returns without a mesh.
    """
    if not is_split():
        return compute(tokens, chosen, weight, gate_up, down)
    axes, devices, count = split_axes(), axis_size("experts"), tokens.shape[0]
    exchanged = devices > 1
    exchanged &= count >= ALL_TO_ALL_TOKENS if all_to_all is None else all_to_all

    def sum_of_all(*args: jax.Array) -> jax.Array:
        tokens, chosen, weight, gate_up, down = args
        own = gate_up.shape[0]
        place = jax.lax.axis_index("expert") if "expert" in axes else 0
        local = chosen - place * own
        local = jnp.where((local >= 0) & (local < own), local, own)  # own: another device's
        out = compute(tokens, local, weight, gate_up, down, partial=True)
        return jax.lax.psum(out, axes)

    def from_each(*args: jax.Array) -> jax.Array:
        out = exchange_tokens(compute, *args, devices=devices)
        out = jax.lax.psum(out, tuple(axis for axis in axes if axis != "expert"))
        return jax.lax.all_gather(out, "expert", tiled=True)

    kernels = (("experts", None, None, "expert_mlp"), ("experts", "expert_mlp", None))
    if isinstance(gate_up, PackedKernel):
        kernels = (("experts", None, "expert_mlp", None), ("experts", None, "expert_mlp"))
    whole, split = spec_here(), spec_here("expert_tokens") if exchanged else spec_here()
    if exchanged:
        spare = ((0, -count % devices), (0, 0))
        tokens, weight = jnp.pad(tokens, spare), jnp.pad(weight, spare)
        chosen = jnp.pad(chosen, spare, constant_values=gate_up.shape[0])  # no expert
    with jax.named_scope("moe.experts"):
        out = jax.shard_map(
            from_each if exchanged else sum_of_all,
            in_specs=(split, split, split, *(spec_here(*names) for names in kernels)),
            out_specs=whole,
            axis_names=set(axes),
            check_vma=False,
        )(tokens, chosen, weight, gate_up, down)
    return out[:count]


def exchange_tokens(
    compute: Callable, tokens: jax.Array, chosen: jax.Array, weight: jax.Array,
    gate_up: jax.Array, down: jax.Array, *, devices: int,
) -> jax.Array:  # fmt: skip
    """One device's share of the tokens through the experts of all devices along `expert`.

    An assignment travels as its token, the place of its expert on the device that has it, and its
    weight; what comes back is weighted and only summed. Messages between two devices hold
    `exchange_rows` assignments, and are repeated until the fullest pair has sent all of its own:
    usually once, more often where many tokens choose the experts of one device. None is dropped.

    Args:
      compute: `routed_experts` or `clamped_experts`.
      tokens: [t, D], this device's.
      chosen: i32[t, k] of all E experts; E is none.
      weight: f32[t, k].
      gate_up: [E / devices, D, 2, F], this device's.
      down: [E / devices, F, D].
      devices: along `expert`.

    Returns:
      [t, D] in the type that `compute` returns.
    """
    own, (count, k) = gate_up.shape[0], chosen.shape
    rows = exchange_rows(count * k, devices)
    compute = functools.partial(compute, partial=True)
    kind = jax.eval_shape(compute, tokens, chosen, weight, gate_up, down).dtype
    chosen, weight = chosen.reshape(-1), weight.reshape(-1)
    order, _, sizes = _group_by_expert(chosen[:, None] // own, devices)
    begins = jnp.cumsum(sizes) - sizes
    place = jnp.arange(rows)
    most = jax.lax.pmax(sizes.max(), "expert")

    def swap(x: jax.Array) -> jax.Array:
        """[devices, rows, ..]: the messages to each device for those from each."""
        return jax.lax.all_to_all(x, "expert", split_axis=0, concat_axis=0)

    def send(done: jax.Array, out: jax.Array) -> jax.Array:
        real = done + place < sizes[:, None]
        pick = order[jnp.where(real, begins[:, None] + done + place, 0)]
        expert = jnp.where(real, chosen[pick] % own, own)  # own: nothing is sent
        about = jnp.stack([expert.astype(jnp.float32), weight[pick]], axis=-1)
        x, about = swap(tokens[pick // k]), swap(about).reshape(-1, 2)
        y = compute(
            x.reshape(-1, x.shape[-1]), about[:, :1].astype(jnp.int32), about[:, 1:],
            gate_up, down,
        )  # fmt: skip
        y = jnp.where(real[..., None], swap(y.reshape(x.shape)), 0)
        return out.at[pick // k].add(y)

    out = jnp.zeros(tokens.shape, kind)
    if rows == count * k:
        return send(jnp.int32(0), out)
    with jax.named_scope(EXCHANGE):
        return jax.lax.while_loop(
            lambda carry: carry[0] < most,
            lambda carry: (carry[0] + rows, send(*carry)),
            (jnp.int32(0), out),
        )[1]


def exchange_rows(assignments: int, devices: int) -> int:
    """Assignments in a message of `exchange_tokens`: `EXCHANGE_FACTOR` times an even share."""
    return min(-(-EXCHANGE_FACTOR * assignments // devices), assignments)


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
