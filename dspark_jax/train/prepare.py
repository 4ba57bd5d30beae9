"""From a config to the arrays a run starts with: target, features, vocabulary, first weights."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from dspark_jax.checkpoint.demo import resolve_model
from dspark_jax.checkpoint.draft import load_draft
from dspark_jax.checkpoint.draft_vocab import reduce_vocabulary
from dspark_jax.checkpoint.fingerprint import TargetFingerprint, fingerprint_target
from dspark_jax.checkpoint.target import load_target
from dspark_jax.config import TargetConfig
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.train.config import DataConfig, TrainConfig
from dspark_jax.train.data import ChatEncoder, Sample, load_samples
from dspark_jax.train.features import FeatureStore, extract_features, open_features
from dspark_jax.train.step import Frozen
from dspark_jax.train.vocabulary import frequent_tokens
from dspark_jax.train.warm_start import (
    carry_markov,
    fit_context,
    inverse_gram,
    logit_metric,
    start_context,
    start_markov,
    token_means,
)
from dspark_jax.types import Params, SharedHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the loop needs besides the config.

    Attributes:
      target: the frozen target, tapping the draft's layers.
      target_params: its parameters, layers split.
      fingerprint: of the target, stored with every export.
      draft: the model to train.
      params: its first weights.
      frozen: embedding, LM head and the hidden-state metric.
      row_counts: i64[Vd], occurrences of each draft row in the training answers, or None.
      samples: tokenised conversations in training order, validation first.
      store: their features, or None when the target runs online.
    """

    target: LlamaTarget
    target_params: Params
    fingerprint: TargetFingerprint
    draft: DenseDraft
    params: Params
    frozen: Frozen
    row_counts: np.ndarray | None
    samples: list[Sample]
    store: FeatureStore | None


def prepare(
    config: TrainConfig,
    progress: Callable[[str], None] = print,
    *,
    warm_start: bool = True,
) -> Prepared:
    """Loads the target and the data and builds the first weights.

    Args:
      config: the run.
      progress: called with one line per stage.
      warm_start: false leaves the weights random, for a run that resumes from a checkpoint.

    Returns:
      See `Prepared`.

    Raises:
      FileNotFoundError: the target, the text or the draft to continue from is missing.
      ValueError: they do not fit each other or the config.
    """
    directory = resolve_model(config.target)
    target_config, target_params = load_target(directory)
    draft = DenseDraft(config=config.draft.build(target_config))
    target = LlamaTarget(config=target_config, tap_layer_ids=draft.config.target_layer_ids)
    samples = ordered_samples(config.data, ChatEncoder(directory), seed=config.seed)
    held_out = config.data.validation_samples
    if len(samples) <= held_out:
        raise ValueError(
            f"validation_samples={held_out} leaves none of {len(samples)} samples to train on."
        )
    progress(f"{len(samples)} samples, {sum(len(s.tokens) for s in samples)} tokens")
    store = None
    if config.data.features_dir is not None:
        store = _features(config, target, target_params, samples, progress)
    answers = np.concatenate([s.tokens[s.loss_mask] for s in samples[held_out:]])
    counts = np.bincount(answers, minlength=target_config.vocab_size)
    shared = target.shared_head(target_params)
    start, size, ids = config.warm_start, draft.config.draft_vocab_size, None
    if size is not None and (start.draft is None or start.choose_vocabulary):
        ids = frequent_tokens(answers, target_config.vocab_size, size)
    if start.draft is not None:
        params, shared = _continue_from(start.draft, draft, target_config, shared, ids)
    else:
        if ids is not None:
            shared = reduce_vocabulary(shared, ids)
        params = jax.jit(draft.init)(jax.random.key(config.seed))
        if warm_start:
            params = _warm_start(
                config, draft, params, shared, target_params, store, samples[held_out:]
            )
    row_counts = counts if shared.target_ids is None else counts[np.asarray(shared.target_ids)]
    frozen = Frozen(shared=shared)
    if config.loss.hidden:
        frozen = Frozen(
            shared=shared,
            metric=logit_metric(shared, row_counts),
            inverse_gram=inverse_gram(shared),
        )
    return Prepared(
        target=target,
        target_params=target_params,
        fingerprint=fingerprint_target(directory, name=config.target),
        draft=draft,
        params=params,
        frozen=frozen,
        row_counts=row_counts,
        samples=samples,
        store=store,
    )


