"""Picks an implementation: the kernel on a TPU, its reference elsewhere."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.experimental.pallas import tpu as pltpu

Impl = Literal["auto", "pallas", "interpret", "ref"]


def select(
    impl: Impl, kernel: Callable[..., Any], reference: Callable[..., Any], *arrays: jax.Array
) -> Any:
    """Runs one of two functions that agree.

    Args:
      impl: "auto" takes the kernel where the program is lowered for a TPU, also when that is done
        on a machine without one; the reference on other platforms, for shapes the kernel
        refuses, and where the compiler is to distribute the program over a mesh by itself.
        "pallas" is the kernel, "interpret" the kernel on a simulated TPU that looks for races,
        "ref" the reference.
      kernel: called with the arrays and `interpret`, which goes to `pallas_call` as it is; raises
        NotImplementedError where it cannot serve the shapes.
      reference: called with the arrays.
      *arrays: operands of both.

    Returns:
      What the chosen function returns.

    Raises:
      ValueError: impl is none of the four.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl is {impl!r}; expected one of {', '.join(get_args(Impl))}")
    if impl == "ref":
        return reference(*arrays)
    if impl == "pallas":
        return kernel(*arrays, interpret=False)
    if impl == "interpret":
        return kernel(*arrays, interpret=pltpu.InterpretParams(detect_races=True))
    if math.prod(axes_left_to_compiler().values()) > 1:
        return reference(*arrays)
    whole = jax.sharding.PartitionSpec()
    kernel = per_shard(functools.partial(kernel, interpret=False), whole, whole)
    return on_tpu(kernel, reference, *arrays)


def on_tpu(kernel: Callable[..., Any], reference: Callable[..., Any], *operands: Any) -> Any:
    """The kernel where the program is lowered for a TPU, the reference elsewhere.

    Args:
      kernel: called with the operands; raises NotImplementedError where it cannot serve them, for
        which the reference is taken everywhere.
      reference: called with the operands.
      *operands: pytrees of arrays.

    Returns:
      What the chosen function returns.
    """
    try:
        return jax.lax.platform_dependent(*operands, tpu=kernel, default=reference)
    except NotImplementedError:
        return reference(*operands)


def per_shard(kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A kernel that runs once per shard, because the compiler cannot partition it.

    Args:
      kernel: a function of arrays.
      in_specs: how its operands lie on the axes of the mesh that are left to the compiler.
      out_specs: how its result does.

    Returns:
      The kernel under `shard_map` over those axes; as it is where there are none.
    """
    left = axes_left_to_compiler()
    if not left:
        return kernel
    return jax.shard_map(
        kernel, in_specs=in_specs, out_specs=out_specs, axis_names=set(left), check_vma=False
    )


def axes_left_to_compiler() -> dict[str, int]:
    """Axes of the mesh this is traced under that no `shard_map` has taken over, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in axes if kind != jax.sharding.AxisType.Manual}
