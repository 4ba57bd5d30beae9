"""Whole runs on a toy pair: learning, resuming, exporting, failing with a message."""

import dataclasses
import errno
import json
import os
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dspark_jax.checkpoint.draft import load_draft
from dspark_jax.checkpoint.fingerprint import fingerprint_target
from dspark_jax.checkpoint.target import load_target
from dspark_jax.target.llama import LlamaTarget
from dspark_jax.train.__main__ import main
from dspark_jax.train.config import DataConfig, DraftShape, TrainConfig, WarmStart
from dspark_jax.train.loop import Trainer, open_run, train
from dspark_jax.train.loss import LossConfig
from dspark_jax.train.prepare import prepare
from dspark_jax.train.step import OptimizerConfig
from dspark_jax.train.vocabulary import CandidateConfig
from tests.models import write_target

WORDS = "the quick brown fox jumps over the lazy dog and then the other dog".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A toy target and text in which some words follow others more often."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    with (folder / "text.jsonl").open("w") as file:
        for i in range(24):
            words = [WORDS[j % len(WORDS)] for j in range(i, i + 30) if rng.random() < 0.9]
            messages = [
                {"role": "user", "content": "one two"},
                {"role": "assistant", "content": " ".join(words)},
            ]
            line = {"id": f"c{i}", "temperature": 0.5 * (i % 3), "conversations": messages}
            file.write(json.dumps(line) + "\n")
    return write_target(folder / "target"), folder / "text.jsonl"


def toy_config(corpus, output, **changes) -> TrainConfig:
    """Whole samples, the target online, DeepSpec's losses."""
    config = TrainConfig(
        target=str(corpus[0]),
        output_dir=str(output),
        draft=DraftShape(
            num_hidden_layers=1,
            block_size=3,
            mask_token_id=0,
            target_layer_ids=(0, 1),
            markov_rank=4,
        ),
        data=DataConfig(
            train_data=str(corpus[1]),
            max_length=64,
            batch_size=2,
            num_anchors=8,
            validation_samples=4,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        steps=6,
        checkpoint_every=100,
        log_every=2,
        measure_every=3,
        measure_batches=2,
    )
    return dataclasses.replace(config, **changes)


def crops_config(corpus, output, **changes) -> TrainConfig:
    """Stored features, crops, a reduced vocabulary, candidates and warm starts."""
    config = toy_config(corpus, output)
    folder = os.path.dirname(str(output))
    return dataclasses.replace(
        config,
        draft=dataclasses.replace(
            config.draft, num_key_value_heads=4, draft_vocab_size=200, sliding_window=8
        ),
        data=dataclasses.replace(
            config.data, features_dir=os.path.join(folder, "features"), skip_repeats=3
        ),
        loss=LossConfig(hidden=0.1),
        candidates=CandidateConfig(always=20, total=80),
        warm_start=WarmStart(markov=True, context=True),
        **changes,
    )


def quiet(line: str) -> None:
    """Takes progress lines."""


def assert_same(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize("build", [toy_config, crops_config])
def test_a_resumed_run_equals_one_that_was_not_stopped(corpus, tmp_path, build):
    whole = train(build(corpus, tmp_path / "whole"), progress=quiet)
    stopped = build(corpus, tmp_path / "stopped")
    trainer = Trainer(stopped, prepare(stopped, quiet), quiet)
    trainer.run(stop_after=2)
    resumed = open_run(stopped, quiet)
    assert int(resumed.state.step) == 2
    resumed.run()
    assert_same(whole.state, resumed.state)

    def losses(name: str) -> list:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert losses("whole") == losses("stopped")
    assert len(losses("whole")) == 3 + 3  # every second step, and validation at 0, 3 and 6
    events = list((tmp_path / "whole" / "tensorboard").iterdir())
    assert events and events[0].stat().st_size > 0


def test_the_exported_draft_loads_and_refuses_another_target(corpus, tmp_path):
    config = crops_config(corpus, tmp_path / "run")
    trainer = train(config, progress=quiet)
    target_config, target_params = load_target(corpus[0])
    shared = LlamaTarget(config=target_config).shared_head(target_params)
    mark = fingerprint_target(corpus[0])
    draft_config, params, head = load_draft(
        tmp_path / "run" / "draft", target_config, shared, fingerprint=mark
    )
    assert draft_config == trainer._prepared.draft.config
    assert_same(head.target_ids, trainer._prepared.frozen.shared.target_ids)
    ours, theirs = jax.tree.leaves(trainer.state.params), jax.tree.leaves(params)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-8, atol=1e-8)
    with pytest.raises(ValueError, match="trained for target"):
        load_draft(
            tmp_path / "run" / "draft",
            target_config,
            shared,
            fingerprint=dataclasses.replace(mark, sha256="0" * 64),
        )
    again = dataclasses.replace(
        config,
        output_dir=str(tmp_path / "again"),
        warm_start=WarmStart(draft=str(tmp_path / "run" / "draft")),
    )
    assert_same(prepare(again, quiet).params, params)
    chosen = dataclasses.replace(again.warm_start, choose_vocabulary=True)
    text = tmp_path / "other.jsonl"  # fewer samples: other tokens are frequent
    text.write_text("".join(corpus[1].read_text().splitlines(keepends=True)[:8]))
    data = dataclasses.replace(
        again.data, train_data=str(text), features_dir=str(tmp_path / "other_features")
    )
    prepared = prepare(dataclasses.replace(again, warm_start=chosen, data=data), quiet)
    ids, before = (np.asarray(s.target_ids) for s in (prepared.frozen.shared, head))
    assert set(ids.tolist()) != set(before.tolist())
    both, at, was = np.intersect1d(ids, before, return_indices=True)
    assert len(both) > 100
    assert_same(prepared.params["markov"]["w2"][at], params["markov"]["w2"][was])


def test_a_signal_stops_after_the_step_with_a_checkpoint(corpus, tmp_path):
    config = toy_config(corpus, tmp_path / "run", log_every=1)
    lines = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if line.startswith("train 2/"):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    trainer = Trainer(config, prepare(config, quiet), interrupt)
    trainer.run()
    assert int(trainer.state.step) in (2, 3)
    assert signal.getsignal(signal.SIGINT) is before
    assert any("stopping" in line for line in lines)
    assert int(open_run(config, quiet).state.step) == int(trainer.state.step)


def test_a_full_disk_leaves_the_last_checkpoint_good(corpus, tmp_path, monkeypatch):
    config = toy_config(corpus, tmp_path / "run")
    trainer = Trainer(config, prepare(config, quiet), quiet)
    trainer.run(stop_after=2)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OSError, match="step 3.*No space left.*last good one is of step 2"):
        trainer.run(stop_after=3)
    monkeypatch.undo()
    assert int(open_run(config, quiet).state.step) == 2


