"""Looks into checkpoints: `python tools/convert.py --inspect SRC`.

Says what kind of checkpoint SRC is, how its draft counts rows and layers, which heads it has, how
many parameters and bytes, and what runs it. Reads headers only; exits 1 if something does not fit.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no install

from dspark_jax.checkpoint.inspect import inspect_checkpoint  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what there is to say about a checkpoint.

    Args:
      arguments: command line; None takes the process's.

    Returns:
      The exit status, 0 unless something is missing, damaged or unknown.
    """
    parser = argparse.ArgumentParser(
        "python tools/convert.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--inspect", metavar="SRC", type=Path, required=True, help="a checkpoint directory"
    )
    try:
        report = inspect_checkpoint(parser.parse_args(arguments).inspect)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for label, text in report.items():
        print(f"{label + ':':<18} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
