"""Throughput of every scheduling policy against plain decoding and every fixed draft length.

All contenders decode the same prompts from the same prefilled slots, in turns, in one process, at
each batch size. --num-prompts decodes several batches one after another; how these differ gives the
standard errors. Speeds come from a table of tools/profile_sps.py for this machine, temperatures of
the confidences from tools/calibrate.py.

    python tools/profile_sps.py --slots 16 --out sps.json
    python tools/compare_policies.py --prompts FILE.jsonl --sps-table sps.json --batch 1 4 16
"""

import argparse
import dataclasses
import json
from pathlib import Path

from dspark_jax.calibrate import Calibration, load_calibration
from dspark_jax.checkpoint.demo import DEMO_TARGET
from dspark_jax.cli import add_sampling_options, run_main, say
from dspark_jax.engine.load import DTYPES, load_pair
from dspark_jax.engine.profile import sps_key
from dspark_jax.eval.compare import Comparison, chat_requests, read_prompts
from dspark_jax.eval.policies import Outcome, chosen, contenders, race, speed_ratio
from dspark_jax.eval.timing import machine
from dspark_jax.sps import load_sps_table


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/compare_policies.py", description=__doc__)
    parser.add_argument(
        "--prompts", action="append", required=True, metavar="FILE.jsonl",
        help="lines with `turns`; may be repeated, files take turns",
    )  # fmt: skip
    parser.add_argument("--sps-table", required=True, metavar="FILE")
    parser.add_argument("--confidence-sts", metavar="FILE")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], metavar="R")
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME",
        help="only these of 'none', 'full', 'fixed 1' and so on, and the policies; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", type=int, default=0, metavar="N",
        help="per batch size, at least the batch; more make chance smaller",
    )  # fmt: skip
    parser.add_argument(
        "--confidence-threshold", type=float, default=0.5, metavar="C", help="of 'threshold'"
    )
    parser.add_argument(
        "--min-predicted-gain", type=float, default=0.0, metavar="G",
        help="of the policies that read speeds",
    )  # fmt: skip
    parser.add_argument("--model", default=DEMO_TARGET, metavar="NAME|DIR")
    parser.add_argument("--draft", default="auto", metavar="NAME|DIR")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--max-prompt-len", type=int, default=256, metavar="P", help="tokens")
    parser.add_argument("--out", default="policies.json", metavar="FILE")
    add_sampling_options(parser)
    return parser


def table(rows: int, outcomes: list[Outcome]) -> str:
    """One batch size for people."""
    fixed = [o for o in outcomes if o.name == "full" or o.name.startswith("fixed")]
    unscheduled = [o for o in outcomes if o.name in ("none", "full")]
    lines = [
        f"{rows} requests  tokens/s  of better(none, full)    of best fixed  tau  rows/request  "
        "rounds without drafts"
    ]
    for o in outcomes:
        lines.append(
            f"  {o.name:11s} {o.tokens_per_s:8.1f} {share(o, unscheduled):>23s} "
            f"{share(o, fixed):>16s} {o.tokens / o.rounds / rows:4.2f} "
            f"{o.rows / o.rounds / rows:13.2f} {o.bypassed / o.rounds:22.1%}"
        )
    return "\n".join(lines)


def share(outcome: Outcome, others: list[Outcome]) -> str:
    """Speed in units of the fastest of the others, and its standard error over heats."""
    if not others:
        return "-"
    ratio, error = speed_ratio(outcome, max(others, key=lambda o: o.tokens_per_s))
    return f"{ratio:.3f} +- {error:.3f}"


def main() -> None:
    """Runs all batch sizes, prints tables and writes JSON."""
    args = parser().parse_args()
    pair = load_pair(args.model, args.draft, dtype=args.dtype)
    options = Comparison(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        max_model_len=args.max_prompt_len + args.max_new_tokens,
    )  # fmt: skip
    files = [read_prompts(path) for path in args.prompts]
    mixed = [file[i] for i in range(max(map(len, files))) for file in files if i < len(file)]
    requests = chat_requests(pair, mixed, options)
    wanted = max(args.num_prompts, *args.batch)
    if len(requests) < wanted:
        raise ValueError(
            f"{len(requests)} prompts of at most {args.max_prompt_len} tokens, but {wanted} are "
            "wanted. Give more --prompts, a larger --max-prompt-len, or lower --num-prompts."
        )
    sps = load_sps_table(args.sps_table)
    sps.check(sps_key(pair), say)
    drafts = pair.draft.config.num_drafts if pair.draft else 0
    calibration = Calibration(temperatures=(1.0,) * drafts)
    if args.confidence_sts is not None:
        calibration = load_calibration(args.confidence_sts, drafts)
    field = contenders(
        drafts, threshold=args.confidence_threshold, min_predicted_gain=args.min_predicted_gain
    )
    if args.contenders is not None:
        field = chosen(field, args.contenders)
    results = {}
    for rows in args.batch:
        starts = range(0, max(args.num_prompts, rows) - rows + 1, rows)
        heats = [requests[start : start + rows] for start in starts]
        outcomes = race(
            pair, field, heats, tokens=args.max_new_tokens, sps=sps, calibration=calibration,
            progress=say,
        )  # fmt: skip
        results[rows] = [dataclasses.asdict(o) for o in outcomes]
        print(table(rows, outcomes), flush=True)
    document = {"machine": machine(), "options": vars(args), "batches": results}
    Path(args.out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    say(f"wrote {args.out}")


if __name__ == "__main__":
    run_main(main)
