"""Sets the platform before JAX is first imported, and holds the fixtures every test may use."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# Eight devices let sharded programs run on a CPU. Most of the suite's time would go into compiling
# for a CPU: a third of that is left at level 0 and with one LLVM module for many fusions instead of
# one for each (two thirds on JAX 0.12, which ignores the latter). A level that the caller names is
# kept. Compiled programs are kept for the next run.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)


def _prepare_environment() -> None:
    """Fills in what the caller has not set; subprocesses of tests inherit it."""
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in XLA_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Compiled CPU programs use the instructions of the host they were made on: one folder per host.
    cache = TESTS.parent / ".cache" / "jax" / platform.node()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already fill the cores
        for name in ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")


_prepare_environment()

import numpy as np  # noqa: E402  (its BLAS reads the environment while it loads)

from dspark_jax.engine import programs  # noqa: E402


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `tpu` or `gpu` where JAX runs on something else."""
    for backend in ("tpu", "gpu"):
        if item.get_closest_marker(backend):
            import jax

            if jax.default_backend() != backend:
                pytest.skip(f"needs a {backend.upper()}; set JAX_PLATFORMS where there is one")


@pytest.fixture
def rng() -> np.random.Generator:
    """A NumPy generator that starts from the same seed in every test."""
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def few_row_buckets() -> Iterator[None]:
    """Engines compile rounds of no drafts or of all; what is scheduled in between is padded."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIXED_FRACTIONS", "ADAPTIVE_FRACTIONS"):
            patch.setattr(programs, name, (0.0, 1.0))
        yield


@pytest.fixture(scope="module")
def one_width() -> Iterator[None]:
    """Engines compile programs for all their slots, and none for fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "row_widths", lambda slots: (slots,))
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden vectors."""
    return TESTS / "golden"
