"""The Markov head: a low-rank bias on each draft's logits from the token before it.

Three kinds share one step: a latent of rank Q from the previous token (and, for gated and rnn,
the block's hidden state), then bias = W2 latent.

Source: paper eq. 5 and 6; DeepSpec's vanilla, gated and RNN heads.
"""

import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig
from dspark_jax.layers import KERNEL_INIT
from dspark_jax.types import Params


def init_markov(key: jax.Array, config: DraftConfig) -> Params:
    """Random Markov head: w1 [V, Q], w2 [Vd, Q], and `gate` or `joint` of the richer kinds.

    Args:
      key: PRNG key.
      config: draft config with `markov_rank` > 0.

    Returns:
      The head's parameters; w2 starts at zero, so that an untrained head adds no bias.
    """
    rank, width = config.markov_rank, config.hidden_size
    keys = jax.random.split(key)
    params = {
        "w1": KERNEL_INIT(keys[0], (config.vocab_size, rank)),
        "w2": jnp.zeros((config.output_vocab_size, rank)),
    }
    if config.markov_head_type == "gated":
        params["gate"] = {
            "kernel": KERNEL_INIT(keys[1], (width + rank, rank)),
            "bias": jnp.zeros(rank),
        }
    elif config.markov_head_type == "rnn":
        params["joint"] = {
            "kernel": KERNEL_INIT(keys[1], (2 * rank + width, 3 * rank)),
            "bias": jnp.zeros(3 * rank),
        }
    return params


def initial_state(params: Params, batch_shape: tuple[int, ...]) -> jax.Array:
    """s_0 = 0 [.., Q]; carried unchanged by the kinds without a state."""
    return jnp.zeros((*batch_shape, params["w1"].shape[-1]), params["w1"].dtype)


def markov_step(
    params: Params, previous: jax.Array, hidden: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One position of the serial head.

    Args:
      params: of `init_markov`; the kind is told by the parameters present.
      previous: i32[..], x_{k-1} in target ids (the anchor for the first draft).
      hidden: [.., D], h_k.
      state: [.., Q], s_{k-1}.

    Returns:
      latent [.., Q] with bias = latent W2^T, embedding W1[x_{k-1}] [.., Q], and s_k.
    """
    embedding = params["w1"][previous]
    if "gate" in params:
        joined = jnp.concatenate([hidden, embedding], axis=-1)
        gate = jax.nn.sigmoid(joined @ params["gate"]["kernel"] + params["gate"]["bias"])
        return gate * embedding, embedding, state
    if "joint" in params:
        joined = jnp.concatenate([state, embedding, hidden], axis=-1)
        joined = joined @ params["joint"]["kernel"] + params["joint"]["bias"]
        keep, candidate, out = jnp.split(joined, 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        state = keep * state + (1 - keep) * jnp.tanh(candidate)
        return jnp.tanh(out), embedding, state
    return embedding, embedding, state


def markov_bias(params: Params, latent: jax.Array) -> jax.Array:
    """B_k: f32[.., Vd] from the latent [.., Q]."""
    return jnp.einsum("...q,vq->...v", latent, params["w2"], preferred_element_type=jnp.float32)
