"""The GGUF conversion: rows, dequantisation, tokenizer, refusals, atomicity."""

import json
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from dspark_jax.checkpoint.gguf import convert_gguf, unpermute_rotary_rows

D, N, G, H, F, L = 64, 4, 2, 16, 96, 2
SPECIALS = ["<|end|>", "<|user|>", "<|model|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = "{% for m in messages %}{{ '<|user|>' + m['content'] + '<|end|>' }}{% endfor %}"


def byte_symbols() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE: itself, or the next free one."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(free)) for byte in range(256)]


VOCAB = [*SPECIALS, *byte_symbols(), *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
V = len(VOCAB)


def interleave_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a stored head is row i of the original, row 2i+1 is row H/2+i."""
    stored = np.empty_like(weight)
    for head in range(heads):
        for i in range(H // 2):
            stored[head * H + 2 * i] = weight[head * H + i]
            stored[head * H + 2 * i + 1] = weight[head * H + H // 2 + i]
    return stored


def random_q8_0(rng: np.random.Generator, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of random Q8_0 blocks (float16 scale, 32 int8) and the values they stand for."""
    scale = rng.uniform(0.001, 0.1, (rows, width // 32, 1)).astype("<f2")
    codes = rng.integers(-128, 128, (rows, width // 32, 32)).astype(np.int8)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=-1)
    values = scale.astype(np.float32) * codes.astype(np.float32)
    return raw.reshape(rows, -1), values.reshape(rows, width)


def random_q4_1(rng: np.random.Generator, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of random Q4_1 blocks (float16 scale and minimum, 16 bytes: low nibbles first)."""
    scale = rng.uniform(0.001, 0.1, (rows, width // 32, 1)).astype("<f2")
    minimum = rng.uniform(-1, 0, (rows, width // 32, 1)).astype("<f2")
    packed = rng.integers(0, 256, (rows, width // 32, 16)).astype(np.uint8)
    raw = np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), packed], axis=-1)
    codes = np.concatenate([packed % 16, packed // 16], axis=-1).astype(np.float32)
    values = codes * scale.astype(np.float32) + minimum.astype(np.float32)
    return raw.reshape(rows, -1), values.reshape(rows, width)


def random_model(seed: int = 0) -> tuple[dict, dict[str, np.ndarray]]:
    """GGUF tensors (name to array and type) and the Hugging Face tensors they stand for."""
    rng = np.random.default_rng(seed)
    stored: dict = {}
    expected: dict[str, np.ndarray] = {}

    def plain(name: str, hf_name: str, *shape: int, heads: int = 0, half: bool = False) -> None:
        values = rng.standard_normal(shape).astype(np.float16 if half else np.float32)
        expected[hf_name] = values.astype(np.float32)
        kept = interleave_rows(values, heads) if heads else values
        stored[name] = (kept, QType.F16 if half else QType.F32)

    def quantised(name: str, hf_name: str, rows: int, width: int, qtype: QType) -> None:
        make = random_q8_0 if qtype == QType.Q8_0 else random_q4_1
        raw, expected[hf_name] = make(rng, rows, width)
        stored[name] = (raw, qtype)

    quantised("token_embd.weight", "model.embed_tokens.weight", V, D, QType.Q8_0)
    plain("output_norm.weight", "model.norm.weight", D)
    for i in range(L):
        old, new = f"blk.{i}.", f"model.layers.{i}."
        plain(old + "attn_norm.weight", new + "input_layernorm.weight", D)
        plain(old + "ffn_norm.weight", new + "post_attention_layernorm.weight", D)
        plain(old + "attn_q.weight", new + "self_attn.q_proj.weight", N * H, D, heads=N)
        plain(old + "attn_k.weight", new + "self_attn.k_proj.weight", G * H, D, heads=G, half=True)
        quantised(old + "attn_v.weight", new + "self_attn.v_proj.weight", G * H, D, QType.Q4_1)
        quantised(old + "attn_output.weight", new + "self_attn.o_proj.weight", D, D, QType.Q4_1)
        quantised(old + "ffn_gate.weight", new + "mlp.gate_proj.weight", F, D, QType.Q8_0)
        quantised(old + "ffn_up.weight", new + "mlp.up_proj.weight", F, D, QType.Q4_1)
        quantised(old + "ffn_down.weight", new + "mlp.down_proj.weight", D, F, QType.Q4_1)
    return stored, expected


def write_gguf(
    path: Path,
    tensors: dict,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    merges: list[str] = MERGES,
    add_bos: bool = False,
    rope_scaling: bool = False,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(L)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(G)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope_scaling:
        writer.add_rope_scaling_factor(8.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (V - len(SPECIALS) - 1) + [4])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    for name, (values, qtype) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gguf")
    stored, expected = random_model()
    convert_gguf(write_gguf(folder / "tiny.gguf", stored), folder / "out")
    return folder / "out", expected


def tokenizer_of(folder: Path, **options) -> Tokenizer:
    convert_gguf(write_gguf(folder / "t.gguf", random_model()[0], **options), folder / "t")
    return Tokenizer.from_file(str(folder / "t" / "tokenizer.json"))


def test_every_tensor_has_its_original_values(converted) -> None:
    out, expected = converted
    loaded = load_file(out / "model.safetensors")
    assert loaded.keys() == expected.keys()
    for name, values in expected.items():
        assert loaded[name].dtype == np.float32, name
        np.testing.assert_array_equal(loaded[name], values, err_msg=name)
    with safe_open(out / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_unpermute_is_not_its_own_inverse() -> None:
    rows = np.arange(2 * H, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    stored = interleave_rows(rows, 2)
    np.testing.assert_array_equal(unpermute_rotary_rows(stored, 2), rows)
    assert not np.array_equal(interleave_rows(stored, 2), rows)


def test_config(converted) -> None:
    config = json.loads((converted[0] / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V,
        "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "head_dim": H,
        "num_attention_heads": N, "num_key_value_heads": G, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope_theta": 100000.0, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "dtype": "float32",
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    assert {name: config.get(name, "absent") for name in expected} == expected


def test_separate_output_head_is_written_and_unties(tmp_path: Path) -> None:
    stored, _ = random_model()
    raw, values = random_q8_0(np.random.default_rng(9), V, D)
    stored["output.weight"] = (raw, QType.Q8_0)
    convert_gguf(write_gguf(tmp_path / "m.gguf", stored), tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(loaded["lm_head.weight"], values)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "text",
    [
        "hello world",
        "naïve café",
        "東京 タワー",
        "🦊 👩‍👩‍👧",
        "مرحبا",
        " a\n\n\tb  ",
        "x12 <tool> y",
        "",
    ],
)
def test_text_survives_the_round_trip(converted, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) <= len(text.encode())


def test_token_ids_and_merges(converted) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    assert tokenizer.encode("hello world").tokens == ["hello", "Ġw", "o", "r", "l", "d"]
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(VOCAB)}
    # The katakana letter is three bytes, E3 82 BF, and no merge joins them.
    first = len(SPECIALS)
    assert tokenizer.encode("タ").ids == [first + 0xE3, first + 0x82, first + 0xBF]


def test_special_tokens_are_one_id_and_skipped_in_text(converted) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    ids = tokenizer.encode("<|user|>hello<|end|><tool>").ids
    assert ids == [1, VOCAB.index("hello"), 0, VOCAB.index("<tool>")]
    assert tokenizer.decode(ids) == "hello<tool>"


def test_digits_are_split_by_smollm_only(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert tokenizer_of(tmp_path / "a").encode("w12").tokens == ["w", "1", "2"]
    assert tokenizer_of(tmp_path / "b", pre="gpt-2").encode("w12").tokens == ["w", "12"]


def test_bos_is_added_when_the_file_says_so(tmp_path: Path, converted) -> None:
    assert tokenizer_of(tmp_path, add_bos=True).encode("hello").ids == [1, VOCAB.index("hello")]
    plain = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    assert plain.encode("hello").ids == [VOCAB.index("hello")]


def test_tokenizer_config_and_chat_template(converted) -> None:
    config = json.loads((converted[0] / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|user|>", "<|end|>")
    assert config["pad_token"] == "<|end|>" and "unk_token" not in config
    template = jinja2.Template(config["chat_template"])
    rendered = template.render(messages=[{"role": "user", "content": "東京"}])
    assert rendered == "<|user|>東京<|end|>"


def refuse(tmp_path: Path, path: Path, match: str, error: type[Exception] = ValueError) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=match):
        convert_gguf(path, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_refuses_other_architectures(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model()[0], arch="mamba")
    refuse(tmp_path, path, "got 'mamba', expected 'llama'")


def test_refuses_settings_it_would_ignore(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model()[0], rope_scaling=True)
    refuse(tmp_path, path, "rope.scaling.factor")


def test_names_left_over_tensors(tmp_path: Path) -> None:
    stored, _ = random_model()
    stored["blk.0.attn_q.bias"] = (np.zeros(N * H, np.float32), QType.F32)
    path = write_gguf(tmp_path / "m.gguf", stored)
    refuse(tmp_path, path, r"missing \[\], left over \['blk.0.attn_q.bias'\]")


def test_names_missing_tensors(tmp_path: Path) -> None:
    stored, _ = random_model()
    del stored["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "m.gguf", stored)
    refuse(tmp_path, path, r"missing \['blk.1.ffn_up.weight'\], left over \[\]")


def test_refuses_a_tensor_of_the_wrong_shape(tmp_path: Path) -> None:
    stored, _ = random_model()
    stored["blk.0.attn_k.weight"] = (np.zeros((N * H, D), np.float32), QType.F32)
    path = write_gguf(tmp_path / "m.gguf", stored)
    refuse(tmp_path, path, r"attn_k.weight: got shape \(64, 64\), expected \(32, 64\)")


def test_refuses_a_type_it_cannot_dequantise(tmp_path: Path) -> None:
    stored, _ = random_model()
    stored["output_norm.weight"] = (np.ones(D, np.int32), QType.I32)
    path = write_gguf(tmp_path / "m.gguf", stored)
    refuse(tmp_path, path, "output_norm.weight: cannot dequantise type I32")


def test_refuses_other_tokenizers_and_bad_merges(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model()[0], pre="llama-bpe")
    refuse(tmp_path, path, "pre-tokenizer 'llama-bpe'")
    path = write_gguf(tmp_path / "n.gguf", random_model()[0], merges=[*MERGES, "q z"])
    refuse(tmp_path, path, "merge 6: got 'q z'")


def test_refuses_files_that_are_not_gguf(tmp_path: Path) -> None:
    refuse(tmp_path, tmp_path / "absent.gguf", "does not exist", FileNotFoundError)
    (tmp_path / "text.gguf").write_text("not a model, but long enough to hold a header")
    refuse(tmp_path, tmp_path / "text.gguf", "not a readable GGUF")
    whole = write_gguf(tmp_path / "m.gguf", random_model()[0]).read_bytes()
    for cut in (3, 200, len(whole) // 2, len(whole) - 64):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        refuse(tmp_path, tmp_path / "cut.gguf", "not a readable GGUF")


def test_never_touches_an_existing_directory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model()[0])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    refuse(tmp_path, path, "already exists", FileExistsError)


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model()[0])
    seen = []

    def interrupt(line: str) -> None:
        if line.startswith("tensors"):
            seen.extend(entry.name for entry in tmp_path.glob("*/*"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(path, tmp_path / "out", progress=interrupt)
    assert seen == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model()[0])

    def intrude(line: str) -> None:
        if line.startswith("tensors"):
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / "theirs.txt").write_text("keep")

    with pytest.raises(FileExistsError, match="already exists"):
        convert_gguf(path, tmp_path / "out", progress=intrude)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf", "out"]
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["theirs.txt"]


def test_progress_counts_tensors_and_bytes(tmp_path: Path) -> None:
    lines: list[str] = []
    stored, expected = random_model()
    convert_gguf(write_gguf(tmp_path / "m.gguf", stored), tmp_path / "out", progress=lines.append)
    total = len(expected)
    assert any(line.startswith(f"tensors {total}/{total}, ") for line in lines)
    assert "MB" in lines[1] and lines[-1] == f"wrote {tmp_path / 'out'}"
