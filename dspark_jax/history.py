"""What earlier rounds tell the scheduler, kept on the device between rounds.

Everything here was settled before the drafts of the coming round are drawn, so any use of it is
non-anticipating.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.schedule import Evidence, ScheduleConfig, predicted_gain

ONLINE_RATE = 0.1  # weight of the newest outcome in the estimate of acceptance
EXPLORING_RATE = 0.01  # how fast the estimate for drafts that are never sent returns to 1
HYSTERESIS = 0.02  # predicted gain above the least at which drafting starts again
RECHECK_AFTER = 128  # rounds without drafts after which one drafts, at up to 3 times their price
RECHECK_AT_MOST = 512  # as many after rechecks in a row that changed nothing: each doubles the wait
FADING = 0.9  # weight of a round's confidences in the usual ones, a round with drafts later
NEUTRAL_ROUNDS = 2.0  # what is believed of any request counts as much as these rounds of its own
_UNKNOWN = -1.0  # a confidence of rounds that a request has not had


@flax.struct.dataclass
class History:
    """Of S slots. A request's first rounds look back on what is believed of any request."""

    confidence: jax.Array  # f32[S, lag, K], of the last rounds with drafts, oldest first; or -1
    confidence_sum: jax.Array  # f32[S, K], of all rounds with drafts, fading
    confidence_weight: jax.Array  # f32[S], rounds in that sum, fading
    acceptance: jax.Array  # f32[S, K], how often draft k was accepted when those before it were
    rounds: jax.Array  # i32[], rounds run
    idle_rounds: jax.Array  # i32[], rounds since drafts stopped paying or were rechecked, or 0
    idle_requests: jax.Array  # i32[], that were in the last round, if it had no drafts; or -1
    recheck_after: jax.Array  # i32[], idle rounds before the next recheck

    def lagged(self, rows: int, neutral: jax.Array) -> jax.Array:
        """Confidences of `lag` rounds ago.

        Args:
          rows: R; of slots 0..R-1.
          neutral: f32[K], for requests that did not draft then.

        Returns:
          f32[R, K].
        """
        oldest = self.confidence[:rows, 0]
        return jnp.where(oldest < 0, neutral, oldest)

    def usual(self, rows: int, neutral: jax.Array) -> jax.Array:
        """Mean confidences of earlier rounds; those of one say little about the next.

        Args:
          rows: R; of slots 0..R-1.
          neutral: f32[K], believed of any request; counts as some rounds.

        Returns:
          f32[R, K].
        """
        total = self.confidence_sum[:rows] + NEUTRAL_ROUNDS * neutral
        return total / (self.confidence_weight[:rows, None] + NEUTRAL_ROUNDS)


def init_history(config: ScheduleConfig, slots: int, num_drafts: int) -> History:
    """No rounds yet.

    Args:
      config: for its lag.
      slots: S.
      num_drafts: K.

    Returns:
      A history that knows nothing.
    """
    return History(
        confidence=jnp.full((slots, config.lag, num_drafts), _UNKNOWN),
        confidence_sum=jnp.zeros((slots, num_drafts)),
        confidence_weight=jnp.zeros(slots),
        acceptance=jnp.ones((slots, num_drafts)),
        rounds=jnp.zeros((), jnp.int32),
        idle_rounds=jnp.zeros((), jnp.int32),
        idle_requests=jnp.int32(-1),
        recheck_after=jnp.int32(RECHECK_AFTER),
    )


def forget(history: History, slot: jax.Array) -> History:
    """Makes slot i32[] one of a request without earlier rounds."""
    return history.replace(
        confidence=history.confidence.at[slot].set(_UNKNOWN),
        confidence_sum=history.confidence_sum.at[slot].set(0.0),
        confidence_weight=history.confidence_weight.at[slot].set(0.0),
        acceptance=history.acceptance.at[slot].set(1.0),
        idle_requests=jnp.full_like(history.idle_requests, -1),  # on a mesh, one of every group
    )


def is_probe(history: History, config: ScheduleConfig) -> jax.Array:
    """bool[]: does the coming round verify every draft, whatever the policy says?"""
    if config.probe_every == 0:
        return jnp.zeros((), bool)
    return history.rounds % config.probe_every == config.probe_every - 1


