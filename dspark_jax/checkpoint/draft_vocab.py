"""What a draft shares with its target: embedding, LM head, and a map of a reduced vocabulary.

Draft files usually carry frozen copies of the target's embedding and head. They are compared with
the target's, a few rows each, and then the target's own arrays are used: nothing is held twice.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.safetensors import FLOAT_TYPES, TensorReader
from dspark_jax.config import DraftConfig
from dspark_jax.types import SharedHead

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
FROZEN_COPIES = (EMBEDDING, HEAD, "verifier_lm_head.weight")
SHARED_NAMES = (*FROZEN_COPIES, DRAFT_TO_TARGET, TARGET_TO_DRAFT, "verifier_norm.weight")

_INTEGER_TYPES = ("I64", "I32", "I16", "U32", "U16")
_MASK_TYPES = ("BOOL", "U8", "I8")
_COMPARED_ROWS = 64
_RELATIVE, _ABSOLUTE = 2.0**-7, 1e-6  # one of the copies may have been stored in bfloat16


def share_head(reader: TensorReader, config: DraftConfig, shared: SharedHead) -> SharedHead:
    """The target's embedding and head as this draft uses them.

    Args:
      reader: the draft's tensors.
      config: the draft's architecture, already known to fit the target.
      shared: embedding [V, D] and head [V, D] of the target.

    Returns:
      `shared` itself, or, for a reduced vocabulary, the head's rows [Vd, D] with both maps.

    Raises:
      ValueError: the map is malformed, or the draft was trained with another embedding or head.
    """
    names = reader.names()
    if config.draft_vocab_size is not None:
        target_ids = read_target_ids(reader, config)
        shared = reduce_vocabulary(shared, target_ids)
    elif DRAFT_TO_TARGET in names and np.any(_offsets(reader, config.vocab_size)):
        raise ValueError(
            f"draft {reader.directory} maps its tokens by {DRAFT_TO_TARGET}, but config.json has "
            f"no draft_vocab_size; add it (the length of {DRAFT_TO_TARGET})."
        )
    for name in FROZEN_COPIES:
        if name in names:
            ours = shared.embedding if name == EMBEDDING else shared.head
            _check_copy(reader, name, ours)
    return shared


def reduce_vocabulary(shared: SharedHead, target_ids: np.ndarray) -> SharedHead:
    """Keeps the head rows of some tokens.

    Args:
      shared: of the whole vocabulary.
      target_ids: i32[Vd], distinct target tokens.

    Returns:
      A SharedHead with head [Vd, D] and both maps.
    """
    vocab, size = shared.embedding.shape[0], len(target_ids)
    draft_ids = np.full(vocab, size, np.int32)
    draft_ids[target_ids] = np.arange(size, dtype=np.int32)
    ids = jnp.asarray(target_ids, jnp.int32)
    return SharedHead(
        embedding=shared.embedding,
        head=shared.head[ids],
        target_ids=ids,
        draft_ids=jnp.asarray(draft_ids),
    )


def read_target_ids(reader: TensorReader, config: DraftConfig) -> np.ndarray:
    """The target token of every row of a reduced head.

    Args:
      reader: the draft's tensors: `d2t` [Vd] of integers, draft id i being target token
        i + d2t[i]; and, if present, `t2d` [V], true for the tokens that have a row.
      config: with `draft_vocab_size` set.

    Returns:
      i32[Vd].

    Raises:
      ValueError: a tensor is missing, of another type or shape, out of range or contradictory.

    Source: speculators, DraftVocabMixin.
    """
    vocab, size = config.vocab_size, config.draft_vocab_size
    if DRAFT_TO_TARGET not in reader.names():
        raise ValueError(
            f"draft {reader.directory} has draft_vocab_size={size} for a vocabulary of {vocab} but "
            f"no tensor {DRAFT_TO_TARGET} to map its tokens; add it."
        )
    target_ids = np.arange(size) + _offsets(reader, size)
    if target_ids.min() < 0 or target_ids.max() >= vocab or len(np.unique(target_ids)) != size:
        raise ValueError(
            f"{DRAFT_TO_TARGET} of draft {reader.directory} does not name {size} distinct tokens "
            f"below {vocab}: i + d2t[i] spans {target_ids.min()}..{target_ids.max()}, "
            f"{len(np.unique(target_ids))} distinct. It must hold offsets, not token ids."
        )
    if TARGET_TO_DRAFT in reader.names():
        _require(reader, TARGET_TO_DRAFT, _MASK_TYPES, (vocab,))
        listed = np.flatnonzero(reader.read(TARGET_TO_DRAFT))
        if not np.array_equal(listed, np.sort(target_ids)):
            raise ValueError(
                f"{TARGET_TO_DRAFT} and {DRAFT_TO_TARGET} of draft {reader.directory} name "
                f"different tokens ({len(listed)} and {size}); export both from one mapping."
            )
    return target_ids.astype(np.int32)


def vocabulary_tensors(shared: SharedHead) -> dict[str, np.ndarray]:
    """`d2t` (i64 offsets) and `t2d` (bool) of a reduced vocabulary, as speculators stores them."""
    target_ids = np.asarray(shared.target_ids, np.int64)
    mask = np.zeros(shared.embedding.shape[0], bool)
    mask[target_ids] = True
    return {DRAFT_TO_TARGET: target_ids - np.arange(len(target_ids)), TARGET_TO_DRAFT: mask}


def _offsets(reader: TensorReader, size: int) -> np.ndarray:
    _require(reader, DRAFT_TO_TARGET, _INTEGER_TYPES, (size,))
    return reader.read(DRAFT_TO_TARGET).astype(np.int64)


def _require(
    reader: TensorReader, name: str, types: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    if reader.dtype(name) not in types:
        raise ValueError(
            f"{name} of draft {reader.directory} is {reader.dtype(name)}, expected one of {types}."
        )
    if reader.shape(name) != shape:
        raise ValueError(
            f"{name} of draft {reader.directory} has shape {list(reader.shape(name))}, expected "
            f"{list(shape)}."
        )


def _check_copy(reader: TensorReader, name: str, ours: jax.Array) -> None:
    _require(reader, name, FLOAT_TYPES, ours.shape)
    rows = np.unique(np.linspace(0, ours.shape[0] - 1, _COMPARED_ROWS).astype(np.int64))
    got = reader.read_rows(name, rows).astype(np.float32)
    expected = np.asarray(ours[rows]).astype(np.float32)
    bad = np.abs(got - expected) > _RELATIVE * np.abs(expected) + _ABSOLUTE
    bad = (bad | ~np.isfinite(got)).any(axis=-1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"{name} of draft {reader.directory} is not a copy of the target's: {int(bad.sum())} "
            f"of {len(rows)} compared rows differ, the first for token {int(rows[row])} (got "
            f"{got[row][:3]}.., expected {expected[row][:3]}..). Load the target this draft was "
            f"trained for, or remove {name} from the draft to use it with this one."
        )
