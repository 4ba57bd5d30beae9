"""The programs of a draft whose target is elsewhere: drafting a block, and writing context."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.aot.compiled import Compiled, compile_program
from dspark_jax.aot.models import Models
from dspark_jax.aot.topology import Topology
from dspark_jax.draft.propose import propose
from dspark_jax.engine.programs import row_widths
from dspark_jax.kv_cache import KVCache, WindowCache, write_rows
from dspark_jax.layouts import with_layouts
from dspark_jax.packed import PackedKernel
from dspark_jax.sharding import param_specs, shardings, state_specs
from dspark_jax.types import Block, Params, SamplingParams, SharedHead

CONTEXT_CHUNK = 512  # rows of context written at a time while a prompt is prefilled


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftPrograms:
    """Compiled programs of a draft, and the shapes they were compiled for."""

    programs: list[Compiled]
    params: tuple[Params, SharedHead]
    state: KVCache | WindowCache


def pack_experts(params: Params) -> Params:
    """Shapes of a DeepSeek draft whose routed experts stay FP4, 32 values to a scale.

    Args:
      params: shapes of `DeepseekDraft.init`.

    Returns:
      The tree with `PackedKernel` in place of the experts' kernels.
    """

    def packed(shape: tuple[int, ...]) -> PackedKernel:
        *outer, width = shape
        codes = jax.ShapeDtypeStruct((*outer, width // 2), jnp.uint8)
        scales = jax.ShapeDtypeStruct((*outer, -(-width // 32)), jnp.uint8)
        return PackedKernel(codes=codes, scales=scales, form="fp4", block=(1, 32))

    layers = []
    for layer in params["layers"]:
        experts, width, _, hidden = layer["moe"]["gate_up"].shape
        kernels = {
            "gate_up": packed((experts, 2, hidden, width)),
            "down": packed((experts, width, hidden)),
        }
        layers.append(layer | {"moe": layer["moe"] | kernels})
    return params | {"layers": tuple(layers)}


def compile_draft(
    models: Models,
    topology: Topology,
    mesh: Mesh,
    *,
    slots: int,
    capacity: int,
    wanted: Callable[[str, int], bool],
    progress: Callable[[str], None],
) -> DraftPrograms:
    """Compiles drafting at every batch width, and writing context after a round and in prefill.

    Args:
      models: with a draft, its embedding and head in `shared`.
      topology: what to compile for.
      mesh: on its devices; `data` must be 1.
      slots: S.
      capacity: C, tokens per slot.
      wanted: names kind and rows -> whether to compile.
      progress: told each program's name.

    Returns:
      The programs, of kinds "draft" and "context".

    Raises:
      ValueError: the mesh has more than one group of slots.
    """
    if mesh.shape["data"] > 1:
        raise ValueError(
            f"a draft alone is compiled for one group of slots; got data={mesh.shape['data']}, "
            "expected data=1."
        )
    draft = models.draft
    params = with_layouts(_placed(mesh, models.params.draft, param_specs(models.params.draft)))
    shared = _placed(mesh, models.params.shared, param_specs(models.params.shared))
    cache = jax.eval_shape(lambda: draft.make_cache(slots, capacity, models.dtype))
    cache = _placed(mesh, cache, state_specs(cache))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def run(kind: str, rows: int, name: str, function: Callable, *args: Any, **options: Any):
        progress(f"compiling {name}")

        def lower() -> jax.stages.Lowered:
            return jax.jit(function, **options).lower(*args)

        with jax.set_mesh(mesh):
            compiled.append(
                compile_program(lower, name=name, kind=kind, rows=rows, chip=topology.chip)
            )

    compiled: list[Compiled] = []
    width = len(draft.config.target_layer_ids) * draft.config.hidden_size
    for rows in row_widths(slots):
        ints, floats = array((rows,), jnp.int32), array((rows,), jnp.float32)
        sampling = SamplingParams(
            temperature=floats, top_k=ints, top_p=floats, min_p=floats,
            seed=array((rows,), jnp.uint32),
        )  # fmt: skip
        if wanted("draft", rows):
            run(
                "draft", rows, f"draft of {rows} requests", _draft(draft),
                params, shared, cache, ints, ints, ints, sampling,
            )  # fmt: skip
        if wanted("context", rows):
            features = array((rows, draft.config.num_drafts + 1, width), models.dtype)
            run(
                "context", rows, f"context of {rows} requests after a round", _context(draft),
                params, cache, features, ints, ints, donate_argnums=1,
            )  # fmt: skip
    if wanted("prefill", CONTEXT_CHUNK):
        features = array((1, CONTEXT_CHUNK, width), models.dtype)
        one = array((1,), jnp.int32)
        run(
            "prefill", CONTEXT_CHUNK, f"context of {CONTEXT_CHUNK} prompt rows", _context(draft),
            params, cache, features, one, one, donate_argnums=1,
        )  # fmt: skip
    return DraftPrograms(programs=compiled, params=(params, shared), state=cache)


def _draft(draft: Any) -> Callable:
    def run(
        params: Params, shared: SharedHead, cache: KVCache | WindowCache, anchor: jax.Array,
        anchor_pos: jax.Array, round_index: jax.Array, sampling: SamplingParams,
    ) -> Block:  # fmt: skip
        return propose(
            draft, params, shared, cache, anchor=anchor, anchor_pos=anchor_pos,
            round_index=round_index, sampling=sampling, coupled=False,
        )  # fmt: skip

    return run


def _context(draft: Any) -> Callable:
    def run(
        params: Params, cache: KVCache | WindowCache, features: jax.Array, start: jax.Array,
        count: jax.Array,
    ) -> KVCache | WindowCache:  # fmt: skip
        with jax.named_scope("commit"):
            positions = start[:, None] + jnp.arange(features.shape[1])
            k, v = draft.context_kv(params, features, positions)
            return write_rows(cache, k, v, first_slot=0, start=start, count=count)

    return run


def _placed(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Shapes of a tree on the mesh; packed experts lie as their unpacked twins would."""
    packed = {
        "gate_up": PartitionSpec("expert", None, "model", None),
        "down": PartitionSpec("expert", None, "model"),
    }

    def place(path: tuple, leaf: jax.ShapeDtypeStruct, where: NamedSharding) -> Any:
        if len(path) > 1 and getattr(path[-1], "name", "") in ("codes", "scales"):
            where = NamedSharding(mesh, packed[path[-2].key])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(place, tree, shardings(mesh, specs))
