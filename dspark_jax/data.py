"""`python -m dspark_jax.data generate`: training text written by the target itself.

With prompts, the target answers them. Without, it first writes the user's turn (its chat template
up to that turn, then whatever it finds likely) and then the answer. Output is JSONL in DeepSpec's
form, `{"id", "conversations": [{"role", "content"}, ..]}`, appended as answers finish: a run that
is stopped goes on where it was when started again with the same arguments.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dspark_jax.cli import add_model_options, pair_from, run_main, say, schedule_from
from dspark_jax.engine.core import Engine
from dspark_jax.engine.load import Pair
from dspark_jax.engine.requests import FinishReason, Request, Sequence
from dspark_jax.eval.compare import read_prompts

_HERE = "\ue000"  # a private-use character marks where the user's text goes in the template


@dataclasses.dataclass
class Item:
    """One conversation in the making."""

    number: int
    system: str | None
    user: str | None  # None while the target is writing it
    temperature: float  # of the answer


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python -m dspark_jax.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="write conversations")
    generate.add_argument("--out", required=True, metavar="FILE.jsonl")
    generate.add_argument(
        "--prompts", action="append", metavar="FILE.jsonl",
        help="lines with `turns`; without, the target writes its own prompts",
    )  # fmt: skip
    generate.add_argument("--num", type=int, default=1000, metavar="N", help="conversations")
    generate.add_argument("--max-new-tokens", type=int, default=384, metavar="N")
    generate.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], metavar="T",
        help="drawn from for each answer (self-written prompts are drawn at 1)",
    )  # fmt: skip
    generate.add_argument("--top-p", type=float, default=0.95, metavar="P")
    generate.add_argument("--top-k", type=int, default=64, metavar="K")
    generate.add_argument(
        "--system", action="append", metavar="TEXT", help="system messages to draw from"
    )
    generate.add_argument("--slots", type=int, default=16, metavar="S", help="requests at once")
    generate.add_argument("--seed", type=int, default=0, metavar="N")
    add_model_options(generate)
    return parser


def user_turn_prefix(pair: Pair, system: str | None) -> tuple[str, str]:
    """The chat template before the user's text, and what follows it.

    Args:
      pair: for the template.
      system: the system message; None lets the template choose.

    Returns:
      Text up to the user's turn, and the mark that ends it.

    Raises:
      ValueError: the template does not contain the user's text as it is.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": _HERE})
    text = pair.tokenizer.render_chat(messages, generation_prompt=False)
    before, found, after = text.partition(_HERE)
    if not found or not after.strip():
        raise ValueError(
            "this chat template does not end the user's turn with a mark of its own, so the "
            "target cannot write prompts; give --prompts."
        )
    return before, after.strip()


def done_numbers(path: Path) -> set[int]:
    """Numbers of the conversations already in a file; a torn last line is cut off.

    Args:
      path: the output file, which need not exist.

    Returns:
      The numbers at the end of their ids.

    Raises:
      ValueError: the file holds something else.
    """
    if not path.exists():
        return set()
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        with path.open("r+b") as file:
            file.truncate(len(kept))
    try:
        return {int(json.loads(line)["id"].rpartition("-")[2]) for line in kept.splitlines()}
    except (json.JSONDecodeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} was not written by this command ({error!r}); choose another --out."
        ) from error


