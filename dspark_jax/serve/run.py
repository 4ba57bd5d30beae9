"""Runs the HTTP server and the engine's thread until one of them ends.

The socket answers before anything slow is imported: first the front door alone, then the whole
application, then the engine.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from dspark_jax.serve.driver import Driver, Load, Served

USER_ERRORS = (ValueError, OSError)  # told in one line; anything else is a bug and shows its trace
SHUTDOWN_S = 4  # for connections to finish; what runs in the engine is cancelled before
JOIN_S = 1.0  # for the engine's thread, which may be in the middle of compiling


def run_server(listener: socket.socket, load: "Load", *, max_waiting: int) -> int:
    """Serves until a signal arrives or loading fails.

    Args:
      listener: a listening socket; closed at the end.
      load: makes the warm engine, in the engine's thread.
      max_waiting: requests that may wait for a slot.

    Returns:
      The exit code: 0 after SIGINT or SIGTERM, 2 for what the user can mend, 1 otherwise. Does not
      return but ends the process while the engine's thread cannot be joined.
    """

    def make() -> "tuple[Driver, Callable]":
        from dspark_jax.serve.driver import Driver
        from dspark_jax.serve.http import create_app
        from dspark_jax.serve.metrics import Metrics

        metrics = Metrics()
        driver = Driver(load, metrics, max_waiting=max_waiting, tell=_tell)
        return driver, create_app(driver, metrics)

    url = _url(listener)
    server = _Server(make, url)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, server.request_stop)
    _tell(f"listening on {url}; /health tells when the model is ready")
    server.run(sockets=[listener])
    joined = True
    if server.driver is not None:
        server.driver.stop()
        joined = server.driver.join(JOIN_S)
    code = _report(server.error)
    if not joined:  # an interpreter cannot end while a thread compiles
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class _FrontDoor:
    """An ASGI application that says "starting" until there is another to pass requests to."""

    def __init__(self):
        self.inner: Callable | None = None

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if self.inner is not None:
            await self.inner(scope, receive, send)
            return
        detail = "loading the server"
        if scope["path"] == "/health":
            body = {"status": "starting", "detail": detail}
        else:
            message = f"the server is starting: {detail}"
            error = {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
            body = {"error": error}
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class _Server(uvicorn.Server):
    """Brings everything up once the socket answers, and stops the engine before the connections."""

    def __init__(self, make: "Callable[[], tuple[Driver, Callable]]", url: str):
        self._door = _FrontDoor()
        super().__init__(
            uvicorn.Config(
                self._door,
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._make, self._url = make, url
        self._coming_up: asyncio.Task | None = None
        self.driver: Driver | None = None
        self.error: BaseException | None = None

    def request_stop(self, *_: object) -> None:
        """Handles a signal that arrives when uvicorn does not listen to it."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also starts to bring up the rest."""
        await super().startup(sockets)
        self._coming_up = asyncio.create_task(self._bring_up())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also stops the engine."""
        if self.driver is not None:
            self.driver.stop()
        await super().shutdown(sockets)

    async def _bring_up(self) -> None:
        try:
            self.driver, self._door.inner = await asyncio.to_thread(self._make)
        except Exception as error:  # reported when the server has ended
            self._fail(error)
        else:
            self.driver.start(asyncio.get_running_loop(), self._changed)

    def _changed(self) -> None:
        if self.driver.error is not None:
            self._fail(self.driver.error)
        else:
            _tell(_welcome(self._url, self.driver.served))

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.should_exit = True


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _welcome(url: str, served: "Served") -> str:
    return (
        f"ready: {served.name} on {url}, {served.engine.slots} slots of {served.capacity} tokens\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d "
        "'{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'"
    )


def _report(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, ModuleNotFoundError):
        _tell(f"error: {error.name} is not installed; pip install 'dspark-jax[serve]'.")
        return 2
    if isinstance(error, USER_ERRORS):
        _tell(f"error: {error}")
        return 2
    traceback.print_exception(error)
    return 1
