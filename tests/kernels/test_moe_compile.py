"""The real TPU compiler takes experts in both forms, plain and packed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from dspark_jax.aot.compiled import Compiled, compile_program
from dspark_jax.aot.report import loop_trips
from dspark_jax.aot.topology import has_compiler, load_topology
from dspark_jax.moe import clamped_experts, over_experts, routed_experts
from dspark_jax.packed import PackedKernel
from dspark_jax.sharding import make_mesh, param_specs, parse_mesh, shardings

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(not has_compiler(), reason="libtpu is not installed: pip install libtpu"),
]

EXPERTS, CHOSEN, WIDTH, HIDDEN = 32, 4, 512, 256


def _kernels(packed: bool) -> dict[str, Any]:
    if not packed:
        shapes = {"gate_up": (EXPERTS, WIDTH, 2, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
        return {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, shape in shapes.items()}

    def kernel(*shape: int) -> PackedKernel:
        *outer, width = shape
        codes = jax.ShapeDtypeStruct((*outer, width // 2), jnp.uint8)
        scales = jax.ShapeDtypeStruct((*outer, width // 32), jnp.uint8)
        return PackedKernel(codes=codes, scales=scales, form="fp4", block=(1, 32))

    return {"gate_up": kernel(EXPERTS, 2, HIDDEN, WIDTH), "down": kernel(EXPERTS, WIDTH, HIDDEN)}


def _compile(mesh: Mesh, chip: Any, tokens: int, *, packed: bool, all_to_all: bool) -> Compiled:
    compute = functools.partial(clamped_experts, limit=10.0) if packed else routed_experts
    kernels, whole = _kernels(packed), shardings(mesh, jax.P())
    where = shardings(mesh, param_specs(kernels))

    def placed(x: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    routing = [
        placed(jax.ShapeDtypeStruct((tokens, width), kind), whole)
        for width, kind in ((WIDTH, jnp.bfloat16), (CHOSEN, jnp.int32), (CHOSEN, jnp.float32))
    ]

    kernels = jax.tree.map(placed, kernels, where)

    def lower() -> jax.stages.Lowered:
        run = functools.partial(over_experts, compute, all_to_all=all_to_all)
        jitted = jax.jit(run, out_shardings=whole)
        return jitted.lower(*routing, kernels["gate_up"], kernels["down"])

    with jax.set_mesh(mesh):
        return compile_program(lower, name="experts", kind="prefill", rows=tokens, chip=chip)


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "fp4"])
def test_exchanged_tokens_are_fewer_rows(packed):
    """The rows of a device's matmuls, and that they do not all go through its memory."""
    topology = load_topology("v6e:2x2")
    mesh = make_mesh(parse_mesh("expert=4"), topology.devices)
    costs, kinds = {}, {}
    for all_to_all in (False, True):
        program = _compile(mesh, topology.chip, 2048, packed=packed, all_to_all=all_to_all)
        phases = program.phases(loop_trips(1, 1, None))
        costs[all_to_all] = program.whole(phases)
        kinds[all_to_all] = set(costs[all_to_all].collectives)
        assert program.fits
    assert "all-to-all" in kinds[True] and "all-to-all" not in kinds[False]
    if not packed:  # whose loop's runs depend on the routing
        assert costs[True].flops < 0.6 * costs[False].flops
        assert costs[True].hbm_bytes < costs[False].hbm_bytes
