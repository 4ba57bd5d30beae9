"""Costs read from compiled text: against programs whose cost is known, and a text made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.aot.compiled import Compiled, Memory, compile_program, shortage
from dspark_jax.aot.cost import ProgramCost, seconds, total
from dspark_jax.aot.fit import Fit
from dspark_jax.aot.hlo import parse_arrays, parse_module
from dspark_jax.aot.report import (
    cost_points,
    filled_share,
    loop_trips,
    modelled_sps,
    write_json,
)
from dspark_jax.calibrate import Traces
from dspark_jax.chips import CHIPS, COLLECTIVE_LATENCY_S, Chip
from dspark_jax.sps import SpsKey, load_sps_table
from tools.simulate import simulate_table

CHIP = Chip(name="test", bytes_per_s=1e3, flops_per_s=1e6, link_bytes_per_s=1e2, hbm_bytes=1e6)

# A round by hand: weights prefetched for the draft, a loop over layers whose number is known with
# one over the context inside, a switch over buckets, a choice of sampling, and a collective.
TEXT = """HloModule made_by_hand

%layer_cond (p.0: (s32[], f32[5,8,8])) -> pred[] {
  %n = s32[] constant(5)
  %p.0 = (s32[], f32[5,8,8]) parameter(0)
  %i.0 = s32[] get-tuple-element(%p.0), index=0
  ROOT %lt = pred[] compare(%i.0, %n), direction=LT
}

