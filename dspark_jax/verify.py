"""Which drafts the target accepts, and the token it adds itself.

`standard` is rejection sampling: accept x with probability min(1, p(x)/q(x)), at the first
failure draw from norm(max(0, p - q)). `coupled` draws the target's token with the very noise
plain decoding would use and accepts while the draft agrees, so the text for a seed does not
depend on the draft at all. `block` decides about the whole prefix at once and accepts at least as
many drafts as `standard` on average.

All of them take any verify_len that is non-anticipating. For `block` too: given drafts up to i,
the probability that at least i are accepted is the same whether or not more drafts follow.

Source: paper section 2.1; Leviathan et al. 2023 (arXiv 2211.17192), Theorem 1; Sun et al. 2024
(arXiv 2403.10444), Algorithm 2.
"""

import chex
import jax
import jax.numpy as jnp

from dspark_jax.sampling import draw
from dspark_jax.types import AcceptResult


def accept_standard(
    draft_tokens: jax.Array,
    draft_log_probs: jax.Array,
    target_log_probs: jax.Array,
    verify_len: jax.Array,
    uniforms: jax.Array,
    noise: jax.Array,
) -> AcceptResult:
    """Rejection sampling of a block.

    Args:
      draft_tokens: i32[R, K]; entries at or past verify_len are ignored.
      draft_log_probs: f32[R, K, V], log q each draft was drawn from.
      target_log_probs: f32[R, K+1, V], log p at the same positions and one more, warped alike.
      verify_len: i32[R], drafts sent to the target, 0..K.
      uniforms: f32[R, K] in [0, 1), one per draft.
      noise: f32[R, V], Gumbel noise for the residual or bonus token.

    Returns:
      accept_len and the bonus token: from the residual after a rejection, from p at row
      verify_len when every verified draft passed.
    """
    requests, block = draft_tokens.shape
    vocab = target_log_probs.shape[-1]
    chex.assert_shape(draft_log_probs, (requests, block, vocab))
    chex.assert_shape(target_log_probs, (requests, block + 1, vocab))
    chosen = draft_tokens[..., None]
    p = jnp.exp(jnp.take_along_axis(target_log_probs[:, :-1], chosen, axis=-1)[..., 0])
    q = jnp.exp(jnp.take_along_axis(draft_log_probs, chosen, axis=-1)[..., 0])
    passed = uniforms * q < p
    accept_len = _prefix_length(passed, verify_len)
    row = accept_len[:, None, None]
    p_row = jnp.take_along_axis(target_log_probs, row, axis=1)[:, 0]
    q_row = jnp.take_along_axis(draft_log_probs, jnp.minimum(row, block - 1), axis=1)[:, 0]
    residual = jnp.maximum(jnp.exp(p_row) - jnp.exp(q_row), 0.0)
    rejected = (accept_len < verify_len) & (residual.sum(axis=-1) > 0.0)
    bonus = draw(jnp.where(rejected[:, None], jnp.log(residual), p_row), noise)
    return AcceptResult(accept_len=accept_len, bonus_token=bonus)


def accept_block(
    draft_tokens: jax.Array,
    draft_log_probs: jax.Array,
    target_log_probs: jax.Array,
    verify_len: jax.Array,
    uniforms: jax.Array,
    noise: jax.Array,
) -> AcceptResult:
    """Block verification: the longest prefix that passes, whether or not shorter ones do.

    With w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)) and s_i = sum_v max(0, w_i p_{i+1}(v) -
    q_{i+1}(v)), prefix i < verify_len passes with probability s_i / (s_i + 1 - w_i), and the whole
    of verify_len drafts with w. The token after prefix i is drawn from norm(max(0, w_i p - q)).

    Args:
      draft_tokens: i32[R, K]; entries at or past verify_len are ignored.
      draft_log_probs: f32[R, K, V], log q each draft was drawn from.
      target_log_probs: f32[R, K+1, V], log p at the same positions and one more, warped alike.
      verify_len: i32[R], drafts sent to the target, 0..K.
      uniforms: f32[R, K] in [0, 1), one per draft.
      noise: f32[R, V], Gumbel noise for the residual or bonus token.

    Returns:
      accept_len and the bonus token: from the residual of the accepted prefix, from p at row
      verify_len when that is all of it.
    """
    requests, block = draft_tokens.shape
    vocab = target_log_probs.shape[-1]
    chex.assert_shape(draft_log_probs, (requests, block, vocab))
    chex.assert_shape(target_log_probs, (requests, block + 1, vocab))
    chosen = draft_tokens[..., None]
    p, q = jnp.exp(target_log_probs), jnp.exp(draft_log_probs)
    ratio = (
        jnp.take_along_axis(p[:, :-1], chosen, axis=-1)
        / jnp.take_along_axis(q, chosen, axis=-1)
    )[..., 0]
    weights = [jnp.ones(requests)]
    for i in range(block):
        weights.append(jnp.minimum(weights[-1] * ratio[:, i], 1.0))
    weight = jnp.stack(weights, axis=1)  # [R, K+1]
    left = jnp.maximum(weight[:, :-1, None] * p[:, :-1] - q, 0.0).sum(axis=-1)  # s_i, [R, K]
    prefix = jnp.arange(1, block + 1)
    ends = prefix == verify_len[:, None]
    left = jnp.pad(left[:, 1:], ((0, 0), (0, 1)))  # s_1 .. s_{K-1}; prefix K always ends
    whole = left + 1.0 - weight[:, 1:]
    passes = (uniforms * whole < left) | (whole <= 0.0)
    passes = jnp.where(ends, uniforms < weight[:, 1:], passes) & (prefix <= verify_len[:, None])
    accept_len = jnp.max(jnp.where(passes, prefix, 0), axis=1).astype(jnp.int32)
    row = accept_len[:, None]
    p_row = jnp.take_along_axis(target_log_probs, row[..., None], axis=1)[:, 0]
    q_row = jnp.take_along_axis(q, jnp.minimum(row, block - 1)[..., None], axis=1)[:, 0]
    scale = jnp.take_along_axis(weight, row, axis=1)
    residual = jnp.maximum(scale * jnp.exp(p_row) - q_row, 0.0)
    stopped = (accept_len < verify_len) & (residual.sum(axis=-1) > 0.0)
    bonus = draw(jnp.where(stopped[:, None], jnp.log(residual), p_row), noise)
    return AcceptResult(accept_len=accept_len, bonus_token=bonus)


def accept_coupled(
    draft_tokens: jax.Array, target_tokens: jax.Array, verify_len: jax.Array
) -> AcceptResult:
    """Accepts while the draft is what the target would have said.

    Args:
      draft_tokens: i32[R, K].
      target_tokens: i32[R, K+1], the token plain decoding emits at each row given the drafts
        before it; at temperature 0 its argmax.
      verify_len: i32[R], 0..K.

    Returns:
      accept_len, and the target's token at row accept_len.
    """
    accept_len = _prefix_length(draft_tokens == target_tokens[:, :-1], verify_len)
    bonus = jnp.take_along_axis(target_tokens, accept_len[:, None], axis=1)[:, 0]
    return AcceptResult(accept_len=accept_len, bonus_token=bonus)


def _prefix_length(passed: jax.Array, verify_len: jax.Array) -> jax.Array:
    within = jnp.arange(passed.shape[1]) < verify_len[:, None]
    return jnp.cumprod(passed & within, axis=1).sum(axis=1).astype(jnp.int32)
