"""Attention of DeepSeek V4 and V4.1 targets: a window of tokens and rows of compressed context.

A source layer makes one row for every `ratio` tokens, and a key per row; index queries score the
keys and choose the rows that a token sees beside its window. Layers of V4.1 that are no source use
the rows and the choice of the layer before them. In V4 every layer with rows is a source, some of
them without index: they see all rows. A row is complete, and visible, from the last of its tokens
on.

Before it rounds to FP4, the reference of V4 rotates index keys and queries by one orthogonal
matrix. Here nothing is rounded and scores are the same without it.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config_deepseek_target import OVERLAPPING_RATIO, DeepseekTargetConfig
from dspark_jax.layers import KERNEL_INIT, RmsNorm, rotate_tail

_MASKED = -1e30  # finite, as the sink alone may be visible
_QUERY_EPS = 1e-6  # of V4's norm of each query head, whatever rms_norm_eps is


@flax.struct.dataclass
class Compressed:
    """What a source layer leaves to those after it; C rows for T tokens."""

    rows: jax.Array  # [R, C, H], rotated; keys and values
    index_keys: jax.Array | None  # [R, C, h], rotated; None: there is no choice
    chosen: jax.Array  # bool[R, T, C], rows that each token sees
    candidates: jax.Array | None = None  # bool[R, T, C], rows later layers may choose; None: all


class Compressor(nn.Module):
    """Rows of context, before rotation: kernels kv and, for more than one token, gate, [D, H].

    V4 adds a bias [ratio, H] by place in the group to the gate. Where its rows overlap, all of
    these have 2H channels: the first H are for a token's part in the row after its own.

    Source: DeepSeek V4 and V4.1 inference code, `Compressor`.
    """

    ratio: int  # tokens per row
    head_dim: int
    norm_eps: float
    placed: bool = False  # V4

    @property
    def overlaps(self) -> bool:
        """Whether a row also takes in the tokens of the one before."""
        return self.placed and self.ratio == OVERLAPPING_RATIO

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[R, T, D] -> [R, T // ratio, H]: per channel, a softmax-weighted mean of the tokens."""
        kv = jnp.einsum("rtd,dh->rth", x, self._kernel("kv", x.shape[-1]))
        if self.ratio > 1:
            gate = jnp.einsum("rtd,dh->rth", x, self._kernel("gate", x.shape[-1]))
            gate, kv = self._groups(gate), self._groups(kv)
            if self.placed:
                gate = gate + self._kernel("bias", self.ratio).astype(jnp.float32)
            if self.overlaps:
                gate, kv = self._with_previous(gate, -jnp.inf), self._with_previous(kv, 0.0)
            kv = jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2).astype(x.dtype)
        return RmsNorm(self.norm_eps, round_last=True, name="norm")(kv)

    def _kernel(self, name: str, inputs: int) -> jax.Array:
        channels = self.head_dim * (2 if self.overlaps else 1)
        return self.param(name, KERNEL_INIT, (inputs, channels))

    def _with_previous(self, x: jax.Array, filler: float) -> jax.Array:
        """[R, C, ratio, 2H] -> [R, C, 2 ratio, H]; nothing comes before the first group."""
        before = jnp.pad(
            x[:, :-1, :, : self.head_dim], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=filler
        )
        return jnp.concatenate([before[:, : x.shape[1]], x[..., self.head_dim :]], axis=2)

    def _groups(self, x: jax.Array) -> jax.Array:
        """[R, T // ratio, ratio, H] in float32; tokens of an unfinished group are left out."""
        count = x.shape[1] // self.ratio
        x = x[:, : count * self.ratio].astype(jnp.float32)
        return x.reshape(x.shape[0], count, self.ratio, x.shape[-1])


class IndexKeys(nn.Module):
    """Keys of the rows, from their values before rotation: kernel k [H, h] and k_norm."""

    head_dim: int
    norm_eps: float

    @nn.compact
    def __call__(self, latents: jax.Array, angles: jax.Array) -> jax.Array:
        """[R, C, H], f32[R, C, 2, rope/2] -> [R, C, h], rotated."""
        kernel = self.param("k", KERNEL_INIT, (latents.shape[-1], self.head_dim))
        keys = jnp.einsum("rch,hi->rci", latents, kernel)
        keys = RmsNorm(self.norm_eps, round_last=True, name="k_norm")(keys)
        return rotate_tail(keys[..., None, :], angles)[..., 0, :]


