"""The same prompts, plainly and with the draft, in one process.

Both ways run batch by batch in turn, so that a slow spell of the machine hits both. Times are of
the rounds only (prefill is reported apart); the ratio is of tokens per second.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax

from dspark_jax import __version__
from dspark_jax.engine.core import Engine
from dspark_jax.engine.load import Pair
from dspark_jax.engine.profile import prepare_schedule
from dspark_jax.engine.requests import Request, Sequence
from dspark_jax.eval.timing import machine
from dspark_jax.schedule import ScheduleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is held equal between the two ways.

    Attributes:
      schedule: policy of the drafted way.
      rejection_sample_method: "standard", "block" or "coupled".
      sps_table: file the drafted way schedules by; None measures where the policy needs it.
      confidence_sts: file of temperatures for the draft's confidences; None leaves them.
      max_new_tokens: per prompt.
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      seed: prompt i uses seed + i.
      batch: requests at once.
      max_model_len: tokens per request; None fits the longest.
    """

    schedule: ScheduleConfig = ScheduleConfig()
    rejection_sample_method: str = "standard"
    sps_table: str | None = None
    confidence_sts: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch: int = 1
    max_model_len: int | None = None

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError(f"batch={self.batch} must be at least 1.")

    @property
    def comparable(self) -> bool:
        """Must both ways give the same tokens?"""
        return self.temperature == 0 or self.rejection_sample_method == "coupled"


@dataclasses.dataclass
class Side:
    """One of the two ways, and what it has produced."""

    engine: Engine
    sequences: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second of round time."""
        return self.engine.counters.generation_tokens / self.engine.counters.round_s

    @property
    def round_ms(self) -> float:
        """Mean milliseconds per round."""
        return 1e3 * self.engine.counters.round_s / self.engine.counters.rounds


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """First turns of a prompt file.

    Args:
      path: JSONL with `turns`, a list of user messages.
      limit: keep the first so many.

    Returns:
      User messages.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line is not JSON or has no turns.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompts file {path} not found; expected JSONL with `turns`.")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(json.loads(line)["turns"][0])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} is not a prompt ({error!r}); expected an object with `turns`, "
                "a list of user messages."
            ) from error
    return prompts[:limit]


def chat_requests(pair: Pair, prompts: list[str], options: Comparison) -> list[Request]:
    """Requests for user messages, leaving out those that do not fit the context.

    Args:
      pair: the models.
      prompts: user messages.
      options: sampling settings and limits.

    Returns:
      Requests in order.

    Raises:
      ValueError: none fits.
    """
    capacity = options.max_model_len or pair.target.config.max_position_embeddings
    requests = []
    for i, prompt in enumerate(prompts):
        ids = pair.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if len(ids) + options.max_new_tokens > capacity:
            continue
        requests.append(
            Request(
                prompt_ids=tuple(ids), max_tokens=options.max_new_tokens,
                temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
                min_p=options.min_p, seed=options.seed + i, stop_ids=pair.stop_ids,
            )
        )  # fmt: skip
    if not requests:
        raise ValueError(
            f"none of {len(prompts)} prompts fits: prompt and {options.max_new_tokens} new "
            f"tokens must fit {capacity}."
        )
    return requests


