"""The check of DeepSeek V4 and V4.1 folders: the target where there is one, and the draft."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.deepseek import load_deepseek_draft, weight_block
from dspark_jax.checkpoint.orbax_layout import open_checkpoint
from dspark_jax.checkpoint.quantized import DequantisingReader
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.config import read_config_json
from dspark_jax.draft.deepseek import DeepseekDraft
from dspark_jax.draft.propose import propose
from dspark_jax.kv_cache import WindowCache, write_rows
from dspark_jax.types import Block, Params, SamplingParams, SharedHead
from tools.comparisons import (
    Arrays,
    Result,
    compare,
    compare_hidden,
    compare_logits,
    compare_tokens,
    golden_array,
    read_arrays,
    unknown_arrays,
)
from tools.parity_deepseek_target import TARGET_INPUTS, check_deepseek_target

TARGET_ARRAYS = TARGET_INPUTS | {
    "prefill_last_logits", "decode_logits", "greedy_continuation", "engram_hash.multipliers",
    "engram_hash.offsets", "engram_hash.primes",
}  # fmt: skip
DRAFT_ARRAYS = ("draft_logits", "confidence_logits")
_DEQUANTISED = "dequantized."


def check_deepseek(directory: Path) -> list[Result]:
    """Checks a DeepSeek model: `outputs.safetensors` beside its checkpoint.

    The draft is given the folder's taps, and the target's anchors; where decode taps are not
    recorded, all taps are the target's. Without a target, as in a conversion, its arrays are
    skipped, and the anchors are the folder's.

    Args:
      directory: the golden folder.

    Returns:
      One result per golden array.
    """
    golden = read_arrays(directory / "outputs.safetensors")
    results, inputs, known = [], golden, {"prefill_taps", "decode_taps"}
    stored = open_checkpoint(directory, strip=("model.",)).names()
    has_target = any(name.startswith("layers.") for name in stored)
    if "tokens" in golden and has_target:
        results, made = check_deepseek_target(directory, golden)
        inputs = made if "decode_taps" not in golden else golden | {"draft_ids": made["draft_ids"]}
        known |= TARGET_INPUTS
    else:
        names = sorted(TARGET_ARRAYS & set(golden))
        results += [_skip(name, "the checkpoint holds no target") for name in names]
    results += _check_draft(directory, golden, inputs)
    results += _check_dequantised(directory, golden)
    return results + unknown_arrays(golden, known | {result.name for result in results}, "")


def _check_draft(directory: Path, golden: Arrays, inputs: Arrays) -> list[Result]:
    """Drafts from the taps and anchors in `inputs`, and the rings they leave."""
    config, params, shared = load_deepseek_draft(directory)
    draft = DeepseekDraft(config=config)
    cache = run_prefill(draft, params, golden_array(inputs, "prefill_taps"))
    results = _check_rings("ring_after_prefill.", cache, golden)
    if "decode_taps" not in inputs:
        why = "the folder has no decode_taps and the checkpoint holds no target"
        left = {
            name for name in golden if name.startswith(("draft_", "confidence_", "ring_final."))
        }
        return results + [_skip(name, why) for name in sorted(left)]
    blocks, cache = run_decode(draft, params, shared, cache, inputs)
    anchors = golden_array(inputs, "draft_ids")[..., :1]
    drafts = np.stack([block.draft_tokens for block in blocks], axis=1)
    ids = np.concatenate([anchors, drafts], axis=2)
    results.append(compare_tokens("draft_ids", ids, golden_array(golden, "draft_ids")))
    results += [_compare_steps(name, blocks, golden) for name in DRAFT_ARRAYS]
    return results + _check_rings("ring_final.", cache, golden)


def run_prefill(draft: DeepseekDraft, params: Params, taps: np.ndarray) -> WindowCache:
    """A window filled from the taps of a prompt.

    Args:
      draft: the draft model.
      params: its parameters.
      taps: f32[R, P, M*D].

    Returns:
      The window after P positions.
    """
    cache = draft.make_cache(taps.shape[0], taps.shape[1], jnp.float32)
    start = jnp.zeros(taps.shape[0], jnp.int32)
    return _write(draft, params, cache, jnp.asarray(taps), start)


def run_decode(
    draft: DeepseekDraft, params: Params, shared: SharedHead, cache: WindowCache, golden: Arrays
) -> tuple[list[Block], WindowCache]:
    """One block after every decode step, greedily.

    Args:
      draft: the draft model.
      params: its parameters.
      shared: embedding and LM head.
      cache: the window after the prefill.
      golden: with `prefill_taps`, `decode_taps` and the anchors, first in `draft_ids`.

    Returns:
      The block of each step, and the window after the last.
    """
    taps, anchors = golden_array(golden, "decode_taps"), golden_array(golden, "draft_ids")[..., 0]
    rows, done = taps.shape[0], golden_array(golden, "prefill_taps").shape[1]
    blocks = []
    for step in range(taps.shape[1]):
        position = jnp.full(rows, done + step, jnp.int32)
        cache = _write(draft, params, cache, jnp.asarray(taps[:, step : step + 1]), position)
        anchor = jnp.asarray(anchors[:, step], jnp.int32)
        blocks.append(_propose(draft, params, shared, cache, anchor, position + 1))
    return blocks, cache


@functools.partial(jax.jit, static_argnums=0)
def _propose(
    draft: DeepseekDraft,
    params: Params,
    shared: SharedHead,
    cache: WindowCache,
    anchor: jax.Array,
    anchor_pos: jax.Array,
) -> Block:
    zeros, ints = jnp.zeros(anchor.shape), jnp.zeros(anchor.shape, jnp.int32)
    sampling = SamplingParams(
        temperature=zeros, top_k=ints, top_p=zeros + 1, min_p=zeros, seed=ints.astype(jnp.uint32)
    )
    return propose(
        draft, params, shared, cache, anchor=anchor, anchor_pos=anchor_pos, round_index=ints,
        sampling=sampling, coupled=False,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def _write(
    draft: DeepseekDraft, params: Params, cache: WindowCache, taps: jax.Array, start: jax.Array
) -> WindowCache:
    rows, width = taps.shape[:2]
    k, v = draft.context_kv(params, taps, start[:, None] + jnp.arange(width))
    return write_rows(cache, k, v, first_slot=0, start=start, count=jnp.full(rows, width))


def _check_rings(prefix: str, cache: WindowCache, golden: Arrays) -> list[Result]:
    """A ring per stage; more of them in the golden file than stages is a failure."""
    stages = {f"{prefix}{i}": rows for i, rows in enumerate(cache.kv)}
    names = sorted(name for name in golden if name.startswith(prefix))
    return [compare_hidden(name, stages.get(name), golden[name]) for name in names]


def _compare_steps(name: str, blocks: list[Block], golden: Arrays) -> Result:
    got = np.stack([getattr(block, name) for block in blocks], axis=1)
    return compare_logits(name, got, golden_array(golden, name))


def _check_dequantised(directory: Path, golden: Arrays) -> list[Result]:
    names = sorted(name for name in golden if name.startswith(_DEQUANTISED))
    if not names:
        return []
    reader = TensorReader(directory)
    block = weight_block(read_config_json(directory))
    plain = DequantisingReader(reader, block=block, names=None)
    have = plain.names()
    results = []
    for name in names:
        stored = name.removeprefix(_DEQUANTISED)
        value = plain.read(stored) if stored in have else None
        results.append(compare(name, value, golden[name], tolerance=0.0))
    return results


def _skip(name: str, why: str) -> Result:
    return Result(name=name, ok=True, detail=f"not compared: {why}", skipped=True)
