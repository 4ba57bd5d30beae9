"""Models as shapes: from a name, a directory or a preset, without weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.checkpoint.demo import resolve_model
from dspark_jax.checkpoint.draft_layouts import read_draft_config
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.config import TargetConfig, read_config_json
from dspark_jax.config_deepseek import deepseek_draft_from_hf, is_deepseek
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.draft.protocol import Draft
from dspark_jax.engine.load import random_draft_config
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.state import Decoder
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import PairParams, SharedHead

PRESETS = Path(__file__).resolve().parent.parent.parent / "configs" / "models"


class _NoTensors:
    """Stands for the weights of a directory that has only a config.json."""

    def names(self) -> set[str]:
        return set()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """A target and a draft, either of which may be missing, as shapes.

    Attributes:
      name: of the target.
      target: taps what the draft reads.
      draft: the draft.
      params: shapes; `shared` only where it is not simply the target's.
      dtype: of weights and caches.
    """

    name: str
    target: LlamaTarget | None
    draft: Draft | None
    params: PairParams
    dtype: jnp.dtype

    def decoder(self, schedule: ScheduleConfig) -> Decoder:
        """What the engine runs.

        Raises:
          ValueError: there is no target.
        """
        if self.target is None:
            raise ValueError("rounds need a target; choose one with --model.")
        return Decoder(target=self.target, draft=self.draft, schedule=schedule)


def presets() -> tuple[str, ...]:
    """Names of the models whose sizes are known here."""
    return tuple(sorted(p.parent.name for p in PRESETS.glob("*/config.json")))


def describe_models(
    model: str, draft: str, dtype: jnp.dtype, *, kv_cache: str = "contiguous"
) -> Models:
    """Shapes of a pair.

    Args:
      model: a preset, a directory with a config.json, the demo target's name, or "none".
      draft: a preset, a directory, "random" (a small one), or "none".
      dtype: of weights and caches.
      kv_cache: the target's, "contiguous" or "paged".

    Returns:
      The models.

    Raises:
      FileNotFoundError: no such preset or directory.
      ValueError: a config is not supported, or nothing is left to compile.
    """
    if model == "none" and draft == "none":
        raise ValueError("--model none with --draft none leaves nothing to compile.")
    target_config, name = None, ""
    if model != "none":
        directory = _directory(model)
        hf, name = read_config_json(directory), directory.name
        target_config = TargetConfig.from_hf(hf)
    chosen = None if draft == "none" else _draft(draft, target_config)
    taps = chosen.config.target_layer_ids if chosen else ()
    target, shared = None, None
    if target_config is not None:
        paged = kv_cache == "paged"
        target = LlamaTarget(config=target_config, tap_layer_ids=taps, paged=paged)
    params = PairParams(
        target=_shapes(target, dtype) if target else None,
        draft=_shapes(chosen, dtype) if chosen else None,
    )
    if chosen is not None and (target is None or _reduced(chosen)):
        shared = _shared_shapes(chosen, dtype)
    return Models(
        name=name, target=target, draft=chosen, params=params.replace(shared=shared), dtype=dtype
    )


def _shapes(model: Any, dtype: jnp.dtype) -> Any:
    return jax.eval_shape(lambda key: model.init(key, dtype), jax.random.key(0))


def _directory(name: str) -> Path:
    if name in presets():
        return PRESETS / name
    try:
        return resolve_model(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} Presets: {', '.join(presets())}.") from error


def _draft(name: str, target: TargetConfig | None) -> Draft:
    if name == "random":
        if target is None:
            raise ValueError("--draft random takes its sizes from a target; choose --model.")
        return DenseDraft(config=random_draft_config(target))
    directory = _directory(name)
    hf = read_config_json(directory)
    if is_deepseek(hf):
        text = hf.get("text_config") or hf
        return DeepseekDraft(
            config=deepseek_draft_from_hf(
                hf,
                num_stages=max(text.get("num_nextn_predict_layers", 3), 3),  # some files say 1
                has_vision_bias=hf["model_type"] == "deepseek_v41",
            )
        )
    stored = any(directory.glob("*.safetensors"))
    reader = TensorReader(directory) if stored else _NoTensors()
    return DenseDraft(config=read_draft_config(hf, reader))


def _reduced(draft: Draft) -> bool:
    return draft.config.output_vocab_size != draft.config.vocab_size


def _shared_shapes(draft: Draft, dtype: jnp.dtype) -> SharedHead:
    config = draft.config
    rows = config.output_vocab_size

    def ids(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), jnp.int32)

    return SharedHead(
        embedding=jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), dtype),
        head=jax.ShapeDtypeStruct((rows, config.hidden_size), dtype),
        target_ids=ids(rows) if _reduced(draft) else None,
        draft_ids=ids(config.vocab_size) if _reduced(draft) else None,
    )
