"""The real TPU compiler takes every kernel, at sizes that are served, for every kind of chip.

The number of kernels in the compiled program is what shows that none fell back to its reference.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.aot.topology import has_compiler, load_topology
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.sharding import make_mesh, param_specs, parse_mesh
from dspark_jax.types import SharedHead
from pallas_kernels.block_attention.ops import block_attention, block_attention_paged
from pallas_kernels.markov_sample.ops import markov_sample
from pallas_kernels.speculative_accept.ops import speculative_accept, speculative_accept_packed
from pallas_kernels.window_attention.ops import window_attention
from tests.deepseek_models import deepseek_config

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(not has_compiler(), reason="libtpu is not installed: pip install libtpu"),
]

ONE_CHIP = ("v5e:1x1", "v6e:1x1", "v5p:1x1x1", "tpu7x:1x1x1")
FOUR_CHIPS = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
SIXTEEN_CHIPS = ("v5e:4x4", "v6e:4x4", "v5p:2x2x4", "tpu7x:2x2x4")
F32, BF16, I32, U32 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32

# Qwen3-8B's draft (K = 7), SmolLM2's, and DeepSeek V4.1's (K = 5), with a few requests.
R, K, V, Q = 8, 7, 151936, 256
T = 24  # verified rows, where they lie end to end


def _accept(method: str) -> Callable[[dict[str, Any]], Any]:
    return lambda x: speculative_accept(**x, method=method)


def _accept_packed(method: str) -> Callable[[dict[str, Any]], Any]:
    return lambda x: speculative_accept_packed(**x, method=method)


_LOGITS = dict(
    target_logits=((R, K + 1, V), F32), draft_tokens=((R, K), I32), verify_len=((R,), I32),
    temperature=((R,), F32),
)  # fmt: skip
_ROWS = _LOGITS | dict(
    target_logits=((T, V), F32), request=((T,), I32), offset=((T,), I32), index=((R, K + 1), I32)
)  # fmt: skip
_STANDARD = dict(draft_logits=((R, K, V), F32), uniforms=((R, K), F32), noise=((R, 2), U32))

# name -> function of a dict of arrays, their shapes and types, kernels expected.
PROGRAMS: dict[str, tuple[Callable, dict[str, tuple], int]] = {
    "block_attention": (
        lambda x: block_attention(**x, layer=1, first_slot=0, scale=0.1),
        dict(
            q=((R, K, 32, 128), BF16), new_k=((R, K, 8, 128), BF16), new_v=((R, K, 8, 128), BF16),
            k_cache=((5, R, 8, 4096, 128), BF16), v_cache=((5, R, 8, 4096, 128), BF16),
            cache_len=((R,), I32),
        ),
        1,
    ),
    "block_attention_causal": (
        lambda x: block_attention(
            **x, layer=x["cache_len"][0], first_slot=0, scale=0.1, causal=True
        ),
        dict(
            q=((R, K + 1, 32, 128), BF16), new_k=((R, K + 1, 8, 128), BF16),
            new_v=((R, K + 1, 8, 128), BF16), k_cache=((5, R, 8, 4096, 128), BF16),
            v_cache=((5, R, 8, 4096, 128), BF16), cache_len=((R,), I32),
        ),
        1,
    ),
    "block_attention_causal_narrow_heads": (
        lambda x: block_attention(**x, layer=0, first_slot=0, scale=0.1, causal=True),
        dict(
            q=((2, 32, 9, 64), BF16), new_k=((2, 32, 3, 64), BF16), new_v=((2, 32, 3, 64), BF16),
            k_cache=((30, 2, 3, 2048, 64), BF16), v_cache=((30, 2, 3, 2048, 64), BF16),
            cache_len=((2,), I32),
        ),
        1,
    ),
    "block_attention_small_float32": (
        lambda x: block_attention(**x, layer=0, first_slot=0, scale=0.1, window=512),
        dict(
            q=((1, 5, 9, 64), F32), new_k=((1, 5, 3, 64), F32), new_v=((1, 5, 3, 64), F32),
            k_cache=((2, 1, 3, 1000, 64), F32), v_cache=((2, 1, 3, 1000, 64), F32),
            cache_len=((1,), I32),
        ),
        1,
    ),
    "block_attention_paged": (
        lambda x: block_attention_paged(**x, scale=0.1, window=2048),
        dict(
            q=((R, K, 32, 128), BF16), new_k=((R, K, 8, 128), BF16), new_v=((R, K, 8, 128), BF16),
            k_pages=((512, 8, 64, 128), BF16), v_pages=((512, 8, 64, 128), BF16),
            page_table=((R, 64), I32), cache_len=((R,), I32),
        ),
        1,
    ),
    "window_attention": (
        lambda x: window_attention(**x, layer=2, first_slot=0, scale=512**-0.5),
        dict(
            q=((R, 5, 128, 512), BF16), new_kv=((R, 5, 512), BF16),
            cache=((3, R, 128, 512), BF16), cache_len=((R,), I32), sink=((128,), F32),
        ),
        1,
    ),
    "accept_standard": (_accept("standard"), _LOGITS | _STANDARD, 3),
    "accept_coupled": (_accept("coupled"), _LOGITS | dict(noise=((R, K + 1, 2), U32)), 1),
    "accept_greedy": (_accept("greedy"), _LOGITS, 1),
    "accept_packed_standard": (_accept_packed("standard"), _ROWS | _STANDARD, 3),
    "accept_packed_coupled": (
        _accept_packed("coupled"), _ROWS | dict(noise=((R, K + 1, 2), U32)), 1,
    ),
    "markov_sample": (
        lambda x: markov_sample(**x, keep_logits=True),
        dict(
            previous=((R,), I32), w1=((V, Q), BF16), w2=((V, Q), BF16), base_logits=((R, V), F32),
            temperature=((R,), F32), noise=((R, 2), U32),
        ),
        1,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """Programs for a chip that is not here cannot be loaded back."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@functools.cache
