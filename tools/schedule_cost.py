"""What scheduling costs: the time of each policy's decision against that of a whole round.

The decision is compiled alone, with the bypass and the packing of the verify rows; the round is the
one the engine runs, every draft verified. Both are timed in this process. Also checks that the
rows a round computes are those of the smallest bucket that holds its schedule.

    python tools/schedule_cost.py --requests 64 --drafts 7
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.demo import DEMO_TARGET
from dspark_jax.cli import run_main, say
from dspark_jax.decode import decode_round, pack_rows
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine.load import Pair, load_pair, random_draft_config
from dspark_jax.engine.programs import row_buckets
from dspark_jax.eval.timing import machine, median_seconds
from dspark_jax.history import bypasses, init_history
from dspark_jax.schedule import POLICIES, Evidence, ScheduleConfig, schedule_prefixes
from dspark_jax.state import init_state
from dspark_jax.types import PairParams, ScheduleTables

CONTEXT = 64  # rows of context per request


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/schedule_cost.py", description=__doc__)
    parser.add_argument("--requests", type=int, default=64, metavar="R")
    parser.add_argument("--drafts", type=int, default=7, metavar="K")
    parser.add_argument("--model", default=DEMO_TARGET, metavar="NAME|DIR")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="decisions timed")
    return parser


def with_random_draft(pair: Pair, drafts: int) -> Pair:
    """The target with an untrained draft of K drafts: what a round costs does not depend on it."""
    config = dataclasses.replace(random_draft_config(pair.target.config), block_size=drafts)
    draft = DenseDraft(config=config)
    target = dataclasses.replace(pair.target, tap_layer_ids=config.target_layer_ids)
    params = PairParams(
        target=pair.params.target, draft=draft.init(jax.random.key(0), jnp.float32),
        shared=target.shared_head(pair.params.target),
    )  # fmt: skip
    return dataclasses.replace(pair, target=target, draft=draft, params=params)


def decision_seconds(policy: str, requests: int, drafts: int, repeats: int) -> float:
    """Of one scheduling decision with bypass and packing."""
    config = ScheduleConfig(policy=policy, min_predicted_gain=0.0)
    rng = np.random.default_rng(0)
    confidence = jnp.asarray(rng.uniform(0.3, 1.0, (3, requests, drafts)), jnp.float32)
    steps = jnp.asarray(1 / (1 + np.arange(requests * (drafts + 1) + 1) / 64), jnp.float32)
    active = jnp.ones(requests, bool)
    history = init_history(config, requests, drafts)

    @jax.jit
    def decide(confidence: jax.Array) -> tuple:
        evidence = Evidence(
            confidence=confidence[0], presampled=confidence[1], lagged=confidence[2],
            limit=jnp.full(requests, drafts), active=active, steps_per_s=steps,
        )  # fmt: skip
        verify_len = jnp.where(
            bypasses(history, evidence, config), 0, schedule_prefixes(evidence, config)
        )
        return verify_len, pack_rows(verify_len, active, drafts + 1, requests * (drafts + 1))

    return median_seconds(lambda: decide(confidence), repeats)


def round_seconds(pair: Pair, requests: int) -> tuple[float, list[str]]:
    """Of a round that verifies everything; and whether fewer scheduled rows cost fewer computed."""
    drafts = pair.draft.config.num_drafts
    decoder = pair.decoder(ScheduleConfig())
    buckets = row_buckets(requests, drafts, adaptive=True)
    run = jax.jit(
        functools.partial(decode_round, decoder, rows=requests, buckets=buckets), donate_argnums=1
    )
    state = init_state(decoder, requests, CONTEXT + drafts + 2, pair.dtype)
    ones = np.ones(drafts, np.float32)
    tables = ScheduleTables(
        steps_per_s=np.ones(requests * (drafts + 1) + 1, np.float32), sts_temperatures=ones,
        sts_temperatures_presampled=ones, neutral_confidence=ones,
    )  # fmt: skip
    checks, holder = [], [state]

    def one(wanted: int) -> jax.Array:
        state = holder[0].replace(
            anchor_pos=jnp.full(requests, CONTEXT), active=jnp.ones(requests, bool),
            remaining=jnp.full(requests, wanted + 1),
        )  # fmt: skip
        holder[0], output = run(pair.params, state, tables)
        return output.verify_rows

    for wanted in range(drafts + 1):
        scheduled = requests * (1 + wanted)
        bucket = min(b for b in buckets if b >= scheduled)
        computed = int(one(wanted))
        if computed != bucket:
            raise ValueError(f"{scheduled} rows scheduled, {computed} computed, not {bucket}.")
        checks.append(f"{scheduled} -> {computed}")
    return median_seconds(lambda: one(drafts), 3), checks


def main() -> None:
    """Times and prints."""
    args = parser().parse_args()
    if args.requests < 1 or args.drafts < 1 or args.repeats < 1:
        raise ValueError("--requests, --drafts and --repeats must be at least 1.")
    say("compiling the round")
    pair = with_random_draft(load_pair(args.model, "none"), args.drafts)
    whole, checks = round_seconds(pair, args.requests)
    print(
        f"{machine()}: {args.requests} requests, {args.drafts} drafts, round {1e3 * whole:.0f} ms"
    )
    print(f"rows scheduled -> computed: {', '.join(checks)}")
    for policy in POLICIES:
        one = decision_seconds(policy, args.requests, args.drafts, args.repeats)
        print(f"{policy:11s} {1e3 * one:.3f} ms, {one / whole:.4%} of the round")


if __name__ == "__main__":
    run_main(main)
