"""Names, shapes and strictness of V4.1 checkpoints as targets, and Engram's token classes."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models

from dspark_jax.checkpoint.deepseek_target import (
    load_deepseek_target,
    read_target_config,
    target_rules,
)
from dspark_jax.checkpoint.engram_classes import class_tokens
from dspark_jax.checkpoint.quantized import DequantisingReader
from dspark_jax.checkpoint.rules import check_stored, stored_tensors
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.target.deepseek import DeepseekTarget
from dspark_jax.target.engram import check_tables, hash_offsets, hash_primes
from tests.parity.deepseek_target_models import target_config, target_hf, write_target

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
RELEASE = {
    "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40,
    "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280,
    "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "moe_intermediate_size": 2304,
    "n_routed_experts": 384, "num_experts_per_tok": 6, "hc_mult": 4,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682], "engram_vocab_size": 16_000_000,
    "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092, "dspark_target_layer_ids": [37, 38, 39],
    "dspark_noise_token_id": 128799,
}  # fmt: skip


class _Listed:
    """The header of a checkpoint, of which the list has the first expert of each layer."""

    directory = "listed"

    def __init__(self, lines: list[str], experts: int):
        self._rows = {}
        for name, kind, shape in (line.split("\t") for line in lines):
            for expert in range(experts if ".experts.0." in name else 1):
                full = name.replace(".experts.0.", f".experts.{expert}.")
                self._rows[full] = (kind, shape)

    def names(self) -> set[str]:
        return set(self._rows)

    def dtype(self, name: str) -> str:
        return self._rows[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._rows[name][1].split("x"))


def test_released_tensors_are_consumed_without_remainder():
    lines = gzip.open(GOLDEN / "tensors" / "target_v41.tsv.gz", "rt").read().splitlines()
    listed = _Listed(lines, RELEASE["n_routed_experts"])
    assert len(listed.names()) == 93_684
    text = [n for n in listed.names() if not n.startswith(("vision.", "aligner.", "image_"))]
    assert len(listed.names()) - len(text) == 266
    config = read_target_config(target_hf(**RELEASE), listed.names())
    rules = target_rules(config)
    reader = DequantisingReader(listed, block=(32, 32), names=set(text))
    check_stored(reader, rules, what="target")
    sizes = {name: np.prod(s) for r in rules for name, s in zip(r.names, r.shapes, strict=True)}
    engram = sum(size for name, size in sizes.items() if ".engram." in name)
    assert sum(sizes.values()) - engram == 551_566_180_464
    assert engram == 196_928_504_320


def test_engram_tables_have_the_released_sizes():
    config = target_config(**RELEASE).engram
    primes = hash_primes(config)
    assert primes.sum(axis=(1, 2)).tolist() == RELEASE["engram_num_embeddings"]
    assert len(set(primes.ravel().tolist())) == 48 and primes.min() == 16_000_057
    np.testing.assert_array_equal(
        hash_offsets(config)[:, -1] + primes[:, -1, -1], primes.sum((1, 2))
    )
    check_tables(config)


@pytest.mark.parametrize("name", ["v41_tiny", "v4_tiny"])
def test_back_to_the_original_bytes(name):
    config, params = load_deepseek_target(GOLDEN / name, token_classes=np.arange(256) // 2)
    stored = load_file(GOLDEN / name / "model.safetensors")
    table = stored.pop("layers.0.ffn.gate.tid2eid", None)
    if table is not None:
        np.testing.assert_array_equal(params["layers"][0]["moe"]["expert_ids"], table)
    expected = {key: value for key, value in stored.items() if not key.startswith("mtp.")}
    back = stored_tensors(params, target_rules(config))
    assert back.keys() == expected.keys()
    for key, value in back.items():
        assert np.ascontiguousarray(value).tobytes() == expected[key].tobytes(), key


def test_quantised_shards_load_as_their_true_values():
    folder = GOLDEN / "v41_tiny_quantized"
    expected = load_file(folder / "outputs.safetensors")
    _, params = load_deepseek_target(folder, token_classes=np.arange(256) // 2)
    table = params["layers"][0]["engram"]["table"]
    np.testing.assert_array_equal(table, expected["dequantized.layers.0.engram.embed.weight"])
    down = params["layers"][2]["moe"]["down"][1]
    np.testing.assert_array_equal(down, expected["dequantized.layers.2.ffn.experts.1.w2.weight"].T)


def _extra(name: str) -> dict:
    return {name: np.zeros((2, 2), np.float32)}


BREAKAGES = {
    "gate of rows": (
        lambda t: t.pop("layers.0.attn.compressor.wgate.weight"),
        r"missing tensor layers\.0\.attn\.compressor\.wgate\.weight",
    ),
    "gate of single tokens": (
        lambda t: t.update(_extra("layers.3.attn.compressor.wgate.weight")),
        r"unexpected tensor layers\.3\.attn\.compressor\.wgate\.weight",
    ),
    "keys of no source": (
        lambda t: t.update(_extra("layers.5.attn.indexer.wk.weight")),
        r"unexpected tensor layers\.5\.attn\.indexer\.wk\.weight",
    ),
    "hash routing": (
        lambda t: t.update(_extra("layers.0.ffn.gate.tid2eid")),
        r"unexpected tensor layers\.0\.ffn\.gate\.tid2eid",
    ),
    "engram table": (
        lambda t: t.update({"layers.1.engram.embed.weight": np.zeros((151, 5), np.float32)}),
        r"layers\.1\.engram\.embed\.weight has shape \[151, 5\], expected \[152, 5\]",
    ),
    "vision bias of one layer": (
        lambda t: t.pop("layers.4.ffn.gate.bias_vl"),
        r"missing tensor layers\.4\.ffn\.gate\.bias_vl",
    ),
    "unknown part": (lambda t: t.update(_extra("visual.weight")), "unexpected tensor visual"),
    "final norm": (lambda t: t.pop("norm.weight"), r"missing tensor norm\.weight"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict]:
    """A checkpoint with a target, and its tensors."""
    folder = tmp_path_factory.mktemp("written")
    return folder, write_target(folder, np.random.default_rng(0))[1]


@pytest.mark.parametrize(("change", "message"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_what_does_not_fit_is_named(written, tmp_path, change, message):
    folder, tensors = written
    tensors = dict(tensors)
    change(tensors)
    shutil.copy(folder / "config.json", tmp_path)
    save_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        load_deepseek_target(tmp_path, token_classes=np.zeros(61, np.int64))


def test_parts_that_are_not_of_the_language_model_are_passed_over(written, tmp_path):
    folder, tensors = written
    others = ("vision.blocks.0.attn.wqkv.weight", "aligner.w1.bias", "image_newline")
    shutil.copy(folder / "config.json", tmp_path)
    more = {name: value for other in others for name, value in _extra(other).items()}
    save_tensors(tmp_path / "model.safetensors", tensors | more)
    _, params = load_deepseek_target(tmp_path, token_classes=np.zeros(61, np.int64))
    np.testing.assert_array_equal(params["head"], tensors["head.weight"])


def test_token_classes_must_fit(written):
    folder, _ = written
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json not found; Engram needs"):
        load_deepseek_target(folder)
    with pytest.raises(
        ValueError, match=r"shape \[60\] and values 0\.\.0; expected one in 0\.\.22"
    ):
        load_deepseek_target(folder, token_classes=np.zeros(60, np.int64))
    with pytest.raises(ValueError, match=r"values 0\.\.60; expected one in 0\.\.22"):
        load_deepseek_target(folder, token_classes=np.arange(61))


def _tokenizer(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_classes_join_what_differs_in_form_only(tmp_path):
    """In the byte-level alphabet Ġ is a blank, Ċ a line break, Ã© an é, and Ã half of one."""
    words = ["the", "The", "ĠTHE", "Ġ", "Ċ", "ĠĠ", "Ã©", "e", "Ã", "Ä", "ï¬ģ", "fi", "ÌĢ"]
    expected = [0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 5, 6]
    assert class_tokens(_tokenizer(words), len(words)).tolist() == expected
    write_target(tmp_path, np.random.default_rng(0))
    padding = [f"<{i}>" for i in range(61 - len(words))]
    _tokenizer(words + padding).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="gives 55 token classes, expected engram_compressed_voca"):
        load_deepseek_target(tmp_path)
    hf = target_hf(engram_compressed_vocab_size=55)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    _, params = load_deepseek_target(tmp_path)
    assert params["token_classes"].tolist() == [*expected, *range(7, 55)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [3, 3]}, "a ratio for each of the 7 layers"),
        ({"kv_source_layer_ids": [0]}, "layer 3 has compress_ratio 1 but the rows at hand have 3"),
        (
            {"kv_source_layer_ids": [3]},
            "layer 0 has compress_ratio 3 but the rows at hand have Non",
        ),
        ({"index_source_layer_ids": [0, 1, 5]}, r"kv_source_layer_ids=\[0, 3\] must be in index"),
        ({"index_source_layer_ids": [0, 2, 3]}, "layer 2 has compress_ratio 0"),
        ({"candidate_source_layer_id": 4}, "candidate_source_layer_id=4 is not in"),
        ({"dspark_target_layer_ids": [1, 7]}, r"dspark_target_layer_ids=\(1, 7\): this target has"),
        ({"index_head_dim": 2}, "must be even and at most head_dim=10 and index_head_dim=2"),
        ({"engram_num_embeddings": [9]}, "with one entry each in engram_num_embeddings"),
        ({"engram_vocab_size": 2**24}, "must be positive and well below 2\\^24"),
        ({"engram_max_ngram_size": 1}, "must be at least 2"),
        ({"rope_scaling": {"rope_type": "linear"}}, "expected 'yarn'"),
        ({"index_topk": None}, "lacks `index_topk`"),
        ({"o_groups": 4}, "not a multiple of o_groups=4"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        target_config(**changes)


def test_a_table_that_the_hash_reaches_beyond_is_refused():
    config = target_config(engram_num_embeddings=[151, 224])
    with pytest.raises(ValueError, match="gives layer 1 151 rows, but its hash reaches 152"):
        DeepseekTarget(config=config)


def test_other_families_are_refused():
    with pytest.raises(ValueError, match="model_type='qwen3'; expected one of"):
        load_deepseek_target(GOLDEN / "qwen3_vanilla" / "target")


TABLE = "layers.1.ffn.gate.tid2eid"
TABLES = {
    "missing": (lambda t: t.pop(TABLE), rf"lacks {TABLE}, its experts' table"),
    "shape": (
        lambda t: t.update({TABLE: t[TABLE][:, :2].copy()}),
        r"is I32 \[61, 2\]; expected integers of shape \[61, 3\]",
    ),
    "type": (lambda t: t.update({TABLE: t[TABLE].astype(np.float32)}), r"is F32 \[61, 3\]"),
    "range": (lambda t: t.update({TABLE: t[TABLE] + 5}), r"names experts 5\.\.11; this model has"),
    "bias of a hashed layer": (
        lambda t: t.update({"layers.1.ffn.gate.bias": np.zeros(7, np.float32)}),
        r"unexpected tensor layers\.1\.ffn\.gate\.bias",
    ),
    "places": (
        lambda t: t.pop("layers.3.attn.indexer.compressor.ape"),
        r"missing tensor layers\.3\.attn\.indexer\.compressor\.ape",
    ),
    "last sum": (lambda t: t.pop("hc_head_base"), "missing tensor hc_head_base"),
}


@pytest.mark.parametrize(("change", "message"), TABLES.values(), ids=TABLES.keys())
def test_what_does_not_fit_v4_is_named(tmp_path, rng, change, message):
    _, tensors = write_target(tmp_path, rng, "deepseek_v4")
    change(tensors)
    save_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        load_deepseek_target(tmp_path)
