"""Options and manners shared by the command-line front ends."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from dspark_jax.checkpoint.deepseek import EXPERT_FORMS
from dspark_jax.checkpoint.demo import DEMO_TARGET
from dspark_jax.engine.load import DTYPES, Pair, load_pair
from dspark_jax.engine.processes import join_hosts
from dspark_jax.eval.compare import Comparison
from dspark_jax.host_memory import keep_freed_memory
from dspark_jax.kv_cache import KV_CACHES
from dspark_jax.schedule import (
    CONFIDENCE_SOURCES,
    PLANNERS,
    POLICIES,
    REJECTION_SAMPLE_METHODS,
    THRESHOLD_KINDS,
    ScheduleConfig,
)
from dspark_jax.sharding import parse_mesh


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which models decode, and how."""
    parser.add_argument(
        "--model", default=DEMO_TARGET, metavar="NAME|DIR", help="target (default: %(default)s)"
    )
    parser.add_argument(
        "--draft", default="auto", metavar="NAME|DIR",
        help="draft directory, 'auto' (the one shipped for this model), 'random' (untrained) "
        "or 'none' (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="float32", choices=sorted(DTYPES), help="weights and caches"
    )
    parser.add_argument(
        "--experts", choices=EXPERT_FORMS,
        help="how a DeepSeek draft holds its routed experts: 'packed' in FP4 or FP8 as stored, or "
        "a type (default: --dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache", default="contiguous", choices=KV_CACHES,
        help="'paged': the target's in pages, read by JAX's own kernel on a TPU; rounds with "
        "drafts then take --planner host (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mesh", metavar="AXIS=N,..",
        help="devices to spread over, as in data=2,model=4: slots over `data`, heads, MLPs and "
        "vocabulary over `model`, experts over `expert`; default: one device",
    )  # fmt: skip
    _add_process_options(parser)
    _add_schedule_options(parser)
    parser.add_argument(
        "--rejection-sample-method", default="standard", choices=REJECTION_SAMPLE_METHODS,
        help="'block' accepts more than 'standard'; 'coupled': the text for a seed does not depend "
        "on the draft",
    )  # fmt: skip
    parser.add_argument(
        "--sps-table", metavar="FILE",
        help="steps per second by verified rows, from tools/profile_sps.py; without it, a policy "
        "that needs them has them measured at start-up",
    )  # fmt: skip
    parser.add_argument(
        "--confidence-sts", metavar="FILE",
        help="temperatures for the draft's confidences, from tools/calibrate.py",
    )  # fmt: skip


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator", default=os.environ.get("DSPARK_COORDINATOR"), metavar="HOST:PORT|auto",
        help="process 0 of several that share a mesh; 'auto' where the cluster knows it (TPU pods, "
        "GKE, Slurm)",
    )  # fmt: skip
    parser.add_argument(
        "--num-processes", type=int, default=os.environ.get("DSPARK_NUM_PROCESSES"), metavar="N",
        help="how many processes there are; not with --coordinator auto",
    )  # fmt: skip
    parser.add_argument(
        "--process-id", type=int, default=os.environ.get("DSPARK_PROCESS_ID"), metavar="I",
        help="which of them this is, from 0; not with --coordinator auto",
    )  # fmt: skip


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", default="full", choices=sorted(POLICIES), help="how many drafts to verify"
    )
    parser.add_argument(
        "--confidence-threshold", type=float, default=0.0, metavar="C",
        help="policy 'threshold' stops before the first draft below it",
    )  # fmt: skip
    parser.add_argument(
        "--threshold-kind", default="per_position", choices=THRESHOLD_KINDS,
        help="compare each position's confidence, or the survival so far",
    )  # fmt: skip
    parser.add_argument(
        "--lag", type=int, default=2, metavar="N",
        help="policy 'lagged' plans by the confidences of so many rounds ago",
    )  # fmt: skip
    parser.add_argument(
        "--min-verify-len", type=int, default=0, metavar="N",
        help="drafts of each request verified whatever their confidence",
    )  # fmt: skip
    parser.add_argument(
        "--max-verify-len", type=int, metavar="N", help="most drafts of a request verified"
    )
    parser.add_argument(
        "--min-predicted-gain", type=float, metavar="G",
        help="draft nothing in rounds where drafts promise less gain; 0.05 is 5 %%",
    )  # fmt: skip
    parser.add_argument(
        "--confidence-source", default="head", choices=CONFIDENCE_SOURCES,
        help="'online': from what was accepted so far, for drafts without a confidence head",
    )  # fmt: skip
    parser.add_argument(
        "--probe-every", type=int, default=0, metavar="N",
        help="verify every draft in one round of N, to see what trimming costs; 0 is never",
    )  # fmt: skip
    parser.add_argument(
        "--planner", default="device", choices=PLANNERS,
        help="'host': for policy 'lagged', the host chooses the rows of a round and starts it "
        "before it has seen the last one",
    )  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser, *, temperature: bool = True) -> None:
    """Options that say how tokens are drawn; `temperature` False leaves that one out."""
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    if temperature:
        parser.add_argument(
            "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy"
        )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


def schedule_from(args: argparse.Namespace) -> ScheduleConfig:
    """The scheduling policy of `add_model_options`."""
    names = [field.name for field in dataclasses.fields(ScheduleConfig)]
    return ScheduleConfig(**{name: getattr(args, name) for name in names})


def comparison_from(args: argparse.Namespace, **more: Any) -> Comparison:
    """The settings of a comparison from both sets of options, and what is given by name."""
    names = (
        "rejection_sample_method", "sps_table", "confidence_sts", "max_new_tokens", "top_k",
        "top_p", "min_p", "seed",
    )  # fmt: skip
    values = {name: getattr(args, name) for name in names}
    if "temperature" in args:
        values["temperature"] = args.temperature
    return Comparison(schedule=schedule_from(args), **values | more)


def pair_from(args: argparse.Namespace) -> Pair:
    """The models of `add_model_options`; settings that contradict each other are refused first.

    Of several processes, the first alone prints.
    """
    if not join_hosts(args.coordinator, args.num_processes, args.process_id):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until it ends)
    schedule = schedule_from(args)
    schedule.check_lossless(args.rejection_sample_method)
    if args.kv_cache == "paged" and args.draft not in ("auto", "none"):
        schedule.check_paged()
    mesh = parse_mesh(args.mesh) if args.mesh else None
    return load_pair(
        args.model, args.draft, dtype=args.dtype, experts=args.experts, kv_cache=args.kv_cache,
        mesh=mesh,
    )  # fmt: skip


def say(message: str) -> None:
    """A line of progress on standard error."""
    print(message, file=sys.stderr, flush=True)


def run_main(main: Callable[[], None]) -> None:
    """Runs a front end; what the user can mend is one line on standard error, exit code 2."""
    keep_freed_memory()
    try:
        main()
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
