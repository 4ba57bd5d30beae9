"""DeepSeek V4 and V4.1 against golden vectors, and their draft stacks against a NumPy twin."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint.deepseek import load_deepseek_draft
from dspark_jax.draft.deepseek import DeepseekDraft
from tests.deepseek_models import write_deepseek
from tests.parity.deepseek_twin import Twin
from tools import parity
from tools.parity_deepseek import run_decode, run_prefill

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
DRAFTS = {"draft_ids", "draft_logits", "confidence_logits"}
RINGS = {f"{when}.{i}" for when in ("ring_after_prefill", "ring_final") for i in range(3)}
TARGET = {"prefill_last_logits", "prefill_taps", "decode_logits"}
HASH = {"engram_hash.multipliers", "engram_hash.offsets", "engram_hash.primes"}
COMPARED = {
    "v41_tiny": DRAFTS | RINGS | TARGET | HASH | {"decode_taps", "greedy_continuation"},
    "v4_tiny": DRAFTS | TARGET | {"decode_taps"},
    "v41_tiny_quantized": {
        *DRAFTS,
        *TARGET,
        "dequantized.layers.0.engram.embed.weight",
        "dequantized.layers.2.ffn.experts.1.w2.weight",
        "dequantized.layers.3.attn.wkv.weight",
        "dequantized.mtp.0.main_proj.weight",
    },
}
FAMILIES = ("deepseek_v4", "deepseek_v41")


def _failures(results: list[parity.Result]) -> list[str]:
    return [f"{result.name}: {result.detail}" for result in results if not result.ok]


@pytest.mark.parametrize("name", COMPARED)
def test_golden_vectors(name):
    results = parity.check_folder(GOLDEN / name)
    assert {result.name for result in results if not result.skipped} == COMPARED[name]
    assert not _failures(results)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_size_against_numpy(family, tmp_path, rng):
    """Stages, streams, window, block, ranks, groups and experts that no golden folder has."""
    hf, tensors = write_deepseek(tmp_path, family, rng)
    batch, prompt, steps = 2, 9, 4
    width = 2 * hf["hidden_size"]
    taps = rng.normal(size=(batch, prompt + steps, width)).astype(np.float32)
    anchors = rng.integers(0, hf["vocab_size"], (batch, steps))
    ids, logits, trust = [], [], []
    for row, own_anchors in zip(taps, anchors, strict=True):
        twin = Twin(hf, tensors, family, stages=2)
        for p in range(prompt):
            twin.write(row[p], p)
        blocks = []
        for step, anchor in enumerate(own_anchors):
            twin.write(row[prompt + step], prompt + step)
            blocks.append(twin.draft(int(anchor), prompt + step + 1))
        ids.append([np.concatenate([[a], b[0]]) for a, b in zip(own_anchors, blocks, strict=True)])
        logits.append([b[1] for b in blocks])
        trust.append([b[2] for b in blocks])
    golden = {
        "prefill_taps": taps[:, :prompt].copy(),
        "decode_taps": taps[:, prompt:].copy(),
        "draft_ids": np.array(ids),
        "draft_logits": np.array(logits, np.float32),
        "confidence_logits": np.array(trust, np.float32),
    }
    save_file(golden, tmp_path / "outputs.safetensors")
    results = parity.check_folder(tmp_path)
    assert {result.name for result in results} == DRAFTS
    assert not _failures(results)
    assert np.abs(golden["draft_logits"]).max() > 1


@pytest.fixture(scope="module")
def v41():
    """Draft, parameters, head and the golden arrays of `v41_tiny`."""
    config, params, shared = load_deepseek_draft(GOLDEN / "v41_tiny")
    golden = load_file(GOLDEN / "v41_tiny" / "outputs.safetensors")
    return DeepseekDraft(config=config), params, shared, golden


def _change_leaf(params: dict, path: tuple, change) -> dict:
    """A copy of the tree with one leaf of every block changed."""
    layers = []
    for layer in params["layers"]:
        node = {**layer, path[0]: dict(layer[path[0]])}
        inner = node[path[0]]
        for part in path[1:-1]:
            inner[part] = dict(inner[part])
            inner = inner[part]
        inner[path[-1]] = change(inner[path[-1]])
        layers.append(node)
    return {**params, "layers": tuple(layers)}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (("attn", "sink"), lambda x: x * 0 - 30),
        (("attn_mix", "base"), lambda x: x.at[8:].set(x[8:].reshape(4, 4).T.reshape(-1))),
        (("ffn_mix", "scale"), lambda x: x[::-1]),
        (("moe", "bias"), lambda x: x * 0),
        (("moe", "shared_gate_up"), lambda x: x[:, ::-1]),
        (("attn", "o_a"), lambda x: x[::-1]),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_every_part_matters(v41, path, change):
    draft, params, shared, golden = v41
    changed = _change_leaf(params, path, change)
    one = {key: golden[key][:, :1] for key in ("decode_taps", *DRAFTS)}
    one["prefill_taps"] = golden["prefill_taps"]
    cache = run_prefill(draft, changed, golden["prefill_taps"])
    blocks, _ = run_decode(draft, changed, shared, cache, one)
    assert np.abs(blocks[0].draft_logits - one["draft_logits"][:, 0]).max() > 1e-2


def _copy_with(tmp_path: Path, change) -> Path:
    folder = tmp_path / "v41_tiny"
    shutil.copytree(GOLDEN / "v41_tiny", folder)
    arrays = load_file(folder / "outputs.safetensors")
    change(arrays)
    save_file(arrays, folder / "outputs.safetensors")
    return folder


def _spoil(arrays: dict) -> None:
    arrays["draft_ids"][1, 3, 2] += 1
    arrays["ring_final.2"][0, 5, 1] += 1e-2
    arrays["ring_final.3"] = arrays["ring_final.2"]
    arrays["confidence_logits"][0, 0, 0] = np.nan
    arrays["prefill_last_logits"][1, 9] -= 1e-3
    arrays["decode_logits"][0, 5, 40] += 1e-3
    arrays["decode_taps"][1, 2, 7] *= 2
    arrays["greedy_continuation"][1, -1] += 1
    arrays["engram_hash.primes"][1, 2, 0] += 2
    arrays["novelty"] = np.zeros(1, np.float32)


def test_parity_tool_fails_on_other_vectors(tmp_path, capsys):
    assert parity.main([str(_copy_with(tmp_path, _spoil))]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = {line.split()[1] for line in lines if line.startswith("  FAILED")}
    assert failed == {
        "draft_ids", "draft_logits", "ring_final.2", "ring_final.3", "confidence_logits",
        "novelty", "prefill_last_logits", "decode_logits", "decode_taps", "greedy_continuation",
        "engram_hash.primes",
    }  # fmt: skip
    assert lines[-1] == "11 failed"


def test_a_draft_without_its_target_is_checked_as_far_as_its_inputs_go(tmp_path):
    """The checkpoint's target layers are gone, as in a conversion of the draft."""
    folder = _copy_with(tmp_path, lambda arrays: arrays.pop("decode_taps"))
    stored = load_file(folder / "model.safetensors")
    draft = {k: v for k, v in stored.items() if k.startswith(("mtp.", "embed.", "head."))}
    save_file(draft, folder / "model.safetensors")
    results = parity.check_folder(folder)
    assert not _failures(results)
    assert {r.name for r in results if not r.skipped} == {
        f"ring_after_prefill.{i}" for i in range(3)
    }
    assert DRAFTS | TARGET - {"prefill_taps"} < {r.name for r in results if r.skipped}


