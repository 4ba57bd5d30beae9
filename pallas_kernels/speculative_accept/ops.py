"""Which drafts the target accepts, and the token it adds itself, from logits."""

import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.chips import block_sizes
from pallas_kernels.dispatch import Impl, select
from pallas_kernels.noise import check_noise
from pallas_kernels.speculative_accept import kernel, ref
from pallas_kernels.vocab import (
    GREEDY_BELOW,
    RowStats,
    first_column,
    gather_shards,
    merge_shards,
)

Method = Literal["standard", "coupled", "greedy"]


class Accepted(NamedTuple):
    """The outcome for a block per request."""

    accept_len: jax.Array  # i32[R], drafts accepted, 0..verify_len
    bonus_token: jax.Array  # i32[R], the target's own token


def speculative_accept(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    verify_len: jax.Array,
    *,
    method: Method,
    draft_logits: jax.Array | None = None,
    temperature: jax.Array | None = None,
    uniforms: jax.Array | None = None,
    noise: jax.Array | None = None,
    axis_name: str | None = None,
    impl: Impl = "auto",
) -> Accepted:
    """Verifies a block per request, reading each logit once.

    "standard": draft x passes while u q(x) < p(x); the token after a rejection comes from
    norm(max(0, p - q)), or from p if that has no mass; after the last draft from p. "coupled": a
    draft passes while it is what the target draws with the noise of its row. "greedy": while it is
    the target's argmax. Requests with a temperature below 1e-5 are greedy under every method.

    Args:
      target_logits: [R, K+1, V], warped but for the temperature (-inf where dropped).
      draft_tokens: i32[R, K]; entries at or past verify_len are ignored.
      verify_len: i32[R], drafts sent to the target, 0..K.
      method: as above.
      draft_logits: [R, K, V], whose softmax over the temperature each draft was drawn from; only
        for "standard".
      temperature: f32[R]; None where the logits have been divided by it, or for "greedy".
      uniforms: f32[R, K] in [0, 1); only for "standard".
      noise: Gumbel noise, or the data of the keys it comes from, of which only tiles are made then:
        "standard" f32[R, V] or u32[R, 2]; "coupled" f32[R, K+1, V] or u32[R, K+1, 2].
      axis_name: inside `shard_map`, the mesh axis over which the vocabulary of logits and noise is
        sharded evenly. Shards exchange 5 numbers per row, and 5 per request for "standard".
      impl: see `dispatch.select`.

    Returns:
      accept_len and bonus_token, the same on all shards.

    Raises:
      ValueError: an operand is missing, not used by the method, or of the wrong shape.

    Source: Leviathan et al. 2023, Algorithm 1; DSpark paper section 2.1.
    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected one of {', '.join(get_args(Method))}")
    _check(target_logits, draft_tokens, verify_len, temperature)
    _check_method(method, target_logits.shape, draft_logits, uniforms, noise)
    requests, _, vocab = target_logits.shape
    first = first_column(vocab, axis_name)
    if temperature is None:
        temperature = jnp.full((requests,), 0.0 if method == "greedy" else 1.0)
    elif method == "greedy":
        temperature = jnp.zeros_like(temperature)
    tokens = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    target = _row_stats(
        target_logits, tokens, temperature, first, noise if method == "coupled" else None,
        axis_name=axis_name, impl=impl,
    )  # fmt: skip
    if method != "standard":
        accept_len = _prefix_length(draft_tokens == target.best[:, :-1], verify_len)
        return Accepted(accept_len, _at_row(target.best, accept_len))

    return _accept_standard(
        target_logits, draft_logits, draft_tokens, verify_len, target, temperature, uniforms,
        noise, axis_name=axis_name, impl=impl,
    )  # fmt: skip


def _accept_standard(
    target_logits: jax.Array,
    draft_logits: jax.Array,
    draft_tokens: jax.Array,
    verify_len: jax.Array,
    target: RowStats,
    temperature: jax.Array,
    uniforms: jax.Array,
    noise: jax.Array,
    *,
    axis_name: str | None,
    impl: Impl,
) -> Accepted:
    """The rest of "standard", given the target's stats: q, the prefix, and a sample at its end."""
    first = first_column(target_logits.shape[-1], axis_name)
    draft = _row_stats(
        draft_logits, draft_tokens, temperature, first, None, axis_name=axis_name, impl=impl
    )
    p = jnp.exp(target.chosen - target.log_normaliser)[:, :-1]
    q = jnp.exp(draft.chosen - draft.log_normaliser)
    is_greedy = temperature < GREEDY_BELOW
    agreed = draft_tokens == target.best[:, :-1]
    passed = jnp.where(is_greedy[:, None], agreed, uniforms * q < p)
    accept_len = _prefix_length(passed, verify_len)
    draft_row = jnp.minimum(accept_len, draft_tokens.shape[1] - 1)
    stats = select(
        impl,
        functools.partial(kernel.residual_stats, sizes=block_sizes()),
        ref.residual_stats,
        _at_row(target_logits, accept_len), _at_row(draft_logits, draft_row),
        _at_row(target.log_normaliser, accept_len), _at_row(draft.log_normaliser, draft_row),
        temperature, noise, jnp.asarray(first, jnp.int32),
    )  # fmt: skip
    mass, _, residual_token, _, plain_token = _merge_residual(stats, axis_name)
    rejected = (accept_len < verify_len) & (mass > 0.0)
    token = jnp.where(rejected, residual_token, plain_token)
    return Accepted(accept_len, jnp.where(is_greedy, _at_row(target.best, accept_len), token))


