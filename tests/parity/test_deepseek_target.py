"""V4 and V4.1 targets against NumPy twins of other sizes, and what must hold of any target."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint.deepseek_target import load_deepseek_target
from dspark_jax.target.compressed import choose_blocks, choose_rows, complete_rows
from dspark_jax.target.deepseek import DeepseekTarget
from dspark_jax.target.engram import hash_multipliers, hash_primes, ngram_rows
from tests.parity.deepseek_target_models import target_config, write_target
from tests.parity.deepseek_target_twin import TargetTwin
from tests.parity.deepseek_twin import Twin
from tools import parity
from tools.parity_deepseek_target import run_deepseek_target

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v41_tiny"
LENGTH, PROMPT = 23, 17
FROM_TARGET = {"prefill_last_logits", "prefill_taps", "decode_logits"}
HASH = {"engram_hash.multipliers", "engram_hash.primes"}
DRAFTS = {"draft_ids", "draft_logits", "confidence_logits"}


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v41"])
def test_another_size_against_numpy(family, tmp_path):
    """Token by token over caches, in the twin, is the same as all at once; drafts follow."""
    rng = np.random.default_rng(3)
    hf, tensors = write_target(tmp_path, rng, family)
    classes = rng.integers(0, 23, hf["vocab_size"])
    tokens = rng.integers(0, hf["vocab_size"], (2, LENGTH))
    twins = [TargetTwin(hf, tensors, family, classes) for _ in tokens]
    rows = [
        _follow(twin, Twin(hf, tensors, family, stages=2), row)
        for twin, row in zip(twins, tokens, strict=True)
    ]
    golden = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    golden = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in golden.items()}
    golden["tokens"], hashes = tokens, HASH if twins[0].engrams else set()
    if hashes:
        factors = [twins[0].multipliers(i) for i in twins[0].engrams]
        golden["engram_hash.primes"] = np.array(twins[0].primes()).reshape(2, 2, 2)
        golden |= {"engram_hash.multipliers": np.array(factors), "engram_hash.token_map": classes}
    save_file(golden, tmp_path / "outputs.safetensors")
    results = parity.check_folder(tmp_path)
    assert {result.name for result in results} == FROM_TARGET | hashes | DRAFTS
    assert not [f"{r.name}: {r.detail}" for r in results if not r.ok]
    assert np.abs(golden["decode_logits"]).max() > 1


def _follow(target: TargetTwin, draft: Twin, tokens: np.ndarray) -> dict:
    """One sequence through the twins: the target on every token, a draft after each step."""
    logits, taps, ids, scores, trust = [], [], [], [], []
    for p, token in enumerate(tokens):
        for made, value in zip((logits, taps), target.step(token), strict=True):
            made.append(value)
        draft.write(taps[-1], p)
        if p >= PROMPT:
            anchor = int(logits[-1].argmax())
            block = draft.draft(anchor, p + 1)
            ids.append([anchor, *block[0]])
            scores.append(block[1])
            trust.append(block[2])
    assert not target.chose_all, "no choice among rows was made; the sequence is too short"
    return {
        "prefill_last_logits": logits[PROMPT - 1], "prefill_taps": np.stack(taps[:PROMPT]),
        "decode_logits": np.stack(logits[PROMPT:]), "draft_ids": np.array(ids),
        "draft_logits": np.stack(scores), "confidence_logits": np.stack(trust),
    }  # fmt: skip


@pytest.fixture(scope="module")
def golden_target() -> tuple[DeepseekTarget, dict, np.ndarray, np.ndarray]:
    """The golden target, its parameters, and two sequences with their logits."""
    golden = load_file(GOLDEN / "outputs.safetensors")
    config, params = load_deepseek_target(GOLDEN, token_classes=golden["engram_hash.token_map"])
    target = DeepseekTarget(config=config)
    tokens = golden["tokens"]
    return target, params, tokens, run_deepseek_target(target, params, tokens)[0]


def test_later_tokens_change_nothing_before_them(golden_target):
    target, params, tokens, logits = golden_target
    for at in (1, 2, 16, 17, 30):
        changed = tokens.copy()
        changed[:, at:] = (changed[:, at:] + 3) % target.config.vocab_size
        again = run_deepseek_target(target, params, changed)[0]
        np.testing.assert_allclose(again[:, :at], logits[:, :at], atol=2e-5)
        assert np.abs(again[:, at] - logits[:, at]).max() > 1e-2


def test_sequences_do_not_see_each_other(golden_target):
    target, params, tokens, logits = golden_target
    swapped = np.stack([tokens[1], (tokens[1] + 7) % 256])
    again = run_deepseek_target(target, params, swapped)[0]
    np.testing.assert_allclose(again[0], logits[1], atol=2e-5)


PARTS = {
    "gate of rows": (1, ("attn", "compressor", "gate"), lambda x: -x),
    "index queries": (1, ("attn", "index_scores", "q"), lambda x: x[::-1]),
    "index weights": (3, ("attn", "index_scores", "weights"), lambda x: -x),
    "index keys": (3, ("attn", "index_keys", "k"), lambda x: -x),
    "choice among candidates": (5, ("attn", "index_scores", "q"), lambda x: -x),
    "engram table": (0, ("engram", "table"), lambda x: jnp.roll(x, 1, axis=0)),
    "engram key": (2, ("engram", "k_scale"), lambda x: -x),
    "sink": (4, ("attn", "sink"), lambda x: x - 30),
    "gate bias": (6, ("moe", "bias"), lambda x: 0 * x),
}


@pytest.mark.parametrize(("layer", "path", "change"), PARTS.values(), ids=PARTS.keys())
def test_every_part_matters(golden_target, layer, path, change):
    target, params, tokens, logits = golden_target
    layers = [jax.tree.map(lambda x: x, each) for each in params["layers"]]
    node = layers[layer]
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = change(node[path[-1]])
    again = run_deepseek_target(target, params | {"layers": tuple(layers)}, tokens)[0]
    assert np.abs(again - logits).max() > 1e-2


def test_one_token_has_no_complete_row(tmp_path, rng):
    """The same as in a longer sequence, which ends in an unfinished group."""
    write_target(
        tmp_path, rng, num_hidden_layers=2, compress_ratios=[3, 3], kv_source_layer_ids=[0],
        index_source_layer_ids=[0], candidate_source_layer_id=None, engram_layer_ids=None,
        dspark_target_layer_ids=[1],
    )  # fmt: skip
    config, params = load_deepseek_target(tmp_path)
    target, tokens = DeepseekTarget(config=config), jnp.asarray([[5, 9, 60, 0, 31]])
    forward = jax.jit(target.forward)
    whole, taps = forward(params, tokens)
    logits, features = forward(params, tokens[:, :1])
    np.testing.assert_allclose(logits, whole[:, :1], atol=1e-5)
    np.testing.assert_allclose(features, taps[:, :1], atol=1e-5)
    with pytest.raises(ValueError, match="got 65 tokens; expected 1 to max_position_embeddings=64"):
        target.forward(params, jnp.zeros((1, 65), jnp.int32))


def test_rows_are_visible_from_their_last_token_on():
    np.testing.assert_array_equal(
        complete_rows(5, 2, 2),
        np.array([[0, 0], [1, 0], [1, 0], [1, 1], [1, 1]], bool),
    )


def test_choices_by_hand():
    scores = jnp.asarray([[[5.0, 1.0, -2.0, 4.0, 0.0, 9.0, 9.0, 7.0]]])
    allowed = jnp.arange(8) < 6
    chosen = choose_rows(scores, jnp.broadcast_to(allowed, scores.shape), 3)
    assert np.flatnonzero(chosen[0, 0]).tolist() == [0, 3, 5]
    few = choose_rows(scores, jnp.broadcast_to(jnp.arange(8) < 2, scores.shape), 3)
    assert np.flatnonzero(few[0, 0]).tolist() == [0, 1]
    # Blocks of three: (5, 1, -2), (4, 0, 9), (9, 7); of five visible rows, the newest is (4, 0).
    visible = jnp.broadcast_to(jnp.arange(8) < 5, (1, 8))
    blocks = choose_blocks(scores, visible, count=1, size=3)
    assert np.flatnonzero(blocks[0, 0]).tolist() == [3, 4]
    best = choose_blocks(scores, jnp.ones((1, 8), bool), count=2, size=3)
    assert np.flatnonzero(best[0, 0]).tolist() == [3, 4, 5, 6, 7]
    assert not choose_blocks(scores, jnp.zeros((1, 8), bool), count=2, size=3).any()


def test_hashes_of_the_released_sizes_are_exact(rng):
    """Products of up to 63 bits, from the largest classes, against Python's integers."""
    config = target_config(
        engram_layer_ids=[1, 4], engram_vocab_size=16_000_000, engram_max_ngram_size=4,
        engram_n_heads=8, engram_compressed_vocab_size=99092,
    ).engram  # fmt: skip
    classes = rng.integers(99092 - 50, 99092, (2, 6))
    primes, factors = hash_primes(config)[1], hash_multipliers(config)[1].tolist()
    assert max(factors) * 99091 > 2**62
    got = np.asarray(ngram_rows(config, 1, jnp.asarray(classes), jnp.int32(99091)))
    for row, own in zip(classes.tolist(), got, strict=True):
        back = [99091] * 3 + row
        for t in range(6):
            mixed, first, expected = back[t + 3] * factors[0], 0, []
            for n in range(1, 4):
                mixed ^= back[t + 3 - n] * factors[n]
                for prime in primes[n - 1].tolist():
                    expected.append(first + mixed % prime)
                    first += prime
            assert own[t].tolist() == expected
