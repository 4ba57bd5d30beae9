"""`python -m dspark_jax.bench`: plain decoding against DSpark on the same prompts."""

import argparse
import json

from dspark_jax.cli import (
    add_model_options,
    add_sampling_options,
    comparison_from,
    pair_from,
    run_main,
    say,
)
from dspark_jax.eval.compare import compare, percent, read_prompts

BUILT_IN_PROMPTS = (
    "Explain why the sky is blue.",
    "Write a Python function that checks whether a word is a palindrome.",
    "What is 17 times 23? Show the steps.",
    "List three tips for better sleep.",
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python -m dspark_jax.bench", description=__doc__)
    parser.add_argument(
        "--prompts", action="append", metavar="FILE.jsonl",
        help="lines with `turns` (the first is used); may be repeated; default: a few built in",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, metavar="N", help="first N of every file")
    parser.add_argument("--batch", type=int, default=1, metavar="R", help="requests at once")
    parser.add_argument("--max-model-len", type=int, metavar="C", help="tokens per request")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def table(figures: dict) -> str:
    """The figures for people."""
    equal = {True: "yes", False: "NO", None: "not comparable"}[figures["tokens_equal"]]
    tau = figures["tau"]
    rows = [
        ("prompts", figures["prompts"]),
        ("tokens equal to plain", equal),
        ("tau", "-" if tau is None else f"{tau:.3f}"),
        ("accepted at position", percent(figures["accept_per_position"])),
        ("  given the earlier ones", percent(figures["accept_per_position_conditional"])),
        ("tokens/s plain", f"{figures['plain_tokens_per_s']:.1f}"),
        ("tokens/s with draft", f"{figures['tokens_per_s']:.1f}"),
        ("speed ratio", f"{figures['speedup']:.3f}"),
        ("ms per plain step, round", f"{figures['plain_round_ms']:.1f}, {figures['round_ms']:.1f}"),
        ("machine", figures["machine"]),
    ]
    return "\n".join(f"{name:26s} {value}" for name, value in rows)


def main() -> None:
    """Runs the benchmark and prints a table or JSON."""
    args = parser().parse_args()
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError(f"--num-prompts={args.num_prompts} must be at least 1.")
    options = comparison_from(args, batch=args.batch, max_model_len=args.max_model_len)
    prompts = list(BUILT_IN_PROMPTS[: args.num_prompts])
    if args.prompts:
        prompts = [p for path in args.prompts for p in read_prompts(path, args.num_prompts)]
    figures = compare(pair_from(args), prompts, options, say) | {"draft": args.draft}
    print(json.dumps(figures) if args.json else table(figures))


if __name__ == "__main__":
    run_main(main)
