"""What is said of the V4.1 draft, one statement a test; drafts are greedy on the golden model."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoint.deepseek import load_deepseek_draft
from dspark_jax.checkpoint.target import load_target
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.draft.propose import propose
from dspark_jax.kv_cache import WindowCache
from dspark_jax.schedule import survival_of
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import Block, Params, SamplingParams, SharedHead
from tests.deepseek_models import deepseek_config
from tools.parity_deepseek import run_prefill

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v41_tiny"


@dataclasses.dataclass(frozen=True)
class Model:
    """The golden draft after its prompt, with one compiled program."""

    draft: DeepseekDraft
    params: Params
    shared: SharedHead
    cache: WindowCache
    length: int
    run: object

    def block(self, *, anchor: int = 7, temperature: float = 0.0, seed: int = 0, **new) -> Block:
        """A block for two sequences with the same anchor; `new` replaces params or shared."""
        ones = jnp.ones(2)
        sampling = SamplingParams(
            temperature=ones * temperature, top_k=jnp.zeros(2, jnp.int32), top_p=ones,
            min_p=0 * ones, seed=jnp.full(2, seed, jnp.uint32),
        )  # fmt: skip
        given = {"params": self.params, "shared": self.shared, "cache": self.cache} | new
        return self.run(*given.values(), jnp.full(2, anchor), jnp.full(2, self.length), sampling)


@pytest.fixture(scope="module")
def model() -> Model:
    """Everything the statements are about."""
    config, params, shared = load_deepseek_draft(GOLDEN)
    taps = load_file(GOLDEN / "outputs.safetensors")["prefill_taps"]
    draft = DeepseekDraft(config=config)

    @jax.jit
    def run(params, shared, cache, anchor, anchor_pos, sampling) -> Block:
        return propose(
            draft, params, shared, cache, anchor=anchor, anchor_pos=anchor_pos,
            round_index=jnp.zeros(2, jnp.int32), sampling=sampling, coupled=False,
        )  # fmt: skip

    cache = run_prefill(draft, params, taps)
    return Model(draft, params, shared, cache, taps.shape[1], run)


def _bias(block: Block) -> np.ndarray:
    return np.asarray(block.draft_logits - block.base_logits)


def test_placeholder_rows_carry_no_noise(model):
    """Hidden states depend on context and anchor only: no seed, no temperature, no drawn token."""
    greedy, drawn = model.block(), model.block(temperature=1.5, seed=9)
    assert (greedy.draft_tokens != drawn.draft_tokens).any()
    np.testing.assert_array_equal(greedy.block_hidden, drawn.block_hidden)
    np.testing.assert_array_equal(greedy.base_logits, drawn.base_logits)


def test_first_position_is_biased_by_the_anchor(model):
    markov = model.params["markov"]
    for anchor in (7, 100):
        expected = markov["w2"] @ markov["w1"][anchor]
        bias = _bias(model.block(anchor=anchor))[:, 0]
        np.testing.assert_allclose(bias, np.stack([expected] * 2), atol=1e-5)
        assert np.abs(bias).max() > 1e-2


def test_bias_depends_on_the_token_before_and_not_on_the_position(model):
    markov, block = model.params["markov"], model.block(temperature=1.0, seed=3)
    before = np.concatenate([np.full((2, 1), 7), block.draft_tokens[:, :-1]], axis=1)
    assert len(np.unique(before)) > 4
    expected = np.asarray(markov["w1"])[before] @ np.asarray(markov["w2"]).T
    np.testing.assert_allclose(_bias(block), expected, atol=1e-5)


def test_confidence_reads_the_token_before_and_not_its_own(model):
    """c_k is a function of h_k and W1[x_{k-1}], bias-free, on the hidden state before the norm."""
    weight = np.asarray(model.params["confidence"]["weight"], np.float64)
    table = np.asarray(model.params["markov"]["w1"], np.float64)
    block = model.block(temperature=1.0, seed=4)
    before = np.concatenate([np.full((2, 1), 7), block.draft_tokens[:, :-1]], axis=1)
    joined = np.concatenate([block.block_hidden, table[before]], axis=-1)
    np.testing.assert_allclose(block.confidence_logits, joined @ weight, atol=1e-5)
    other = model.block(temperature=1.0, seed=5)
    first_differs = block.draft_tokens[:, 0] != other.draft_tokens[:, 0]
    assert first_differs.any()
    np.testing.assert_array_equal(block.confidence_logits[:, 0], other.confidence_logits[:, 0])
    changed = block.confidence_logits[:, 1] != other.confidence_logits[:, 1]
    np.testing.assert_array_equal(changed, first_differs)


def test_survival_is_the_product_of_confidences(model):
    confidence = jax.nn.sigmoid(model.block().confidence_logits)
    expected = [[np.prod(row[: j + 1]) for j in range(row.size)] for row in np.asarray(confidence)]
    np.testing.assert_allclose(survival_of(confidence), expected, rtol=1e-6)


def test_embedding_and_head_are_the_targets(model):
    """The draft has no tables of its own but the Markov head's, and follows the target's."""
    table = model.shared.embedding.shape
    sizes = {leaf.shape for leaf in jax.tree.leaves(model.params)}
    assert table not in sizes
    stored = load_file(GOLDEN / "model.safetensors")
    np.testing.assert_array_equal(model.shared.embedding, stored["embed.weight"])
    np.testing.assert_array_equal(model.shared.head, stored["head.weight"])
    block = model.block()
    doubled = model.block(shared=model.shared.replace(head=2 * model.shared.head))
    np.testing.assert_allclose(doubled.base_logits, 2 * block.base_logits, rtol=1e-5)
    noise = model.draft.config.mask_token_id
    moved = model.shared.embedding.at[noise].add(1.0)
    moved = model.block(shared=model.shared.replace(embedding=moved))
    assert np.abs(moved.block_hidden - block.block_hidden).max() > 1e-2


def test_context_is_keys_and_values_only(model):
    """Without a window the rows still run: experts and queries see only the block's own rows."""
    empty = WindowCache(kv=jnp.zeros_like(model.cache.kv))
    at_start = dataclasses.replace(model, length=0)
    block, other = at_start.block(cache=empty), at_start.block(cache=model.cache)
    np.testing.assert_array_equal(block.block_hidden, other.block_hidden)
    assert block.block_hidden.shape == (2, 5, 64)
    assert np.abs(block.block_hidden - model.block().block_hidden).max() > 1e-2


