"""Picks an implementation: the kernel on a TPU, its reference elsewhere."""

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
        refuses, and where the compiler is to partition the program over a mesh by itself.
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
    if is_partitioned_by_compiler():
        return reference(*arrays)
    try:
        return jax.lax.platform_dependent(
            *arrays, tpu=lambda *x: kernel(*x, interpret=False), default=reference
        )
    except NotImplementedError:
        return reference(*arrays)


def is_partitioned_by_compiler() -> bool:
    """Whether the ambient mesh has an axis, wider than 1, that `shard_map` has not taken over.

    A kernel cannot be partitioned by the compiler: such a program calls it under `shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        size > 1 and kind != jax.sharding.AxisType.Manual
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )
