"""Initial weights that spare a draft trained on little data its first hours.

The Markov head starts from token means: W1[v] is the mean of the target's last hidden state at
the position of token v (less the mean over all), projected onto the leading directions of those
means, and W2 the LM head in that basis. Draft layers may start from layers of the target.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.layers import rope_frequencies
from dspark_jax.types import Params, SharedHead

BIAS_NORM = 8.0  # length of the direction added to every context row; the regression's is about 13
SHARPNESS = 3.0  # factor on the scores, which are at most sqrt(H) without it
OUTPUT_SCALE = 4.0  # of the attention output, against embeddings of about 0.1 per entry


def token_means(
    tokens: np.ndarray, hidden: np.ndarray, vocab_size: int, *, prior: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean last hidden state at each token, less the overall mean and shrunk towards it.

    Args:
      tokens: i32[T], training positions.
      hidden: [T, D], the target's last hidden state at those positions.
      vocab_size: V.
      prior: weight of the overall mean, in occurrences.

    Returns:
      f32[V, D] deviations from the overall mean, i64[V] counts, and f32[D] the overall mean.
    """
    counts = np.bincount(tokens, minlength=vocab_size)
    mean = hidden.mean(axis=0, dtype=np.float64).astype(np.float32)
    order = np.argsort(tokens, kind="stable")
    sums = np.zeros((vocab_size, hidden.shape[1]), np.float32)
    seen, first = np.unique(tokens[order], return_index=True)
    sums[seen] = np.add.reduceat(hidden[order].astype(np.float32), first, axis=0)
    deviations = (sums - counts[:, None] * mean) / (counts[:, None] + prior)
    return deviations.astype(np.float32), counts, mean


def start_markov(
    params: Params, shared: SharedHead, means: np.ndarray, counts: np.ndarray
) -> Params:
    """A vanilla or gated head whose bias is that of the token means, to its rank.

    Args:
      params: the head's random parameters (w1 [V, Q], w2 [Vd, Q]).
      shared: full or reduced LM head.
      means: f32[V, D] of `token_means`.
      counts: i64[V].

    Returns:
      The parameters with w1 and w2 replaced; w2 = head basis.
    """
    rank = params["w1"].shape[1]
    weighted = means * np.sqrt(counts)[:, None]
    _, _, directions = np.linalg.svd(weighted.T @ weighted)
    basis = directions[:rank].T  # [D, Q]
    return params | {
        "w1": jnp.asarray(means @ basis),
        "w2": shared.head @ jnp.asarray(basis),
    }


def carry_markov(params: Params, old: SharedHead, new: SharedHead) -> Params:
    """A trained head moved to another reduced vocabulary.

    Args:
      params: the head's parameters, w2 [Vd, Q] for `old`.
      old: LM head rows [Vd, D] it was trained with.
      new: LM head rows [Vd', D] it shall serve.

    Returns:
      The parameters with w2 [Vd', Q]: trained rows where the token had one; for the others what a
      linear map from LM head rows to w2 rows, fitted on the trained ones, gives.
    """
    fitted = inverse_gram(old) @ (old.head.T @ params["w2"])  # [D, Q]
    rows = jnp.arange(old.head.shape[0]) if old.draft_ids is None else old.draft_ids
    ids = jnp.arange(new.head.shape[0]) if new.target_ids is None else new.target_ids
    at = rows[ids]
    known = at < params["w2"].shape[0]
    kept = params["w2"][jnp.where(known, at, 0)]
    return params | {"w2": jnp.where(known[:, None], kept, new.head @ fitted)}


def logit_metric(shared: SharedHead, row_counts: np.ndarray) -> jax.Array:
    """A matrix [D, D] after which hidden-space distance is distance of centred logits.

    Args:
      shared: full or reduced LM head.
      row_counts: i64[Vd], occurrences of each row's token, weighing the logits.

    Returns:
      R^T of the Gram matrix R^T R, scaled so that its mean diagonal is 1.
    """
    weights = jnp.asarray((row_counts + 1.0) ** 0.5, jnp.float32)
    weights = weights / weights.sum()
    centred = shared.head - (weights[:, None] * shared.head).sum(axis=0)
    gram = jnp.einsum("vd,v,ve->de", centred, weights, centred)
    gram = gram + 1e-4 * jnp.trace(gram) / len(gram) * jnp.eye(len(gram))
    gram = gram * len(gram) / jnp.trace(gram)
    return jnp.linalg.cholesky(gram)


