"""A server in a process of its own, as a user would start it."""

import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent.parent
START_LIMIT_S = 240.0
STOP_LIMIT_S = 10.0


class ServerProcess:
    """`python -m dspark_jax.serve` on a free port; leaving the context makes sure it is gone.

    Args:
      *arguments: the command line, without host and port.

    Attributes:
      url: where it listens; known when the constructor returns.
      health_s: seconds from the start of the process to its first answer.
      first_health: that answer, decoded.
    """

    def __init__(self, *arguments: str):
        begin = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dspark_jax.serve", "--port", "0", *arguments],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self._lines.get(timeout=START_LIMIT_S)
        assert line.startswith("listening on http://"), self.text()
        self.url = line.split()[2].rstrip(";")
        self.http = httpx.Client(base_url=self.url, timeout=60)
        response = self.http.get("/health")
        self.health_s = time.monotonic() - begin
        self.first_health = response.json()

    def wait_ready(self) -> None:
        """Returns when `/health` says so."""
        end = time.monotonic() + START_LIMIT_S
        while self.http.get("/health").status_code != 200:
            assert time.monotonic() < end and self._process.poll() is None, self.text()
            time.sleep(0.05)

    def stop(self, signal_number: int) -> tuple[int, float]:
        """Sends a signal; returns the exit code and the seconds until then."""
        begin = time.monotonic()
        self._process.send_signal(signal_number)
        code = self.wait()
        return code, time.monotonic() - begin

    def wait(self) -> int:
        """The exit code of a server that is about to end."""
        code = self._process.wait(STOP_LIMIT_S)
        self._reader.join()
        return code

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self.http.close()

    def text(self) -> str:
        """All it has printed."""
        return "".join(self.log)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of `/metrics`, the model's name left out of the labels."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no {name} {labels} in /metrics")

    def wait_metric(self, value: float, name: str, **labels: str) -> None:
        """Returns when a sample of `/metrics` has a value."""
        end = time.monotonic() + STOP_LIMIT_S
        while (now := self.metric(name, **labels)) != value:
            assert time.monotonic() < end, f"{name} is {now}, not {value}"
            time.sleep(0.01)

    def _read(self) -> None:
        for line in self._process.stderr:
            self.log.append(line)
            self._lines.put(line)
        self._process.stderr.close()
        self._lines.put("")  # ends a wait for a first line that never came
