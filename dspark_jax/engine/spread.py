"""An engine's programs over a mesh: groups of slots side by side, each over a part of the model.

Every group of slots runs the very program that a single device runs, on the slots it holds, and
talks to no other group: `shard_map` over `data`. Inside, the compiler splits the model over
`model` and `expert`. A group schedules for itself, and the host sees the results of all.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.decode import decode_round, plain_step, prefill, rounds_to_bypass
from dspark_jax.engine.processes import exchange
from dspark_jax.sharding import check_divides, param_specs, place, shardings, state_specs
from dspark_jax.state import Decoder, DecodeState, init_state
from dspark_jax.types import PairParams, RoundOutput, ScheduleTables

_DATA = PartitionSpec("data")
_WHOLE = PartitionSpec()


def pair_specs(params: PairParams) -> PairParams:
    """Partitions of a pair's parameters."""
    reduced = params.shared is not None and params.shared.target_ids is not None
    return PairParams(
        target=param_specs(params.target),
        draft=param_specs(params.draft, reduced=reduced),
        shared=param_specs(params.shared, reduced=reduced),
    )


def place_pair(mesh: Mesh, params: PairParams) -> PairParams:
    """Puts a pair's parameters on a mesh.

    Args:
      mesh: with axes `data`, `expert` and `model`.
      params: on the host or one device; every process holds the same.

    Returns:
      The parameters on the mesh; what the shared head has in common with the target exists once.

    Raises:
      ValueError: the mesh does not divide an array.
    """
    specs = pair_specs(params)
    check_divides(mesh, params, specs, "model")
    placed: dict[tuple[int, str], jax.Array] = {}

    def put(leaf: Any, spec: PartitionSpec) -> jax.Array:
        key = (id(leaf), str(spec))
        if key not in placed:
            placed[key] = place(mesh, leaf, spec)
        return placed[key]

    return jax.tree.map(put, params, specs)