class Contest:
    """Two warm engines on the same models, one without the draft.

    Args:
      pair: the models.
      options: what is held equal.
      capacity: tokens per request.
      progress: told what is being compiled.
    """

    def __init__(
        self, pair: Pair, options: Comparison, capacity: int, progress: Callable[[str], None]
    ):
        self.pair, self.options = pair, options

        def side(plain: bool) -> Side:
            decoder = pair.decoder(
                options.schedule, options.rejection_sample_method, plain=plain
            )
            return Side(
                Engine(
                    decoder, pair.params, slots=options.batch, capacity=capacity,
                    dtype=pair.dtype, tokenizer=pair.tokenizer, progress=progress,
                    mesh=pair.mesh,
                )
            )  # fmt: skip

        self.plain, self.drafted = side(True), side(False)
        prepare_schedule(
            self.drafted.engine, pair, sps_table=options.sps_table,
            confidence_sts=options.confidence_sts, progress=progress,
        )  # fmt: skip

    def restart(self, options: Comparison) -> None:
        """Forgets what has been measured; the engines stay warm.

        Args:
          options: may differ in how tokens are drawn, not in policy, rule or batch.
        """
        self.options = options
        for side in (self.plain, self.drafted):
            side.sequences = []
            side.engine.reset_counters()

    def run(self, requests: list[Request], progress: Callable[[str], None]) -> None:
        """Runs the requests both ways, a batch at a time, taking turns at going first."""
        size = self.options.batch
        for turn, first in enumerate(range(0, len(requests), size)):
            batch = requests[first : first + size]
            order = (self.plain, self.drafted) if turn % 2 == 0 else (self.drafted, self.plain)
            for side in order:
                side.sequences += side.engine.run(batch)
            ratio = self.drafted.tokens_per_s / self.plain.tokens_per_s
            progress(f"{first + len(batch)}/{len(requests)} prompts: {ratio:.2f} times plain")

    def figures(self) -> dict:
        """What has been measured so far, ready for JSON.

        `tokens_equal` is null where the two ways are not meant to agree (sampling with the
        standard rule). `accept_per_position` is prefix survival: drafts accepted at a position
        by drafts verified there. The conditional form divides by the rounds in which all earlier
        drafts passed. `verify_rate` is tokens emitted by rows verified (DeepSpec's).
        `calibration_gap_per_position` is predicted less observed survival of the drafts verified.
        `probe_acceptance_length` is that of the rounds that verified every draft.
        """
        options, counters = self.options, self.drafted.engine.counters
        accepted = counters.num_accepted_tokens_per_pos
        verified = counters.num_draft_tokens_per_pos
        reached = [min(a, v) for a, v in zip([counters.num_drafts, *accepted], verified,
                                             strict=False)]  # fmt: skip
        pairs = zip(self.plain.sequences, self.drafted.sequences, strict=True)
        equal = all(a.token_ids == b.token_ids for a, b in pairs)
        drafted = counters.num_drafts > 0
        request_rounds = counters.num_drafts + counters.num_bypassed
        rows = counters.num_draft_tokens + request_rounds
        return {
            "model": self.pair.name,
            "policy": options.schedule.policy,
            "rejection_sample_method": options.rejection_sample_method,
            "temperature": options.temperature,
            "batch": options.batch,
            "max_new_tokens": options.max_new_tokens,
            "prompts": len(self.plain.sequences),
            "tokens_equal": equal if options.comparable else None,
            "tau": counters.generation_tokens / request_rounds if drafted else None,
            "acceptance_length": counters.acceptance_length if drafted else None,
            "verify_rate": counters.generation_tokens / rows if drafted else None,
            "accept_per_position": _ratios(accepted, verified),
            "accept_per_position_conditional": _ratios(accepted, reached),
            "num_drafts": counters.num_drafts,
            "num_draft_tokens": counters.num_draft_tokens,
            "num_accepted_tokens": counters.num_accepted_tokens,
            "num_bypassed": counters.num_bypassed,
            "scheduled_rows": counters.scheduled_rows,
            "verified_rows": counters.verified_rows,
            "wasted_rows": counters.wasted_rows,
            "calibration_gap_per_position": counters.calibration_gap_per_pos,
            "survival_error_per_position": counters.survival_error_mean_per_pos,
            "num_probes": counters.num_probes,
            "num_probe_draft_tokens": counters.num_probe_draft_tokens,
            "probe_acceptance_length": counters.probe_acceptance_length or None,
            "generated_tokens": counters.generation_tokens,
            "tokens_per_s": self.drafted.tokens_per_s,
            "plain_tokens_per_s": self.plain.tokens_per_s,
            "speedup": self.drafted.tokens_per_s / self.plain.tokens_per_s,
            "round_ms": self.drafted.round_ms,
            "plain_round_ms": self.plain.round_ms,
            "prefill_s": counters.prefill_s,
            "machine": machine(),
            "versions": {"dspark_jax": __version__, "jax": jax.__version__},
        }


def compare(
    pair: Pair, prompts: list[str], options: Comparison, progress: Callable[[str], None]
) -> dict:
    """Runs prompts both ways and returns the figures (see `Contest.figures`).

    Args:
      pair: the models.
      prompts: user messages.
      options: what is held equal.
      progress: told how far it is.

    Returns:
      The figures, with `prompts_skipped`, the number that did not fit.
    """
    requests = chat_requests(pair, prompts, options)
    longest = max(len(r.prompt_ids) for r in requests) + options.max_new_tokens
    contest = Contest(pair, options, options.max_model_len or longest, progress)
    contest.run(requests, progress)
    return contest.figures() | {"prompts_skipped": len(prompts) - len(requests)}


def percent(values: list[float | None]) -> str:
    """Shares as text, '-' where nothing was seen."""
    return " ".join("-" if v is None else f"{100 * v:.1f}%" for v in values) or "-"


def _ratios(parts: list[int], wholes: list[int]) -> list[float | None]:
    return [a / b if b else None for a, b in zip(parts, wholes, strict=True)]
