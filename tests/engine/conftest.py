"""Compiling takes most of the time of these tests."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def compile_little(few_row_buckets: None) -> None:
    """A module that times every number of rows overrides `few_row_buckets`."""
