"""`tools/convert.py`: what goes in comes out, in every form, and nothing half-written stays."""

import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.checkpoint import convert as conversion
from dspark_jax.checkpoint import workplace
from dspark_jax.checkpoint.deepseek import load_deepseek_draft
from dspark_jax.checkpoint.draft import load_draft
from dspark_jax.checkpoint.fingerprint import fingerprint_target
from dspark_jax.checkpoint.orbax_layout import Manifest, OrbaxReader
from dspark_jax.checkpoint.quantized import quantise_fp8, scale_of
from dspark_jax.checkpoint.safetensors import TensorReader
from dspark_jax.checkpoint.safetensors_shards import write_shard
from dspark_jax.checkpoint.target import load_target
from dspark_jax.checkpoint.zarr_arrays import chunk_shape
from dspark_jax.engine.load import load_pair
from tests.deepseek_models import write_deepseek
from tests.models import write_draft, write_target
from tests.unit.draft_files import (
    golden_target,
    read_files,
    to_specforge,
    to_speculators,
    write_files,
)
from tests.unit.test_inspect import write_release
from tools import convert, parity

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
QUANTISED = GOLDEN / "v41_tiny_quantized"
FOLDERS = {
    "v41_tiny_quantized": load_deepseek_draft,
    "v4_tiny": load_deepseek_draft,
    "llama_tiny": load_target,
    "qwen3_moe_tiny": load_target,
    "qwen3_gated/draft": lambda at, **kw: load_draft(at, *golden_target("qwen3_gated"), **kw),
}  # fmt: skip


