"""DFlash on the demo target: the demo draft's data, depth, block and steps, CE only."""

import dataclasses
from pathlib import Path

from dspark_jax.train.config import WarmStart, load_config
from dspark_jax.train.loss import LossConfig

_DSPARK = load_config(Path(__file__).with_name("smollm2_demo_start.py"))

CONFIG = dataclasses.replace(
    _DSPARK,
    output_dir="runs/smollm2_dflash",
    draft=dataclasses.replace(
        _DSPARK.draft,
        markov_rank=0,
        markov_head_type=None,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    ),
    loss=LossConfig(ce=1.0, l1=0.0, confidence=0.0),
    warm_start=WarmStart(context=True),
)