def _continue_from(
    directory: str,
    draft: DenseDraft,
    target_config: TargetConfig,
    whole: SharedHead,
    ids: np.ndarray | None,
) -> tuple[Params, SharedHead]:
    """Weights of an exported draft of the config's architecture, and its vocabulary or `ids`."""
    loaded, params, shared = load_draft(directory, target_config, whole)
    if loaded != draft.config:
        fields = [f.name for f in dataclasses.fields(loaded)]
        differ = [n for n in fields if getattr(loaded, n) != getattr(draft.config, n)]
        raise ValueError(
            f"warm_start.draft={directory} has another architecture than the config; they differ "
            f"in {differ}."
        )
    if ids is not None:
        chosen = reduce_vocabulary(whole, ids)
        if draft.config.markov_rank:
            params["markov"] = carry_markov(params["markov"], shared, chosen)
        shared = chosen
    return params, shared


def ordered_samples(data: DataConfig, encoder: ChatEncoder, *, seed: int) -> list[Sample]:
    """Samples in random order, answers sampled at lower temperature first.

    Args:
      data: file, lengths and how many to keep.
      encoder: the target's tokenizer and template.
      seed: of the order.

    Returns:
      The samples to use; validation takes the first ones.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is damaged or has too few samples.
    """
    samples = load_samples(
        data.train_data,
        encoder,
        max_length=data.max_length,
        min_loss_tokens=data.min_loss_tokens,
        roles=data.roles,
    )
    order = np.random.default_rng(seed).permutation(len(samples))
    samples = sorted((samples[i] for i in order), key=lambda s: s.temperature or 0.0)
    return samples[: data.max_samples]


def _features(
    config: TrainConfig,
    target: LlamaTarget,
    target_params: Params,
    samples: list[Sample],
    progress: Callable[[str], None],
) -> FeatureStore:
    """Opens stored features that cover the samples, or computes them first."""
    directory = Path(config.data.features_dir)
    layers = config.data.feature_layer_ids or config.draft.target_layer_ids
    wanted = tuple(s.id for s in samples)
    if (directory / "meta.json").is_file():
        store = open_features(directory)
        covered = store.ids[: len(wanted)] == wanted and store.done >= len(wanted)
        if covered and set(config.draft.target_layer_ids) <= set(store.tap_layer_ids):
            return store
    tapping = dataclasses.replace(target, tap_layer_ids=layers)
    extract_features(tapping, target_params, samples, directory, progress=progress)
    return open_features(directory)


def _warm_start(
    config: TrainConfig,
    draft: DenseDraft,
    params: Params,
    shared: SharedHead,
    target_params: Params,
    store: FeatureStore | None,
    samples: list[Sample],
) -> Params:
    """Token means for the Markov head, a regression for the context projection."""
    start = config.warm_start
    if not (start.markov or start.context):
        return params
    first = store.offsets[config.data.validation_samples]
    last = store.offsets[config.data.validation_samples + len(samples)]
    at = np.flatnonzero(np.concatenate([s.loss_mask for s in samples]))
    tokens = np.concatenate([s.tokens for s in samples])
    hidden = np.asarray(store.hidden[first:last])
    means, counts, mean = token_means(tokens[at], hidden[at], draft.config.vocab_size)
    if start.markov and draft.config.markov_rank:
        params["markov"] = start_markov(params["markov"], shared, means, counts)
    if not start.context:
        return params
    at = at[at > 0]
    rng = np.random.default_rng(config.seed)
    some = np.sort(rng.choice(at, min(start.samples, len(at)), replace=False))
    columns = [store.tap_layer_ids.index(i) for i in draft.config.target_layer_ids]
    width = draft.config.hidden_size
    taps = store.taps[first + some - 1].reshape(len(some), -1, width)[:, columns]
    norm = np.asarray(target_params["norm"]["weight"])
    wanted = (hidden[some].astype(np.float32) - mean - means[tokens[some]]) / norm
    embeddings = np.asarray(shared.embedding)
    anchors = embeddings[tokens[some]]
    fitted = fit_context(taps.reshape(len(some), -1).astype(np.float32), anchors, wanted)
    mask = embeddings[draft.config.mask_token_id]
    return start_context(params, draft.config, fitted, anchors, mask, norm, mean / norm)
