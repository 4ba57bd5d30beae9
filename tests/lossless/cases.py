"""Named cases for the enumeration: worlds, policies and rules, built once and shared."""

import functools

import numpy as np

from tests.lossless.harness import Chain, Scheduler, emitted_law
from tests.lossless.rules import Block, Coupled, Node, Standard
from tests.lossless.world import (
    Request,
    confidence_table,
    greedy,
    joint_target_law,
    nucleus,
    presampled_table,
    sps_table,
)

HORIZON = 3
EXACT = 1e-12
RULES = {"standard": Standard, "block": Block, "coupled": Coupled}
WORLDS = {
    "plain": {},
    "top_p": {"warp": nucleus(0.7, 0.8)},
    "greedy": {"warp": greedy},
    "reduced": {"draft_vocab": 2},
}


@functools.cache
def request_of(world: str, vocab: int, block: int, number: int) -> Request:
    """Request `number` of a world."""
    return Request(vocab, block, seed=10 * vocab + number, **WORLDS[world])


@functools.cache
def chain_of(rule: str, world: str, vocab: int, block: int, number: int, lag: int) -> Chain:
    """The request under a rule, remembering `lag` rounds."""
    return Chain(RULES[rule](request_of(world, vocab, block, number), lag=lag), Node())


@functools.cache
def scheduler_of(
    policy: str, conf: str, shape: str, room: int | None,
    world: str, vocab: int, block: int, requests: int, lag: int, options: tuple,
) -> Scheduler:  # fmt: skip
    """Shared by all rules: decisions do not depend on the rule."""
    worlds = [request_of(world, vocab, block, r) for r in range(requests)]
    tables = [confidence_table(one, conf, seed=5 + r) for r, one in enumerate(worlds)]
    before = [presampled_table(one, seed=9 + r) for r, one in enumerate(worlds)]
    kwargs = dict(options)
    if policy in ("per_position", "cumulative"):
        kwargs |= {"threshold": 0.5, "cumulative": policy == "cumulative"}
        policy = "threshold"
    return Scheduler(
        policy, tables, sps_table(shape, requests, block, seed=3), block=block, room=room, lag=lag,
        presampled=before if policy == "presampled" else (), **kwargs,
    )  # fmt: skip


def error_of(
    rule: str, policy: str, conf: str, shape: str, room: int | None = None,
    *, world: str = "plain", vocab: int = 3, block: int = 2, requests: int = 1, lag: int = 0,
    **options,
) -> tuple[float, Scheduler]:  # fmt: skip
    """Largest deviation of any outcome's probability from the target's, and the scheduler.

    `options`: `min_gain`, `floor`, `ceiling` of the scheduler.
    """
    scheduler = scheduler_of(
        policy, conf, shape, room, world, vocab, block, requests, lag, tuple(options.items())
    )
    chains = [chain_of(rule, world, vocab, block, r, lag) for r in range(requests)]
    law = emitted_law(chains, scheduler)
    target = joint_target_law([c.rule.request for c in chains], HORIZON)
    assert abs(law.sum() - 1) < EXACT
    return float(np.abs(law - target).max()), scheduler
