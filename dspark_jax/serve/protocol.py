"""OpenAI's requests, responses and errors as data.

A parameter that would change the answer and is not supported is refused by name; one that could
not is accepted. Nothing is ignored silently that a caller would miss.
"""

import dataclasses
import json
import time
import uuid
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

MAX_STOP_STRINGS = 16

# Accepted and dropped: they are for the caller's own bookkeeping, or only hints.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Not supported: accepted only with a value that leaves the answer as it is. null always does.
NEUTRAL = {
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": (),
    "web_search_options": (),
}


class ApiError(Exception):
    """An answer in OpenAI's error shape.

    Args:
      message: for people.
      status: HTTP status.
      param: the request's field at fault.
      code: for programs.
      retry_after_s: seconds after which to try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON to send."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; none is ever sent


class _Generation(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> tuple[str, ...]:
        stop = [value] if isinstance(value, str) else value
        if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError("expected a non-empty string or a list of them")
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"got {len(stop)} strings, expected at most {MAX_STOP_STRINGS}")
        return tuple(stop)

    @field_validator("top_k")
    @classmethod
    def _off(cls, value: int) -> int:
        return 0 if value == -1 else value  # both spellings of "off" are in use

    @property
    def include_usage(self) -> bool:
        """Does the stream end with a chunk of token counts?"""
        return self.stream_options is not None and self.stream_options.include_usage


class Message(BaseModel):
    """One turn of a conversation; further fields reach the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return "" if value is None else value
        texts = [part.get("text") if isinstance(part, dict) else None for part in value]
        kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
        if set(kinds) - {"text"} or not all(isinstance(text, str) for text in texts):
            raise ValueError("this model reads text only; expected parts of type 'text'")
        return "".join(texts)

    def for_template(self) -> dict[str, Any]:
        """The message under the names chat templates know."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(), "role": role}


class ChatRequest(_Generation):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(_Generation):
    """Body of `/v1/completions`; `prompt` becomes a list of texts or of token-id lists."""

    prompt: list[str] | list[list[int]]

    @field_validator("prompt", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and value and _is_ids(value)):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError("expected a string, a list of token ids, or a list of either")
        if not (all(isinstance(v, str) for v in value) or all(_is_ids(v) for v in value)):
            raise ValueError("expected only strings or only lists of token ids")
        return value

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer."""
        return "max_tokens", self.max_tokens


Parsed = TypeVar("Parsed", ChatRequest, CompletionRequest)


def parse_body(kind: type[Parsed], body: bytes) -> Parsed:
    """Reads a request's body.

    Args:
      kind: `ChatRequest` or `CompletionRequest`.
      body: JSON.

    Returns:
      The checked request; ranges of numbers are the engine's to check.

    Raises:
      ApiError: 400, naming the field.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(f"the body is a JSON {type(value).__name__}; expected an object.")
    given = {k: v for k, v in value.items() if v is not None and k not in HARMLESS}
    for name in given.keys() & NEUTRAL.keys():
        if not any(_same(given[name], neutral) for neutral in NEUTRAL[name]):
            ways = ["leave it out", *(f"give {json.dumps(neutral)}" for neutral in NEUTRAL[name])]
            raise ApiError(
                f"{name}={_short(given[name])} is not supported; {' or '.join(ways)}.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        parsed = kind.model_validate({k: v for k, v in given.items() if k not in NEUTRAL})
    except ValidationError as error:
        raise _explain(error) from error
    if parsed.stream_options is not None and not parsed.stream:
        raise ApiError("stream_options is only for stream=true.", param="stream_options")
    if isinstance(parsed, ChatRequest) and None not in (limits := _limits(parsed)):
        if limits[0] != limits[1]:
            raise ApiError(
                f"max_tokens={limits[0]} contradicts max_completion_tokens={limits[1]}; give one.",
                param="max_tokens",
            )
    return parsed


@dataclasses.dataclass(frozen=True)
class Reply:
    """Builds the JSON of an answer, whole or in chunks.

    Attributes:
      chat: chat or plain completion.
      model: name to report.
    """

    chat: bool
    model: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(self, texts: list[str], reasons: list[str], usage: dict[str, int]) -> dict[str, Any]:
        """The answer to a request that does not stream; one choice per text."""
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            message = {"message": {"role": "assistant", "content": text}}
            choices.append(_choice(index, reason, message if self.chat else {"text": text}))
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        """First chunk of a chat choice: the role."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([_choice(index, None, {"delta": delta})])

    def piece(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A chunk of text, the last one with the reason why it ends."""
        delta = {"delta": {"content": text} if text else {}}
        return self._chunk([_choice(index, reason, delta if self.chat else {"text": text})])

    def closing(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk of token counts."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return {
            "id": prefix + self.id, "object": kind, "created": self.created, "model": self.model,
        }  # fmt: skip


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's token counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _choice(index: int, reason: str | None, content: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, **content, "finish_reason": reason, "logprobs": None}


def _limits(chat: ChatRequest) -> tuple[int | None, int | None]:
    return chat.max_tokens, chat.max_completion_tokens


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) for v in value
    )


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(error: ValidationError) -> ApiError:
    """All that is wrong in one message; `param` is the first field at fault."""
    found = error.errors(include_url=False)
    lines = []
    for item in found:
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{path} is not a parameter this server knows")
        elif item["type"] == "missing":
            lines.append(f"{path} is missing")
        else:
            reason = item["msg"].removeprefix("Value error, ")
            lines.append(f"{path}={_short(item['input'])}: {reason}")
    code = "unknown_parameter" if found[0]["type"] == "extra_forbidden" else None
    return ApiError("; ".join(lines[:5]) + ".", param=str(found[0]["loc"][0]), code=code)
