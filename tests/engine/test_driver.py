"""The engine's thread: tickets, cancelling, limits, stopping; and that warm it compiles nothing."""

import asyncio
import collections
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import jax
import numpy as np
import pytest

from dspark_jax.engine.core import Counters
from dspark_jax.engine.requests import Request, RequestError, Sequence
from dspark_jax.serve.driver import Cancelled, Driver, NotReady, QueueFull, Served, Status, Ticket
from dspark_jax.serve.loading import LoadOptions, load_served
from dspark_jax.serve.metrics import Metrics
from tests.models import write_draft, write_target

NAME = "counting"
PATIENCE_S = 30.0


class CountingEngine:
    """Stands in for an engine: request with prompt (p, ..) gets p+1, p+2, .. one per step.

    Args:
      slots: requests that advance together.
      fail_at: the step that raises.
    """

    def __init__(self, slots: int = 2, fail_at: int | None = None):
        self.slots, self.capacity, self.fail_at = slots, 100, fail_at
        self.counters = Counters.zero(0)
        self.sequences: collections.deque[Sequence] = collections.deque()
        self.threads: set[int] = set()
        self.steps = 0
        self.gate = threading.Event()  # closed: `step` blocks, as a long program would
        self.gate.set()

    @property
    def num_running(self) -> int:
        return min(len(self.sequences), self.slots)

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - self.num_running

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def check(self, request: Request) -> None:
        if len(request.prompt_ids) + request.max_tokens > self.capacity:
            raise RequestError("prompt", len(request.prompt_ids), "a shorter one")

    def submit(self, request: Request) -> Sequence:
        self.threads.add(threading.get_ident())
        sequence = Sequence(request, None, time.monotonic())
        self.sequences.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.threads.add(threading.get_ident())
        sequence.cancel()
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def step(self) -> list:
        assert self.gate.wait(PATIENCE_S)
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps == self.fail_at:
            raise ZeroDivisionError("the device is gone")
        running = [self.sequences[i] for i in range(self.num_running)]
        emissions = []
        for sequence in running:
            sequence.commit(sequence.request.prompt_ids[0] + len(sequence.token_ids) + 1)
            emissions.append(sequence.take_emission())
            if sequence.finish_reason is not None:
                self.sequences.remove(sequence)
        time.sleep(0.001)
        return emissions


Body = Callable[[Driver, Metrics], Awaitable[None]]


def run_driver(engine: object, body: Body, *, max_waiting: int = 8) -> Driver:
    """Runs `body` on an event loop with a ready driver, then stops it."""
    served = Served(name=NAME, engine=engine, tokenizer=None, stop_ids=())
    return run_loading(lambda progress: served, body, max_waiting=max_waiting)


def run_loading(load: Callable, body: Body, *, max_waiting: int = 8) -> Driver:
    metrics = Metrics()
    driver = Driver(load, metrics, max_waiting=max_waiting)

    async def run() -> None:
        changed = asyncio.Event()
        driver.start(asyncio.get_running_loop(), changed.set)
        await changed.wait()
        await body(driver, metrics)
        driver.stop()
        assert await asyncio.to_thread(driver.join, PATIENCE_S)

    asyncio.run(run())
    return driver


def request(first: int = 0, tokens: int = 3, **fields) -> Request:
    return Request(prompt_ids=(first,), max_tokens=tokens, **fields)


async def collect(ticket: Ticket) -> dict[int, list[int]]:
    """Tokens by index."""
    tokens = collections.defaultdict(list)
    async for index, emission in ticket:
        tokens[index] += emission.token_ids
    return dict(tokens)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """One sample of the exposition."""
    labels = {"model_name": NAME, **labels}
    wanted = name + "{" + ",".join(f'{k}="{labels[k]}"' for k in sorted(labels)) + "} "
    lines = metrics.exposition().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(wanted)]
    return float(line.removeprefix(wanted))


