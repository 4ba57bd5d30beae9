"""Compiles every program of an engine for a TPU topology and says what it needs there.

    python tools/aot.py --topology v6e:2x2 --mesh model=4 --model Qwen3-8B \
        --draft dspark_qwen3_8b_block7 --slots 32 --context 4096 --json sps.json

No TPU and no weights are needed; the TPU compiler comes with pip install -e '.[tpu]'. Times are
modelled by a roofline, not measured. The JSON is a speed table for --sps-table and for
tools/simulate.py. With --model none the draft is compiled alone.
"""

import argparse
import dataclasses
import importlib.metadata

import jax

from dspark_jax import __version__
from dspark_jax.aot.compiled import Compiled
from dspark_jax.aot.draft_only import compile_draft, pack_experts
from dspark_jax.aot.fit import Fit, estimate_fit
from dspark_jax.aot.models import Models, describe_models, presets
from dspark_jax.aot.pair import PairPrograms, selection
from dspark_jax.aot.report import (
    cost_lines,
    cost_points,
    memory_lines,
    modelled_sps,
    phase_lines,
    write_json,
)
from dspark_jax.aot.topology import Topology, load_topology, prepare_environment
from dspark_jax.aot.training import compile_train_step
from dspark_jax.cli import run_main, say
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.engine.load import DTYPES
from dspark_jax.engine.profile import draft_key
from dspark_jax.kv_cache import KV_CACHES
from dspark_jax.schedule import PLANNERS, POLICIES, ScheduleConfig
from dspark_jax.sharding import make_mesh, parse_mesh
from dspark_jax.sps import SpsKey

