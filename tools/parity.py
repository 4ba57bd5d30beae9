"""Compares this implementation with golden vectors: `python tools/parity.py DIR [DIR ...]`.

A golden folder is recognised by the vectors it holds; tests/golden/README.md describes the kinds.
Prints the largest error of every array; exits 1 when one is beyond its tolerance, is missing, or
is not known, and when a folder is of no known kind.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no install

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from dspark_jax.checkpoint.draft import draft_rules, load_draft  # noqa: E402
from dspark_jax.checkpoint.rules import stored_tensors  # noqa: E402
from dspark_jax.checkpoint.target import load_target  # noqa: E402
from dspark_jax.config import TargetConfig, read_config_json  # noqa: E402
from dspark_jax.config_deepseek import is_deepseek  # noqa: E402
from dspark_jax.draft.confidence import confidence_logits  # noqa: E402
from dspark_jax.draft.dense import DenseDraft  # noqa: E402
from dspark_jax.draft.markov import markov_bias  # noqa: E402
from dspark_jax.draft.propose import propose  # noqa: E402
from dspark_jax.kv_cache import write_rows  # noqa: E402
from dspark_jax.products import score_vocabulary  # noqa: E402
from dspark_jax.target.llama import LlamaTarget, stack_layers  # noqa: E402
from dspark_jax.train.blocks import TrainBatch, block_rows, slot_hidden  # noqa: E402
from dspark_jax.train.forward import train_backbone  # noqa: E402
from dspark_jax.train.loss import LossConfig, markov_block, vocabulary_loss  # noqa: E402
from dspark_jax.train.vocabulary import full_vocabulary  # noqa: E402
from dspark_jax.types import Block, Params, SamplingParams  # noqa: E402
from tools.comparisons import (  # noqa: E402
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
from tools.parity_deepseek import check_deepseek  # noqa: E402

RELATIVE_TOLERANCE = 1e-4  # losses and gradients: of an array's largest value
ALIGNED = "aligned_target_logits"
TRAIN_KNOWN = (
    "token_ids", "loss_mask", "anchor_positions", "block_keep_mask", "context_features",
    "target_last_hidden", "target_token_ids", "eval_mask", ALIGNED,
)  # fmt: skip


def check_target(directory: Path, *, stacked: bool = False) -> list[Result]:
    """Checks a plain target: `outputs.safetensors` beside its checkpoint.

    Args:
      directory: the golden folder.
      stacked: run the layers as one scan instead of one by one.

    Returns:
      One result per golden array.
    """
    config, params = load_target(directory)
    golden = read_arrays(directory / "outputs.safetensors")
    if stacked:
        params = stack_layers(params)
    logits, hidden = run_target(config, params, golden_array(golden, "tokens"))
    results = [compare_logits("logits", logits, golden_array(golden, "logits"))]
    results += _check_hidden("hidden.", hidden, golden)
    known = {"tokens", "logits", "greedy_prompt", "greedy_tokens"}
    if "greedy_tokens" in golden:
        prompt, expected = golden_array(golden, "greedy_prompt"), golden["greedy_tokens"]
        decoded = decode_greedy(config, params, prompt, expected.shape[1] - prompt.shape[1])
        if len(expected) > 1:  # rows that ended early are padded
            ended = np.isin(expected, config.eos_token_ids)
            ended[:, : prompt.shape[1]] = False
            decoded = np.where(np.cumsum(ended, axis=1) - ended > 0, expected, decoded)
        results.append(compare_tokens("greedy_tokens", decoded, expected))
    return results + unknown_arrays(golden, known, "hidden.")


def check_block_forward(directory: Path, *, stacked: bool = False) -> list[Result]:
    """Checks a target and draft pair: one drafted block, `block_forward.safetensors`.

    Args:
      directory: the golden folder with `target/` and `draft/`.
      stacked: run the target's layers as one scan instead of one by one.

    Returns:
      One result per golden array.
    """
    golden = read_arrays(directory / "block_forward.safetensors")
    config, params = load_target(directory / "target")
    shared = LlamaTarget(config=config).shared_head(params)
    draft_config, draft_params, shared = load_draft(directory / "draft", config, shared)
    if stacked:
        params = stack_layers(params)
    tokens = golden_array(golden, "token_ids")
    context, anchor = tokens[:, :-1], tokens[:, -1]
    logits, hidden = run_target(config, params, context)
    features = np.concatenate([hidden[i + 1] for i in draft_config.target_layer_ids], axis=-1)
    draft = DenseDraft(config=draft_config)
    block = draft_block(draft, draft_params, shared, features, anchor)
    arrays = {
        "target_logits": (logits, compare_logits),
        "context_features": (features, compare_hidden),
        "block_hidden": (block.block_hidden, compare_hidden),
        "base_logits": (block.base_logits, compare_logits),
        "draft_tokens": (block.draft_tokens, compare_tokens),
        "draft_logits": (block.draft_logits, compare_logits),
        "confidence_logits": (block.confidence_logits, compare_logits),
    }
    if not draft_config.enable_confidence_head and "confidence_logits" not in golden:
        del arrays["confidence_logits"]
    results = [
        comparison(name, got, golden_array(golden, name))
        for name, (got, comparison) in arrays.items()
    ]
    results += _check_hidden("target_hidden_", hidden, golden)
    return results + unknown_arrays(golden, {*arrays, "token_ids"}, "target_hidden_")


def run_target(
    config: TargetConfig, params: Params, tokens: np.ndarray
) -> tuple[jax.Array, list[jax.Array]]:
    """One forward without context.

    Args:
      config: the target's architecture.
      params: its parameters.
      tokens: i64[R, W].

    Returns:
      Logits [R, W, V] and, as transformers lists them, hidden states [R, W, D]: the embedding,
      every layer's output but the last, and the last after the final norm.
    """
    target = LlamaTarget(config=config, tap_layer_ids=tuple(range(-1, config.num_hidden_layers)))
    rows, width = tokens.shape
    cache = target.make_cache(rows, width, jnp.float32)
    forward = jax.jit(target.forward)
    out = forward(params, jnp.asarray(tokens), cache, cache_len=jnp.zeros(rows, jnp.int32))
    taps = jnp.split(out.context_features, config.num_hidden_layers + 1, axis=-1)
    return target.logits(params, out.hidden), [*taps[:-1], out.hidden]


def decode_greedy(
    config: TargetConfig, params: Params, prompt: np.ndarray, count: int
) -> np.ndarray:
    """Plain greedy decoding through the KV cache, one token at a time.

    Args:
      config: the target's architecture.
      params: its parameters.
      prompt: i64[R, P].
      count: tokens to generate.

    Returns:
      i64[R, P + count], prompt included.
    """
    target = LlamaTarget(config=config)
    rows, length = prompt.shape
    cache = target.make_cache(rows, length + count, jnp.float32)

    @jax.jit
    def step(params: Params, tokens: jax.Array, cache, cache_len: jax.Array) -> tuple:
        out = target.forward(params, tokens, cache, cache_len=cache_len)
        width = jnp.full(rows, tokens.shape[1])
        cache = write_rows(cache, out.new_k, out.new_v, first_slot=0, start=cache_len, count=width)
        return jnp.argmax(target.logits(params, out.hidden[:, -1]), axis=-1), cache

    text, new, done = [prompt], jnp.asarray(prompt), 0
    for _ in range(count):
        token, cache = step(params, new, cache, jnp.full(rows, done, jnp.int32))
        done += new.shape[1]
        new = token[:, None]
        text.append(np.asarray(new))
    return np.concatenate(text, axis=1)


def draft_block(
    draft: DenseDraft, params: Params, shared, features: np.ndarray, anchor: np.ndarray
) -> Block:
    """Drafts one block at temperature 0.

    Args:
      draft: the draft model.
      params: its parameters.
      shared: SharedHead to use with it.
      features: f32[R, C, M*D], context features of the C tokens before the anchor.
      anchor: i64[R].

    Returns:
      The block.
    """
    rows, length = features.shape[:2]
    zeros, ones = jnp.zeros(rows), jnp.ones(rows)
    sampling = SamplingParams(
        temperature=zeros,
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=ones,
        min_p=zeros,
        seed=jnp.zeros(rows, jnp.uint32),
    )

    @jax.jit
    def run(params: Params, features: jax.Array, anchor: jax.Array) -> Block:
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        k, v = draft.context_kv(params, features, positions)
        start, count = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
        cache = draft.make_cache(rows, length, jnp.float32)
        cache = write_rows(cache, k, v, first_slot=0, start=start, count=count)
        return propose(
            draft, params, shared, cache,
            anchor=anchor, anchor_pos=count, round_index=start, sampling=sampling, coupled=False,
        )  # fmt: skip

    return run(params, jnp.asarray(features), jnp.asarray(anchor, jnp.int32))


def check_train_step(directory: Path) -> list[Result]:
    """Checks one training step of a pair: logits, losses and gradients, `train_step.safetensors`.

    Args:
      directory: the golden folder with `target/` and `draft/`.

    Returns:
      One result per golden array.
    """
    golden = read_arrays(directory / "train_step.safetensors")
    target_config, target_params = load_target(directory / "target")
    shared = LlamaTarget(config=target_config).shared_head(target_params)
    config, params, shared = load_draft(directory / "draft", target_config, shared)
    batch = _train_batch(golden)
    rows = block_rows(config, batch)

    @jax.jit
    def loss_of(params: Params) -> tuple[jax.Array, tuple]:
        hidden = train_backbone(DenseDraft(config=config), params, shared.embedding, batch, rows)
        vocabulary, weights = full_vocabulary(shared), LossConfig()
        total, sums = vocabulary_loss(
            config, weights, params, vocabulary, hidden, rows, batch.anchors, batch.target_hidden
        )
        return total, (sums, hidden)

    (loss, (sums, hidden)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    latent, embedding = markov_block(params.get("markov"), rows.previous, hidden)
    logits = score_vocabulary(hidden, shared.head)
    if latent is not None:
        logits = logits + markov_bias(params["markov"], latent)
    aligned = score_vocabulary(slot_hidden(batch, config.block_size), shared.head)
    arrays = {"draft_logits": logits}
    if config.enable_confidence_head:
        arrays["confidence_logits"] = confidence_logits(params["confidence"], hidden, embedding)
    keep = golden_array(golden, "block_keep_mask")  # dropped blocks hold values of no meaning
    results = [compare_logits(k, v[keep], golden_array(golden, k)[keep]) for k, v in arrays.items()]
    inside = np.asarray(batch.anchors[..., None] + np.arange(1, config.block_size + 1))
    inside = keep[..., None] & (inside < batch.tokens.shape[1])  # these rows have a label
    labels, targets = (golden_array(golden, name) for name in ("target_token_ids", ALIGNED))
    results += [
        compare_logits(ALIGNED, aligned[inside], targets[inside]),
        compare_tokens("target_token_ids", rows.labels[inside], labels[inside]),
        compare_tokens("eval_mask", rows.supervised, golden_array(golden, "eval_mask")),
    ]
    scalars = {"loss": loss}
    for term, ours in (("ce_loss", "ce"), ("l1_loss", "l1"), ("confidence_loss", "bce")):
        scalars[f"term.{term}_num"] = sums.get(ours, jnp.zeros(()))
        scalars[f"term.{term}_den"] = sums["den"] if ours in sums else jnp.zeros(())
    stored = stored_tensors(grads, draft_rules(config))
    scaled = {name: value.reshape(1) for name, value in scalars.items()}
    scaled |= {f"grad.{name}": value for name, value in stored.items()}
    results += [_compare_scaled(name, v, golden_array(golden, name)) for name, v in scaled.items()]
    return results + unknown_arrays(golden, {*arrays, *scaled, *TRAIN_KNOWN}, "")


def _train_batch(golden: Arrays) -> TrainBatch:
    tokens = jnp.asarray(golden_array(golden, "token_ids"), jnp.int32)
    return TrainBatch(
        tokens=tokens,
        loss_mask=jnp.asarray(golden_array(golden, "loss_mask")) > 0,
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        segments=jnp.ones_like(tokens),
        context_features=jnp.asarray(golden_array(golden, "context_features")),
        target_hidden=jnp.asarray(golden_array(golden, "target_last_hidden")),
        anchors=jnp.asarray(golden_array(golden, "anchor_positions"), jnp.int32),
        keep=jnp.asarray(golden_array(golden, "block_keep_mask")),
    )


def _compare_scaled(name: str, got: jax.Array, expected: np.ndarray) -> Result:
    """Compares losses and gradients: relative to the array's largest value."""
    scale = float(np.abs(expected).max(initial=0.0))
    return compare(name, got, expected, tolerance=RELATIVE_TOLERANCE * scale)


