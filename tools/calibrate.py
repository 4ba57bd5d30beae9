"""Fits Sequential Temperature Scaling for a draft's confidences, and says how good they are.

Prompts are decoded with the whole block verified, at the temperature the server will use. Half of
the prompts fit the temperatures, the other half judge them: ECE, Brier score and AUC of the
predicted survival by position, before and after, and a reliability diagram.

    python tools/calibrate.py --prompts FILE.jsonl --temperature 1 --out sts
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from dspark_jax.calibrate import Calibration, Traces, fit_temperatures, judge, load_traces
from dspark_jax.cli import (
    add_model_options,
    add_sampling_options,
    comparison_from,
    pair_from,
    run_main,
    say,
)
from dspark_jax.engine.load import Pair
from dspark_jax.engine.record import RecordingEngine
from dspark_jax.engine.requests import Sequence
from dspark_jax.eval.compare import chat_requests, read_prompts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/calibrate.py", description=__doc__)
    parser.add_argument(
        "--prompts", action="append", metavar="FILE.jsonl", help="lines with `turns`; repeatable"
    )
    parser.add_argument("--num-prompts", type=int, metavar="N", help="first N of every file")
    parser.add_argument("--batch", type=int, default=4, metavar="R", help="requests at once")
    parser.add_argument("--fit-share", type=float, default=0.5, metavar="S", help="of the prompts")
    parser.add_argument("--load-traces", metavar="FILE.npz", help="use these rounds, decode none")
    parser.add_argument("--save-traces", metavar="FILE.npz", help="keep the rounds")
    parser.add_argument("--out", default="sts", metavar="DIR", help="sts.json, reliability.png")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def collect(args: argparse.Namespace, pair: Pair) -> tuple[Traces, list[Sequence]]:
    """Decodes the prompts and returns their rounds, and what was written, by prompt."""
    prompts = [p for path in args.prompts for p in read_prompts(path, args.num_prompts)]
    options = comparison_from(args, batch=args.batch)
    schedule = dataclasses.replace(options.schedule, probe_every=1)  # verifies whole blocks
    requests = chat_requests(pair, prompts, options)
    engine = RecordingEngine(
        pair.decoder(schedule, options.rejection_sample_method), pair.params,
        slots=args.batch, capacity=max(len(r.prompt_ids) for r in requests) + args.max_new_tokens,
        dtype=pair.dtype, tokenizer=pair.tokenizer, progress=say, mesh=pair.mesh,
    )  # fmt: skip
    source = {
        "model": pair.name, "draft": args.draft, "temperature": str(args.temperature),
        "rejection_sample_method": args.rejection_sample_method,
        "dataset": ", ".join(Path(path).name for path in args.prompts),
    }  # fmt: skip
    return engine.record(requests, source, say), engine.recorded


def table(before: dict[str, list], after: dict[str, list], temperatures: np.ndarray) -> str:
    """The figures for people, one line per position and one of means."""
    lines = [
        "position  temperature  rounds   ECE before  after  (chance)  Brier before  after  AUC"
    ]
    rows = zip(
        temperatures, after["num_samples"], before["ece"], after["ece"], after["ece_floor"],
        before["brier"], after["brier"], after["auc"], strict=True,
    )  # fmt: skip
    for k, (t, n, e0, e1, floor, b0, b1, a) in enumerate(rows, 1):
        lines.append(
            f"{k:8d} {t:12.2f} {n:7d} {100 * e0:10.2f}% {100 * e1:6.2f}% {100 * floor:7.2f}% "
            f"{b0:13.4f} {b1:7.4f} {a:10.3f}"
        )
    columns = (before["ece"], after["ece"], after["ece_floor"])
    mean = [100 * np.nanmean(column) for column in columns]
    lines.append(f"    mean {' ' * 20} {mean[0]:9.2f}% {mean[1]:6.2f}% {mean[2]:7.2f}%")
    return "\n".join(lines)


def mean_confidence(traces: Traces, temperatures: np.ndarray) -> tuple[float, ...]:
    """By position, over all rounds."""
    confidence = 1 / (1 + np.exp(-traces.confidence_logits / temperatures))
    return tuple(confidence.mean(axis=0).round(4).tolist())


def main() -> None:
    """Collects, fits, judges and writes."""
    args = parser().parse_args()
    if bool(args.prompts) == bool(args.load_traces):
        raise ValueError("give either --prompts to decode or --load-traces to reuse.")
    if not 0.0 < args.fit_share < 1.0:
        raise ValueError(f"--fit-share={args.fit_share} must lie between 0 and 1.")
    if args.load_traces:
        traces = load_traces(args.load_traces)
    else:
        traces, _ = collect(args, pair_from(args))
    if args.save_traces:
        traces.save(args.save_traces)
    fit, held_out = traces.split(args.fit_share, args.seed)
    temperatures = fit_temperatures(fit.confidence_logits, fit.accept_len, fit.verify_len)
    judged = (held_out.confidence_logits, held_out.accept_len, held_out.verify_len)
    before = judge(*judged, np.ones(traces.num_drafts))
    after = judge(*judged, temperatures)
    early: tuple[float, ...] = ()
    if fit.presampled_logits is not None:
        found = fit_temperatures(fit.presampled_logits, fit.accept_len, fit.verify_len)
        early = tuple(found.tolist())
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    Calibration(
        temperatures=tuple(temperatures.tolist()), presampled_temperatures=early,
        neutral_confidence=mean_confidence(fit, temperatures),
        dataset=traces.source.get("dataset", ""), num_samples=len(held_out.prompt),
        ece_before=tuple(before["ece"]), ece_after=tuple(after["ece"]),
    ).save(
        out / "sts.json", held_out_before=before, held_out_after=after, source=traces.source,
        num_prompts={"fit": len(set(fit.prompt)), "held_out": len(set(held_out.prompt))},
    )  # fmt: skip
    from dspark_jax.eval.scheduling_figures import reliability  # needs the `eval` extra

    reliability(held_out, temperatures, out / "reliability.png")
    print(table(before, after, temperatures))
    print(json.dumps({"temperatures": temperatures.round(3).tolist()}))


if __name__ == "__main__":
    run_main(main)
