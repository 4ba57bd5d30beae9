"""The mesh, and which axis of every array lies on which of its axes.

A mesh has three axes, any of them of one device: `data` holds groups of slots that decode on their
own, `model` splits heads, MLPs and the vocabulary, `expert` splits the experts. Arrays name their
axes in the words of the model ("heads", "vocab"); `ShardingRules` turns the words into mesh axes.

Model code is the same with and without a mesh: it asks the mesh it is traced under (`constrain`,
`axis_size`), and without one nothing is asked of the compiler.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "expert", "model")  # outermost first: neighbours on `model` talk most

_LOGICAL = MappingProxyType({
    "slots": "data",
    "heads": "model",  # KV heads with the query heads they serve; output groups of DeepSeek
    "mlp": "model",
    "vocab": "model",
    "features": "model",  # the tapped states, contracted by the context projection
    "experts": "expert",
    "expert_mlp": "model",
    "expert_tokens": "expert",  # tokens on their way to experts on other devices
})  # fmt: skip

# Axes of the parameters by name and rank; what is not listed is whole on every device. The first
# table of the Markov head is, so that its serial steps look up a row without talking.
_PARAMS: Mapping[tuple[str, int], tuple[str | None, ...]] = MappingProxyType({
    ("embedding", 2): ("vocab", None),
    ("head", 2): ("vocab", None),
    ("w2", 2): ("vocab", None),
    ("qkv", 4): (None, "heads", None, None),
    ("qkv_bias", 3): ("heads", None, None),
    ("q", 3): (None, "heads", None),
    ("q_bias", 2): ("heads", None),
    ("kv", 4): (None, None, "heads", None),
    ("kv_bias", 3): (None, "heads", None),
    ("o", 4): ("heads", None, None, None),
    ("o", 3): ("heads", None, None),
    ("gate_up", 3): (None, None, "mlp"),
    ("down", 2): ("mlp", None),
    ("gate_up", 4): ("experts", None, None, "expert_mlp"),
    ("down", 3): ("experts", "expert_mlp", None),
    ("gate_up.packed", 4): ("experts", None, "expert_mlp", None),
    ("down.packed", 3): ("experts", None, "expert_mlp"),
    ("shared_gate_up", 3): (None, None, "mlp"),
    ("shared_down", 2): ("mlp", None),
    ("q_b", 3): (None, "heads", None),
    ("sink", 1): ("heads",),
    ("o_a", 3): ("heads", None, None),
    ("o_b", 3): ("heads", None, None),
    ("context_proj", 2): ("features", None),
})  # fmt: skip
_OF_DRAFT_VOCABULARY = ("head", "w2")  # whole where the draft's vocabulary is reduced

_STATE: Mapping[tuple[str, int], tuple[str | None, ...]] = MappingProxyType({
    ("k", 5): (None, "slots", "heads", None, None),
    ("v", 5): (None, "slots", "heads", None, None),
    ("kv", 4): (None, "slots", None, None),
    ("pages", 5): (None, "slots", None, "heads", None),
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis of a mesh."""

    data: int = 1
    expert: int = 1
    model: int = 1

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh axis {axis}={getattr(self, axis)}; expected at least 1.")

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.data * self.expert * self.model


