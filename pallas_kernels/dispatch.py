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
    return on_tpu(functools.partial(kernel, interpret=False), reference, *arrays)


def on_tpu(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *operands: Any,
    specs: tuple[tuple[Any, ...], Any] | None = None,
) -> Any:
    """The kernel where the program is lowered for a TPU, the reference elsewhere.

    A kernel cannot be partitioned by the compiler. Where it is to distribute this program over
    axes of a mesh, the kernel runs under `shard_map` over those, or not at all.

    Args:
      kernel: called with the operands; raises NotImplementedError where it cannot serve them.
      reference: called with the operands.
      *operands: pytrees of arrays.
      specs: how operands and result lie on the axes left to the compiler; None takes the reference
        if there are any.

    Returns:
      What the chosen function returns.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    left = {name for name, kind in kinds if kind != jax.sharding.AxisType.Manual}
    if math.prod(axes[name] for name in left) > 1 and specs is None:
        return reference(*operands)
    if left:  # of one device, too: the lowering asks that no axis is left to the compiler
        in_specs, out_specs = specs or (jax.sharding.PartitionSpec(),) * 2
        kernel = jax.shard_map(
            kernel, in_specs=in_specs, out_specs=out_specs, axis_names=left, check_vma=False
        )
    try:
        return jax.lax.platform_dependent(*operands, tpu=kernel, default=reference)
    except NotImplementedError:
        return reference(*operands)