%slice_and_dot (w: f32[5,8,8], i: s32[], x: f32[4,8]) -> f32[4,8] {
  %w = f32[5,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[4,8]{1,0:S(1)} parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,8,8]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,8,8}
  %flat = f32[8,8]{1,0} bitcast(%one)
  ROOT %dot = f32[4,8]{1,0:S(1)} dot(%x, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%context_cond (c.0: (s32[], s32[])) -> pred[] {
  %c.0 = (s32[], s32[]) parameter(0)
  %c.i = s32[] get-tuple-element(%c.0), index=0
  %c.n = s32[] get-tuple-element(%c.0), index=1
  ROOT %c.lt = pred[] compare(%c.i, %c.n), direction=LT
}

%context_body (c.1: (s32[], s32[])) -> (s32[], s32[]) {
  %c.1 = (s32[], s32[]) parameter(0)
  %big = f32[100]{0} constant({...})
  %moved = f32[100]{0:S(1)} copy(%big), backend_config={"estimated_cycles":"7"}
  %c.i1 = s32[] get-tuple-element(%c.1), index=0
  %c.n1 = s32[] get-tuple-element(%c.1), index=1
  ROOT %c.t = (s32[], s32[]) tuple(%c.i1, %c.n1)
}

%layer_body (p.1: (s32[], f32[5,8,8])) -> (s32[], f32[5,8,8]) {
  %p.1 = (s32[], f32[5,8,8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %w.1 = f32[5,8,8]{2,1,0} get-tuple-element(%p.1), index=1
  %x.1 = f32[4,8]{1,0:S(1)} constant({...})
  %f = f32[4,8]{1,0:S(1)} fusion(%w.1, %i.1, %x.1), kind=kOutput, calls=%slice_and_dot
  %blocks = s32[] add(%i.1, %i.1)
  %begin = (s32[], s32[]) tuple(%i.1, %blocks)
  %loop = (s32[], s32[]) while(%begin), condition=%context_cond, body=%context_body, metadata={op_name="jit(f)/target.verify/while/body/DecoderLayer/while"}
  ROOT %t.1 = (s32[], f32[5,8,8]) tuple(%i.1, %w.1)
}

%small (s.0: f32[]) -> f32[10] {
  %s.0 = f32[] parameter(0)
  ROOT %s.1 = f32[10]{0} broadcast(%s.0), dimensions={}
}

%large (l.0: f32[]) -> f32[10] {
  %l.0 = f32[] parameter(0)
  %l.1 = f32[1000]{0} broadcast(%l.0), dimensions={}
  ROOT %l.2 = f32[10]{0} custom-call(%l.1), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"64","bytes_accessed":"4000"}}
}

ENTRY %main (a: f32[5,8,8], b: f32[50], c: f32[]) -> f32[10] {
  %a = f32[5,8,8]{2,1,0} parameter(0)
  %b = f32[50]{0} parameter(1)
  %c = f32[] parameter(2)
  %fetch = (f32[50]{0:S(1)}, f32[50]{0}, u32[]{:S(2)}) copy-start(%b)
  %fetched = f32[50]{0:S(1)} copy-done(%fetch)
  %use = f32[50]{0:S(1)} negate(%fetched), metadata={op_name="jit(f)/draft.backbone/neg"}
  %start = s32[] constant(0)
  %init = (s32[], f32[5,8,8]) tuple(%start, %a)
  %layers = (s32[], f32[5,8,8]) while(%init), condition=%layer_cond, body=%layer_body, metadata={op_name="jit(f)/target.verify/while"}
  %index = s32[] constant(1)
  %switch = f32[10]{0} conditional(%index, %c, %c, %c), branch_computations={%small, %large, %small}, metadata={op_name="jit(f)/target.verify/cond"}
  %which = pred[] constant(true)
  %either = f32[10]{0} conditional(%which, %c, %c), branch_computations={%small, %large}, metadata={op_name="jit(f)/accept/cond"}
  ROOT %sum = f32[10]{0} all-reduce(%either), replica_groups=[2,4]<=[8], to_apply=%small, metadata={op_name="jit(f)/commit/psum"}
}
"""  # noqa: E501


def _phases(*, trips: int = 3, bucket: int = 0, dearest: bool = False) -> dict:
    return ProgramCost(
        parse_module(TEXT), CHIP, dynamic_trips=lambda name: trips, buckets=3, bucket=bucket,
        dearest=dearest,
    ).phases  # fmt: skip


def test_shapes_tell_size_and_memory():
    hbm, chip = parse_arrays("(bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/s32[]{:T(128)S(6)})")
    assert (hbm.bytes, hbm.in_hbm, chip.bytes, chip.in_hbm) == (12, True, 4, False)


def test_loops_multiply_and_slices_count_by_the_slice():
    slices = 8 * 8 * 4  # of f32[5,8,8], x and the result are on chip
    for trips in (0, 3):
        verify = _phases(trips=trips)["target.verify"]
        assert verify.flops == 5 * 2 * 4 * 8 * 8
        context = 5 * trips * 400
        scalars = 5 * (4 + 3 * 4)  # the slice's index, and an addition, in main memory
        assert verify.hbm_bytes == 5 * slices + context + scalars + (4 + 40)
        assert verify.cycles == 5 * trips * 7


def test_a_prefetch_belongs_to_what_reads_it():
    assert _phases()["draft.backbone"].hbm_bytes == 200


def test_switch_runs_the_bucket_and_others_the_cheaper_or_dearer_branch():
    base = _phases()["target.verify"].hbm_bytes
    assert _phases(bucket=2)["target.verify"].hbm_bytes == base
    bigger = _phases(bucket=1)["target.verify"]
    assert bigger.hbm_bytes == base - 44 + 4004 + 4000 and bigger.kernels == 1
    assert bigger.flops == _phases()["target.verify"].flops + 64
    assert _phases()["accept"].kernels == 0
    assert _phases(dearest=True)["accept"].kernels == 1
    assert parse_module(TEXT).mosaic_kernels == 1


def test_collectives_and_the_formula():
    commit = _phases()["commit"]
    assert commit.collectives == {"all-reduce": [1.0, 40.0]}
    assert commit.link_bytes == pytest.approx(2 * 3 / 4 * 40)
    assert commit.seconds(CHIP) == pytest.approx(60 / 1e2 + COLLECTIVE_LATENCY_S)
    phases = _phases()
    expected = sum(
        max(c.flops / 1e6, c.hbm_bytes / 1e3) + (c.link_bytes / 1e2 + 2e-6 if c.collectives else 0)
        for c in phases.values()
    )
    assert seconds(phases, CHIP) == pytest.approx(expected)


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse_module("HloModule nothing\n")


@pytest.mark.parametrize("layers", [1, 7])
def test_matmuls_of_a_scan_on_this_machine_are_counted(layers):
    def run(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = (
        jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32),
        jax.ShapeDtypeStruct((16, 64), jnp.float32),
    )
    text = jax.jit(run).lower(*shapes).compile().as_text()
    cost = total(ProgramCost(parse_module(text), CHIP, dynamic_trips=lambda name: 1).phases)
    assert cost.flops == layers * 2 * 16 * 64 * 64


CONVOLUTION = """HloModule one

ENTRY %main (l: f32[8,8,28,128], r: f32[8,8,7,128]) -> f32[8,8,28,7] {{
  %l = f32[{left}]{{3,2,1,0}} parameter(0)
  %r = f32[{right}]{{3,2,1,0}} parameter(1)
  ROOT %c = f32[{out}]{{3,2,1,0}} convolution(%l, %r), {rest}
}}
"""


@pytest.mark.parametrize(
    ("left", "right", "out", "rest", "flops"),
    [
        (  # a product batched over 8 x 8, as the TPU compiler writes it
            "8,8,28,128", "8,8,7,128", "8,8,28,7",
            "window={size=8x8 stride=7x7 lhs_dilate=8x8}, dim_labels=01bf_01oi->01bf",
            2 * 64 * 28 * 7 * 128,
        ),
        (  # one kernel row per output row, reversed
            "8,7,1,128", "1,32,64,128", "8,7,32,64",
            "window={size=1x32 pad=0_0x31_31 rhs_reversal=0x1}, dim_labels=b0 f1_ 1oi0->b01f",
            2 * 8 * 7 * 32 * 64 * 128,
        ),
    ],
)  # fmt: skip
def test_operations_of_convolutions(left, right, out, rest, flops):
    rest = rest.replace("dim_labels=b0 f1_ 1oi0->b01f", "dim_labels=b01f_01oi->b01f")
    text = CONVOLUTION.format(left=left, right=right, out=out, rest=rest)
    cost = total(ProgramCost(parse_module(text), CHIP, dynamic_trips=lambda name: 1).phases)
    assert cost.flops == flops


def _round(rows: int) -> Compiled:
    memory = Memory(arguments=1, temporaries=2, new_outputs=3, code=4)
    return Compiled(
        name=f"round of {rows}", kind="round", rows=rows, buckets=(rows, 2 * rows, 3 * rows),
        chip=CHIP, seconds=0.0, memory=memory, module=parse_module(TEXT),
    )  # fmt: skip


def test_rounds_become_a_speed_table_that_scheduling_reads(tmp_path):
    programs = [_round(1), _round(2)]
    points = cost_points(programs, [256, 1024], None, capacity=2048, dearest=False)
    assert len(points) == 2 * 2 * 3
    table = modelled_sps(points, SpsKey(device="1x made", model="m", dtype="bfloat16"))
    fit = Fit(chip=CHIP, params=1, fixed=2.0, per_slot=3.0, per_token=4.0, groups=1)
    path = tmp_path / "sps.json"
    write_json(path, table, programs, points, fit, {"slots": 2})
    read = load_sps_table(path)
    assert read == table and read.source == "modelled"
    assert read.requests == (1, 2) and read.context_lens == (256, 1024)
    assert read.seconds(2, np.array([4]), 1024) > read.seconds(2, np.array([4]), 256)
    assert read.seconds(2, np.array([4]), 256) > read.seconds(2, np.array([2]), 256)
    traces = Traces(
        confidence_logits=np.tile(np.float32([2.0, -2.0]), (12, 1)),
        accept_len=(np.arange(12) % 3).astype(np.int32), verify_len=np.full(12, 2, np.int32),
        prompt=np.repeat([0, 1], 6).astype(np.int32), source={},
    )  # fmt: skip
    simulated = simulate_table(traces, None, read, [1, 2, 3], rounds=20, lag=2, seed=0)
    assert sorted(simulated) == [1, 2], "the table has no rounds of 3 requests"
    assert simulated[2]["full"].tokens_per_s > 0


def test_loops_run_by_context_and_experts():
    trips = loop_trips(1000, 2, None)
    assert trips("jit(f)/target.verify/while/body/DecoderLayer/while") == 4
    assert trips("jit(f)/draft.backbone/DraftLayer/while") == 4
    assert trips("jit(f)/accept/while") == 1


def test_kernels_read_what_is_filled_of_a_cache():
    share = filled_share(1024, 8, None, 4096)
    cache, rows = parse_arrays("(bf16[160,8,4096,128]{3,2,1,0}, bf16[8,7,32,128]{3,2,1,0})")
    assert share(cache) == pytest.approx(8 / 160 * 1024 / 4096) and share(rows) == 1.0
    (pages,) = parse_arrays("bf16[2560,128,16,128]{3,2,1,0}")  # 5 layers of 16 slots
    assert filled_share(1000, 8, None, 4000)(pages) == pytest.approx(8 * 8 / 2560)
    text = TEXT.replace('"bytes_accessed":"4000"', "").replace('64",', '64"')
    halved = ProgramCost(
        parse_module(text), CHIP, dynamic_trips=lambda name: 1, dearest=True,
        kernel_share=lambda array: 0.5 if array.dims == (1000,) else 1.0,
    ).phases["accept"]  # fmt: skip
    assert halved.hbm_bytes == 4004 + 2000 + 40


def test_room_is_linear():
    fit = Fit(chip=CHIP, params=400_000, fixed=100_000, per_slot=1000, per_token=90, groups=2)
    assert fit.largest_slots(100) == 2 * 50
    assert fit.largest_capacity(100) == 100
    assert "--slots 100" in fit.advice(200, 100) and "--context" in fit.advice(200, 100)
    window = Fit(chip=CHIP, params=0, fixed=0.0, per_slot=1000.0, per_token=0.0, groups=1)
    assert window.largest_capacity(10) is None and window.largest_slots(5) == 1000
    full = Fit(chip=CHIP, params=2_500_000, fixed=0, per_slot=1, per_token=1, groups=1)
    assert full.largest_slots(1) == 0
    assert "model=3" in full.advice(1, 1)


def test_a_program_that_does_not_fit_is_kept_with_the_reason():
    def lower() -> None:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.00G of 31.25G hbm."
        )

    program = compile_program(lower, name="n", kind="round", rows=1, chip=CHIPS["v6e"])
    assert not program.fits and program.refusal == "needs 40.00G of 31.25G"
    with pytest.raises(ValueError, match="no compiled text"):
        program.phases(lambda name: 1)

    def broken() -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_program(broken, name="n", kind="round", rows=1, chip=CHIPS["v6e"])


def test_the_other_wording_of_a_shortage():
    said = shortage("... HLO temporaries (1.00T) exceeds available HBM (15.75G).")
    assert said == "needs more than 1.00T of 15.75G"
