"""Whole programs of the engine through the real TPU compiler, on one chip and on many."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.aot.compiled import Compiled
from dspark_jax.aot.fit import estimate_fit
from dspark_jax.aot.hlo import is_mosaic
from dspark_jax.aot.models import Models
from dspark_jax.aot.pair import PairPrograms, selection
from dspark_jax.aot.report import cost_points
from dspark_jax.aot.topology import has_compiler, load_topology
from dspark_jax.config import RopeConfig, TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.engine import programs
from dspark_jax.engine.load import random_draft_config
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.sharding import make_mesh, parse_mesh
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import PairParams

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(not has_compiler(), reason="libtpu is not installed: pip install libtpu"),
]

LAYERS, DRAFT_LAYERS, DRAFTS, CAPACITY = 3, 2, 3, 512

# Topology -> mesh on it: 1, 4 and 16 or more chips of each kind (a TPU7x chip is two devices).
CASES = {
    "v5e:1x1": "data=1", "v6e:1x1": "data=1", "v5p:1x1x1": "data=1", "tpu7x:1x1x1": "model=2",
    "v5e:2x2": "model=4", "v6e:2x2": "data=2,model=2", "v5p:2x2x1": "model=4",
    "tpu7x:2x2x1": "data=2,model=4",
    "v5e:4x4": "data=4,model=4", "v6e:4x4": "data=16", "v5p:2x2x4": "data=4,model=4",
    "tpu7x:2x2x4": "data=8,model=4",
}  # fmt: skip

# Other rounds: what verifies, how it is scheduled; one holds a single bucket outside any branch.
BYPASSING = dict(policy="presampled", min_predicted_gain=0.05, max_verify_len=1)
OTHERS = {
    "v6e:1x1": ("data=1", "coupled", BYPASSING),
    "tpu7x:1x1x1": ("model=2", "standard", BYPASSING),
    "v5p:1x1x1": ("data=1", "standard", dict(policy="lagged", planner="host", max_verify_len=1)),
    "v5e:2x2": ("model=4", "coupled", {}),
    "v5e:1x1": ("data=1", "block", {}),
}

# Kernels in the text of a program; one that is missing would be a silent fall back to the
# reference. The target's layers are one loop, in every branch of the switch over verified rows.
# There a batch that samples is accepted by as many kernels, and one that does not by one more.
ACCEPTED = {"standard": 3 + 1, "coupled": 1 + 1, "block": 0}


def round_kernels(buckets: int, method: str) -> int:
    """Pallas kernels in a round's text: draft attention, Markov step, verification, acceptance."""
    return DRAFT_LAYERS + 1 + buckets * (1 + ACCEPTED[method])


def small_models(*, layers: int = LAYERS, head_dim: int = 128, paged: bool = False) -> Models:
    """A pair with heads as wide as the lanes of a TPU."""
    config = TargetConfig(
        model_type="qwen3", vocab_size=1024, hidden_size=256, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=head_dim, intermediate_size=512,
        rms_norm_eps=1e-6, rope=RopeConfig(), tie_word_embeddings=False, qk_norm=True,
    )  # fmt: skip
    draft_config = dataclasses.replace(
        random_draft_config(config), num_hidden_layers=DRAFT_LAYERS, block_size=DRAFTS
    )
    taps = draft_config.target_layer_ids
    target = LlamaTarget(config=config, tap_layer_ids=taps, paged=paged)
    draft = DenseDraft(config=draft_config)

    def shapes(model: LlamaTarget | DenseDraft) -> dict:
        return jax.eval_shape(lambda key: model.init(key, jnp.bfloat16), jax.random.key(0))

    params = PairParams(target=shapes(target), draft=shapes(draft))
    return Models(name="small", target=target, draft=draft, params=params, dtype=jnp.bfloat16)


