"""`python -m dspark_jax.serve`: an OpenAI-compatible server for one target and its draft.

The socket listens at once and `/health` tells how loading goes; JAX and the models are loaded
by the engine's thread.
"""

import argparse
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dspark_jax.host_memory import keep_freed_memory

if TYPE_CHECKING:
    from dspark_jax.serve.driver import Load, Served

DEMO_TARGET = "smollm2-135m-instruct"

# The choices of the modules that define them, which take longer to import than a server may take
# to answer.
DTYPES = ("bfloat16", "float32")
KV_CACHES = ("contiguous", "paged")
CONFIDENCE_SOURCES = ("head", "online")
PLANNERS = ("device", "host")
POLICIES = ("early_stop", "full", "global", "lagged", "presampled", "threshold")
REJECTION_SAMPLE_METHODS = ("standard", "block", "coupled")
THRESHOLD_KINDS = ("per_position", "cumulative")

USER_ERROR = 2  # exit code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m dspark_jax.serve",
        description="OpenAI-compatible server: a target, and a draft that makes it faster.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=DEMO_TARGET, metavar="NAME|DIR", help="target")
    add(
        "--draft", default="auto", metavar="NAME|DIR",
        help="draft directory, 'auto' (the one shipped for this model), 'random' (untrained) or "
        "'none'",
    )  # fmt: skip
    add("--served-model-name", metavar="NAME", help="name in the API instead of the model's own")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_between(0, 65535), default=8000, help="port to listen on; 0 picks one")
    add("--slots", type=_between(1, 4096), default=4, metavar="N", help="requests run together")
    add(
        "--max-waiting", type=_between(0, 10**6), default=128, metavar="N",
        help="requests that may wait for a slot; more get HTTP 429",
    )  # fmt: skip
    add(
        "--max-model-len", type=_between(2, 10**7), metavar="N",
        help="tokens of prompt and answer together; by default 2048, or the model's own limit if "
        "that is less",
    )  # fmt: skip
    add("--dtype", default="float32", choices=DTYPES, help="weights and caches")
    add(
        "--experts", choices=("packed", "bfloat16", "float32"),
        help="how a DeepSeek draft holds its routed experts; 'packed' is FP4 or FP8 as stored",
    )  # fmt: skip
    add(
        "--kv-cache", default="contiguous", choices=KV_CACHES,
        help="'paged': the target's in pages, read by JAX's own kernel on a TPU; rounds with "
        "drafts then take --planner host",
    )  # fmt: skip
    add(
        "--mesh", metavar="AXIS=N,..",
        help="devices to spread over, as in data=2,model=4: slots over `data`, heads, MLPs and "
        "vocabulary over `model`, experts over `expert`; default: one device",
    )  # fmt: skip
    _add_process_options(add)
    _add_schedule_options(add)
    add(
        "--rejection-sample-method", default="standard", choices=REJECTION_SAMPLE_METHODS,
        help="'block' accepts more than 'standard'; 'coupled': the text for a seed does not depend "
        "on the draft",
    )  # fmt: skip
    add(
        "--sps-table", metavar="FILE",
        help="steps per second by verified rows, from tools/profile_sps.py; without it, a policy "
        "that needs them has them measured at start-up",
    )  # fmt: skip
    add(
        "--confidence-sts", metavar="FILE",
        help="temperatures for the draft's confidences, from tools/calibrate.py",
    )  # fmt: skip
    return parser


def _add_process_options(add: Callable) -> None:
    add(
        "--coordinator", default=os.environ.get("DSPARK_COORDINATOR"), metavar="HOST:PORT|auto",
        help="process 0 of several that share a mesh; 'auto' where the cluster knows it (TPU pods, "
        "GKE, Slurm)",
    )  # fmt: skip
    add(
        "--num-processes", type=int, default=os.environ.get("DSPARK_NUM_PROCESSES"), metavar="N",
        help="how many processes there are; not with --coordinator auto",
    )  # fmt: skip
    add(
        "--process-id", type=int, default=os.environ.get("DSPARK_PROCESS_ID"), metavar="I",
        help="which of them this is, from 0; not with --coordinator auto",
    )  # fmt: skip