def parse_mesh(text: str) -> MeshShape:
    """Reads `data=2,model=4`.

    Args:
      text: axes and their sizes, comma-separated; an axis that is not named has one device.

    Returns:
      The shape.

    Raises:
      ValueError: an axis is unknown, named twice, or its size is not a whole number above 0.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: {part.strip()!r} is not an axis and its size; expected axes of "
                f"{AXES}, as in data=2,model=4."
            )
        if axis in sizes:
            raise ValueError(f"mesh {text!r} names the axis {axis} twice; name it once.")
        sizes[axis] = int(size)
    return MeshShape(**sizes)


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `data`, `expert` and `model`.

    On a TPU an axis lies along whole axes of the chips' grid where it can, so that its devices are
    neighbours in a ring; else it takes a part of one (data=8,model=2 on 4x4 chips), whose ends do
    not meet. Devices that fill no box of the grid are taken in their own order.

    Args:
      shape: its sizes.
      devices: to use; None takes the first of all there are, in every process.

    Returns:
      The mesh; its axes are left to the compiler (`AxisType.Auto`).

    Raises:
      ValueError: there are fewer devices, or several processes would not all take part.
    """
    devices = jax.devices() if devices is None else devices
    if shape.devices > len(devices):
        raise ValueError(
            f"the mesh data={shape.data},expert={shape.expert},model={shape.model} takes "
            f"{shape.devices} devices; there are {len(devices)}. Choose smaller axes."
        )
    processes = {device.process_index for device in devices}
    used = devices[: shape.devices]
    if {device.process_index for device in used} != processes:
        raise ValueError(
            f"a mesh of {shape.devices} devices leaves out some of the {len(processes)} processes "
            f"with {len(devices)} devices together; every process must take part."
        )
    sizes = tuple(getattr(shape, axis) for axis in AXES)
    try:
        laid = mesh_utils.create_device_mesh(sizes, used)
    except NotImplementedError:  # no product of whole axes of the grid
        laid = mesh_utils.create_device_mesh(sizes, used, allow_split_physical_axes=True)
    except AssertionError:  # no box
        laid = np.array(used).reshape(sizes)
    return Mesh(laid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which mesh axis an axis of the model's arrays is split over.

    Attributes:
      axes: word -> mesh axis; None keeps it whole.
    """

    axes: Mapping[str, str | None] = dataclasses.field(default_factory=lambda: _LOGICAL)

    def __post_init__(self):
        unknown = sorted(set(self.axes) - set(_LOGICAL))
        if unknown:
            raise ValueError(f"axes {unknown} do not exist; expected some of {sorted(_LOGICAL)}.")
        wrong = {name: axis for name, axis in self.axes.items() if axis not in (None, *AXES)}
        if wrong:
            raise ValueError(f"{wrong} are no axes of a mesh; expected one of {AXES} or None.")

    def spec(self, *names: str | None) -> PartitionSpec:
        """The partition of an array whose axes have these names; None is a whole axis.

        Raises:
          ValueError: a name is unknown, or two axes would be split over one mesh axis.
        """
        unknown = [name for name in names if name is not None and name not in _LOGICAL]
        if unknown:
            raise ValueError(f"axes {unknown} do not exist; expected some of {sorted(_LOGICAL)}.")
        axes = [None if name is None else self.axes.get(name) for name in names]
        used = [axis for axis in axes if axis is not None]
        if len(set(used)) < len(used):
            raise ValueError(
                f"the axes {names} of one array would be split over {axes}; a mesh axis can split "
                "one axis of an array. Change the rules."
            )
        return PartitionSpec(*axes)


RULES = ShardingRules()


def param_specs(params: Any, *, reduced: bool = False, rules: ShardingRules = RULES) -> Any:
    """Partitions of a parameter tree: target, dense or DeepSeek draft, or `SharedHead`.

    Args:
      params: arrays or shapes; layers stacked (a dict under `layers`) or split (a tuple).
      reduced: the tree is that of a draft with a vocabulary of its own.
      rules: where the axes go.

    Returns:
      A PartitionSpec for every leaf.
    """

    def spec(path: tuple, leaf: Any) -> PartitionSpec:
        names = path_names(path)
        stacked = "layers" in names[:-1] and not any(isinstance(name, int) for name in names)
        packed = names[-1] in ("codes", "scales")
        name = f"{names[-2]}.packed" if packed else names[-1]
        axes = _PARAMS.get((name, len(leaf.shape) - stacked))
        if axes is None or (reduced and names[-1] in _OF_DRAFT_VOCABULARY):
            return PartitionSpec()
        return rules.spec(*[None] * stacked, *axes)

    return jax.tree_util.tree_map_with_path(spec, params)


def state_specs(state: Any, rules: ShardingRules = RULES) -> Any:
    """Partitions of what slots hold: caches by slot and KV head, everything else by slot."""

    def spec(path: tuple, leaf: Any) -> PartitionSpec:
        name = path_names(path)[-1]
        return rules.spec(*_STATE.get((name, len(leaf.shape)), ("slots",)))

    return jax.tree_util.tree_map_with_path(spec, state)


def path_names(path: tuple) -> tuple[str | int, ...]:
    """Keys, attributes and indices of a path through a pytree."""
    return tuple(
        next(getattr(part, a) for a in ("key", "name", "idx") if hasattr(part, a)) for part in path
    )


def shardings(mesh: Mesh, specs: Any) -> Any:
    """A NamedSharding for every PartitionSpec of a tree."""
    is_spec = {"is_leaf": lambda x: isinstance(x, PartitionSpec)}
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, **is_spec)


def check_divides(mesh: Mesh, tree: Any, specs: Any, what: str) -> None:
    """Raises ValueError naming every array that a mesh cannot split evenly.

    Args:
      mesh: the mesh.
      tree: arrays or shapes.
      specs: their partitions.
      what: names the tree in the message.
    """
    problems = []

    def look(path: tuple, leaf: Any, spec: PartitionSpec) -> None:
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                name = ".".join(map(str, path_names(path)))
                problems.append(f"{name}: {size} over {axis}={mesh.shape[axis]}")

    jax.tree_util.tree_map_with_path(look, tree, specs)
    if problems:
        shown = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise ValueError(
            f"the mesh does not divide this {what} evenly: {'; '.join(shown)}. Choose axes that "
            "divide these sizes."
        )


def place(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Puts arrays on a mesh; every process must hold the same values.

    Args:
      mesh: the mesh.
      tree: arrays, on the host or on one device.
      specs: their partitions.

    Returns:
      The tree with arrays of the mesh. Nothing is sent between processes.
    """

    def put(leaf: Any, spec: PartitionSpec) -> jax.Array:
        host = np.asarray(leaf)
        pick: Callable = host.__getitem__
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), pick)

    return jax.tree.map(put, tree, specs)


