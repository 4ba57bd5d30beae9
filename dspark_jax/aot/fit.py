"""How many slots, and how long a context, a device has room for."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from dspark_jax.aot.compiled import Compiled, gib
from dspark_jax.chips import Chip

_GROWING = ("round", "plain", "draft")  # kinds whose temporaries grow with the requests


def device_bytes(tree: Any) -> int:
    """Bytes of shapes with shardings on one device, padding left out."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What is linear in slots and context on one device, and what is fixed.

    Attributes:
      chip: of the topology.
      params: bytes of parameters.
      fixed: bytes of code, and of temporaries that do not grow with requests.
      per_slot: bytes of temporaries and of state besides the caches, per slot of a group.
      per_token: bytes of caches per slot and token of capacity.
      groups: of slots, side by side.
    """

    chip: Chip
    params: int
    fixed: float
    per_slot: float
    per_token: float
    groups: int

    @property
    def room(self) -> float:
        """Bytes left for slots."""
        return self.chip.hbm_bytes - self.params - self.fixed

    def largest_slots(self, capacity: int) -> int:
        """Slots of all groups that fit with so many tokens each; 0 if none does."""
        each = self.per_slot + capacity * self.per_token
        return max(math.floor(self.room / each), 0) * self.groups

    def largest_capacity(self, slots: int) -> int | None:
        """Tokens per slot that fit with so many slots in all, 0 if none does; None: any number."""
        per_group = slots / self.groups
        if not self.per_token:
            return None
        return max(math.floor((self.room / per_group - self.per_slot) / self.per_token), 0)

    def advice(self, slots: int, capacity: int) -> str:
        """What would fit, for people."""
        if self.room <= 0:
            parts = math.ceil((self.params + self.fixed) / self.chip.hbm_bytes)
            return (
                f"parameters take {gib(self.params)} of the {gib(self.chip.hbm_bytes)} GiB of each "
                f"device; split them {parts} times as far, as with --mesh model={parts}, or choose "
                "a topology with more memory."
            )
        most, longest = self.largest_slots(capacity), self.largest_capacity(slots)
        ways = [f"--slots {most}"] if most else []
        ways += [f"--context {longest}"] if longest else []
        either = " or ".join(ways) or "a topology with more memory, or a larger model axis"
        return f"what would: {either}."


def estimate_fit(
    chip: Chip,
    params: Any,
    state: Any,
    programs: Iterable[Compiled],
    *,
    slots: int,
    capacity: int,
    groups: int,
) -> Fit:
    """Fits a line through what the compiled programs need.

    Args:
      chip: of the topology.
      params: shapes with shardings.
      state: shapes with shardings, of all slots.
      programs: compiled for them; those that fit say what temporaries they need.
      slots: S the state is for.
      capacity: C.
      groups: of slots.

    Returns:
      The estimate. Temporaries are taken to grow in proportion to the requests of a round.
    """
    per_group = slots / groups
    cache_tokens, fixed_state = 0, 0
    for leaf in jax.tree.leaves(state):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        if len(leaf.shape) == 5:  # [L, S, G, C, H]
            cache_tokens += size
        else:
            fixed_state += size
    fitting = [p for p in programs if p.fits]
    code = max((p.memory.code for p in fitting), default=0)
    steady = [p.memory.temporaries for p in fitting if p.kind == "prefill"]
    growing = [p for p in fitting if p.kind in _GROWING]
    widest = max(growing, key=lambda p: p.rows, default=None)
    by_row = widest.memory.temporaries / widest.rows if widest else 0.0
    return Fit(
        chip=chip, params=device_bytes(params), groups=groups,
        fixed=code + max(steady, default=0),
        per_slot=by_row + fixed_state / per_group,
        per_token=cache_tokens / per_group / capacity,
    )  # fmt: skip
