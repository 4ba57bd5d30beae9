"""Names, shapes and strictness of DeepSeek V4 and V4.1 draft checkpoints."""

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoint.deepseek import (
    deepseek_rules,
    load_deepseek_draft,
    read_deepseek_config,
    weight_block,
)
from dspark_jax.checkpoint.quantized import DequantisingReader
from dspark_jax.checkpoint.rules import check_stored, stored_tensors
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.config_deepseek import deepseek_draft_from_hf
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.types import SharedHead
from tests.deepseek_models import deepseek_config, deepseek_hf, write_deepseek

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FAMILIES = ("deepseek_v4", "deepseek_v41")

SHARED_SIZES = {
    "vocab_size": 129280, "head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "swiglu_limit": 10.0, "o_lora_rank": 1024,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
RELEASES = {  # list -> family, tensors, parameters, FP8 block, sizes of the config
    "mtp_v41": (
        "deepseek_v41", 2401, 14_225_362_530, 32,
        {
            "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
            "q_lora_rank": 1280, "o_groups": 8, "moe_intermediate_size": 2304,
            "n_routed_experts": 384, "num_experts_per_tok": 6, "dspark_n_routed_experts": 128,
            "dspark_num_experts_per_tok": 3, "dspark_target_layer_ids": [37, 38, 39],
            "dspark_markov_rank": 256,
        },
    ),
    "mtp_v4flash": (
        "deepseek_v4", 4705, None, 128,
        {
            "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
            "q_lora_rank": 1024, "o_groups": 8, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "num_experts_per_tok": 6,
            "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256,
        },
    ),
    "mtp_v4pro": (
        "deepseek_v4", 7009, 77_498_408_103, 128,
        {
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "q_lora_rank": 1536, "o_groups": 16, "moe_intermediate_size": 3072,
            "n_routed_experts": 384, "num_experts_per_tok": 6,
            "dspark_target_layer_ids": [58, 59, 60], "dspark_markov_rank": 512,
        },
    ),
}  # fmt: skip


class _Listed:
    """The header of a checkpoint without its data."""

    directory = "listed"

    def __init__(self, lines: list[str]):
        rows = [line.split("\t") for line in lines]
        self._rows = {
            name: (dtype, tuple(int(size) for size in shape.split("x")))
            for name, dtype, shape in rows
        }

    def names(self) -> set[str]:
        return set(self._rows)

    def dtype(self, name: str) -> str:
        return self._rows[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._rows[name][1]


@pytest.mark.parametrize("name", RELEASES)
def test_released_tensors_are_consumed_without_remainder(name):
    family, tensors, parameters, block, sizes = RELEASES[name]
    listed = _Listed(gzip.open(GOLDEN / "tensors" / f"{name}.tsv.gz", "rt").read().splitlines())
    assert len(listed.names()) == tensors
    config = read_deepseek_config(deepseek_hf(family, **SHARED_SIZES, **sizes), listed.names())
    assert config.num_stages == 3
    rules = deepseek_rules(config)
    reader = DequantisingReader(listed, block=(block, block))
    check_stored(reader, rules, what="draft")
    count = sum(int(np.prod(shape)) for rule in rules for shape in rule.shapes)
    if parameters is None:
        assert round(count / 1e9, 4) == 19.8459
    else:
        assert count == parameters


@pytest.mark.parametrize("name", RELEASES)
def test_real_sizes_trace_to_a_block_over_the_whole_window(name):
    """Nothing is computed: shapes of the parameters, the window and a block at the real sizes."""
    family, _, parameters, _, sizes = RELEASES[name]
    hf = deepseek_hf(family, **SHARED_SIZES, **sizes)
    config = deepseek_draft_from_hf(hf, num_stages=3, has_vision_bias=family == "deepseek_v41")
    draft = DeepseekDraft(config=config)
    params = jax.eval_shape(lambda key: draft.init(key, jnp.bfloat16), jax.random.key(0))
    if parameters is not None:
        assert sum(x.size for x in jax.tree.leaves(params)) == parameters
    window = jax.eval_shape(lambda: draft.make_cache(2, 4096, jnp.bfloat16))
    assert window.kv.shape == (3, 2, 128, 512)
    table = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), jnp.bfloat16)
    ints, shared = jax.ShapeDtypeStruct((2,), jnp.int32), SharedHead(embedding=table, head=table)

    def block(params, shared, window, anchor, anchor_pos) -> tuple:
        hidden = draft.backbone(params, shared, window, anchor=anchor, anchor_pos=anchor_pos)
        return hidden, draft.base_logits(params, shared, hidden)

    hidden, logits = jax.eval_shape(block, params, shared, window, ints, ints)
    assert (hidden.shape, hidden.dtype) == ((2, 5, config.hidden_size), jnp.bfloat16)
    assert (logits.shape, logits.dtype) == ((2, 5, config.vocab_size), jnp.float32)
    text = str(jax.make_jaxpr(block)(params, shared, window, ints, ints))
    scores = f"f32[2,{config.num_attention_heads},5,133]"
    assert scores in text


