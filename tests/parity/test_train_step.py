"""The training step against golden vectors of the official PyTorch code."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoint.draft import draft_rules, load_draft
from dspark_jax.checkpoint.rules import stored_tensors
from dspark_jax.checkpoint.target import load_target
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.train.blocks import TrainBatch
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.step import Frozen, batch_loss
from dspark_jax.train.vocabulary import full_vocabulary
from tools import parity

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NAMES = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash")


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_array(name):
    results = parity.check_train_step(GOLDEN / name)
    assert len(results) > 30
    assert not [f"{r.name}: {r.detail}" for r in results if not r.ok]


@pytest.mark.parametrize("name", ["qwen3_rnn", "qwen3_dflash"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_step_as_trained_in_pieces(name, chunk):
    golden = load_file(GOLDEN / name / "train_step.safetensors")
    target_config, target_params = load_target(GOLDEN / name / "target")
    shared = LlamaTarget(config=target_config).shared_head(target_params)
    config, params, shared = load_draft(GOLDEN / name / "draft", target_config, shared)
    tokens = jnp.asarray(golden["token_ids"], jnp.int32)
    batch = TrainBatch(
        tokens=tokens,
        loss_mask=jnp.asarray(golden["loss_mask"]) > 0,
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        segments=jnp.ones_like(tokens),
        context_features=jnp.asarray(golden["context_features"]),
        target_hidden=jnp.asarray(golden["target_last_hidden"]),
        anchors=jnp.asarray(golden["anchor_positions"], jnp.int32),
        keep=jnp.asarray(golden["block_keep_mask"]),
    )
    draft, frozen = DenseDraft(config=config), Frozen(shared=shared)

    @jax.jit
    def step(params):
        def loss_of(params):
            weights, vocabulary = LossConfig(anchor_chunk=chunk), full_vocabulary(shared)
            return batch_loss(draft, weights, params, frozen, batch, vocabulary)[0]

        return jax.value_and_grad(loss_of)(params)

    loss, grads = step(params)
    np.testing.assert_allclose(loss, golden["loss"][0], rtol=1e-4)
    for key, ours in stored_tensors(grads, draft_rules(config)).items():
        expected = golden[f"grad.{key}"]
        worst = np.abs(ours - expected).max() / np.abs(expected).max()
        assert worst <= 1e-4, f"{key}: {worst}"
