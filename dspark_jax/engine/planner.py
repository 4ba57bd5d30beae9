"""The host's choice of a round's rows, from confidences it has already seen.

The policy `lagged` takes how many drafts to verify from the confidences of an older round. The
host has those before the last round is over: it chooses the program, and with lag - 1 rounds on
their way the device never waits for it. Inside, the device gives the rows to the likeliest drafts.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from dspark_jax.schedule import ScheduleConfig
from dspark_jax.types import RoundOutput


class RowPlanner:
    """Remembers the newest confidences that have arrived, by slot.

    Args:
      schedule: its bounds.
      slots: S.
      num_drafts: K.
    """

    def __init__(self, schedule: ScheduleConfig, slots: int, num_drafts: int):
        self._schedule, self._num_drafts = schedule, num_drafts
        self._seen: list[np.ndarray | None] = [None] * slots

    def admit(self, slot: int) -> None:
        """A new request holds the slot: nothing is known of it."""
        self._seen[slot] = None

    def observe(self, slot: int, output: RoundOutput, row: int) -> None:
        """Takes what a round said about a slot.

        Args:
          slot: whose.
          output: of the slot's group, on the host.
          row: of the slot in it.
        """
        self._seen[slot] = np.array(output.confidence[row], np.float64)

    def plan(
        self,
        slots: Iterable[int],
        steps_per_s: np.ndarray,
        buckets: Sequence[int],
        neutral: np.ndarray,
    ) -> int:
        """The rows of the next round.

        Args:
          slots: of the active requests.
          steps_per_s: f[R*(K+1)+1], by verified rows.
          buckets: increasing numbers of rows there are programs for.
          neutral: f[K], confidences of requests that have not drafted.

        Returns:
          One of `buckets`: where expected tokens per second are highest.
        """
        least = self._schedule.min_verify_len
        most = self._schedule.max_verify_len
        most = self._num_drafts if most is None else min(most, self._num_drafts)
        seen = (self._seen[slot] for slot in slots)
        survival = [np.cumprod(neutral if c is None else c)[:most] for c in seen]
        forced = sum(min(least, most) for _ in survival)
        ranked = np.sort(np.concatenate([s[least:] for s in survival]))[::-1]
        first = sum(float(s[:least].sum()) for s in survival)
        requests = len(survival)
        tokens = requests + first + np.concatenate([[0.0], np.cumsum(ranked)])
        rows = requests + forced + np.arange(len(tokens))
        at = np.searchsorted(buckets, rows)
        paid = np.asarray(buckets)[np.minimum(at, len(buckets) - 1)]
        best = int(np.argmax(np.where(at < len(buckets), tokens * steps_per_s[paid], -np.inf)))
        return int(paid[best])
