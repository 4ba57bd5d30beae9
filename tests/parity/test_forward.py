"""Forward passes of targets and drafts against golden vectors of the official PyTorch code."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint.draft import load_draft
from dspark_jax.checkpoint.rules import stored_tensors
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.checkpoint.target import load_target, target_rules
from dspark_jax.config import RopeConfig, TargetConfig, read_config_json
from dspark_jax.config_deepseek import is_deepseek
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.kv_cache import KVCache, write_rows
from dspark_jax.target.llama import LlamaTarget, stack_layers
from dspark_jax.types import Params
from tools import parity

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
OUTPUTS = sorted(path.parent for path in GOLDEN.glob("*/outputs.safetensors"))
TARGETS = [path.name for path in OUTPUTS if not is_deepseek(read_config_json(path))]
PAIRS = sorted(path.parent.name for path in GOLDEN.glob("*/block_forward.safetensors"))
LAYERS = {"split": False, "stacked": True}

CHECKS = [(name, parity.check_target) for name in TARGETS]
CHECKS += [(name, parity.check_block_forward) for name in PAIRS]


def _failures(results: list[parity.Result]) -> list[str]:
    return [f"{result.name}: {result.detail}" for result in results if not result.ok]


def test_golden_folders_are_there():
    assert {"llama_tiny", "llama3_rope_tiny", "qwen3_moe_tiny"} <= set(TARGETS)
    assert {"qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash"} <= set(PAIRS)


@pytest.mark.parametrize("stacked", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("name", "check"), CHECKS, ids=[name for name, _ in CHECKS])
def test_golden_vectors(name, check, stacked):
    results = check(GOLDEN / name, stacked=stacked)
    assert len(results) > 4
    assert not _failures(results)


@pytest.mark.parametrize("stacked", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_moe_tiny"])
def test_decoding_in_odd_chunks_equals_one_forward(name, stacked):
    config, params = load_target(GOLDEN / name)
    params = stack_layers(params) if stacked else params
    golden = load_file(GOLDEN / name / "outputs.safetensors")
    taps = tuple(range(-1, config.num_hidden_layers - 1))
    target = LlamaTarget(config=config, tap_layer_ids=taps)
    hidden, features = _run_in_chunks(target, params, golden["tokens"], (5, 1, 1, 5, 1, 5, 5, 1))
    np.testing.assert_allclose(target.logits(params, hidden), golden["logits"], atol=2e-4)
    expected = np.concatenate([golden[f"hidden.{i + 1}"] for i in taps], axis=-1)
    np.testing.assert_allclose(features, expected, atol=2e-5)


def _run_in_chunks(
    target: LlamaTarget, params: Params, tokens: np.ndarray, chunks: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and context features of one prefill per chunk, through the KV cache."""
    rows, length = tokens.shape
    assert sum(chunks) == length
    cache, done = target.make_cache(rows, length + 3, jnp.float32), 0
    hidden, features = [], []

    @jax.jit
    def prefill(params: Params, tokens: jax.Array, cache: KVCache, cache_len: jax.Array) -> tuple:
        out = target.forward(params, tokens, cache, cache_len=cache_len)
        count = jnp.full(rows, tokens.shape[1])
        cache = write_rows(cache, out.new_k, out.new_v, first_slot=0, start=cache_len, count=count)
        return out.hidden, out.context_features, cache

    for width in chunks:
        part = jnp.asarray(tokens[:, done : done + width])
        *out, cache = prefill(params, part, cache, jnp.full(rows, done, jnp.int32))
        hidden.append(np.asarray(out[0]))
        features.append(np.asarray(out[1]))
        done += width
    return np.concatenate(hidden, axis=1), np.concatenate(features, axis=1)