def test_bfloat16_stays_close(tmp_path, rng):
    """Half precision where the reference has it: drafts may change, logits only a little."""
    write_deepseek(tmp_path, "deepseek_v41", rng, stages=1, swiglu_limit=10.0)
    config, exact, shared = load_deepseek_draft(tmp_path)
    _, params, halved = load_deepseek_draft(tmp_path, dtype=jnp.bfloat16)
    layer = params["layers"][0]
    assert layer["attn"]["q_a"].dtype == layer["moe"]["gate_up"].dtype == jnp.bfloat16
    assert layer["attn"]["sink"].dtype == layer["attn_mix"]["fn"].dtype == jnp.float32
    draft = DeepseekDraft(config=config)
    taps = rng.normal(size=(2, 4, 2 * config.hidden_size)).astype(np.float32)
    vectors = {"prefill_taps": taps[:, :3], "decode_taps": taps[:, 3:]}
    vectors["draft_ids"] = np.zeros((2, 1, config.block_size + 1), np.int32)
    blocks = []
    for tree, head, dtype in ((exact, shared, jnp.float32), (params, halved, jnp.bfloat16)):
        arrays = {k: v.astype(dtype) if "taps" in k else v for k, v in vectors.items()}
        cache = run_prefill(draft, tree, arrays["prefill_taps"])
        blocks += run_decode(draft, tree, head, cache, arrays)[0]
    assert blocks[1].block_hidden.dtype == jnp.bfloat16
    assert blocks[1].draft_logits.dtype == blocks[1].confidence_logits.dtype == jnp.float32
    error = np.abs(blocks[0].base_logits - blocks[1].base_logits)
    assert 0 < error.mean() < 0.05 * np.abs(blocks[0].base_logits).mean()
    random = jax.eval_shape(lambda key: draft.init(key, jnp.bfloat16), jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), random) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )
