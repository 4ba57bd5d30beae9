"""`python -m dspark_jax.generate`: a prompt in, the target's text and the draft's figures out."""

import argparse
import json
import sys
import time

from dspark_jax.cli import (
    add_model_options,
    add_sampling_options,
    pair_from,
    run_main,
    say,
    schedule_from,
)
from dspark_jax.engine.core import Engine
from dspark_jax.engine.profile import prepare_schedule
from dspark_jax.engine.requests import Request


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python -m dspark_jax.generate", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the user's turn; standard input if absent")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without chat template"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def main() -> None:
    """Generates once and prints."""
    args = parser().parse_args()
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    pair = pair_from(args)
    if args.raw or not pair.tokenizer.has_chat_template:
        ids = pair.tokenizer.encode(prompt)
    else:
        system = [{"role": "system", "content": args.system}] if args.system else []
        ids = pair.tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
    request = Request(
        prompt_ids=tuple(ids), max_tokens=args.max_new_tokens, temperature=args.temperature,
        top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        stop_ids=pair.stop_ids,
    )  # fmt: skip
    engine = Engine(
        pair.decoder(schedule_from(args), args.rejection_sample_method), pair.params,
        slots=pair.groups, capacity=len(ids) + args.max_new_tokens, dtype=pair.dtype,
        tokenizer=pair.tokenizer, progress=say, mesh=pair.mesh,
    )  # fmt: skip
    prepare_schedule(
        engine, pair, sps_table=args.sps_table, confidence_sts=args.confidence_sts, progress=say
    )
    sequence = engine.submit(request)
    begin = time.perf_counter()
    while engine.has_work:
        for emission in engine.step():
            if not args.json:
                print(emission.text, end="", flush=True)
    statistics = {
        "prompt_tokens": len(ids),
        "completion_tokens": len(sequence.token_ids),
        "finish_reason": sequence.finish_reason.value,
        "rounds": sequence.rounds,
        "tau": len(sequence.token_ids) / sequence.rounds,
        "num_draft_tokens": sequence.drafted,
        "num_accepted_tokens": sequence.accepted,
        "seconds": time.perf_counter() - begin,
        "tokens_per_s": len(sequence.token_ids) / engine.counters.round_s,
    }
    if args.json:
        print(json.dumps({"text": sequence.text, "token_ids": sequence.token_ids, **statistics}))
        return
    print()
    say(
        f"{statistics['completion_tokens']} tokens in {statistics['rounds']} rounds "
        f"(tau {statistics['tau']:.2f}), {statistics['tokens_per_s']:.1f} tokens/s decoding"
    )


if __name__ == "__main__":
    run_main(main)