def compile_round(
    topology_name: str, mesh_text: str, *, method: str = "standard", rows: int = 2, **schedule: Any
) -> PairPrograms:
    """The rounds of a small pair: one, or one per bucket where the host plans."""
    topology, shape, models = load_topology(topology_name), parse_mesh(mesh_text), small_models()
    decoder = models.decoder(ScheduleConfig(**schedule))
    return PairPrograms(
        dataclasses.replace(decoder, rejection_sample_method=method), models, topology,
        make_mesh(shape, topology.devices), slots=rows * shape.data, capacity=CAPACITY,
        wanted=selection(("round", "plain"), (rows,)), progress=print,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_round_compiles_with_the_kernels_it_calls(name):
    programs = compile_round(name, CASES[name])
    (program,) = programs.compiled
    assert program.fits and program.memory.total < program.chip.hbm_bytes
    assert program.module is not None
    shape = parse_mesh(CASES[name])
    assert program.mosaic_kernels == round_kernels(len(program.buckets), "standard")
    _check_costs(program, programs, parts=shape.model, devices=shape.devices)


@pytest.mark.parametrize("name", OTHERS)
def test_other_rounds_compile_with_the_kernels_they_call(name):
    mesh, method, schedule = OTHERS[name]
    programs = compile_round(name, mesh, method=method, **schedule)
    rounds = [program for program in programs.compiled if program.kind == "round"]
    assert len(rounds) == (3 if schedule.get("planner") == "host" else 1)
    for program in rounds:
        assert program.mosaic_kernels == round_kernels(len(program.buckets), method)
    plain = [program for program in programs.compiled if program not in rounds]
    assert len(plain) == ("min_predicted_gain" in schedule)  # a round that drafts nothing
    assert all(program.mosaic_kernels == 1 for program in plain)  # attention, in the layers' loop


def _check_costs(program: Compiled, programs: PairPrograms, *, parts: int, devices: int) -> None:
    """The layers' products are all there, and the weights move once, on each of the devices."""
    config = programs.decoder.draft.config
    points = cost_points([program], [256], config, capacity=CAPACITY, dearest=False)
    assert [p.bucket for p in points] == list(program.buckets)
    target = programs.decoder.target.config
    width, heads = target.hidden_size, target.head_dim
    per_row = 2 * width * heads * (8 + 2 * 4 + 8) + 6 * width * target.intermediate_size
    head = 2 * width * target.vocab_size
    for point in points:
        verify = point.phases["target.verify"]
        least = point.bucket * (LAYERS * per_row + head) / parts
        context = LAYERS * 2 * 2 * 2 * (DRAFTS + 1) * 8 * heads * 260 / parts
        assert least <= verify.flops <= 1.3 * (least + context)
        weights = 2 * (LAYERS * per_row / 2 + head / 2) / parts
        assert 0.3 * weights < verify.hbm_bytes < 4 * weights
        collectives = program.whole(point.phases).collectives
        assert bool(collectives) == (devices > 1)
        vocabulary = 2 * target.vocab_size * 4
        assert all(size / runs < vocabulary for runs, size in collectives.values())


PAGED_CASES = {
    "v5e:1x1": "data=1", "v6e:1x1": "data=1", "v5p:1x1x1": "data=1", "tpu7x:1x1x1": "model=2",
    "v6e:2x2": "data=2,model=2",
}  # fmt: skip


def compile_paged(name: str, mesh: str, models: Models, kinds: tuple[str, ...]) -> PairPrograms:
    """Programs over a paged cache that is far larger than anything else they hold."""
    topology, shape = load_topology(name), parse_mesh(mesh)
    return PairPrograms(
        models.decoder(ScheduleConfig(policy="lagged", planner="host")), models, topology,
        make_mesh(shape, topology.devices), slots=2 * shape.data, capacity=1 << 15,
        wanted=selection(kinds, (2,)), progress=print,
    )  # fmt: skip


@pytest.mark.parametrize("name", PAGED_CASES)
def test_a_round_over_pages_compiles_with_jax_s_kernel(name, monkeypatch):
    """One number of verified rows, as the host chooses it; on v6e:1x1 also a chunk of a prompt."""
    monkeypatch.setattr(programs, "row_buckets", lambda rows, k, adaptive: (rows * (k + 1),))
    monkeypatch.setattr(programs, "PREFILL_CHUNKS", (128,))
    kinds = ("round", "prefill") if name == "v6e:1x1" else ("round",)
    compiled = compile_paged(name, PAGED_CASES[name], small_models(layers=2, paged=True), kinds)
    pages = compiled.state_shapes.target_kv.pages
    cache = math.prod(pages.sharding.shard_shape(pages.shape)) * pages.dtype.itemsize
    assert [program.kind for program in compiled.compiled] == list(reversed(kinds))
    for program in compiled.compiled:
        assert program.memory.temporaries < cache / 8, "the cache is stored to where it lies"
        assert program.memory.new_outputs < cache / 8
        instructions = [
            i for c in program.module.computations.values() for i in c.instructions.values()
        ]
        names = [i.op_name for i in instructions if is_mosaic(i)]
        paged = [n for n in names if "ragged_paged_attention" in n]
        assert len(paged) == 1 and "DecoderLayer" in paged[0]
        assert len(names) == (round_kernels(1, "standard") if program.kind == "round" else 1)


def test_pages_that_no_kernel_reads_are_refused():
    models = small_models(layers=2, head_dim=64, paged=True)
    with pytest.raises(ValueError, match="heads of width 64"):
        compile_paged("v5e:1x1", "data=1", models, ("round",))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("v6e:4x4", "data=8,model=2"),
        ("v6e:4x4", "data=2,model=8"),
        ("v6e:4x4", "data=2,expert=2,model=4"),
        ("tpu7x:2x2x2", "data=2,model=8"),
    ],
)
def test_axes_may_take_a_part_of_an_axis_of_the_chips(name, mesh):
    """Those that split a model between them fill a box of the grid of chips."""
    shape, topology = parse_mesh(mesh), load_topology(name)
    laid = make_mesh(shape, topology.devices)
    assert dict(laid.shape) == dataclasses.asdict(shape)
    assert set(laid.devices.flat) == set(topology.devices)
    for group in laid.devices.reshape(-1, shape.model):
        chips = {tuple(device.coords) for device in group}
        assert math.prod(np.ptp(list(chips), axis=0) + 1) == len(chips)


