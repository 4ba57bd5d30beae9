"""One step of the Markov head with its sample: the definition."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.noise import full_noise
from pallas_kernels.vocab import perturb, scale


class Draw(NamedTuple):
    """A sample per request and what its probability is made of."""

    top: jax.Array  # f32[R], the largest scaled logit
    total: jax.Array  # f32[R], sum of exp(scaled - top)
    value: jax.Array  # f32[R], the largest of scaled + noise; of the logits, where greedy
    token: jax.Array  # i32[R], where that is; the lowest of equals
    token_logit: jax.Array  # f32[R], its scaled logit
    logits: jax.Array | None  # f32[R, V], base + bias, if asked for


def draw(
    latent: jax.Array,
    w2: jax.Array,
    base_logits: jax.Array,
    temperature: jax.Array,
    first: jax.Array,
    noise: jax.Array | None = None,
    *,
    keep_logits: bool,
) -> Draw:
    """Adds the bias of a latent to base logits and draws.

    Args:
      latent: [R, Q], W1[x_{k-1}] for the plain head.
      w2: [V, Q].
      base_logits: [R, V], U_k.
      temperature: f32[R].
      first: i32[], the token of column 0.
      noise: f32[R, V], or key data u32[R, 2]; None makes every request greedy.
      keep_logits: whether to return base + bias.

    Returns:
      The draw.

    Source: DSpark paper eq. 5 and 6.
    """
    bias = jnp.einsum("rq,vq->rv", latent, w2, preferred_element_type=jnp.float32)
    logits = base_logits.astype(jnp.float32) + bias
    scaled = scale(logits, temperature[:, None])
    perturbed = scaled
    if noise is not None:
        drawn = full_noise(noise, logits.shape[-1], first)
        perturbed = perturb(scaled, temperature[:, None], drawn)
    best = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
    top = scaled.max(axis=-1)
    safe = jnp.where(top == -jnp.inf, 0.0, top)[:, None]  # a shard may hold nothing possible
    return Draw(
        top=top,
        total=jnp.exp(scaled - safe).sum(axis=-1),
        value=perturbed.max(axis=-1),
        token=first + best,
        token_logit=jnp.take_along_axis(scaled, best[:, None], axis=-1)[:, 0],
        logits=logits if keep_logits else None,
    )