class IndexScores(nn.Module):
    """Scores of the rows for every token: kernels q [r, heads, h] and weights [D, heads].

    Source: DeepSeek V4.1 inference code, `Indexer`.
    """

    heads: int
    head_dim: int

    @nn.compact
    def __call__(
        self, x: jax.Array, latent_q: jax.Array, angles: jax.Array, keys: jax.Array
    ) -> jax.Array:
        """Scores.

        Args:
          x: [R, T, D], what the attention reads.
          latent_q: [R, T, r], its queries at low rank.
          angles: f32[R, T, 2, rope/2].
          keys: [R, C, h].

        Returns:
          f32[R, T, C], the weighted sum over heads of the positive parts of q k.
        """
        kernel = self.param("q", KERNEL_INIT, (latent_q.shape[-1], self.heads, self.head_dim))
        weigh = self.param("weights", KERNEL_INIT, (x.shape[-1], self.heads))
        q = rotate_tail(jnp.einsum("rtq,qih->rtih", latent_q, kernel), angles)
        weight = jnp.einsum("rtd,di->rti", x, weigh).astype(jnp.float32)
        weight = weight * (self.head_dim * self.heads) ** -0.5
        products = jnp.einsum("rtih,rch->rtic", q, keys, preferred_element_type=jnp.float32)
        return jnp.einsum("rtic,rti->rtc", jax.nn.relu(products), weight)


