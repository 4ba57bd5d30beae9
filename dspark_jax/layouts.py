"""How parameters lie in a TPU's memory.

A kernel [D, ..out] is stored with its contracted axis D innermost. In the default order the
compiler slices such a kernel out of a stack of layers by a copy and transposes it by another, in
every layer of every program: the weights of Qwen3-8B then move 2.5 times instead of once.

Source: what the TPU compiler chooses itself for these programs with `Layout.AUTO`.
"""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

# Rank without a stack of layers. Kernels not listed contract axes that are innermost already.
_CONTRACTED_FIRST = {("qkv", 4), ("kv", 4), ("q", 3), ("gate_up", 3)}


def axis_order(path: tuple, leaf: Any) -> tuple[int, ...] | None:
    """Axes of a parameter from outermost to innermost; None for the default order.

    Args:
      path: of the leaf in a parameter tree of a target or a dense draft, layers stacked or split.
      leaf: an array or a shape.

    Returns:
      A permutation of the leaf's axes, or None.
    """
    names = [getattr(part, "key", getattr(part, "idx", None)) for part in path]
    stacked = "layers" in names[:-1] and not any(isinstance(name, int) for name in names)
    rank = len(leaf.shape) - stacked
    if (names[-1], rank) not in _CONTRACTED_FIRST:
        return None
    return (*range(stacked), *range(stacked + 1, stacked + rank), stacked)


def place_layouts(params: Any) -> Any:
    """Moves parameters into the order a TPU wants them in.

    Args:
      params: arrays, where they are to lie.

    Returns:
      The same values; programs compiled for them read them without copies.
    """

    def place(path: tuple, leaf: jax.Array) -> jax.Array:
        order = axis_order(path, leaf)
        if order is None:
            return leaf
        return jax.device_put(leaf, Format(Layout(order), leaf.sharding))

    return jax.tree_util.tree_map_with_path(place, params)


def keep_layouts(shapes: Any, arrays: Any) -> Any:
    """Shapes of parameters with the layouts that `place_layouts` gave the arrays, if it did.

    Args:
      shapes: of the arrays.
      arrays: parameters, or shapes.

    Returns:
      The shapes; those of arrays in the default order are unchanged.
    """

    def keep(path: tuple, shape: jax.ShapeDtypeStruct, array: Any) -> jax.ShapeDtypeStruct:
        order = axis_order(path, shape)
        if order is None or not isinstance(array, jax.Array):
            return shape
        layout = array.format.layout
        if layout is None or tuple(layout.major_to_minor) != order:
            return shape
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=array.format)

    return jax.tree_util.tree_map_with_path(keep, shapes, arrays)


def with_layouts(params: Any) -> Any:
    """Shapes of parameters with the order a TPU wants them in.

    Args:
      params: tree of `jax.ShapeDtypeStruct` with shardings.

    Returns:
      The tree, to lower programs with; `jax.device_put` to their `format` places the arrays.
    """

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        order = axis_order(path, leaf)
        if order is None:
            return leaf
        where: Sharding = leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=Format(Layout(order), where))

    return jax.tree_util.tree_map_with_path(place, params)
