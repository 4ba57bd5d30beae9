"""A DeepSeek draft spread over eight devices drafts the same tokens as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.draft.propose import propose
from dspark_jax.kv_cache import WindowCache
from dspark_jax.sharding import (
    check_divides,
    make_mesh,
    param_specs,
    parse_mesh,
    place,
    state_specs,
)
from dspark_jax.types import Block, Params, SamplingParams, SharedHead
from tests.deepseek_models import deepseek_config, deepseek_params
from tests.sharding.models import collectives

REQUESTS, VOCAB, WIDTH = 4, 1024, 32
SLOTS_FIRST, WHOLE = PartitionSpec("data"), PartitionSpec()


@pytest.mark.parametrize("mesh", ["data=2,expert=4", "model=8"])
def test_sharded_drafts_are_the_same(mesh, rng):
    config = deepseek_config(
        "deepseek_v41", stages=1, hidden_size=WIDTH, num_attention_heads=8, o_groups=8,
        moe_intermediate_size=16, dspark_n_routed_experts=8, vocab_size=VOCAB,
    )  # fmt: skip
    draft, params = DeepseekDraft(config=config), deepseek_params(config, rng)
    tables = rng.normal(size=(2, VOCAB, WIDTH)).astype(np.float32)
    shared = SharedHead(embedding=tables[0], head=0.15 * tables[1])
    rows = (1, REQUESTS, config.sliding_window, config.head_dim)
    cache = WindowCache(kv=rng.normal(size=rows).astype(np.float32))
    zeros, ints = jnp.zeros(REQUESTS), jnp.zeros(REQUESTS, jnp.int32)
    sampling = SamplingParams(
        temperature=jnp.array([0.0, 1.0, 0.0, 1.5]), top_k=ints, top_p=zeros + 1, min_p=zeros,
        seed=jnp.arange(REQUESTS, dtype=jnp.uint32),
    )  # fmt: skip
    slots = (
        np.arange(5, 5 + REQUESTS, dtype=np.int32),
        np.array([0, 3, 9, 20], np.int32),
        sampling,
    )

    def run(params: Params, shared: SharedHead, cache: WindowCache, slots: tuple) -> Block:
        anchor, anchor_pos, sampling = slots
        return propose(
            draft, params, shared, cache, anchor=anchor, anchor_pos=anchor_pos,
            round_index=jnp.zeros_like(anchor), sampling=sampling, coupled=False,
        )  # fmt: skip

    expected = jax.jit(run)(params, shared, cache, slots)
    devices = make_mesh(parse_mesh(mesh))
    trees, specs = (params, shared, cache), (
        param_specs(params), param_specs(shared), state_specs(cache)
    )  # fmt: skip
    check_divides(devices, trees, specs, "draft")
    placed = place(devices, trees, specs)
    experts = placed[0]["layers"][0]["moe"]["gate_up"].addressable_shards[0].data
    assert experts.size == 8 * WIDTH * 2 * 16 // devices.shape["expert"] // devices.shape["model"]
    grouped = jax.shard_map(
        run, in_specs=(WHOLE, WHOLE, PartitionSpec(None, "data"), SLOTS_FIRST),
        out_specs=SLOTS_FIRST, axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    with jax.set_mesh(devices):
        compiled = jax.jit(grouped).lower(*placed, slots).compile()
        got = compiled(*placed, slots)
    np.testing.assert_array_equal(got.draft_tokens, expected.draft_tokens)
    np.testing.assert_allclose(got.draft_logits, expected.draft_logits, atol=2e-4)
    np.testing.assert_allclose(got.confidence_logits, expected.confidence_logits, atol=2e-4)
    assert len(np.unique(expected.draft_tokens)) > 4
    talk = collectives(compiled.as_text())
    assert max(c.size for c in talk) <= REQUESTS * config.block_size * WIDTH  # hidden rows
