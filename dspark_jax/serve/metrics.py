"""Prometheus metrics under the names vLLM's dashboards know."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from dspark_jax.engine.counters import Counters

LABEL = "model_name"
FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
LATENCY_BUCKETS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
REASONS = ("stop", "length", "abort")  # vLLM's words; "abort" is a cancelled request

# Metric name after "vllm:", field of `Counters`, help. Dividing rates of these by one another
# gives live figures: wasted by verified rows, accepted by probed drafts, and so on.
TOTALS = (
    ("spec_decode_num_drafts", "num_drafts", "Request-rounds with a draft."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Draft tokens verified."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Draft tokens accepted."),
    ("spec_decode_num_bypassed", "num_bypassed", "Request-rounds for which nothing was drafted."),
    ("spec_decode_num_probes", "num_probes", "Request-rounds that verified every draft."),
    ("spec_decode_scheduled_rows", "scheduled_rows", "Anchors and drafts sent to the target."),
    ("spec_decode_verified_rows", "verified_rows", "Rows the target computed, padding included."),
    ("spec_decode_wasted_rows", "wasted_rows", "Rows computed that no token came of."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
)


TOTALS_PER_POS = (
    (
        "spec_decode_num_accepted_tokens_per_pos", "num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the block.",
    ),
    (
        "spec_decode_num_draft_tokens_per_pos", "num_draft_tokens_per_pos",
        "Draft tokens verified, by position in the block.",
    ),
    (
        "spec_decode_num_probe_accepted_tokens_per_pos", "num_probe_accepted_tokens_per_pos",
        "Draft tokens accepted in rounds that verified every draft, by position in the block.",
    ),
    (
        "spec_decode_survival_per_pos", "survival_per_pos",
        "Predicted survival of the draft tokens verified, summed. Less the accepted ones, it is "
        "what calibration is off by.",
    ),
    (
        "spec_decode_survival_error_per_pos", "survival_error_per_pos",
        "Distance of predicted survival from acceptance, summed over the draft tokens verified.",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The engine between two steps, safe to read from any thread."""

    counters: "Counters"
    running: int
    waiting: int


class Metrics:
    """A registry of its own, filled from snapshots and from finished requests."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self._model_name: str | None = None
        self._snapshot: Snapshot | None = None
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Arrival of a request to its first token.",
            [LABEL],
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self._latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Arrival of a request to its last token.",
            [LABEL],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._finished = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [LABEL, "finished_reason"],
            registry=self._registry,
        )
        self._registry.register(self)

    def start(self, model_name: str) -> None:
        """Makes every series exist at zero; before this there is none."""
        self._model_name = model_name
        self._first_token.labels(model_name)
        self._latency.labels(model_name)
        for reason in REASONS:
            self._finished.labels(model_name, reason)

    def publish(self, snapshot: Snapshot) -> None:
        """Replaces what `collect` shows."""
        self._snapshot = snapshot

    def first_token(self, seconds: float) -> None:
        """A request got its first token so long after its arrival."""
        self._first_token.labels(self._model_name).observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """A request ended; `reason` is one of `REASONS`."""
        self._finished.labels(self._model_name, reason).inc()
        self._latency.labels(self._model_name).observe(seconds)

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry: the engine's totals and gauges."""
        snapshot, name = self._snapshot, self._model_name
        if snapshot is None or name is None:
            return
        for metric, field, text in TOTALS:
            family = CounterMetricFamily(f"vllm:{metric}", text, labels=[LABEL])
            family.add_metric([name], getattr(snapshot.counters, field))
            yield family
        for metric, field, text in TOTALS_PER_POS:
            family = CounterMetricFamily(f"vllm:{metric}", text, labels=[LABEL, "position"])
            for position, total in enumerate(getattr(snapshot.counters, field)):
                family.add_metric([name, str(position)], total)
            yield family
        gauges = (
            ("num_requests_running", snapshot.running, "Requests in a slot."),
            ("num_requests_waiting", snapshot.waiting, "Requests without a slot."),
        )
        for metric, value, text in gauges:
            family = GaugeMetricFamily(f"vllm:{metric}", text, labels=[LABEL])
            family.add_metric([name], value)
            yield family
