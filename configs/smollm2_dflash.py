"""DFlash on the demo target: the demo draft's data, depth, block and steps, CE only."""

from pathlib import Path

from dspark_jax.train.config import WarmStart, dflash_of, load_config

CONFIG = dflash_of(
    load_config(Path(__file__).with_name("smollm2_demo_start.py")),
    output_dir="runs/smollm2_dflash",
    warm_start=WarmStart(context=True),
)
