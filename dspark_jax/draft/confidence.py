"""The confidence head: how likely draft k survives, given that all drafts before it did.

It reads h_k and the token before draft k, never draft k itself, so it may decide whether draft k
is verified without changing the output distribution (paper eq. 7).
"""

import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig
from dspark_jax.layers import KERNEL_INIT
from dspark_jax.types import Params


def init_confidence(key: jax.Array, config: DraftConfig) -> Params:
    """Random head: weight [D + Q] (or [D] without the Markov embedding) and bias []."""
    rank = config.markov_rank if config.confidence_head_with_markov else 0
    size = config.hidden_size + rank
    return {"weight": KERNEL_INIT(key, (size,)), "bias": jnp.zeros(())}


def confidence_logits(
    params: Params, hidden: jax.Array, markov_embedding: jax.Array | None
) -> jax.Array:
    """Logit of c_k.

    Args:
      params: weight [D + Q] or [D]; bias [], where the head has one.
      hidden: [.., D], h_k.
      markov_embedding: [.., Q], W1[x_{k-1}]; unused when the weight has D entries.

    Returns:
      f32[..]. Computed in the wider of the hidden and the weight type, as the references do.
    """
    x = hidden
    if params["weight"].shape[0] > hidden.shape[-1]:
        x = jnp.concatenate([hidden, markov_embedding], axis=-1)
    logits = x @ params["weight"]
    return (logits + params["bias"] if "bias" in params else logits).astype(jnp.float32)
