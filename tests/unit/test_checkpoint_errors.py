"""Bad checkpoints: every one is refused in words that say what is wrong, or handled."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.draft import load_draft, save_draft
from dspark_jax.checkpoint.target import load_target
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.target.llama import LlamaTarget
from tests.unit.draft_files import (
    GOLDEN,
    draft_from,
    golden_target,
    read_files,
    to_specforge,
    to_speculators,
    write_files,
)

LLAMA = GOLDEN / "llama_tiny"
VANILLA = GOLDEN / "qwen3_vanilla" / "draft"
HEADS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
DOWN = "layers.1.mlp.down_proj.weight"


def _load(directory, pair="qwen3_vanilla"):
    return load_draft(directory, *golden_target(pair))


def _draft(tmp_path, *, hf=None, unset=(), drop=(), add=None, layout=None):
    """The golden vanilla draft with another config or other tensors."""
    config, tensors = read_files(VANILLA)
    if layout is not None:
        config, tensors = layout(config, tensors)
    config = {key: value for key, value in (config | (hf or {})).items() if key not in unset}
    tensors = {key: value for key, value in tensors.items() if key not in drop} | (add or {})
    return write_files(tmp_path / "draft", config, tensors)


def _refused(tmp_path, match, **changes):
    with pytest.raises(ValueError, match=match):
        _load(_draft(tmp_path, **changes))


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_truncated_file(tmp_path, kind, kept):
    source, load = (LLAMA, load_target) if kind == "target" else (VANILLA, _load)
    shutil.copytree(source, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.safetensors is truncated or not a safetensors fil"):
        load(tmp_path / "cut")


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json not found; expected a checkpoint dir"):
        load_target(tmp_path / "absent")
    hf, tensors = read_files(LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(
        FileNotFoundError, match="no model.safetensors and no model.safetensors.ind"
    ):
        load_target(tmp_path)
    write_files(tmp_path, hf, tensors, shards=3)
    load_target(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks the shards \['model-00002-of-00003"):
        load_target(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="index.json is damaged"):
        load_target(tmp_path)
    for text, match in (("{", "is not valid JSON"), ("[]", "holds a list; expected a JSON obj")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            load_target(tmp_path)


TARGET_CASES = {
    "missing": (
        lambda t: t.pop("model.layers.2.mlp.up_proj.weight"),
        "missing tensor model.layers.2.mlp.up_proj.weight",
    ),
    "extra": (
        lambda t: t.update({"model.layers.9.mlp.up_proj.weight": np.zeros((1, 1), np.float32)}),
        "unexpected tensor model.layers.9.mlp.up_proj.weight",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": np.zeros(35, np.float32)}),
        r"model.norm.weight has shape \[35\], expected \[36\]",
    ),
    "dtype": (
        lambda t: t.update({"model.norm.weight": np.zeros(36, np.int8)}),
        "model.norm.weight is I8, expected one of",
    ),
}


@pytest.mark.parametrize(("change", "match"), TARGET_CASES.values(), ids=TARGET_CASES)
def test_target_tensors(tmp_path, change, match):
    hf, tensors = read_files(LLAMA)
    change(tensors)
    with pytest.raises(ValueError, match=match):
        load_target(write_files(tmp_path, hf, tensors))


def test_all_problems_are_told_at_once_and_many_are_cut_short(tmp_path):
    hf, tensors = read_files(LLAMA)
    tensors["model.norm.weight"] = np.zeros(35, np.float32)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"(?s)missing tensor.*shape \[35\].*belong together"):
        load_target(write_files(tmp_path / "two", hf, tensors))
    only = {"model.norm.weight": tensors["model.norm.weight"]}
    with pytest.raises(ValueError, match="and 18 more"):
        load_target(write_files(tmp_path / "many", hf, only))


@pytest.mark.parametrize("architectures", [["MistralForCausalLM"], [], None])
def test_unknown_target_architecture(tmp_path, architectures):
    hf, tensors = read_files(LLAMA)
    hf["architectures"] = architectures
    with pytest.raises(
        ValueError, match="target architecture .* is not supported; expected one of"
    ):
        load_target(write_files(tmp_path, hf, tensors))


def test_tied_target_may_store_its_head_and_buffers(tmp_path):
    hf, tensors = read_files(LLAMA)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    _, params = load_target(write_files(tmp_path, hf, tensors))
    assert "head" not in params


DRAFT_CASES = {
    "missing": (dict(drop=[DOWN]), f"missing tensor {DOWN}"),
    "extra": (
        dict(add={"layers.2.mlp.down_proj.weight": np.zeros((32, 64), np.float32)}),
        "unexpected tensor layers.2.mlp.down_proj.weight",
    ),
    "shape": (
        dict(add={DOWN: np.zeros((64, 32), np.float32)}),
        rf"{DOWN} has shape \[64, 32\], expected \[32, 64\]",
    ),
    "dtype": (
        dict(add={DOWN: np.zeros((32, 64), np.int32)}),
        f"{DOWN} is I32, expected one of",
    ),
    "other_taps": (
        dict(hf={"target_layer_ids": [0, 1]}),
        r"fc.weight has shape \[32, 96\], expected \[32, 64\]",
    ),
    "markov_missing": (dict(drop=HEADS), f"missing tensor {HEADS[0]}"),
    "markov_rank_256": (dict(hf={"markov_rank": 256}, drop=HEADS), f"missing tensor {HEADS[0]}"),
    "markov_rank_other": (
        dict(hf={"markov_rank": 256}),
        r"markov_head.markov_w1.weight has shape \[97, 8\], expected \[97, 256\]",
    ),
    "markov_not_wanted": (
        dict(hf={"markov_rank": 0, "confidence_head_with_markov": False}),
        f"unexpected tensor {HEADS[0]}",
    ),
    "gate_missing": (
        dict(hf={"markov_head_type": "gated"}), "missing tensor markov_head.gate_proj.weight",
    ),
    "head_type": (
        dict(hf={"markov_head_type": "magic"}), "markov_head_type='magic' with markov_rank=8",
    ),
    "confidence_missing": (dict(drop=CONFIDENCE), f"missing tensor {CONFIDENCE[0]}"),
    "confidence_not_wanted": (
        dict(hf={"enable_confidence_head": False}), f"unexpected tensor {CONFIDENCE[0]}",
    ),
    "confidence_needs_markov": (
        dict(hf={"markov_rank": 0}, drop=HEADS),
        "confidence_head_with_markov=true needs a Markov head, but markov_rank is 0",
    ),
    "confidence_width": (
        dict(hf={"confidence_head_with_markov": False}),
        r"confidence_head.proj.weight has shape \[1, 40\], expected \[1, 32\]",
    ),
    "vocabulary": (
        dict(hf={"vocab_size": 98}),
        "made for another target: vocab_size=98, but the target has 97",
    ),
    "width": (
        dict(hf={"hidden_size": 64}),
        "made for another target: hidden_size=64, but the target has 32",
    ),
    "depth": (
        dict(hf={"num_target_layers": 36}),
        "made for another target: num_target_layers=36, but the target has 5",
    ),
    "last_layer": (
        dict(hf={"target_layer_ids": [0, 1, 4]}),
        r"taps layer 4, but this target's last is 4; expected layers -1\.\.3",
    ),
    "beyond": (
        dict(hf={"target_layer_ids": [0, 1, 7], "num_target_layers": None}),
        "taps layer 7, but this target's last is 4",
    ),
    "taps_unordered": (
        dict(hf={"target_layer_ids": [1, 0, 3]}), "must be strictly increasing and at least -1",
    ),
    "taps_no_list": (
        dict(hf={"target_layer_ids": "0,1,3"}), "'0,1,3'; expected a list of layer numbers",
    ),
    "mask_outside": (
        dict(hf={"mask_token_id": 97}), "mask_token_id=97 is outside the vocabulary of 97",
    ),
    "mask_absent": (dict(unset=["mask_token_id"]), "lacks `mask_token_id`"),
    "heads_odd": (
        dict(hf={"num_key_value_heads": 3}), "num_attention_heads=4 is not a multiple of",
    ),
    "activation": (dict(hf={"hidden_act": "gelu"}), "hidden_act='gelu', which is not supported"),
    "layers_mixed": (
        dict(hf={
            "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4,
            "use_sliding_window": True,
        }),
        "drafts that mix full and sliding layers are not supported",
    ),
    "layers_strange": (
        dict(hf={"layer_types": ["conv", "full_attention"]}), "layer_types=.*conv.* is not suppor",
    ),
    "quantised": (
        dict(hf={"quantization_config": {"quant_method": "fp8"}}), "is quantised .*fetch the unq",
    ),
    "layout_unknown": (
        dict(unset=["target_layer_ids"]), "is not a known draft layout; expected target_layer_ids",
    ),
    "v4": (
        dict(add={"mtp.0.norm.weight": np.zeros(3, np.float32)}),
        "holds the DSpark stages inside a DeepSeek-V4 target",
    ),
    "gemma": (
        dict(add={"layers.0.pre_feedforward_layernorm.weight": np.zeros(3, np.float32)}),
        "holds a Gemma draft",
    ),
    "anchor_flags": (
        dict(hf={"sample_from_anchor": True, "dspark_bonus_anchor": True}), "contradict each othe",
    ),
    "embedding_shape": (
        dict(add={"embed_tokens.weight": np.zeros((96, 32), np.float32)}),
        r"embed_tokens.weight of draft .* has shape \[96, 32\], expected \[97, 32\]",
    ),
    "embedding_type": (
        dict(add={"embed_tokens.weight": np.zeros((97, 32), np.int8)}),
        "embed_tokens.weight of draft .* is I8, expected one of",
    ),
    "head_differs": (
        dict(add={"lm_head.weight": np.zeros((97, 32), np.float32)}),
        "lm_head.weight of draft .* is not a copy of the target's: 64 of 64 compared rows differ",
    ),
    "head_not_finite": (
        dict(add={"lm_head.weight": np.full((97, 32), np.nan, np.float32)}),
        "lm_head.weight of draft .* is not a copy of the target's",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "match"), DRAFT_CASES.values(), ids=DRAFT_CASES)
def test_deepspec_draft(tmp_path, changes, match):
    _refused(tmp_path, match, **changes)


def _reduced(hf, tensors):
    return to_speculators(hf, tensors, ids=np.arange(10, 50))


D2T = np.full(40, 10, np.int64)
MASK = np.isin(np.arange(97), np.arange(10, 50))
SPECULATORS_CASES = {
    "map_missing": (dict(drop=["d2t"]), "draft_vocab_size=40 .* but no tensor d2t"),
    "map_float": (dict(add={"d2t": D2T.astype(np.float32)}), "d2t of draft .* is F32, expected"),
    "map_short": (dict(add={"d2t": D2T[:-1]}), r"d2t .* has shape \[39\], expected \[40\]"),
    "map_of_ids": (
        dict(add={"d2t": np.arange(60, 100)}), r"spans 60\.\.138.*hold offsets, not token ids",
    ),
    "map_repeats": (dict(add={"d2t": D2T - np.arange(40) // 39}), "39 distinct"),
    "map_negative": (dict(add={"d2t": D2T - 11}), r"spans -1\.\.38"),
    "mask_other": (dict(add={"t2d": ~MASK}), r"t2d and d2t .* name different tokens \(57 and 40"),
    "mask_type": (dict(add={"t2d": MASK.astype(np.float32)}), "t2d of draft .* is F32"),
    "mask_shape": (dict(add={"t2d": MASK[:-1]}), r"t2d .* has shape \[96\], expected \[97\]"),
    "size_not_told": (dict(hf={"draft_vocab_size": None}), "markov_w2.weight has shape"),
    "ids_missing": (dict(unset=["aux_hidden_state_layer_ids"]), "lacks `aux_hidden_state_layer"),
    "inner_missing": (dict(unset=["transformer_layer_config"]), "lacks transformer_layer_config"),
    "eagle": (dict(hf={"speculators_model_type": "eagle3"}), "'eagle3' of .* is not supported"),
    "correction": (dict(hf={"enable_correction_head": True}), "enable_correction_head=True, which"),
    "width": (dict(hf={"target_hidden_size": 64}), "target_hidden_size=64, which is not"),
    "last_layer": (dict(hf={"aux_hidden_state_layer_ids": [1, 2, 5]}), "taps layer 4, but"),
    "head_differs": (
        dict(add={"lm_head.weight": np.ones((40, 32), np.float32)}), "is not a copy of the target",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "match"), SPECULATORS_CASES.values(), ids=SPECULATORS_CASES)
def test_speculators_draft(tmp_path, changes, match):
    _refused(tmp_path, match, layout=_reduced, **changes)


def test_map_without_a_size_is_named(tmp_path):
    add = {"d2t": np.arange(97)[::-1] - np.arange(97)}
    _refused(tmp_path, "but config.json has no draft_vocab_size; add it", add=add)


def test_causal_sliding_blocks_are_refused(tmp_path):
    hf, tensors = to_speculators(*read_files(VANILLA))
    hf["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="sliding_window_non_causal=false"):
        _load(write_files(tmp_path, hf, tensors))
    hf["sliding_window_non_causal"] = True
    assert _load(write_files(tmp_path, hf, tensors))[0].sliding_window == 4


@pytest.mark.parametrize(
    ("key", "value"), [("causal", True), ("attention_mode", "mla"), ("projector_type", "domino")]
)
def test_specforge_features_that_change_the_result(tmp_path, key, value):
    hf, tensors = to_specforge(*read_files(VANILLA))
    hf["dflash_config"][key] = value
    with pytest.raises(ValueError, match=f"{key}={value!r}, which is not supported"):
        _load(write_files(tmp_path, hf, tensors))


def test_confidence_without_bias_has_bias_zero(tmp_path):
    config, params, shared = _load(_draft(tmp_path, drop=[CONFIDENCE[1]]))
    assert params["confidence"]["bias"].shape == () and params["confidence"]["bias"] == 0
    _, whole, _ = _load(VANILLA)
    bias = float(whole["confidence"]["bias"])
    assert bias != 0
    block, expected = (draft_from(config, tree, shared) for tree in (params, whole))
    np.testing.assert_allclose(
        block.confidence_logits, expected.confidence_logits - bias, atol=1e-5
    )
    save_draft(tmp_path / "again", config, params)
    assert _load(tmp_path / "again")[1]["confidence"]["bias"] == 0


def test_tensor_stored_twice(tmp_path):
    add = {f"model.{DOWN}": np.zeros((32, 64), np.float32)}
    _refused(tmp_path, f"tensor {DOWN} occurs twice", add=add)


def test_copies_rounded_to_half_precision_are_copies(tmp_path):
    _, tensors = read_files(VANILLA)
    add = {name: tensors[name].astype(np.float16) for name in ("embed_tokens.weight",)}
    add["lm_head.weight"] = np.asarray(jnp.asarray(tensors["lm_head.weight"], jnp.bfloat16))
    config, shared = golden_target("qwen3_vanilla")
    _, _, used = load_draft(_draft(tmp_path, add=add), config, shared)
    assert used.head is shared.head


def test_draft_without_copies_of_a_tied_target(tmp_path):
    """Both embedding and head are the target's one table."""
    target, params = load_target(LLAMA)
    shared = LlamaTarget(config=target).shared_head(params)
    config, _, _ = _load(VANILLA)
    config = dataclasses.replace(
        config, vocab_size=101, hidden_size=36, num_target_layers=4, target_layer_ids=(0, 2)
    )
    save_draft(tmp_path / "d", config, DenseDraft(config=config).init(jax.random.key(0)))
    other, _, used = load_draft(tmp_path / "d", target, shared)
    assert other == config
    assert used.head is used.embedding is params["embedding"]