def test_a_checkpoint_of_another_draft_is_refused(corpus, tmp_path):
    config = toy_config(corpus, tmp_path / "run")
    Trainer(config, prepare(config, quiet), quiet).run(stop_after=1)
    other = dataclasses.replace(config, draft=dataclasses.replace(config.draft, markov_rank=6))
    with pytest.raises(ValueError, match="does not fit this config"):
        open_run(other, quiet)


def test_dflash_and_accumulation_train(corpus, tmp_path):
    config = toy_config(
        corpus,
        tmp_path / "run",
        loss=LossConfig(ce=1.0, l1=0.0, confidence=0.0),
        optimizer=OptimizerConfig(learning_rate=3e-3, accumulate=2),
    )
    shape = dataclasses.replace(
        config.draft,
        markov_rank=0,
        markov_head_type=None,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    trainer = train(dataclasses.replace(config, draft=shape), progress=quiet)
    assert "markov" not in trainer.state.params and "confidence" not in trainer.state.params
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert np.isfinite(record["loss"]) and "confidence_loss" not in record


def test_the_command_line(corpus, tmp_path, capsys):
    path = tmp_path / "c.py"
    path.write_text(
        "from dspark_jax.train.config import DataConfig, DraftShape, TrainConfig\n"
        f"CONFIG = TrainConfig(target={str(corpus[0])!r}, output_dir={str(tmp_path / 'o')!r},\n"
        "    draft=DraftShape(num_hidden_layers=1, block_size=2, mask_token_id=0, markov_rank=4,\n"
        "        target_layer_ids=(0,)),\n"
        f"    data=DataConfig(train_data={str(corpus[1])!r}, max_length=48, num_anchors=4),\n"
        "    steps=2)\n"
    )
    assert main(["--config", str(path), "--set", "log_every=1"]) == 0
    assert "train 2/2" in capsys.readouterr().out
    assert main(["--config", str(path), "--export", str(tmp_path / "e")]) == 0
    assert (tmp_path / "e" / "config.json").is_file()
    assert main(["--config", str(path), "--set", "data.train_data=nowhere"]) == 1
    assert "nowhere not found" in capsys.readouterr().err


@pytest.mark.slow
def test_two_hundred_steps_from_scratch_learn_the_text(corpus, tmp_path):
    config = toy_config(
        corpus,
        tmp_path / "run",
        steps=200,
        log_every=20,
        measure_every=0,
        optimizer=OptimizerConfig(learning_rate=2e-2),
    )
    train(config, progress=quiet)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    taus = [json.loads(line)["tau_probabilistic"] for line in lines]
    assert losses[0] > 2.0 and losses[-1] < 1.7, losses
    assert taus[-1] > taus[0] + 0.15, taus
