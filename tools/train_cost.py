"""Where a training step's time goes, and what computing the vocabulary in pieces saves.

Random tokens on the real models; the whole vocabulary of the draft is scored. Times are medians in
this process: the frozen target's forward, the draft's gradients (from the hidden-state loss alone),
the vocabulary part (what the other losses add), the optimiser. Memory is what the compiled gradient
needs beside its inputs, with some anchors' logits at a time and with all at once; that program is
only compiled.

    python tools/train_cost.py --batch 4 --length 256 --anchors 32
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.demo import DEMO_TARGET
from dspark_jax.cli import run_main
from dspark_jax.engine.load import Pair, load_pair
from dspark_jax.eval.timing import machine, median_seconds
from dspark_jax.train.blocks import TrainBatch
from dspark_jax.train.features import hidden_states
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.step import Frozen, OptimizerConfig, batch_loss, make_optimizer
from dspark_jax.train.vocabulary import full_vocabulary
from dspark_jax.train.warm_start import inverse_gram, logit_metric

HIDDEN_ONLY = LossConfig(ce=0.0, l1=0.0, confidence=0.0, hidden=0.5)
EVERYTHING = LossConfig(ce=0.5, hidden=0.5)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/train_cost.py", description=__doc__)
    parser.add_argument("--model", default=DEMO_TARGET, metavar="NAME|DIR")
    parser.add_argument("--draft", default="auto", metavar="NAME|DIR")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="sequences")
    parser.add_argument("--length", type=int, default=256, metavar="S", help="tokens of each")
    parser.add_argument("--anchors", type=int, default=32, metavar="A", help="of each sequence")
    parser.add_argument("--memory-anchors", type=int, default=512, metavar="A", help="for memory")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    return parser


def random_batch(pair: Pair, batch: int, length: int, anchors: int) -> TrainBatch:
    """Sequences of random tokens, all of them the assistant's, anchors evenly spread."""
    config = pair.draft.config
    shape, rng = (batch, length), np.random.default_rng(0)
    at = np.linspace(1, length - config.block_size - 2, anchors).astype(np.int32)
    return TrainBatch(
        tokens=jnp.asarray(rng.integers(0, config.vocab_size, shape), jnp.int32),
        loss_mask=jnp.ones(shape, bool),
        positions=jnp.tile(jnp.arange(length, dtype=jnp.int32), (batch, 1)),
        segments=jnp.ones(shape, jnp.int32),
        context_features=jnp.asarray(
            rng.normal(size=(*shape, len(config.target_layer_ids) * config.hidden_size)),
            jnp.float32,
        ),
        target_hidden=jnp.asarray(rng.normal(size=(*shape, config.hidden_size)), jnp.float32),
        anchors=jnp.tile(jnp.asarray(at), (batch, 1)),
        keep=jnp.ones((batch, anchors), bool),
    )


def gradient_of(pair: Pair, frozen: Frozen, loss: LossConfig) -> Callable:
    """The jitted gradient of a batch's loss by the draft's parameters."""

    def objective(params: dict, frozen: Frozen, batch: TrainBatch) -> jax.Array:
        vocabulary = full_vocabulary(frozen.shared) if loss.uses_vocabulary else None
        return batch_loss(pair.draft, loss, params, frozen, batch, vocabulary)[0]

    return jax.jit(jax.grad(objective))


def main() -> None:
    """Times, compiles and prints."""
    args = parser().parse_args()
    if min(args.batch, args.anchors, args.memory_anchors, args.repeats) < 1 or args.length < 32:
        raise ValueError("--length must be at least 32, and every other number at least 1.")
    pair = load_pair(args.model, args.draft)
    if pair.draft is None:
        raise ValueError(f"--draft={args.draft} gives no draft; there is nothing to train.")
    shared, params = pair.params.shared, pair.params.draft
    frozen = Frozen(
        shared=shared, metric=logit_metric(shared, np.ones(shared.head.shape[0])),
        inverse_gram=inverse_gram(shared),
    )  # fmt: skip
    batch = random_batch(pair, args.batch, args.length, args.anchors)

    target_forward = jax.jit(functools.partial(hidden_states, pair.target))
    target_s = median_seconds(
        lambda: target_forward(pair.params.target, batch.tokens), args.repeats
    )
    draft_only, whole = (gradient_of(pair, frozen, loss) for loss in (HIDDEN_ONLY, EVERYTHING))
    draft_s = median_seconds(lambda: draft_only(params, frozen, batch), args.repeats)
    whole_s = median_seconds(lambda: whole(params, frozen, batch), args.repeats)
    optimizer = make_optimizer(OptimizerConfig(), 100)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    optimizer_s = median_seconds(lambda: update(params, state, params), args.repeats)
    blocks = args.batch * args.anchors
    print(f"{machine()}: {args.batch} x {args.length} tokens, {blocks} anchors")
    parts = {
        "target forward": target_s, "draft": draft_s, "vocabulary": whole_s - draft_s,
        "optimiser": optimizer_s,
    }  # fmt: skip
    total = sum(parts.values())
    for name, value in parts.items():
        print(f"{name:15s} {value:7.3f} s {value / total:6.1%}")
    print(f"{'whole step':15s} {total:7.3f} s, {blocks / total:.0f} anchors/s")
    shapes = jax.eval_shape(
        functools.partial(random_batch, pair, 1, 4 * args.memory_anchors, args.memory_anchors)
    )
    for chunk in (EVERYTHING.anchor_chunk, args.memory_anchors):
        loss = dataclasses.replace(EVERYTHING, anchor_chunk=chunk)
        compiled = gradient_of(pair, frozen, loss).lower(params, frozen, shapes).compile()
        size = compiled.memory_analysis().temp_size_in_bytes
        print(f"{args.memory_anchors} anchors, logits of {chunk} at a time: {size / 2**30:.2f} GiB")


if __name__ == "__main__":
    run_main(main)
