"""Anchors, labels, masks: what a block may see and what it is trained on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.draft.dense import DenseDraft
from dspark_jax.train.blocks import TrainBatch, block_rows, sample_anchors
from dspark_jax.train.forward import block_attention, train_backbone
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.step import Frozen, batch_loss
from dspark_jax.train.vocabulary import full_vocabulary
from dspark_jax.types import SharedHead
from tests.unit.train_toys import CONFIG, DRAFT, make_batch, random_params, random_shared


@pytest.fixture
def shared(rng) -> SharedHead:
    return random_shared(rng)


@pytest.fixture
def params() -> dict:
    return random_params()


backbone = jax.jit(train_backbone, static_argnums=0)


@jax.jit
def run_loss(params: dict, shared: SharedHead, batch: TrainBatch) -> tuple:
    """Loss and gradients of one batch."""

    def loss_of(params):
        return batch_loss(
            DRAFT, LossConfig(), params, Frozen(shared=shared), batch, full_vocabulary(shared)
        )

    return jax.value_and_grad(loss_of, has_aux=True)(params)


def test_anchors_need_two_written_tokens_of_one_document():
    mask = jnp.asarray([[0, 0, 1, 1, 1, 0, 1, 0, 1, 1]], bool)
    segments = jnp.asarray([[1, 1, 1, 1, 1, 1, 1, 1, 1, 2]])
    anchors, keep = sample_anchors(jax.random.key(0), mask, segments, 6)
    assert anchors[0][keep[0]].tolist() == [2, 3]  # 8 is followed by another document
    assert keep.tolist() == [[True, True, False, False, False, False]]
    assert anchors[0, 2:].tolist() == [0, 0, 0, 0]


def test_anchors_are_a_uniform_sample_in_order():
    mask = jnp.ones((1, 21), bool)
    segments = jnp.ones((1, 21), jnp.int32)
    draw = jax.vmap(lambda key: sample_anchors(key, mask, segments, 5)[0][0])
    anchors = np.asarray(draw(jax.random.split(jax.random.key(3), 4000)))
    assert (np.diff(anchors, axis=1) > 0).all()
    counts = np.bincount(anchors.reshape(-1), minlength=21)
    assert counts[20] == 0  # nothing follows the last token
    assert abs(counts[:20] - 1000).max() < 150  # five standard deviations


def test_labels_stop_with_the_assistant_span(rng):
    batch = make_batch(rng, anchors=((5, 9),))
    mask = np.ones((1, 20), bool)
    mask[0, 8] = False  # the user speaks at 8 and the target again from 9 on
    batch = dataclasses.replace(batch, loss_mask=jnp.asarray(mask))
    rows = block_rows(CONFIG, batch)
    assert rows.labels[0, 0].tolist() == batch.tokens[0, 6:10].tolist()
    assert rows.labels[0, 1].tolist() == batch.tokens[0, 10:14].tolist()
    assert rows.previous[0, 0].tolist() == batch.tokens[0, 5:9].tolist()
    # labels 6 and 7 count; 8 does not, and so neither does 9 although the target wrote it
    assert rows.supervised[0].tolist() == [[True, True, False, False], [True] * 4]
    assert rows.input_ids[0, 0].tolist() == [int(batch.tokens[0, 5]), 1, 1, 1]


def test_labels_stop_at_the_end_of_the_text(rng):
    rows = block_rows(CONFIG, make_batch(rng, anchors=((17, 19),)))
    assert rows.supervised[0].tolist() == [[True, True, False, False], [False] * 4]


def test_a_block_does_not_see_its_anchor_or_later(rng, shared, params):
    batch = make_batch(rng)
    rows = block_rows(CONFIG, batch)
    plain = backbone(DRAFT, params, shared.embedding, batch, rows)
    features = batch.context_features.at[0, 5:].set(9.0)
    changed = backbone(
        DRAFT, params, shared.embedding, dataclasses.replace(batch, context_features=features), rows
    )
    np.testing.assert_array_equal(plain[0, 0], changed[0, 0])  # anchor 5
    assert np.abs(plain[0, 1] - changed[0, 1]).max() > 1e-3  # anchor 11 sees rows 5..10
    features = batch.context_features.at[0, 4].set(9.0)
    changed = backbone(
        DRAFT, params, shared.embedding, dataclasses.replace(batch, context_features=features), rows
    )
    assert np.abs(plain[0, 0] - changed[0, 0]).max() > 1e-3


def test_the_window_hides_older_context(rng, shared, params):
    draft = DenseDraft(config=dataclasses.replace(CONFIG, sliding_window=3))
    batch = make_batch(rng)
    rows = block_rows(CONFIG, batch)
    plain = backbone(draft, params, shared.embedding, batch, rows)
    old = dataclasses.replace(batch, context_features=batch.context_features.at[0, :2].set(9.0))
    np.testing.assert_array_equal(
        plain[0, 0], backbone(draft, params, shared.embedding, old, rows)[0, 0]
    )
    new = dataclasses.replace(batch, context_features=batch.context_features.at[0, 2].set(9.0))
    seen = backbone(draft, params, shared.embedding, new, rows)
    assert np.abs(plain[0, 0] - seen[0, 0]).max() > 1e-3


def test_two_packed_documents_equal_two_separate_ones(rng, shared, params):
    packed = make_batch(rng, lengths=((9, 8),), anchors=((4, 8, 10, 13),))

    def part(start: int, stop: int, anchors: tuple) -> TrainBatch:
        cut = jax.tree.map(lambda x: x[:, start:stop], packed)
        pad = 9 - (stop - start)
        cut = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)), cut)
        return dataclasses.replace(
            cut,
            segments=(cut.segments > 0).astype(jnp.int32),
            anchors=jnp.asarray([anchors], jnp.int32),
            keep=jnp.ones((1, 2), bool),
        )

    parts = part(0, 9, (4, 8)), part(9, 17, (1, 4))
    separate = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *parts)
    (one, sums), grads = run_loss(params, shared, packed)
    (two, other), other_grads = run_loss(params, shared, separate)
    assert float(sums["count"].sum()) == float(other["count"].sum()) > 8
    np.testing.assert_allclose(one, two, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, other_grads)


def test_unused_anchor_slots_change_nothing_and_stay_finite(rng, shared, params):
    batch = make_batch(rng)
    (few, _), grads = run_loss(params, shared, batch)
    spare = dataclasses.replace(
        batch,
        anchors=jnp.pad(batch.anchors, ((0, 0), (0, 3))),
        keep=jnp.pad(batch.keep, ((0, 0), (0, 3))),
    )
    (same, _), same_grads = run_loss(params, shared, spare)
    np.testing.assert_allclose(few, same, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, same_grads)
    nothing = dataclasses.replace(spare, keep=jnp.zeros_like(spare.keep))
    (zero, _), zero_grads = run_loss(params, shared, nothing)
    assert float(zero) == 0.0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(zero_grads))


def test_attention_in_chunks_equals_attention_at_once(rng):
    shape = (2, 7, 4, 4, 8)
    q, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    own = [jnp.asarray(rng.normal(size=(2, 7, 4, 2, 8)), jnp.float32) for _ in range(2)]
    far = [jnp.asarray(rng.normal(size=(2, 30, 2, 8)), jnp.float32) for _ in range(2)]
    mask = jnp.asarray(rng.random((2, 7, 30)) < 0.5).at[0, 0].set(False)

    def run(chunk: int) -> tuple:
        def total(*arrays):
            return (block_attention(*arrays, mask, scale=0.3, chunk=chunk) * cotangent).sum()

        return jax.jit(jax.value_and_grad(total, argnums=range(5)))(q, *own, *far)

    at_once, in_chunks = run(64), run(3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), at_once, in_chunks)
