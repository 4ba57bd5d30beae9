"""The engine's own programs for a pair, lowered from shapes for the devices of a topology."""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.aot.compiled import Compiled, compile_program
from dspark_jax.aot.models import Models
from dspark_jax.aot.topology import Topology
from dspark_jax.engine.programs import Programs
from dspark_jax.layouts import with_layouts
from dspark_jax.state import Decoder, DecodeState
from dspark_jax.types import PairParams, SharedHead


class PairPrograms(Programs):
    """Compiles as an engine would, keeps what the compiler said, and runs nothing.

    Args:
      decoder: the models and the rules.
      models: their shapes.
      topology: what to compile for.
      mesh: on its devices.
      slots: S of all groups.
      capacity: C, tokens per slot.
      wanted: names kind and rows of a program -> whether to compile it.
      progress: told each program's name.
    """

    def __init__(
        self,
        decoder: Decoder,
        models: Models,
        topology: Topology,
        mesh: Mesh,
        *,
        slots: int,
        capacity: int,
        wanted: Callable[[str, int], bool],
        progress: Callable[[str], None],
    ):
        self._topology, self._models, self._wanted = topology, models, wanted
        self._current: dict[str, Any] = {}
        self.compiled: list[Compiled] = []
        super().__init__(
            decoder, _whole_params(models), slots=slots, capacity=capacity, dtype=models.dtype,
            progress=progress, mesh=mesh,
        )  # fmt: skip

    @property
    def param_shapes(self) -> PairParams:
        """Parameters where they lie; what the shared head has of the target's, once."""
        return self._params.replace(shared=self._own_shared(self._params))

    @property
    def state_shapes(self) -> DecodeState:
        """The state of all slots where it lies."""
        return self._state

    def _own_shared(self, params: PairParams) -> SharedHead | None:
        """Of the shared head what is not the target's: the head of a reduced vocabulary, or none.

        An engine passes the target's own arrays there, which lie in memory once.
        """
        if self._models.params.shared is None:
            return None
        return params.shared.replace(embedding=None)

    def _jobs(self) -> Iterator[tuple[str, dict, int, Callable]]:
        kinds = {
            id(self.prefill): "prefill", id(self.plain): "plain", id(self.bypassed): "bypass",
        }  # fmt: skip
        for name, table, key, job in super()._jobs():
            kind = kinds.get(id(table), "round")
            rows, *chosen = key if isinstance(key, tuple) else (key,)  # by the host, if it chooses
            if self._wanted(kind, rows):
                buckets = tuple(chosen) or self.buckets(rows) if kind == "round" else ()
                facts = dict(name=name, kind=kind, rows=rows, buckets=buckets)
                yield name, table, key, functools.partial(self._keep, facts, job)

    def _keep(self, facts: dict, job: Callable) -> Compiled:
        self._current = facts
        self.compiled.append(job())
        self._current = {}
        return self.compiled[-1]

    def _compile(
        self, function: Callable, *shapes: Any, donate: int | None = 0, output: bool = False
    ) -> Compiled | None:
        """Lowers with the parameters' layouts; the target's embedding and head are passed once."""
        if not self._current:  # admit and release: they move a few numbers
            return None
        spread, where = self.spread, NamedSharding(self.spread.mesh, PartitionSpec())
        first = shapes[0]
        target = self.decoder.target

        def joined(params: PairParams, *rest: Any) -> Any:
            own = target.shared_head(params.target)
            if params.shared is not None:
                own = params.shared.replace(embedding=own.embedding)
            return function(params.replace(shared=own), *rest)

        shapes = (with_layouts(first.replace(shared=self._own_shared(first))), *shapes[1:])
        shapes = jax.tree.map(lambda x: x if x.sharding else _at(x, where), shapes)
        outputs = spread.outputs(donate, output)

        def lower() -> jax.stages.Lowered:
            with jax.set_mesh(spread.mesh):
                jitted = jax.jit(joined, donate_argnums=donate, out_shardings=outputs)
                return jitted.lower(*shapes)

        with jax.set_mesh(spread.mesh):
            return compile_program(lower, chip=self._topology.chip, **self._current)


def _whole_params(models: Models) -> PairParams:
    """With the shared head that the engine would be given."""
    params = models.params
    if params.shared is not None or params.draft is None:
        return params
    return params.replace(shared=models.target.shared_head(params.target))


def _at(x: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def selection(kinds: Collection[str], widths: Collection[int] | None) -> Callable[[str, int], bool]:
    """Which programs to compile: of these kinds, and rounds and steps of these widths only."""

    def wanted(kind: str, rows: int) -> bool:
        return kind in kinds and (kind == "prefill" or not widths or rows in widths)

    return wanted
