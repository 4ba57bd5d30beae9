"""A tiny draft and batches of random content for the trainer's tests."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DraftConfig, RopeConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.train.blocks import TrainBatch
from dspark_jax.types import SharedHead

VOCAB, WIDTH = 50, 32
CONFIG = DraftConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope=RopeConfig(rope_theta=10000.0),
    block_size=4,
    mask_token_id=1,
    target_layer_ids=(0, 2),
    markov_rank=8,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
DRAFT = DenseDraft(config=CONFIG)


def make_batch(rng: np.random.Generator, lengths=((20,),), anchors=((5, 11),)) -> TrainBatch:
    """Rows of packed documents with random content; everything is assistant text."""
    size = max(sum(row) for row in lengths)
    shape = (len(lengths), size)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for r, row in enumerate(lengths):
        start = 0
        for n, length in enumerate(row, start=1):
            segments[r, start : start + length] = n
            positions[r, start : start + length] = np.arange(length)
            start += length
    return TrainBatch(
        tokens=jnp.asarray(rng.integers(2, VOCAB, shape), jnp.int32),
        loss_mask=jnp.asarray(segments > 0),
        positions=jnp.asarray(positions),
        segments=jnp.asarray(segments),
        context_features=jnp.asarray(rng.normal(size=(*shape, 2 * WIDTH)), jnp.float32),
        target_hidden=jnp.asarray(rng.normal(size=(*shape, WIDTH)), jnp.float32),
        anchors=jnp.asarray(anchors, jnp.int32),
        keep=jnp.ones(np.shape(anchors), bool),
    )


def random_shared(rng: np.random.Generator) -> SharedHead:
    """Embedding and head of the toy vocabulary."""
    return SharedHead(
        embedding=jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32),
        head=jnp.asarray(0.2 * rng.normal(size=(VOCAB, WIDTH)), jnp.float32),
    )


def random_params() -> dict:
    """Draft parameters whose Markov head does something."""
    params = DRAFT.init(jax.random.key(0))
    w2 = 0.1 * jax.random.normal(jax.random.key(1), params["markov"]["w2"].shape)
    return params | {"markov": params["markov"] | {"w2": w2}}
