"""Trains a draft: `python -m dspark_jax.train --config configs/NAME.py [--set a.b=value]`."""

import argparse
import sys
from collections.abc import Sequence

from dspark_jax.host_memory import keep_freed_memory
from dspark_jax.sharding import parse_mesh
from dspark_jax.train.config import load_config
from dspark_jax.train.loop import open_run, train


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: arguments; None takes the process's.

    Returns:
      Exit status: 0 done, 1 refused or failed with a message, 130 stopped by a signal.
    """
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.train", description=__doc__)
    parser.add_argument("--config", required=True, help="Python file that defines CONFIG")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="override a field"
    )
    parser.add_argument(
        "--mesh", metavar="data=N,model=M",
        help="devices to split every batch, and the draft, over; sets data_parallel and "
        "model_parallel",
    )  # fmt: skip
    parser.add_argument(
        "--export", metavar="DIR", help="only write the draft of the newest checkpoint to DIR"
    )
    args = parser.parse_args(argv)
    keep_freed_memory()
    try:
        overrides = args.set + (_mesh_overrides(args.mesh) if args.mesh else [])
        config = load_config(args.config, overrides)
        if args.export:
            open_run(config, _say).export(args.export)
            return 0
        trainer = train(config, progress=_say)
    except (FileNotFoundError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if int(trainer.state.step) >= config.steps else 130


def _mesh_overrides(text: str) -> list[str]:
    """The overrides that a mesh stands for."""
    mesh = parse_mesh(text)
    if mesh.expert > 1:
        raise ValueError(
            f"--mesh {text}: a draft that is trained has no experts to split; give the axes data "
            "and model."
        )
    return [f"data_parallel={mesh.data}", f"model_parallel={mesh.model}"]


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
