"""A DeepSeek draft in the engine: a window in place of a full context, and the same text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.engine.core import Engine
from dspark_jax.engine.requests import Request
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.state import Decoder
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import PairParams
from tests.deepseek_models import TEXT, deepseek_config

CAPACITY, SLOTS = 60, 2
EPS = 1e-5

pytestmark = pytest.mark.usefixtures("one_width")


@pytest.fixture(scope="module")
def models() -> tuple[LlamaTarget, DeepseekDraft, PairParams]:
    """A target that looks at the last token only, and a draft that knows it but for some noise."""
    taps = {"num_hidden_layers": 2, "dspark_target_layer_ids": [0, 1]}
    config = deepseek_config("deepseek_v41", stages=1, **taps)
    target = LlamaTarget(
        config=TargetConfig(
            model_type="llama", vocab_size=TEXT["vocab_size"], hidden_size=TEXT["hidden_size"],
            num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=6, intermediate_size=8, rms_norm_eps=EPS,
            rope=RopeConfig(), tie_word_embeddings=False, qk_norm=False,
        ),
        tap_layer_ids=config.target_layer_ids,
    )  # fmt: skip
    params = jax.jit(target.init)(jax.random.key(3))
    params |= {name: 20 * params[name] for name in ("embedding", "head")}
    layers = params["layers"]
    layers["o"], layers["mlp"]["down"] = layers["o"] * 0, layers["mlp"]["down"] * 0
    embedding = params["embedding"]
    scale = jax.lax.rsqrt(jnp.mean(embedding**2, axis=1, keepdims=True) + EPS)
    draft = DeepseekDraft(config=dataclasses.replace(config, markov_rank=config.hidden_size))
    drafted = jax.jit(draft.init)(jax.random.key(4))
    drafted["norm"]["weight"] *= 0.4
    drafted["markov"] = {"w1": embedding * scale, "w2": params["head"]}
    pair = PairParams(target=params, draft=drafted, shared=target.shared_head(params))
    return target, draft, pair


def _requests() -> list[Request]:
    rng = np.random.default_rng(5)
    lengths = (1, 2, 29, 11, 7, 38, 1)
    ways = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 4})
    return [
        Request(
            prompt_ids=tuple(map(int, rng.integers(1, TEXT["vocab_size"], length))),
            max_tokens=int(rng.integers(8, 20)),
            **ways[i % len(ways)],
        )
        for i, length in enumerate(lengths)
    ]


def test_the_text_is_the_targets_and_most_drafts_are_accepted(models):
    """One-token prompts, prompts past the window, slots used again; any mix of temperatures."""
    target, draft, params = models
    decoder = Decoder(
        target=target, draft=draft, rejection_sample_method="coupled",
        schedule=ScheduleConfig(policy="threshold", confidence_threshold=0.2),
    )  # fmt: skip
    engine = Engine(decoder, params, slots=SLOTS, capacity=CAPACITY)
    plain = Engine(dataclasses.replace(decoder, draft=None), params, slots=SLOTS, capacity=CAPACITY)
    got = [sequence.token_ids for sequence in engine.run(_requests())]
    expected = [sequence.token_ids for sequence in plain.run(_requests())]
    assert got == expected
    counters = engine.counters
    accepted = sum(counters.num_accepted_tokens_per_pos) / counters.num_draft_tokens
    assert 0.2 < accepted < 0.98
    window = engine._state.context_kv.kv
    assert window.shape == (1, SLOTS, draft.config.sliding_window, draft.config.head_dim)
