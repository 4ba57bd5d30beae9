"""Loss weights, reductions, the vocabulary in pieces, candidates, schedules, summaries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.draft_vocab import reduce_vocabulary
from dspark_jax.train.blocks import block_rows
from dspark_jax.train.forward import train_backbone
from dspark_jax.train.loss import LossConfig, hidden_loss, loss_weights
from dspark_jax.train.spread import train_mesh
from dspark_jax.train.step import (
    Frozen,
    OptimizerConfig,
    TrainState,
    batch_loss,
    learning_rate,
    make_optimizer,
    summarize,
    train_step,
)
from dspark_jax.train.vocabulary import (
    CandidateConfig,
    CandidateSampler,
    candidate_vocabulary,
    frequent_tokens,
    full_vocabulary,
)
from dspark_jax.train.warm_start import carry_markov, inverse_gram
from dspark_jax.types import SharedHead
from tests.unit.train_toys import CONFIG, DRAFT, VOCAB, make_batch, random_params, random_shared


@functools.partial(jax.jit, static_argnums=0)
def run(loss: LossConfig, params: dict, frozen: Frozen, batch, vocabulary) -> tuple:
    """Loss, sums and gradients."""

    def loss_of(params):
        return batch_loss(DRAFT, loss, params, frozen, batch, vocabulary)

    return jax.value_and_grad(loss_of, has_aux=True)(params)


def test_weights_of_decay_four_over_seven_rows():
    weights = loss_weights(jnp.ones(7), 4.0)
    np.testing.assert_allclose(
        weights, [1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231], atol=5e-5
    )
    assert float(weights.sum()) == pytest.approx(3.7352, abs=5e-5)


def test_tau_probabilistic_of_known_acceptance():
    accept = np.array([0.9, 0.8, 0.5])
    sums = {
        "loss": 0.0, "den": 1.0, "ce": 0.0, "l1": 0.0, "accept": accept, "match": accept,
        "count": np.ones(3), "blocks": 1.0, "survival": np.cumprod(accept),
        "greedy_survival": np.zeros(3),
    }  # fmt: skip
    values = summarize(sums)
    assert values["tau_probabilistic"] == pytest.approx(2.98)
    assert values["tau_greedy"] == 1.0
    assert values["accept_rate"] == pytest.approx([0.9, 0.8, 0.5])


def test_losses_against_plain_numpy(rng):
    batch, params, shared = make_batch(rng), random_params(), random_shared(rng)
    loss = LossConfig(ce=0.3, l1=0.0, confidence=0.0)
    frozen, vocabulary = Frozen(shared=shared), full_vocabulary(shared)
    (ce, sums), _ = run(loss, params, frozen, batch, vocabulary)
    (l1, _), _ = run(dataclasses.replace(loss, ce=0.0, l1=1.0), params, frozen, batch, vocabulary)

    rows = block_rows(CONFIG, batch)
    backbone = jax.jit(train_backbone, static_argnums=0)
    hidden = np.asarray(backbone(DRAFT, params, shared.embedding, batch, rows), np.float64)
    w1, w2 = (np.asarray(params["markov"][k], np.float64) for k in ("w1", "w2"))
    head = np.asarray(shared.head, np.float64)
    logits = hidden @ head.T + w1[np.asarray(rows.previous)] @ w2.T
    slots = np.asarray(batch.anchors)[..., None] + np.arange(CONFIG.block_size)
    target = np.asarray(batch.target_hidden, np.float64)[0][slots] @ head.T

    def softmax(x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    q, p = softmax(logits), softmax(target)
    weights = np.exp(-np.arange(4) / 4.0) * np.asarray(rows.supervised)
    nll = -np.log(np.take_along_axis(q, np.asarray(rows.labels)[..., None], axis=-1))[..., 0]
    gap = np.abs(q - p).sum(axis=-1)
    assert float(ce) == pytest.approx(0.3 * (weights * nll).sum() / weights.sum(), rel=1e-5)
    assert float(l1) == pytest.approx((weights * gap).sum() / weights.sum(), rel=1e-5)
    accept = np.clip(1 - gap / 2, 0, 1)
    np.testing.assert_allclose(sums["accept"][0], accept[..., 0].sum(), rtol=1e-5)
    survival = np.cumprod(accept * np.asarray(rows.supervised), axis=-1).sum(axis=(0, 1))
    np.testing.assert_allclose(sums["survival"], survival, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_the_vocabulary_in_pieces_gives_the_same_gradients(rng, chunk):
    anchors = ((2, 5, 8, 11, 13), (1, 2, 3, 4, 17))
    batch = make_batch(rng, lengths=((20,), (20,)), anchors=anchors)
    params, shared = random_params(), random_shared(rng)
    frozen, vocabulary = Frozen(shared=shared), full_vocabulary(shared)
    whole = run(LossConfig(), params, frozen, batch, vocabulary)
    pieces = run(LossConfig(anchor_chunk=chunk), params, frozen, batch, vocabulary)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), whole, pieces)


def test_the_custom_gradient_is_the_derivative(rng):
    batch, params, shared = make_batch(rng), random_params(), random_shared(rng)
    frozen, vocabulary = Frozen(shared=shared), full_vocabulary(shared)
    _, grads = run(LossConfig(), params, frozen, batch, vocabulary)
    direction = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32) * jnp.std(x), params
    )
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)))

    def at(t: float) -> float:
        moved = jax.tree.map(lambda p, d: p + t * d, params, direction)
        return float(run(LossConfig(), moved, frozen, batch, vocabulary)[0][0])

    step = 1e-2
    assert (at(step) - at(-step)) / (2 * step) == pytest.approx(float(slope), rel=0.03)


def test_the_target_gets_no_gradient(rng):
    batch, params, shared = make_batch(rng), random_params(), random_shared(rng)

    def loss_of(shared):
        frozen = Frozen(shared=shared)
        return batch_loss(DRAFT, LossConfig(), params, frozen, batch, full_vocabulary(shared))[0]

    grads = jax.jit(jax.grad(loss_of))(shared)
    assert not np.any(np.asarray(grads.head))


def test_the_hidden_loss_vanishes_at_the_target(rng):
    batch, params, shared = make_batch(rng), random_params(), random_shared(rng)
    metric = jnp.eye(shared.head.shape[1])
    frozen = Frozen(shared=shared, metric=metric, inverse_gram=inverse_gram(shared))
    loss = LossConfig(ce=0, l1=0, confidence=0, hidden=1.0)
    (far, _), grads = run(loss, params, frozen, batch, None)
    assert float(far) > 0.1 and np.abs(np.asarray(grads["context_proj"])).max() > 0
    hidden = jnp.asarray(rng.normal(size=(1, 2, 4, 32)), jnp.float32)
    weights = jnp.ones((1, 2, 4))
    assert float(hidden_loss(hidden - 1, hidden * 0 + 1, hidden, weights, frozen.metric)) < 1e-10


def test_candidates_that_are_everything_change_nothing(rng):
    batch, params, shared = make_batch(rng), random_params(), random_shared(rng)
    frozen = Frozen(shared=shared)
    whole = run(LossConfig(), params, frozen, batch, full_vocabulary(shared))
    rows = jnp.asarray(rng.permutation(VOCAB), jnp.int32)
    some = candidate_vocabulary(shared, rows, jnp.zeros(VOCAB))
    other = run(LossConfig(), params, frozen, batch, some)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), whole, other)


def test_sampled_candidates_estimate_the_normaliser(rng):
    counts = np.arange(VOCAB)[::-1]
    sampler = CandidateSampler(CandidateConfig(always=5, total=20), counts, np.arange(VOCAB))
    logits = rng.normal(size=VOCAB)
    sums = []
    for _ in range(3000):
        rows, log_weight = sampler.draw(np.array([7, 30]), rng)
        assert len(set(rows.tolist())) == 20
        assert {0, 1, 2, 3, 4, 7, 30} <= set(rows.tolist())
        sums.append(np.exp(logits[rows] + log_weight).sum())
    assert np.mean(sums) == pytest.approx(np.exp(logits).sum(), rel=0.02)


def test_a_reduced_vocabulary_leaves_unknown_labels_out(rng):
    batch, params, shared = make_batch(rng), random_params(), random_shared(rng)
    ids = frequent_tokens(np.asarray(batch.tokens), VOCAB, 10)
    reduced = reduce_vocabulary(shared, ids)
    params = params | {"markov": params["markov"] | {"w2": params["markov"]["w2"][ids]}}
    vocabulary = full_vocabulary(reduced)
    labels = np.asarray(block_rows(CONFIG, batch).labels)
    known = np.isin(labels, ids)
    assert known.any() and not known.all()
    assert (np.asarray(vocabulary.row_of[labels]) < 10).tolist() == known.tolist()
    (_, sums), grads = run(LossConfig(), params, Frozen(shared=reduced), batch, vocabulary)
    assert (np.asarray(sums["match"]) <= known.sum(axis=(0, 1))).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_frequent_tokens_are_in_order_of_frequency():
    assert frequent_tokens(np.array([3, 3, 1, 5, 5, 5]), 8, 4).tolist() == [5, 3, 1, 0]
    with pytest.raises(ValueError, match="draft_vocab_size=9"):
        frequent_tokens(np.array([3]), 8, 9)


def test_learning_rate_schedules():
    cosine = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_ratio=0.1), 100)
    assert float(cosine(0)) == pytest.approx(0.1)
    assert float(cosine(9)) == pytest.approx(1.0)
    assert float(cosine(55)) == pytest.approx(0.5, abs=1e-6)
    assert float(cosine(100)) == pytest.approx(0.0, abs=1e-6)
    config = OptimizerConfig(learning_rate=1.0, schedule="constant_then_linear", warmup_ratio=0.1)
    linear = learning_rate(config, 100)
    assert [round(float(linear(s)), 6) for s in (4, 50, 80, 90, 100)] == [0.5, 1.0, 1.0, 0.5, 0.0]


def test_accumulated_steps_equal_one_step_with_the_mean_gradient():
    config = OptimizerConfig(learning_rate=0.1, clip_norm=10.0)
    params = {"w": jnp.asarray([1.0, -2.0])}
    grads = [{"w": jnp.asarray([0.5, 1.0])}, {"w": jnp.asarray([1.5, -3.0])}]
    twice = make_optimizer(dataclasses.replace(config, accumulate=2), 10)
    state = twice.init(params)
    first, state = twice.update(grads[0], state, params)
    assert not np.any(np.asarray(first["w"]))
    second, _ = twice.update(grads[1], state, params)
    once = make_optimizer(config, 10)
    mean = {"w": (grads[0]["w"] + grads[1]["w"]) / 2}
    expected, _ = once.update(mean, once.init(params), params)
    np.testing.assert_allclose(second["w"], expected["w"], rtol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LossConfig(ce=-1.0), "negative"),
        (lambda: LossConfig(decay=0.0), "positive"),
        (lambda: OptimizerConfig(schedule="steps"), "schedule='steps'"),
        (lambda: CandidateConfig(always=10, total=10), "always < total"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_step_on_eight_devices_equals_a_step_on_one(rng):
    lengths, anchors = ((20,),) * 8, tuple((2 + i, 5, 8, 11 + i) for i in range(8))
    batch = make_batch(rng, lengths=lengths, anchors=anchors)
    keep = jnp.arange(4) < jnp.arange(1, 9)[:, None]  # rows carry unlike weights
    batch = dataclasses.replace(batch, keep=keep)
    shared, params = random_shared(rng), random_params()
    metric = jnp.eye(shared.head.shape[1])
    frozen = Frozen(shared=shared, metric=metric, inverse_gram=inverse_gram(shared))
    optimizer = make_optimizer(OptimizerConfig(), 10)
    state = TrainState(
        params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32)
    )

    def step(mesh):
        part = functools.partial(train_step, DRAFT, LossConfig(hidden=0.3), optimizer, mesh=mesh)
        return jax.jit(part)(state, frozen, batch, None)

    one, sums = step(None)
    eight, other = step(train_mesh(data=8))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), sums, other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one.params, eight.params)


def test_a_markov_head_moves_to_another_vocabulary():
    rng = np.random.default_rng(0)
    head = jnp.asarray(rng.normal(size=(40, 6)), jnp.float32)
    whole = SharedHead(embedding=head, head=head)
    old = reduce_vocabulary(whole, np.arange(5, 35))
    new = reduce_vocabulary(whole, np.array([39, 7, 20, 0]))
    linear = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    moved = carry_markov({"w2": old.head @ linear}, old, new)["w2"]
    np.testing.assert_allclose(moved, new.head @ linear, rtol=1e-4, atol=1e-5)
    trained = old.head @ linear + jnp.asarray(rng.normal(size=(30, 3)), jnp.float32)
    moved = carry_markov({"w2": trained}, old, new)["w2"]
    np.testing.assert_array_equal(moved[1:3], trained[jnp.array([2, 15])])  # kept as they are
    assert bool(jnp.isfinite(moved).all()) and moved.shape == (4, 3)
