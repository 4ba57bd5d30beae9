"""The real TPU compiler takes the train step on a mesh; shared tables are counted once."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.aot.compiled import Compiled
from dspark_jax.aot.fit import device_bytes
from dspark_jax.aot.models import Models
from dspark_jax.aot.pair import PairPrograms, selection
from dspark_jax.aot.topology import has_compiler, load_topology
from dspark_jax.aot.training import compile_train_step
from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine.load import random_draft_config
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sharding import make_mesh, parse_mesh
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import PairParams, SharedHead

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(not has_compiler(), reason="libtpu is not installed: pip install libtpu"),
]

VOCAB, REDUCED, WIDTH = 8192, 1024, 256


def _models(*, reduced: bool) -> Models:
    """A pair most of whose memory is its tables; the draft's vocabulary may be its own."""
    config = TargetConfig(
        model_type="qwen3", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, intermediate_size=256,
        rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=False, qk_norm=True,
    )  # fmt: skip
    shape = random_draft_config(config)
    shape = dataclasses.replace(
        shape, num_hidden_layers=1, draft_vocab_size=REDUCED if reduced else None
    )
    target = LlamaTarget(config=config, tap_layer_ids=shape.target_layer_ids)
    draft, shared = DenseDraft(config=shape), None

    def shapes(model: LlamaTarget | DenseDraft) -> dict:
        return jax.eval_shape(lambda key: model.init(key, jnp.bfloat16), jax.random.key(0))

    params = PairParams(target=shapes(target), draft=shapes(draft))
    if reduced:
        shared = SharedHead(
            embedding=params.target["embedding"],
            head=jax.ShapeDtypeStruct((REDUCED, WIDTH), jnp.bfloat16),
            target_ids=jax.ShapeDtypeStruct((REDUCED,), jnp.int32),
            draft_ids=jax.ShapeDtypeStruct((VOCAB,), jnp.int32),
        )
    return Models(
        name="tables", target=target, draft=draft, params=params.replace(shared=shared),
        dtype=jnp.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("reduced", [False, True])
def test_tables_that_a_draft_borrows_are_counted_once(reduced):
    topology, models = load_topology("v6e:1x1"), _models(reduced=reduced)
    programs = PairPrograms(
        models.decoder(ScheduleConfig()), models, topology,
        make_mesh(parse_mesh("data=1"), topology.devices), slots=1, capacity=256,
        wanted=selection(("round",), None), progress=print,
    )  # fmt: skip
    (program,) = programs.compiled
    once = device_bytes(programs.param_shapes) + device_bytes(programs.state_shapes)
    table = 2 * VOCAB * WIDTH
    assert once - table / 2 < program.memory.arguments < once + table / 2


def test_a_train_step_over_two_axes_holds_less_and_talks():
    topology, models = load_topology("v6e:2x2"), _models(reduced=False)

    def compiled(mesh: str) -> Compiled:
        shape = parse_mesh(mesh)
        return compile_train_step(
            models, topology, shape=shape, sequences=4, length=256, anchors=16, global_batch=8,
            progress=print,
        )  # fmt: skip

    wide, both = compiled("data=4"), compiled("data=2,model=2")
    assert wide.fits and both.fits
    tables = 2 * 2 * VOCAB * WIDTH  # embedding and head, in bytes, half of them elsewhere
    assert both.memory.arguments < wide.memory.arguments - tables / 2
    assert both.whole(both.phases(lambda name: 1)).collectives
