"""Fits a draft's confidence head to rounds decoded as the server will decode; the rest stays.

The head learns on the text of the training files, and temperatures cannot mend what it takes for
likely on other text. Prompts are decoded here with the whole block verified, at the temperature
of the server; what the head read in every round, and how likely the drafts were to be accepted
there, give a logistic regression that starts at the head as it is. How strongly it is held there
is chosen on prompts that take no part in it. Use prompts that nothing is judged by.

    python tools/refit_confidence.py --draft DIR --prompts FILE.jsonl --temperature 1 --out NEW_DIR
"""

import argparse
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import Traces
from dspark_jax.checkpoint.safetensors import TensorReader, save_tensors
from dspark_jax.cli import add_model_options, add_sampling_options, pair_from, run_main, say
from dspark_jax.engine.load import Pair
from dspark_jax.engine.requests import Sequence
from dspark_jax.train.refit import Head, HeadRows, choose_pull, fit_head, replay_rounds
from dspark_jax.types import Params, SamplingParams
from tools.calibrate import collect

WEIGHT, BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/refit_confidence.py", description=__doc__)
    parser.add_argument(
        "--prompts", action="append", required=True, metavar="FILE.jsonl",
        help="lines with `turns`; repeatable",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, metavar="N", help="first N of every file")
    parser.add_argument("--batch", type=int, default=4, metavar="R", help="requests at once")
    parser.add_argument(
        "--held-out-share", type=float, default=0.25, metavar="S",
        help="of the prompts, to choose the pull by (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="must not exist")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot work, before anything is decoded."""
    if not Path(args.draft).is_dir():
        raise ValueError(f"--draft={args.draft} must be the directory of the draft to refit.")
    if WEIGHT not in TensorReader(args.draft).names():
        raise ValueError(f"draft {args.draft} has no tensor {WEIGHT}; there is no head to refit.")
    if args.out.exists():
        raise ValueError(f"--out={args.out} exists; choose a new directory.")
    if args.rejection_sample_method != "standard":
        raise ValueError(
            f"--rejection-sample-method={args.rejection_sample_method}: the odds of acceptance "
            "are those of 'standard'; refit with it, and calibrate with the other."
        )
    if args.mesh:
        raise ValueError(f"--mesh={args.mesh}: rounds are replayed on one device; leave it out.")
    if not 0.0 < args.held_out_share < 1.0:
        raise ValueError(f"--held-out-share={args.held_out_share} must lie between 0 and 1.")


def head_of(params: Params) -> Head:
    """The head of a loaded draft."""
    head = params["confidence"]
    weight = np.asarray(head["weight"], np.float64)
    return Head(weight=weight, bias=float(np.asarray(head.get("bias", 0.0), np.float64)))


def replay(
    args: argparse.Namespace, pair: Pair, traces: Traces, written: list[Sequence]
) -> HeadRows:
    """What the head read in the rounds."""
    sampling = SamplingParams(
        temperature=jnp.float32([args.temperature]), top_k=jnp.int32([args.top_k]),
        top_p=jnp.float32([args.top_p]), min_p=jnp.float32([args.min_p]), seed=jnp.uint32([0]),
    )  # fmt: skip
    texts = [(s.request.prompt_ids, s.token_ids) for s in written]
    return replay_rounds(pair.draft, pair.target, pair.params, traces, texts, sampling, say)


def table(rows: HeadRows, before: Head, after: Head) -> str:
    """Mean confidence and odds by position, and the log loss, for people."""
    lines = ["position  drafts reached  accepted  confidence before  after  log loss before  after"]
    positions = [rows.where(rows.position == k) for k in range(int(rows.position.max()) + 1)]
    for name, part in (*((f"{k}", p) for k, p in enumerate(positions, 1)), ("all", rows)):
        if len(part.chance) == 0:
            continue
        means = [np.mean(1 / (1 + np.exp(-head.logits(part)))) for head in (before, after)]
        losses = [head.log_loss(part) for head in (before, after)]
        lines.append(
            f"{name:>8s} {len(part.chance):15d} {part.chance.mean():9.3f} {means[0]:18.3f} "
            f"{means[1]:6.3f} {losses[0]:16.4f} {losses[1]:6.4f}"
        )
    return "\n".join(lines)


def write_draft(source: Path, out: Path, head: Head) -> Head:
    """Writes a copy of a draft with another confidence head.

    Args:
      source: DeepSpec layout.
      out: directory to make.
      head: the new weights.

    Returns:
      The head as it is stored, rounded to the type of the old one.
    """
    reader = TensorReader(source)
    tensors = {name: reader.read(name) for name in sorted(reader.names())}
    old = tensors[WEIGHT]
    tensors[WEIGHT] = head.weight.reshape(old.shape).astype(old.dtype)
    tensors[BIAS] = np.array([head.bias]).astype(old.dtype)
    out.mkdir(parents=True)
    shutil.copy(source / "config.json", out)
    save_tensors(out / "model.safetensors", tensors)
    weight = tensors[WEIGHT].reshape(-1).astype(np.float64)
    return Head(weight=weight, bias=float(tensors[BIAS].astype(np.float64)[0]))


def main() -> None:
    """Decodes, replays, fits and writes."""
    args = parser().parse_args()
    check(args)
    pair = pair_from(args)
    traces, written = collect(args, pair)
    fit, held_out = traces.split(1.0 - args.held_out_share, args.seed)
    rows = replay(args, pair, traces, written)
    before = head_of(pair.params.draft)
    apart = rows.where(np.isin(rows.prompt, held_out.prompt))
    pull, chosen = choose_pull(rows.where(np.isin(rows.prompt, fit.prompt)), apart, before)
    stored = write_draft(Path(args.draft), args.out, fit_head(rows, before, pull))
    print(f"{len(traces.prompt)} rounds of {len(written)} prompts. Held out, fitted without them:")
    print(table(apart, before, chosen))
    print(json.dumps({"pull": pull, "bias": [round(h.bias, 4) for h in (before, stored)]}))


if __name__ == "__main__":
    run_main(main)
