"""Draft layouts: each is read to the same draft; what is written is read back."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoint.draft import load_draft, save_draft
from dspark_jax.checkpoint.draft_layouts import deepspec_config_json, read_draft_config
from dspark_jax.checkpoint.draft_vocab import reduce_vocabulary
from dspark_jax.checkpoint.fingerprint import (
    TargetFingerprint,
    fingerprint_params,
    fingerprint_target,
)
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.checkpoint.target import load_target
from dspark_jax.config import RopeConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.target.llama import LlamaTarget, stack_layers
from tests.unit.draft_files import (
    FROZEN,
    GOLDEN,
    draft_from,
    golden_target,
    read_files,
    to_specforge,
    to_speculators,
    write_files,
)

PAIRS = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash")


def _assert_same_params(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def _load(directory, name="qwen3_vanilla", **options):
    return load_draft(directory, *golden_target(name), **options)


def _edited(tmp_path, *, hf=None, drop=(), add=None, name="qwen3_vanilla", layout=None):
    """A golden draft with another config or other tensors."""
    config, tensors = read_files(GOLDEN / name / "draft")
    if layout is not None:
        config, tensors = layout(config, tensors)
    config |= hf or {}
    tensors = {key: value for key, value in tensors.items() if key not in drop} | (add or {})
    return write_files(tmp_path / "edited", config, tensors)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("layout", [to_speculators, to_specforge])
def test_other_layouts_give_the_same_draft(tmp_path, name, layout):
    config, params, shared = _load(GOLDEN / name / "draft", name)
    directory = write_files(tmp_path, *layout(*read_files(GOLDEN / name / "draft")))
    other, other_params, other_shared = _load(directory, name)
    layers = other.num_target_layers  # speculators does not say
    assert other == dataclasses.replace(config, num_target_layers=layers)
    assert layers == (None if layout is to_speculators else 5)
    _assert_same_params(other_params, params)
    assert other_shared.target_ids is None
    np.testing.assert_array_equal(other_shared.head, shared.head)


@pytest.mark.parametrize("name", PAIRS)
def test_written_draft_is_read_back(tmp_path, name):
    config, params, shared = _load(GOLDEN / name / "draft", name)
    fingerprint = fingerprint_target(GOLDEN / name / "target")
    save_draft(tmp_path / "a" / "b", config, params, fingerprint=fingerprint)
    other, other_params, _ = _load(tmp_path / "a" / "b", name, fingerprint=fingerprint)
    assert other == config
    _assert_same_params(other_params, params)
    stored = load_file(tmp_path / "a" / "b" / "model.safetensors")
    assert set(stored) == set(read_files(GOLDEN / name / "draft")[1]) - set(FROZEN)
    save_draft(tmp_path / "a" / "b", config, params, include_frozen=shared)  # replaces it
    _, original = read_files(GOLDEN / name / "draft")
    hf, stored = read_files(tmp_path / "a" / "b")
    assert hf["architectures"] == ["Qwen3DSparkModel"] and "dspark_target" not in hf
    assert set(stored) == set(original)
    for key, value in original.items():
        np.testing.assert_array_equal(stored[key], value)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("name", PAIRS)
def test_loaded_trees_have_the_shapes_of_the_models(name):
    config, params, _ = _load(GOLDEN / name / "draft", name)
    shapes = jax.eval_shape(DenseDraft(config=config).init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    target, params = load_target(GOLDEN / name / "target")
    shapes = jax.eval_shape(LlamaTarget(config=target).init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, stack_layers(params)) == jax.tree.map(jnp.shape, shapes)


def test_written_config_has_the_keys_of_the_reference():
    for name in PAIRS:
        hf, _ = read_files(GOLDEN / name / "draft")
        reader = TensorReader(GOLDEN / name / "draft")
        ours = deepspec_config_json(read_draft_config(hf, reader), dtype="float32")
        assert set(hf) - set(ours) <= {
            "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version",
        }  # fmt: skip
        differing = {key for key in ours if hf.get(key) != ours[key]}
        assert differing <= {"num_anchors", "max_window_layers"}


def test_prefixes_and_shards(tmp_path):
    config, params, _ = _load(GOLDEN / "qwen3_vanilla" / "draft")
    hf, tensors = read_files(GOLDEN / "qwen3_vanilla" / "draft")
    renamed = {
        f"_orig_mod.model.{key}".replace("layers.1.", "layers.1._orig_mod."): value
        for key, value in tensors.items()
    }
    directory = write_files(tmp_path, hf, renamed, shards=3)
    other, other_params, _ = _load(directory)
    assert other == config
    _assert_same_params(other_params, params)


def test_bfloat16_file_and_parameters(tmp_path):
    config, params, shared = _load(GOLDEN / "qwen3_vanilla" / "draft")
    save_draft(tmp_path / "d", config, params, dtype=jnp.bfloat16, include_frozen=shared)
    hf, stored = read_files(tmp_path / "d")
    assert hf["dtype"] == "bfloat16"
    assert {value.dtype for value in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    _, rounded, _ = _load(tmp_path / "d", dtype=jnp.bfloat16)
    _assert_same_params(rounded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_embedding_and_head_are_the_targets_own_arrays():
    config, shared = golden_target("qwen3_vanilla")
    _, params, used = load_draft(GOLDEN / "qwen3_vanilla" / "draft", config, shared)
    assert used.embedding is shared.embedding and used.head is shared.head
    assert not {"embedding", "head"} & set(params)


@pytest.mark.parametrize("ordered", [True, False])
def test_reduced_vocabulary_against_numpy(tmp_path, rng, ordered):
    ids = np.flatnonzero(np.arange(97) % 3 != 1)
    ids = ids if ordered else rng.permutation(ids)
    hf, tensors = read_files(GOLDEN / "qwen3_vanilla" / "draft")
    directory = write_files(tmp_path / "d", *to_speculators(hf, tensors, ids=ids))
    config, params, shared = _load(directory)
    assert config.draft_vocab_size == config.output_vocab_size == len(ids)
    np.testing.assert_array_equal(shared.target_ids, ids)
    inverse = [list(ids).index(token) if token in ids else len(ids) for token in range(97)]
    np.testing.assert_array_equal(shared.draft_ids, inverse)

    whole = draft_from(*_load(GOLDEN / "qwen3_vanilla" / "draft"))
    block = draft_from(config, params, shared)
    base = np.asarray(whole.base_logits)[0][:, ids]
    np.testing.assert_allclose(block.base_logits[0], base, atol=1e-5)
    w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    golden = load_file(GOLDEN / "qwen3_vanilla" / "block_forward.safetensors")
    previous = golden["token_ids"][0, -1]
    for k in range(config.block_size):
        logits = base[k] + w2[ids] @ w1[previous]
        np.testing.assert_allclose(block.draft_logits[0, k], logits, atol=1e-4)
        previous = ids[np.argmax(logits)]
        assert block.draft_tokens[0, k] == previous

    save_draft(tmp_path / "again", config, params, include_frozen=shared)
    other, other_params, other_shared = _load(tmp_path / "again")
    assert other == config
    _assert_same_params(other_params, params)
    _assert_same_params(other_shared, shared)
    with pytest.raises(ValueError, match="draft_vocab_size=65 needs its token map"):
        save_draft(tmp_path / "mapless", config, params)
    assert not (tmp_path / "mapless").exists()


def test_identity_map_of_the_whole_vocabulary_is_no_map(tmp_path):
    hf, tensors = read_files(GOLDEN / "qwen3_vanilla" / "draft")
    hf, tensors = to_speculators(hf, tensors, ids=np.arange(97))
    config, _, shared = _load(write_files(tmp_path, hf, tensors))
    assert config.draft_vocab_size is None and shared.target_ids is None


ANCHOR_CASES = {  # sample_from_anchor, proposed tokens of a block of 5 -> drafts per block
    "stated": (True, None, 5),
    "stated_false": (False, 4, 4),
    "stated_wins": (True, 3, 5),
    "told_by_tokens": (None, 4, 4),
    "told_by_full_block": (None, 5, 5),
    "nothing": (None, None, 5),
}


@pytest.mark.parametrize(("flag", "tokens", "drafts"), ANCHOR_CASES.values(), ids=ANCHOR_CASES)
def test_speculators_slot_rule(tmp_path, flag, tokens, drafts):
    method = {} if tokens is None else {"speculative_tokens": tokens}
    hf = {"sample_from_anchor": flag, "speculators_config": {"proposal_methods": [method]}}
    config, params, shared = _load(_edited(tmp_path, hf=hf, layout=to_speculators))
    assert config.num_drafts == drafts
    save_draft(tmp_path / "again", config, params)
    assert _load(tmp_path / "again")[0] == config
    block = draft_from(config, params, shared)
    assert block.draft_tokens.shape == (1, drafts)
    whole = draft_from(dataclasses.replace(config, sample_from_anchor=True), params, shared)
    np.testing.assert_allclose(block.block_hidden, whole.block_hidden[:, -drafts:], atol=1e-5)


def test_more_proposed_tokens_than_rows_are_refused(tmp_path):
    methods = [{"speculative_tokens": 5}]
    hf = {"sample_from_anchor": False, "speculators_config": {"proposal_methods": methods}}
    with pytest.raises(ValueError, match="proposes 5 tokens, but block_size=5 .* has 4"):
        _load(_edited(tmp_path, hf=hf, layout=to_speculators))


def test_specforge_prefixed_and_top_level_keys(tmp_path):
    expected, params, _ = _load(GOLDEN / "qwen3_vanilla" / "draft")
    hf, tensors = to_specforge(*read_files(GOLDEN / "qwen3_vanilla" / "draft"))
    del hf["dflash_config"], hf["block_size"]
    hf |= {
        "dspark_block_size": 5,
        "dspark_markov_rank": 8,
        "dspark_target_layer_ids": [0, 1, 3],
        "dspark_noise_token_id": 96,
        "rope_is_neox_style": False,
        "runtime_block_size": 3,
    }
    config, other, _ = _load(write_files(tmp_path / "a", hf, tensors))
    interleaved = dataclasses.replace(expected.rope, interleaved=True)
    assert config == dataclasses.replace(expected, rope=interleaved)
    _assert_same_params(other, params)
    save_draft(tmp_path / "b", config, params)
    assert _load(tmp_path / "b")[0] == config
    hf["markov_rank"] = 4
    with pytest.raises(ValueError, match="contradicts itself: .*'dspark_markov_rank': 8"):
        _load(write_files(tmp_path / "c", hf, tensors))


def test_interleaved_rope_changes_the_drafts():
    config, params, shared = _load(GOLDEN / "qwen3_vanilla" / "draft")
    rope = dataclasses.replace(config.rope, interleaved=True)
    plain = draft_from(config, params, shared)
    other = draft_from(dataclasses.replace(config, rope=rope), params, shared)
    assert np.abs(plain.base_logits - other.base_logits).max() > 1e-2


def test_heads_left_out_of_the_config_are_told_by_the_tensors(tmp_path):
    for name in PAIRS:
        expected, _, _ = _load(GOLDEN / name / "draft", name)
        hf, tensors = to_specforge(*read_files(GOLDEN / name / "draft"))
        hf["dflash_config"] = {
            key: value
            for key, value in hf["dflash_config"].items()
            if not key.startswith(("markov", "enable", "confidence"))
        }
        config, _, _ = _load(write_files(tmp_path / name, hf, tensors), name)
        assert config == expected


def test_head_dim_is_read_not_derived(tmp_path):
    """Golden drafts have head_dim 16 where width / heads is 8."""
    hf, tensors = read_files(GOLDEN / "qwen3_vanilla" / "draft")
    assert hf["head_dim"] == 16 != hf["hidden_size"] // hf["num_attention_heads"]
    del hf["head_dim"]  # then the norms tell it
    config, _, _ = _load(write_files(tmp_path, hf, tensors))
    assert config.head_dim == 16


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": None}, None),
        ({"sliding_window": 0}, None),
        ({"sliding_window": 6, "use_sliding_window": False}, None),
        ({"sliding_window": 6, "use_sliding_window": True}, None),  # layer_types say full
        ({"sliding_window": 6, "use_sliding_window": True, "layer_types": "sliding"}, 6),
        ({"sliding_window": 6, "use_sliding_window": None, "layer_types": None}, 6),
        (
            {
                "sliding_window": 6,
                "use_sliding_window": True,
                "layer_types": None,
                "max_window_layers": 2,
            },
            None,
        ),
    ],
)
def test_sliding_window_of_the_config(tmp_path, changes, window):
    if changes.get("layer_types") == "sliding":
        changes = changes | {"layer_types": ["sliding_attention"] * 2}
    config, params, _ = _load(_edited(tmp_path, hf=changes))
    assert config.sliding_window == window
    save_draft(tmp_path / "again", config, params)
    assert _load(tmp_path / "again")[0] == config


def test_sliding_window_hides_older_context_and_only_that():
    config, params, shared = _load(GOLDEN / "qwen3_vanilla" / "draft")
    rows = 16
    plain = draft_from(config, params, shared, context=rows).base_logits
    wide = dataclasses.replace(config, sliding_window=rows)
    np.testing.assert_allclose(
        draft_from(wide, params, shared, context=rows).base_logits, plain, atol=1e-5
    )
    narrow = dataclasses.replace(config, sliding_window=6)
    cut = draft_from(narrow, params, shared, context=rows).base_logits
    assert np.abs(cut - plain).max() > 1e-3
    spoiled = draft_from(narrow, params, shared, context=rows, spoil_before=rows - 6)
    np.testing.assert_allclose(spoiled.base_logits, cut, atol=1e-5)
    too_far = draft_from(narrow, params, shared, context=rows, spoil_before=rows - 5)
    assert np.abs(too_far.base_logits - cut).max() > 1e-3


ROPES = {
    "default": RopeConfig(rope_theta=5e6),
    "linear": RopeConfig(rope_theta=1e4, rope_type="linear", factor=3.0),
    "llama3": RopeConfig(
        rope_theta=5e5, rope_type="llama3", factor=8.0, original_max_position_embeddings=64
    ),
    "yarn": RopeConfig(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.1
    ),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_rope_is_written_and_read_back(tmp_path, rope):
    config, shared = golden_target("qwen3_vanilla")
    draft = dataclasses.replace(
        _load(GOLDEN / "qwen3_vanilla" / "draft")[0],
        rope=rope, attention_bias=True, num_hidden_layers=1, confidence_head_with_markov=False,
        sliding_window=9, num_target_layers=None,
    )  # fmt: skip
    params = DenseDraft(config=draft).init(jax.random.key(0))
    save_draft(tmp_path / "d", draft, params)
    other, other_params, _ = load_draft(tmp_path / "d", config, shared)
    assert other == draft
    _assert_same_params(other_params, params)


def test_fingerprint_is_of_the_weights():
    directory = GOLDEN / "qwen3_moe_tiny"
    stored = fingerprint_target(directory, name="a")
    config, params = load_target(directory)
    for tree in (
        params,
        stack_layers(params),
        jax.tree.map(lambda x: x.astype("bfloat16"), params),
    ):
        assert stored.matches(fingerprint_params(config, tree, name="b"))
    assert stored.num_hidden_layers == config.num_hidden_layers
    layers = list(params["layers"])
    layers[1] = layers[1] | {"o": layers[1]["o"] * 1.05}
    changed = fingerprint_params(config, params | {"layers": tuple(layers)}, name="a")
    assert not stored.matches(changed)


def test_draft_of_another_target_is_refused(tmp_path):
    config, params, shared = _load(GOLDEN / "qwen3_vanilla" / "draft")
    mine = fingerprint_target(GOLDEN / "qwen3_vanilla" / "target", name="mine")
    save_draft(tmp_path / "d", config, params, fingerprint=mine)
    stored = json.loads((tmp_path / "d" / "config.json").read_text())["dspark_target"]
    assert TargetFingerprint.from_json(stored) == mine
    _load(tmp_path / "d", fingerprint=dataclasses.replace(mine, name="called otherwise"))
    theirs = fingerprint_target(GOLDEN / "qwen3_gated" / "target", name="theirs")
    with pytest.raises(ValueError, match="trained for target 'mine' .* this target is 'theirs'"):
        _load(tmp_path / "d", fingerprint=theirs)
    target, other = load_target(GOLDEN / "llama_tiny")
    shared = LlamaTarget(config=target).shared_head(other)
    with pytest.raises(ValueError, match="'mine' .* vocab_size, hidden_size, num_hidden_layers di"):
        load_draft(tmp_path / "d", target, shared)
    del stored["sha256"]
    with pytest.raises(ValueError, match=r"dspark_target in config.json lacks \['sha256'\]"):
        _load(_edited(tmp_path, hf={"dspark_target": stored}))


def test_save_leaves_foreign_directories_and_earlier_drafts_alone(tmp_path, monkeypatch):
    config, params, shared = _load(GOLDEN / "qwen3_dflash" / "draft", "qwen3_dflash")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="holds other files"):
        save_draft(tmp_path / "notes", config, params)
    save_draft(tmp_path / "d", config, params)
    before = (tmp_path / "d" / "model.safetensors").read_bytes()

    def full_disk(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr("dspark_jax.checkpoint.safetensors.save_file", full_disk)
    with pytest.raises(OSError, match="no space left .*free some space"):
        save_draft(tmp_path / "d", config, jax.tree.map(jnp.zeros_like, params))
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "notes"]


def test_reduced_head_keeps_the_embedding(rng):
    _, shared = golden_target("qwen3_vanilla")
    reduced = reduce_vocabulary(shared, np.array([5, 0, 96], np.int32))
    assert reduced.embedding is shared.embedding
    np.testing.assert_array_equal(reduced.head, np.asarray(shared.head)[[5, 0, 96]])
