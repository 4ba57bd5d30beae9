"""Replays recorded rounds of a pair under load, for every policy and any SPS table.

    python tools/calibrate.py --prompts FILE.jsonl --policy presampled --save-traces rounds.npz
    python tools/simulate.py --traces rounds.npz --calibration sts/sts.json --table v7x sps.json

Prints each policy's share of the oracle's throughput by number of concurrent requests, and writes
figures: acceptance rate by threshold, throughput, and rows per request, by concurrency.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from dspark_jax.calibrate import Calibration, Traces, load_calibration, load_traces
from dspark_jax.cli import run_main, say
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.simulate import (
    THRESHOLDS,
    Outcome,
    acceptance_by_threshold,
    example_table,
    oracle,
    outcome,
    schedule,
    walk_traces,
)
from dspark_jax.sps import SpsTable, load_sps_table

LOSSLESS = ("full", "early_stop", "lagged", "presampled")
UNLESS_COUPLED = "global"  # biased with the other rules; here to compare


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/simulate.py", description=__doc__)
    parser.add_argument("--traces", required=True, metavar="FILE.npz", help="recorded rounds")
    parser.add_argument("--calibration", metavar="FILE.json", help="temperatures")
    parser.add_argument(
        "--table", nargs="+", default=["smooth", "staircase", "v7x"], metavar="NAME|FILE",
        help="SPS tables; smooth and staircase are made up, v7x is published",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[2**i for i in range(10)], metavar="R"
    )
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="per request")
    parser.add_argument("--lag", type=int, default=2, metavar="N", help="of the policy lagged")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", default="simulation", metavar="DIR")
    return parser


def simulate_table(
    traces: Traces,
    calibration: Calibration | None,
    table: SpsTable,
    loads: Sequence[int],
    *,
    rounds: int,
    lag: int,
    seed: int,
) -> dict[int, dict[str, Outcome]]:
    """All policies at all loads the table reaches.

    Args:
      traces: recorded rounds.
      calibration: temperatures, or None.
      table: SPS.
      loads: numbers of concurrent requests.
      rounds: per request.
      lag: of the policy lagged.
      seed: of the walks.

    Returns:
      Load -> policy -> outcome; "oracle" is the best of a search and of the lossless policies.
    """
    results = {}
    policies = [p for p in LOSSLESS if p != "presampled" or traces.presampled_logits is not None]
    for requests in loads:
        try:
            steps = table.steps_per_s(requests, traces.num_drafts)
        except ValueError as error:
            say(f"{requests} requests left out: {error}")
            continue
        walk = walk_traces(traces, requests, rounds, lag=lag, calibration=calibration, seed=seed)
        row = {
            policy: outcome(walk, schedule(walk, steps, ScheduleConfig(policy=policy)), steps)
            for policy in (*policies, UNLESS_COUPLED)
        }
        searched = {name: found for name, (_, found) in oracle(walk, steps).items()}
        rivals = [searched["oracle"], *(row[policy] for policy in policies)]
        searched["oracle"] = max(rivals, key=lambda found: found.tokens_per_s)
        results[requests] = row | searched
    return results


def shares(results: dict[int, dict[str, Outcome]]) -> str:
    """Throughput as a share of the oracle's, for people."""
    names = [name for name in next(iter(results.values())) if name != "oracle"]
    lines = ["requests  oracle tok/s  " + "  ".join(f"{name:>12s}" for name in names)]
    for requests, row in results.items():
        best = row["oracle"].tokens_per_s
        cells = "  ".join(f"{row[name].tokens_per_s / best:12.3f}" for name in names)
        lines.append(f"{requests:8d}  {best:12.1f}  {cells}")
    return "\n".join(lines)


def draw(name: str, results: dict[int, dict[str, Outcome]], out: Path) -> None:
    """The two figures by concurrency."""
    from dspark_jax.eval.scheduling_figures import lines  # needs the `eval` extra

    loads = list(results)
    for field, ylabel in (
        ("tokens_per_s", "tokens/s"),
        ("verify_tokens_per_request", "rows per request and round"),
    ):
        series = {
            policy: [getattr(results[r][policy], field) for r in loads]
            for policy in results[loads[0]]
        }
        lines(
            loads, series, out / f"{field}_{name}.png", title=f"SPS table: {name}",
            xlabel="concurrent requests", ylabel=ylabel, log_x=True,
        )  # fmt: skip


def main() -> None:
    """Simulates, prints and draws."""
    args = parser().parse_args()
    if min(args.requests) < 1 or args.rounds < 1 or args.lag < 1:
        raise ValueError("--requests, --rounds and --lag must be at least 1.")
    traces = load_traces(args.traces)
    calibration = None
    if args.calibration:
        calibration = load_calibration(args.calibration, traces.num_drafts)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {"source": traces.source, "rounds": args.rounds}
    for given in args.table:
        table = load_sps_table(given) if given.endswith(".json") else example_table(given)
        name = Path(given).stem
        results = simulate_table(
            traces, calibration, table, sorted(set(args.requests)), rounds=args.rounds,
            lag=args.lag, seed=args.seed,
        )  # fmt: skip
        if not results:
            continue
        print(f"{name} ({table.source}): share of the oracle's throughput\n{shares(results)}\n")
        draw(name, results, out)
        report[name] = {
            r: {policy: dataclasses.asdict(found) for policy, found in row.items()}
            for r, row in results.items()
        }
    from dspark_jax.eval.scheduling_figures import lines

    walk = walk_traces(traces, 8, len(traces.prompt), calibration=calibration, seed=args.seed)
    rates = acceptance_by_threshold(walk, THRESHOLDS)
    lines(
        THRESHOLDS, {"policy threshold": rates}, out / "acceptance_by_threshold.png",
        title="Acceptance by confidence threshold", xlabel="threshold",
        ylabel="accepted / verified",
    )  # fmt: skip
    report["acceptance_by_threshold"] = dict(zip(map(str, THRESHOLDS), rates, strict=True))
    text = json.dumps(report, indent=1, allow_nan=False)
    (out / "simulation.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