@pytest.mark.parametrize("name", ["v41_tiny", "v4_tiny"])
def test_back_to_the_original_bytes(name):
    config, params, _ = load_deepseek_draft(GOLDEN / name)
    stored = load_file(GOLDEN / name / "model.safetensors")
    draft = {key: value for key, value in stored.items() if key.startswith("mtp.")}
    back = stored_tensors(params, deepseek_rules(config))
    assert back.keys() == draft.keys()
    for key, value in back.items():
        assert value.dtype == draft[key].dtype and value.shape == draft[key].shape
        assert np.ascontiguousarray(value).tobytes() == draft[key].tobytes(), key


def test_quantised_shards_load_as_their_true_values():
    config, params, shared = load_deepseek_draft(GOLDEN / "v41_tiny_quantized")
    expected = load_file(GOLDEN / "v41_tiny_quantized" / "outputs.safetensors")
    main = expected["dequantized.mtp.0.main_proj.weight"]
    np.testing.assert_array_equal(params["context_proj"], main.T)
    assert shared.head.shape == (config.vocab_size, config.hidden_size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stages", [1, 3])
def test_stages_are_counted_in_the_checkpoint(family, stages, tmp_path, rng):
    write_deepseek(tmp_path, family, rng, stages=stages, num_nextn_predict_layers=2)
    config, params, _ = load_deepseek_draft(tmp_path)
    assert config.num_stages == len(params["layers"]) == stages


def test_tapped_layers_mean_outputs_here():
    assert deepseek_config("deepseek_v4").target_layer_ids == (1, 4)
    assert deepseek_config("deepseek_v41").target_layer_ids == (0, 3)
    assert deepseek_config("deepseek_v41", dspark_target_layer_ids=[0]).target_layer_ids == (-1,)


def _rename_markov(tensors: dict) -> None:
    stored = tensors.pop("mtp.1.markov_head.embed.weight")
    tensors["mtp.1.markov_head.markov_w1.weight"] = stored


BREAKAGES = {
    "missing": (
        lambda t: t.pop("mtp.1.ffn.experts.3.w2.weight"),
        r"missing tensor mtp\.1\.ffn\.experts\.3\.w2\.weight",
    ),
    "left over": (
        lambda t: t.update({"mtp.0.attn.indexer.wk.weight": np.zeros((2, 2), np.float32)}),
        r"unexpected tensor mtp\.0\.attn\.indexer\.wk\.weight",
    ),
    "another expert": (
        lambda t: t.update({"mtp.0.ffn.experts.9.w1.weight": np.zeros((9, 24), np.float32)}),
        r"unexpected tensor mtp\.0\.ffn\.experts\.9\.w1\.weight",
    ),
    "shape": (
        lambda t: t.update({"mtp.0.hc_ffn_base": np.zeros(24, np.float32)}),
        r"mtp\.0\.hc_ffn_base has shape \[24\], expected \[15\]",
    ),
    "stage": (
        lambda t: [t.pop(n) for n in [*t] if n.startswith("mtp.0.")],
        r"should have the draft's blocks mtp\.0, mtp\.1, \.\.; found \['mtp\.1'\]",
    ),
    "no draft": (
        lambda t: [t.pop(n) for n in [*t] if n.startswith("mtp.")],
        "found none",
    ),
    "embedding": (lambda t: t.pop("embed.weight"), r"missing tensor embed\.weight"),
    "markov names of the other family": (
        _rename_markov,
        r"missing tensor mtp\.1\.markov_head\.embed\.weight",
    ),
}


@pytest.mark.parametrize(("change", "message"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_what_does_not_fit_is_named(tmp_path, rng, change, message):
    _, tensors = write_deepseek(tmp_path, "deepseek_v41", rng)
    change(tensors)
    save_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        load_deepseek_draft(tmp_path)


def test_copies_of_the_shared_tables_are_allowed(tmp_path, rng):
    _, tensors = write_deepseek(tmp_path, "deepseek_v4", rng)
    for name in ("embed", "head"):
        tensors[f"mtp.1.{name}.weight"] = tensors[f"{name}.weight"]
    save_tensors(tmp_path / "model.safetensors", tensors)
    _, _, shared = load_deepseek_draft(tmp_path)
    np.testing.assert_array_equal(shared.embedding, tensors["embed.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dspark_target_layer_ids": None}, "this checkpoint has no DSpark draft"),
        ({"dspark_target_layer_ids": [3, 1]}, "strictly increasing"),
        ({"dspark_target_layer_ids": [1, 5]}, "past the target's 5 layers"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"num_experts_per_tok": 8}, "must be between 1 and the draft's 7 experts"),
        ({"dspark_noise_token_id": 61}, "outside the vocabulary of 61"),
        ({"o_groups": 4}, "not a multiple of o_groups=4"),
        ({"qk_rope_head_dim": 12}, "must be even and at most"),
        ({"dspark_block_size": 0}, "block_size=0 must be at least 1"),
        ({"q_lora_rank": None}, "lacks `q_lora_rank`"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        deepseek_config("deepseek_v4", **changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq"}, "quant_method='awq' is not supported"),
        ({"quant_method": "fp8", "expert_dtype": "fp8"}, "expert_dtype='fp8' is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
    ],
)
def test_other_quantisations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        weight_block({"quantization_config": settings})


def test_the_golden_configs_give_their_blocks():
    hf = json.loads((GOLDEN / "v41_tiny_quantized" / "config.json").read_text())
    assert weight_block(hf) == (32, 32)
    assert weight_block(json.loads((GOLDEN / "v4_tiny" / "config.json").read_text())) is None
