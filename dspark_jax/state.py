"""What a decoder is, and what its slots hold between rounds."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.draft.protocol import Draft
from dspark_jax.history import History, forget, init_history
from dspark_jax.kv_cache import KVCache, PagedCache, WindowCache
from dspark_jax.pending import Pending, init_pending
from dspark_jax.schedule import ScheduleConfig
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.types import AcceptResult, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """What is static about decoding: the models, the policy and the verification rule.

    Attributes:
      target: taps the draft's layers when there is a draft.
      draft: None decodes plainly.
      schedule: the scheduling policy.
      rejection_sample_method: "standard", "block" or "coupled".
    """

    target: LlamaTarget
    draft: Draft | None = None
    schedule: ScheduleConfig = ScheduleConfig()
    rejection_sample_method: str = "standard"

    def __post_init__(self):
        self.schedule.check_lossless(self.rejection_sample_method)
        if self.draft and self.target.tap_layer_ids != self.draft.config.target_layer_ids:
            raise ValueError(
                f"the target taps layers {self.target.tap_layer_ids}, but the draft reads "
                f"{self.draft.config.target_layer_ids}; build the target with the draft's ids."
            )
        if self.target.paged and self.draft:
            self.schedule.check_paged()
        if self.draft and not self.draft.config.enable_confidence_head:
            self.schedule.check_source()

    @property
    def num_drafts(self) -> int:
        """K, drafts per round; 0 without a draft."""
        return self.draft.config.num_drafts if self.draft else 0


@flax.struct.dataclass
class DecodeState:
    """Everything about S slots that lives on the device between rounds."""

    target_kv: KVCache | PagedCache
    context_kv: KVCache | WindowCache | None  # the draft's view of the context
    anchor: jax.Array  # i32[S], last committed token
    anchor_pos: jax.Array  # i32[S], its position = valid rows in the caches, pending ones included
    round_index: jax.Array  # i32[S], rounds run by the request
    remaining: jax.Array  # i32[S], tokens still wanted
    active: jax.Array  # bool[S]
    sampling: SamplingParams  # [S]
    history: History | None  # for the schedule
    pending: Pending | None  # draft context to be made, where rounds may do without drafts


def init_state(decoder: Decoder, slots: int, capacity: int, dtype: jnp.dtype) -> DecodeState:
    """Empty slots.

    Args:
      decoder: the models.
      slots: S.
      capacity: C, tokens per slot, prompt and answer together.
      dtype: type of the caches.

    Returns:
      A state with no active slot.
    """
    draft = decoder.draft
    pending = None
    if draft is not None and decoder.schedule.min_predicted_gain is not None:
        width = len(decoder.target.tap_layer_ids) * decoder.target.config.hidden_size
        pending = init_pending(slots, width, dtype, draft.config.sliding_window)

    def ints() -> jax.Array:  # a buffer each: donating one array twice is an error
        return jnp.zeros(slots, jnp.int32)

    def floats() -> jax.Array:
        return jnp.zeros(slots, jnp.float32)

    return DecodeState(
        target_kv=decoder.target.make_cache(slots, capacity, dtype),
        context_kv=draft.make_cache(slots, capacity, dtype) if draft else None,
        anchor=ints(),
        anchor_pos=ints(),
        round_index=ints(),
        remaining=ints(),
        active=jnp.zeros(slots, bool),
        sampling=SamplingParams(
            temperature=floats(), top_k=ints(), top_p=floats() + 1, min_p=floats(),
            seed=jnp.zeros(slots, jnp.uint32),
        ),
        history=init_history(decoder.schedule, slots, decoder.num_drafts) if draft else None,
        pending=pending,
    )  # fmt: skip


def admit(
    state: DecodeState,
    slot: jax.Array,
    anchor: jax.Array,
    anchor_pos: jax.Array,
    remaining: jax.Array,
    sampling: SamplingParams,
) -> DecodeState:
    """Makes a prefilled slot take part in rounds.

    Args:
      state: donated.
      slot: i32[].
      anchor: i32[], last token of the prompt.
      anchor_pos: i32[], its position.
      remaining: i32[], tokens to generate, at least 1.
      sampling: scalars for this request.

    Returns:
      The state with the slot active, its counters fresh and its history forgotten.
    """
    return state.replace(
        anchor=state.anchor.at[slot].set(anchor),
        anchor_pos=state.anchor_pos.at[slot].set(anchor_pos),
        round_index=state.round_index.at[slot].set(0),
        remaining=state.remaining.at[slot].set(remaining),
        active=state.active.at[slot].set(True),
        sampling=jax.tree.map(lambda all_, one: all_.at[slot].set(one), state.sampling, sampling),
        history=forget(state.history, slot) if state.history else None,
        pending=state.pending and state.pending.replace(count=state.pending.count.at[slot].set(0)),
    )


def release(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Takes a slot out of the rounds; its cache rows are dead at once."""
    return state.replace(active=state.active.at[slot].set(False))


@flax.struct.dataclass
class SlotView:
    """The per-slot fields of slots 0..R-1; idle slots look empty."""

    anchor: jax.Array
    anchor_pos: jax.Array
    round_index: jax.Array
    remaining: jax.Array
    active: jax.Array
    sampling: SamplingParams

    @classmethod
    def of(cls, state: DecodeState, rows: int) -> "SlotView":
        """The view a program of width `rows` works on."""
        active = state.active[:rows]
        sampling = jax.tree.map(lambda x: x[:rows], state.sampling)
        return cls(
            anchor=state.anchor[:rows],
            anchor_pos=jnp.where(active, state.anchor_pos[:rows], 0),
            round_index=state.round_index[:rows],
            remaining=state.remaining[:rows],
            active=active,
            sampling=sampling.replace(temperature=jnp.where(active, sampling.temperature, 0.0)),
        )


def commit(state: DecodeState, view: SlotView, result: AcceptResult) -> DecodeState:
    """Moves the slots past what was emitted; a request that got all its tokens goes idle.

    Args:
      state: caches already hold the accepted rows.
      view: slots 0..R-1 before the round.
      result: what was accepted.

    Returns:
      The state with anchors, positions and counters advanced.
    """
    rows = view.anchor.shape[0]
    emitted = jnp.where(view.active, result.accept_len + 1, 0)
    anchor = jnp.where(view.active, result.bonus_token, view.anchor)
    remaining = jnp.maximum(view.remaining - emitted, 0)
    return state.replace(
        anchor=state.anchor.at[:rows].set(anchor),
        anchor_pos=state.anchor_pos.at[:rows].add(emitted),
        round_index=state.round_index.at[:rows].add(view.active),
        remaining=state.remaining.at[:rows].set(remaining),
        active=state.active.at[:rows].set(view.active & (remaining > 0)),
    )
