"""What an engine counts, in total and by position in the block."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dspark_jax.types import RoundOutput


@dataclasses.dataclass
class Counters:
    """Totals since the engine started, under the names vLLM users know where those exist.

    A row is one position the target computes: an anchor, a draft, or padding up to the bucket.
    Probes (rounds that verify every draft, whatever the policy says) count in all totals, and once
    more on their own, as a sample of what full verification would accept.
    """

    num_drafts: int  # request-rounds with a draft
    num_draft_tokens: int  # drafts verified
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    num_draft_tokens_per_pos: list[int]
    survival_per_pos: list[float]  # predicted survival, summed over the drafts verified
    survival_error_per_pos: list[float]  # |predicted survival - 1 if accepted, else 0|, summed
    num_probe_accepted_tokens_per_pos: list[int]
    num_probes: int = 0  # request-rounds in which every draft that fits was verified
    num_probe_draft_tokens: int = 0
    num_bypassed: int = 0  # request-rounds for which nothing was drafted
    scheduled_rows: int = 0  # anchors and drafts sent
    verified_rows: int = 0  # rows computed: the bucket
    wasted_rows: int = 0  # computed, but no token came of them
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rounds: int = 0  # programs run
    round_s: float = 0.0  # seconds spent in them
    prefill_s: float = 0.0
    finished: int = 0

    @classmethod
    def zero(cls, num_drafts: int) -> "Counters":
        """Counters for blocks of `num_drafts` drafts."""
        return cls(0, 0, 0, *([0] * num_drafts for _ in range(5)))

    @property
    def acceptance_length(self) -> float:
        """tau: mean tokens per request and round, the target's own included; 0 before any."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def probe_acceptance_length(self) -> float:
        """tau of the probes, which verified everything; 0 before any."""
        accepted = sum(self.num_probe_accepted_tokens_per_pos)
        return 1 + accepted / self.num_probes if self.num_probes else 0.0

    @property
    def calibration_gap_per_pos(self) -> list[float | None]:
        """Mean predicted survival less the share accepted, of the drafts verified there."""
        triples = zip(
            self.survival_per_pos, self.num_accepted_tokens_per_pos,
            self.num_draft_tokens_per_pos, strict=True,
        )  # fmt: skip
        return [(s - a) / n if n else None for s, a, n in triples]

    @property
    def survival_error_mean_per_pos(self) -> list[float | None]:
        """Mean distance of the predicted survival from what happened, of the drafts verified."""
        pairs = zip(self.survival_error_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [e / n if n else None for e, n in pairs]

    def count_round(self, outputs: Sequence[RoundOutput]) -> None:
        """Counts what concerns the round as a whole.

        Args:
          outputs: of every group of slots, on the host.
        """
        self.rounds += 1
        for output in outputs:
            self.verified_rows += int(output.verify_rows)
            self.wasted_rows += int(output.verify_rows) - int(output.emit_len.sum())

    def count_request(self, output: RoundOutput, slot: int, accepted: int, gained: int) -> None:
        """Counts one request's part of a round.

        Args:
          output: on the host.
          slot: the request's row in it.
          accepted: accepted drafts that became part of the text.
          gained: tokens the text gained.
        """
        sent, probe = int(output.verify_len[slot]), bool(output.probe)
        self.generation_tokens += gained
        self.scheduled_rows += 1 + sent
        if output.bypassed:
            self.num_bypassed += 1
            return
        if not self.num_draft_tokens_per_pos:  # plain decoding
            return
        self.num_drafts += 1
        self.num_draft_tokens += sent
        self.num_accepted_tokens += accepted
        self.num_probes += probe
        self.num_probe_draft_tokens += sent * probe
        survival = np.cumprod(output.confidence[slot])
        for k in range(sent):
            self.num_draft_tokens_per_pos[k] += 1
            self.num_accepted_tokens_per_pos[k] += k < accepted
            self.num_probe_accepted_tokens_per_pos[k] += probe and k < accepted
            passed = k < int(output.accept_len[slot])
            self.survival_per_pos[k] += float(survival[k])
            self.survival_error_per_pos[k] += abs(float(survival[k]) - passed)
