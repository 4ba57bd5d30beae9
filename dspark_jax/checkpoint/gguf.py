"""Converts a Llama GGUF file into the Hugging Face layout.

The result is a directory with ``config.json``, ``model.safetensors`` (float32), ``tokenizer.json``
and ``tokenizer_config.json``, which loads like any other Hugging Face checkpoint.
"""

import dataclasses
import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

TOKEN_NORMAL, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_UNUSED = 1, 3, 4, 5

# The keys under "llama." that the conversion understands. Any other key could change the maths
# (rope scaling, sliding windows, experts), so it is refused, not skipped.
_LLAMA_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSource:
    """Where one tensor of the Hugging Face checkpoint comes from.

    Attributes:
        gguf_name: name of the tensor in the GGUF file.
        shape: expected shape, rows first.
        rotary_heads: number of heads whose rows GGUF stores permuted, 0 for a plain tensor.
    """

    gguf_name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


def unpermute_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Restores the half-split rotary row order of a query or key projection.

    GGUF stores the rows of a Llama head interleaved (0, H/2, 1, H/2+1, ...), Hugging Face as two
    halves (0..H/2-1, H/2..H-1).

    Args:
        weight: float32[heads*H, D], rows interleaved within each head.
        heads: number of heads, N for queries and G for keys.

    Returns:
        float32[heads*H, D], rows in half-split order.

    Source: llama.cpp convert_hf_to_gguf.py, LlamaModel.permute (this is its inverse).
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def llama_config(fields: Mapping[str, Any], *, tie_word_embeddings: bool) -> dict[str, Any]:
    """Builds the contents of a ``LlamaForCausalLM`` config.json from GGUF metadata.

    Args:
        fields: GGUF metadata, key to value.
        tie_word_embeddings: whether the LM head is the embedding table.

    Returns:
        The config as a JSON-ready dict, with ``rope_parameters`` and the older plain fields.

    Raises:
        ValueError: another architecture, a missing key, or a key this conversion cannot honour.
    """
    arch = fields.get("general.architecture")
    if arch != "llama":
        raise ValueError(
            f"GGUF architecture: got {arch!r}, expected 'llama'. Convert other architectures from"
            " their original Hugging Face checkpoint."
        )
    llama = {k.removeprefix("llama."): v for k, v in fields.items() if k.startswith("llama.")}
    unknown = sorted(llama.keys() - _LLAMA_KEYS)
    if unknown:
        raise ValueError(
            f"GGUF metadata has settings that this conversion cannot honour: {unknown}. Use the"
            " original Hugging Face checkpoint of this model instead."
        )
    width, heads = _need(llama, "embedding_length"), _need(llama, "attention.head_count")
    head_dim = llama.get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if llama.get(key, head_dim) != head_dim:
            raise ValueError(
                f"GGUF metadata llama.{key}: got {llama[key]}, expected the head width {head_dim}."
                " Heads of two widths and partial rotary embeddings are not supported."
            )
    theta = _shortest(llama.get("rope.freq_base", 10000.0))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_need(fields, "tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": _need(llama, "feed_forward_length"),
        "num_hidden_layers": _need(llama, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": llama.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(_need(llama, "attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": _need(llama, "context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tie_word_embeddings,
        "use_cache": True,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = fields.get(f"tokenizer.ggml.{key}_token_id")
    return config


def llama_tensors(config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Lists every tensor of a Llama checkpoint in the Hugging Face layout and its GGUF source.

    Args:
        config: contents of the model's config.json.

    Returns:
        Hugging Face tensor name to its source, in the order they are written.
    """
    width, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows, kv_rows = heads * config["head_dim"], kv_heads * config["head_dim"]
    layer = {
        "input_layernorm": ("attn_norm", (width,), 0),
        "self_attn.q_proj": ("attn_q", (rows, width), heads),
        "self_attn.k_proj": ("attn_k", (kv_rows, width), kv_heads),
        "self_attn.v_proj": ("attn_v", (kv_rows, width), 0),
        "self_attn.o_proj": ("attn_output", (width, rows), 0),
        "post_attention_layernorm": ("ffn_norm", (width,), 0),
        "mlp.gate_proj": ("ffn_gate", (mlp, width), 0),
        "mlp.up_proj": ("ffn_up", (mlp, width), 0),
        "mlp.down_proj": ("ffn_down", (width, mlp), 0),
    }
    table = TensorSource(gguf_name="token_embd.weight", shape=(vocab, width))
    sources = {"model.embed_tokens.weight": table}
    for index in range(config["num_hidden_layers"]):
        for name, (gguf_name, shape, rotary) in layer.items():
            sources[f"model.layers.{index}.{name}.weight"] = TensorSource(
                gguf_name=f"blk.{index}.{gguf_name}.weight", shape=shape, rotary_heads=rotary
            )
    sources["model.norm.weight"] = TensorSource(gguf_name="output_norm.weight", shape=(width,))
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = TensorSource(gguf_name="output.weight", shape=(vocab, width))
    return sources


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Builds the byte-level BPE tokenizer that a GGUF file carries.

    Args:
        fields: GGUF metadata, key to value.

    Returns:
        The tokenizer; control tokens are added special tokens of one id each.

    Raises:
        ValueError: another kind of tokenizer, or a vocabulary that contradicts itself.

    Source: llama.cpp src/llama-vocab.cpp, the "smollm" and "gpt-2" pre-tokenizers.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splitters = {
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        ),
        "gpt-2": byte_level,
    }
    if kind != "gpt2" or pre not in splitters:
        raise ValueError(
            f"GGUF tokenizer: got model {kind!r} with pre-tokenizer {pre!r}, expected model 'gpt2'"
            f" (byte-level BPE) with one of {sorted(splitters)}. Use the original Hugging Face"
            " checkpoint of this model instead."
        )
    tokens = _need(fields, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type", [TOKEN_NORMAL] * len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ValueError(
            f"GGUF vocabulary: got {len(tokens)} tokens, {len(vocab)} of them distinct, and"
            f" {len(types)} token types; the three must be equal. The file is damaged."
        )
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=_merges(fields, vocab)))
    tokenizer.pre_tokenizer = splitters[pre]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if fields.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[_need(fields, "tokenizer.ggml.bos_token_id")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, vocab[bos])],
        )
    for index, kind_of_token in enumerate(types):
        if kind_of_token == TOKEN_CONTROL:
            tokenizer.add_special_tokens([AddedToken(tokens[index], special=True)])
        elif kind_of_token == TOKEN_USER_DEFINED:
            tokenizer.add_tokens([AddedToken(tokens[index], normalized=False)])
        elif kind_of_token not in (TOKEN_NORMAL, TOKEN_UNUSED):
            raise ValueError(
                f"GGUF token {index} ({tokens[index]!r}): got token type {kind_of_token}, expected"
                f" one of normal {TOKEN_NORMAL}, control {TOKEN_CONTROL}, user defined"
                f" {TOKEN_USER_DEFINED}, unused {TOKEN_UNUSED}."
            )
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the contents of tokenizer_config.json from GGUF metadata.

    Args:
        fields: GGUF metadata, key to value.

    Returns:
        The config as a JSON-ready dict: named special tokens, chat template, length limit.

    Raises:
        ValueError: a special token id outside the vocabulary.
    """
    tokens = _need(fields, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _need(fields, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in names.items():
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ValueError(
                f"GGUF metadata tokenizer.ggml.{key}_token_id: got {index}, expected an id below"
                f" the vocabulary size {len(tokens)}. The file is damaged."
            )
        config[f"{name}_token"] = tokens[index]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def convert_gguf(
    gguf_path: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Converts a Llama GGUF file into a Hugging Face directory, atomically.

    The files are written to a hidden directory beside ``out_dir`` that is renamed at the end, so
    ``out_dir`` either does not exist or is complete.

    Args:
        gguf_path: the GGUF file. Quantised tensors are dequantised to float32.
        out_dir: directory to create; must not exist (an empty directory is accepted).
        progress: called with one line of text per step.

    Raises:
        FileNotFoundError: ``gguf_path`` is not a file.
        FileExistsError: ``out_dir`` already has contents.
        ValueError: not a GGUF file, not a Llama, or tensors missing, left over or misshapen.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    report = progress if progress is not None else lambda line: None
    if not gguf_path.is_file():
        raise FileNotFoundError(f"GGUF file {gguf_path} does not exist.")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise _exists_error(out_dir)
    reader = _open(gguf_path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = llama_config(fields, tie_word_embeddings="output.weight" not in stored)
    sources = llama_tensors(config)
    _check_tensors(stored, sources)
    tokenizer = build_tokenizer(fields)
    report(f"read {gguf_path.name}: {len(stored)} tensors, {len(fields)} metadata fields")

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.parent / f".{out_dir.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        _write_safetensors(partial / "model.safetensors", stored, sources, report)
        tokenizer.save(str(partial / "tokenizer.json"))
        _write_json(partial / "tokenizer_config.json", tokenizer_config(fields))
        _write_json(partial / "config.json", config)
        _rename(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report(f"wrote {out_dir}")


def _need(fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise ValueError(f"GGUF metadata lacks {key}. The file is damaged or not a language model.")
    return fields[key]


def _shortest(value: float) -> float:
    """Returns the shortest decimal that rounds to the same float32 (1e-05, not 9.99999974e-06)."""
    return float(str(np.float32(value)))


def _merges(fields: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for rank, merge in enumerate(_need(fields, "tokenizer.ggml.merges")):
        pair = tuple(merge.split(" "))
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise ValueError(
                f"GGUF merge {rank}: got {merge!r}, expected two tokens of the vocabulary,"
                " separated by a space, that join into a third. The file is damaged."
            )
        merges.append(pair)
    return merges


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a readable GGUF file ({error}). It may be truncated: fetch it again."
        ) from error


def _check_tensors(stored: Mapping[str, Any], sources: Mapping[str, TensorSource]) -> None:
    wanted = {source.gguf_name: source for source in sources.values()}
    missing, left_over = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted)
    if missing or left_over:
        raise ValueError(
            f"GGUF tensors do not match a Llama of this size: missing {missing}, left over"
            f" {left_over}. Use the original Hugging Face checkpoint of this model instead."
        )
    for name, source in wanted.items():
        shape = tuple(int(size) for size in reversed(stored[name].shape))
        if shape != source.shape:
            raise ValueError(
                f"GGUF tensor {name}: got shape {shape}, expected {source.shape} from the"
                " metadata. The file is damaged."
            )


def _float32(tensor: Any, source: TensorSource) -> np.ndarray:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"GGUF tensor {tensor.name}: cannot dequantise type {tensor.tensor_type.name}. Use a"
            " file with F32, F16, Q8_0 or Q4_1 tensors."
        ) from error
    values = values.astype(np.float32, copy=False).reshape(source.shape)
    if source.rotary_heads:
        values = unpermute_rotary_rows(values, source.rotary_heads)
    return values


def _write_safetensors(
    path: Path,
    stored: Mapping[str, Any],
    sources: Mapping[str, TensorSource],
    report: Callable[[str], None],
) -> None:
    """Writes one float32 tensor at a time, so memory holds one tensor and not the model.

    Source: the format section of the safetensors README.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in sources.items():
        start, end = end, end + 4 * math.prod(source.shape)
        header[name] = {"dtype": "F32", "shape": source.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    step = max(1, len(sources) // 5)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for count, (name, source) in enumerate(sources.items(), start=1):
            file.write(_float32(stored[source.gguf_name], source).astype("<f4", copy=False).data)
            if count % step == 0 or count == len(sources):
                done = header[name]["data_offsets"][1]
                report(f"tensors {count}/{len(sources)}, {done / 1e6:.0f} of {end / 1e6:.0f} MB")
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rename(partial: Path, out_dir: Path) -> None:
    try:
        partial.rename(out_dir)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists_error(out_dir) from error
        raise


def _exists_error(out_dir: Path) -> FileExistsError:
    return FileExistsError(
        f"{out_dir} already exists and is not an empty directory. Remove it or choose another."
    )
