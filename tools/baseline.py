"""How close a step of the plain loop comes to streaming the target's weights once.

Both are timed in this process: medians over many repeats, in short runs that take turns. The plain
loop decodes one request up to the given context; the stream is one pass of a sum over all weights.

    python tools/baseline.py [--model NAME|DIR] [--context 512]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.demo import DEMO_TARGET
from dspark_jax.cli import run_main, say
from dspark_jax.engine.load import load_pair
from dspark_jax.engine.programs import Programs
from dspark_jax.types import SamplingParams

RUN = 8  # steps, then streams, before they take turns


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/baseline.py", description=__doc__)
    parser.add_argument("--model", default=DEMO_TARGET, metavar="NAME|DIR")
    parser.add_argument("--context", type=int, default=512, metavar="C", help="tokens of context")
    parser.add_argument("--repeats", type=int, default=200, metavar="N", help="steps to time")
    return parser


def main() -> None:
    """Times both and prints their ratio, and what the step's program needs beside its state."""
    args = parser().parse_args()
    pair = load_pair(args.model, "none")
    programs = Programs(
        pair.decoder(), pair.params, slots=1, capacity=args.context, dtype=pair.dtype,
        progress=say,
    )  # fmt: skip
    weights = jnp.concatenate([x.ravel() for x in jax.tree.leaves(pair.params.target)])
    stream = jax.jit(jnp.sum)
    stream(weights).block_until_ready()
    sampling = SamplingParams(
        temperature=np.float32(0), top_k=np.int32(0), top_p=np.float32(1), min_p=np.float32(0),
        seed=np.uint32(0),
    )  # fmt: skip
    start = args.context - args.repeats - RUN - 1
    state = programs.admit(
        programs.new_state(), np.int32(0), np.int32(1), np.int32(start),
        np.int32(args.repeats + RUN), sampling,
    )  # fmt: skip
    steps, streams = [], []
    while len(steps) < args.repeats:
        for _ in range(RUN):
            begin = time.perf_counter()
            state, output = programs.plain[1](pair.params, state)
            output.tokens.block_until_ready()
            steps.append(time.perf_counter() - begin)
        for _ in range(RUN):
            begin = time.perf_counter()
            stream(weights).block_until_ready()
            streams.append(time.perf_counter() - begin)
    step, once = (1e3 * float(np.median(times)) for times in (steps, streams))
    memory = programs.plain[1].memory_analysis()
    cache = sum(x.nbytes for x in jax.tree.leaves(state.target_kv)) / 1e6
    print(f"weights {weights.nbytes / 1e6:.0f} MB, context {start}..{args.context}")
    print(f"plain step {step:.2f} ms, weights streamed once {once:.2f} ms, ratio {step / once:.2f}")
    print(
        f"KV cache {cache:.1f} MB, updated in place: {memory.alias_size_in_bytes / 1e6:.1f} MB "
        f"aliased, {memory.temp_size_in_bytes / 1e6:.1f} MB temporary"
    )


if __name__ == "__main__":
    run_main(main)