class Writer:
    """Keeps the slots full and appends each finished answer.

    Args:
      pair: the models.
      engine: warm.
      args: the parsed command line.
      out: the output file, opened for appending.
    """

    def __init__(self, pair: Pair, engine: Engine, args: argparse.Namespace, out: IO[str]):
        self._pair, self._engine, self._args, self._out = pair, engine, args, out
        self._flying: dict[int, tuple[Item, Sequence]] = {}
        self.written = 0

    def run(self, items: Iterator[Item], total: int) -> None:
        """Runs all items to their end."""
        more = True
        while more or self._flying:
            while more and len(self._flying) < 2 * self._engine.slots:
                item = next(items, None)
                more = item is not None
                if item is not None:
                    self._submit(item)
            for emission in self._engine.step():
                if emission.finish_reason is not None:
                    item, sequence = self._flying.pop(emission.request_id)
                    self._finish(item, sequence, total)

    def _submit(self, item: Item) -> None:
        pair, args = self._pair, self._args
        if item.user is None:
            text, mark = user_turn_prefix(pair, item.system)
            ids, temperature, stop = pair.tokenizer.encode(text), 1.0, (mark,)
        else:
            messages = [{"role": "system", "content": item.system}] if item.system else []
            messages.append({"role": "user", "content": item.user})
            ids, temperature, stop = pair.tokenizer.encode_chat(messages), item.temperature, ()
        room = self._engine.capacity - len(ids)
        if room < 1:
            say(f"item {item.number}: prompt of {len(ids)} tokens does not fit; left out")
            return
        sequence = self._engine.submit(
            Request(
                prompt_ids=tuple(ids), max_tokens=min(args.max_new_tokens, room),
                temperature=temperature, top_k=args.top_k, top_p=args.top_p,
                seed=2 * (args.seed * 1_000_003 + item.number) + (item.user is None),
                stop=stop, stop_ids=pair.stop_ids,
            )
        )  # fmt: skip
        self._flying[sequence.id] = (item, sequence)

    def _finish(self, item: Item, sequence: Sequence, total: int) -> None:
        if item.user is None:
            if sequence.text.strip():
                self._submit(dataclasses.replace(item, user=sequence.text.strip()))
            return
        system = [{"role": "system", "content": item.system}] if item.system else []
        record = {
            "id": f"{self._pair.name}-{item.number}",
            "temperature": item.temperature,
            "truncated": sequence.finish_reason is FinishReason.LENGTH,
            "conversations": [
                *system,
                {"role": "user", "content": item.user},
                {"role": "assistant", "content": sequence.text},
            ],
        }
        self._out.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._out.flush()
        self.written += 1
        if self.written % 20 == 0 or self.written == total:
            speed = self._engine.counters.generation_tokens / self._engine.counters.round_s
            say(f"{self.written}/{total} conversations, {speed:.0f} tokens/s")


def make_items(args: argparse.Namespace, skip: set[int]) -> Iterator[Item]:
    """The conversations to write, each a function of its number and the seed.

    Args:
      args: the parsed command line.
      skip: numbers already written.

    Yields:
      Items in order.
    """
    prompts = [p for path in args.prompts or [] for p in read_prompts(path)]
    for number in range(len(prompts) if prompts else args.num):
        if number in skip:
            continue
        rng = random.Random(f"{args.seed}-{number}")
        yield Item(
            number=number,
            system=rng.choice(args.system) if args.system else None,
            user=prompts[number] if prompts else None,
            temperature=rng.choice(args.temperatures),
        )


def main() -> None:
    """Generates until everything is written or Ctrl-C."""
    args = parser().parse_args()
    if args.slots < 1 or args.num < 1:
        raise ValueError(f"--slots={args.slots} and --num={args.num} must be at least 1.")
    path = Path(args.out)
    skip = done_numbers(path)
    items = list(make_items(args, skip))
    say(f"{len(skip)} conversations in {path} already, {len(items)} to write")
    if not items:
        return
    pair = pair_from(args)
    longest = pair.target.config.max_position_embeddings
    engine = Engine(
        pair.decoder(schedule_from(args), args.rejection_sample_method), pair.params,
        slots=args.slots, capacity=min(longest, 2 * args.max_new_tokens + 256),
        dtype=pair.dtype, tokenizer=pair.tokenizer, progress=say, mesh=pair.mesh,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        Writer(pair, engine, args, out).run(iter(items), len(items))


if __name__ == "__main__":
    run_main(main)