def inverse_gram(shared: SharedHead) -> jax.Array:
    """(head^T head)^-1 [D, D]: with head^T in front, the least-squares inverse of the LM head."""
    gram = shared.head.T @ shared.head
    return jnp.linalg.inv(gram + 1e-6 * jnp.trace(gram) / len(gram) * jnp.eye(len(gram)))


def start_layers(
    params: Params,
    draft: DraftConfig,
    target: TargetConfig,
    target_params: Params,
    layer_ids: tuple[int, ...],
) -> Params:
    """Copies attention and MLP of target layers into the draft's layers.

    Query heads, and key and value heads repeated where the draft has more of them, keep the
    target's weights; norms on Q and K, which a Llama target lacks, start at one.

    Args:
      params: the draft's random parameters.
      draft: its architecture; widths must be the target's.
      target: the target's architecture, without experts.
      target_params: layers split.
      layer_ids: one target layer for each draft layer.

    Returns:
      The parameters with the layers replaced.

    Raises:
      ValueError: the shapes do not allow it.
    """
    same = ("hidden_size", "num_attention_heads", "head_dim", "intermediate_size")
    differ = [n for n in same if getattr(draft, n) != getattr(target, n)]
    fits = draft.num_key_value_heads % target.num_key_value_heads == 0
    if differ or target.moe or not fits or len(layer_ids) != draft.num_hidden_layers:
        raise ValueError(
            f"draft layers cannot start from target layers {list(layer_ids)}: one id per draft "
            f"layer is needed, a dense target, equal {', '.join(same)} (different: {differ}), and "
            "KV heads that are a multiple of the target's."
        )
    repeat = draft.num_key_value_heads // target.num_key_value_heads
    per_group = target.num_attention_heads // target.num_key_value_heads
    layers = []
    for ours, i in zip(params["layers"], layer_ids, strict=True):
        theirs = target_params["layers"][i]
        qkv = theirs["qkv"]  # [D, G, N/G + 2, H]
        kv = jnp.repeat(jnp.moveaxis(qkv[:, :, per_group:], 2, 1), repeat, axis=2)
        layers.append(
            ours
            | {
                "q": qkv[:, :, :per_group].reshape(ours["q"].shape),
                "kv": kv,
                "o": theirs["o"].reshape(ours["o"].shape),
                "mlp": theirs["mlp"],
                "attn_norm": theirs["attn_norm"],
                "mlp_norm": theirs["mlp_norm"],
            }
        )
    return params | {"layers": tuple(layers)}


