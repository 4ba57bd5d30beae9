"""The thread that owns the engine, and the way in and out of it for an event loop.

Only that thread touches the engine. The event loop hands it calls through an inbox and gets
emissions back through one queue per ticket.
"""

import asyncio
import contextlib
import copy
import dataclasses
import enum
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from dspark_jax.engine.requests import Emission, FinishReason, Request, Sequence
from dspark_jax.serve.metrics import Metrics, Snapshot

if TYPE_CHECKING:  # importing these takes longer than a server may take to answer
    from dspark_jax.engine.core import Engine
    from dspark_jax.tokenizer import Tokenizer

IDLE_S = 1.0  # between signs of life of an engine without work
GRACE_S = 2.0  # running requests may go on so long after `stop`


class Status(enum.StrEnum):
    """What the server tells about itself."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


class NotReady(Exception):
    """The engine does not take requests yet, or not any more."""


class QueueFull(Exception):
    """As many requests wait as may."""


class Cancelled(Exception):
    """A request ended before its time."""


class _Stopped(Exception):
    """Ends loading early."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A warm engine and what callers need to know about it."""

    name: str
    engine: "Engine"
    tokenizer: "Tokenizer"
    stop_ids: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """Tokens of prompt and answer together."""
        return self.engine.capacity


Load = Callable[[Callable[[str], None]], Served]


