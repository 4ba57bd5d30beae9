"""SPS(B): how many rounds a second the compiled programs run, by verified rows."""

import time

import jax
import numpy as np

from dspark_jax.engine.core import Engine
from dspark_jax.types import SamplingParams

REPEATS = 5  # rounds timed per bucket; the median counts


def measure_steps_per_s(engine: Engine, *, context_len: int = 256) -> dict[int, np.ndarray]:
    """Times every bucket of every round program on the device at hand.

    The rounds are real ones over idle caches: the number of rows is set by the tokens each request
    still wants. A bucket never counts as faster than a smaller one (timings are noisy, and the
    schedule must not be drawn to rows it pays nothing for).

    Args:
      engine: warm and without requests; its slots are used and left empty.
      context_len: context rows per request while timing, cut to the engine's capacity.

    Returns:
      Per batch width R, f32[R*(K+1)+1]: steps per second by verified rows. Also stored in
      `engine.steps_per_s`.

    Raises:
      ValueError: the engine has no draft, or has work.
    """
    if engine.decoder.draft is None or engine.has_work:
        raise ValueError("steps per second are measured on an idle engine with a draft.")
    width = engine.decoder.num_drafts + 1
    position = min(context_len, engine.capacity - 1 - width)
    for rows, table in engine.steps_per_s.items():
        seconds = np.zeros(len(table))
        floor = 0.0
        for bucket in engine.programs.buckets(rows):
            floor = max(floor, _time_bucket(engine, rows, bucket, max(position, 1)))
            seconds[bucket] = floor
        buckets = np.array(engine.programs.buckets(rows))
        paid = buckets[np.searchsorted(buckets, np.arange(len(table)))]
        engine.steps_per_s[rows] = (1.0 / seconds[paid]).astype(np.float32)
    return engine.steps_per_s


def _time_bucket(engine: Engine, rows: int, bucket: int, position: int) -> float:
    """Median seconds of a round in which R requests schedule `bucket` rows in all."""
    drafts = np.full(rows, bucket // rows - 1)
    drafts[: bucket - drafts.sum() - rows] += 1
    state = engine.programs.new_state()
    sampling = SamplingParams(
        temperature=np.float32(0), top_k=np.int32(0), top_p=np.float32(1), min_p=np.float32(0),
        seed=np.uint32(0),
    )  # fmt: skip
    flat = np.ones_like(engine.steps_per_s[rows])  # every draft that fits is worth verifying
    times = []
    for _ in range(REPEATS + 1):
        for slot in range(rows):
            state = engine.programs.admit(
                state, np.int32(slot), np.int32(0), np.int32(position),
                np.int32(drafts[slot] + 1), sampling,
            )  # fmt: skip
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state, output = engine.programs.round[rows](engine.params, state, flat)
        jax.block_until_ready(output)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))
