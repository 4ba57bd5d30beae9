"""The server's process: how it starts, how it ends, and its command line."""

import argparse
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax import cli
from dspark_jax.checkpoint.demo import DEMO_TARGET
from dspark_jax.serve.__main__ import parser
from tests.e2e.process import ROOT, STOP_LIMIT_S, ServerProcess
from tests.models import write_target

LONG = 4096  # tokens; an answer that fills them is not over before the server is
QUESTION = {"messages": [{"role": "user", "content": "Go on"}]}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return write_target(folder / "tiny", layers=2, max_position_embeddings=LONG)


def test_sigterm_ends_what_runs_and_exits_with_0(target):
    with ServerProcess(
        "--model", str(target), "--draft", "none", "--slots", "1", "--served-model-name", "x",
        "--max-model-len", str(LONG),
    ) as server:  # fmt: skip
        server.wait_ready()
        body = {**QUESTION, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            assert first["model"] == "x"
            code, seconds = server.stop(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert code == 0, server.text()
        assert seconds < 5
        assert "Traceback" not in server.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_exits_with_0(target, number):
    with ServerProcess("--model", str(target), "--draft", "random") as server:
        code, seconds = server.stop(number)
        assert code == 0, server.text()
        assert seconds < 5
        assert "Traceback" not in server.text()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(tmp_path):
    with ServerProcess("--model", str(tmp_path / "nowhere")) as server:
        assert server.wait() == 2
        assert "error: Model " in server.log[-1] and "nowhere" in server.log[-1]
        assert "Traceback" not in server.text()


def run_to_end(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dspark_jax.serve", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=STOP_LIMIT_S,
    )  # fmt: skip


def test_a_port_in_use_is_explained():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_to_end("--port", str(port))
    assert ended.returncode == 2
    why = f"port {port} on 127.0.0.1 is in use; choose another with --port."
    assert ended.stderr == f"error: {why}\n"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--slots", "0", "expected a whole number between 1"),
        ("--port", "70000", "expected a whole number between 0 and 65535"),
        ("--max-waiting", "x", "expected a whole number"),
        ("--policy", "best", "invalid choice: 'best'"),
        ("--host", "no.such.host.invalid", "cannot listen on no.such.host.invalid"),
    ],
)
def test_bad_options_are_explained(option, value, words):
    ended = run_to_end("--port", "0", option, value)
    assert ended.returncode == 2
    assert words in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_options_are_those_of_the_other_front_ends():
    """The server spells them out, as it must not import what the others do."""
    shared = argparse.ArgumentParser()
    cli.add_model_options(shared)
    ours = {action.dest: action for action in parser()._actions}
    for action in shared._actions:
        assert ours[action.dest].default == action.default
        assert set(ours[action.dest].choices or ()) == set(action.choices or ())
    assert ours["model"].default == DEMO_TARGET