def _mesh(topology: str) -> Mesh:
    """All devices of a topology in one axis; of one chip, one device."""
    devices = load_topology(topology).devices
    devices = devices[:1] if topology in ONE_CHIP else devices
    return Mesh(np.array(devices), ("model",), axis_types=(AxisType.Auto,))


def _compile(
    function: Callable, shapes: dict[str, tuple], mesh: Mesh, specs: dict[str, P]
) -> jax.stages.Compiled:
    operands = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, specs.get(name, P())))
        for name, (shape, dtype) in shapes.items()
    }
    with jax.set_mesh(mesh):  # the kernel asks it for the chip
        return jax.jit(function).lower(operands).compile()


def _kernels(compiled: jax.stages.Compiled) -> int:
    return compiled.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize("topology", ONE_CHIP)
@pytest.mark.parametrize("name", PROGRAMS)
def test_auto_compiles_to_the_kernel(name, topology):
    function, shapes, kernels = PROGRAMS[name]
    compiled = _compile(function, shapes, _mesh(topology), {})
    assert _kernels(compiled) == kernels
    if name.startswith("accept"):  # of the logits, two rows per request at most are written down
        rows = 2 if name.endswith("standard") else 0
        assert compiled.memory_analysis().temp_size_in_bytes < rows * R * V * 4 + 2**20
    if "cache_len" in shapes:  # the cache is read where it lies
        assert compiled.memory_analysis().temp_size_in_bytes < 2**22


@pytest.mark.parametrize("topology", FOUR_CHIPS + SIXTEEN_CHIPS)
@pytest.mark.parametrize("name", ["markov_sample", "accept_standard", "accept_packed_standard"])
def test_a_sharded_vocabulary_gathers_a_few_numbers(name, topology):
    mesh = _mesh(topology)
    vocab = 2048 * mesh.size
    _, shapes, kernels = PROGRAMS[name]
    shapes = {
        key: (tuple(vocab if size == V else size for size in shape), dtype)
        for key, (shape, dtype) in shapes.items()
    }
    last = {2: P(None, "model"), 3: P(None, None, "model")}  # of logits, by rank
    specs = {key: last[len(shapes[key][0])] if "logits" in key else P() for key in shapes}
    specs |= {"w2": P("model")} if "w2" in shapes else {}

    def run(x: dict[str, jax.Array]) -> Any:
        if name == "markov_sample":
            return tuple(markov_sample(**x, axis_name="model"))[:3]
        accept = speculative_accept_packed if "packed" in name else speculative_accept
        return tuple(accept(**x, method="standard", axis_name="model"))

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    compiled = _compile(sharded, shapes, mesh, specs)
    assert _kernels(compiled) == kernels
    gathers = [
        line.split("all-gather")[0] for line in compiled.as_text().splitlines()
        if " all-gather(" in line or " all-gather-start(" in line
    ]  # fmt: skip
    assert gathers
    assert not any(str(vocab) in line or str(vocab // mesh.size) in line for line in gathers)


@pytest.mark.parametrize("topology", FOUR_CHIPS)
def test_heads_are_split_under_shard_map_and_left_to_the_reference_without(topology):
    function, shapes, kernels = PROGRAMS["block_attention"]
    mesh = _mesh(topology)
    heads = {
        "q": P(None, None, "model"), "new_k": P(None, None, "model"), "cache_len": P(),
        "new_v": P(None, None, "model"), "k_cache": P(None, None, "model"),
        "v_cache": P(None, None, "model"),
    }  # fmt: skip
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=(heads,), out_specs=heads["q"], check_vma=False
    )
    assert _kernels(_compile(sharded, shapes, mesh, heads)) == kernels
    assert _kernels(_compile(function, shapes, mesh, heads)) == 0


@pytest.mark.parametrize(("topology", "model"), [("v6e:1x1", 1), ("v5p:2x2x1", 2)])
def test_a_deepseek_draft_attends_through_the_kernel(topology, model):
    """The dense draft's is counted with whole rounds of the engine."""
    config = deepseek_config(
        "deepseek_v41", stages=2, hidden_size=32, num_attention_heads=8, o_groups=8,
        moe_intermediate_size=16, dspark_n_routed_experts=8, vocab_size=64,
    )  # fmt: skip
    draft = DeepseekDraft(config=config)
    mesh = make_mesh(parse_mesh(f"model={model}"), load_topology(topology).devices[:model])

    def placed(x: jax.ShapeDtypeStruct, *spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, *spec or (P(),))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.eval_shape(draft.init, jax.random.key(0))
    params = jax.tree.map(placed, params, param_specs(params))
    cache = jax.tree.map(placed, jax.eval_shape(lambda: draft.make_cache(R, 64, F32)))
    table, ints = placed(jnp.zeros((64, 32))), placed(jnp.zeros(R, I32))

    def run(params: Any, table: jax.Array, cache: Any, anchor: jax.Array) -> jax.Array:
        shared = SharedHead(embedding=table, head=table)
        return draft.backbone(params, shared, cache, anchor=anchor, anchor_pos=anchor)

    with jax.set_mesh(mesh):
        text = jax.jit(run).lower(params, table, cache, ints).compile().as_text()
    calls = [line for line in text.splitlines() if "window_attention" in line.split("=")[0]]
    assert sum("tpu_custom_call" in line for line in calls) == config.num_stages
