"""Norms, rotary embedding and the gated MLP, shared by targets and drafts."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from dspark_jax.config import RopeConfig
from dspark_jax.products import project

KERNEL_INIT = nn.initializers.normal(0.02)


class RmsNorm(nn.Module):
    """Root-mean-square norm, statistics in float32, rounded to the input's type before the scale.

    With `round_last` the scale is applied in float32 too and the product is rounded.

    Source: transformers Qwen3RMSNorm and LlamaRMSNorm; `round_last`: DeepSeek V4 RMSNorm.
    """

    eps: float
    round_last: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of x [.., D]."""
        weight = self.param("weight", nn.initializers.ones_init(), (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        if self.round_last:
            return (weight.astype(jnp.float32) * y).astype(x.dtype)
        return weight * y.astype(x.dtype)


class GatedMlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x), gate and up in one kernel [D, 2, F]."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [.., D] to [.., D]."""
        gate_up = self.param("gate_up", KERNEL_INIT, (x.shape[-1], 2, self.width))
        down = self.param("down", KERNEL_INIT, (self.width, x.shape[-1]))
        y = project(x, gate_up)
        return project(nn.silu(y[..., 0, :]) * y[..., 1, :], down)


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies of the rotary pairs, and the factor on cos and sin.

    Args:
      config: rotary settings.
      head_dim: H, even.

    Returns:
      f32[H/2] radians per position, and the attention factor (1 except for yarn).

    Source: transformers modeling_rope_utils (default, linear, llama3, yarn).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    freq = config.rope_theta**-exponents
    if config.rope_type == "linear":
        return (freq / config.factor).astype(np.float32), 1.0
    if config.rope_type == "llama3":
        wavelength = 2 * math.pi / freq
        turns = config.original_max_position_embeddings / wavelength
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (keep * freq + (1 - keep) * freq / config.factor).astype(np.float32), 1.0
    if config.rope_type == "yarn":
        return _yarn(config, head_dim, freq)
    return freq.astype(np.float32), 1.0


def _yarn(config: RopeConfig, head_dim: int, freq: np.ndarray) -> tuple[np.ndarray, float]:
    def pair_at(turns: float) -> float:
        span = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_at(config.beta_fast)), 0)
    high = min(math.ceil(pair_at(config.beta_slow)), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    scaled = keep * freq + (1 - keep) * freq / config.factor
    factor = config.attention_factor
    if factor is None:
        factor = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return scaled.astype(np.float32), float(factor)


def rope_angles(config: RopeConfig, head_dim: int, positions: jax.Array) -> jax.Array:
    """Cosines and sines for absolute positions.

    Args:
      config: rotary settings.
      head_dim: H.
      positions: i32[..], absolute token positions.

    Returns:
      f32[.., 2, H/2]: cos, then sin, attention factor included.
    """
    freq, factor = rope_frequencies(config, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * freq
    angles = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-2) * factor
    return jax.lax.optimization_barrier(angles)  # computed once, not in every layer's fusions


def apply_rope(x: jax.Array, angles: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates the pairs of every head.

    Args:
      x: [.., heads, H].
      angles: f32[.., 2, H/2] from `rope_angles`, same leading axes as x without heads.
      interleaved: pairs are (2i, 2i+1); otherwise (i, i + H/2).

    Returns:
      The rotated x, same shape and type. cos and sin are rounded to x's type first, as the
      reference does.
    """
    angles = angles.astype(x.dtype)
    cos, sin = angles[..., None, 0, :], angles[..., None, 1, :]
    if interleaved:
        pairs = rearrange(x, "... (h two) -> ... two h", two=2)
    else:
        pairs = rearrange(x, "... (two h) -> ... two h", two=2)
    a, b = pairs[..., 0, :], pairs[..., 1, :]
    if interleaved:
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotate_tail(x: jax.Array, angles: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates the interleaved pairs of the last dimensions only, in float32.

    Args:
      x: [.., heads, H].
      angles: f32[.., 2, R/2] from `rope_angles`, for the last R <= H dimensions.
      inverse: turns back instead.

    Returns:
      x with its last R dimensions rotated, same type.

    Source: DeepSeek V4 inference code, `apply_rotary_emb`.
    """
    rotated = 2 * angles.shape[-1]
    if inverse:
        angles = angles * jnp.array([[1.0], [-1.0]])
    tail = apply_rope(x[..., -rotated:].astype(jnp.float32), angles, interleaved=True)
    return jnp.concatenate([x[..., :-rotated], tail.astype(x.dtype)], axis=-1)


def round_to_fp8(x: jax.Array, group: int) -> jax.Array:
    """Rounds to what FP8 storage with a power-of-two scale per group would hold.

    Args:
      x: [.., H].
      group: neighbouring values of the last axis that share a scale; divides H.

    Returns:
      x rounded, same shape and type; the scale is the smallest power of two that brings the
      group's largest value (at least 1e-4) within e4m3's 448.

    Source: DeepSeek V4 inference code, `act_quant` with ue8m0 scales.
    """
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)
    largest = jnp.maximum(jnp.abs(groups).max(axis=-1, keepdims=True), 1e-4)
    mantissa, exponent = jnp.frexp(largest / 448)
    scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))
    codes = jnp.clip(groups / scale, -448, 448).astype(jnp.float8_e4m3fn)
    return (codes.astype(jnp.float32) * scale).reshape(x.shape).astype(x.dtype)
