"""Converts checkpoints: `python tools/convert.py SRC DST`.

SRC is a directory in the Hugging Face layout (config.json and safetensors, single, sharded or
quantised): a Llama, Qwen3 or Qwen3-MoE target, a draft of DeepSpec, speculators or SpecForge, or a
DeepSeek V4 or V4.1 model with its draft. DST becomes an Orbax checkpoint that --model and --draft
take; with --to hf, SRC is such a directory and DST gets safetensors. One tensor is in memory at a
time. DST appears when it is complete; after an interruption the same command goes on.
"""

import argparse
import contextlib
import ctypes
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no install

from dspark_jax.checkpoint.convert import FORMS, convert  # noqa: E402
from dspark_jax.checkpoint.convert_back import convert_back  # noqa: E402
from dspark_jax.checkpoint.inspect import inspect_checkpoint  # noqa: E402
from dspark_jax.checkpoint.orbax_layout import Leaf, Manifest, verify  # noqa: E402
from dspark_jax.sharding import parse_mesh  # noqa: E402

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts, or says what a checkpoint is.

    Args:
      arguments: command line; None takes the process's.

    Returns:
      The exit status, 0 unless something is missing, damaged or unknown, or was interrupted.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    given = args.inspect or args.verify
    if bool(given) == bool(args.source and args.destination):
        parser.error("expected SRC DST, or --inspect SRC, or --verify DIR")
    try:
        if args.inspect:
            for label, text in inspect_checkpoint(args.inspect).items():
                print(f"{label + ':':<18} {text}")
        elif args.verify:
            print(f"{verify(args.verify, _say)} arrays are what was written")
        else:
            _run(parser, args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python tools/convert.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", metavar="SRC", type=Path, nargs="?")
    parser.add_argument("destination", metavar="DST", type=Path, nargs="?", help="must not exist")
    parser.add_argument(
        "--to",
        choices=("orbax", "hf"),
        default="orbax",
        help="layout of DST (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=FORMS,
        help="of the weights (default: as-stored, which keeps FP8 and FP4); what the reference "
        "computes in float32 stays as stored",
    )  # fmt: skip
    parser.add_argument("--only", choices=("draft", "target"), help="fail if SRC is something else")
    parser.add_argument(
        "--mesh", metavar="data=1,model=4", type=str,
        help="cut the arrays into files as a mesh of these axes reads them",
    )  # fmt: skip
    parser.add_argument("--inspect", metavar="SRC", type=Path, help="say what SRC is, and end")
    parser.add_argument("--verify", metavar="DIR", type=Path, help="compare checksums, and end")
    return parser


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Converts in the direction asked for, and prints the summary."""
    _restart_peak()
    start, before = time.monotonic(), _peak_bytes()
    if args.to == "hf":
        if args.dtype or args.mesh or args.only:
            parser.error("--to hf writes what SRC holds; it takes no --dtype, --mesh or --only")
        count, size = convert_back(args.source, args.destination, say=_say)
        what = f"{count} tensors"
    else:
        mesh = parse_mesh(args.mesh) if args.mesh else None
        manifest = convert(
            args.source, args.destination, form=args.dtype or FORMS[0], only=args.only,
            mesh=mesh, say=_say,
        )  # fmt: skip
        _list_left_out(manifest)
        size = sum(leaf.nbytes() for leaf in manifest.leaves)
        largest = max(manifest.leaves, key=Leaf.nbytes)
        what = (
            f"{len(manifest.tensors)} tensors in {len(manifest.leaves)} parameters, the largest "
            f"{largest.nbytes() / 1e6:,.1f} MB,"
        )
    print(
        f"{args.destination}: {what} {size / 1e6:,.1f} MB in {time.monotonic() - start:.1f} s; "
        f"peak memory {(_peak_bytes() - before) / 1e6:,.1f} MB above the start"
    )


def _list_left_out(manifest: Manifest) -> None:
    """Prints what was not converted, many names of a kind as one."""
    groups: dict[str, list[str]] = {}
    for name in manifest.left_out:
        groups.setdefault(name.split(".")[0], []).append(name)
    for head, names in groups.items():
        shown = names[0] if len(names) == 1 else f"{head}.*, {len(names)} tensors"
        _say(f"left out: {shown}")


def _restart_peak() -> None:
    """Makes the peak of memory count from here, and gives freed arrays back at once, if it can."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_bytes() -> int:
    """The most memory this process has had."""
    with contextlib.suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
