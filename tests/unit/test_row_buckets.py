"""Which numbers of verify rows are compiled, and so timed."""

from dspark_jax.engine.profile import profiled_points


def test_profile_covers_every_program_of_an_adaptive_engine():
    rows = {1: (1, 2, 3, 4, 5), 2: (2, 4, 6, 8, 10)}
    assert profiled_points(2, 4) == [(r, b) for r, buckets in rows.items() for b in buckets]
