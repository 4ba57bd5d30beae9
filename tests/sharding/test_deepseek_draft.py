"""A DeepSeek draft spread over eight devices drafts the same tokens as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.draft.propose import propose
from dspark_jax.kv_cache import WindowCache
from dspark_jax.types import Block, Params, SamplingParams, SharedHead
from tests.deepseek_models import deepseek_config, deepseek_params

# Parameters split over the model axis, and which of their axes; the others are on every device.
SPLIT = {
    "gate_up": 0, "down": 0, "q_b": 1, "sink": 0, "o_a": 0, "o_b": 0, "shared_gate_up": 2,
    "shared_down": 0, "w1": 0, "w2": 0,
}  # fmt: skip
REQUESTS = 4


def _spec(path: tuple, leaf: jax.Array) -> PartitionSpec:
    axis = SPLIT.get(getattr(path[-1], "key", None))
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "model")


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)], ids=["data2-expert4", "model8"])
def test_sharded_drafts_are_the_same(shape, rng):
    config = deepseek_config(
        "deepseek_v41", stages=1, hidden_size=32, num_attention_heads=8, o_groups=8,
        moe_intermediate_size=16, dspark_n_routed_experts=8, vocab_size=64,
    )  # fmt: skip
    draft, params = DeepseekDraft(config=config), deepseek_params(config, rng)
    tables = rng.normal(size=(2, 64, 32)).astype(np.float32)
    shared = SharedHead(embedding=tables[0], head=0.15 * tables[1])
    rows = (1, REQUESTS, config.sliding_window, config.head_dim)
    cache = WindowCache(kv=rng.normal(size=rows).astype(np.float32))
    zeros, ints = jnp.zeros(REQUESTS), jnp.zeros(REQUESTS, jnp.int32)
    sampling = SamplingParams(
        temperature=jnp.array([0.0, 1.0, 0.0, 1.5]), top_k=ints, top_p=zeros + 1, min_p=zeros,
        seed=jnp.arange(REQUESTS, dtype=jnp.uint32),
    )  # fmt: skip

    def run(params: Params, shared: SharedHead, cache: WindowCache, anchor, anchor_pos) -> Block:
        return propose(
            draft, params, shared, cache, anchor=anchor, anchor_pos=anchor_pos,
            round_index=ints, sampling=sampling, coupled=False,
        )  # fmt: skip

    anchor, anchor_pos = np.arange(5, 5 + REQUESTS), np.array([0, 3, 9, 20])
    expected = jax.jit(run)(params, shared, cache, anchor, anchor_pos)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def put(tree: object, spec: PartitionSpec) -> object:
        return jax.device_put(tree, NamedSharding(mesh, spec))

    spread = jax.tree_util.tree_map_with_path(lambda p, x: put(x, _spec(p, x)), params)
    experts = spread["layers"][0]["moe"]["gate_up"]
    assert experts.addressable_shards[0].data.shape[0] == 8 // shape[1]
    got = jax.jit(run)(
        spread, put(shared, PartitionSpec("model")), put(cache, PartitionSpec(None, "data")),
        put(anchor, PartitionSpec("data")), put(anchor_pos, PartitionSpec("data")),
    )  # fmt: skip
    np.testing.assert_array_equal(got.draft_tokens, expected.draft_tokens)
    np.testing.assert_allclose(got.draft_logits, expected.draft_logits, atol=2e-4)
    np.testing.assert_allclose(got.confidence_logits, expected.confidence_logits, atol=2e-4)
    assert len(np.unique(expected.draft_tokens)) > 4
