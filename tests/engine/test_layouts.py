"""An engine whose parameters lie as a TPU wants them decodes the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine.core import Engine
from dspark_jax.engine.load import random_draft_config
from dspark_jax.engine.requests import Request
from dspark_jax.engine.spread import Spread
from dspark_jax.layouts import keep_layouts, place_layouts
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.state import Decoder
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import PairParams


def _pair() -> tuple[Decoder, PairParams]:
    config = TargetConfig(
        model_type="qwen3", vocab_size=64, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=False, qk_norm=True,
    )  # fmt: skip
    draft = DenseDraft(config=random_draft_config(config))
    target = LlamaTarget(config=config, tap_layer_ids=draft.config.target_layer_ids)
    params = jax.jit(target.init)(jax.random.key(0))
    shared = target.shared_head(params)
    drafted = jax.jit(draft.init)(jax.random.key(1))
    return (
        Decoder(target=target, draft=draft),
        PairParams(target=params, draft=drafted, shared=shared),
    )


def _tokens(decoder: Decoder, params: PairParams) -> list[int]:
    engine = Engine(decoder, params, slots=1, capacity=32, dtype=jnp.float32)
    formats = engine.programs.round[1].input_formats[0][0]
    engine.submit(Request(prompt_ids=(1, 2, 3), max_tokens=12, temperature=0.0))
    tokens = []
    while engine.has_work:
        for emission in engine.step():
            tokens += emission.token_ids
    kernel = formats.target["layers"]["qkv"].layout.major_to_minor
    assert kernel == params.target["layers"]["qkv"].format.layout.major_to_minor
    return tokens


def test_same_tokens_and_no_copy_at_the_door():
    decoder, params = _pair()
    placed = place_layouts(params)
    order = placed.target["layers"]["qkv"].format.layout.major_to_minor
    assert order == (0, 2, 3, 4, 1)
    assert params.target["layers"]["qkv"].format.layout.major_to_minor == (0, 1, 2, 3, 4)
    np.testing.assert_array_equal(placed.draft["layers"][0]["q"], params.draft["layers"][0]["q"])
    tokens = _tokens(decoder, placed)
    assert len(tokens) == 12 and tokens == _tokens(decoder, params)


def test_shapes_on_a_mesh_keep_the_layouts():
    decoder, params = _pair()
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    params = jax.device_put(params, whole)
    spread = Spread(mesh, decoder, slots=1, capacity=8, dtype=jnp.float32)
    for given, expected in ((params, None), (place_layouts(params), (0, 2, 3, 4, 1))):
        shapes = keep_layouts(spread.params(jax.eval_shape(lambda x: x, params)), given)
        layout = shapes.target["layers"]["qkv"].format.layout
        assert (layout and layout.major_to_minor) == expected