def _run(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def _same(got: object, expected: object) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def _left(folder: Path) -> list[str]:
    """What lies beside a source after a conversion."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", FOLDERS)
def test_converted_loads_as_the_source_does_and_comes_back_with_its_bytes(name, tmp_path):
    """Bit for bit: in float32 from what was stored, in bfloat16 from what was rounded."""
    source, load = GOLDEN / name, FOLDERS[name]
    assert _run(source, tmp_path / "stored") == 0
    assert _run(source, tmp_path / "halved", "--dtype", "bfloat16") == 0
    assert _run(tmp_path / "stored", tmp_path / "back", "--to", "hf") == 0
    _same(load(tmp_path / "stored")[1:], load(source)[1:])
    halved = {"dtype": jnp.bfloat16}
    _same(load(tmp_path / "halved", **halved)[1:], load(source, **halved)[1:])
    assert load(tmp_path / "stored")[0] == load(source)[0]
    stored, back = TensorReader(source), TensorReader(tmp_path / "back")
    left_out = Manifest.read(tmp_path / "stored").left_out
    assert back.names() == stored.names() - {*left_out}
    assert all(re.match(r"layers\.|norm\.|hc_head_", name) for name in left_out)
    for tensor in back.names():
        assert back.dtype(tensor) == stored.dtype(tensor)
        assert back.read(tensor).tobytes() == stored.read(tensor).tobytes(), tensor
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert _left(tmp_path) == ["back", "halved", "stored"]


def _quantised(folder: Path, family: str, block: int, rng: np.random.Generator) -> None:
    """A tiny draft as releases store them: FP8 in square blocks, experts in FP4, ragged edges."""
    sizes = {"hidden_size": 40, "moe_intermediate_size": 34, "q_lora_rank": 35}
    _, tensors = write_deepseek(folder, family, rng, stages=1, **sizes)
    entries, values = [], {}

    def add(name: str, dtype: str, value: np.ndarray) -> None:
        entries.append((name, dtype, value.shape))
        values[name] = value

    for name, value in tensors.items():
        scale, rows, columns = scale_of(name), value.shape[0], value.shape[-1]
        if ".experts." in name:
            add(name, "I8", rng.integers(-128, 128, (rows, columns // 2)).astype(np.int8))
            grid = (rows, -(-columns // 32))
            add(scale, "F8_E8M0", rng.integers(115, 125, grid).astype(np.uint8))
        elif re.search(r"\.(w\w+|main_proj)\.weight", name):
            codes, scales = quantise_fp8(value, (block, block))
            add(name, "F8_E4M3", codes)
            add(scale, "F8_E8M0", scales)
        else:
            add(name, "F32", value)
    write_shard(folder / "model.safetensors", entries, values.__getitem__)
    hf = json.loads((folder / "config.json").read_text())
    hf["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(hf))


@pytest.mark.parametrize(("family", "block"), [("deepseek_v41", 32), ("deepseek_v4", 128)])
def test_quantised_weights_of_both_families(family, block, tmp_path, rng):
    """Codes and scales are kept, dequantised as the source's are, and given back."""
    source, made = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    _quantised(source, family, block, rng)
    assert _run(source, made) == 0
    assert _run(source, tmp_path / "exact", "--dtype", "float32") == 0
    assert _run(made, tmp_path / "back", "--to", "hf") == 0
    kinds = {leaf.form: leaf.block for leaf in Manifest.read(made).leaves}
    assert kinds == {"plain": None, "fp4": (1, 32), "fp8": (block, block)}
    expected = load_deepseek_draft(source)[1]
    for folder in (made, tmp_path / "exact", tmp_path / "back"):
        _same(load_deepseek_draft(folder)[1], expected)
    packed = [load_deepseek_draft(folder, experts="packed")[1] for folder in (source, made)]
    _same(*packed)
    for name, axes in (("gate_up", (0, 3, 1, 2)), ("down", (0, 2, 1))):
        kernel = packed[0]["layers"][0]["moe"][name]
        _same(kernel.values(jnp.float32).transpose(axes), expected["layers"][0]["moe"][name])
    stored, back = TensorReader(source), TensorReader(tmp_path / "back")
    assert back.names() == stored.names() and "F8_E8M0" in map(stored.dtype, stored.names())
    for name in back.names():
        assert back.dtype(name) == stored.dtype(name)
        assert back.read(name).tobytes() == stored.read(name).tobytes(), name


def test_parity_of_a_converted_model(tmp_path):
    """The golden vectors again, the draft read from a conversion to float32."""
    assert _run(GOLDEN / "v41_tiny", tmp_path / "model", "--dtype", "float32") == 0
    shutil.copy(GOLDEN / "v41_tiny" / "outputs.safetensors", tmp_path / "model")
    results = [r for r in parity.check_folder(tmp_path / "model") if not r.skipped]
    assert len(results) == 9 and all(r.ok for r in results)


LAYOUTS = {
    "speculators": to_speculators,
    "reduced": functools.partial(to_speculators, ids=np.arange(3, 90, 4)),
    "specforge": to_specforge,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_keep_their_names(layout, tmp_path):
    """Sharded, under a prefix, with all tokens or some of them."""
    hf, tensors = LAYOUTS[layout](*read_files(GOLDEN / "qwen3_vanilla" / "draft"))
    tensors = {f"model.{name}": value for name, value in tensors.items()}
    write_files(tmp_path / "source", hf, tensors, shards=3)
    assert _run(tmp_path / "source", tmp_path / "made") == 0
    assert _run(tmp_path / "made", tmp_path / "back", "--to", "hf") == 0
    target = golden_target("qwen3_vanilla")
    _same(load_draft(tmp_path / "made", *target)[1:], load_draft(tmp_path / "source", *target)[1:])
    assert TensorReader(tmp_path / "back").names() == tensors.keys()


def test_a_float8_conversion_of_fp4_loses_nothing(tmp_path):
    """And of other matrices no more than FP8 must; tables stay."""
    assert _run(QUANTISED, tmp_path / "eight", "--dtype", "float8") == 0
    _same(load_deepseek_draft(tmp_path / "eight")[1], load_deepseek_draft(QUANTISED)[1])
    assert _run(GOLDEN / "llama_tiny", tmp_path / "llama", "--dtype", "float8") == 0
    exact, rounded = (load_target(f)[1] for f in (GOLDEN / "llama_tiny", tmp_path / "llama"))
    _same(rounded["embedding"], exact["embedding"])
    for name in (("mlp", "down"), ("mlp", "gate_up"), ("qkv",), ("o",)):
        ours, theirs = rounded["layers"][1], exact["layers"][1]
        for part in name:
            ours, theirs = ours[part], theirs[part]
        error = np.abs(ours - theirs)  # e4m3 has three bits behind the first, and 2^-9 at the least
        assert error.any() and (error <= np.abs(theirs) / 16 + 2.0**-10).all(), name
    assert _run(tmp_path / "llama", tmp_path / "back", "--to", "hf") == 0
    back, stored = TensorReader(tmp_path / "back"), TensorReader(GOLDEN / "llama_tiny")
    for part in "qkvo":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert back.dtype(name) == "BF16" and back.shape(name) == stored.shape(name)
        np.testing.assert_allclose(
            back.read(name).astype(np.float32), stored.read(name), rtol=1 / 16, atol=2.0**-10
        )


def test_orbax_restores_it_whole_and_over_a_mesh(tmp_path):
    made = tmp_path / "made"
    assert _run(QUANTISED, made, "--mesh", "expert=2,model=2", "--dtype", "bfloat16") == 0
    kernel = load_deepseek_draft(made, dtype=jnp.bfloat16)[1]["layers"][1]["moe"]["gate_up"]
    mesh = jax.make_mesh((2, 2), ("expert", "model"))
    split = NamedSharding(mesh, PartitionSpec("expert", None, None, "model"))

    def shape(path: tuple, x: np.ndarray) -> jax.ShapeDtypeStruct:
        own = split if path[-1].key == "gate_up" else NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)

    with ocp.StandardCheckpointer() as checkpointer:
        whole = checkpointer.restore(made / "params")
        shapes = jax.tree_util.tree_map_with_path(shape, whole)
        spread = checkpointer.restore(made / "params", shapes)
    np.testing.assert_array_equal(whole["layers"]["1"]["moe"]["gate_up"], kernel)
    got = spread["layers"]["1"]["moe"]["gate_up"]
    np.testing.assert_array_equal(got, kernel)
    assert got.addressable_shards[0].data.shape == (3, 64, 2, 16)
    stored = json.loads((made / "params" / "layers.1.moe.gate_up" / ".zarray").read_text())
    assert stored["chunks"] == [1, 64, 2, 16]  # a device reads whole files, an expert each


@pytest.mark.parametrize(
    ("name", "stored"), [("mtp_v41", 7_932_874_632), ("mtp_v4flash", None), ("mtp_v4pro", None)]
)
def test_real_releases_are_planned_by_their_headers(name, stored, tmp_path):
    """Every tensor of the draft has its place; experts are written one at a time."""
    write_release(tmp_path, name)
    file, hf = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    width = hf.get("text_config", hf)["hidden_size"]
    with file.open("r+b") as handle:  # the header again, with the target's tables at the end
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
        end = max(entry["data_offsets"][1] for entry in header.values())
        table = 2 * 129280 * width
        for i, tensor in enumerate(("embed.weight", "head.weight")):
            offsets = [end + i * table, end + (i + 1) * table]
            header[tensor] = {"dtype": "BF16", "shape": [129280, width], "data_offsets": offsets}
        text = json.dumps(header).encode()
        handle.seek(0)
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + end + 2 * table)
    source = conversion.open_source(tmp_path, only="draft")
    assert source.left_out == ()
    leaves = conversion.plan_leaves(source, "as-stored")
    kept = sum(leaf.nbytes() for leaf, _ in leaves)
    assert kept == end + 2 * table and (stored is None or end == stored)
    assert len({n for leaf, _ in leaves for n in leaf.arrays()}) < 150
    halved = sum(leaf.nbytes() for leaf, _ in conversion.plan_leaves(source, "bfloat16"))
    parameters = sum(np.prod(shape) for _, rule in leaves for shape in rule.shapes)
    assert 2 * parameters <= halved < 2.01 * parameters
    for leaf, rule in leaves:
        if rule.group:
            assert leaf.form == "fp4" and leaf.nbytes() // leaf.shape[0] < 30e6


