"""The HTTP routes: OpenAI's interface, `/health` and `/metrics`."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from dspark_jax.engine.requests import PromptTooLongError, Request, RequestError
from dspark_jax.serve.driver import (
    Cancelled,
    Driver,
    NotReady,
    QueueFull,
    Served,
    Status,
    Ticket,
)
from dspark_jax.serve.metrics import Metrics
from dspark_jax.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Reply,
    parse_body,
    usage_of,
)

RETRY_AFTER_S = 5
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for plain completions


def create_app(driver: Driver, metrics: Metrics) -> FastAPI:
    """Builds the application.

    Args:
      driver: runs the engine; may still be loading, or not yet started.
      metrics: what `/metrics` shows.

    Returns:
      The ASGI application.
    """
    app = FastAPI(title="dspark_jax", docs_url=None, redoc_url=None, openapi_url=None)
    api = _Api(driver, metrics)
    app.get("/health")(api.health)
    app.get("/metrics")(api.metrics)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.model)
    app.post("/v1/completions")(api.completions)
    app.post("/v1/chat/completions")(api.chat)
    app.exception_handler(ApiError)(_send_api_error)
    app.exception_handler(ClientDisconnect)(_send_nothing)
    app.exception_handler(HTTPException)(_send_http_exception)
    app.exception_handler(Exception)(_send_unexpected)
    return app


class _Api:
    def __init__(self, driver: Driver, metrics: Metrics):
        self._driver, self._metrics = driver, metrics
        self._created = int(time.time())
        self._watchers: set[asyncio.Task] = set()  # the loop itself keeps weak references only

    async def health(self) -> Response:
        """200 when ready, 503 before and after."""
        status = self._driver.status
        return JSONResponse(
            {"status": status.value, "detail": self._driver.detail},
            status_code=200 if status is Status.READY else 503,
        )

    async def metrics(self) -> Response:
        """Prometheus' text format."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [self._model_card(self._ready())]})

    async def model(self, name: str) -> Response:
        """The same by name."""
        served = self._ready()
        _check_name(name, served)
        return JSONResponse(self._model_card(served))

    async def chat(self, http: HttpRequest) -> Response:
        """`/v1/chat/completions`."""
        served = self._ready()
        body = parse_body(ChatRequest, await http.body())
        _check_name(body.model, served)
        prompt = await asyncio.to_thread(_encode_chat, served, body)
        requests = [_to_request(body, prompt, served, default_tokens=served.capacity)]
        return await self._answer(http, body, requests, served)

    async def completions(self, http: HttpRequest) -> Response:
        """`/v1/completions`."""
        served = self._ready()
        body = parse_body(CompletionRequest, await http.body())
        _check_name(body.model, served)
        most = served.engine.slots + self._driver.max_waiting
        if len(body.prompt) > most:
            raise ApiError(
                f"prompt holds {len(body.prompt)} prompts; expected at most {most} at once.",
                param="prompt",
            )
        prompts = body.prompt
        if isinstance(prompts[0], str):
            prompts = await asyncio.to_thread(
                lambda: [served.tokenizer.encode(text, special=True) for text in body.prompt]
            )
        requests = [
            _to_request(body, prompt, served, default_tokens=DEFAULT_COMPLETION_TOKENS)
            for prompt in prompts
        ]
        return await self._answer(http, body, requests, served)

    async def _answer(
        self,
        http: HttpRequest,
        body: ChatRequest | CompletionRequest,
        requests: list[Request],
        served: Served,
    ) -> Response:
        ticket = self._submit(body, requests)
        watcher = asyncio.create_task(_cancel_when_gone(http, ticket))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        reply = Reply(chat=isinstance(body, ChatRequest), model=served.name)
        if body.stream:
            events = _stream(ticket, reply, include_usage=body.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        texts, reasons = [""] * len(requests), [""] * len(requests)
        try:
            async for index, emission in ticket:
                texts[index] += emission.text
                if emission.finish_reason is not None:
                    reasons[index] = emission.finish_reason.value
        except Cancelled as error:
            raise ApiError(str(error), status=503, code="cancelled") from error
        usage = usage_of(ticket.prompt_tokens, ticket.completion_tokens)
        return JSONResponse(reply.whole(texts, reasons, usage))

    def _submit(self, body: ChatRequest | CompletionRequest, requests: list[Request]) -> Ticket:
        try:
            return self._driver.submit(requests)
        except RequestError as error:
            raise _name_field(error, body) from error
        except QueueFull as error:
            raise ApiError(
                str(error), status=429, code="queue_full", retry_after_s=RETRY_AFTER_S
            ) from error
        except NotReady as error:
            raise _not_ready(str(error)) from error

    def _ready(self) -> Served:
        driver = self._driver
        if driver.status is not Status.READY:
            raise _not_ready(f"the server is {driver.status}: {driver.detail}")
        return driver.served

    def _model_card(self, served: Served) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dspark_jax",
            "max_model_len": served.capacity,
        }


