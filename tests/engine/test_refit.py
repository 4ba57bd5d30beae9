"""A confidence head refitted to recorded rounds: what is replayed, what is fitted, what is kept."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import judge
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.engine.load import load_pair
from dspark_jax.engine.record import RecordingEngine
from dspark_jax.engine.requests import Request
from dspark_jax.train.refit import Head, HeadRows, choose_pull, fit_head, replay_rounds
from dspark_jax.types import SamplingParams
from tests.models import write_draft, write_target
from tools.refit_confidence import BIAS, WEIGHT, head_of, main

DRAFTS, TEMPERATURE = 3, 0.8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refit")
    target = write_target(folder / "tiny", layers=2, scale=6.0)
    return target, write_draft(folder / "tiny-draft", target, block_size=DRAFTS, scale=6.0)


def recorded(folders, count: int, seed: int = 0, draft=None):
    """A pair, an engine that has run some prompts, and their rounds."""
    pair = load_pair(str(folders[0]), str(draft or folders[1]))
    engine = RecordingEngine(pair.decoder(), pair.params, slots=1, capacity=48)
    rng = np.random.default_rng(seed)
    requests = [
        Request(
            prompt_ids=tuple(rng.integers(3, 320, 2 + i % 5).tolist()), max_tokens=20 + i % 13,
            temperature=TEMPERATURE, seed=1000 * seed + i, stop_ids=pair.stop_ids,
        )
        for i in range(count)
    ]  # fmt: skip
    return pair, engine, engine.record(requests, {})


def sampling() -> SamplingParams:
    return SamplingParams(
        temperature=jnp.float32([TEMPERATURE]), top_k=jnp.int32([0]), top_p=jnp.float32([1.0]),
        min_p=jnp.float32([0.0]), seed=jnp.uint32([0]),
    )  # fmt: skip


def replayed(pair, engine, traces) -> HeadRows:
    texts = [(s.request.prompt_ids, s.token_ids) for s in engine.recorded]
    return replay_rounds(pair.draft, pair.target, pair.params, traces, texts, sampling())


def reached(traces, engine) -> np.ndarray:
    """bool[N, K] by a plain loop over the rounds."""
    out = np.zeros((len(traces.prompt), DRAFTS), bool)
    place = {}
    for n, prompt in enumerate(traces.prompt):
        sequence = engine.recorded[prompt]
        done = place.setdefault(prompt, 0)
        for k in range(traces.verify_len[n]):
            if k > traces.accept_len[n] or done + k >= len(sequence.token_ids):
                break
            out[n, k] = True
        place[prompt] += int(traces.accept_len[n]) + 1
    return out


def test_replay_reads_what_the_rounds_read_and_knows_the_odds(folders):
    pair, engine, traces = recorded(folders, 60)
    rows = replayed(pair, engine, traces)
    seen = reached(traces, engine)
    assert len(rows.chance) == seen.sum() > 1000
    logits = head_of(pair.params.draft).logits(rows)
    np.testing.assert_allclose(logits, traces.confidence_logits[seen], atol=2e-4)
    np.testing.assert_array_equal(rows.position, np.nonzero(seen)[1])
    accepted = (np.arange(DRAFTS) < traces.accept_len[:, None])[seen]
    spread = rows.chance * (1 - rows.chance)
    assert 0.05 < rows.chance.mean() < 0.95 and rows.chance.std() > 0.03
    for weight in (np.ones(len(accepted)), rows.chance - rows.chance.mean()):
        excess = (weight * (accepted - rows.chance)).sum() / np.sqrt((weight**2 * spread).sum())
        assert abs(excess) < 3.5  # standard deviations: they are the odds, and not only on average


def test_the_tool_calibrates_a_head_and_touches_nothing_else(
    folders, tmp_path, monkeypatch, capsys
):
    prompts = [{"turns": [f"the {word} dog {i}"]} for i in range(30) for word in ("lazy", "quick")]
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(lines)
    new = tmp_path / "new"
    arguments = [
        "--model", folders[0], "--draft", folders[1], "--prompts", tmp_path / "prompts.jsonl",
        "--temperature", TEMPERATURE, "--max-new-tokens", 32, "--batch", 1, "--out", new,
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["refit_confidence", *map(str, arguments)])
    main()
    assert "log loss" in capsys.readouterr().out
    before, after = TensorReader(folders[1]), TensorReader(new)
    assert before.names() == after.names()
    for name in before.names() - {WEIGHT, BIAS}:
        np.testing.assert_array_equal(before.read(name), after.read(name))
    results = []
    for draft in (folders[1], new):  # other prompts, by outcomes instead of odds
        _, engine, traces = recorded(folders, 60, seed=1, draft=draft)
        columns = (traces.confidence_logits, traces.accept_len, traces.verify_len)
        happened = (np.arange(DRAFTS) < traces.accept_len[:, None])[reached(traces, engine)]
        logits = traces.confidence_logits[reached(traces, engine)]
        results.append(
            {
                "loss": np.mean(np.logaddexp(0, logits) - happened * logits),
                "ece": np.mean(judge(*columns, np.ones(DRAFTS))["ece"]),
                "floor": np.mean(judge(*columns, np.ones(DRAFTS))["ece_floor"]),
                "tokens": [s.token_ids for s in engine.recorded],
            }
        )
    old, refitted = results
    assert refitted["tokens"] == old["tokens"]
    assert refitted["loss"] < old["loss"] - 0.02
    assert refitted["ece"] < min(0.5 * old["ece"], 1.6 * refitted["floor"])
    with pytest.raises(ValueError, match="exists"):
        main()


def made_up(count: int, weight: np.ndarray, bias: float, seed: int = 0) -> HeadRows:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(0.5, [0.3, 1.0, 4.0], (count, 3)).astype(np.float32)
    return HeadRows(
        inputs=inputs, chance=1 / (1 + np.exp(-(inputs @ weight + bias))),
        position=np.zeros(count, np.int32), prompt=np.arange(count) // 10,
    )  # fmt: skip


def test_weights_are_recovered_and_a_strong_pull_leaves_only_the_bias():
    weight, start = np.array([1.0, -0.5, 0.2]), Head(weight=np.zeros(3), bias=1.0)
    rows = made_up(2000, weight, -0.7)
    found = fit_head(rows, start, 1e-8)
    np.testing.assert_allclose([*found.weight, found.bias], [*weight, -0.7], atol=1e-3)
    held = fit_head(rows, start, 1e8)
    np.testing.assert_allclose(held.weight, 0.0, atol=1e-6)
    odds = rows.chance.mean()
    assert held.bias == pytest.approx(np.log(odds / (1 - odds)), abs=1e-6)


def test_the_fit_is_where_the_gradient_vanishes():
    rows, start = made_up(500, np.array([2.0, 1.0, -1.0]), 0.5), Head(weight=np.ones(3), bias=0.0)
    spread = rows.inputs.std(axis=0)

    def objective(values: jax.Array) -> jax.Array:
        logits = jnp.asarray(rows.inputs) @ values[:3] + values[3]
        loss = jnp.mean(jax.nn.softplus(logits) - rows.chance * logits)
        return loss + 0.05 / 2 * jnp.sum((spread * (values[:3] - 1.0)) ** 2)

    found = fit_head(rows, start, 0.05)
    gradient = jax.grad(objective)(jnp.asarray([*found.weight, found.bias], jnp.float32))
    np.testing.assert_allclose(gradient, 0.0, atol=2e-4)


def test_the_pull_suits_what_there_is_to_learn():
    noise = np.random.default_rng(1).random(400) < 0.5
    few = made_up(400, np.zeros(3), 0.0)
    few = HeadRows(inputs=few.inputs, chance=noise.astype(float), position=few.position,
                   prompt=few.prompt)  # fmt: skip
    right = Head(weight=np.zeros(3), bias=0.0)
    strong, _ = choose_pull(few, made_up(400, np.zeros(3), 0.0, seed=2), right)
    much = made_up(400, np.array([3.0, 1.0, 0.5]), 0.0)
    weak, head = choose_pull(much, made_up(400, np.array([3.0, 1.0, 0.5]), 0.0, seed=2), right)
    assert weak < 1e-3 < 0.1 < strong
    np.testing.assert_allclose(head.weight, [3.0, 1.0, 0.5], atol=0.05)


def test_what_cannot_be_fitted_is_refused(folders):
    rows, start = made_up(50, np.zeros(3), 0.0), Head(weight=np.zeros(4), bias=0.0)
    with pytest.raises(ValueError, match="a head of 4 weights"):
        fit_head(rows, start, 0.1)
    sure = HeadRows(inputs=rows.inputs, chance=np.ones(50), position=rows.position,
                    prompt=rows.prompt)  # fmt: skip
    with pytest.raises(ValueError, match="drafts that are not"):
        fit_head(sure, Head(weight=np.zeros(3), bias=0.0), 0.1)
    pair, engine, traces = recorded(folders, 4)
    texts = [(s.request.prompt_ids, s.token_ids[:-9]) for s in engine.recorded]
    with pytest.raises(ValueError, match="give the texts"):
        replay_rounds(pair.draft, pair.target, pair.params, traces, texts, sampling())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"--draft": "auto"}, "must be the directory"),
        ({"--rejection-sample-method": "coupled"}, "those of 'standard'"),
        ({"--held-out-share": "1"}, "between 0 and 1"),
        ({"--mesh": "data=2"}, "on one device"),
    ],
)
def test_bad_arguments_are_explained(folders, tmp_path, monkeypatch, changes, words):
    arguments = {
        "--draft": str(folders[1]),
        "--prompts": "none.jsonl",
        "--out": str(tmp_path / "n"),
    }
    flat = [word for pair in (arguments | changes).items() for word in pair]
    monkeypatch.setattr("sys.argv", ["refit_confidence", *flat])
    with pytest.raises(ValueError, match=words):
        main()


def test_a_draft_without_a_head_is_refused(folders, tmp_path, monkeypatch):
    plain = write_draft(tmp_path / "plain", folders[0], confidence=False)
    arguments = ["--draft", str(plain), "--prompts", "none.jsonl", "--out", str(tmp_path / "n")]
    monkeypatch.setattr("sys.argv", ["refit_confidence", *arguments])
    with pytest.raises(ValueError, match="no head to refit"):
        main()