class Ticket:
    """Requests submitted together; iterate to receive (index, emission) until all have ended."""

    def __init__(self, driver: "Driver", requests: tuple[Request, ...]):
        self.requests = requests
        self.arrival_s = time.monotonic()
        self.completion_tokens = 0  # received so far
        self._driver = driver
        self._queue: asyncio.Queue[tuple[int, Emission]] = asyncio.Queue()
        self._unfinished = len(requests)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together."""
        return sum(len(request.prompt_ids) for request in self.requests)

    def cancel(self) -> None:
        """Ends what has not ended; whoever iterates gets `Cancelled`. Harmless when all have."""
        self._driver.cancel(self)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Emission]]:
        while self._unfinished:
            index, emission = await self._queue.get()
            if emission.finish_reason is FinishReason.CANCELLED:
                raise Cancelled("the request was cancelled, as the server is stopping.")
            self._unfinished -= emission.finish_reason is not None
            self.completion_tokens += len(emission.token_ids)
            yield index, emission

    def put(self, index: int, emission: Emission) -> None:
        """Called by the driver, on the event loop."""
        self._queue.put_nowait((index, emission))


@dataclasses.dataclass
class _Entry:
    """A sequence inside the engine."""

    ticket: Ticket
    index: int
    sequence: Sequence
    started: bool = False


class Driver:
    """Loads an engine and runs it in a thread. Methods are for the event loop's thread.

    Args:
      load: called in the thread, with a function that takes lines of progress; returns a warm
        engine. What it imports does not delay the caller.
      metrics: told of everything that happens.
      max_waiting: requests that may wait for a slot.
      tell: shown the lines of progress, too; `detail` holds the latest.
    """

    def __init__(
        self,
        load: Load,
        metrics: Metrics,
        *,
        max_waiting: int,
        tell: Callable[[str], None] = lambda message: None,
    ):
        self.served: Served | None = None
        self.error: BaseException | None = None
        self.detail = "loading"
        self.max_waiting = max_waiting
        self._load, self._metrics, self._tell = load, metrics, tell
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._entries: dict[int, _Entry] = {}  # engine thread only
        self._outstanding = 0  # event loop only: submitted and not yet ended
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_change: Callable[[], None] = lambda: None

    @property
    def status(self) -> Status:
        """Where the server stands."""
        if self._stopping.is_set() or self.error is not None:
            return Status.STOPPING
        return Status.STARTING if self.served is None else Status.READY

    def start(
        self, loop: asyncio.AbstractEventLoop, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Starts loading.

        Args:
          loop: where tickets are read.
          on_change: called on the loop when the engine is ready, and when the thread has failed
            (`error` is set then).
        """
        self._loop, self._on_change = loop, on_change
        self._thread.start()

    def submit(self, requests: list[Request]) -> Ticket:
        """Queues requests, all or none.

        Args:
          requests: at least one.

        Returns:
          The ticket to iterate over.

        Raises:
          NotReady: still loading, or stopping.
          QueueFull: too many wait.
          RequestError: the engine cannot serve one of them.
        """
        if self.status is not Status.READY:
            raise NotReady(f"the server is {self.status}: {self.detail}")
        for request in requests:
            self.served.engine.check(request)
        room = self.served.engine.slots + self.max_waiting - self._outstanding
        if len(requests) > room:
            raise QueueFull(
                f"{len(requests)} more would exceed {self.served.engine.slots} running and "
                f"{self.max_waiting} waiting requests."
            )
        ticket = Ticket(self, tuple(requests))
        self._outstanding += len(requests)
        self._inbox.put(functools.partial(self._admit, ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends the ticket's requests and frees their slots."""
        self._inbox.put(functools.partial(self._cancel, ticket))

    def stop(self) -> None:
        """Takes no more requests; what runs may go on for `GRACE_S`, then it is cancelled."""
        if self._stopping.is_set():
            return
        self.detail = "shutting down"
        self._stopping.set()
        self._inbox.put(lambda: None)  # wakes an idle thread
        with contextlib.suppress(RuntimeError):  # no running loop: nobody waits for anything
            asyncio.get_running_loop().call_later(GRACE_S, self._inbox.put, self._cancel_all)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread; True if it has ended or was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # What follows runs in the engine's thread.

    def _main(self) -> None:
        try:
            served = self._load(self._progress)
            self._metrics.start(served.name)
            self._publish(served)
            self.detail, self.served = "warm", served
            self._call_loop(self._on_change)
            self._serve(served)
        except _Stopped:
            pass
        except BaseException as error:  # reported by whoever started this thread
            self.error = error
            if self.served is not None:
                self._run_jobs(wait=False)  # so that nobody waits for what is still in the inbox
                self._cancel_all()
            self._call_loop(self._on_change)

    def _serve(self, served: Served) -> None:
        engine = served.engine
        while True:
            last = self._stopping.is_set()  # before the inbox: what it holds then is all there is
            if self._run_jobs(wait=not (last or engine.has_work)):
                self._publish(served)
            if last and not self._entries:
                engine.close()
                return
            if engine.has_work:
                self._deliver(served, engine.step())
            else:
                engine.idle()

    def _progress(self, message: str) -> None:
        if self._stopping.is_set():
            raise _Stopped
        self.detail = message
        self._tell(message)

    def _run_jobs(self, *, wait: bool) -> bool:
        """Runs what is in the inbox, after waiting a while for something. True if any."""
        ran = False
        while True:
            try:
                job = self._inbox.get(block=wait and not ran, timeout=IDLE_S)
            except queue.Empty:
                return ran
            job()
            ran = True

    def _admit(self, ticket: Ticket) -> None:
        for index, request in enumerate(ticket.requests):
            sequence = self.served.engine.submit(request)
            self._entries[sequence.id] = _Entry(ticket, index, sequence)

    def _cancel(self, ticket: Ticket) -> None:
        self._cancel_entries([e for e in self._entries.values() if e.ticket is ticket])

    def _cancel_all(self) -> None:
        self._cancel_entries(list(self._entries.values()))

    def _cancel_entries(self, entries: list[_Entry]) -> None:
        emissions = []
        for entry in entries:
            if self.error is None:
                self.served.engine.cancel(entry.sequence)
            else:
                entry.sequence.cancel()  # the engine is in no state to be asked
            emissions.append(entry.sequence.take_emission())
        self._deliver(self.served, emissions)

    def _deliver(self, served: Served, emissions: list[Emission]) -> None:
        now, batch = time.monotonic(), []
        for emission in emissions:
            entry = self._entries[emission.request_id]
            batch.append((entry.ticket, entry.index, emission))
            if emission.token_ids and not entry.started:
                entry.started = True
                first = entry.sequence.first_token_s or now
                self._metrics.first_token(first - entry.ticket.arrival_s)
            if emission.finish_reason is not None:
                cancelled = emission.finish_reason is FinishReason.CANCELLED
                reason = "abort" if cancelled else emission.finish_reason.value
                self._metrics.finished(reason, now - entry.ticket.arrival_s)
                del self._entries[emission.request_id]
        self._publish(served)  # before the caller hears of it
        if batch:
            self._call_loop(functools.partial(self._hand_out, batch))

    def _publish(self, served: Served) -> None:
        engine = served.engine
        self._metrics.publish(
            Snapshot(copy.deepcopy(engine.counters), engine.num_running, engine.num_waiting)
        )

    def _call_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function)

    # And this on the event loop again.

    def _hand_out(self, batch: list[tuple[Ticket, int, Emission]]) -> None:
        for ticket, index, emission in batch:
            self._outstanding -= emission.finish_reason is not None
            ticket.put(index, emission)