def bypasses(history: History, evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    """Does the coming round draft nothing, because drafts do not pay?

    While nothing is drafted nothing is learnt: what was found then holds for as many requests
    until one is new, or until the next recheck.

    Args:
      history: before the round.
      evidence: only what is older than the round is looked at; `lagged` is what is usual.
      config: with `min_predicted_gain`; None never bypasses.

    Returns:
      bool[].
    """
    if config.min_predicted_gain is None:
        return jnp.zeros((), bool)
    idle = history.idle_rounds > 0
    wanted = config.min_predicted_gain + jnp.where(idle, HYSTERESIS, 0.0)
    poor = jax.lax.cond(
        history.idle_requests == evidence.active.sum(),
        lambda: jnp.ones((), bool),
        lambda: predicted_gain(evidence, config) < wanted,
    )
    return poor & (history.idle_rounds < history.recheck_after) & ~is_probe(history, config)


def bypassed_rounds(history: History, evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    """How many coming rounds draft nothing, if none of the requests ends and none is new.

    Args:
      history: before the first of them.
      evidence: as of `bypasses`.
      config: with `min_predicted_gain`; None never bypasses.

    Returns:
      i32[], to the next recheck or probe; 0 if the coming round drafts.
    """
    left = history.recheck_after - history.idle_rounds
    if config.probe_every:
        to_probe = config.probe_every - 1 - history.rounds % config.probe_every
        left = jnp.minimum(left, to_probe)
    return jnp.where(bypasses(history, evidence, config), left, 0)


def remember(
    history: History,
    *,
    active: jax.Array,
    confidence: jax.Array,
    verify_len: jax.Array,
    accept_len: jax.Array,
) -> History:
    """The history after a round with drafts.

    Args:
      history: of S slots.
      active: bool[R], slots 0..R-1 before the round.
      confidence: f32[R, K], what the round was scheduled by.
      verify_len: i32[R].
      accept_len: i32[R].

    Returns:
      The new history.
    """
    rows = active.shape[0]
    older = history.confidence[:rows]
    shifted = jnp.concatenate([older[:, 1:], confidence[:, None]], axis=1)
    estimate = history.acceptance[:rows]
    weighted = history.confidence_sum[:rows], history.confidence_weight[:rows]
    faded = FADING * weighted[0] + confidence, FADING * weighted[1] + 1.0
    position = jnp.arange(estimate.shape[1])
    sent = position < verify_len[:, None]
    accepted = position < accept_len[:, None]
    reached = sent & (position <= accept_len[:, None])  # all drafts before it were accepted
    rate = jnp.where(reached, ONLINE_RATE, jnp.where(sent, 0.0, EXPLORING_RATE))
    moved = estimate + rate * (jnp.where(reached, accepted, 1.0) - estimate)
    rechecked = history.idle_rounds == history.recheck_after  # one round with drafts
    doubled = jnp.minimum(2 * history.recheck_after, RECHECK_AT_MOST)
    return history.replace(
        confidence=history.confidence.at[:rows].set(
            jnp.where(active[:, None, None], shifted, older)
        ),
        confidence_sum=history.confidence_sum.at[:rows].set(
            jnp.where(active[:, None], faded[0], weighted[0])
        ),
        confidence_weight=history.confidence_weight.at[:rows].set(
            jnp.where(active, faded[1], weighted[1])
        ),
        acceptance=history.acceptance.at[:rows].set(jnp.where(active[:, None], moved, estimate)),
        rounds=history.rounds + 1,
        idle_rounds=rechecked.astype(jnp.int32),
        idle_requests=jnp.full_like(history.idle_requests, -1),
        recheck_after=jnp.where(rechecked, doubled, RECHECK_AFTER),
    )


def remember_idle(history: History, *, active: jax.Array) -> History:
    """The history after a round without drafts, which tells nothing new.

    Args:
      history: of S slots.
      active: bool[R], slots 0..R-1 before the round.

    Returns:
      The new history.
    """
    return history.replace(
        rounds=history.rounds + 1,
        idle_rounds=history.idle_rounds + 1,
        idle_requests=active.sum(dtype=jnp.int32),
    )