KINDS = ("prefill", "plain", "round", "train")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python tools/aot.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--topology", required=True, help="v6e:4x4, v5p:2x2x2, or v6e-16, v5p-16")
    parser.add_argument(
        "--model", required=True, metavar="NAME|DIR",
        help=f"a directory with a config.json, 'none', or one of {', '.join(presets())}",
    )  # fmt: skip
    parser.add_argument("--draft", default="none", metavar="NAME|DIR", help="also 'random'")
    parser.add_argument("--slots", "--batch", type=int, default=8, metavar="N", help="in all")
    parser.add_argument("--context", type=int, default=2048, metavar="C", help="tokens per slot")
    parser.add_argument("--mesh", default="data=1", help="as data=2,model=4 (default: one device)")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument(
        "--experts", default="as-dtype", choices=("as-dtype", "packed"),
        help="routed experts of a DeepSeek draft: 'packed' stay FP4 in memory",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache", default="contiguous", choices=KV_CACHES,
        help="'paged': the target's in pages; goes with --policy lagged --planner host",
    )  # fmt: skip
    parser.add_argument("--policy", default="presampled", choices=sorted(POLICIES))
    parser.add_argument(
        "--planner", default="device", choices=PLANNERS,
        help="'host': a program for every number of verified rows (policy 'lagged')",
    )  # fmt: skip
    parser.add_argument("--programs", nargs="+", default=KINDS[:3], choices=KINDS)
    parser.add_argument(
        "--widths", type=int, nargs="+", metavar="R",
        help="requests of a group to compile rounds for (default: powers of two up to the slots)",
    )  # fmt: skip
    parser.add_argument(
        "--at-context", type=int, nargs="+", metavar="C",
        help="context lengths to model times at (default: half the tokens per slot)",
    )  # fmt: skip
    parser.add_argument(
        "--sampling", default="greedy", choices=("greedy", "filtered"),
        help="model a batch that is greedy, or one that samples with top-k, top-p and min-p",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the speed table and all numbers")
    return parser


def compile_all(
    args: argparse.Namespace, models: Models, topology: Topology
) -> tuple[list[Compiled], Fit]:
    """Compiles what was asked for.

    Args:
      args: the command line.
      models: to compile.
      topology: for these devices.

    Returns:
      The programs, and what there is room for.
    """
    shape = parse_mesh(args.mesh)
    mesh = make_mesh(shape, topology.devices)
    programs: list[Compiled] = []
    room = dict(slots=args.slots, capacity=args.context)
    if models.target is None:
        wanted = selection({*args.programs, "draft", "context"}, args.widths)
        drafts = compile_draft(models, topology, mesh, **room, wanted=wanted, progress=say)
        programs += drafts.programs
        params, state = drafts.params, drafts.state
    else:
        decoder = models.decoder(ScheduleConfig(policy=args.policy, planner=args.planner))
        runs = [(decoder, models, {"prefill", "round"})]
        if models.draft is not None and "plain" in args.programs:
            alone = dataclasses.replace(decoder, draft=None, schedule=ScheduleConfig())
            plain = dataclasses.replace(
                models, params=models.params.replace(draft=None, shared=None)
            )
            runs.append((alone, plain, {"plain"}))
        elif models.draft is None:
            runs = [(decoder, models, {"prefill", "plain"})]
        for decoder, shapes, kinds in runs:
            wanted = selection(kinds & set(args.programs), args.widths)
            compiled = PairPrograms(
                decoder, shapes, topology, mesh, **room, wanted=wanted, progress=say
            )
            programs += compiled.compiled
            if shapes is models:
                params, state = compiled.param_shapes, compiled.state_shapes
    fit = estimate_fit(topology.chip, params, state, programs, **room, groups=shape.data)
    if "train" in args.programs:
        programs.append(compile_train_step(
            models, topology, shape=shape, sequences=shape.data, length=4096, anchors=512,
            global_batch=512, progress=say,
        ))  # fmt: skip
    return programs, fit


def main() -> None:
    """Compiles, prints and writes."""
    args = parser().parse_args()
    if args.slots < 1 or args.context < 2 or min(args.at_context or [1]) < 1:
        raise ValueError("--slots and --at-context must be at least 1, and --context at least 2.")
    prepare_environment()
    topology = load_topology(args.topology)
    models = describe_models(args.model, args.draft, DTYPES[args.dtype], kv_cache=args.kv_cache)
    if args.experts == "packed":
        if not isinstance(models.draft, DeepseekDraft):
            raise ValueError("--experts packed is for a DeepSeek draft; leave it out.")
        packed = pack_experts(models.params.draft)
        models = dataclasses.replace(models, params=models.params.replace(draft=packed))
    programs, fit = compile_all(args, models, topology)
    contexts = args.at_context or [max(args.context // 2, 1)]
    config = models.draft.config if models.draft else None
    points = cost_points(
        programs, contexts, config, capacity=args.context, dearest=args.sampling == "filtered",
        expert_devices=parse_mesh(args.mesh).expert,
    )  # fmt: skip
    chip = topology.chip
    print(f"{topology.name}: {len(topology.devices)} devices, mesh {args.mesh}; {chip.name}")
    print("\n".join(memory_lines(programs)), end="\n\n")
    print("\n".join(cost_lines(points)), end="\n\n")
    print("\n".join(phase_lines(points)), end="\n\n")
    if fit.room > 0:
        longest = fit.largest_capacity(args.slots)
        print(
            f"room: {fit.largest_slots(args.context)} slots of {args.context} tokens, or "
            f"{args.slots} slots of {'any number of' if longest is None else longest} tokens "
            "(estimated from the above)"
        )
    refused = [p for p in programs if not p.fits]
    versions = {"dspark_jax": __version__, "jax": jax.__version__}
    versions["libtpu"] = importlib.metadata.version("libtpu")
    key = SpsKey(
        device=topology.device_key(parse_mesh(args.mesh)), model=models.name,
        draft=draft_key(models.draft), dtype=args.dtype, versions=tuple(sorted(versions.items())),
    )  # fmt: skip
    if args.json:
        asked = vars(args) | {"programs": list(args.programs), "topology": topology.name}
        write_json(args.json, modelled_sps(points, key), programs, points, fit, asked)
    if refused:
        raise ValueError(
            f"{', '.join(p.name for p in refused)} do not fit {chip.name}: "
            f"{refused[0].refusal}; {fit.advice(args.slots, args.context)}"
        )


if __name__ == "__main__":
    run_main(main)
