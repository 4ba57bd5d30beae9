"""DeepSpec's DFlash baseline for Qwen3-4B: no Markov head, no confidence head, CE only."""

from pathlib import Path

from dspark_jax.train.config import dflash_of, load_config

CONFIG = dflash_of(
    load_config(Path(__file__).with_name("dspark_qwen3_4b.py")), output_dir="runs/dflash_qwen3_4b"
)
