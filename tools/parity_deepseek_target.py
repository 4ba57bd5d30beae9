"""The check of a DeepSeek V4 or V4.1 target: logits, taps, greedy text and Engram's hash tables."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.deepseek_target import load_deepseek_target
from dspark_jax.config import read_config_json
from dspark_jax.config_deepseek_target import EngramConfig, deepseek_target_from_hf
from dspark_jax.target.deepseek import DeepseekTarget
from dspark_jax.target.engram import hash_multipliers, hash_offsets, hash_primes
from dspark_jax.types import Params
from tools.comparisons import (
    Arrays,
    Result,
    compare_hidden,
    compare_logits,
    compare_tokens,
    golden_array,
)

TARGET_INPUTS = {"tokens", "greedy_prompt", "engram_hash.token_map"}
PADDED_TO = 64  # tokens: folders of one model size share a compiled program
_CLASSES = "engram_hash.token_map"


def check_deepseek_target(
    directory: Path, golden: Arrays
) -> tuple[list[Result], dict[str, np.ndarray]]:
    """Checks a target: one forward over prompt and teacher-forced steps, and greedy decoding.

    Engram's token classes are read from a tokenizer in the folder and compared, or taken from the
    golden arrays. A folder with neither has neighbouring tokens in one class, as those with random
    weights are made.

    Args:
      directory: the golden folder.
      golden: its `outputs.safetensors`.

    Returns:
      The results, and what a draft after every step is given: `prefill_taps`, `decode_taps` and,
      as `draft_ids` [R, steps, 1], the anchors.
    """
    classes = None if (directory / "tokenizer.json").is_file() else _classes(directory, golden)
    config, params = load_deepseek_target(directory, token_classes=classes)
    target = DeepseekTarget(config=config)
    tokens, prompt = golden_array(golden, "tokens"), golden_array(golden, "prefill_taps").shape[1]
    logits, taps = run_deepseek_target(target, params, tokens)
    results = [
        compare(name, got, golden_array(golden, name))
        for name, got, compare in (
            ("prefill_last_logits", logits[:, prompt - 1], compare_logits),
            ("prefill_taps", taps[:, :prompt], compare_hidden),
            ("decode_logits", logits[:, prompt:], compare_logits),
        )
    ]
    if "decode_taps" in golden:
        results.append(compare_hidden("decode_taps", taps[:, prompt:], golden["decode_taps"]))
    if "greedy_continuation" in golden:
        expected, start = golden["greedy_continuation"], golden_array(golden, "greedy_prompt")
        got = decode_deepseek_greedy(target, params, start, expected.shape[1])
        results.append(compare_tokens("greedy_continuation", got, expected))
    results += _check_hash(config.engram, golden)
    if classes is None and _CLASSES in golden:
        results.append(compare_tokens(_CLASSES, params["token_classes"], golden[_CLASSES]))
    anchors = logits[:, prompt:].argmax(axis=-1)[..., None]
    made = {"prefill_taps": taps[:, :prompt], "decode_taps": taps[:, prompt:]}
    return results, made | {"draft_ids": anchors}


def run_deepseek_target(
    target: DeepseekTarget, params: Params, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and context features of whole sequences.

    Args:
      target: the model.
      params: its parameters.
      tokens: i64[R, T].

    Returns:
      f32[R, T, V] and f32[R, T, M*D].
    """
    length = tokens.shape[1]
    padded = min(-(-length // PADDED_TO) * PADDED_TO, target.config.max_position_embeddings)
    tokens = np.pad(tokens, ((0, 0), (0, max(padded - length, 0))))
    logits, taps = _forward(target, params, jnp.asarray(tokens, jnp.int32))
    return np.asarray(logits)[:, :length], np.asarray(taps)[:, :length]


def decode_deepseek_greedy(
    target: DeepseekTarget, params: Params, prompt: np.ndarray, count: int
) -> np.ndarray:
    """Greedy text, every token by a forward over the whole sequence.

    Args:
      target: the model.
      params: its parameters.
      prompt: i64[R, P].
      count: tokens to generate.

    Returns:
      i64[R, count], without the prompt.
    """
    first = prompt.shape[1]
    text = np.pad(prompt, ((0, 0), (0, count)))
    for at in range(first, first + count):
        text[:, at] = run_deepseek_target(target, params, text)[0][:, at - 1].argmax(axis=-1)
    return text[:, first:]


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    target: DeepseekTarget, params: Params, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return target.forward(params, tokens)


def _classes(directory: Path, golden: Arrays) -> np.ndarray | None:
    config = deepseek_target_from_hf(read_config_json(directory), has_vision_bias=False)
    if config.engram is None or _CLASSES in golden:
        return golden.get(_CLASSES)
    return np.arange(config.vocab_size) * config.engram.num_classes // config.vocab_size


def _check_hash(engram: EngramConfig | None, golden: Arrays) -> list[Result]:
    tables = {"multipliers": hash_multipliers, "offsets": hash_offsets, "primes": hash_primes}
    names = {f"engram_hash.{name}": table for name, table in tables.items()}
    return [
        compare_tokens(name, table(engram), golden[name])
        for name, table in names.items()
        if name in golden and engram is not None
    ]
