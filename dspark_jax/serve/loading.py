"""From the server's options to a warm engine. It imports JAX, so it is imported late."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from dspark_jax.engine.core import Engine
from dspark_jax.engine.hosts import SharedEngine, follow
from dspark_jax.engine.load import load_pair
from dspark_jax.engine.profile import prepare_schedule
from dspark_jax.engine.requests import Request
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.serve.driver import Served
from dspark_jax.sharding import parse_mesh

DEFAULT_MAX_MODEL_LEN = 2048  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What to serve; the fields are the command line's options."""

    model: str
    draft: str = "auto"
    slots: int = 4
    max_model_len: int | None = None
    dtype: str = "float32"
    mesh: str | None = None
    experts: str | None = None
    kv_cache: str = "contiguous"
    policy: str = "full"
    confidence_threshold: float = 0.0
    threshold_kind: str = "per_position"
    lag: int = 2
    min_verify_len: int = 0
    max_verify_len: int | None = None
    min_predicted_gain: float | None = None
    confidence_source: str = "head"
    probe_every: int = 0
    planner: str = "device"
    rejection_sample_method: str = "standard"
    sps_table: str | None = None
    confidence_sts: str | None = None
    served_model_name: str | None = None


def load_served(options: LoadOptions, progress: Callable[[str], None]) -> Served:
    """Loads the models, compiles every program and runs each once.

    Args:
      options: what to serve.
      progress: told what is being done.

    Returns:
      The warm engine. Serving it compiles nothing more.

    Raises:
      FileNotFoundError: a model is missing.
      ValueError: a checkpoint is damaged, or options do not fit together.
    """
    names = [field.name for field in dataclasses.fields(ScheduleConfig)]
    schedule = ScheduleConfig(**{name: getattr(options, name) for name in names})
    schedule.check_lossless(options.rejection_sample_method)
    if options.kv_cache == "paged" and options.draft not in ("auto", "none"):
        schedule.check_paged()
    mesh = parse_mesh(options.mesh) if options.mesh else None
    progress(f"loading {options.model}")
    pair = load_pair(
        options.model, options.draft, dtype=options.dtype, experts=options.experts,
        kv_cache=options.kv_cache, mesh=mesh,
    )  # fmt: skip
    longest = pair.target.config.max_position_embeddings
    capacity = options.max_model_len or min(DEFAULT_MAX_MODEL_LEN, longest)
    if capacity > longest:
        raise ValueError(
            f"max_model_len={capacity} is beyond the {longest} tokens this target was made for "
            "(max_position_embeddings); lower it."
        )
    make = Engine if jax.process_count() == 1 else SharedEngine
    engine = make(
        pair.decoder(schedule, options.rejection_sample_method),
        pair.params,
        slots=options.slots,
        capacity=capacity,
        dtype=pair.dtype,
        tokenizer=pair.tokenizer,
        progress=progress,
        mesh=pair.mesh,
    )
    prepare_schedule(
        engine, pair, sps_table=options.sps_table, confidence_sts=options.confidence_sts,
        progress=progress,
    )  # fmt: skip
    progress("warming up")
    warm_up(engine)
    if isinstance(engine, SharedEngine) and jax.process_index() == 0:
        engine.lead()
    return Served(
        name=options.served_model_name or pair.name,
        engine=engine,
        tokenizer=pair.tokenizer,
        stop_ids=pair.stop_ids,
    )


def follow_served(options: LoadOptions, progress: Callable[[str], None]) -> None:
    """Loads what the leading process serves, and does as it does until it stops.

    Args:
      options: those of the leading process.
      progress: told what is being done.

    Raises:
      FileNotFoundError, ValueError: of `load_served`.
      RuntimeError: of `follow`.
    """
    served = load_served(options, progress)
    progress("following process 0")
    follow(served.engine)


def warm_up(engine: Engine) -> None:
    """Runs every program once, so that the first request finds memory touched and code loaded.

    Args:
      engine: without requests; left without any, its counters at zero.
    """
    speeds = engine.steps_per_s
    bypassing = engine.decoder.schedule.min_predicted_gain is not None
    for undrafted in (0.0, np.inf) if bypassing else (1.0,):  # rounds with drafts, and without
        engine.steps_per_s = {
            rows: np.concatenate([np.float32([undrafted]), table[1:]])
            for rows, table in speeds.items()
        }
        for width in engine.programs.widths:
            new = min(engine.decoder.num_drafts + 2, engine.capacity - 1)
            engine.run(
                Request(prompt_ids=(0,), max_tokens=new, temperature=float(row % 2), seed=row)
                for row in range(width * engine.programs.groups)
            )
    engine.steps_per_s = speeds
    for chunk in engine.programs.chunks:
        if chunk + 2 <= engine.capacity:
            engine.run([Request(prompt_ids=(0,) * (chunk + 1), max_tokens=1)])
    engine.reset_counters()
