"""Engines of these tests compile two numbers of verify rows: compiling takes most of the time."""

from collections.abc import Iterator

import pytest

from dspark_jax.engine import programs


@pytest.fixture(scope="module", autouse=True)
def few_row_buckets() -> Iterator[None]:
    """A round verifies no drafts or all of them; what is scheduled in between is padded."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIXED_FRACTIONS", "ADAPTIVE_FRACTIONS"):
            patch.setattr(programs, name, (0.0, 1.0))
        yield
