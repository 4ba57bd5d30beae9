"""Times the rounds of a pair on this device and writes an SPS table for `--sps-table`.

Every program is timed over numbers of requests (powers of two up to --slots), verified rows and
context lengths; draft, schedule and acceptance are in the time. With --modelled, the programs are
compiled here and costed with the peaks of another chip instead: a model, marked as such.

    python tools/profile_sps.py --slots 8 --context 64 256 --out sps.json
"""

import argparse

from dspark_jax.checkpoint.demo import DEMO_TARGET
from dspark_jax.chips import CHIPS
from dspark_jax.cli import run_main, say
from dspark_jax.engine.core import Engine
from dspark_jax.engine.load import DTYPES, load_pair
from dspark_jax.engine.profile import measure_table, modelled_table, profiled_points, sps_key
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sharding import parse_mesh
from dspark_jax.sps import SpsTable

# Programs with every bucket, and with rounds that draft nothing.
PROFILED = ScheduleConfig(
    policy="early_stop", confidence_source="online", min_predicted_gain=0.0
)  # with or without a confidence head


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/profile_sps.py", description=__doc__)
    parser.add_argument("--model", default=DEMO_TARGET, metavar="NAME|DIR")
    parser.add_argument("--draft", default="auto", metavar="NAME|DIR")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--mesh", metavar="AXIS=N,..", help="as for the server that will use it")
    parser.add_argument("--slots", type=int, default=4, metavar="N", help="most requests at once")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[256], metavar="C", help="tokens of context"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T",
        help="of the requests; 0 leaves out what sampling costs",
    )  # fmt: skip
    parser.add_argument("--modelled", choices=sorted(CHIPS), help="do not time; use its peaks")
    parser.add_argument("--out", default="sps.json", metavar="FILE")
    return parser


def summary(table: SpsTable) -> str:
    """The table for people: milliseconds by requests and rows."""
    lines = [f"{table.source} on {table.key.device}: {table.key.model}, draft {table.key.draft}"]
    for curve in table.curves:
        points = zip(curve.verify_tokens, curve.seconds, strict=True)
        times = "  ".join(f"{tokens}: {1e3 * seconds:.2f}" for tokens, seconds in points)
        if curve.undrafted_seconds is not None:
            times = f"undrafted: {1e3 * curve.undrafted_seconds:.2f}  {times}"
        lines.append(f"context {curve.context_len}, {curve.requests} requests, ms by rows  {times}")
    return "\n".join(lines)


def main() -> None:
    """Profiles and writes the table."""
    args = parser().parse_args()
    if args.slots < 1 or min(args.context) < 1:
        raise ValueError(f"--slots={args.slots} and --context={args.context} must be 1 or more.")
    if args.mesh and args.modelled:
        raise ValueError("--modelled costs one device; tools/aot.py costs a mesh.")
    mesh = parse_mesh(args.mesh) if args.mesh else None
    pair = load_pair(args.model, args.draft, dtype=args.dtype, mesh=mesh)
    if pair.draft is None:
        raise ValueError(f"--draft={args.draft} gives no draft; a round needs one.")
    if args.modelled:
        points = profiled_points(args.slots, pair.draft.config.num_drafts)
        table = modelled_table(pair, points, max(args.context), CHIPS[args.modelled], say)
    else:
        engine = Engine(
            pair.decoder(PROFILED), pair.params, slots=args.slots,
            capacity=max(args.context) + pair.draft.config.num_drafts + 2, dtype=pair.dtype,
            progress=say, mesh=pair.mesh,
        )  # fmt: skip
        table = measure_table(engine, sps_key(pair), args.context, say, args.temperature)
        if table.is_flat:
            say("warning: no number of rows costs more; this table will be refused. Profile again.")
    table.save(args.out)
    print(summary(table))


if __name__ == "__main__":
    run_main(main)
