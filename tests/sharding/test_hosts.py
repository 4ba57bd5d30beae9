"""Several processes on this machine serve together: the text of one process alone."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from dspark_jax.engine.processes import exchange, join_hosts
from dspark_jax.engine.requests import Request
from dspark_jax.serve.loading import LoadOptions, load_served
from tests.e2e.process import ROOT, START_LIMIT_S, ServerProcess
from tests.models import TinyPair, write_pair

PROMPT, TOKENS, MODEL_LEN = "the quick brown fox", 12, 31
COUPLED = {"rejection_sample_method": "coupled"}  # the text for a seed, however it is computed


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("models"), layers=2)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def _alone(pair: TinyPair, sampling: list[dict]) -> list[str]:
    """The texts of an engine in this process, on one device."""
    served = load_served(
        LoadOptions(
            model=str(pair.target), draft=str(pair.draft), slots=1, max_model_len=MODEL_LEN,
            **COUPLED,
        ),
        lambda line: None,
    )  # fmt: skip
    ids = tuple(served.tokenizer.encode(PROMPT))
    asked = [
        Request(prompt_ids=ids, max_tokens=TOKENS, ignore_eos=True, **fields) for fields in sampling
    ]
    return [sequence.text for sequence in served.engine.run(asked)]


@dataclasses.dataclass
class _Follower:
    """The process that takes no requests."""

    arguments: list[str]
    log: Path

    def __enter__(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "dspark_jax.serve", *self.arguments]
        with self.log.open("w") as file:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def test_two_processes_serve_the_text_of_one(pair, tmp_path, monkeypatch):
    sampling = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
    flags = os.environ["XLA_FLAGS"].split()
    flags = [flag for flag in flags if "device_count" not in flag]
    flags.append("--xla_force_host_platform_device_count=2")  # of each process
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    arguments = [
        "--model", str(pair.target), "--draft", str(pair.draft), "--slots", "2",
        "--max-model-len", str(MODEL_LEN), "--rejection-sample-method", "coupled",
        "--mesh", "data=2,model=2", "--coordinator", f"127.0.0.1:{_free_port()}",
        "--num-processes", "2", "--process-id",
    ]  # fmt: skip
    log = tmp_path / "follower"
    with _Follower([*arguments, "1"], log) as follower, ServerProcess(*arguments, "0") as server:
        try:
            server.wait_ready()
        except httpx.TransportError as gone:
            raise AssertionError(f"{server.text()}\n{log.read_text()}") from gone
        texts = []
        for fields in sampling:
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **fields}
            answer = server.http.post("/v1/completions", json=body).json()
            texts.append(answer["choices"][0]["text"])
        code, _ = server.stop(signal.SIGTERM)
        assert code == 0, server.text()
        assert follower.wait(START_LIMIT_S) == 0, log.read_text()
    assert "following process 0" in log.read_text()
    assert texts == _alone(pair, sampling)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("localhost:1", None, 0), "expected HOST:PORT of process 0"),
        (("localhost:1", 2, 2), "expected HOST:PORT of process 0"),
        (("localhost", 2, 0), "expected HOST:PORT of process 0"),
        (("auto", 2, None), "go with the address of a coordinator"),
        ((None, None, 1), "go with the address of a coordinator"),
    ],
)
def test_processes_that_do_not_fit_together_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        join_hosts(*given)


def test_a_process_on_its_own_leads():
    assert join_hosts(None, None, None)
    for message in ([], [{"do": "step"}], "é" * 5000):  # the last takes two parts
        assert exchange(message) == message
