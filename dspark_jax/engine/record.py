"""An engine that keeps what every round said about its drafts, for calibration and replay."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from dspark_jax.calibrate import Traces, logits_of
from dspark_jax.engine.core import Engine
from dspark_jax.engine.requests import Request, Sequence
from dspark_jax.types import RoundOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Round:
    sequence: Sequence
    confidence: np.ndarray  # f32[K]
    presampled: np.ndarray  # f32[K]
    accept_len: int
    verify_len: int


class RecordingEngine(Engine):
    """Decodes as `Engine` does; `record` returns the rounds. Arguments as for `Engine`.

    Attributes:
      recorded: the sequences of the last `record`, by prompt.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.recorded: list[Sequence] = []
        self._rounds: list[_Round] = []
        self.on_round = self._keep

    def record(
        self,
        requests: Iterable[Request],
        source: dict[str, str],
        progress: Callable[[str], None] = lambda message: None,
    ) -> Traces:
        """Runs requests to their end and returns their rounds.

        Args:
          requests: what to generate; the i-th is prompt i.
          source: what makes the traces, to be kept with them.
          progress: told how many requests have ended.

        Returns:
          One row per request and round.

        Raises:
          ValueError: the policy trims blocks, so that acceptance past the cut is unknown, or there
            is no draft with a confidence head.
        """
        schedule = self.decoder.schedule
        if self.decoder.draft is None or (schedule.policy != "full" and schedule.probe_every != 1):
            raise ValueError(
                "rounds are recorded with a draft, and with the policy 'full' or probe_every=1, "
                f"not with {schedule}: what is not verified cannot be judged."
            )
        head = self.decoder.draft.config.enable_confidence_head
        if not head or schedule.confidence_source != "head":
            raise ValueError(
                "confidences are recorded of a draft with a confidence head, and with "
                f"confidence_source='head'; this draft has {'one' if head else 'none'}, and "
                f"confidence_source={schedule.confidence_source!r}."
            )
        self._rounds = []
        sequences = self.recorded = [self.submit(request) for request in requests]
        done = 0
        while self.has_work:
            ended = sum(emission.finish_reason is not None for emission in self.step())
            done += ended
            if ended:
                progress(f"{done}/{len(sequences)} prompts decoded")
        order = {id(sequence): i for i, sequence in enumerate(sequences)}
        rounds = sorted(self._rounds, key=lambda one: order[id(one.sequence)])
        self._rounds = []
        early = None
        if schedule.policy == "presampled":
            early = logits_of(np.stack([one.presampled for one in rounds]))
            early = early * self.sts_temperatures_presampled
        return Traces(
            confidence_logits=logits_of(np.stack([one.confidence for one in rounds]))
            * self.sts_temperatures,
            presampled_logits=early,
            accept_len=np.array([one.accept_len for one in rounds], np.int32),
            verify_len=np.array([one.verify_len for one in rounds], np.int32),
            prompt=np.array([order[id(one.sequence)] for one in rounds], np.int32),
            source=source,
        )

    def _keep(self, sequence: Sequence, output: RoundOutput, row: int) -> None:
        self._rounds.append(
            _Round(
                sequence=sequence,
                confidence=output.confidence[row].copy(),
                presampled=output.presampled[row].copy(),
                accept_len=int(output.accept_len[row]),
                verify_len=int(output.verify_len[row]),
            )
        )
