"""Which drafts the target accepts, and the token it adds itself, from logits."""

import functools
from collections.abc import Callable
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
    draft_temperature: jax.Array | None = None,
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
      draft_temperature: f32[R], of draft_logits; None is the target's.
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
    if target_logits.ndim != 3 or target_logits.shape[1] < 2:
        raise ValueError(f"target_logits is {target_logits.shape}; expected [R, K+1, V], K >= 1")
    rest = dict(draft_logits=draft_logits, uniforms=uniforms, noise=noise)
    by_request = dict(temperature=temperature, draft_temperature=draft_temperature)
    _check(method, target_logits.shape, draft_tokens, verify_len=verify_len, **by_request)
    _check_method(method, target_logits.shape, **rest)
    temperature = _temperature(method, temperature, draft_tokens.shape[0])
    target = _row_stats(
        target_logits, jnp.pad(draft_tokens, ((0, 0), (0, 1))), temperature,
        noise if method == "coupled" else None, axis_name=axis_name, impl=impl,
    )  # fmt: skip
    return _accept(
        method, target, functools.partial(_at_row, target_logits), draft_tokens, verify_len,
        temperature, draft_temperature, **rest, axis_name=axis_name, impl=impl,
    )  # fmt: skip


def speculative_accept_packed(
    target_logits: jax.Array,
    request: jax.Array,
    offset: jax.Array,
    index: jax.Array,
    draft_tokens: jax.Array,
    verify_len: jax.Array,
    *,
    method: Method,
    draft_logits: jax.Array | None = None,
    temperature: jax.Array | None = None,
    draft_temperature: jax.Array | None = None,
    uniforms: jax.Array | None = None,
    noise: jax.Array | None = None,
    axis_name: str | None = None,
    impl: Impl = "auto",
) -> Accepted:
    """`speculative_accept` of rows that lie end to end: rows that were not verified cost nothing.

    Args:
      target_logits: [T, V], of the verified rows; otherwise as there, like all that follows.
      request: i32[T], whose each row is, 0..R-1.
      offset: i32[T], which of that request's rows it is, 0..K.
      index: i32[R, K+1], where each row lies, 0..T-1; past row verify_len it may be anything.
      draft_tokens: i32[R, K].
      verify_len: i32[R].
      method: "standard", "coupled" or "greedy".
      draft_logits: [R, K, V].
      temperature: f32[R].
      draft_temperature: f32[R].
      uniforms: f32[R, K].
      noise: "standard" f32[R, V] or u32[R, 2]; "coupled" f32[R, K+1, V] or u32[R, K+1, 2].
      axis_name: mesh axis of the vocabulary.
      impl: see `dispatch.select`.

    Returns:
      accept_len and bonus_token, the same on all shards.

    Raises:
      ValueError: an operand is missing, not used by the method, or of the wrong shape.
    """
    shape = (*index.shape, target_logits.shape[-1])
    _check_packing(target_logits, request, offset, index)
    rest = dict(draft_logits=draft_logits, uniforms=uniforms, noise=noise)
    by_request = dict(temperature=temperature, draft_temperature=draft_temperature)
    _check(method, shape, draft_tokens, verify_len=verify_len, **by_request)
    _check_method(method, shape, **rest)
    temperature = _temperature(method, temperature, draft_tokens.shape[0])

    def packed(x: jax.Array) -> jax.Array:  # [R, K+1, ..] -> [T, 1, ..]
        return x[request, offset][:, None]

    stats = _row_stats(
        target_logits[:, None], packed(jnp.pad(draft_tokens, ((0, 0), (0, 1)))),
        temperature[request], packed(noise) if method == "coupled" else None,
        axis_name=axis_name, impl=impl,
    )  # fmt: skip
    target = RowStats(*(x[:, 0].at[index].get(mode="clip") for x in stats))

    def target_row(row: jax.Array) -> jax.Array:
        return target_logits.at[_at_row(index, row)].get(mode="clip")

    return _accept(
        method, target, target_row, draft_tokens, verify_len, temperature, draft_temperature,
        **rest, axis_name=axis_name, impl=impl,
    )  # fmt: skip


