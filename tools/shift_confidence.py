"""Moves the bias of a draft's confidence head to where recorded rounds say it should be.

The head learns on the text of the training files. Where the draft serves other text (sampled at a
higher temperature, say) it may be too sure or not sure enough throughout, which temperatures cannot
mend. The rounds come from tools/calibrate.py, on prompts that nothing is judged by.

    python tools/calibrate.py --prompts FILE.jsonl --temperature 1 --save-traces rounds.npz
    python tools/shift_confidence.py --traces rounds.npz --draft DIR --out NEW_DIR
"""

import argparse
import shutil
from pathlib import Path

import numpy as np

from dspark_jax.calibrate import fit_bias, load_traces
from dspark_jax.checkpoint.safetensors import TensorReader, save_tensors
from dspark_jax.cli import run_main

BIAS = "confidence_head.proj.bias"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python tools/shift_confidence.py", description=__doc__)
    parser.add_argument("--traces", required=True, metavar="FILE.npz", help="recorded rounds")
    parser.add_argument("--draft", required=True, type=Path, metavar="DIR", help="DeepSpec layout")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="must not exist")
    return parser


def main() -> None:
    """Fits and writes a copy of the draft."""
    args = parser().parse_args()
    traces = load_traces(args.traces)
    reader = TensorReader(args.draft)
    if BIAS not in reader.names():
        raise ValueError(f"draft {args.draft} has no tensor {BIAS}; there is no bias to move.")
    if args.out.exists():
        raise ValueError(f"--out={args.out} exists; choose a new directory.")
    shift = fit_bias(traces.confidence_logits, traces.accept_len, traces.verify_len)
    tensors = {name: reader.read(name) for name in sorted(reader.names())}
    before = tensors[BIAS].astype(np.float32)
    tensors[BIAS] = (before + shift).astype(tensors[BIAS].dtype)
    args.out.mkdir(parents=True)
    shutil.copy(args.draft / "config.json", args.out)
    save_tensors(args.out / "model.safetensors", tensors)
    after = tensors[BIAS].astype(np.float32)
    print(f"{len(traces.prompt)} rounds: bias {before.item():.3f} -> {after.item():.3f}")


if __name__ == "__main__":
    run_main(main)