def test_files_of_an_array_suit_mesh_and_size():
    assert chunk_shape((8, 6), 4, parts=(2, 1)) == (4, 6)
    assert chunk_shape((12, 5), 2, entries=1, parts=(4, 1)) == (1, 5)
    chunk = chunk_shape((129280, 5120), 4, parts=(8, 1))
    assert 129280 // 8 % chunk[0] == 0 and chunk[0] * chunk[1] * 4 <= 128 << 20
    assert chunk_shape((), 4) == ()


@pytest.mark.parametrize("after", [1, 40])
def test_an_interrupted_conversion_goes_on(after, tmp_path, monkeypatch, capsys):
    """Ctrl-C leaves nothing at DST; the same command writes only what is missing."""
    assert _run(QUANTISED, tmp_path / "whole") == 0
    written, write = [], conversion._write

    def counting(directory, source, leaf, *rest) -> dict:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(leaf.path)
        return write(directory, source, leaf, *rest)

    monkeypatch.setattr(conversion, "_write", counting)
    assert _run(QUANTISED, tmp_path / "made") == 1
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert _left(tmp_path) == [".made.partial", "whole"]
    first, after = list(written), -1
    assert _run(QUANTISED, tmp_path / "made") == 0
    assert "parts are there already" in capsys.readouterr().err
    assert not set(written[len(first) :]) & set(first)
    manifest = Manifest.read(tmp_path / "made")
    assert manifest == Manifest.read(tmp_path / "whole")
    assert len(written) == len(manifest.leaves)
    assert _run("--verify", tmp_path / "made") == 0
    assert _left(tmp_path) == ["made", "whole"]


