"""The arrays that cross files, and the letters their shapes are written in.

R requests in the round, S slots, T flat tokens, W rows per request in one forward, K block rows,
V vocabulary (Vd: a draft's reduced one), D model width, N query heads, G KV heads, H head width,
F MLP width, L layers, M tapped layers, Q Markov rank, A anchors per sequence, E experts, C context
capacity per slot, P pages, Z page size, B training batch.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

Params = dict[str, Any]  # nested dict of arrays


@flax.struct.dataclass
class SharedHead:
    """Embedding and LM head, owned by the target and used by the draft.

    `target_ids` is i32[Vd] for a draft with a reduced output vocabulary: row i of `head` scores
    target token target_ids[i]; `draft_ids` i32[V] is the inverse, Vd where there is no row.
    """

    embedding: jax.Array  # [V, D]
    head: jax.Array  # [V, D], or [Vd, D] with `target_ids`
    target_ids: jax.Array | None = None
    draft_ids: jax.Array | None = None


@flax.struct.dataclass
class TargetOutput:
    """What one target forward over W rows per request returns."""

    hidden: jax.Array  # [R, W, D], after the final norm
    context_features: jax.Array  # [R, W, M*D], residual stream after the tapped layers
    new_k: jax.Array | None  # [L, R, W, G, H], rotated keys of the W rows, not yet in the cache
    new_v: jax.Array | None  # [L, R, W, G, H]
    cache: Any = None  # a paged cache has the rows already; new_k and new_v are None then


@flax.struct.dataclass
class Packing:
    """Rows of R requests laid out flat: request 0's rows, then request 1's, then padding.

    `index` inverts it: index[r, w] is the flat row of request r's row w, T where there is none.
    """

    request: jax.Array  # i32[T], 0 for padding
    offset: jax.Array  # i32[T], row within the request, 0 for padding
    index: jax.Array  # i32[R, W]

    @classmethod
    def of(cls, rows: jax.Array, width: int, total: int) -> "Packing":
        """Lays rows end to end.

        Args:
          rows: i32[R], of each request, 0..W.
          width: W.
          total: T, at least the sum of rows.

        Returns:
          The packing.
        """
        ends = jnp.cumsum(rows)
        flat = jnp.arange(total)
        request = jnp.searchsorted(ends, flat, side="right").astype(jnp.int32)
        real = flat < ends[-1]
        request = jnp.where(real, request, 0)
        starts = ends - rows
        offset = jnp.arange(width)
        index = jnp.where(offset < rows[:, None], starts[:, None] + offset, total)
        return cls(
            request=request,
            offset=jnp.where(real, flat - starts[request], 0).astype(jnp.int32),
            index=index,
        )

    @property
    def rows(self) -> jax.Array:
        """i32[R], rows of each request."""
        return (self.index < self.request.shape[0]).sum(axis=1, dtype=jnp.int32)

    @property
    def real(self) -> jax.Array:
        """bool[T], False for padding."""
        return jnp.arange(self.request.shape[0]) < self.rows.sum()

    def pack(self, rows: jax.Array) -> jax.Array:
        """[R, W, ..] -> [T, ..]; padding repeats request 0's row 0."""
        return rows[self.request, self.offset]

    def unpack(self, flat: jax.Array) -> jax.Array:
        """[T, ..] -> [R, W, ..], zeros where a request has no such row."""
        return flat.at[self.index].get(mode="fill", fill_value=0)


@flax.struct.dataclass
class SamplingParams:
    """Per-request sampling settings; neutral values switch a filter off."""

    temperature: jax.Array  # f32[R]; 0 is greedy
    top_k: jax.Array  # i32[R]; 0 is off
    top_p: jax.Array  # f32[R]; 1 is off
    min_p: jax.Array  # f32[R]; 0 is off
    seed: jax.Array  # u32[R]


@flax.struct.dataclass
class Block:
    """One drafted block, before anything is verified."""

    draft_tokens: jax.Array  # i32[R, K], target vocabulary ids
    draft_log_probs: jax.Array  # f32[R, K, Vd], q: what each draft was drawn from
    draft_logits: jax.Array  # f32[R, K, Vd], bias included, before the warp
    base_logits: jax.Array  # f32[R, K, Vd], before the Markov bias
    block_hidden: jax.Array  # [R, K, D]
    confidence_logits: jax.Array | None  # f32[R, K]; None without a confidence head
    presampled_logits: jax.Array | None = None  # f32[R, K], the same before any draft was drawn


@flax.struct.dataclass
class ScheduleTables:
    """What scheduling has measured; data of a round, so that it can change without compiling."""

    steps_per_s: jax.Array  # f32[R*(K+1)+1], SPS by verified rows; entry 0: nothing is drafted
    sts_temperatures: jax.Array  # f32[K], confidence logits are divided by them
    sts_temperatures_presampled: jax.Array  # f32[K], the same for presampled confidence logits
    neutral_confidence: jax.Array  # f32[K], believed of a request that has not drafted yet


@flax.struct.dataclass
class AcceptResult:
    """The outcome of verifying one block per request."""

    accept_len: jax.Array  # i32[R], drafts accepted, 0..verify_len
    bonus_token: jax.Array  # i32[R], the target's own token, next anchor


@flax.struct.dataclass
class PairParams:
    """Parameters of a target and its draft; the draft's shared head points into the target's."""

    target: Params
    draft: Params | None = None
    shared: SharedHead | None = None


@flax.struct.dataclass
class RoundOutput:
    """What the host learns from a round; row r is meaningless where the slot was inactive."""

    tokens: jax.Array  # i32[R, K+1], accepted drafts then the bonus token
    emit_len: jax.Array  # i32[R], accept_len + 1; 0 where inactive
    accept_len: jax.Array  # i32[R]
    verify_len: jax.Array  # i32[R]
    confidence: jax.Array  # f32[R, K], what the schedule went by; ones without a confidence head
    presampled: jax.Array  # f32[R, K], its estimate before any draft; the same where not made
    verify_rows: jax.Array  # i32[], rows the target computed
    probe: jax.Array  # bool[], all drafts were verified whatever the policy says
    bypassed: jax.Array  # bool[], nothing was drafted
