"""Meshes, rules and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dspark_jax.engine.fit import fit_draft, fit_target
from dspark_jax.engine.programs import Programs
from dspark_jax.engine.spread import place_pair
from dspark_jax.sharding import (
    MeshShape,
    ShardingRules,
    axis_size,
    constrain,
    is_split,
    make_mesh,
    param_specs,
    parse_mesh,
)
from dspark_jax.state import Decoder
from dspark_jax.target.llama import split_layers
from dspark_jax.train.__main__ import main as train_main
from tests.sharding.models import CAPACITY, tiny_pair


def test_a_mesh_is_read():
    assert parse_mesh("data=2,model=4") == MeshShape(data=2, model=4)
    assert parse_mesh(" expert = 8 ") == MeshShape(expert=8)
    assert MeshShape(data=2, expert=2, model=3).devices == 12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data=2,tensor=4", "'tensor=4' is not an axis"),
        ("data", "'data' is not an axis"),
        ("model=0", "'model=0' is not an axis"),
        ("model=-1", "expected axes of"),
        ("model=2,model=4", "names the axis model twice"),
        ("", "is not an axis"),
    ],
)
def test_what_is_no_mesh_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_mesh(text)


def test_too_few_devices_are_counted():
    with pytest.raises(ValueError, match="takes 16 devices; there are 8"):
        make_mesh(MeshShape(data=4, model=4))


def test_rules_make_partitions():
    rules = ShardingRules()
    assert rules.spec("vocab", None) == PartitionSpec("model", None)
    assert rules.spec(None, "slots", "heads") == PartitionSpec(None, "data", "model")
    with pytest.raises(ValueError, match="'heights'.*do not exist"):
        rules.spec("heights")
    with pytest.raises(ValueError, match="split over"):
        rules.spec("vocab", "heads")
    with pytest.raises(ValueError, match="no axes of a mesh"):
        ShardingRules({"vocab": "tensor"})
    assert ShardingRules({"vocab": None}).spec("vocab") == PartitionSpec(None)


def test_stacked_and_split_layers_lie_alike():
    _, _, params = tiny_pair(moe=True)
    stacked = param_specs(params.target)["layers"]
    one = param_specs(split_layers(params.target))["layers"][0]
    added = jax.tree.map(
        lambda spec: PartitionSpec(None, *spec) if spec else spec, one,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )  # fmt: skip
    assert stacked == added
    assert one["mlp"]["gate_up"] == PartitionSpec("expert", None, None, "model")
    assert one["qkv"] == PartitionSpec(None, "model", None, None)


def test_a_vocabulary_that_does_not_divide_is_refused():
    _, _, params = tiny_pair()
    odd = params.target | {"head": params.target["head"][:-1]}
    with pytest.raises(ValueError, match=r"target.head: 4095 over model=8.*divide these sizes"):
        place_pair(make_mesh(MeshShape(model=8)), params.replace(target=odd))


def test_a_reduced_vocabulary_is_whole_on_every_device():
    _, _, params = tiny_pair()
    ids = jnp.arange(100)
    shared = params.shared.replace(head=params.shared.head[:100], target_ids=ids, draft_ids=ids)
    markov = params.draft["markov"] | {"w2": params.draft["markov"]["w2"][:100]}
    draft = params.draft | {"markov": markov}
    placed = place_pair(
        make_mesh(MeshShape(model=8)), params.replace(draft=draft, shared=shared)
    )  # fmt: skip
    assert placed.shared.head.sharding.is_fully_replicated
    assert placed.draft["markov"]["w2"].sharding.is_fully_replicated
    assert not placed.target["head"].sharding.is_fully_replicated


def test_slots_are_a_multiple_of_their_groups():
    target, draft, params = tiny_pair()
    mesh = make_mesh(MeshShape(data=4))
    with pytest.raises(ValueError, match="6 slots do not divide over data=4"):
        Programs(
            Decoder(target=target, draft=draft), params, slots=6, capacity=CAPACITY,
            dtype=jnp.float32, mesh=mesh,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kv_heads", "heads", "devices", "fitted"),
    [
        (2, 8, 4, (4, 8)),
        (2, 8, 8, (8, 8)),
        (3, 9, 2, (4, 12)),
        (1, 6, 4, (4, 24)),
        (8, 8, 4, (8, 8)),
    ],
)
def test_heads_are_made_to_divide(kv_heads, heads, devices, fitted, rng):
    target, draft, params = tiny_pair(kv_heads=kv_heads, heads=heads)
    config, target_params = fit_target(target.config, params.target, devices)
    draft_config, draft_params = fit_draft(draft.config, params.draft, devices)
    for made in (config, draft_config):
        assert (made.num_key_value_heads, made.num_attention_heads) == fitted
    tokens, none = rng.integers(0, 99, (1, 5)), jnp.zeros(1, jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, params) -> jax.Array:
        cache = model.make_cache(1, 8, jnp.float32)
        return model.forward(params, tokens, cache, cache_len=none).hidden

    @functools.partial(jax.jit, static_argnums=0)
    def draft_run(model, drafted) -> jax.Array:
        cache = model.make_cache(1, 8, jnp.float32)
        anchor = jnp.array([7])
        return model.backbone(drafted, params.shared, cache, anchor=anchor, anchor_pos=none)

    fitted_target = type(target)(config=config, tap_layer_ids=(-1, 0))
    np.testing.assert_allclose(
        run(fitted_target, target_params), run(target, params.target), atol=1e-5
    )
    np.testing.assert_allclose(
        draft_run(type(draft)(config=draft_config), draft_params), draft_run(draft, params.draft),
        atol=1e-5,
    )  # fmt: skip


def test_without_a_mesh_nothing_is_asked_of_the_compiler():
    x = jnp.ones((2, 8))
    assert not is_split() and axis_size("vocab") == 1 and constrain(x, None, "vocab") is x
    assert "sharding" not in jax.jit(lambda x: constrain(x, None, "vocab")).lower(x).as_text()


def test_training_has_no_experts_to_split(capsys, tmp_path):
    assert train_main(["--config", str(tmp_path / "c.py"), "--mesh", "data=2,expert=2"]) == 1
    assert "give the axes data and model" in capsys.readouterr().err