class Spread:
    """How an engine's state and programs lie on a mesh.

    The state of all groups is one `DecodeState`: arrays by slot, group 0's slots first; a scalar of
    a group becomes an array of one value per group.

    Args:
      mesh: with axes `data`, `expert` and `model`.
      decoder: the models and the rules.
      slots: S, of all groups together.
      capacity: C.
      dtype: of the caches.

    Raises:
      ValueError: the groups would not be equal, or the mesh does not divide the caches.
    """

    def __init__(
        self, mesh: Mesh, decoder: Decoder, *, slots: int, capacity: int, dtype: jnp.dtype
    ):
        self.mesh, self.decoder, self.groups = mesh, decoder, mesh.shape["data"]
        if slots % self.groups:
            raise ValueError(
                f"{slots} slots do not divide over data={self.groups}; choose a multiple of "
                f"{self.groups} slots."
            )
        self.group_slots = slots // self.groups
        self._make = functools.partial(init_state, decoder, self.group_slots, capacity, dtype)
        self._scalar = jax.tree.map(lambda x: x.ndim == 0, jax.eval_shape(self._make))
        self._group_specs = state_specs(jax.eval_shape(lambda: self._outside(self._make())))
        self._slot_specs = jax.tree.map(_only_data, self._group_specs)
        shapes = jax.eval_shape(self._make_all)
        check_divides(mesh, shapes, self._group_specs, "engine's state")
        self.state_shardings = shardings(mesh, self._group_specs)
        self.state = _with_shardings(shapes, self.state_shardings)

    def params(self, params: PairParams) -> PairParams:
        """Shapes of parameters where they lie on the mesh."""
        specs = pair_specs(params)
        check_divides(self.mesh, params, specs, "model")
        return _with_shardings(params, shardings(self.mesh, specs))

    def new_state(self) -> DecodeState:
        """Empty slots of all groups; processes wait for each other here, having compiled."""
        exchange()
        with jax.set_mesh(self.mesh):
            return jax.jit(self._make_all, out_shardings=self.state_shardings)()

    def put_slots(self, values: np.ndarray) -> jax.Array:
        """An array by slot [S] on the mesh."""
        return place(self.mesh, values, _DATA)

    def compile(
        self, function: Callable, *shapes: Any, donate: int | None, output: bool
    ) -> Callable:
        """Compiles a function of arrays on the mesh; scalars and tables are whole everywhere.

        Args:
          function: returns the state and, where `output`, something for the host.
          *shapes: of its arguments.
          donate: which of them is the state; None if it returns no state.
          output: the function returns an output, whole on every device, so that any host can
            read it.

        Returns:
          The compiled function.
        """
        whole = NamedSharding(self.mesh, _WHOLE)
        outputs = self.outputs(donate, output)

        def spread(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if x.sharding is not None:
                return x
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

        with jax.set_mesh(self.mesh):
            jitted = jax.jit(function, donate_argnums=donate, out_shardings=outputs)
            return jitted.lower(*jax.tree.map(spread, shapes)).compile()

    def outputs(self, donate: int | None, output: bool) -> Any:
        """Where the results of a function lie that `compile` compiles."""
        whole = NamedSharding(self.mesh, _WHOLE)
        if donate is None:
            return whole
        return (self.state_shardings, whole) if output else self.state_shardings

    def prefill(self) -> Callable:
        """`decode.prefill` for one slot of all; the other groups' slots stay as they are."""

        def run(params: PairParams, state: DecodeState, slot, tokens, start, count) -> DecodeState:
            local = slot - jax.lax.axis_index("data") * self.group_slots
            mine = (local >= 0) & (local < self.group_slots)
            state = prefill(
                self.decoder, params, self._inside(state), jnp.where(mine, local, 0), tokens,
                jnp.where(mine, start, 0), jnp.where(mine, count, 0),
            )  # fmt: skip
            return self._outside(state)

        ins = [_WHOLE, self._slot_specs, *[_WHOLE] * 4]
        return self._grouped(run, ins, self._slot_specs)

    def plain_step(self, rows: int) -> Callable:
        """`decode.plain_step` for the first `rows` slots of every group."""

        def run(params: PairParams, state: DecodeState) -> tuple[DecodeState, RoundOutput]:
            state, output = plain_step(self.decoder, params, self._inside(state), rows)
            return self._outside(state), _with_group(output)

        return self._grouped(run, [_WHOLE, self._slot_specs], (self._slot_specs, _DATA))

    def decode_round(self, rows: int, buckets: tuple[int, ...]) -> Callable:
        """`decode.decode_round` for the first `rows` slots of every group."""

        def run(
            params: PairParams, state: DecodeState, tables: ScheduleTables
        ) -> tuple[DecodeState, RoundOutput]:
            state, output = decode_round(
                self.decoder, params, self._inside(state), tables, rows, buckets
            )
            return self._outside(state), _with_group(output)

        ins = [_WHOLE, self._slot_specs, _WHOLE]
        return self._grouped(run, ins, (self._slot_specs, _DATA))

    def rounds_to_bypass(self, rows: int, buckets: tuple[int, ...]) -> Callable:
        """`decode.rounds_to_bypass` for the first `rows` slots of every group: i32[groups]."""

        def run(state: DecodeState, tables: ScheduleTables) -> jax.Array:
            return rounds_to_bypass(self.decoder, self._inside(state), tables, rows, buckets)[None]

        return self._grouped(run, [self._slot_specs, _WHOLE], _DATA)

    def _grouped(self, run: Callable, ins: Sequence[Any], out: Any) -> Callable:
        return jax.shard_map(
            run,
            in_specs=(*ins,),
            out_specs=out,
            axis_names={"data"},
            check_vma=False,  # a group's branches are its own
        )

    def _make_all(self) -> DecodeState:
        one = self._outside(self._make())
        axes = jax.tree.map(lambda spec: tuple(spec).index("data"), self._slot_specs)
        return jax.tree.map(
            lambda x, axis: jnp.concatenate([x] * self.groups, axis=axis), one, axes
        )

    def _outside(self, state: DecodeState) -> DecodeState:
        return jax.tree.map(lambda x, scalar: x[None] if scalar else x, state, self._scalar)

    def _inside(self, state: DecodeState) -> DecodeState:
        return jax.tree.map(lambda x, scalar: x[0] if scalar else x, state, self._scalar)


def split_output(output: RoundOutput, groups: int) -> list[RoundOutput]:
    """What each group's round said, from the output of all, on the host.

    Args:
      output: every array with an axis of groups before its own.
      groups: how many.

    Returns:
      One output per group, as its round made it.
    """

    return [jax.tree.map(lambda x, g=g: x[g], output) for g in range(groups)]


def _with_group(output: RoundOutput) -> RoundOutput:
    return jax.tree.map(lambda x: x[None], output)


def _only_data(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axis if axis == "data" else None for axis in spec))


def _with_shardings(shapes: Any, where: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, where
    )