def check_outputs(directory: Path) -> list[Result]:
    """Checks `outputs.safetensors`: of a plain target, or of a DeepSeek model."""
    if is_deepseek(read_config_json(directory)):
        return check_deepseek(directory)
    return check_target(directory)


# vectors -> the check that reads them; a folder may hold several
CHECKS: dict[str, Callable[[Path], list[Result]]] = {
    "outputs.safetensors": check_outputs,
    "block_forward.safetensors": check_block_forward,
    "train_step.safetensors": check_train_step,
}


def check_folder(directory: Path) -> list[Result]:
    """Runs every check a golden folder has vectors for.

    Args:
      directory: the golden folder.

    Returns:
      The results of all of them.

    Raises:
      FileNotFoundError: the folder, or a file its kind needs, is missing.
      ValueError: the folder is of no known kind, or a checkpoint in it is not supported.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a folder; give a golden folder.")
    checks = [check for vectors, check in CHECKS.items() if (directory / vectors).is_file()]
    if not checks:
        raise ValueError(
            f"{directory} is not a golden folder of a known kind; expected one of "
            f"{sorted(CHECKS)} in it."
        )
    with jax.default_matmul_precision("highest"):
        return [result for check in checks for result in check(directory)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the folders named on the command line.

    Args:
      arguments: command line; None takes the process's.

    Returns:
      The exit status, 0 when everything agrees.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+", help="a golden folder")
    failed, skipped = 0, 0
    for directory in parser.parse_args(arguments).folders:
        print(directory)
        try:
            results = check_folder(directory)
        except (FileNotFoundError, ValueError) as error:
            print(f"  FAILED: {error}")
            failed += 1
            continue
        for result in results:
            state = "skip  " if result.skipped else "ok    " if result.ok else "FAILED"
            print(f"  {state} {result.name:<38} {result.detail}")
        failed += sum(not result.ok for result in results)
        skipped += sum(result.skipped for result in results)
    verdict = f"{failed} failed" if failed else "all within tolerance"
    print(f"{verdict}, {skipped} not compared" if skipped else verdict)
    return 1 if failed else 0


def _check_hidden(prefix: str, hidden: Sequence[jax.Array], golden: Arrays) -> list[Result]:
    names = sorted(name for name in golden if name.startswith(prefix))
    layers = {f"{prefix}{i}": value for i, value in enumerate(hidden)}
    return [compare_hidden(name, layers.get(name), golden[name]) for name in names]


if __name__ == "__main__":
    sys.exit(main())