def _accept(
    method: Method,
    target: RowStats,
    target_row: Callable[[jax.Array], jax.Array],
    draft_tokens: jax.Array,
    verify_len: jax.Array,
    temperature: jax.Array,
    draft_temperature: jax.Array | None,
    draft_logits: jax.Array | None,
    uniforms: jax.Array | None,
    noise: jax.Array | None,
    *,
    axis_name: str | None,
    impl: Impl,
) -> Accepted:
    """The rest, given the target's stats [R, K+1]: the prefix, and for "standard" what follows it.

    `target_row` gives one row of logits of every request, [R, V] at rows i32[R].
    """
    agreed = draft_tokens == target.best[:, :-1]
    if method != "standard":
        accept_len = _prefix_length(agreed, verify_len)
        return Accepted(accept_len, _at_row(target.best, accept_len))
    if draft_temperature is None:
        draft_temperature = temperature
    draft = _row_stats(
        draft_logits, draft_tokens, draft_temperature, None, axis_name=axis_name, impl=impl
    )
    p = jnp.exp(target.chosen - target.log_normaliser)[:, :-1]
    q = jnp.exp(draft.chosen - draft.log_normaliser)
    is_greedy = temperature < GREEDY_BELOW
    passed = jnp.where(is_greedy[:, None], agreed, uniforms * q < p)
    accept_len = _prefix_length(passed, verify_len)
    draft_row = jnp.minimum(accept_len, draft_tokens.shape[1] - 1)
    first = first_column(draft_logits.shape[-1], axis_name)
    stats = select(
        impl,
        functools.partial(kernel.residual_stats, sizes=block_sizes()),
        ref.residual_stats,
        target_row(accept_len), _at_row(draft_logits, draft_row),
        _at_row(target.log_normaliser, accept_len), _at_row(draft.log_normaliser, draft_row),
        temperature, draft_temperature, noise, jnp.asarray(first, jnp.int32),
    )  # fmt: skip
    mass, _, residual_token, _, plain_token = _merge_residual(stats, axis_name)
    rejected = (accept_len < verify_len) & (mass > 0.0)
    token = jnp.where(rejected, residual_token, plain_token)
    return Accepted(accept_len, jnp.where(is_greedy, _at_row(target.best, accept_len), token))


def _row_stats(
    logits: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    noise: jax.Array | None,
    *,
    axis_name: str | None,
    impl: Impl,
) -> RowStats:
    first = first_column(logits.shape[-1], axis_name)
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


def _temperature(method: Method, temperature: jax.Array | None, requests: int) -> jax.Array:
    if method == "greedy":
        return jnp.zeros(requests)
    return jnp.ones(requests) if temperature is None else temperature


def _at_row(x: jax.Array, row: jax.Array) -> jax.Array:
    """x[r, row[r]] of [R, W, ..], as a masked sum: on a TPU a gather would copy x first."""
    here = jnp.arange(x.shape[1]) == row[:, None]
    here = here.reshape(*here.shape, *([1] * (x.ndim - 2)))
    return jnp.where(here, x, jnp.zeros_like(x)).sum(axis=1)


def _prefix_length(passed: jax.Array, verify_len: jax.Array) -> jax.Array:
    within = jnp.arange(passed.shape[1]) < verify_len[:, None]
    return jnp.cumprod(passed & within, axis=1).sum(axis=1).astype(jnp.int32)


def _check(
    method: Method,
    shape: tuple[int, int, int],
    draft_tokens: jax.Array,
    **by_request: jax.Array | None,
) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected one of {', '.join(get_args(Method))}")
    requests, width, _ = shape
    if draft_tokens.shape != (requests, width - 1):
        raise ValueError(f"draft_tokens is {draft_tokens.shape}; expected {(requests, width - 1)}")
    for name, x in by_request.items():
        if x is not None and x.shape != (requests,):
            raise ValueError(f"{name} is {x.shape}; expected {(requests,)}")


def _check_packing(
    target_logits: jax.Array, request: jax.Array, offset: jax.Array, index: jax.Array
) -> None:
    if target_logits.ndim != 2:
        raise ValueError(f"target_logits is {target_logits.shape}; expected [T, V]")
    if index.ndim != 2 or index.shape[1] < 2:
        raise ValueError(f"index is {index.shape}; expected [R, K+1], K >= 1")
    for name, x in dict(request=request, offset=offset).items():
        if x.shape != target_logits.shape[:1]:
            raise ValueError(f"{name} is {x.shape}; expected {target_logits.shape[:1]}")


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
