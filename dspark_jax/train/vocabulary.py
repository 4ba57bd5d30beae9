"""Which rows of the LM head the losses are computed over: all, a reduced set, or candidates."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from dspark_jax.sharding import constrain
from dspark_jax.train.loss import Vocabulary
from dspark_jax.types import SharedHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateConfig:
    """Sampled vocabulary of a step.

    Attributes:
      always: most frequent rows, in every step.
      total: C, rows of a step: those, the batch's labels, and a uniform sample of the rest whose
        logits are raised by the log of how many rows each stands for.
    """

    always: int
    total: int

    def __post_init__(self):
        if not 0 < self.always < self.total:
            raise ValueError(
                f"candidates need 0 < always < total; got always={self.always}, total={self.total}."
            )


def frequent_tokens(tokens: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """The most frequent token ids, ties by id, in descending frequency.

    Args:
      tokens: i32[..], the tokens to count.
      vocab_size: V.
      count: how many to return; unseen ones follow in id order.

    Returns:
      i32[count].

    Raises:
      ValueError: more are asked for than there are.
    """
    if not 0 < count <= vocab_size:
        raise ValueError(f"draft_vocab_size={count} must be between 1 and {vocab_size}.")
    counts = np.bincount(tokens.reshape(-1), minlength=vocab_size)
    return np.argsort(-counts, kind="stable")[:count].astype(np.int32)


def full_vocabulary(shared: SharedHead) -> Vocabulary:
    """Every row the draft can propose."""
    row_of = shared.draft_ids
    if row_of is None:
        row_of = jnp.arange(shared.head.shape[0], dtype=jnp.int32)
    return Vocabulary(head=shared.head, row_of=row_of)


class CandidateSampler:
    """Draws the candidate rows of one step on the host.

    Args:
      config: how many rows.
      row_counts: i64[Vd], how often each draft row occurs in the training answers.
      draft_ids: i32[V], target id -> draft row, Vd for none.
    """

    def __init__(self, config: CandidateConfig, row_counts: np.ndarray, draft_ids: np.ndarray):
        self._config, self._size = config, len(row_counts)
        self._always = np.argsort(-row_counts, kind="stable")[: config.always]
        self._draft_ids = draft_ids
        if config.total >= self._size:
            raise ValueError(
                f"candidates.total={config.total} is not smaller than the draft's vocabulary of "
                f"{self._size}; leave candidates out to use all of it."
            )

    def draw(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Rows of one step.

        Args:
          tokens: i32[..], tokens of the batch, all of which become candidates while they fit.
          rng: source of the sample.

        Returns:
          rows i32[C] (distinct draft rows) and log_weight f32[C].
        """
        fixed = np.zeros(self._size, bool)
        fixed[self._always] = True
        labels = np.unique(self._draft_ids[np.unique(tokens)])
        labels = labels[labels < self._size]
        labels = labels[~fixed[labels]][: self._config.total - len(self._always) - 1]
        fixed[labels] = True
        rest = np.flatnonzero(~fixed)
        count = self._config.total - int(fixed.sum())
        sample = rng.choice(rest, count, replace=False)
        rows = np.concatenate([np.flatnonzero(fixed), sample]).astype(np.int32)
        log_weight = np.zeros(len(rows), np.float32)
        log_weight[-count:] = np.log(len(rest) / count)
        return rows, log_weight


def candidate_vocabulary(
    shared: SharedHead, rows: jnp.ndarray, log_weight: jnp.ndarray
) -> Vocabulary:
    """The losses' vocabulary from drawn candidates; usable under jit.

    Args:
      shared: full or reduced head.
      rows: i32[C], draft rows.
      log_weight: f32[C].

    Returns:
      The `Vocabulary`.
    """
    size, count = shared.head.shape[0], rows.shape[0]
    index = jnp.full(size + 1, count, jnp.int32).at[rows].set(jnp.arange(count, dtype=jnp.int32))
    row_of = index[:size] if shared.draft_ids is None else index[shared.draft_ids]
    head = constrain(shared.head[rows], "vocab", None)
    return Vocabulary(head=head, row_of=row_of, log_weight=log_weight, rows=rows)