@pytest.mark.parametrize("stacked", LAYERS.values(), ids=LAYERS)
def test_tap_i_is_the_output_of_layer_i(stacked):
    config, params = load_target(GOLDEN / "qwen3_vanilla" / "target")
    golden = load_file(GOLDEN / "qwen3_vanilla" / "block_forward.safetensors")
    tokens = golden["token_ids"][:, :-1]
    params = stack_layers(params) if stacked else params
    last = config.num_hidden_layers - 1
    target = LlamaTarget(config=config, tap_layer_ids=(-1, 1, 3, last))
    hidden, features = _run_in_chunks(target, params, tokens, (tokens.shape[1],))
    embedded, first, third, final = np.split(features, 4, axis=-1)
    np.testing.assert_array_equal(embedded, golden["target_hidden_0"])
    for got, index in ((first, 2), (third, 4)):
        np.testing.assert_allclose(got, golden[f"target_hidden_{index}"], atol=1e-4)
        for other in (index - 1, index + 1):
            assert np.abs(got - golden[f"target_hidden_{other}"]).max() > 0.1
    # the last layer's tap comes before the final norm, `hidden` after it
    normed = final / np.sqrt((final**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    np.testing.assert_allclose(normed * np.asarray(params["norm"]["weight"]), hidden, atol=1e-4)
    assert np.abs(final - golden[f"target_hidden_{last + 1}"]).max() > 0.1


@pytest.mark.parametrize("bad", [(-2,), (5,), (0, 7)])
def test_tap_of_a_layer_that_is_not_there(bad):
    config, _ = load_target(GOLDEN / "qwen3_vanilla" / "target")
    with pytest.raises(ValueError, match=r"do not exist: this target has layers 0\.\.4"):
        LlamaTarget(config=config, tap_layer_ids=bad)


def test_context_written_in_chunks_gives_the_same_drafts():
    folder = GOLDEN / "qwen3_vanilla"
    config, params = load_target(folder / "target")
    golden = load_file(folder / "block_forward.safetensors")
    shared = LlamaTarget(config=config).shared_head(params)
    draft_config, draft_params, shared = load_draft(folder / "draft", config, shared)
    target = LlamaTarget(config=config, tap_layer_ids=draft_config.target_layer_ids)
    draft = DenseDraft(config=draft_config)
    tokens, length = golden["token_ids"], golden["token_ids"].shape[1] - 1
    chunks = (3,) * (length // 3) + (1,) * (length % 3)

    @jax.jit
    def write(features: jax.Array, cache: KVCache, done: jax.Array) -> KVCache:
        width = features.shape[1]
        k, v = draft.context_kv(draft_params, features, done + jnp.arange(width)[None])
        start, count = jnp.full(1, done), jnp.full(1, width)
        return write_rows(cache, k, v, first_slot=0, start=start, count=count)

    _, features = _run_in_chunks(target, stack_layers(params), tokens[:, :length], chunks)
    np.testing.assert_allclose(features, golden["context_features"], atol=2e-5)
    empty = draft.make_cache(1, length, jnp.float32)
    pieces, done = empty, 0
    for width in chunks:
        pieces = write(features[:, done : done + width], pieces, done)
        done += width
    whole = write(golden["context_features"], empty, 0)
    np.testing.assert_allclose(pieces.k, whole.k, atol=2e-5)
    np.testing.assert_allclose(pieces.v, whole.v, atol=2e-5)
    block = parity.draft_block(draft, draft_params, shared, features, tokens[:, length])
    np.testing.assert_array_equal(block.draft_tokens, golden["draft_tokens"])
    np.testing.assert_allclose(block.draft_logits, golden["draft_logits"], atol=2e-4)


def _numpy_logits(config: TargetConfig, tensors: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of a dense target, written out head by head in float64."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, groups, size = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    count = len(tokens)
    base = config.rope.rope_theta ** (-np.arange(0, size, 2) / size) / config.rope.factor
    angles = np.arange(count)[:, None] * np.concatenate([base, base])

    def norm(x: np.ndarray, weight: str) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
        return x / scale * t[weight]

    def rotate(x: np.ndarray) -> np.ndarray:
        half = np.concatenate([-x[:, size // 2 :], x[:, : size // 2]], axis=1)
        return x * np.cos(angles) + half * np.sin(angles)

    x = t["model.embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        name = f"model.layers.{i}."
        y = norm(x, name + "input_layernorm.weight")
        q, k, v = (
            y @ t[f"{name}self_attn.{p}_proj.weight"].T + t.get(f"{name}self_attn.{p}_proj.bias", 0)
            for p in "qkv"
        )
        rows = []
        for head in range(heads):
            group = head // (heads // groups)
            one = slice(head * size, (head + 1) * size)
            kv = slice(group * size, (group + 1) * size)
            q_h, k_h = q[:, one], k[:, kv]
            if config.qk_norm:
                q_h = norm(q_h, name + "self_attn.q_norm.weight")
                k_h = norm(k_h, name + "self_attn.k_norm.weight")
            scores = rotate(q_h) @ rotate(k_h).T / np.sqrt(size)
            scores[np.triu_indices(count, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            rows.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, kv])
        o = name + "self_attn.o_proj."
        x = x + np.concatenate(rows, axis=1) @ t[o + "weight"].T + t.get(o + "bias", 0)
        y = norm(x, name + "post_attention_layernorm.weight")
        gate, up, down = (t[f"{name}mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        g = y @ gate.T
        x = x + (g / (1 + np.exp(-g)) * (y @ up.T)) @ down.T
    head = t["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_another_size_with_biases_against_numpy(model_type, tmp_path, rng):
    """Sizes and features the golden folders lack: odd widths, biases, linear RoPE scaling."""
    hf = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]],
        "vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 17, "rms_norm_eps": 1e-5,
        "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.5},
        "attention_bias": True, "tie_word_embeddings": model_type == "llama",
    }  # fmt: skip
    config = TargetConfig.from_hf(hf)
    assert config.rope == RopeConfig(rope_theta=500.0, rope_type="linear", factor=2.5)
    shapes = jax.eval_shape(LlamaTarget(config=config).init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(0.2, 0.2, x.shape).astype(np.float32), shapes)
    tensors = stored_tensors(params, target_rules(config))
    save_tensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tokens = rng.integers(0, 53, (1, 11))
    expected = _numpy_logits(config, tensors, tokens[0])[None].astype(np.float32)
    save_file({"tokens": tokens, "logits": expected}, tmp_path / "outputs.safetensors")
    results = parity.check_folder(tmp_path)
    assert [result.name for result in results] == ["logits"]
    assert not _failures(results)
    assert np.abs(expected).max() > 1


def _copy_with(tmp_path: Path, name: str, vectors: str, change) -> Path:
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    arrays = load_file(folder / vectors)
    change(arrays)
    save_file(arrays, folder / vectors)
    return folder


def _shift_logits(arrays: dict) -> None:
    arrays["logits"][0, 3, 5] += 3e-4


def _break_with_nan(arrays: dict) -> None:
    arrays["hidden.1"][0, 0, 0] = np.nan


def _another_token(arrays: dict) -> None:
    arrays["greedy_tokens"][0, -1] += 1


def _add_array(arrays: dict) -> None:
    arrays["novelty"] = np.zeros(1, np.float32)


def _drop_logits(arrays: dict) -> None:
    del arrays["logits"]


def _cut_logits(arrays: dict) -> None:
    arrays["logits"] = arrays["logits"][:, :, :-1].copy()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_shift_logits, "FAILED logits"),
        (_break_with_nan, "FAILED hidden.1"),
        (_another_token, "FAILED greedy_tokens 1 of 41 tokens differ"),
        (_add_array, "FAILED novelty not known to this version"),
        (_drop_logits, "FAILED: the golden vectors lack logits"),
        (_cut_logits, "FAILED logits got shape [2, 24, 101], not [2, 24, 100]"),
    ],
)
def test_parity_tool_fails_on_other_vectors(tmp_path, capsys, change, line):
    folder = _copy_with(tmp_path, "llama_tiny", "outputs.safetensors", change)
    assert parity.main([str(folder)]) == 1
    assert line in " ".join(capsys.readouterr().out.split())


def test_parity_tool_accepts_the_golden_folders_and_names_strange_ones(tmp_path, capsys):
    assert parity.main([str(GOLDEN / "llama_tiny"), str(GOLDEN / "llama3_rope_tiny")]) == 0
    assert "all within tolerance" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for strange in (tmp_path / "empty", tmp_path / "absent"):
        assert parity.main([str(GOLDEN / "llama_tiny"), str(strange)]) == 1
        assert f"FAILED: {strange} is not a" in capsys.readouterr().out
