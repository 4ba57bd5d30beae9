"""The draft's backbone over all anchors of a batch at once.

Each block sees the context rows of its own document before its anchor, and its own rows. The
scores of all blocks against a whole sequence would be A*K by S, so blocks are processed in chunks
and their scores recomputed in the backward pass.
"""

import jax
import jax.numpy as jnp

from dspark_jax.draft.dense import DenseDraft, DraftLayer
from dspark_jax.layers import RmsNorm, rope_angles
from dspark_jax.train.blocks import BlockRows, TrainBatch
from dspark_jax.types import Params

_MASKED = -1e30
ANCHOR_CHUNK = 64  # blocks whose scores exist at one time, per sequence


def context_mask(batch: TrainBatch, window: int | None) -> jax.Array:
    """Which context rows each block sees: bool[B, A, S].

    Args:
      batch: see `TrainBatch`.
      window: only the last `window` rows before the anchor; None sees all.

    Returns:
      True where row s is before the anchor, in its document and inside the window.
    """
    row = jnp.arange(batch.tokens.shape[1])
    anchor = batch.anchors[..., None]
    own = jnp.take_along_axis(batch.segments, batch.anchors, axis=1)[..., None]
    seen = (row < anchor) & (batch.segments[:, None, :] == own) & batch.keep[..., None]
    return seen if window is None else seen & (row >= anchor - window)


def block_attention(
    q: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    chunk: int = ANCHOR_CHUNK,
) -> jax.Array:
    """Attention of every block over its visible context and its own K rows.

    Args:
      q: [B, A, K, N, H], rotated.
      own_k: [B, A, K, G, H], rotated keys of the block rows.
      own_v: [B, A, K, G, H].
      context_k: [B, S, G, H], rotated.
      context_v: [B, S, G, H].
      mask: bool[B, A, S] of `context_mask`.
      scale: factor on the scores.
      chunk: blocks per step; A above it is processed in steps that keep no scores.

    Returns:
      [B, A, K, N, H].
    """
    batch, anchors, rows, heads, width = q.shape
    groups = own_k.shape[3]

    def attend(q: jax.Array, own_k: jax.Array, own_v: jax.Array, mask: jax.Array) -> jax.Array:
        count = q.shape[1]
        q = q.reshape(batch, count, rows, groups, heads // groups, width)
        q = q.transpose(0, 3, 1, 2, 4, 5)  # [B, G, c, K, n, H]
        far = jnp.einsum("bgaknh,bsgh->bgakns", q, context_k) * scale
        far = jnp.where(mask[:, None, :, None, None, :], far, _MASKED)
        near = jnp.einsum("bgaknh,bajgh->bgaknj", q, own_k) * scale
        top = jnp.maximum(far.max(axis=-1), near.max(axis=-1))
        top = jax.lax.stop_gradient(top)[..., None]
        far, near = jnp.exp(far - top), jnp.exp(near - top)
        total = far.sum(axis=-1, keepdims=True) + near.sum(axis=-1, keepdims=True)
        out = jnp.einsum("bgakns,bsgh->bgaknh", far, context_v)
        out = (out + jnp.einsum("bgaknj,bajgh->bgaknh", near, own_v)) / total
        return out.transpose(0, 2, 3, 1, 4, 5).reshape(batch, count, rows, heads, width)

    if anchors <= chunk:
        return attend(q, own_k, own_v, mask)
    steps = -(-anchors // chunk)
    spare = steps * chunk - anchors

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, spare)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, steps, chunk, *x.shape[2:]), 1, 0)

    step = jax.checkpoint(lambda args: attend(*args))
    out = jax.lax.map(step, tuple(split(x) for x in (q, own_k, own_v, mask)))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, steps * chunk, rows, heads, width)
    return out[:, :anchors]


def train_backbone(
    draft: DenseDraft,
    params: Params,
    embedding: jax.Array,
    batch: TrainBatch,
    rows: BlockRows,
) -> jax.Array:
    """h_k of every block.

    Args:
      draft: the model.
      params: its parameters.
      embedding: [V, D], the target's, frozen.
      batch: sequences and anchors.
      rows: of `block_rows`.

    Returns:
      block_hidden [B, A, K, D] after the final norm.

    Source: DeepSpec Qwen3DSparkModel training forward.
    """
    cfg = draft.config
    context = draft.project_context(params, batch.context_features)
    far_angles = rope_angles(cfg.rope, cfg.head_dim, batch.positions)
    angles = rope_angles(cfg.rope, cfg.head_dim, rows.positions)
    mask = context_mask(batch, cfg.sliding_window)
    x = embedding[rows.input_ids]
    for layer_params in params["layers"]:
        layer = DraftLayer(cfg)
        far_k, far_v = layer.apply(
            {"params": layer_params}, context, far_angles, method="keys_values"
        )

        def attend_fn(q: jax.Array, k: jax.Array, v: jax.Array, far: tuple = (far_k, far_v)):
            return block_attention(q, k, v, *far, mask, scale=cfg.head_dim**-0.5)

        x = layer.apply({"params": layer_params}, x, angles, attend_fn)
    return RmsNorm(cfg.rms_norm_eps).apply({"params": params["norm"]}, x)
