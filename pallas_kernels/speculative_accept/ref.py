"""The two passes over logits that accepting a block takes: the definition of each."""

import jax
import jax.numpy as jnp

from pallas_kernels.noise import full_noise
from pallas_kernels.vocab import RowStats, perturb, scale, whole_row


def row_stats(
    logits: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    first: jax.Array,
    noise: jax.Array | None = None,
) -> RowStats:
    """Normaliser, one token's logit, and the sample (without noise: the argmax) of every row.

    Args:
      logits: [R, W, V], warped but for the temperature; -inf where dropped.
      token: i32[R, W], whose logit is asked for.
      temperature: f32[R].
      first: i32[], the token of column 0.
      noise: f32[R, W, V], or key data u32[R, W, 2].

    Returns:
      The stats, each [R, W].
    """
    temperature = temperature[:, None, None]
    scaled = scale(logits, temperature)
    perturbed = scaled
    if noise is not None:
        perturbed = perturb(scaled, temperature, full_noise(noise, logits.shape[-1], first))
    return whole_row(scaled, perturbed, token, first)


def residual_stats(
    target_row: jax.Array,
    draft_row: jax.Array,
    target_log_normaliser: jax.Array,
    draft_log_normaliser: jax.Array,
    temperature: jax.Array,
    draft_temperature: jax.Array,
    noise: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, ...]:
    """Samples of the residual and of the target at the row where a block ends.

    Args:
      target_row: [R, V], as `logits` of `row_stats`.
      draft_row: [R, V].
      target_log_normaliser: f32[R], of the scaled logits.
      draft_log_normaliser: f32[R].
      temperature: f32[R], of the target.
      draft_temperature: f32[R].
      noise: f32[R, V], or key data u32[R, 2].
      first: i32[], the token of column 0.

    Returns:
      The residual's mass f32[R]; then value f32[R] and token i32[R] of the best of
      log max(0, p - q) + noise; then the same of log p + noise.

    Source: Leviathan et al. 2023, Theorem 1.
    """
    vocab, temperature = target_row.shape[-1], temperature[:, None]
    draft_scaled = scale(draft_row, draft_temperature[:, None])
    log_p = scale(target_row, temperature) - target_log_normaliser[:, None]
    log_q = draft_scaled - draft_log_normaliser[:, None]
    residual = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0.0)
    noise = full_noise(noise, vocab, first)

    def best(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x.max(axis=-1), first + jnp.argmax(x, axis=-1).astype(jnp.int32)

    plain = perturb(log_p, temperature, noise)
    return residual.sum(axis=-1), *best(jnp.log(residual) + noise), *best(plain)
