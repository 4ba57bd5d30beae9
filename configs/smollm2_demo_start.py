"""First stage of the demo draft: 640 answers, warm starts, the vocabulary losses."""

from dspark_jax.train.config import DataConfig, DraftShape, TrainConfig, WarmStart
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.step import OptimizerConfig
from dspark_jax.train.vocabulary import CandidateConfig

CONFIG = TrainConfig(
    target="smollm2-135m-instruct",
    output_dir="runs/smollm2_demo_start",
    draft=DraftShape(
        num_hidden_layers=2,
        num_key_value_heads=9,
        intermediate_size=1024,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(13, 19, 24, 28),
        markov_rank=64,
        draft_vocab_size=16384,
        sliding_window=64,
    ),
    data=DataConfig(
        train_data="data/smollm2_self.jsonl",
        max_length=448,
        max_samples=640,
        validation_samples=24,
        batch_size=8,
        num_anchors=32,
        features_dir="runs/smollm2_features",
        feature_layer_ids=(1, 7, 13, 19, 24, 28),
    ),
    loss=LossConfig(ce=0.5),
    optimizer=OptimizerConfig(
        learning_rate=1.5e-3, schedule="constant_then_linear", b2=0.99, decay_ratio=0.02
    ),
    candidates=CandidateConfig(always=1024, total=2048),
    warm_start=WarmStart(markov=True, context=True),
    steps=785,
    seed=0,
    checkpoint_every=100,
    measure_every=100,
    measure_batches=10,
)
