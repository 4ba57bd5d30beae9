"""`tools/convert.py --inspect` on golden folders and on the headers of real releases."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.deepseek_models import deepseek_hf
from tests.unit.test_deepseek_checkpoint import RELEASES, SHARED_SIZES
from tools import convert

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
ITEM_BYTES = {"F32": 4, "BF16": 2}


def _report(folder: Path, capsys: pytest.CaptureFixture) -> dict[str, str]:
    assert convert.main(["--inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {label: text.strip() for label, text in (line.split(":", 1) for line in lines)}


def write_release(folder: Path, name: str) -> None:
    """The real names, types and shapes over a file with a hole where the weights would be."""
    family, _, _, block, sizes = RELEASES[name]
    hf = deepseek_hf(family, **SHARED_SIZES, **sizes)
    hf["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(hf))
    header, end = {}, 0
    for line in gzip.open(GOLDEN / "tensors" / f"{name}.tsv.gz", "rt").read().splitlines():
        tensor, dtype, sizes = line.split("\t")
        shape = [int(size) for size in sizes.split("x")]
        begin, size = end, ITEM_BYTES.get(dtype, 1)
        for length in shape:
            size *= length
        end += size
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "mtp_v41",
            {
                "kind": "DeepSeek V4.1 with a DSpark draft of 3 blocks (mtp.*)",
                "weights": "FP8 in blocks of 32x32, FP4",
                "draft tensors": "2,401, all of them known",
                "draft parameters": "14,225,362,530",
                "taps": "target layers [36, 37, 38], by their output (-1: the embedding); "
                "stored as [37, 38, 39], the INPUT of each",
                "experts": "128, 3 per token",
            },
        ),
        (
            "mtp_v4pro",
            {
                "draft tensors": "7,009, all of them known",
                "draft parameters": "77,498,408,103",
                "taps": "target layers [58, 59, 60], by their output (-1: the embedding); "
                "stored as [58, 59, 60], the output of each",
                "heads": "Markov (rank 512), confidence",
            },
        ),
    ],
)
def test_real_releases_by_their_headers(name, expected, tmp_path, capsys):
    write_release(tmp_path, name)
    report = _report(tmp_path, capsys)
    assert expected.items() <= report.items()
    if name == "mtp_v41":
        assert report["draft bytes"].startswith("7,932,874,632 ")


def test_each_kind_of_golden_folder(capsys):
    dense = _report(GOLDEN / "qwen3_gated" / "draft", capsys)
    assert dense["kind"] == "dense draft, DeepSpec layout"
    assert dense["heads"] == "Markov (gated, rank 8), confidence"
    assert dense["to run it"].endswith(f"--draft {GOLDEN / 'qwen3_gated' / 'draft'}")
    target = _report(GOLDEN / "llama_tiny", capsys)
    assert target["kind"] == "target, llama"
    assert target["to run it"].startswith("python -m dspark_jax.serve --model ")
    deepseek = _report(GOLDEN / "v4_tiny", capsys)
    assert deepseek["weights"] == "not quantised"
    assert deepseek["draft bytes"].startswith("1,103,724 ")


def test_what_does_not_fit_ends_with_an_error(tmp_path, capsys):
    shutil.copytree(GOLDEN / "v41_tiny_quantized", tmp_path / "copy")
    shard = tmp_path / "copy" / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    cases = {"is truncated or not a safetensors file": None, "lacks the shards": shard.unlink}
    for message, change in cases.items():
        if change:
            change()
        assert convert.main(["--inspect", str(tmp_path / "copy")]) == 1
        assert message in capsys.readouterr().err
    assert convert.main(["--inspect", str(tmp_path / "absent")]) == 1
    assert "config.json not found" in capsys.readouterr().err