def test_every_ticket_gets_its_own_tokens_and_only_the_thread_touches_the_engine():
    engine = CountingEngine(slots=2)

    async def body(driver: Driver, metrics: Metrics) -> None:
        tickets = [driver.submit([request(10 * i, tokens=4)]) for i in range(4)]
        tickets.append(driver.submit([request(50, tokens=1), request(60, tokens=2)]))
        got = await asyncio.gather(*(collect(ticket) for ticket in tickets))
        assert got[:4] == [{0: [10 * i + k for k in (1, 2, 3, 4)]} for i in range(4)]
        assert got[4] == {0: [51], 1: [61, 62]}
        assert tickets[4].completion_tokens == 3 and tickets[4].prompt_tokens == 2
        assert value(metrics, "vllm:request_success_total", finished_reason="length") == 6
        assert value(metrics, "vllm:time_to_first_token_seconds_count") == 6
        assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 6
        assert value(metrics, "vllm:num_requests_running") == 0

    run_driver(engine, body)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_cancelling_frees_the_slot_and_leaves_the_others_alone():
    engine = CountingEngine(slots=2)

    async def body(driver: Driver, metrics: Metrics) -> None:
        endless = driver.submit([request(0, tokens=99), request(100, tokens=99)])
        other = driver.submit([request(200, tokens=3)])
        seen = 0
        with pytest.raises(Cancelled):
            async for _ in endless:
                seen += 1
                if seen == 4:
                    endless.cancel()
        assert await collect(other) == {0: [201, 202, 203]}
        assert not engine.has_work
        assert value(metrics, "vllm:num_requests_running") == 0
        assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 2
        other.cancel()  # nothing is left to cancel
        assert await collect(driver.submit([request(7, tokens=1)])) == {0: [8]}
        assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 2

    run_driver(engine, body)
    assert engine.steps < 99


def test_a_waiting_request_can_be_cancelled():
    engine = CountingEngine(slots=1)

    async def body(driver: Driver, metrics: Metrics) -> None:
        first, second = driver.submit([request(0, tokens=9)]), driver.submit([request(50)])
        second.cancel()
        with pytest.raises(Cancelled):
            await collect(second)
        assert await collect(first) == {0: list(range(1, 10))}

    run_driver(engine, body)


def test_no_more_than_max_waiting_wait():
    engine = CountingEngine(slots=2)

    async def body(driver: Driver, metrics: Metrics) -> None:
        engine.gate.clear()
        tickets = [driver.submit([request()]) for _ in range(4)]
        with pytest.raises(QueueFull, match="2 more .* 2 running and 3 waiting"):
            driver.submit([request(), request()])
        tickets.append(driver.submit([request()]))
        with pytest.raises(QueueFull):
            driver.submit([request()])
        engine.gate.set()
        await asyncio.gather(*(collect(ticket) for ticket in tickets))
        assert await collect(driver.submit([request(5, tokens=1)])) == {0: [6]}

    run_driver(engine, body, max_waiting=3)


def test_an_impossible_request_is_refused_at_once():
    async def body(driver: Driver, metrics: Metrics) -> None:
        with pytest.raises(RequestError):
            driver.submit([request(), request(tokens=100)])
        assert await collect(driver.submit([request(1, tokens=1)])) == {0: [2]}

    engine = CountingEngine()
    run_driver(engine, body)
    assert engine.steps == 1  # the first of the two did not slip in


def test_nothing_is_taken_before_ready_or_after_stop():
    told, go = [], threading.Event()

    def load(progress: Callable[[str], None]) -> Served:
        progress("compiling 1/2: one")
        assert go.wait(PATIENCE_S)
        progress("compiling 2/2: two")
        return Served(name=NAME, engine=CountingEngine(), tokenizer=None, stop_ids=())

    driver = Driver(load, Metrics(), max_waiting=1, tell=told.append)

    async def run() -> None:
        ready = asyncio.Event()
        driver.start(asyncio.get_running_loop(), ready.set)
        while not told:
            await asyncio.sleep(0.001)
        assert driver.status is Status.STARTING
        with pytest.raises(NotReady, match="starting: compiling 1/2"):
            driver.submit([request()])
        go.set()
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        assert driver.status is Status.READY
        driver.stop()
        with pytest.raises(NotReady, match="stopping"):
            driver.submit([request()])
        assert await asyncio.to_thread(driver.join, PATIENCE_S)

    asyncio.run(run())
    assert told == ["compiling 1/2: one", "compiling 2/2: two"]


def test_stopping_ends_loading_at_its_next_sign_of_life():
    going, reached_end = threading.Event(), []

    def load(progress: Callable[[str], None]) -> None:
        while True:
            going.set()
            progress("still compiling")
            time.sleep(0.001)

    async def run() -> None:
        driver = Driver(load, Metrics(), max_waiting=1)
        driver.start(asyncio.get_running_loop())
        assert await asyncio.to_thread(going.wait, PATIENCE_S)
        driver.stop()
        assert await asyncio.to_thread(driver.join, PATIENCE_S)
        assert driver.error is None
        reached_end.append(True)

    asyncio.run(run())
    assert reached_end