async def _stream(ticket: Ticket, reply: Reply, *, include_usage: bool) -> AsyncIterator[str]:
    if reply.chat:
        yield _event(reply.opening(0))
    try:
        async for index, emission in ticket:
            reason = emission.finish_reason
            if emission.text or reason is not None:
                yield _event(reply.piece(index, emission.text, reason and reason.value))
        if include_usage:
            usage = usage_of(ticket.prompt_tokens, ticket.completion_tokens)
            yield _event(reply.closing(usage))
    except Cancelled as error:
        yield _event(ApiError(str(error), status=503, code="cancelled").body())
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _cancel_when_gone(http: HttpRequest, ticket: Ticket) -> None:
    """Ends with the connection or the response, whichever is first; the latter cancels nothing."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    ticket.cancel()


def _encode_chat(served: Served, body: ChatRequest) -> list[int]:
    if not served.tokenizer.has_chat_template:
        raise ApiError("this model has no chat template; use /v1/completions.", param="messages")
    try:
        return served.tokenizer.encode_chat([m.for_template() for m in body.messages])
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ApiError(f"messages do not fit this model: {error}", param="messages") from error


def _to_request(
    body: ChatRequest | CompletionRequest, prompt: list[int], served: Served, *, default_tokens: int
) -> Request:
    _, tokens = body.limit
    if tokens is None:
        tokens = max(min(default_tokens, served.capacity - len(prompt)), 1)
    try:
        return Request(
            prompt_ids=tuple(prompt),
            max_tokens=tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            stop=body.stop,
            stop_ids=served.stop_ids,
            ignore_eos=body.ignore_eos,
        )
    except RequestError as error:
        raise _name_field(error, body) from error


def _name_field(error: RequestError, body: ChatRequest | CompletionRequest) -> ApiError:
    """The engine's complaint under the name the caller used."""
    prompt = "messages" if isinstance(body, ChatRequest) else "prompt"
    limit, _ = body.limit
    names = {"prompt_ids": prompt, "prompt": prompt, "max_tokens": limit}
    param = names.get(error.field, error.field)
    message = param + str(error).removeprefix(error.field).replace("max_tokens", limit)
    too_long = isinstance(error, PromptTooLongError)
    code = "context_length_exceeded" if too_long else "invalid_value"
    return ApiError(message, param=param, code=code)


def _check_name(name: str | None, served: Served) -> None:
    if name is not None and name != served.name:
        raise ApiError(
            f"the model {name!r} does not exist; this server has {served.name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _not_ready(message: str) -> ApiError:
    return ApiError(message, status=503, code="not_ready", retry_after_s=RETRY_AFTER_S)


async def _send_api_error(http: HttpRequest, error: ApiError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _send_nothing(http: HttpRequest, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client left in the middle of its request


async def _send_http_exception(http: HttpRequest, error: HTTPException) -> Response:
    shaped = ApiError(f"{http.method} {http.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(shaped.body(), status_code=error.status_code, headers=error.headers)


async def _send_unexpected(http: HttpRequest, error: Exception) -> Response:
    shaped = ApiError(f"internal error: {type(error).__name__}", status=500, code="internal_error")
    return JSONResponse(shaped.body(), status_code=500)
