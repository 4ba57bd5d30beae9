"""`python -m dspark_jax.eval`: how good a draft is, per prompt set, at temperature 0 and 1.

Every set is decoded plainly and with the draft in the same process; see `dspark_jax.eval.compare`
for what the figures mean.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from dspark_jax.cli import (
    add_model_options,
    add_sampling_options,
    comparison_from,
    pair_from,
    run_main,
    say,
)
from dspark_jax.engine.load import Pair
from dspark_jax.eval.compare import Comparison, Contest, chat_requests, percent, read_prompts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python -m dspark_jax.eval", description=__doc__)
    parser.add_argument(
        "--prompts", action="append", required=True, metavar="FILE.jsonl",
        help="a prompt set: lines with `turns`; may be repeated",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, metavar="N", help="first N of every set")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T",
        help="one pass over the sets each (default: 0 1)",
    )  # fmt: skip
    parser.add_argument("--out", default="eval", metavar="DIR", help="results.json, acceptance.png")
    add_model_options(parser)
    add_sampling_options(parser, temperature=False)
    return parser


def evaluate(
    pair: Pair, sets: dict[str, list[str]], options: Comparison, temperatures: list[float]
) -> dict[str, dict]:
    """Runs every set at every temperature.

    Args:
      pair: the models, with a draft.
      sets: name -> user messages.
      options: what is held equal; its temperature is replaced.
      temperatures: passes over the sets.

    Returns:
      "SET T=t" -> figures of `Contest.figures`.
    """
    requests = {name: chat_requests(pair, prompts, options) for name, prompts in sets.items()}
    longest = max(len(r.prompt_ids) for batch in requests.values() for r in batch)
    contest = Contest(pair, options, longest + options.max_new_tokens, say)
    results = {}
    for temperature in temperatures:
        for name, batch in requests.items():
            contest.restart(dataclasses.replace(options, temperature=temperature))
            batch = [dataclasses.replace(r, temperature=temperature) for r in batch]
            contest.run(batch, lambda message, name=name: say(f"{name}: {message}"))
            results[f"{name} T={temperature:g}"] = contest.figures()
    return results


def table(results: dict[str, dict]) -> str:
    """Figures for people, one line per set and temperature, then their means."""
    lines = [
        f"{'set':24s} {'prompts':>7s} {'equal':>6s} {'tau':>6s} {'verify':>7s} {'speed':>6s}  "
        "prefix survival | conditional"
    ]
    for name, f in results.items():
        equal = {True: "yes", False: "NO", None: "-"}[f["tokens_equal"]]
        lines.append(
            f"{name:24s} {f['prompts']:7d} {equal:>6s} {f['tau']:6.3f} {f['verify_rate']:7.3f} "
            f"{f['speedup']:6.3f}  {percent(f['accept_per_position'])} | "
            f"{percent(f['accept_per_position_conditional'])}"
        )
    for temperature in sorted({f["temperature"] for f in results.values()}):
        part = [f for f in results.values() if f["temperature"] == temperature]
        tau = sum(f["tau"] for f in part) / len(part)
        speed = sum(f["speedup"] for f in part) / len(part)
        lines.append(f"{f'mean T={temperature:g}':24s} {'':7s} {'':6s} {tau:6.3f} {'':7s} "
                     f"{speed:6.3f}")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Evaluates and writes results.json and acceptance.png."""
    args = parser().parse_args()
    sets = {Path(p).stem: read_prompts(p, args.num_prompts) for p in args.prompts}
    options = comparison_from(args, temperature=0.0)
    pair = pair_from(args)
    if pair.draft is None:
        raise ValueError(f"--draft={args.draft} gives no draft to evaluate; name a directory.")
    results = evaluate(pair, sets, options, args.temperatures)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    from dspark_jax.eval.figures import acceptance_by_position  # needs the `eval` extra

    acceptance_by_position(results, out / "acceptance.png")
    print(table(results))
    say(f"wrote {out / 'results.json'} and {out / 'acceptance.png'}")


if __name__ == "__main__":
    run_main(main)
