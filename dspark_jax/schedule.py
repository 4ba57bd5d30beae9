"""How many drafts of each request are verified this round.

Whether draft j of request r is admitted may depend on what existed before x_{r,j} was sampled,
never on x_{r,j} itself or anything drawn after it: then the output distribution cannot change.
Confidence c_{r,j} reads x_{r,<j} only, so ranking by survival is allowed; choosing the best of
all lengths from current confidences (`global`) is not, except where verification does not care.
A capacity (how many drafts in all) may come from an older round (`lagged`) or from what the
draft model knew before it drew any token (`presampled`).

Source: paper Algorithm 1, section 5.2 and Appendix A.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

REJECTION_SAMPLE_METHODS = ("standard", "block", "coupled")
THRESHOLD_KINDS = ("per_position", "cumulative")
CONFIDENCE_SOURCES = ("head", "online")
PLANNERS = ("device", "host")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Which policy decides, and its constants.

    Attributes:
      policy: a key of `POLICIES`.
      confidence_threshold: `threshold` stops before the first draft below it.
      threshold_kind: compare each position's confidence (DeepSpec) or the survival so far.
      lag: how many rounds old the confidences are that `lagged` and the bypass go by.
      min_verify_len: drafts of every request that are verified whatever their confidence.
      max_verify_len: most drafts of a request that are verified; None is all.
      min_predicted_gain: a round in which drafts promise less than this much more throughput than
        a round without them drafts nothing; 0.05 is 5 %. None always drafts.
      confidence_source: "head", or "online": how often drafts of the request were accepted at
        each position so far, for drafts without a confidence head.
      probe_every: every so many rounds all drafts are verified, to see what trimming costs; 0 is
        never.
      planner: where the number of rows of a round is chosen: on the "device", inside the round; or,
        for `lagged`, on the "host", which by then knows the confidences that this policy goes by
        and so starts the next round before it has seen the last one.
    """

    policy: str = "full"
    confidence_threshold: float = 0.0
    threshold_kind: str = "per_position"
    lag: int = 2
    min_verify_len: int = 0
    max_verify_len: int | None = None
    min_predicted_gain: float | None = None
    confidence_source: str = "head"
    probe_every: int = 0
    planner: str = "device"

    def __post_init__(self):
        choices = {
            "policy": tuple(sorted(POLICIES)),
            "threshold_kind": THRESHOLD_KINDS,
            "confidence_source": CONFIDENCE_SOURCES,
            "planner": PLANNERS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; expected one of {allowed}."
                )
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} must lie between 0 and 1."
            )
        for name, least in (("lag", 1), ("min_verify_len", 0), ("probe_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.max_verify_len is not None and self.max_verify_len < self.min_verify_len:
            raise ValueError(
                f"max_verify_len={self.max_verify_len} is below "
                f"min_verify_len={self.min_verify_len}; raise it, or None for all drafts."
            )

        if self.planner == "host":
            others = (self.min_predicted_gain, self.confidence_source, self.probe_every)
            if self.policy != "lagged" or others != (None, "head", 0):
                raise ValueError(
                    "planner='host' goes with policy='lagged' by the confidence head, without "
                    f"bypass and probes; got {self}. Use planner='device'."
                )

    @property
    def needs_sps(self) -> bool:
        """Does anything here read the SPS table?"""
        return self.policy in NEEDS_SPS or self.min_predicted_gain is not None

    def check_source(self) -> None:
        """Refuses to go by the confidence head of a draft that has none.

        Raises:
          ValueError: the policy or the bypass needs confidences from the head.
        """
        if self.confidence_source == "head" and (self.needs_sps or self.policy == "threshold"):
            raise ValueError(
                f"policy={self.policy!r} with min_predicted_gain={self.min_predicted_gain} needs "
                "confidences, but this draft has no confidence head; set "
                "confidence_source='online', or use the policy 'full'."
            )

    def check_paged(self) -> None:
        """Refuses to choose a round's rows on the device where the target's cache is paged.

        Raises:
          ValueError: the device chooses.
        """
        if self.planner != "host":
            raise ValueError(
                "a paged cache has its rows stored before attention, which a round that chooses "
                "its number of rows on the device could only do with a copy of the cache; set "
                "planner='host' with policy='lagged', or take a contiguous cache."
            )

    def check_lossless(self, rejection_sample_method: str) -> None:
        """Refuses a policy that would bias the output under this verification rule.

        Raises:
          ValueError: `global` by the confidence head, which reads this round's drafts, together
            with anything but `coupled`; or an unknown rule.
        """
        if rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            raise ValueError(
                f"rejection_sample_method={rejection_sample_method!r}; expected one of "
                f"{REJECTION_SAMPLE_METHODS}."
            )
        leaks = self.policy == "global" and self.confidence_source == "head"
        if leaks and rejection_sample_method != "coupled":
            raise ValueError(
                "policy='global' looks at confidences that depend on the drafts it decides on; "
                f"with rejection_sample_method={rejection_sample_method!r} the output "
                "distribution would change. Use 'coupled', or the policy 'presampled'."
            )


@flax.struct.dataclass
class Evidence:
    """What a policy decides by. Its confidences say how likely draft k survives if all before did.

    `steps_per_s[B]` is SPS by verified rows B; entry 0 is for a round that drafts nothing.
    """

    confidence: jax.Array  # f32[R, K], this round's; entry k reads drafts before k
    presampled: jax.Array  # f32[R, K], this round's, estimated before any draft was drawn
    lagged: jax.Array  # f32[R, K], of an earlier round; 1 where the request had none
    limit: jax.Array  # i32[R], most drafts that fit the request's length limits, 0..K
    active: jax.Array  # bool[R], the others get 0 and cost nothing
    steps_per_s: jax.Array  # f32[R*(K+1)+1]
    max_rows: jax.Array | None = None  # i32[], rows that can be verified; None: all


@flax.struct.dataclass
class Candidates:
    """All drafts, in the order they are admitted.

    First those below `min_verify_len`, which enter in any case; then by survival, descending. Ties
    go by position, then by request, which keeps prefixes closed and the order free of token
    values.
    """

    survival: jax.Array  # f32[R*K]
    enters: jax.Array  # bool[R*K], false behind the last draft that may enter
    request: jax.Array  # i32[R*K], which request each belongs to
    forced: jax.Array  # i32[], how many enter in any case
    requests: jax.Array  # i32[], active requests


def schedule_prefixes(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    """Chooses verify_len for every request.

    Args:
      evidence: what is known.
      config: the policy.

    Returns:
      verify_len i32[R], 0..limit.
    """
    return POLICIES[config.policy](_bounded(evidence, config), config)


def predicted_throughput(evidence: Evidence, verify_len: jax.Array) -> jax.Array:
    """Theta f32[], tokens per second that `verify_len` i32[R] promises by current confidences."""
    scheduled = jnp.arange(evidence.confidence.shape[1]) < verify_len[:, None]
    tau = evidence.active.sum() + (survival_of(evidence.confidence) * scheduled).sum()
    rows = evidence.active.sum() + verify_len.sum()
    return tau * evidence.steps_per_s[rows]


def predicted_gain(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    """What the policy's schedule promises over a round without drafts, by lagged confidences.

    Args:
      evidence: `confidence` and `presampled` are not looked at.
      config: the policy.

    Returns:
      f32[], 0.1 for 10 % more tokens per second.
    """
    older = evidence.replace(confidence=evidence.lagged, presampled=evidence.lagged)
    theta = predicted_throughput(older, schedule_prefixes(older, config))
    return theta / (evidence.active.sum() * evidence.steps_per_s[0]) - 1.0


def staircase(steps_per_s: jax.Array, buckets: tuple[int, ...]) -> jax.Array:
    """SPS as it is paid: a round of B rows costs what the bucket that holds them costs.

    Args:
      steps_per_s: f32[R*(K+1)+1].
      buckets: increasing numbers of rows.

    Returns:
      f32[R*(K+1)+1], constant between buckets; entry 0 as it was.
    """
    index = np.searchsorted(buckets, np.arange(steps_per_s.shape[0]))
    paid = np.array(buckets)[np.minimum(index, len(buckets) - 1)]
    return steps_per_s[np.where(np.arange(len(paid)) == 0, 0, paid)]


def survival_of(confidence: jax.Array) -> jax.Array:
    """a_{r,j}: f32[R, K], probability that draft j and all before it survive."""
    return jnp.cumprod(confidence, axis=-1)


def rank_candidates(
    confidence: jax.Array, limit: jax.Array, active: jax.Array, floor: jax.Array | int = 0
) -> Candidates:
    """Sorts the drafts.

    Args:
      confidence: f32[R, K].
      limit: i32[R], 0 where not active.
      active: bool[R].
      floor: i32[R] or one for all, drafts that enter in any case, as far as `limit` allows.

    Returns:
      The ranked drafts; those past `limit` have survival 0.
    """
    requests, block = confidence.shape
    position = jnp.arange(block)
    allowed = position < limit[:, None]
    forced = allowed & (position < jnp.broadcast_to(floor, requests)[:, None])
    survival = jnp.where(allowed, survival_of(confidence), 0.0)
    rank = jnp.where(forced, 2.0, survival)  # above every probability
    by_position = rank.T.reshape(-1)  # position first, then request
    order = jnp.argsort(-by_position, stable=True)
    return Candidates(
        survival=survival.T.reshape(-1)[order],
        enters=by_position[order] > 0,
        request=(order % requests).astype(jnp.int32),
        forced=forced.sum(),
        requests=active.sum(),
    )


def _bounded(evidence: Evidence, config: ScheduleConfig) -> Evidence:
    limit = evidence.limit
    if config.max_verify_len is not None:
        limit = jnp.minimum(limit, config.max_verify_len)
    return evidence.replace(limit=jnp.where(evidence.active, limit, 0))


def _rank(evidence: Evidence, confidence: jax.Array, config: ScheduleConfig) -> Candidates:
    return rank_candidates(confidence, evidence.limit, evidence.active, config.min_verify_len)


def _admit(candidates: Candidates, count: jax.Array, requests: int) -> jax.Array:
    """verify_len i32[R] when the first `count` ranked drafts enter."""
    admitted = (jnp.arange(candidates.request.shape[0]) < count) & candidates.enters
    return jnp.zeros(requests, jnp.int32).at[candidates.request].add(admitted)


def _speeds(candidates: Candidates, steps_per_s: jax.Array) -> jax.Array:
    """SPS after 0, 1, .. admitted drafts: f32[R*K + 1]."""
    rows = candidates.requests + jnp.arange(candidates.survival.shape[0] + 1)
    return steps_per_s[jnp.minimum(rows, steps_per_s.shape[0] - 1)]


def _throughput(candidates: Candidates, steps_per_s: jax.Array) -> jax.Array:
    """Theta after 0, 1, .. admitted drafts: f32[R*K + 1]."""
    gained = jnp.concatenate([jnp.zeros(1), jnp.cumsum(candidates.survival)])
    return (candidates.requests + gained) * _speeds(candidates, steps_per_s)


def _capacity(candidates: Candidates, steps_per_s: jax.Array) -> jax.Array:
    """Drafts to verify in all: where Theta is largest, and on to the end of that stair."""
    theta = _throughput(candidates, steps_per_s)
    count = jnp.arange(theta.shape[0])
    enters = jnp.concatenate([jnp.ones(1, bool), candidates.enters])
    best = jnp.argmax(jnp.where(enters & (count >= candidates.forced), theta, -jnp.inf))
    speeds = _speeds(candidates, steps_per_s)
    slower = (count > best) & (speeds < speeds[best])
    return jnp.where(slower.any(), jnp.argmax(slower) - 1, count[-1])


def _full(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    return evidence.limit


def _threshold(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    value = evidence.confidence
    if config.threshold_kind == "cumulative":
        value = survival_of(value)
    passed = jnp.cumprod(value >= config.confidence_threshold, axis=-1).sum(axis=-1)
    passed = jnp.maximum(passed, config.min_verify_len)
    return jnp.minimum(passed, evidence.limit).astype(jnp.int32)


def _early_stop(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    candidates = _rank(evidence, evidence.confidence, config)
    theta = _throughput(candidates, evidence.steps_per_s)
    better = (theta[1:] > theta[:-1]) & candidates.enters
    climbs = better | (jnp.arange(better.shape[0]) < candidates.forced)
    return _admit(candidates, jnp.cumprod(climbs).sum(), evidence.limit.shape[0])


def _top(evidence: Evidence, capacity_from: jax.Array, config: ScheduleConfig) -> jax.Array:
    """This round's likeliest drafts, as many as confidences [R, K] of another origin pay for."""
    capacity = _capacity(_rank(evidence, capacity_from, config), evidence.steps_per_s)
    candidates = _rank(evidence, evidence.confidence, config)
    if evidence.max_rows is not None:
        capacity = jnp.minimum(capacity, evidence.max_rows - candidates.requests)
    return _admit(candidates, capacity, evidence.limit.shape[0])


def _lagged(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    return _top(evidence, evidence.lagged, config)


def _presampled(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    return _top(evidence, evidence.presampled, config)


def _global(evidence: Evidence, config: ScheduleConfig) -> jax.Array:
    return _top(evidence, evidence.confidence, config)


POLICIES = {
    "full": _full,
    "threshold": _threshold,
    "early_stop": _early_stop,
    "lagged": _lagged,
    "presampled": _presampled,
    "global": _global,
}
NEEDS_SPS = ("early_stop", "lagged", "presampled", "global")  # policies that read the SPS table