def test_stop_lets_requests_finish_but_not_for_ever(monkeypatch):
    monkeypatch.setattr("dspark_jax.serve.driver.GRACE_S", 0.2)
    engine = CountingEngine(slots=2)
    engine.capacity = 10**9

    async def body(driver: Driver, metrics: Metrics) -> None:
        short = driver.submit([request(0, tokens=5)])
        endless = driver.submit([request(0, tokens=10**8)])
        driver.stop()
        assert await collect(short) == {0: [1, 2, 3, 4, 5]}
        with pytest.raises(Cancelled):
            await collect(endless)

    run_driver(engine, body)


def test_a_failing_engine_is_reported_and_nobody_waits_for_it():
    async def body(driver: Driver, metrics: Metrics) -> None:
        tickets = [driver.submit([request(i, tokens=50)]) for i in range(3)]
        for ticket in tickets:
            with pytest.raises(Cancelled):
                await collect(ticket)
        with pytest.raises(NotReady):
            driver.submit([request()])

    driver = run_driver(CountingEngine(fail_at=4), body)
    assert isinstance(driver.error, ZeroDivisionError)


def test_a_failing_load_is_reported():
    def load(progress: Callable[[str], None]) -> Served:
        raise ValueError("no such model")

    async def body(driver: Driver, metrics: Metrics) -> None:
        assert driver.status is Status.STOPPING

    driver = run_loading(load, body)
    assert str(driver.error) == "no such model"


# From here on with a real engine.

SLOTS = 3
SAMPLINGS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """JAX's own reports of tracing, lowering and compiling, in any thread."""
    events = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("draft", ["trained", "none"])
def test_a_warm_server_compiles_nothing(tmp_path, compilations, draft):
    target = write_target(tmp_path / "target", layers=2)
    name = "none"
    if draft == "trained":
        name = str(write_draft(tmp_path / "draft", target, block_size=2))
    options = LoadOptions(model=str(target), draft=name, slots=SLOTS, max_model_len=128)
    rng = np.random.default_rng(0)

    def batch(served: Served, size: int, sampling: dict) -> list[Request]:
        lengths = rng.integers(1, 80, size)
        return [
            Request(
                prompt_ids=tuple(int(t) for t in rng.integers(3, 300, length)),
                max_tokens=int(rng.integers(1, 12)), seed=int(rng.integers(2**40)),
                stop=("zz",), stop_ids=served.stop_ids, **sampling,
            )
            for length in lengths
        ]  # fmt: skip

    async def body(driver: Driver, metrics: Metrics) -> None:
        assert driver.error is None
        served = driver.served
        assert sum(event.endswith("backend_compile_duration") for event in compilations) > 3
        compilations.clear()
        for size in (*range(1, SLOTS + 1), SLOTS + 2):
            for sampling in SAMPLINGS:
                await collect(driver.submit(batch(served, size, sampling)))
        mixed = [r for sampling in SAMPLINGS for r in batch(served, 1, sampling)]
        await collect(driver.submit(mixed))
        gone = driver.submit(batch(served, 2, {"ignore_eos": True}))
        gone.cancel()
        with pytest.raises(Cancelled):
            await collect(gone)
        assert compilations == []
        jax.jit(lambda x: x * 3 + size)(np.float32(1))  # the listener does hear compilations
        assert any(event.endswith("backend_compile_duration") for event in compilations)

    run_loading(lambda progress: load_served(options, progress), body, max_waiting=16)


def test_early_stop_gets_a_measured_table(tmp_path):
    target = write_target(tmp_path / "target", layers=2)
    draft = write_draft(tmp_path / "draft", target, block_size=2)
    options = LoadOptions(
        model=str(target), draft=str(draft), slots=1, max_model_len=64, policy="early_stop"
    )
    told = []
    served = load_served(options, told.append)
    assert "measuring steps per second" in told
    (table,) = served.engine.steps_per_s.values()
    assert table[0] > 1.0 and np.all(np.diff(table) <= 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_model_len": 4096}, "max_model_len=4096 is beyond the 1024 tokens"),
        ({"policy": "global"}, "policy='global'"),
        ({"confidence_threshold": 2.0}, "confidence_threshold=2.0"),
        ({"kv_cache": "pages"}, "kv_cache='pages'"),
        ({"kv_cache": "paged", "draft": "random"}, "planner='host'"),
        ({"draft": "nowhere"}, "draft 'nowhere' is not a directory"),
    ],
)
def test_bad_options_are_explained(tmp_path, fields, words):
    target = write_target(tmp_path / "target", layers=2)
    options = LoadOptions(**({"model": str(target), "draft": "none"} | fields))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_served(options, lambda message: None)