def _row_stats(
    logits: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    first: jax.Array | int,
    noise: jax.Array | None,
    *,
    axis_name: str | None,
    impl: Impl,
) -> RowStats:
    operands = [logits, token, temperature, jnp.asarray(first, jnp.int32)]
    operands += [] if noise is None else [noise]
    run = functools.partial(kernel.row_stats, sizes=block_sizes())
    return merge_shards(select(impl, run, ref.row_stats, *operands), axis_name)


def _merge_residual(stats: tuple[jax.Array, ...], axis_name: str | None) -> tuple[jax.Array, ...]:
    """Mass, and value and token of two samples, over all shards."""
    if axis_name is None:
        return stats
    mass, *samples = gather_shards(stats, axis_name)
    merged = []
    for value, token in zip(samples[::2], samples[1::2], strict=True):
        winner = jnp.argmax(value, axis=0)[None]
        merged += [value.max(axis=0), jnp.take_along_axis(token, winner, axis=0)[0]]
    return mass.sum(axis=0), *merged


def _at_row(x: jax.Array, row: jax.Array) -> jax.Array:
    """x[r, row[r]] of [R, W, ..], as a masked sum: on a TPU a gather would copy x first."""
    here = jnp.arange(x.shape[1]) == row[:, None]
    here = here.reshape(*here.shape, *([1] * (x.ndim - 2)))
    return jnp.where(here, x, jnp.zeros_like(x)).sum(axis=1)


def _prefix_length(passed: jax.Array, verify_len: jax.Array) -> jax.Array:
    within = jnp.arange(passed.shape[1]) < verify_len[:, None]
    return jnp.cumprod(passed & within, axis=1).sum(axis=1).astype(jnp.int32)


def _check(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    verify_len: jax.Array,
    temperature: jax.Array | None,
) -> None:
    if target_logits.ndim != 3 or target_logits.shape[1] < 2:
        raise ValueError(f"target_logits is {target_logits.shape}; expected [R, K+1, V], K >= 1")
    requests, width, _ = target_logits.shape
    if draft_tokens.shape != (requests, width - 1):
        raise ValueError(f"draft_tokens is {draft_tokens.shape}; expected {(requests, width - 1)}")
    if verify_len.shape != (requests,):
        raise ValueError(f"verify_len is {verify_len.shape}; expected {(requests,)}")
    if temperature is not None and temperature.shape != (requests,):
        raise ValueError(f"temperature is {temperature.shape}; expected {(requests,)}")


def _check_method(
    method: Method,
    shape: tuple[int, int, int],
    draft_logits: jax.Array | None,
    uniforms: jax.Array | None,
    noise: jax.Array | None,
) -> None:
    requests, width, vocab = shape
    given = dict(draft_logits=draft_logits, uniforms=uniforms, noise=noise)
    needed = {"standard": set(given), "coupled": {"noise"}, "greedy": set()}[method]
    for name, x in given.items():
        if (x is not None) != (name in needed):
            verb = "needs" if name in needed else "does not use"
            raise ValueError(f"method {method!r} {verb} {name}")
    if draft_logits is not None and draft_logits.shape != (requests, width - 1, vocab):
        raise ValueError(
            f"draft_logits is {draft_logits.shape}; expected {(requests, width - 1, vocab)}"
        )
    if uniforms is not None and uniforms.shape != (requests, width - 1):
        raise ValueError(f"uniforms is {uniforms.shape}; expected {(requests, width - 1)}")
    if noise is not None:
        rows = (requests,) if method == "standard" else (requests, width)
        check_noise(noise, rows, vocab)
