"""DeepSpec's DFlash baseline for Qwen3-4B: no Markov head, no confidence head, CE only."""

import dataclasses
from pathlib import Path

from dspark_jax.train.config import load_config
from dspark_jax.train.loss import LossConfig

_DSPARK = load_config(Path(__file__).with_name("dspark_qwen3_4b.py"))

CONFIG = dataclasses.replace(
    _DSPARK,
    output_dir="runs/dflash_qwen3_4b",
    draft=dataclasses.replace(
        _DSPARK.draft,
        markov_rank=0,
        markov_head_type=None,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    ),
    loss=LossConfig(ce=1.0, l1=0.0, confidence=0.0),
)
