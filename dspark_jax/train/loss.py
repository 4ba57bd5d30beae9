"""The losses of a DSpark draft, with the vocabulary-sized part computed piece by piece.

Cross-entropy on the label, L1 between the draft's and the target's distributions, and binary
cross-entropy of the confidence head against the resulting acceptance; each is a mean weighted by
position. Nothing of size A*K*V is kept: `vocabulary_loss` walks over groups of anchors and
computes the gradient of each group on the spot (a custom VJP), so only one group's logits exist.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig
from dspark_jax.draft.confidence import confidence_logits
from dspark_jax.draft.markov import initial_state, markov_step
from dspark_jax.sharding import constrain, is_split
from dspark_jax.train.blocks import BlockRows
from dspark_jax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the losses. The defaults are DeepSpec's recipe.

    `hidden` weighs an optional term without counterpart in the paper: the distance between
    block_hidden and the target's last hidden state, a cheap warm-up that needs no LM head.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    hidden: float = 0.0
    decay: float = 4.0  # row k weighs exp(-k / decay); not the block size
    anchor_chunk: int = 64  # anchors whose logits exist at one time

    def __post_init__(self):
        if min(self.ce, self.l1, self.confidence, self.hidden) < 0:
            raise ValueError(f"loss weights must not be negative; got {self}.")
        if self.decay <= 0 or self.anchor_chunk < 1:
            raise ValueError(f"decay and anchor_chunk must be positive; got {self}.")

    @property
    def uses_vocabulary(self) -> bool:
        """Whether any term needs logits."""
        return max(self.ce, self.l1, self.confidence) > 0


@flax.struct.dataclass
class Vocabulary:
    """The rows of the LM head that the losses are computed over.

    All of the draft's vocabulary, or candidates: rows that are always in and a sample of the
    rest, whose `log_weight` (log of how many rows each stands for) is added to both logits.
    """

    head: jax.Array  # [C, D], frozen
    row_of: jax.Array  # i32[V], target id -> index into C; C where there is none
    log_weight: jax.Array | None = None  # f32[C]
    rows: jax.Array | None = None  # i32[C], rows of the draft's vocabulary; None is all


def loss_weights(supervised: jax.Array, decay: float) -> jax.Array:
    """exp(-k / decay) on supervised rows [.., K], else 0."""
    k = jnp.arange(supervised.shape[-1])
    return jnp.exp(-k / decay) * supervised


def total_weight(weights: jax.Array, axis: str | None) -> jax.Array:
    """Sum of the weights, over all parts of the batch where a mesh axis splits it."""
    total = weights.sum()
    return total if axis is None else jax.lax.psum(total, axis)


def markov_block(
    params: Params | None, previous: jax.Array, hidden: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """The Markov head over whole blocks with the true previous tokens (teacher forcing).

    Args:
      params: the head's parameters; None without one.
      previous: i32[.., K].
      hidden: [.., K, D].

    Returns:
      latent [.., K, Q] (bias = latent W2^T) and embedding W1[previous] [.., K, Q], or None twice.
    """
    if params is None:
        return None, None
    state = initial_state(params, previous.shape[:-1])
    latents, embeddings = [], []
    for k in range(previous.shape[-1]):
        latent, embedding, state = markov_step(params, previous[..., k], hidden[..., k, :], state)
        latents.append(latent)
        embeddings.append(embedding)
    return jnp.stack(latents, axis=-2), jnp.stack(embeddings, axis=-2)


@flax.struct.dataclass
class _Learned:
    """What `vocabulary_loss` differentiates."""

    hidden: jax.Array  # [B, A, K, D]
    latent: jax.Array | None  # [B, A, K, Q]
    w2: jax.Array | None  # [C, Q]
    confidence: jax.Array | None  # f32[B, A, K]


@flax.struct.dataclass
class _Given:
    """What it does not."""

    vocabulary: Vocabulary
    target_hidden: jax.Array  # [B, S, D]
    slots: jax.Array  # i32[B, A, K], rows of target_hidden
    labels: jax.Array  # i32[B, A, K], indices into C
    weights: jax.Array  # f32[B, A, K]
    scale: jax.Array  # f32[], one over the sum of all weights


def vocabulary_loss(
    config: DraftConfig,
    loss: LossConfig,
    params: Params,
    vocabulary: Vocabulary,
    hidden: jax.Array,
    rows: BlockRows,
    anchors: jax.Array,
    target_hidden: jax.Array,
    *,
    axis: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted CE, L1 and confidence losses, and what is measured on the way.

    Args:
      config: the draft's architecture.
      loss: weights.
      params: the draft's parameters (`markov`, `confidence`).
      vocabulary: LM head rows.
      hidden: block_hidden [B, A, K, D].
      rows: labels and the evaluation mask.
      anchors: i32[B, A].
      target_hidden: [B, S, D].
      axis: mesh axis the batch is split over inside `shard_map`; the loss is then this part's
        share of the whole batch's.

    Returns:
      The scalar loss, and sums over supervised rows: `ce`, `l1`, `bce` (weighted), `den` (sum of
      weights), and per row [K] `accept`, `match`, `count`, `confidence`, `survival`.

    Source: DeepSpec's loss (weighted sums over sum of weights + 1e-6); paper eq. 8 to 10.
    """
    weights = loss_weights(rows.supervised, loss.decay)
    latent, embedding = markov_block(params.get("markov"), rows.previous, hidden)
    trust = None
    if config.enable_confidence_head:
        trust = confidence_logits(params["confidence"], hidden, embedding)
    w2 = None
    if latent is not None:
        w2 = params["markov"]["w2"]
        w2 = w2 if vocabulary.rows is None else constrain(w2[vocabulary.rows], "vocab", None)
    length = target_hidden.shape[1]
    slots = jnp.minimum(anchors[..., None] + jnp.arange(config.block_size), length - 1)
    learned = _Learned(hidden=hidden, latent=latent, w2=w2, confidence=trust)
    given = _Given(
        vocabulary=vocabulary,
        target_hidden=target_hidden,
        slots=slots,
        labels=vocabulary.row_of[rows.labels],
        weights=weights,
        scale=1.0 / (total_weight(weights, axis) + 1e-6),
    )
    sums, measured = _fused(loss, learned, given)
    return sums, measured | {"den": weights.sum()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(loss: LossConfig, learned: _Learned, given: _Given) -> tuple[jax.Array, dict]:
    return _walk(loss, learned, given, with_grad=False)[0]


def _fused_forward(loss: LossConfig, learned: _Learned, given: _Given) -> tuple:
    return _walk(loss, learned, given, with_grad=True)


def _fused_backward(loss: LossConfig, grads: _Learned, cotangents: tuple) -> tuple:
    scale = cotangents[0]
    return jax.tree.map(lambda g: g * scale, grads), None


_fused.defvjp(_fused_forward, _fused_backward)


def _walk(loss: LossConfig, learned: _Learned, given: _Given, *, with_grad: bool) -> tuple:
    """Runs `_group` over groups of anchors, one sequence at a time."""
    batch, anchors = given.labels.shape[:2]
    chunk = min(loss.anchor_chunk, anchors)
    steps = -(-anchors // chunk)
    spare = steps * chunk - anchors
    scale = given.scale
    once = given.slots.shape[1] * given.slots.shape[2] >= given.target_hidden.shape[1]
    once = once and steps == 1  # every row serves several slots: score each row once

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, spare)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(batch * steps, chunk, *x.shape[2:])

    per_anchor = {"hidden": learned.hidden}
    if learned.latent is not None:
        per_anchor["latent"] = learned.latent
    if learned.confidence is not None:
        per_anchor["confidence"] = learned.confidence
    per_anchor = jax.tree.map(split, per_anchor)
    fixed = {"labels": given.labels, "slots": given.slots, "weights": given.weights}
    fixed = jax.tree.map(split, fixed)
    sequence = jnp.repeat(jnp.arange(batch), steps)

    def group(per_anchor: dict, w2: jax.Array | None, inputs: tuple) -> tuple:
        fixed, b = inputs
        rows = given.target_hidden[b]
        return _group(loss, per_anchor, w2, fixed, rows, given.vocabulary, scale, once)

    def body(carry: tuple, inputs: tuple) -> tuple:
        total, grad_w2 = carry
        per_anchor, rest = inputs
        if not with_grad:
            value, measured = group(per_anchor, learned.w2, rest)
            return (_add(total, (value, measured)), grad_w2), None
        (value, measured), (grad, grad_w2_here) = jax.value_and_grad(
            group, argnums=(0, 1), has_aux=True
        )(per_anchor, learned.w2, rest)
        return (_add(total, (value, measured)), _add(grad_w2, grad_w2_here)), grad

    zeros = jax.eval_shape(
        group, *jax.tree.map(lambda x: x[0], (per_anchor,)), learned.w2,
        jax.tree.map(lambda x: x[0], (fixed, sequence)),
    )  # fmt: skip
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
    zero_w2 = None if learned.w2 is None else jnp.zeros_like(learned.w2)
    inputs = (per_anchor, (fixed, sequence))
    (total, grad_w2), grads = jax.lax.scan(body, (zeros, zero_w2), inputs)
    if not with_grad:
        return total, None

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(batch, steps * chunk, *x.shape[2:])[:, :anchors]

    grads = {name: join(x) for name, x in grads.items()}
    return total, _Learned(
        hidden=grads["hidden"],
        latent=grads.get("latent"),
        confidence=grads.get("confidence"),
        w2=grad_w2,
    )


def _add(a: object, b: object) -> object:
    return jax.tree.map(jnp.add, a, b)


def _group(
    loss: LossConfig,
    per_anchor: dict,
    w2: jax.Array | None,
    fixed: dict,
    target_rows: jax.Array,
    vocabulary: Vocabulary,
    scale: jax.Array,
    once: bool,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses of one group of anchors [c, K]; logits exist only in here."""
    head, weights = vocabulary.head, fixed["weights"]
    score = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def target_probs(hidden: jax.Array) -> jax.Array:
        logits = score("...d,vd->...v", hidden.astype(head.dtype), head)
        if vocabulary.log_weight is not None:
            logits = logits + vocabulary.log_weight
        return jax.nn.softmax(logits, axis=-1)

    if once:
        probs = target_probs(target_rows)[fixed["slots"]]
    else:
        probs = target_probs(target_rows[fixed["slots"]])
    logits = score("...d,vd->...v", per_anchor["hidden"], head)
    if w2 is not None:
        logits = logits + score("...q,vq->...v", per_anchor["latent"], w2)
    if vocabulary.log_weight is not None:
        logits = logits + vocabulary.log_weight
    top = jax.lax.stop_gradient(logits.max(axis=-1))
    log_z = top + jnp.log(jnp.exp(logits - top[..., None]).sum(axis=-1))
    known = fixed["labels"] < head.shape[0]
    picked = _pick(logits, jnp.minimum(fixed["labels"], head.shape[0] - 1))
    ce = jnp.where(known, log_z - picked, 0.0)
    l1 = jnp.abs(jnp.exp(logits - log_z[..., None]) - probs).sum(axis=-1)
    accept = jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * l1, 0.0, 1.0))
    total = loss.ce * ce + loss.l1 * l1
    on = weights > 0
    measured = {
        "ce": (weights * ce).sum(),
        "l1": (weights * l1).sum(),
        "accept": (on * accept).sum(axis=0),
        "match": (on & known & (picked >= top)).astype(jnp.float32).sum(axis=0),
        "survival": jnp.cumprod(on * accept, axis=-1).sum(axis=0),
        "greedy_survival": jnp.cumprod(on & known & (picked >= top), axis=-1)
        .astype(jnp.float32)
        .sum(axis=0),
        "count": on.astype(jnp.float32).sum(axis=0),
        "blocks": on[:, 0].astype(jnp.float32).sum(),
    }
    if "confidence" in per_anchor:
        trust = per_anchor["confidence"]
        bce = jax.nn.softplus(trust) - trust * accept
        total = total + loss.confidence * bce
        c = jax.nn.sigmoid(trust)
        measured |= {
            "bce": (weights * bce).sum(),
            "confidence_abs_error": (weights * jnp.abs(c - accept)).sum(),
            "confidence_bias": (weights * (c - accept)).sum(),
            "confidence_cumprod_bias": (
                weights * (jnp.cumprod(c, axis=-1) - jnp.cumprod(accept, axis=-1))
            ).sum(),
        }
    return (weights * total).sum() * scale, jax.lax.stop_gradient(measured)


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[.., index]; where the last axis is split, without gathering it."""
    if not is_split():
        return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
    chosen = jnp.arange(values.shape[-1]) == index[..., None]
    return jnp.where(chosen, values, 0).sum(axis=-1)


def hidden_loss(
    hidden: jax.Array,
    markov_hidden: jax.Array | None,
    target_hidden: jax.Array,
    weights: jax.Array,
    metric: jax.Array,
    *,
    axis: str | None = None,
) -> jax.Array:
    """Weighted squared distance to the target's last hidden states, as the LM head sees it.

    Args:
      hidden: block_hidden [B, A, K, D].
      markov_hidden: [B, A, K, D], the Markov bias pulled back to hidden space; None for none.
      target_hidden: [B, A, K, D].
      weights: f32[B, A, K].
      metric: f32[D, D]; distances are taken after multiplying by it.
      axis: as for `vocabulary_loss`.

    Returns:
      The weighted mean squared length.
    """
    error = (
        hidden - target_hidden
        if markov_hidden is None
        else (hidden + markov_hidden - target_hidden)
    )
    error = jnp.einsum("bakd,de->bake", error, metric)
    return (weights * jnp.square(error).mean(axis=-1)).sum() / (total_weight(weights, axis) + 1e-6)
