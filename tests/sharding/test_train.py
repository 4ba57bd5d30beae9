"""Training over eight devices: the losses, gradients and parameters of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.train.config import DataConfig, DraftShape, TrainConfig
from dspark_jax.train.loop import Trainer, open_run
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.prepare import prepare
from dspark_jax.train.spread import compile_on, place_run, train_mesh
from dspark_jax.train.step import (
    Candidates,
    Frozen,
    OptimizerConfig,
    TrainState,
    make_optimizer,
    measure_step,
    train_step,
)
from dspark_jax.train.vocabulary import CandidateConfig
from dspark_jax.train.warm_start import inverse_gram
from tests.sharding.models import collectives
from tests.unit.test_train_loop import corpus, quiet, toy_config
from tests.unit.train_toys import DRAFT, VOCAB, WIDTH, make_batch, random_params, random_shared

__all__ = ["corpus"]  # a fixture

ROWS, ANCHORS = 4, 6
CONFIG = TrainConfig(
    target="none", output_dir="none", steps=2, data=DataConfig(train_data="none"),
    draft=DraftShape(mask_token_id=0, target_layer_ids=(0,)),
)  # fmt: skip
# Adam divides a gradient by its own size: with the usual eps, one that is zero but for rounding
# still makes a whole step, which no two orders of summation share.
SMOOTH = OptimizerConfig(eps=1e-3)
OPTIMIZER = make_optimizer(SMOOTH, 10)


def _start(rng: np.random.Generator, loss: LossConfig) -> tuple[TrainState, Frozen, list]:
    params, shared = random_params(), random_shared(rng)
    state = TrainState(
        params=params, opt_state=OPTIMIZER.init(params), step=jnp.zeros((), jnp.int32)
    )
    frozen = Frozen(shared=shared)
    if loss.hidden:
        metric = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)
        frozen = frozen.replace(metric=metric, inverse_gram=inverse_gram(shared))
    lengths = tuple((14, 6 + i) for i in range(ROWS))
    anchors = tuple(tuple(1 + i + 2 * j for j in range(ANCHORS)) for i in range(ROWS))
    keep = jnp.arange(ANCHORS) < jnp.arange(3, 3 + ROWS)[:, None]  # rows of unlike weights
    batches = [make_batch(rng, lengths, anchors).replace(keep=keep) for _ in range(2)]
    return state, frozen, batches


def _train(mesh: jax.sharding.Mesh | None, loss: LossConfig, start: tuple, more: tuple) -> tuple:
    """State and sums after each of two steps, the validation sums, and the step's program."""
    state, frozen, batches = start
    state = jax.tree.map(jnp.array, state)  # the step donates it
    candidates, config = more
    if mesh is not None:
        state, frozen = place_run(mesh, config, state, frozen)
    step = functools.partial(train_step, DRAFT, loss, OPTIMIZER, mesh=mesh)
    run = compile_on(mesh, step, state=state)
    found = []
    for batch in batches:
        state, sums = run(state, frozen, batch, candidates)
        found.append(jax.device_get((state, sums)))
    measure = compile_on(mesh, functools.partial(measure_step, DRAFT, loss))
    return state, found, jax.device_get(measure(state.params, frozen, batches[0]))


def _assert_close(got: object, want: object) -> None:
    """To 1e-5 of the largest value of each array."""

    def check(path: tuple, a: np.ndarray, b: np.ndarray) -> None:
        scale = max(float(np.abs(b).max()), 1e-30)
        error = float(np.abs(np.asarray(a, np.float64) - b).max()) / scale
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(check, got, want)


@pytest.fixture(scope="module")
def alone() -> tuple[LossConfig, tuple, tuple]:
    """A loss, a start, and what becomes of it on one device."""
    loss = LossConfig(anchor_chunk=4)
    start = _start(np.random.default_rng(0), loss)
    return loss, start, _train(None, loss, start, (None, CONFIG))


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (1, 2)], ids=str)
def test_two_steps_equal_those_of_one_device(mesh, alone):
    loss, start, (_, expected, measured) = alone
    data, model = mesh
    state, got, other = _train(train_mesh(data=data, model=model), loss, start, (None, CONFIG))
    for (have, sums), (want, want_sums) in zip(got, expected, strict=True):
        _assert_close(sums, want_sums)
        _assert_close(have.opt_state, want.opt_state)  # after the first step: its gradients
        _assert_close(have.params, want.params)
    _assert_close(other, measured)
    _check_split(state, model)


