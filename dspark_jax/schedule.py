"""How many drafts of each request are verified this round.

Whether draft j of request r is admitted may depend on what existed before x_{r,j} was sampled,
never on x_{r,j} itself or anything drawn after it: then the output distribution cannot change.
Confidence c_{r,j} reads x_{r,<j} only, so ranking by survival is allowed; choosing the best of
all lengths from current confidences (`global`) is not, except where verification does not care.

Source: paper Algorithm 1, section 5.2 and Appendix A.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

REJECTION_SAMPLE_METHODS = ("standard", "coupled")
THRESHOLD_KINDS = ("per_position", "cumulative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Which policy decides, and its constants.

    Attributes:
      policy: a key of `POLICIES`.
      confidence_threshold: `threshold` stops before the first draft below it.
      threshold_kind: compare each position's confidence (DeepSpec) or the survival so far.
    """

    policy: str = "full"
    confidence_threshold: float = 0.0
    threshold_kind: str = "per_position"

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(
                f"policy={self.policy!r} is unknown; expected one of {sorted(POLICIES)}."
            )
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} must lie between 0 and 1."
            )
        if self.threshold_kind not in THRESHOLD_KINDS:
            raise ValueError(
                f"threshold_kind={self.threshold_kind!r}; expected one of {THRESHOLD_KINDS}."
            )

    def check_lossless(self, rejection_sample_method: str) -> None:
        """Refuses a policy that would bias the output under this verification rule.

        Raises:
          ValueError: `global` together with anything but `coupled`, or an unknown rule.
        """
        if rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            raise ValueError(
                f"rejection_sample_method={rejection_sample_method!r}; expected one of "
                f"{REJECTION_SAMPLE_METHODS}."
            )
        if self.policy == "global" and rejection_sample_method != "coupled":
            raise ValueError(
                "policy='global' looks at confidences that depend on the drafts it decides on; "
                f"with rejection_sample_method={rejection_sample_method!r} the output "
                "distribution would change. Use 'coupled', or the policy 'early_stop'."
            )


@flax.struct.dataclass
class Candidates:
    """All drafts that may be verified, ranked: survival descending, then position, then request.

    Position before request keeps prefixes closed and the order free of token values on ties.
    """

    survival: jax.Array  # f32[R*K], sorted; 0 marks drafts that may not enter
    request: jax.Array  # i32[R*K], which request each belongs to
    requests: jax.Array  # i32[], active requests


def schedule_prefixes(
    confidence: jax.Array,
    limit: jax.Array,
    active: jax.Array,
    steps_per_s: jax.Array,
    config: ScheduleConfig,
) -> jax.Array:
    """Chooses verify_len for every request.

    Args:
      confidence: f32[R, K], probability that draft k survives if its predecessors did.
      limit: i32[R], most drafts a request may verify (length limits), 0..K.
      active: bool[R], requests taking part; the others get 0 and cost nothing.
      steps_per_s: f32[R*(K+1)+1], SPS(B) by the number of verified rows B.
      config: the policy.

    Returns:
      verify_len i32[R], 0..limit.
    """
    limit = jnp.where(active, limit, 0)
    return POLICIES[config.policy](confidence, limit, active, steps_per_s, config)


def survival_of(confidence: jax.Array) -> jax.Array:
    """a_{r,j}: f32[R, K], probability that draft j and all before it survive."""
    return jnp.cumprod(confidence, axis=-1)


def rank_candidates(confidence: jax.Array, limit: jax.Array, active: jax.Array) -> Candidates:
    """Sorts the drafts by survival.

    Args:
      confidence: f32[R, K].
      limit: i32[R].
      active: bool[R].

    Returns:
      The ranked drafts; those past `limit` have survival 0.
    """
    requests, block = confidence.shape
    position = jnp.arange(block)
    survival = jnp.where(position < limit[:, None], survival_of(confidence), 0.0)
    by_position = survival.T.reshape(-1)  # position first, then request
    order = jnp.argsort(-by_position, stable=True)
    return Candidates(
        survival=by_position[order],
        request=(order % requests).astype(jnp.int32),
        requests=active.sum(),
    )


def _admit(candidates: Candidates, count: jax.Array, requests: int) -> jax.Array:
    """verify_len i32[R] when the first `count` ranked drafts enter."""
    admitted = jnp.arange(candidates.request.shape[0]) < count
    return jnp.zeros(requests, jnp.int32).at[candidates.request].add(admitted)


def _throughput(candidates: Candidates, steps_per_s: jax.Array) -> jax.Array:
    """Theta after 0, 1, .. admitted drafts: f32[R*K + 1]."""
    gained = jnp.concatenate([jnp.zeros(1), jnp.cumsum(candidates.survival)])
    rows = candidates.requests + jnp.arange(gained.shape[0])
    rows = jnp.minimum(rows, steps_per_s.shape[0] - 1)
    return (candidates.requests + gained) * steps_per_s[rows]


def _full(confidence, limit, active, steps_per_s, config):
    return limit


def _threshold(confidence, limit, active, steps_per_s, config):
    value = confidence if config.threshold_kind == "per_position" else survival_of(confidence)
    passed = jnp.cumprod(value >= config.confidence_threshold, axis=-1).sum(axis=-1)
    return jnp.minimum(passed, limit).astype(jnp.int32)


def _early_stop(confidence, limit, active, steps_per_s, config):
    candidates = rank_candidates(confidence, limit, active)
    theta = _throughput(candidates, steps_per_s)
    better = (theta[1:] > theta[:-1]) & (candidates.survival > 0)
    return _admit(candidates, jnp.cumprod(better).sum(), confidence.shape[0])


def _global(confidence, limit, active, steps_per_s, config):
    candidates = rank_candidates(confidence, limit, active)
    theta = _throughput(candidates, steps_per_s)
    enters = jnp.concatenate([jnp.ones(1, bool), candidates.survival > 0])
    count = jnp.argmax(jnp.where(enters, theta, -jnp.inf))
    return _admit(candidates, count, confidence.shape[0])


POLICIES = {
    "full": _full,
    "threshold": _threshold,
    "early_stop": _early_stop,
    "global": _global,
}
NEEDS_SPS = ("early_stop", "global")  # policies that read the SPS table