def complete_rows(tokens: int, rows: int, ratio: int) -> jax.Array:
    """bool[T, C]: the token at position t sees the rows that end at or before it."""
    return jnp.arange(rows) < ((jnp.arange(tokens) + 1) // ratio)[:, None]


def choose_rows(scores: jax.Array, allowed: jax.Array, count: int) -> jax.Array:
    """The best rows for every token.

    Args:
      scores: f32[R, T, C].
      allowed: bool[R, T, C].
      count: at most so many.

    Returns:
      bool[R, T, C]; of equal scores, the earlier row is chosen.
    """
    if scores.shape[-1] <= count:
        return allowed
    _, best = jax.lax.top_k(jnp.where(allowed, scores, -jnp.inf), count)
    row, token = jnp.ogrid[: scores.shape[0], : scores.shape[1]]
    chosen = jnp.zeros(scores.shape, bool).at[row[..., None], token[..., None], best].set(True)
    return chosen & allowed


def choose_blocks(scores: jax.Array, visible: jax.Array, *, count: int, size: int) -> jax.Array:
    """Candidate rows: the best blocks of neighbouring rows, the newest always among them.

    Args:
      scores: f32[R, T, C].
      visible: bool[T, C], a prefix for every token.
      count: blocks at most.
      size: rows per block; the last block may be smaller.

    Returns:
      bool[R, T, C]; a block's score is its best visible row's.

    Source: DeepSeek V4.1 inference code, candidates of `Indexer`.
    """
    rows = scores.shape[-1]
    blocks = -(-rows // size)
    best = jnp.where(visible, scores, -jnp.inf)
    best = jnp.pad(best, ((0, 0), (0, 0), (0, -rows % size)), constant_values=-jnp.inf)
    best = best.reshape(*scores.shape[:2], blocks, size).max(axis=-1)
    seen = visible.sum(axis=-1)
    newest = jnp.arange(blocks) == ((seen - 1) // size)[:, None]
    best = jnp.where(newest, jnp.inf, best)
    chosen = choose_rows(best, best > -jnp.inf, count)
    return jnp.repeat(chosen, size, axis=-1)[..., :rows] & visible


def attend_rows(
    q: jax.Array, rows: jax.Array, seen: jax.Array, sink: jax.Array, scale: float
) -> jax.Array:
    """Attention over rows that are key and value at once, a list of its own for every token.

    Args:
      q: [R, T, N, H], rotated.
      rows: [R, C, H], rotated.
      seen: bool[R, T, C].
      sink: f32[N], a logit per head that takes part in the sum and carries no value.
      scale: factor on the scores, not on the sink.

    Returns:
      [R, T, N, H] in q's type.

    Source: DeepSeek V4.1 inference code, `sparse_attn`.
    """
    scores = jnp.einsum("rtnh,rch->rntc", q, rows, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None], scores, _MASKED)
    sink = sink.astype(jnp.float32)[:, None, None]
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
    probs = jnp.exp(scores - top)
    probs = probs / (probs.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))
    out = jnp.einsum("rntc,rch->rtnh", probs, rows, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


class TargetAttention(nn.Module):
    """Attention of one layer; the kernels beside the sources' are those of the draft's attention.

    q_a [D, r], q_b [r, N, H], kv [D, H], sink [N], o_a [O, N/O*H, o] and o_b [O, o, D] with O
    output groups of rank o.

    Source: DeepSeek V4.1 inference code, `Attention`.
    """

    config: DeepseekTargetConfig
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: jax.Array, compressed: Compressed | None
    ) -> tuple[jax.Array, Compressed | None]:
        """Attention of all tokens of a sequence.

        Args:
          x: [R, T, D], positions 0..T-1.
          angles: f32[1, T, 2, rope/2], of this layer's rotary settings.
          compressed: what the layers before left; None before the first source.

        Returns:
          [R, T, D], and what the layers after this one will find.
        """
        cfg = self.config
        width, heads, head_dim, groups = (
            x.shape[-1],
            cfg.num_attention_heads,
            cfg.head_dim,
            cfg.o_groups,
        )
        q_a = self.param("q_a", KERNEL_INIT, (width, cfg.q_lora_rank))
        q_b = self.param("q_b", KERNEL_INIT, (cfg.q_lora_rank, heads, head_dim))
        kv = self.param("kv", KERNEL_INIT, (width, head_dim))
        sink = self.param("sink", nn.initializers.zeros_init(), (heads,))
        o_a = self.param("o_a", KERNEL_INIT, (groups, heads // groups * head_dim, cfg.o_lora_rank))
        o_b = self.param("o_b", KERNEL_INIT, (groups, cfg.o_lora_rank, width))
        latent_q = self._norm("q_norm")(jnp.einsum("rtd,dq->rtq", x, q_a))
        q = jnp.einsum("rtq,qnh->rtnh", latent_q, q_b)
        if not cfg.single_pass:
            size = jnp.mean(jnp.square(q.astype(jnp.float32)), axis=-1, keepdims=True)
            q = (q * jax.lax.rsqrt(size + _QUERY_EPS)).astype(x.dtype)
        q = rotate_tail(q, angles)
        rows = self._norm("kv_norm")(jnp.einsum("rtd,dh->rth", x, kv))
        rows = rotate_tail(rows[..., None, :], angles)[..., 0, :]
        at = jnp.arange(x.shape[1])
        seen = (at <= at[:, None]) & (at > at[:, None] - cfg.sliding_window)
        seen = jnp.broadcast_to(seen, (x.shape[0], *seen.shape))
        if cfg.compress_ratios[self.layer]:
            compressed = self._sources(x, latent_q, angles, compressed)
            rows = jnp.concatenate([rows, compressed.rows], axis=1)
            seen = jnp.concatenate([seen, compressed.chosen], axis=-1)
        out = attend_rows(q, rows, seen, sink, head_dim**-0.5)
        out = rotate_tail(out, angles, inverse=True)
        out = out.reshape(*x.shape[:2], groups, -1)
        out = jnp.einsum("rtgi,gio->rtgo", out, o_a)
        return jnp.einsum("rtgo,god->rtd", out, o_b), compressed

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.config.rms_norm_eps, round_last=True, name=name)

    def _sources(
        self, x: jax.Array, latent_q: jax.Array, angles: jax.Array, compressed: Compressed | None
    ) -> Compressed:
        """Makes rows and keys, and chooses among them, where this layer is a source."""
        cfg, ratio = self.config, self.config.compress_ratios[self.layer]
        if self.layer in cfg.kv_source_layer_ids:
            compressed = self._make_rows(x, angles)
        if self.layer not in cfg.index_source_layer_ids:
            return compressed
        index = IndexScores(cfg.index_n_heads, cfg.index_head_dim, name="index_scores")
        scores = index(x, latent_q, angles, compressed.index_keys)
        visible = complete_rows(x.shape[1], scores.shape[-1], ratio)
        allowed = jnp.broadcast_to(visible, scores.shape)
        if compressed.candidates is not None:
            allowed = allowed & compressed.candidates
        if self.layer == cfg.candidate_source_layer_id:  # its own choice is not limited
            candidates = choose_blocks(
                scores, visible, count=cfg.candidate_topk_blocks, size=cfg.candidate_block_size
            )
            compressed = compressed.replace(candidates=candidates)
        return compressed.replace(chosen=choose_rows(scores, allowed, cfg.index_topk))

    def _make_rows(self, x: jax.Array, angles: jax.Array) -> Compressed:
        """Rows and, for a choice among them, keys: of their values in V4.1, on their own in V4."""
        cfg, ratio = self.config, self.config.compress_ratios[self.layer]
        settings = dict(ratio=ratio, norm_eps=cfg.rms_norm_eps, placed=not cfg.single_pass)
        latents = Compressor(head_dim=cfg.head_dim, name="compressor", **settings)(x)
        first = angles[:, ::ratio][:, : latents.shape[1]]  # a row is rotated as its first token
        keys = None
        if cfg.single_pass:
            keys = IndexKeys(cfg.index_head_dim, cfg.rms_norm_eps, name="index_keys")(
                latents, first
            )
        elif self.layer in cfg.index_source_layer_ids:
            keys = Compressor(head_dim=cfg.index_head_dim, name="index_keys", **settings)(x)
            keys = rotate_tail(keys[..., None, :], first)[..., 0, :]
        visible = complete_rows(x.shape[1], latents.shape[1], ratio)
        return Compressed(
            rows=rotate_tail(latents[..., None, :], first)[..., 0, :],
            index_keys=keys,
            chosen=jnp.broadcast_to(visible, (x.shape[0], *visible.shape)),
        )
