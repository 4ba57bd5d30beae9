"""What a caller asks for, and how far it has come."""

import dataclasses
import enum
import itertools
import time

from dspark_jax.tokenizer import TextStream, Tokenizer

SEED_LIMIT = 2**64


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words where they have one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One generation: token ids in, settings, limits.

    Attributes:
      prompt_ids: at least one token.
      max_tokens: tokens to generate at most.
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      seed: with `coupled` verification the text is a function of prompt and seed.
      stop: strings that end the text; not included in it.
      stop_ids: tokens that end it.
      ignore_eos: do not stop at `stop_ids`.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        limits = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is off)"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "min_p": (0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            "seed": (0 <= self.seed < SEED_LIMIT, f"between 0 and {SEED_LIMIT - 1}"),
            "prompt_ids": (len(self.prompt_ids) >= 1, "at least one token"),
        }
        for field, (fine, expected) in limits.items():
            if not fine:
                raise RequestError(field, getattr(self, field), expected)

    @property
    def seed32(self) -> int:
        """The seed folded to 32 bits."""
        return (self.seed ^ (self.seed >> 32)) & 0xFFFFFFFF


class RequestError(ValueError):
    """A request that cannot be served; `field` names what is wrong with it."""

    def __init__(self, field: str, got: object, expected: str):
        super().__init__(f"{field}={got!r} is not valid; expected {expected}.")
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt alone fills a slot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emission:
    """What a request gained in one engine step."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


class Sequence:
    """A request in flight: its tokens and text, one `commit` per token.

    Args:
      request: what was asked.
      tokenizer: None keeps no text (stop strings are then refused).
      arrival_s: time of submission, `time.monotonic`.
    """

    _ids = itertools.count(1)

    def __init__(self, request: Request, tokenizer: Tokenizer | None, arrival_s: float):
        if request.stop and tokenizer is None:
            raise RequestError("stop", request.stop, "none, as there is no tokenizer")
        self.id = next(self._ids)
        self.request = request
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.prefilled = 0  # prompt rows in the cache
        self.rounds = 0
        self.drafted = 0  # drafts verified
        self.accepted = 0
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._held = ""  # decoded, but may yet turn out to begin a stop string
        self._unsent_text = ""
        self._unsent_ids: list[int] = []

    def commit(self, token: int) -> None:
        """Takes one token; tokens after the end are ignored."""
        if self.finish_reason is not None:
            return
        request = self.request
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.token_ids.append(token)
        self._unsent_ids.append(token)
        stops = token in request.stop_ids and not request.ignore_eos
        if self._stream is not None and not stops:
            self._add_text(self._stream.push(token))
        if self.finish_reason is not None:
            return
        if stops:
            self._finish(FinishReason.STOP)
        elif len(self.token_ids) >= request.max_tokens:
            self._finish(FinishReason.LENGTH)

    def cancel(self) -> None:
        """Ends the request where it is."""
        if self.finish_reason is None:
            self._finish(FinishReason.CANCELLED)

    def take_emission(self) -> Emission:
        """What is new since the last call."""
        emission = Emission(
            request_id=self.id,
            token_ids=tuple(self._unsent_ids),
            text=self._unsent_text,
            finish_reason=self.finish_reason,
        )
        self._unsent_ids, self._unsent_text = [], ""
        return emission

    def _add_text(self, piece: str) -> None:
        if not piece:
            return
        held = self._held + piece
        found = [(at, s) for s in self.request.stop if (at := held.find(s)) >= 0]
        if found:
            self._emit_text(held[: min(found)[0]])
            self._held = ""
            self.finish_reason = FinishReason.STOP
            return
        keep = max((_overlap(held, s) for s in self.request.stop), default=0)
        self._emit_text(held[: len(held) - keep])
        self._held = held[len(held) - keep :]

    def _finish(self, reason: FinishReason) -> None:
        if self._stream is not None:
            self._add_text(self._stream.flush())
        self._emit_text(self._held)
        self._held = ""
        self.finish_reason = self.finish_reason or reason

    def _emit_text(self, text: str) -> None:
        self.text += text
        self._unsent_text += text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