def test_devices_that_fill_no_box_of_chips_make_a_mesh():
    topology = load_topology("tpu7x:2x2x1")
    assert make_mesh(parse_mesh("model=3"), topology.devices).shape["model"] == 3


def test_tables_name_devices_and_mesh_as_an_engine_does():
    topology = load_topology("v6e-4")
    assert topology.device_key(parse_mesh("data=1")) == "4x TPU v6 lite"
    expected = "4x TPU v6 lite as data=2,expert=1,model=2"
    assert topology.device_key(parse_mesh("data=2,model=2")) == expected


def test_what_does_not_fit_is_refused_with_what_would():
    topology, models = load_topology("v5e:1x1"), small_models()
    mesh = make_mesh(parse_mesh("data=1"), topology.devices)
    room = dict(slots=1, capacity=2_000_000)
    programs = PairPrograms(
        models.decoder(ScheduleConfig()), models, topology, mesh, **room,
        wanted=selection(("round",), None), progress=print,
    )  # fmt: skip
    (program,) = programs.compiled
    assert not program.fits and "15.75G" in program.refusal
    fit = estimate_fit(
        topology.chip, programs.param_shapes, programs.state_shapes, programs.compiled, **room,
        groups=1,
    )  # fmt: skip
    longest = fit.largest_capacity(1)
    assert 1_000_000 < longest < 2_000_000
    assert f"--context {longest}" in fit.advice(**room)
