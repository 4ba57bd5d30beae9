"""Last stage of the demo draft: the target's greedy answers to tasks, beside its own text.

Goes on from `smollm2_demo`. The prompts are those of tools/write_prompts.py, and prompts that the
target wrote; most answers are at temperature 0. The draft's vocabulary is chosen anew, from this
text: mathematics and code have other frequent tokens than the text before.
"""

import dataclasses
from pathlib import Path

from dspark_jax.train.config import WarmStart, load_config

_DEMO = load_config(Path(__file__).with_name("smollm2_demo.py"))

CONFIG = dataclasses.replace(
    _DEMO,
    output_dir="runs/smollm2_demo_tasks",
    data=dataclasses.replace(
        _DEMO.data,
        train_data="data/smollm2_tasks.jsonl",
        features_dir="runs/smollm2_tasks_features",
        max_length=640,
        max_samples=None,
        roles=("assistant",),
    ),
    optimizer=dataclasses.replace(_DEMO.optimizer, decay_ratio=0.4),
    warm_start=WarmStart(draft="runs/smollm2_demo/draft", choose_vocabulary=True),
    steps=3000,
)
