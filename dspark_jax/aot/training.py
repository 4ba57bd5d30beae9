"""The train step, lowered from shapes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.aot.compiled import Compiled, compile_program
from dspark_jax.aot.models import Models
from dspark_jax.aot.topology import Topology
from dspark_jax.draft.dense import DenseDraft
from dspark_jax.sharding import MeshShape, check_divides, make_mesh, param_specs
from dspark_jax.train.blocks import TrainBatch
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.spread import run_shardings
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
    shape: MeshShape,
    sequences: int,
    length: int,
    anchors: int,
    global_batch: int,
    progress: Callable[[str], None],
) -> Compiled:
    """Compiles a micro-step of DeepSpec's recipe as a run on a mesh would.

    Args:
      models: a pair with a dense draft.
      topology: what to compile for.
      shape: of the mesh: `data` splits a micro-step's batch, `model` the draft and the vocabulary.
      sequences: B of a micro-step.
      length: S, tokens of a sequence.
      anchors: A per sequence.
      global_batch: sequences whose gradients make one optimiser step.
      progress: told the program's name.

    Returns:
      The program.

    Raises:
      ValueError: the draft is not dense, or the mesh does not divide it or the batch.
    """
    draft, target = models.draft, models.target
    if not isinstance(draft, DenseDraft) or target is None:
        raise ValueError("the train step is for a dense draft of a target; leave out 'train'.")
    if sequences % shape.data or global_batch % sequences or shape.expert > 1:
        raise ValueError(
            f"{sequences} sequences must be a multiple of data={shape.data} and divide the batch "
            f"of {global_batch}, and expert={shape.expert} must be 1."
        )
    mesh = make_mesh(shape, topology.devices)

    def place(tree: object, where: object) -> object:
        def at(x: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        return jax.tree.map(at, tree, where)

    recipe = OptimizerConfig(accumulate=global_batch // sequences)
    optimizer = make_optimizer(recipe, 1000)
    params = jax.eval_shape(lambda key: draft.init(key, jnp.float32), jax.random.key(0))
    state = TrainState(
        params=params, opt_state=jax.eval_shape(optimizer.init, params),
        step=jax.ShapeDtypeStruct((), jnp.int32),
    )  # fmt: skip
    batch = _batch_shapes(models, sequences=sequences, length=length, anchors=anchors)
    shared = models.params.shared or target.shared_head(models.params.target)
    frozen = Frozen(shared=shared)
    check_divides(mesh, (params, frozen), (param_specs(params), param_specs(frozen)), "run")
    used = mesh if shape.devices > 1 else None
    step = functools.partial(train_step, draft, LossConfig(), optimizer, mesh=used)
    name = f"train step of {sequences} sequences of {length} tokens"
    progress(f"compiling {name}")

    def lower() -> jax.stages.Lowered:
        where = run_shardings(mesh, state)
        whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(where, whole))
        rows = jax.tree.map(lambda x: split, batch)
        kept = run_shardings(mesh, frozen)
        return jitted.lower(place(state, where), place(frozen, kept), place(batch, rows), None)

    with jax.set_mesh(mesh):
        return compile_program(
            lower, name=name, kind="train", rows=sequences * anchors, chip=topology.chip
        )


def _batch_shapes(models: Models, *, sequences: int, length: int, anchors: int) -> TrainBatch:
    config = models.draft.config

    def array(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sequences, *shape), dtype)

    ints, width = array((length,), jnp.int32), config.hidden_size
    return TrainBatch(
        tokens=ints, loss_mask=array((length,), jnp.bool_), positions=ints, segments=ints,
        context_features=array((length, len(config.target_layer_ids) * width), models.dtype),
        target_hidden=array((length, width), models.dtype),
        anchors=array((anchors,), jnp.int32), keep=array((anchors,), jnp.bool_),
    )  # fmt: skip