def test_all_rows_see_the_same_positions(model):
    """Every slot of the window and every row of the block, for every row: 128 + 5 at full size."""
    config, hidden = model.draft.config, np.asarray(model.block().block_hidden)
    window = config.sliding_window
    assert model.length >= window and hidden.shape[1] == config.block_size == 5
    for slot in range(window):
        moved = WindowCache(kv=model.cache.kv.at[:, :, slot].add(1.0))
        change = np.abs(model.block(cache=moved).block_hidden - hidden).max(axis=-1)
        assert (change > 1e-6).all(), slot
    table = model.shared.embedding
    for token in (7, config.mask_token_id):  # the anchor's row, and the others
        moved = model.shared.replace(embedding=table.at[token].multiply(-1.0))
        change = np.abs(model.block(shared=moved).block_hidden - hidden).max(axis=-1)
        assert (change > 1e-6).all(), token


def test_taps_are_what_enters_the_named_layers():
    """V4.1 names layers by what enters them, V4 by what leaves them (transformers' next entry)."""
    folder = GOLDEN.parent / "llama_tiny"
    target_config, params = load_target(folder)
    golden = load_file(folder / "outputs.safetensors")
    target = LlamaTarget(config=target_config, tap_layer_ids=(0, 1, 2))
    rows, width = golden["tokens"].shape
    cache, zeros = target.make_cache(rows, width, jnp.float32), jnp.zeros(rows, jnp.int32)
    out = jax.jit(target.forward)(params, jnp.asarray(golden["tokens"]), cache, cache_len=zeros)
    taps, ids = jnp.split(out.context_features, 3, axis=-1), [1, 2]
    for family, first in (("deepseek_v41", 0), ("deepseek_v4", 1)):
        config = deepseek_config(family, num_hidden_layers=4, dspark_target_layer_ids=ids)
        for tap, stored in zip(config.target_layer_ids, ids, strict=True):
            expected = golden[f"hidden.{stored + first}"]  # hidden.i is what enters layer i
            np.testing.assert_allclose(taps[tap], expected, atol=2e-4)