def fit_context(
    taps: np.ndarray, embeddings: np.ndarray, wanted: np.ndarray, *, ridge: float = 300.0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Ridge regression of what the Markov head leaves over on the tapped states before the anchor.

    Args:
      taps: [n, M*D], tapped states at position a - 1.
      embeddings: [n, D], the anchor's own embedding, a covariate whose weights are not returned.
      wanted: f32[n, D], the target's last hidden state at a, less the Markov part.
      ridge: penalty on weights of unit-variance inputs, in samples.

    Returns:
      f32[M*D, D], weights on the raw taps; f32[M*D], weights whose output is nearly 1 on every row
      (a bias, which the projection itself does not have); and the root mean square of the
      fitted values.
    """
    width = taps.shape[1]
    inputs = np.concatenate([taps, embeddings], axis=1).astype(np.float32)
    mean, spread = inputs.mean(axis=0), inputs.std(axis=0) + 1e-6
    inputs = (inputs - mean) / spread
    gram = inputs.T @ inputs + ridge * np.eye(inputs.shape[1], dtype=np.float32)
    weights = np.linalg.solve(gram, inputs.T @ (wanted - wanted.mean(axis=0)))
    scaled = taps[:, :width] / spread[:width]
    gram = scaled.T @ scaled + ridge * np.eye(width, dtype=np.float32)
    ones = np.linalg.solve(gram, scaled.sum(axis=0))
    spread = spread[:width]
    size = float(np.sqrt(np.square(inputs[:, :width] @ weights[:width]).mean()))
    weights, ones = weights[:width] / spread[:, None], ones / spread
    weights -= np.outer(ones, mean[:width] @ weights)  # inputs were centred for the fit
    return weights.astype(np.float32), ones, size


def start_context(
    params: Params,
    draft: DraftConfig,
    fitted: tuple[np.ndarray, np.ndarray, float],
    embeddings: np.ndarray,
    mask_embedding: np.ndarray,
    norm_weight: np.ndarray,
    mean: np.ndarray,
) -> Params:
    """Sets the draft up to hand the regression's answer to the rows of the block.

    The context projection is the regression plus a constant in one direction that embeddings
    (and, tied, LM head rows) lack. Keys read only that direction and queries one in which all
    block rows are positive, so that after their norms both are constant and the rotary embedding
    alone decides: every row looks at the last context row.
    Values and outputs are the identity, split over the heads, large enough to outweigh the row's
    own embedding; the constant direction also brings in the mean hidden state; MLPs start silent;
    the final norm is the target's, damped to the regression's size.

    Args:
      params: the draft's random parameters.
      draft: its architecture; N = G and N * H = D.
      fitted: of `fit_context`, outputs in units of the target's final norm.
      embeddings: f32[n, D], embeddings of tokens as frequent as in the training text.
      mask_embedding: f32[D].
      norm_weight: [D], weight of the target's final norm.
      mean: f32[D], the target's mean last hidden state, in the regression's units.

    Returns:
      The parameters.

    Raises:
      ValueError: the heads do not tile the width.
    """
    heads, width, head_dim = draft.num_attention_heads, draft.hidden_size, draft.head_dim
    if draft.num_key_value_heads != heads or heads * head_dim != width:
        raise ValueError(
            f"the context warm start needs as many KV heads as query heads ({heads}) and heads "
            f"that tile the width; got {draft.num_key_value_heads} KV heads of {head_dim}, "
            f"width {width}."
        )
    weights, ones, spread = fitted
    size = np.sqrt(spread**2 + np.square(mean).mean())
    token, mask, context = _row_directions(embeddings, mask_embedding, draft.rms_norm_eps)
    kinds, _ = np.linalg.qr(np.stack([token, mask], axis=1))
    inner = np.eye(width, dtype=np.float32) - kinds @ kinds.T
    key = _pattern(draft, 0.0)
    query = np.outer(token + mask, _pattern(draft, -1.0))
    noise = 0.1
    eye = jnp.eye(width)
    layers = []
    for layer in params["layers"]:
        q = layer["q"] * noise + jnp.asarray(query)[:, None, :]
        k = layer["kv"][:, 0] * noise + jnp.asarray(np.outer(context, key))[:, None, :]
        v = eye.reshape(width, heads, head_dim)
        o = OUTPUT_SCALE * (eye + np.outer(context, mean) / BIAS_NORM)
        layers.append(
            layer
            | {
                "q": q,
                "kv": jnp.stack([k, v], axis=1),
                "o": o.reshape(heads, head_dim, width),
                "q_norm": {"weight": jnp.full(head_dim, SHARPNESS)},
                "mlp": layer["mlp"] | {"down": jnp.zeros_like(layer["mlp"]["down"])},
            }
        )
    return params | {
        "context_proj": jnp.asarray(weights @ inner + np.outer(ones, BIAS_NORM * context)),
        "layers": tuple(layers),
        "norm": {"weight": jnp.asarray(size * norm_weight)},
    }


def _row_directions(
    embeddings: np.ndarray, mask_embedding: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Directions that are 1 on token rows and 0 on mask rows, the reverse, and 0 on both."""
    rows = np.concatenate([embeddings, np.tile(mask_embedding, (len(embeddings), 1))])
    rows = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + eps)
    kind = np.zeros((len(rows), 2), np.float32)
    kind[: len(embeddings), 0] = 1
    kind[len(embeddings) :, 1] = 1
    gram = rows.T @ rows
    ridge = 0.01 * len(rows) * np.eye(rows.shape[1], dtype=np.float32)
    token, mask = np.linalg.solve(gram + ridge, rows.T @ kind).T
    neither = np.linalg.eigh(gram)[1][:, 0]
    return token, mask, neither


def _pattern(draft: DraftConfig, distance: float) -> np.ndarray:
    """A head vector of norm sqrt(H) on the rotary pairs whose frequencies suit a short look back.

    The score of a query of `distance` against a key of 0, some rows before it, is the mean over
    the pairs of cos(frequency * (rows - distance)). With -1 it falls steeply over the first rows,
    so that the nearest row with a key gets nearly all the weight, and stays low after them.
    """
    frequencies, _ = rope_frequencies(draft.rope, draft.head_dim)
    half = draft.head_dim // 2
    pairs = [i for i in range(half) if 0.07 < frequencies[i] < 0.5]
    if not pairs:
        raise ValueError("the context warm start found no rotary pair of a suitable frequency.")
    vector = np.zeros(draft.head_dim, np.float32)
    for i in pairs:
        angle = -frequencies[i] * distance
        vector[i], vector[i + half] = np.cos(angle), np.sin(angle)
    return vector * np.sqrt(draft.head_dim / len(pairs))
