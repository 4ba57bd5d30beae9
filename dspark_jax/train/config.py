"""Everything a training run is made of, as frozen dataclasses; files in configs/ build one."""

import ast
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.step import OptimizerConfig
from dspark_jax.train.vocabulary import CandidateConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftShape:
    """What a draft has of its own; width, vocabulary, norms and rotary base are the target's."""

    num_hidden_layers: int = 5
    num_attention_heads: int | None = None  # None: as the target
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    block_size: int = 7
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int = 256
    markov_head_type: str | None = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_vocab_size: int | None = None
    sliding_window: int | None = None

    def build(self, target: TargetConfig) -> DraftConfig:
        """The architecture for a target.

        Raises:
          ValueError: it taps the target's last layer, or fields contradict each other.
        """
        last = target.num_hidden_layers - 1
        if self.target_layer_ids[-1] >= last:
            raise ValueError(
                f"target_layer_ids={list(self.target_layer_ids)} taps layer "
                f"{self.target_layer_ids[-1]}; expected layers below {last}, the target's last, "
                "whose output means different things to different engines."
            )
        fields = dataclasses.asdict(self)
        own = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        for name in own:
            if fields[name] is None:
                fields[name] = getattr(target, name)
        return DraftConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            num_target_layers=target.num_hidden_layers,
            max_position_embeddings=target.max_position_embeddings,
            **fields,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Samples, and how they become batches.

    Two ways: whole samples with sampled anchors, the target run online (DeepSpec's recipe); or,
    with `features_dir`, hidden states computed once and crops in which every position is an
    anchor, for small corpora and drafts with a sliding window.
    """

    train_data: str
    max_length: int = 4096  # tokens
    min_loss_tokens: int = 14
    max_samples: int | None = None  # coldest answers first, else in random order
    roles: tuple[str, ...] = ("assistant",)  # whose tokens count for the loss
    skip_repeats: int = 0  # crops only: no anchor whose next n tokens stood earlier in its sample
    validation_samples: int = 0  # the first ones, never trained on
    batch_size: int = 1  # sequences or crops of a micro-step
    num_anchors: int = 512  # per sequence or crop
    features_dir: str | None = None
    feature_layer_ids: tuple[int, ...] | None = None  # None: the draft's target_layer_ids

    def __post_init__(self):
        if self.batch_size < 1 or self.num_anchors < 1 or self.max_length < 2:
            raise ValueError(
                "batch_size and num_anchors must be positive and max_length at least 2; got "
                f"{self}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Initial weights from data or from the target (see `warm_start`); off by default."""

    markov: bool = False  # Markov head from token means
    context: bool = False  # context projection by ridge regression, identity attention values
    samples: int = 24000  # positions the regression is fitted on
    draft: str | None = None  # continue from an exported draft instead
    choose_vocabulary: bool = False  # with `draft`: a reduced vocabulary is chosen anew, see there


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    target: str  # a directory or the name of the demo target
    output_dir: str
    draft: DraftShape
    data: DataConfig
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    candidates: CandidateConfig | None = None
    warm_start: WarmStart = WarmStart()
    steps: int  # micro-steps of the whole run
    data_parallel: int = 1  # devices, or groups of them, that a micro-step's batch is split over
    model_parallel: int = 1  # devices of a group, that draft and vocabulary are split over
    seed: int = 42
    log_every: int = 10
    checkpoint_every: int = 3000
    keep_checkpoints: int = 2
    measure_every: int = 0  # steps between validations; 0 never
    measure_batches: int = 16

    def __post_init__(self):
        if self.steps < 1 or self.checkpoint_every < 1 or self.log_every < 1:
            raise ValueError("steps, checkpoint_every and log_every must be positive.")
        if self.data.features_dir is not None and self.draft.sliding_window is None:
            raise ValueError(
                "data.features_dir trains on crops, which needs draft.sliding_window; set it, or "
                "leave features_dir out to train on whole samples."
            )
        if self.data_parallel < 1 or self.data.batch_size % self.data_parallel:
            raise ValueError(
                f"data_parallel={self.data_parallel} must divide "
                f"data.batch_size={self.data.batch_size}."
            )
        if self.model_parallel < 1:
            raise ValueError(f"model_parallel={self.model_parallel}; expected at least 1.")
        stored = (self.warm_start.markov, self.warm_start.context, self.draft.draft_vocab_size)
        if any(stored) and self.data.features_dir is None:
            raise ValueError(
                "warm_start.markov, warm_start.context and draft.draft_vocab_size are computed "
                "from stored features; set data.features_dir."
            )


def dflash_of(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The DFlash baseline of a DSpark run: no Markov head, no confidence head, CE only.

    Args:
      config: the DSpark run.
      **changes: further fields to replace.

    Returns:
      The same data, depth, block and steps.
    """
    heads = dict(
        markov_rank=0, markov_head_type=None, enable_confidence_head=False,
        confidence_head_with_markov=False,
    )  # fmt: skip
    return dataclasses.replace(
        config,
        draft=dataclasses.replace(config.draft, **heads),
        loss=LossConfig(ce=1.0, l1=0.0, confidence=0.0),
        **changes,
    )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads `CONFIG` from a Python file and applies overrides.

    Args:
      path: the file.
      overrides: `a.b=value`, values as Python literals, anything else as text.

    Returns:
      The config.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file has no `CONFIG`, or an override names an unknown field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; expected a config such as configs/*.py.")
    spec = importlib.util.spec_from_file_location(f"dspark_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = getattr(module, "CONFIG", None)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path} must define CONFIG, a TrainConfig; got {type(config).__name__}.")
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: expected a.b=value.")
        config = _replace(config, name.split("."), _literal(value), text)
    return config


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _replace(node: Any, path: list[str], value: Any, text: str) -> Any:
    if not dataclasses.is_dataclass(node):
        raise ValueError(f"--set {text}: {path[0]!r} is below a value that has no fields.")
    names = [f.name for f in dataclasses.fields(node)]
    if path[0] not in names:
        raise ValueError(f"--set {text}: no field {path[0]!r}; expected one of {names}.")
    if len(path) > 1:
        value = _replace(getattr(node, path[0]), path[1:], value, text)
    return dataclasses.replace(node, **{path[0]: value})
