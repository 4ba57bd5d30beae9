"""Tiny model directories in the Hugging Face layout, made on the spot: random weights, real files.

The text such a model writes means nothing, but everything around it is as with a real one: a
byte-level BPE tokenizer, a chat template, an end token, safetensors.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark_jax.checkpoint.draft import draft_rules, save_draft
from dspark_jax.checkpoint.fingerprint import fingerprint_target
from dspark_jax.checkpoint.rules import TensorRule, abstract_params, stored_tensors
from dspark_jax.checkpoint.safetensors import save_tensors
from dspark_jax.checkpoint.target import target_rules
from dspark_jax.config import DraftConfig, TargetConfig, read_config_json
from dspark_jax.types import Params

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2  # <|im_end|>
VOCAB_SIZE = 320  # 3 special tokens, 256 bytes, 61 merges

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dog",
    "there is nothing in the world that the water and the wind would not wear down",
    "counting: one two three four five six seven eight nine ten eleven twelve",
    "naïve café, größer, 日本語, emoji 🙂🙃, and so on and on and on",
)


def write_tokenizer(directory: Path) -> None:
    """Writes `tokenizer.json` (byte-level BPE) and `tokenizer_config.json` (chat template, EOS).

    Args:
      directory: where to; must exist.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_target(
    directory: Path,
    *,
    layers: int = 3,
    width: int = 32,
    vocab_size: int = VOCAB_SIZE,
    tied: bool = False,
    qk_norm: bool = False,
    max_position_embeddings: int = 1024,
    seed: int = 0,
    scale: float = 10.0,
) -> Path:
    """Writes a random Llama (or, with `qk_norm`, Qwen3) target with its tokenizer.

    Args:
      directory: made if needed.
      layers: L.
      width: D, a multiple of 8; 4 query heads and 2 KV heads.
      vocab_size: V, at least the tokenizer's 320.
      tied: one table for embedding and LM head.
      qk_norm: write a Qwen3.
      max_position_embeddings: tokens.
      seed: of the weights.
      scale: on the usual initial weights; 10 makes distributions that are neither flat nor sure.

    Returns:
      The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    hf = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
    }
    (directory / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    config = TargetConfig.from_hf(hf)
    rules = target_rules(config)
    tensors = stored_tensors(random_params(rules, seed=seed, scale=scale), rules)
    save_tensors(directory / "model.safetensors", tensors)
    write_tokenizer(directory)
    return directory


def write_draft(
    directory: Path,
    target_directory: Path,
    *,
    block_size: int = 4,
    layers: int = 1,
    markov_rank: int = 8,
    markov_head_type: str = "vanilla",
    confidence: bool = True,
    seed: int = 1,
    scale: float = 10.0,
) -> Path:
    """Writes a random dense draft for a target made by `write_target`, in DeepSpec's layout.

    Args:
      directory: made if needed.
      target_directory: of the target.
      block_size: K.
      layers: of the draft.
      markov_rank: Q; 0 is DFlash (pass `confidence=False` or it goes without Markov features).
      markov_head_type: vanilla, gated or rnn.
      confidence: with a confidence head.
      seed: of the weights.
      scale: as for `write_target`.

    Returns:
      The directory.
    """
    target = TargetConfig.from_hf(read_config_json(target_directory))
    config = DraftConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=tuple(range(target.num_hidden_layers - 1))[-2:],
        markov_rank=markov_rank,
        markov_head_type=markov_head_type if markov_rank else None,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence and markov_rank > 0,
        num_target_layers=target.num_hidden_layers,
    )
    params = random_params(draft_rules(config), seed=seed, scale=scale)
    save_draft(directory, config, params, fingerprint=fingerprint_target(target_directory))
    return Path(directory)


def random_params(rules: list[TensorRule], *, seed: int, scale: float) -> Params:
    """A parameter tree from NumPy alone, which spares compiling an initialiser.

    Args:
      rules: of the checkpoint; they give paths and shapes.
      seed: of the weights.
      scale: kernels are normal with 0.02 * scale; norms are one and biases zero.

    Returns:
      float32 NumPy arrays, layers split.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        names = [str(getattr(part, "key", "")) for part in path]
        if names[-1].endswith("bias"):
            return np.zeros(leaf.shape, np.float32)
        if any("norm" in name for name in names):
            return np.ones(leaf.shape, np.float32)
        return (0.02 * scale * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(rules, np.float32))


@dataclasses.dataclass(frozen=True)
class TinyPair:
    """Directories of a target and a draft for it."""

    target: Path
    draft: Path


def write_pair(directory: Path, **target_fields: object) -> TinyPair:
    """Writes `directory/tiny` and `directory/tiny-draft`.

    Args:
      directory: made if needed.
      **target_fields: as for `write_target`.

    Returns:
      Both directories.
    """
    target = write_target(Path(directory) / "tiny", **target_fields)
    return TinyPair(target=target, draft=write_draft(Path(directory) / "tiny-draft", target))
