"""Parameters that lie as a TPU wants them: the same values, and programs compiled for them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine.load import random_draft_config
from dspark_jax.engine.programs import Programs
from dspark_jax.engine.spread import Spread
from dspark_jax.layouts import keep_layouts, place_layouts
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.state import Decoder
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import PairParams, Params

ORDER = (0, 2, 3, 4, 1)  # of a stacked qkv kernel: its contracted axis innermost


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


def test_a_target_compiled_for_the_layouts_says_the_same():
    decoder, params = _pair()
    target, placed = decoder.target, place_layouts(params).target
    assert placed["layers"]["qkv"].format.layout.major_to_minor == ORDER
    assert params.target["layers"]["qkv"].format.layout.major_to_minor == (0, 1, 2, 3, 4)
    cache = target.make_cache(1, 8, jnp.float32)
    tokens, length = jnp.array([[1, 2, 3]]), jnp.zeros(1, jnp.int32)

    def run(params: Params, tokens: jax.Array) -> jax.Array:
        return target.forward(params, tokens, cache, cache_len=length).hidden

    shapes = keep_layouts(jax.eval_shape(lambda x: x, placed), placed)
    compiled = jax.jit(run).lower(shapes, tokens).compile()
    formats = compiled.input_formats[0][0]
    assert formats["layers"]["qkv"].layout.major_to_minor == ORDER
    np.testing.assert_allclose(
        compiled(placed, tokens), jax.jit(run)(params.target, tokens), atol=1e-6
    )


class _Recorded(Programs):
    """Keeps the shapes that each program would be lowered with."""

    def _compile(self, function: Callable, *shapes: object, **options: object) -> tuple:
        return shapes


def test_programs_are_lowered_for_the_layouts_the_parameters_have():
    decoder, params = _pair()
    for given, expected in ((params, None), (place_layouts(params), ORDER)):
        programs = _Recorded(decoder, given, slots=1, capacity=8, dtype=jnp.float32)
        for shapes in (programs.round[1], *programs.prefill.values()):
            layout = shapes[0].target["layers"]["qkv"].format.layout
            assert (layout and layout.major_to_minor) == expected


def test_shapes_on_a_mesh_keep_the_layouts():
    decoder, params = _pair()
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    params = jax.device_put(params, whole)
    spread = Spread(mesh, decoder, slots=1, capacity=8, dtype=jnp.float32)
    for given, expected in ((params, None), (place_layouts(params), ORDER)):
        shapes = keep_layouts(spread.params(jax.eval_shape(lambda x: x, params)), given)
        layout = shapes.target["layers"]["qkv"].format.layout
        assert (layout and layout.major_to_minor) == expected