def axis_size(name: str, rules: ShardingRules = RULES) -> int:
    """Devices that an axis with this name is split over where this is traced; 1 without a mesh."""
    return _model_axes().get(rules.axes.get(name), 1)


def is_split() -> bool:
    """Whether this is traced under a mesh that splits models."""
    return math.prod(_model_axes().values()) > 1


def split_axes() -> tuple[str, ...]:
    """The axes of the mesh this is traced under that split models."""
    return tuple(_model_axes())


def spec_here(*names: str | None, rules: ShardingRules = RULES) -> PartitionSpec:
    """`rules.spec(*names)` without the axes that the mesh this is traced under does not have."""
    axes = _model_axes()
    return PartitionSpec(*(axis if axis in axes else None for axis in rules.spec(*names)))


def constrain(x: jax.Array, *names: str | None, rules: ShardingRules = RULES) -> jax.Array:
    """Tells the compiler how an array lies on the mesh this is traced under; else does nothing.

    Args:
      x: the array.
      *names: of its axes, None for those whole on every device.
      rules: where the axes go.

    Returns:
      x.
    """
    if not is_split():
        return x
    return jax.lax.with_sharding_constraint(x, spec_here(*names, rules=rules))


def whole(x: jax.Array) -> jax.Array:
    """`constrain` for an array that every device has all of, such as the residual stream."""
    return constrain(x, *[None] * x.ndim)


def constrain_params(params: Any, rules: ShardingRules = RULES) -> Any:
    """`constrain` for a tree with the names of a parameter tree, such as its gradients."""
    if not is_split():
        return params
    place_leaf = jax.lax.with_sharding_constraint
    return jax.tree.map(place_leaf, params, param_specs(params, rules=rules))


def _model_axes() -> dict[str, int]:
    """Sizes of the axes but `data` of the mesh at hand that the compiler distributes over."""
    mesh = jax.sharding.get_abstract_mesh()
    triples = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    split = ("expert", "model")
    return {name: size for name, size, kind in triples if kind == AxisType.Auto and name in split}
