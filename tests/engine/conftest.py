"""Engines of these tests compile fewer numbers of verify rows: compiling takes most of the time."""

from collections.abc import Iterator

import pytest

from dspark_jax.engine import programs


@pytest.fixture(scope="package", autouse=True)
def few_row_buckets() -> Iterator[None]:
    """Policies that vary the verify length get as many row buckets as those that do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "ADAPTIVE_FRACTIONS", programs.FIXED_FRACTIONS)
        yield