def test_other_settings_start_over(tmp_path, monkeypatch, capsys):
    def stop(*args: object) -> dict:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "copy_side_files", stop)
        assert _run(GOLDEN / "llama_tiny", tmp_path / "made") == 1
    assert _run(GOLDEN / "llama_tiny", tmp_path / "made", "--dtype", "bfloat16") == 0
    assert "starting over" in capsys.readouterr().err
    assert Manifest.read(tmp_path / "made").dtype == "bfloat16"


def _tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A change of the tensors of a written checkpoint."""

    def apply(folder: Path) -> None:
        hf, tensors = read_files(folder)
        change(tensors)
        write_files(folder, hf, tensors)

    return apply


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def _lose_a_shard(folder: Path) -> None:
    hf, tensors = read_files(folder)
    (folder / "model.safetensors").unlink()
    write_files(folder, hf, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


BREAKAGES = {
    "unknown": (
        _tensors(lambda t: t.update({"mtp.0.novelty": np.zeros(2, np.float32)})),
        r"unexpected tensor mtp\.0\.novelty",
    ),
    "unknown outside the draft": (
        _tensors(lambda t: t.update({"adapter.weight": np.zeros(2, np.float32)})),
        r"unexpected tensor adapter\.weight",
    ),
    "missing": (_tensors(lambda t: t.pop("mtp.1.norm.weight")), r"missing tensor mtp\.1\.norm"),
    "shape": (
        _tensors(lambda t: t.update({"mtp.0.hc_ffn_base": np.zeros(24, np.float32)})),
        r"mtp\.0\.hc_ffn_base has shape \[24\], expected \[15\]",
    ),
    "type": (
        _tensors(lambda t: t.update({"mtp.0.attn_norm.weight": np.zeros(24, np.int32)})),
        r"mtp\.0\.attn_norm\.weight is I32",
    ),
    "truncated": (_cut, r"model\.safetensors is truncated"),
    "shard": (_lose_a_shard, r"lacks the shards \['model-00002-of-00003\.safetensors'\]"),
    "config": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
}


@pytest.mark.parametrize(("change", "message"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_what_does_not_fit_is_named_and_nothing_is_written(change, message, tmp_path, rng, capsys):
    (tmp_path / "source").mkdir()
    write_deepseek(tmp_path / "source", "deepseek_v41", rng, stages=2)
    change(tmp_path / "source")
    assert _run(tmp_path / "source", tmp_path / "made") == 1
    assert re.search(message, capsys.readouterr().err)
    assert _left(tmp_path) == ["source"]


def test_wrong_requests_are_refused(tmp_path, capsys):
    llama = GOLDEN / "llama_tiny"
    assert _run(llama, tmp_path / "made", "--only", "draft") == 1
    assert _run(QUANTISED, tmp_path / "made", "--only", "target") == 1
    assert _run(llama, tmp_path / "made", "--mesh", "model=7") == 1
    assert _run(llama, tmp_path / "made", "--mesh", "rows=2") == 1
    assert _run(tmp_path / "absent", tmp_path / "made") == 1
    assert _run(llama, tmp_path / "made", "--to", "hf") == 1
    (tmp_path / "old").mkdir()
    assert _run(llama, tmp_path / "old") == 1
    assert _left(tmp_path) == ["old"]
    assert _run(llama, tmp_path / "made", "--only", "target") == 0
    assert _run(tmp_path / "made", tmp_path / "again") == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    expected = (
        "is a target, but only the draft", "no target of this family here yet", "does not divide",
        "is not an axis", "config.json not found", "has no dspark_checkpoint.json", "old exists",
        "is converted already",
    )  # fmt: skip
    assert len(said) == len(expected)
    assert all(text in line for text, line in zip(expected, said, strict=True))
    for arguments in ([], [llama], ["--inspect", llama, llama, tmp_path / "x"]):
        with pytest.raises(SystemExit, match="2"):
            _run(*arguments)


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    """Too little room is told before, and when it happens the work so far is kept."""
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
        patch.setattr(workplace.shutil, "disk_usage", lambda path: usage)
        assert _run(GOLDEN / "llama_tiny", tmp_path / "made") == 1
    assert "0.00 GB free, but 0.02 GB are needed" in capsys.readouterr().err
    assert _left(tmp_path) == []
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(writer: object, rows: np.ndarray) -> None:
        if "layers.1" in writer.name:
            raise full
        write(writer, rows)

    with monkeypatch.context() as patch:
        write = conversion.ArrayWriter.write
        patch.setattr(conversion.ArrayWriter, "write", fail)
        assert _run(GOLDEN / "llama_tiny", tmp_path / "made") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert _left(tmp_path) == [".made.partial"]
    assert _run(GOLDEN / "llama_tiny", tmp_path / "made") == 0
    _same(load_target(tmp_path / "made")[1], load_target(GOLDEN / "llama_tiny")[1])


def test_two_at_a_time_are_refused(tmp_path, capsys):
    files = [GOLDEN / "llama_tiny" / "model.safetensors"]
    with workplace.Workplace(tmp_path / "made", files, {}, 0, lambda line: None):
        assert _run(GOLDEN / "llama_tiny", tmp_path / "made") == 1
    assert "another process is writing" in capsys.readouterr().err


def test_damage_is_found(tmp_path, capsys):
    made = tmp_path / "made"
    assert _run(GOLDEN / "llama_tiny", made) == 0
    file = made / "params" / "layers.1.mlp.down" / "0.0"
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    assert _run("--verify", made) == 1
    assert _run(made, tmp_path / "back", "--to", "hf") == 1
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down is not what was written"):
        load_target(made)
    assert capsys.readouterr().err.count("layers.1.mlp.down is not what was written") == 2
    shutil.rmtree(file.parent)
    with pytest.raises(FileNotFoundError, match=r"lacks the arrays \['layers\.1\.mlp\.down'\]"):
        OrbaxReader(made)
    (made / "dspark_checkpoint.json").write_text('{"version": 9}')
    with pytest.raises(ValueError, match=r"cannot be read .*convert again"):
        load_target(made)


def test_inspection_of_a_converted_directory(tmp_path, capsys):
    assert _run(QUANTISED, tmp_path / "made", "--mesh", "expert=2") == 0
    assert _run("--inspect", tmp_path / "made") == 0
    out = capsys.readouterr().out
    assert "converted to Orbax, as-stored, cut for {'data': 1, 'expert': 2, 'model': 1}" in out
    assert re.search(r"draft bytes: +[\d,]+ \(.*fp4 [\d,]+", out)


def test_memory_stays_at_a_few_tensors(tmp_path):
    """143 MB in six shards, converted there and back in another process."""
    layers, width, inner = 6, 512, 3840
    source = tmp_path / "source"
    hf = json.loads((GOLDEN / "llama_tiny" / "config.json").read_text()) | {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": (64, width), "model.norm.weight": (width,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}{x}.weight": (width,) for x in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= {f"{at}self_attn.{x}_proj.weight": (32, width) for x in "qkv"}
        tensors[f"{at}self_attn.o_proj.weight"] = (width, 32)
        tensors |= {f"{at}mlp.{x}_proj.weight": (inner, width) for x in ("gate", "up")}
        tensors[f"{at}mlp.down_proj.weight"] = (width, inner)
    values = {k: np.full(shape, 0.5, np.float32) for k, shape in tensors.items()}
    write_files(source, hf, values, shards=6)
    largest = 2 * inner * width * 4  # gate and up are one parameter
    made, back = tmp_path / "made", tmp_path / "back"
    runs = [[str(source), str(made)], [str(made), str(back), "--to", "hf"]]
    code = f"from tools import convert; [convert.main(run) for run in {runs!r}]"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    peaks = re.findall(r"peak memory ([\d.]+) MB above", done.stdout)
    assert len(peaks) == 2 and (back / "model.safetensors").stat().st_size > 6 * largest
    assert all(largest < float(peak) * 1e6 < 4 * largest for peak in peaks), done.stdout


def test_a_pair_of_converted_directories_is_the_same_pair(tmp_path):
    target = write_target(tmp_path / "target")
    draft = write_draft(tmp_path / "draft", target)
    for name in ("target", "draft"):
        assert _run(tmp_path / name, tmp_path / f"made-{name}") == 0
    made = tmp_path / "made-target"
    assert fingerprint_target(made, name="x") == fingerprint_target(target, name="x")
    first = load_pair(str(target), str(draft))
    second = load_pair(str(made), str(tmp_path / "made-draft"))
    _same(second.params, first.params)
    assert (second.target, second.draft) == (first.target, first.draft)
    assert second.tokenizer.encode("the dog") == first.tokenizer.encode("the dog")
    other = write_target(tmp_path / "other", seed=7)
    with pytest.raises(ValueError, match="was trained for target 'target'"):
        load_pair(str(other), str(tmp_path / "made-draft"))


def test_a_deepseek_draft_is_attached_where_it_fits(tmp_path, rng):
    target = write_target(tmp_path / "target", layers=5, width=24)
    (tmp_path / "draft").mkdir()
    fits = {"vocab_size": 320, "dspark_target_layer_ids": [1, 3]}
    _, tensors = write_deepseek(tmp_path / "draft", "deepseek_v4", rng, stages=1, **fits)
    with pytest.raises(ValueError, match="embedding stored with draft .* is not that of this targ"):
        load_pair(str(target), str(tmp_path / "draft"))
    _, of_target = read_files(target)
    hf = json.loads((tmp_path / "draft" / "config.json").read_text())
    tensors |= {
        "embed.weight": of_target["model.embed_tokens.weight"],
        "head.weight": of_target["lm_head.weight"],
    }
    write_files(tmp_path / "draft", hf, tensors)
    assert _run(tmp_path / "draft", tmp_path / "made", "--only", "draft") == 0
    for folder in ("draft", "made"):
        pair = load_pair(str(target), str(tmp_path / folder), experts="float32")
        assert pair.target.tap_layer_ids == pair.draft.config.target_layer_ids == (1, 3)
        assert pair.params.shared.embedding is pair.params.target["embedding"]
    other = write_target(tmp_path / "other", layers=4, width=32)
    message = r"reads layers \[1, 3\] of its own deepseek_v4 target .* hidden_size 24 against 32"
    with pytest.raises(ValueError, match=message):
        load_pair(str(other), str(tmp_path / "made"))
    with pytest.raises(ValueError, match="experts='packed' is about the routed experts"):
        load_pair(str(target), "none", experts="packed")
    with pytest.raises(ValueError, match="target architecture .* is not supported"):
        load_pair(str(GOLDEN / "v4_tiny"), "none")
