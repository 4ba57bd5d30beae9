"""Token classes of Engram: tokens whose texts differ only in form share one."""

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from dspark_jax.config_deepseek_target import EngramConfig
from dspark_jax.tokenizer import UNFINISHED

_BLANK = "\ue000"  # stands in for a text that is one blank, so that stripping leaves it


def read_token_classes(directory: str | Path, config: EngramConfig, vocab_size: int) -> np.ndarray:
    """The class of every token, from a model directory's `tokenizer.json`.

    Args:
      directory: holds the tokenizer.
      config: how many classes there must be.
      vocab_size: tokens of the model.

    Returns:
      i32[V].

    Raises:
      FileNotFoundError: there is no tokenizer.
      ValueError: it cannot be read, lacks tokens, or gives another number of classes.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} not found; Engram needs the tokenizer to know which tokens share a class."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{path} is not a tokenizer file ({error}).") from error
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(
            f"{path} has {tokenizer.get_vocab_size()} tokens, the model {vocab_size}; give the "
            "tokenizer of this model."
        )
    classes = class_tokens(tokenizer, vocab_size)
    if classes.max() + 1 != config.num_classes:
        raise ValueError(
            f"{path} gives {classes.max() + 1} token classes, expected engram_compressed_vocab_size"
            f"={config.num_classes}; give the tokenizer of this model."
        )
    return classes


def class_tokens(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Numbers the classes in the order in which tokens first show them.

    A token that is part of a character goes by its name in the vocabulary, one whose text vanishes
    by the text itself.

    Args:
      tokenizer: decodes each token alone.
      vocab_size: tokens 0..V-1 are classed.

    Returns:
      i32[V].

    Source: DeepSeek Engram, compressed tokenizer.
    """
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    )
    numbers, classes = {}, np.zeros(vocab_size, np.int32)
    for token in range(vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if UNFINISHED in text else None
        key = key or normalise.normalize_str(text) or text
        classes[token] = numbers.setdefault(key, len(numbers))
    return classes
