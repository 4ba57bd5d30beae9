"""Models as shapes, topologies by name, and how parameters lie on a TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.aot import topology as topology_module
from dspark_jax.aot.draft_only import pack_experts
from dspark_jax.aot.models import describe_models, presets
from dspark_jax.aot.topology import load_topology
from dspark_jax.chips import CHIPS
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.layouts import axis_order, with_layouts
from dspark_jax.schedule import ScheduleConfig
from tests.models import write_draft, write_target


def _count(tree: object) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def _bytes(tree: object) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_presets_have_the_published_sizes():
    assert presets() == ("DeepSeek-V4.1-Flash", "Qwen3-8B", "dspark_qwen3_8b_block7")
    pair = describe_models("Qwen3-8B", "dspark_qwen3_8b_block7", jnp.bfloat16)
    assert _count(pair.params.target) == 8_190_735_360
    assert round(_count(pair.params.draft) / 1e9, 3) == 1.126
    assert pair.params.shared is None
    decoder = pair.decoder(ScheduleConfig())
    assert decoder.num_drafts == 7 and decoder.target.tap_layer_ids == (1, 9, 17, 25, 33)


def test_the_v41_draft_stack_alone_and_packed():
    models = describe_models("none", "DeepSeek-V4.1-Flash", jnp.bfloat16)
    assert isinstance(models.draft, DeepseekDraft) and models.target is None
    assert _count(models.params.draft) == 14_225_362_530
    assert models.params.shared.head.shape == (129280, 5120)
    routed = 3 * 128 * 3 * 5120 * 2304
    packed = _bytes(pack_experts(models.params.draft))
    assert packed == _bytes(models.params.draft) - 2 * routed + routed // 2 + routed // 32
    with pytest.raises(ValueError, match="--model"):
        models.decoder(ScheduleConfig())


def test_directories_random_drafts_and_mistakes(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_target(target)
    write_draft(draft, target)
    pair = describe_models(str(target), str(draft), jnp.float32)
    assert (
        pair.name == "target"
        and pair.draft.config.num_drafts == pair.decoder(ScheduleConfig()).num_drafts
    )
    assert describe_models(str(target), "random", jnp.float32).draft is not None
    assert describe_models(str(target), "none", jnp.float32).draft is None
    with pytest.raises(FileNotFoundError, match="Presets: DeepSeek-V4.1-Flash, Qwen3-8B"):
        describe_models("Qwen3-9B", "none", jnp.float32)
    with pytest.raises(ValueError, match="nothing to compile"):
        describe_models("none", "none", jnp.float32)
    with pytest.raises(ValueError, match="sizes from a target"):
        describe_models("none", "random", jnp.float32)


@pytest.mark.parametrize("name", ["v6e", "v6e:2", "v9:2x2", "v5p:2x2", "v6e:axb"])
def test_topologies_that_do_not_exist(name):
    with pytest.raises(ValueError, match="v6e:4x4 or v5p:2x2x4"):
        load_topology(name)


def test_a_missing_compiler_is_said(monkeypatch):
    monkeypatch.setattr(topology_module, "has_compiler", lambda: False)
    with pytest.raises(FileNotFoundError, match="pip install"):
        load_topology("v6e-4")


def test_figures_of_chips_are_plausible():
    """Operations per byte where matrix units become the limit, as published for each chip."""
    knees = {name: chip.flops_per_s / chip.bytes_per_s for name, chip in CHIPS.items()}
    assert {k: round(v) for k, v in knees.items()} == {
        "v5e": 240, "v5p": 187, "v6e": 561, "tpu7x": 312,
    }  # fmt: skip
    assert all(15 * 2**30 < c.hbm_bytes < 100 * 2**30 for c in CHIPS.values())
    assert dataclasses.replace(CHIPS["v5e"], name="x") != CHIPS["v5e"]


def test_kernels_keep_their_contracted_axis_innermost():
    pair = describe_models("Qwen3-8B", "dspark_qwen3_8b_block7", jnp.bfloat16)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def at(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)

    found = {}
    placed = with_layouts(jax.tree.map(at, pair.params))
    for path, leaf in jax.tree_util.tree_flatten_with_path(placed)[0]:
        order = axis_order(path, leaf)
        layout = getattr(leaf.format, "layout", None)
        assert (layout is None) == (order is None)
        if order is not None:
            assert layout.major_to_minor == order
            size = leaf.shape[order[-1]]
            assert size == 4096, "the model's width is what is contracted"
            found[path[-1].key, len(leaf.shape)] = order
    assert found == {
        ("qkv", 5): (0, 2, 3, 4, 1), ("gate_up", 4): (0, 2, 3, 1), ("q", 3): (1, 2, 0),
        ("kv", 4): (1, 2, 3, 0), ("gate_up", 3): (1, 2, 0),
    }  # fmt: skip