def _add_schedule_options(add: Callable) -> None:
    add("--policy", default="full", choices=POLICIES, help="how many drafts to verify")
    add(
        "--confidence-threshold", type=float, default=0.0, metavar="C",
        help="policy 'threshold' stops before the first draft below it",
    )  # fmt: skip
    add(
        "--threshold-kind", default="per_position", choices=THRESHOLD_KINDS,
        help="compare each position's confidence, or the survival so far",
    )  # fmt: skip
    add(
        "--lag", type=_between(1, 64), default=2, metavar="N",
        help="policy 'lagged' plans by the confidences of so many rounds ago",
    )  # fmt: skip
    add(
        "--min-verify-len", type=_between(0, 10**6), default=0, metavar="N",
        help="drafts of each request verified whatever their confidence",
    )  # fmt: skip
    add(
        "--max-verify-len", type=_between(0, 10**6), metavar="N",
        help="most drafts of a request verified",
    )  # fmt: skip
    add(
        "--min-predicted-gain", type=float, metavar="G",
        help="draft nothing in rounds where drafts promise less gain; 0.05 is 5 %%",
    )  # fmt: skip
    add(
        "--confidence-source", default="head", choices=CONFIDENCE_SOURCES,
        help="'online': from what was accepted so far, for drafts without a confidence head",
    )  # fmt: skip
    add(
        "--probe-every", type=_between(0, 10**6), default=0, metavar="N",
        help="verify every draft in one round of N, to see what trimming costs; 0 is never",
    )  # fmt: skip
    add(
        "--planner", default="device", choices=PLANNERS,
        help="'host': for policy 'lagged', the host chooses the rows of a round and starts it "
        "before it has seen the last one",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until told to stop.

    Args:
      arguments: the command line; None takes the process's.

    Returns:
      The exit code: 0 after SIGINT or SIGTERM, 2 if the user can mend it, 1 otherwise.
    """
    args = parser().parse_args(arguments)
    keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        if args.coordinator is not None and not _leads(args):
            return _follow(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    try:
        from dspark_jax.serve.run import run_server
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is missing; pip install 'dspark-jax[serve]'", file=sys.stderr)
        return USER_ERROR
    try:
        listener = _listen(args.host, args.port)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return run_server(listener, _loader(args), max_waiting=args.max_waiting)


def _loader(args: argparse.Namespace) -> "Load":
    """What the engine's thread calls; the heavy imports happen there."""
    fields = _load_fields(args)

    def load(progress: Callable[[str], None]) -> "Served":
        from dspark_jax.serve.loading import LoadOptions, load_served

        return load_served(LoadOptions(**fields), progress)

    return load


def _load_fields(args: argparse.Namespace) -> dict:
    """The options that say what to serve, without those that say where."""
    elsewhere = ("host", "port", "max_waiting", "coordinator", "num_processes", "process_id")
    return {name: value for name, value in vars(args).items() if name not in elsewhere}


def _leads(args: argparse.Namespace) -> bool:
    """Joins the other processes; is this the one that takes requests?"""
    from dspark_jax.engine.processes import join_hosts

    return join_hosts(args.coordinator, args.num_processes, args.process_id)


def _follow(args: argparse.Namespace) -> int:
    """Runs the engine of a process that takes no requests, until the leading one stops."""
    from dspark_jax.serve.loading import LoadOptions, follow_served

    def tell(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    follow_served(LoadOptions(**_load_fields(args)), tell)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                f"port {port} on {host} is in use; choose another with --port."
            ) from error
        raise OSError(f"cannot listen on {host} port {port}: {error}.") from error


def _between(least: int, most: int) -> Callable[[str], int]:
    """A type for argparse: an integer within limits."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r}; expected a whole number between {least} and {most}"
            )
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
