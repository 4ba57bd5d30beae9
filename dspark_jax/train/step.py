"""One optimiser step, and one measurement, as pure functions to compile."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.draft.dense import DenseDraft
from dspark_jax.sharding import constrain_params
from dspark_jax.train.blocks import TrainBatch, block_rows, slot_hidden
from dspark_jax.train.forward import train_backbone
from dspark_jax.train.loss import (
    LossConfig,
    Vocabulary,
    hidden_loss,
    loss_weights,
    markov_block,
    vocabulary_loss,
)
from dspark_jax.train.vocabulary import candidate_vocabulary, full_vocabulary
from dspark_jax.types import Params, SharedHead

SCHEDULES = ("cosine", "constant_then_linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. The defaults are DeepSpec's recipe."""

    learning_rate: float = 6e-4
    schedule: str = "cosine"
    warmup_ratio: float = 0.04  # of all steps; the first step already has a rate above zero
    decay_ratio: float = 0.2  # of all steps; constant_then_linear only
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    accumulate: int = 1  # micro-steps whose gradients are averaged into one step

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}; expected one of {SCHEDULES}.")
        if self.learning_rate <= 0 or self.accumulate < 1:
            raise ValueError(f"learning_rate and accumulate must be positive; got {self}.")


@flax.struct.dataclass
class TrainState:
    """Everything that a step changes."""

    params: Params  # float32 master weights
    opt_state: Any
    step: jax.Array  # i32[], micro-steps done


@flax.struct.dataclass
class Frozen:
    """What the step reads and never changes."""

    shared: SharedHead
    metric: jax.Array | None = None  # f32[D, D], for the hidden-state loss
    inverse_gram: jax.Array | None = None  # f32[D, D]: pulls a Markov bias back to hidden space


@flax.struct.dataclass
class Candidates:
    """A sampled vocabulary (see `CandidateSampler`)."""

    rows: jax.Array  # i32[C]
    log_weight: jax.Array  # f32[C]


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up, then cosine to zero, or constant and linear to zero at the end.

    Args:
      config: the settings.
      total_steps: optimiser steps of the whole run.

    Returns:
      step -> rate; step 0 has rate / warm-up steps.

    Source: DeepSpec's scheduler.
    """
    warmup = max(int(config.warmup_ratio * total_steps), 1)
    decay = max(int(config.decay_ratio * total_steps), 1)

    def rate(step: jax.Array) -> jax.Array:
        rise = jnp.minimum((step + 1) / warmup, 1.0)
        if config.schedule == "cosine":
            done = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
            fall = 0.5 * (1 + jnp.cos(jnp.pi * done))
        else:
            fall = jnp.clip((total_steps - step) / decay, 0.0, 1.0)
        return config.learning_rate * rise * fall

    return rate


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Global-norm clip, AdamW and gradient accumulation."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, total_steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )
    if config.accumulate == 1:
        return optimizer
    return optax.MultiSteps(optimizer, config.accumulate).gradient_transformation()


def batch_loss(
    draft: DenseDraft,
    loss: LossConfig,
    params: Params,
    frozen: Frozen,
    batch: TrainBatch,
    vocabulary: Vocabulary | None,
    *,
    axis: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of one batch and what is measured on the way.

    Args:
      draft: the model.
      loss: weights of the terms.
      params: the draft's parameters.
      frozen: embedding, LM head, metric.
      batch: sequences, features, anchors.
      vocabulary: rows to score; None when no term needs logits.
      axis: mesh axis the batch is split over inside `shard_map`; the loss and the sums are then
        this part's share.

    Returns:
      The scalar and the sums of `vocabulary_loss`, with `hidden` where that loss is on.
    """
    config = draft.config
    rows = block_rows(config, batch)
    with jax.named_scope("train.backbone"):
        hidden = train_backbone(draft, params, frozen.shared.embedding, batch, rows)
    total, measured = jnp.zeros(()), {}
    if loss.hidden:
        weights = loss_weights(rows.supervised, loss.decay)
        pulled = None
        if config.markov_rank:
            latent, _ = markov_block(params["markov"], rows.previous, hidden)
            w2 = jax.lax.stop_gradient(params["markov"]["w2"])
            pulled = latent @ (frozen.inverse_gram @ (frozen.shared.head.T @ w2)).T
        want = slot_hidden(batch, config.block_size)
        term = hidden_loss(hidden, pulled, want, weights, frozen.metric, axis=axis)
        total = total + loss.hidden * term
        measured = {"hidden": term, "den": weights.sum()}
    if vocabulary is not None:
        with jax.named_scope("train.vocabulary"):
            value, more = vocabulary_loss(
                config, loss, params, vocabulary, hidden, rows, batch.anchors,
                batch.target_hidden, axis=axis,
            )  # fmt: skip
        total, measured = total + value, measured | more
    return total, measured | {"loss": total}


