"""The train step, lowered from shapes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.aot.compiled import Compiled, compile_program
from dspark_jax.aot.models import Models
from dspark_jax.aot.topology import Topology
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.train.blocks import TrainBatch
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.step import (
    Frozen,
    OptimizerConfig,
    TrainState,
    make_optimizer,
    train_step,
)


def compile_train_step(
    models: Models,
    topology: Topology,
    *,
    devices: int,
    sequences: int,
    length: int,
    anchors: int,
    global_batch: int,
    progress: Callable[[str], None],
) -> Compiled:
    """Compiles a micro-step of DeepSpec's recipe, its batch split over devices.

    Args:
      models: a pair with a dense draft.
      topology: what to compile for.
      devices: that a micro-step's batch is split over; parameters are whole on each.
      sequences: B of a micro-step.
      length: S, tokens of a sequence.
      anchors: A per sequence.
      global_batch: sequences whose gradients make one optimiser step.
      progress: told the program's name.

    Returns:
      The program.

    Raises:
      ValueError: the draft is not dense, or the batch does not divide.
    """
    draft, target = models.draft, models.target
    if not isinstance(draft, DenseDraft) or target is None:
        raise ValueError("the train step is for a dense draft of a target; leave out 'train'.")
    if sequences % devices or global_batch % sequences:
        raise ValueError(
            f"{sequences} sequences must be a multiple of {devices} devices and divide the batch "
            f"of {global_batch}."
        )
    mesh = Mesh(np.array(topology.devices[:devices]), ("data",))
    whole, split = (NamedSharding(mesh, s) for s in (PartitionSpec(), PartitionSpec("data")))

    def place(tree: object, where: NamedSharding) -> object:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

    recipe = OptimizerConfig(accumulate=global_batch // sequences)
    optimizer = make_optimizer(recipe, 1000)
    params = jax.eval_shape(lambda key: draft.init(key, jnp.float32), jax.random.key(0))
    state = TrainState(
        params=params, opt_state=jax.eval_shape(optimizer.init, params),
        step=jax.ShapeDtypeStruct((), jnp.int32),
    )  # fmt: skip
    config = draft.config

    def array(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sequences, *shape), dtype)

    ints, width = array((length,), jnp.int32), config.hidden_size
    batch = TrainBatch(
        tokens=ints, loss_mask=array((length,), jnp.bool_), positions=ints, segments=ints,
        context_features=array((length, len(config.target_layer_ids) * width), models.dtype),
        target_hidden=array((length, width), models.dtype),
        anchors=array((anchors,), jnp.int32), keep=array((anchors,), jnp.bool_),
    )  # fmt: skip
    shared = models.params.shared or target.shared_head(models.params.target)
    step = functools.partial(
        train_step, draft, LossConfig(), optimizer, mesh=mesh if devices > 1 else None
    )
    name = f"train step of {sequences} sequences of {length} tokens"
    progress(f"compiling {name}")

    def lower() -> jax.stages.Lowered:
        jitted = jax.jit(step, donate_argnums=0)
        return jitted.lower(
            place(state, whole), place(Frozen(shared=shared), whole), place(batch, split), None
        )

    with jax.set_mesh(mesh):
        return compile_program(
            lower, name=name, kind="train", rows=sequences * anchors, chip=topology.chip
        )
