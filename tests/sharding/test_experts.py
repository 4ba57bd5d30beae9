"""Experts over eight devices, in both forms: what one device computes, and who talks how."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.moe import (
    ALL_TO_ALL_TOKENS,
    clamped_experts,
    exchange_rows,
    over_experts,
    routed_experts,
)
from dspark_jax.packed import PackedKernel
from dspark_jax.sharding import make_mesh, param_specs, parse_mesh, shardings
from tests.sharding.models import collectives

EXPERTS, CHOSEN, WIDTH, HIDDEN = 16, 4, 64, 32
CLAMPED = functools.partial(clamped_experts, limit=0.05)  # low enough to clamp something


def _routing(rng: np.random.Generator, tokens: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts and weights: anyhow, all the same, or all on one device of eight."""
    weight = rng.uniform(0.1, 1.0, (tokens, CHOSEN)).astype(np.float32)
    if kind == "anyhow":
        order = rng.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)
        return order[:, :CHOSEN].astype(np.int32), weight
    last = EXPERTS - 1
    one = np.full((tokens, CHOSEN), last) - (kind == "one device") * (np.arange(CHOSEN) % 2)
    return one.astype(np.int32), weight


def _kernels(rng: np.random.Generator) -> dict[str, np.ndarray]:
    gate_up = 0.1 * rng.normal(size=(EXPERTS, WIDTH, 2, HIDDEN))
    down = 0.1 * rng.normal(size=(EXPERTS, HIDDEN, WIDTH))
    return {"gate_up": gate_up.astype(np.float32), "down": down.astype(np.float32)}


def _packed(rng: np.random.Generator, form: str) -> dict[str, PackedKernel]:
    shapes = {"gate_up": (EXPERTS, 2, HIDDEN, WIDTH), "down": (EXPERTS, WIDTH, HIDDEN)}
    made = {}
    for name, (*outer, width) in shapes.items():
        stored, block = (width // 2, (1, 16)) if form == "fp4" else (width, (16, 16))
        # Bytes of e4m3 below 0x40 are finite values below 2.
        codes = rng.integers(0, 256 if form == "fp4" else 0x40, (*outer, stored))
        grid = (*outer[:-1], outer[-1] // block[0], width // block[1])
        scales = rng.integers(120, 124, grid)
        made[name] = PackedKernel(
            codes=codes.astype(np.uint8), scales=scales.astype(np.uint8), form=form, block=block
        )
    return made


def _compile(compute: Callable, mesh: str, arrays: tuple, *, all_to_all: bool) -> tuple:
    """A function of tokens and routing on a mesh, and its program's text."""
    devices = make_mesh(parse_mesh(mesh))
    kernels = {"gate_up": arrays[3], "down": arrays[4]}
    where = shardings(devices, param_specs(kernels))
    kernels = jax.tree.map(jax.device_put, kernels, where)
    held = jax.tree.leaves(kernels)[0].addressable_shards[0].data.shape[0]
    assert held == EXPERTS // devices.shape["expert"]
    experts = kernels["gate_up"], kernels["down"]
    with jax.set_mesh(devices):
        jitted = jax.jit(functools.partial(over_experts, compute, all_to_all=all_to_all))
        compiled = jitted.lower(*arrays[:3], *experts).compile()
    return lambda *routed: np.asarray(compiled(*routed, *experts)), compiled.as_text()


@pytest.mark.parametrize("mesh", ["expert=8", "expert=4,model=2", "data=2,expert=2,model=2"])
@pytest.mark.parametrize("compute", [routed_experts, CLAMPED], ids=["routed", "clamped"])
def test_both_forms_compute_what_one_device_does(compute, mesh, rng):
    tokens = 45  # divides over no mesh here
    x = rng.normal(size=(tokens, WIDTH)).astype(np.float32)
    routings = [_routing(rng, tokens, kind) for kind in ("anyhow", "one expert", "one device")]
    kernels = tuple(_kernels(rng).values())
    expected = [np.asarray(jax.jit(compute)(x, *routing, *kernels)) for routing in routings]
    for all_to_all in (True, False):
        arrays = (x, *routings[0], *kernels)
        run, text = _compile(compute, mesh, arrays, all_to_all=all_to_all)
        for routing, want in zip(routings, expected, strict=True):
            scale = np.abs(want).max()
            np.testing.assert_allclose(run(x, *routing), want, rtol=1e-5, atol=1e-5 * scale)
        kinds = {talk.kind for talk in collectives(text)}
        assert ("all-to-all" in kinds) == all_to_all
        assert all_to_all or kinds == {"all-reduce"}


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_packed_experts_get_tokens_too(form, rng):
    x = rng.normal(size=(30, WIDTH)).astype(np.float32)
    arrays = (x, *_routing(rng, 30, "anyhow"), *_packed(rng, form).values())
    expected = np.asarray(jax.jit(CLAMPED)(*arrays))
    run, text = _compile(CLAMPED, "expert=4,model=2", arrays, all_to_all=True)
    got = run(*arrays[:3])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert any(talk.kind == "all-to-all" for talk in collectives(text))


def test_the_number_of_tokens_picks_the_form(rng):
    kernels = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _kernels(rng).values()]

    def text(tokens: int, mesh: str) -> str:
        x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)
        routing = [jax.ShapeDtypeStruct((tokens, CHOSEN), kind) for kind in (jnp.int32, x.dtype)]
        with jax.set_mesh(make_mesh(parse_mesh(mesh))):
            jitted = jax.jit(functools.partial(over_experts, routed_experts))
            return jitted.lower(x, *routing, *kernels).as_text()

    assert "all_to_all" in text(ALL_TO_ALL_TOKENS, "expert=8")
    assert "all_to_all" not in text(ALL_TO_ALL_TOKENS - 1, "expert=8")
    assert "all_to_all" not in text(ALL_TO_ALL_TOKENS, "model=8")


def test_a_message_has_room_for_uneven_routing_and_never_more_than_there_is():
    assert exchange_rows(4096, 8) == 1024
    assert exchange_rows(4095, 8) == 1024
    assert exchange_rows(48, 2) == 48
    assert exchange_rows(3, 8) == 1
