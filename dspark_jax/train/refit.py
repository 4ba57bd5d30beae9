"""A confidence head fitted anew to rounds that were decoded, everything else of the draft frozen.

Training judges blocks along text that the target wrote, from anchors anywhere. A round begins
where the last one failed, and passes on what survives; served text may also be of another kind.
The head is therefore fitted to the drafts that rounds reached (all before them were accepted), by
logistic regression on what it reads there, with a pull towards the weights it had.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import Traces
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.draft.markov import markov_bias
from dspark_jax.sampling import warp
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.train.blocks import TrainBatch, block_rows
from dspark_jax.train.features import hidden_states
from dspark_jax.train.forward import train_backbone
from dspark_jax.train.loss import markov_block
from dspark_jax.types import PairParams, SamplingParams

PULLS = tuple(10.0 ** np.arange(-5.0, 1.0, 0.5))
TOKEN_STEP = 128  # lengths of text and numbers of rounds are padded to multiples of these,
ROUND_STEP = 32  # so that few programs are compiled
SCORED = 16  # blocks whose logits exist at one time
NEWTON_STEPS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Drafts that were reached: all before them in their round were accepted.

    Attributes:
      inputs: f32[n, D + Q] or [n, D], what the confidence head reads.
      chance: f32[n], how likely acceptance was: sum over tokens of min(p, q).
      position: i32[n], place in the block, from 0.
      prompt: i32[n].
    """

    inputs: np.ndarray
    chance: np.ndarray
    position: np.ndarray
    prompt: np.ndarray

    def where(self, kept: np.ndarray) -> "HeadRows":
        """The rows that a bool[n] marks."""
        return HeadRows(**{f.name: getattr(self, f.name)[kept] for f in dataclasses.fields(self)})


def replay_rounds(
    draft: DenseDraft,
    target: LlamaTarget,
    params: PairParams,
    traces: Traces,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    sampling: SamplingParams,
    progress: Callable[[str], None] = lambda message: None,
) -> HeadRows:
    """What the head read in recorded rounds, and the odds it was to tell.

    The text tells where each round began; target and draft are run over it once more. Acceptance
    by the rule `standard` is a coin toss with known odds, and these make better targets than
    the tosses.

    Args:
      draft: a dense draft with a confidence head.
      target: taps the draft's layers.
      params: of both.
      traces: the rounds, of the rule `standard`.
      texts: token ids of prompt and answer, by prompt.
      sampling: R = 1, what the answers were drawn with.
      progress: told how many texts are done.

    Returns:
      The rows, text by text; drafts past the end of an answer are left out.

    Raises:
      ValueError: the draft is of another kind, or rounds and texts do not belong together.
    """
    config = getattr(draft, "config", None)
    dense = isinstance(draft, DenseDraft) and config.sample_from_anchor
    if not dense or not config.enable_confidence_head:
        raise ValueError(
            "a confidence head is refitted for a dense draft whose block begins with the anchor; "
            f"got {config}."
        )
    run = jax.jit(functools.partial(_replay_text, draft, target))
    parts = []
    for i in np.unique(traces.prompt):
        prompt, answer = texts[i] if i < len(texts) else ((), ())
        length = len(prompt) + len(answer)
        rounds = np.flatnonzero(traces.prompt == i)
        accept_len, verify_len = traces.accept_len[rounds], traces.verify_len[rounds]
        anchors = len(prompt) - 1 + np.concatenate([[0], np.cumsum(accept_len + 1)])
        if anchors[-2] >= length - 1 or anchors[-1] < length - 1:
            raise ValueError(
                f"the {len(rounds)} rounds of prompt {i} emit {anchors[-1] - anchors[0]} tokens, "
                f"but its answer has {len(answer)}; give the texts that the rounds wrote."
            )
        anchors = anchors[:-1]
        tokens = np.zeros(-(-length // TOKEN_STEP) * TOKEN_STEP, np.int32)
        tokens[:length] = [*prompt, *answer]
        padded = np.pad(anchors, (0, -len(anchors) % ROUND_STEP), mode="edge")
        inputs, chance = run(params, tokens, padded.astype(np.int32), sampling)
        k = np.arange(traces.num_drafts)
        reached = (k <= accept_len[:, None]) & (k < verify_len[:, None])
        reached &= anchors[:, None] + k < length - 1
        row, position = np.nonzero(reached)
        parts.append(
            HeadRows(
                inputs=np.asarray(inputs)[row, position], chance=np.asarray(chance)[row, position],
                position=position.astype(np.int32), prompt=np.full(len(row), i, np.int32),
            )
        )  # fmt: skip
        progress(f"{len(parts)} texts replayed")
    fields = [f.name for f in dataclasses.fields(HeadRows)]
    return HeadRows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in fields})