def train_step(
    draft: DenseDraft,
    loss: LossConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    frozen: Frozen,
    batch: TrainBatch,
    candidates: Candidates | None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One micro-step: gradients of the draft only, clip, AdamW.

    Args:
      draft: the model.
      loss: weights of the terms.
      optimizer: of `make_optimizer`.
      state: parameters and optimiser state; may be donated.
      frozen: what stays.
      batch: sequences, features, anchors.
      candidates: a sampled vocabulary; None scores every row the draft has.
      mesh: with an axis `data` that the batch is split over, and an axis `model` that parameters
        are (see `place_run`); None runs on one device.

    Returns:
      The new state, and the measured sums with `grad_norm`.
    """
    axis = "data" if mesh is not None and mesh.shape["data"] > 1 else None

    def gradients(
        params: Params, frozen: Frozen, batch: TrainBatch, candidates: Candidates | None
    ) -> tuple[Params, dict]:
        vocabulary = None
        if loss.uses_vocabulary and candidates is not None:
            rows, log_weight = candidates.rows, candidates.log_weight
            vocabulary = candidate_vocabulary(frozen.shared, rows, log_weight)
        elif loss.uses_vocabulary:
            vocabulary = full_vocabulary(frozen.shared)

        def objective(params: Params) -> tuple[jax.Array, dict]:
            return batch_loss(draft, loss, params, frozen, batch, vocabulary, axis=axis)

        (_, measured), grads = jax.value_and_grad(objective, has_aux=True)(params)
        grads = constrain_params(grads)
        return (grads, measured) if axis is None else jax.lax.psum((grads, measured), axis)

    if axis is not None:
        whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
        gradients = jax.shard_map(
            gradients,
            mesh=mesh,
            in_specs=(whole, whole, split, whole),
            out_specs=whole,
            axis_names={"data"},  # the compiler splits the rest over `model`
            check_vma=False,  # sums are made explicit above
        )
    grads, measured = gradients(state.params, frozen, batch, candidates)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    squares = jax.tree.map(lambda g: jnp.square(g).sum(), grads)
    measured["grad_norm"] = jnp.sqrt(sum(jax.tree.leaves(squares)))
    return TrainState(params=params, opt_state=opt_state, step=state.step + 1), measured


def measure_step(
    draft: DenseDraft, loss: LossConfig, params: Params, frozen: Frozen, batch: TrainBatch
) -> dict[str, jax.Array]:
    """The measured sums of a batch over the draft's whole vocabulary, without gradients."""
    return batch_loss(draft, loss, params, frozen, batch, full_vocabulary(frozen.shared))[1]


def summarize(sums: dict[str, Any]) -> dict[str, Any]:
    """Means from the sums of one or more batches.

    Args:
      sums: of `train_step` or `measure_step`, added up over batches; `steps` says how many.

    Returns:
      `loss` terms, `accept_rate` (conditional, by row), `greedy_match` (draft argmax is the
      label, by row), `tau_probabilistic` and `tau_greedy` (1 + mean over blocks of the sum of
      the cumulative product), and the confidence errors.

    Source: DeepSpec's training metrics.
    """
    steps = float(sums.get("steps", 1))
    out = {k: float(sums[k]) / steps for k in ("loss", "hidden", "grad_norm") if k in sums}
    if "count" not in sums:
        return out
    den = float(sums["den"]) + 1e-6
    count = [max(float(x), 1.0) for x in sums["count"]]
    blocks = max(float(sums["blocks"]), 1.0)
    out |= {"ce_loss": float(sums["ce"]) / den, "l1_loss": float(sums["l1"]) / den}
    out["accept_rate"] = [float(a) / c for a, c in zip(sums["accept"], count, strict=True)]
    out["greedy_match"] = [float(a) / c for a, c in zip(sums["match"], count, strict=True)]
    out["tau_probabilistic"] = 1 + float(sums["survival"].sum()) / blocks
    out["tau_greedy"] = 1 + float(sums["greedy_survival"].sum()) / blocks
    out["anchors"] = blocks
    if "bce" in sums:
        out["confidence_loss"] = float(sums["bce"]) / den
        for name in ("abs_error", "bias", "cumprod_bias"):
            out[f"confidence_{name}"] = float(sums[f"confidence_{name}"]) / den
    return out
