"""The command-line front ends on a tiny model, as a user would call them."""

import importlib
import json
from pathlib import Path

import pytest

from dspark_jax.cli import run_main
from tests.models import TinyPair, write_pair

pytestmark = pytest.mark.usefixtures("few_row_buckets")  # compiling takes most of the time


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    turns = ["count to four", "what does the fox do?", "water " * 400]
    path.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    return path


def _run(module: str, argv: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [module, *map(str, argv)])
    run_main(importlib.import_module(module).main)


def _models(pair: TinyPair) -> list:
    return ["--model", pair.target, "--draft", pair.draft]


def test_generate_gives_the_same_text_with_and_without_a_draft(
    pair: TinyPair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    texts = []
    paged = ["--kv-cache", "paged", "--policy", "lagged", "--planner", "host"]
    for draft, more in ((pair.draft, []), ("none", []), (pair.draft, paged)):
        argv = ["the quick", "--model", pair.target, "--draft", draft, "--max-new-tokens", 9]
        _run("dspark_jax.generate", [*argv, *more, "--json"], monkeypatch)
        texts.append(json.loads(capsys.readouterr().out))
    drafted, plain, by_pages = texts
    assert drafted["token_ids"] == plain["token_ids"] == by_pages["token_ids"]
    assert drafted["completion_tokens"] == len(drafted["token_ids"]) <= 9
    assert drafted["tau"] == pytest.approx(drafted["completion_tokens"] / drafted["rounds"])
    assert plain["rounds"] == plain["completion_tokens"]


def test_bench_reports_equal_tokens_and_all_keys(
    pair: TinyPair, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    argv = [*_models(pair), "--prompts", prompts, "--max-new-tokens", 8, "--batch", 2]
    _run("dspark_jax.bench", [*argv, "--max-model-len", 128, "--json"], monkeypatch)
    figures = json.loads(capsys.readouterr().out)
    wanted = {"tokens_equal", "tau", "speedup", "tokens_per_s", "plain_tokens_per_s",
              "accept_per_position", "prompts", "num_bypassed"}  # fmt: skip
    assert wanted <= set(figures)
    assert figures["scheduled_rows"] == figures["num_draft_tokens"] + figures["num_drafts"]
    assert figures["verified_rows"] >= figures["scheduled_rows"]
    assert figures["wasted_rows"] < figures["verified_rows"]
    assert all(0 < e < 1 for e in figures["survival_error_per_position"])
    assert all(-1 < gap < 1 for gap in figures["calibration_gap_per_position"])
    assert (figures["num_probes"], figures["probe_acceptance_length"]) == (0, None)
    assert figures["tokens_equal"] is True
    assert (figures["prompts"], figures["prompts_skipped"]) == (2, 1)  # the third is too long
    assert 1.0 <= figures["tau"] <= 5.0
    assert figures["speedup"] == pytest.approx(
        figures["tokens_per_s"] / figures["plain_tokens_per_s"]
    )


def test_eval_writes_results_and_a_picture(
    pair: TinyPair,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    out = tmp_path / "eval"
    argv = [*_models(pair), "--prompts", prompts, "--num-prompts", 2, "--max-new-tokens", 6]
    _run("dspark_jax.eval.__main__", [*argv, "--out", out], monkeypatch)
    results = json.loads((out / "results.json").read_text())
    assert set(results) == {"prompts T=0", "prompts T=1"}
    assert results["prompts T=0"]["tokens_equal"] is True
    assert results["prompts T=1"]["tokens_equal"] is None
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    assert "mean T=0" in capsys.readouterr().out


def test_generated_data_is_resumed_and_the_same_for_a_seed(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", "--model", pair.target, "--draft", "none", "--num", 3, "--slots", 2,
            "--max-new-tokens", 6, "--system", "be brief"]  # fmt: skip
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    _run("dspark_jax.data", [*argv, "--out", whole], monkeypatch)
    records = {r["id"]: r for r in map(json.loads, whole.read_text().splitlines())}
    assert len(records) == 3
    for record in records.values():
        roles = [turn["role"] for turn in record["conversations"]]
        assert roles == ["system", "user", "assistant"]
    torn.write_text(whole.read_text().splitlines()[0] + '\n{"id": "tiny-')
    _run("dspark_jax.data", [*argv, "--out", torn], monkeypatch)
    assert {r["id"]: r for r in map(json.loads, torn.read_text().splitlines())} == records


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--draft", "nowhere"], "nowhere"),
        (["--policy", "global"], "distribution would change"),
        (["--kv-cache", "paged"], "planner='host'"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--confidence-threshold", "2"], "between 0 and 1"),
        (["--batch", "0"], "batch=0"),
        (["--max-new-tokens", "5000"], "5000 new tokens must fit"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    pair: TinyPair,
    argv: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _run("dspark_jax.bench", [*_models(pair), *argv], monkeypatch)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
