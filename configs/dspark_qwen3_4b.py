"""DeepSpec's recipe for Qwen3-4B: five layers, block 7, Markov rank 256, target run online."""

from dspark_jax.train.config import DataConfig, DraftShape, TrainConfig
from dspark_jax.train.step import OptimizerConfig

CONFIG = TrainConfig(
    target="models/Qwen3-4B",
    output_dir="runs/dspark_qwen3_4b",
    draft=DraftShape(mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33)),
    data=DataConfig(train_data="data/train.jsonl", validation_samples=64),
    optimizer=OptimizerConfig(accumulate=512),
    steps=512 * 20000,
    checkpoint_every=512 * 300,
    log_every=512,
)
