"""A run over a mesh: batches are split over `data`, the draft and the LM head over `model`.

What is split over `model` is what decoding splits: heads, MLPs, the vocabulary of embedding, LM
head and Markov table, and the optimiser's state as the parameters it is of. The compiler adds the
communication; the sums over `data` are written out in `train_step`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.sharding import MeshShape, check_divides, make_mesh, param_specs, shardings
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.step import Frozen, TrainState


def train_mesh(*, data: int = 1, model: int = 1) -> Mesh | None:
    """The mesh of a run over the first devices there are; None for one device.

    Args:
      data: devices, or groups of them, that a micro-step's batch is split over.
      model: devices that the draft is split over.

    Returns:
      The mesh.

    Raises:
      ValueError: there are fewer devices.
    """
    shape = MeshShape(data=data, model=model)
    return None if shape.devices == 1 else make_mesh(shape)


def place_run(
    mesh: Mesh, config: TrainConfig, state: TrainState, frozen: Frozen
) -> tuple[TrainState, Frozen]:
    """Puts what a run holds on its mesh.

    Args:
      mesh: of `train_mesh`.
      config: the run.
      state: on the host or one device.
      frozen: likewise.

    Returns:
      Both on the mesh.

    Raises:
      ValueError: the axis `model` does not divide an array, or the sampled vocabulary.
    """
    model, candidates = mesh.shape["model"], config.candidates
    if candidates is not None and candidates.total % model:
        raise ValueError(
            f"candidates.total={candidates.total} does not divide over model={model}; choose a "
            f"multiple of {model}."
        )
    check_divides(mesh, state.params, param_specs(state.params), "draft")
    check_divides(mesh, frozen, param_specs(frozen), "target's embedding and head")
    state = jax.device_put(state, run_shardings(mesh, state))
    return state, jax.device_put(frozen, run_shardings(mesh, frozen))


def run_shardings(mesh: Mesh, tree: TrainState | Frozen) -> Any:
    """Where everything a run holds lies on its mesh; the optimiser's state as the parameters."""
    return shardings(mesh, param_specs(tree))


def compile_on(
    mesh: Mesh | None, function: Callable, *, state: TrainState | None = None
) -> Callable:
    """`jax.jit` for a function of arrays on a mesh.

    Args:
      mesh: None for one device.
      function: its first argument and result are a `TrainState` where `state` is given; everything
        else it returns is whole on every device.
      state: donated to the result.

    Returns:
      The function to call.
    """
    donated = () if state is None else (0,)
    if mesh is None:
        return jax.jit(function, donate_argnums=donated)
    whole = NamedSharding(mesh, PartitionSpec())
    outputs = whole if state is None else (run_shardings(mesh, state), whole)
    jitted = jax.jit(function, donate_argnums=donated, out_shardings=outputs)

    def run(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return jitted(*args)

    return run