def _check_split(state: TrainState, model: int) -> None:
    """Every large array of the draft, and of the optimiser, is held in parts."""
    layer = {"q": 1, "kv": 2, "o": 0}
    moments = state.opt_state[1][0]
    for tree in (state.params, moments.mu, moments.nu):
        parts = [(tree["layers"][1][name], axis) for name, axis in layer.items()]
        parts += [(tree["layers"][0]["mlp"]["gate_up"], 2), (tree["layers"][0]["mlp"]["down"], 0)]
        parts += [(tree["context_proj"], 0), (tree["markov"]["w2"], 0)]
        for array, axis in parts:
            part = list(array.shape)
            part[axis] //= model
            assert array.addressable_shards[0].data.shape == tuple(part)
        assert tree["markov"]["w1"].sharding.is_fully_replicated


def test_candidates_and_hidden_states_on_a_mesh(rng):
    """A sampled vocabulary, and the loss that needs no vocabulary."""
    loss = LossConfig(anchor_chunk=8, hidden=0.3)
    rows = np.sort(rng.choice(VOCAB, 20, replace=False)).astype(np.int32)
    candidates = Candidates(rows=rows, log_weight=rng.uniform(size=20).astype(np.float32))
    config = dataclasses.replace(CONFIG, candidates=CandidateConfig(always=10, total=20))
    start = _start(rng, loss)
    _, expected, measured = _train(None, loss, start, (candidates, config))
    mesh = train_mesh(data=2, model=2)
    _, got, other = _train(mesh, loss, start, (candidates, config))
    _assert_close([sums for _, sums in got], [sums for _, sums in expected])
    _assert_close(got[-1][0].params, expected[-1][0].params)
    _assert_close(other, measured)


def test_no_device_sees_the_whole_vocabulary(rng):
    """What is sent is sums of hidden rows and numbers per row, whatever the vocabulary."""
    loss = LossConfig(anchor_chunk=4)
    state, frozen, (batch, _) = _start(rng, loss)
    mesh = train_mesh(data=2, model=2)
    state, frozen = place_run(mesh, CONFIG, state, frozen)
    assert frozen.shared.head.addressable_shards[0].data.shape == (VOCAB // 2, WIDTH)
    step = functools.partial(train_step, DRAFT, loss, OPTIMIZER, mesh=mesh)
    with jax.set_mesh(mesh):
        text = jax.jit(step).lower(state, frozen, batch, None).compile().as_text()
    talk = collectives(text)
    scored = [c.size for c in talk if "train.vocabulary" in c.where]
    assert 0 < max(scored) <= ROWS * ANCHORS * DRAFT.config.block_size * WIDTH
    tables = {shape for c in talk for shape in c.shapes if shape and shape[0] == VOCAB}
    assert tables == {(VOCAB, DRAFT.config.markov_rank)}  # gradients of the Markov head's first
    assert not [c for c in talk if any(shape[-1:] == (VOCAB,) for shape in c.shapes)]


def test_a_run_goes_on_with_another_mesh(corpus, tmp_path):
    """Checkpoints hold whole arrays: split in four, then whole, as if never split."""
    alone = toy_config(corpus, tmp_path / "alone", measure_every=0, steps=2, optimizer=SMOOTH)
    expected = Trainer(alone, prepare(alone, quiet), quiet)
    expected.run()
    config = dataclasses.replace(
        alone, output_dir=str(tmp_path / "run"), data_parallel=2, model_parallel=2
    )
    trainer = Trainer(config, prepare(config, quiet), quiet)
    trainer.run(stop_after=1)
    resumed = open_run(dataclasses.replace(config, data_parallel=1, model_parallel=1), quiet)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, trainer.state)
    assert len(resumed.state.params["layers"][0]["q"].sharding.device_set) == 1
    resumed.run()
    _assert_close(jax.device_get(resumed.state.params), jax.device_get(expected.state.params))
    split = open_run(config, quiet)
    jax.tree.map(np.testing.assert_array_equal, split.state, resumed.state)
    q = split.state.opt_state[1][0].mu["layers"][0]["q"]
    assert q.addressable_shards[0].data.shape[1] == q.shape[1] // 2


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({}, 4, r"does not divide this draft evenly: .*kv: 2 over model=4"),
        ({"candidates": CandidateConfig(always=5, total=21)}, 2, "total=21 does not divide over"),
    ],
)
def test_axes_that_do_not_fit_are_refused(changes, model, words, rng):
    state, frozen, _ = _start(rng, LossConfig())
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=words):
        place_run(train_mesh(model=model), config, state, frozen)
    with pytest.raises(ValueError, match="model_parallel=0"):
        dataclasses.replace(CONFIG, model_parallel=0)


def test_a_vocabulary_that_does_not_divide_is_refused(rng):
    state, frozen, _ = _start(rng, LossConfig())
    odd = frozen.replace(shared=frozen.shared.replace(head=frozen.shared.head[1:]))
    with pytest.raises(ValueError, match="shared.head: 49 over model=2"):
        place_run(train_mesh(model=2), CONFIG, state, odd)