def _replay_text(
    draft: DenseDraft,
    target: LlamaTarget,
    params: PairParams,
    tokens: jax.Array,
    anchors: jax.Array,
    sampling: SamplingParams,
) -> tuple[jax.Array, jax.Array]:
    """Inputs f32[A, K, D + Q] of the head and odds f32[A, K] along tokens i32[S]."""
    features, hidden = hidden_states(target, params.target, tokens[None])
    every = jnp.ones_like(tokens)[None]
    batch = TrainBatch(
        tokens=tokens[None], loss_mask=every.astype(bool),
        positions=jnp.arange(len(tokens))[None], segments=every, context_features=features,
        target_hidden=hidden, anchors=anchors[None], keep=jnp.ones_like(anchors, bool)[None],
    )  # fmt: skip
    rows = block_rows(draft.config, batch)
    block_hidden = train_backbone(draft, params.draft, params.shared.embedding, batch, rows)[0]
    markov = params.draft.get("markov")
    latent, embedding = markov_block(markov, rows.previous[0], block_hidden)

    def odds(anchor: jax.Array, block: jax.Array, latent: jax.Array | None) -> jax.Array:
        logits = draft.base_logits(params.draft, params.shared, block)
        if latent is not None:
            logits = logits + markov_bias(markov, latent)
        at = jnp.minimum(anchor + jnp.arange(block.shape[0]), len(tokens) - 1)
        p = warp(target.logits(params.target, hidden[0, at])[None], sampling)[0]
        q = warp(logits[None], sampling)[0]
        if params.shared.target_ids is not None:
            p = p[:, params.shared.target_ids]
        return jnp.exp(jnp.minimum(p, q)).sum(axis=-1)

    together = (anchors, block_hidden, latent)
    chance = jax.lax.map(lambda x: odds(*x), together, batch_size=min(SCORED, len(anchors)))
    inputs = block_hidden
    if params.draft["confidence"]["weight"].shape[0] > block_hidden.shape[-1]:
        inputs = jnp.concatenate([block_hidden, embedding], axis=-1)
    return inputs.astype(jnp.float32), jnp.clip(chance, 0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """Weights of a confidence head.

    Attributes:
      weight: f64[D + Q] or [D].
      bias: added to the logit.
    """

    weight: np.ndarray
    bias: float

    def logits(self, rows: HeadRows) -> np.ndarray:
        """Confidence logits f64[n]."""
        return rows.inputs @ self.weight + self.bias

    def log_loss(self, rows: HeadRows) -> float:
        """Mean cross-entropy with the odds, in nats."""
        logits = self.logits(rows)
        return float(np.mean(np.logaddexp(0.0, logits) - rows.chance * logits))


def fit_head(rows: HeadRows, start: Head, pull: float) -> Head:
    """Logistic regression with a quadratic pull towards given weights; the bias is free.

    Args:
      rows: what to fit.
      start: the weights to stay near.
      pull: strength; a weight is pulled in units of what its input's spread makes of it.

    Returns:
      The minimum of the mean cross-entropy and pull / 2 times the sum of squared distances.

    Raises:
      ValueError: the inputs are not of the head's width, or nothing or everything is accepted.
    """
    if rows.inputs.shape[1:] != start.weight.shape or len(rows.inputs) == 0:
        raise ValueError(
            f"inputs {list(rows.inputs.shape)} do not fit a head of {len(start.weight)} weights."
        )
    if not 0.0 < rows.chance.mean() < 1.0:
        raise ValueError(
            f"the mean odds of acceptance are {rows.chance.mean():.3f}; a head needs drafts that "
            "are accepted and drafts that are not."
        )
    inputs = rows.inputs.astype(np.float64)
    mean, spread = inputs.mean(axis=0), np.maximum(inputs.std(axis=0), 1e-6)
    design = np.concatenate([(inputs - mean) / spread, np.ones((len(inputs), 1))], axis=1)
    origin = np.append(start.weight * spread, start.bias + mean @ start.weight)
    pulls = np.append(np.full(len(spread), pull), 0.0)

    def loss(found: np.ndarray) -> float:
        logits = design @ found
        fit = np.mean(np.logaddexp(0.0, logits) - rows.chance * logits)
        return float(fit + 0.5 * pulls @ (found - origin) ** 2)

    found, value = origin, loss(origin)
    for _ in range(NEWTON_STEPS):
        p = 1.0 / (1.0 + np.exp(-(design @ found)))
        gradient = design.T @ (p - rows.chance) / len(p) + pulls * (found - origin)
        curvature = (design * (p * (1 - p) / len(p))[:, None]).T @ design
        step = np.linalg.solve(curvature + np.diag(pulls + 1e-9), gradient)
        size, new = 1.0, loss(found - step)
        while new > value and size > 1e-3:
            size *= 0.5
            new = loss(found - size * step)
        if new > value:
            break
        done = value - new < 1e-12
        found, value = found - size * step, new
        if done:
            break
    weight = found[:-1] / spread
    return Head(weight=weight, bias=float(found[-1] - mean @ weight))


def choose_pull(fit: HeadRows, held_out: HeadRows, start: Head) -> tuple[float, Head]:
    """The pull of `PULLS` that does best on rows it was not fitted to.

    Args:
      fit: rows to fit.
      held_out: rows of other prompts.
      start: the head as it was.

    Returns:
      The pull, and the head fitted with it.
    """
    heads = {pull: fit_head(fit, start, pull) for pull in PULLS}
    best = min(heads, key=lambda pull: heads[pull].log_loss(held_out))
    return best, heads[best]
