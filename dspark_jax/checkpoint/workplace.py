"""Where a conversion is written until it is complete: a hidden directory beside the destination."""

import contextlib
import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from dspark_jax.checkpoint.orbax_layout import MANIFEST

_PROGRESS = "progress.json"
_SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".md")
_SPARE_BYTES = 16 << 20  # for the manifest and the tokenizer


class Workplace:
    """A context in which the parts of a destination are written and remembered.

    Args:
      destination: a directory that does not exist yet.
      files: the source's files; their names, sizes and times tell whether to go on or start over.
      settings: what else must be the same to go on.
      total: bytes that will be written.
      say: called with a line of progress.

    Raises:
      FileExistsError: the destination exists, or another process is writing it.
      OSError: there is not enough room.
    """

    def __init__(
        self,
        destination: str | Path,
        files: Sequence[Path],
        settings: dict[str, Any],
        total: int,
        say: Callable[[str], None],
    ):
        self.destination = Path(destination).absolute()
        self.directory = self.destination.with_name(f".{self.destination.name}.partial")
        self.sha256: dict[str, str] = {}
        self.resumed = 0
        self._total, self._say, self._done, self._new = total, say, 0, 0
        self._started = time.monotonic()
        listed = [(str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        text = json.dumps([listed, settings], sort_keys=True)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        self._lock: TextIO | None = None

    def __enter__(self) -> "Workplace":
        if self.destination.exists():
            raise FileExistsError(
                f"{self.destination} exists; choose a new directory, or remove it."
            )
        self.destination.parent.mkdir(parents=True, exist_ok=True)
        self._acquire()
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare(self) -> None:
        """Takes up what an earlier attempt left, or begins."""
        progress = self._read_progress()
        if progress.get("key") == self._key:
            self.sha256 = progress["sha256"]
            self.resumed = len(self.sha256)
            self._say(f"going on in {self.directory}: {self.resumed} parts are there already")
        elif self.directory.exists():
            self._say(f"starting over: {self.directory} was of other files or settings")
            shutil.rmtree(self.directory)
        self._check_space()
        self.directory.mkdir(exist_ok=True)
        self._write_progress()

    def __exit__(self, *error: object) -> None:
        self._lock_path().unlink(missing_ok=True)
        self._lock.close()

    def keep(
        self, what: str, names: Sequence[str], nbytes: int, write: Callable[[], dict[str, str]]
    ) -> None:
        """Writes one part, unless an earlier attempt did.

        Args:
          what: describes it in the line of progress.
          names: of the arrays or files it consists of.
          nbytes: their size together.
          write: writes them and returns the digest of each.
        """
        if not all(name in self.sha256 for name in names):
            self.sha256 |= write()
            self._write_progress()
            self._new += nbytes
        self._done += nbytes
        rate = self._new / max(time.monotonic() - self._started, 1e-3) / 1e6
        share = 100 * self._done / max(self._total, 1)
        self._say(f"{share:5.1f} %  {rate:6.0f} MB/s  {what}")

    def move_into_place(self) -> None:
        """Gives the complete directory its name."""
        (self.directory / _PROGRESS).unlink()
        self.directory.rename(self.destination)

    def _acquire(self) -> None:
        self._lock = self._lock_path().open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise FileExistsError(
                f"another process is writing {self.destination}; wait for it to end."
            ) from error
        except OSError:
            self._say(f"{self.destination.parent} has no file locks; going on without")

    def _lock_path(self) -> Path:
        return self.directory.with_suffix(".lock")

    def _read_progress(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads((self.directory / _PROGRESS).read_text(encoding="utf-8"))
        return {}

    def _write_progress(self) -> None:
        path = self.directory / _PROGRESS
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"key": self._key, "sha256": self.sha256}), encoding="utf-8")
        new.replace(path)

    def _check_space(self) -> None:
        there = 0
        if self.directory.exists():
            there = sum(f.stat().st_size for f in self.directory.rglob("*") if f.is_file())
        needed = self._total + _SPARE_BYTES - there
        free = shutil.disk_usage(self.destination.parent).free
        if free < needed:
            raise OSError(
                f"{self.destination.parent} has {free / 1e9:.2f} GB free, but {needed / 1e9:.2f} "
                "GB are needed; free some space, or choose another disk."
            )


def copy_side_files(source: Path, destination: Path) -> None:
    """Copies config, tokenizer and texts, but no weights and nothing that lists them.

    Args:
      source: a checkpoint directory.
      destination: where to.
    """
    for path in sorted(source.iterdir()):
        known = path.suffix in _SIDE_FILES or path.name.startswith("LICENSE")
        skipped = path.name == MANIFEST or path.name.endswith(".safetensors.index.json")
        if path.is_file() and known and not skipped:
            shutil.copyfile(path, destination / path.name)
