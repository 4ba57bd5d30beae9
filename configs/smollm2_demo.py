"""The demo draft: small, fast on a CPU, trained on the demo target's own text.

Goes on from `smollm2_demo_start`. Three changes against it made the difference: text that repeats
within a sample is no anchor (a small target loops, and loops are learnt by heart), user turns
count too (the target wrote them), and the distance to the target's hidden states is a loss.
"""

import dataclasses
from pathlib import Path

from dspark_jax.train.config import WarmStart, load_config
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.step import OptimizerConfig

_START = load_config(Path(__file__).with_name("smollm2_demo_start.py"))

CONFIG = dataclasses.replace(
    _START,
    output_dir="runs/smollm2_demo",
    data=dataclasses.replace(
        _START.data, max_samples=1088, roles=("user", "assistant"), skip_repeats=6
    ),
    loss=LossConfig(ce=0.5, hidden=0.5),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, schedule="constant_then_linear", b2=0.99, decay_ratio=0.26
    ),
    warm_start=WarmStart(draft="runs/smollm2_demo_start/draft"),
    steps=1500,
    measure_every=50,
    measure_batches=8,
)
