"""Configs of transformers 4 and 5, and the rotary frequencies they stand for."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.layers import apply_rope, rope_angles, rope_frequencies

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}  # fmt: skip
DRAFT = dict(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=128, rms_norm_eps=1e-6,
    rope=RopeConfig(), block_size=7, mask_token_id=99, target_layer_ids=(1, 3), markov_rank=8,
    markov_head_type="vanilla",
)  # fmt: skip


def _numpy_frequencies(size: int, theta: float, scaling: dict) -> list[float]:
    """Frequency of each rotary pair, one pair at a time, from the published definitions."""
    out, kind = [], scaling.get("rope_type", "default")
    for pair in range(size // 2):
        freq = 1.0 / theta ** (2 * pair / size)
        if kind == "linear":
            freq /= scaling["factor"]
        elif kind == "llama3":
            old = scaling["original_max_position_embeddings"]
            wavelength = 2 * math.pi / freq
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wavelength > old / low:
                freq /= scaling["factor"]
            elif wavelength >= old / high:
                smooth = (old / wavelength - low) / (high - low)
                freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
        elif kind == "yarn":
            old = scaling["original_max_position_embeddings"]

            def boundary(turns: float, old: int = old) -> float:
                return size * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

            first = max(math.floor(boundary(scaling.get("beta_fast", 32))), 0)
            last = min(math.ceil(boundary(scaling.get("beta_slow", 1))), size - 1)
            slow = min(max((pair - first) / (last - first), 0.0), 1.0)
            freq = slow * freq / scaling["factor"] + (1 - slow) * freq
        out.append(freq)
    return out


SCALINGS = {
    "default": (10000.0, {}, 1.0),
    "large_theta": (5e6, {"rope_type": "default"}, 1.0),
    "linear": (10000.0, {"rope_type": "linear", "factor": 3.0}, 1.0),
    "llama3": (
        500000.0,
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        1.0,
    ),
    "yarn": (
        1e6,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        0.1 * math.log(4.0) + 1.0,
    ),
    "yarn_tuned": (
        1e4,
        {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512,
            "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 0.75,
        },
        0.75,
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("theta", "scaling", "factor"), SCALINGS.values(), ids=SCALINGS)
def test_rope_of_both_versions_against_numpy(version, theta, scaling, factor):
    hf = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    if version == 4:
        hf |= {"rope_theta": theta, "rope_scaling": scaling or None}
    else:
        hf["rope_parameters"] = {"rope_theta": theta, **scaling}
    rope = TargetConfig.from_hf(hf).rope
    freq, got_factor = rope_frequencies(rope, 64)
    np.testing.assert_allclose(freq, _numpy_frequencies(64, theta, scaling), rtol=1e-6)
    assert got_factor == pytest.approx(factor)
    plain = _numpy_frequencies(64, 10000.0, {})
    assert np.allclose(freq, plain, rtol=1e-3) == (theta == 10000.0 and not scaling)
    angles = rope_angles(rope, 64, jnp.array([0, 1, 1000]))
    np.testing.assert_allclose(angles[1, 0], np.cos(freq) * factor, atol=1e-6)
    np.testing.assert_allclose(angles[2, 1], np.sin(1000 * freq) * factor, atol=1e-3)


def test_old_spelling_of_the_scaling_type():
    hf = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert RopeConfig.from_hf(hf).rope_type == "linear"


def test_scaling_without_original_length_takes_the_models():
    hf = LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    assert RopeConfig.from_hf(hf).original_max_position_embeddings == 2048


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_pairs(rng, interleaved):
    rope = RopeConfig.from_hf(LLAMA | {"rope_is_neox_style": not interleaved})
    assert rope.interleaved == interleaved
    x = rng.normal(size=(3, 2, 8)).astype(np.float32)  # positions, heads, H
    angles = rope_angles(rope, 8, jnp.arange(3))
    got = np.asarray(apply_rope(jnp.asarray(x), angles, interleaved=interleaved))
    freq = _numpy_frequencies(8, 10000.0, {})
    for position in range(3):
        for pair in range(4):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
            c, s = np.cos(position * freq[pair]), np.sin(position * freq[pair])
            one, two = x[position, :, a], x[position, :, b]
            np.testing.assert_allclose(got[position, :, a], one * c - two * s, atol=1e-6)
            np.testing.assert_allclose(got[position, :, b], two * c + one * s, atol=1e-6)


BAD_ROPES = {
    "none": ({"rope_theta": None}, "neither rope_parameters.rope_theta nor rope_theta"),
    "unknown": ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is not suppo"),
    "partial": ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 is not supported"),
    "negative": ({"rope_theta": -1.0}, "must be positive"),
}


@pytest.mark.parametrize(("changes", "match"), BAD_ROPES.values(), ids=BAD_ROPES)
def test_bad_rope(changes, match):
    with pytest.raises(ValueError, match=match):
        RopeConfig.from_hf(LLAMA | changes)


BAD_TARGETS = {
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias=True, which is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "window": ({"use_sliding_window": True}, "use_sliding_window=True"),
    "heads": ({"num_key_value_heads": 3}, "is not a multiple of"),
    "width": ({"hidden_size": None}, "config.json lacks `hidden_size`"),
    "odd": ({"head_dim": 15}, "head_dim=15 must be even"),
    "experts": ({"architectures": ["Qwen3MoeForCausalLM"]}, "lacks num_experts"),
}


@pytest.mark.parametrize(("changes", "match"), BAD_TARGETS.values(), ids=BAD_TARGETS)
def test_bad_target(changes, match):
    with pytest.raises(ValueError, match=match):
        TargetConfig.from_hf(LLAMA | changes)


def test_target_fields():
    config = TargetConfig.from_hf(LLAMA | {"eos_token_id": [2, 3], "head_dim": 24})
    assert config.head_dim == 24 and config.eos_token_ids == (2, 3)
    assert TargetConfig.from_hf(LLAMA).head_dim == 16  # not stored: width / heads
    assert TargetConfig.from_hf(LLAMA | {"eos_token_id": 7}).eos_token_ids == (7,)
    grouped = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert TargetConfig.from_hf(grouped).num_key_value_heads == 4


BAD_DRAFTS = {
    "no_taps": (dict(target_layer_ids=()), "must be strictly increasing"),
    "repeated": (dict(target_layer_ids=(1, 1)), "must be strictly increasing"),
    "before": (dict(target_layer_ids=(-2, 1)), "at least -1"),
    "past": (dict(num_target_layers=3), "names a layer past the target's last, 2"),
    "block": (dict(block_size=0), "block_size=0 must be at least 1"),
    "mask": (dict(mask_token_id=100), "outside the vocabulary of 100"),
    "kind": (dict(markov_head_type=None), "markov_head_type=None with markov_rank=8"),
    "confidence": (
        dict(markov_rank=0, enable_confidence_head=True, confidence_head_with_markov=True),
        "needs a Markov head, but markov_rank is 0",
    ),
    "window": (dict(sliding_window=0), "sliding_window=0 must be positive or null"),
}


@pytest.mark.parametrize(("changes", "match"), BAD_DRAFTS.values(), ids=BAD_DRAFTS)
def test_bad_draft(changes, match):
    with pytest.raises(ValueError, match=match):
        DraftConfig(**(DRAFT | changes))


def test_drafts_per_block():
    assert DraftConfig(**DRAFT).num_drafts == 7
    assert DraftConfig(**DRAFT, sample_from_anchor=False).num_drafts == 6
    assert DraftConfig(**DRAFT, draft_vocab_size=32).output_vocab_size == 32
