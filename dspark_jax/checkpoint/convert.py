"""From Hugging Face safetensors to converted directories, one tensor in memory at a time.

Everything is checked by the headers before anything is written. Arrays go to a hidden directory
beside the destination, which is renamed at the end; an interrupted conversion finds it again and
goes on behind the last complete parameter.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dspark_jax.checkpoint.deepseek import (
    deepseek_rules,
    draft_reader,
    read_deepseek_config,
    shared_rules,
    weight_block,
)
from dspark_jax.checkpoint.draft import rules_and_extras
from dspark_jax.checkpoint.draft_layouts import read_draft_config
from dspark_jax.checkpoint.fingerprint import fingerprint_target
from dspark_jax.checkpoint.orbax_layout import (
    EXTRA,
    Leaf,
    Manifest,
    is_converted,
)
from dspark_jax.checkpoint.quantized import (
    ROW_GROUP,
    DequantisingReader,
    quantise_fp8,
    scale_of,
    stack,
)
from dspark_jax.checkpoint.rules import TensorRule, check_stored, parameter_shape, same
from dspark_jax.checkpoint.safetensors import FLOAT_TYPES, NUMPY_TYPES, TensorReader
from dspark_jax.checkpoint.target import target_rules
from dspark_jax.checkpoint.workplace import Workplace, copy_side_files
from dspark_jax.checkpoint.zarr_arrays import ARRAYS, ArrayWriter, chunk_shape
from dspark_jax.config import TARGET_ARCHITECTURES, TargetConfig, read_config_json
from dspark_jax.config_deepseek import is_deepseek
from dspark_jax.sharding import MeshShape, param_specs

FORMS = ("as-stored", "bfloat16", "float32", "float8")
FP8_BLOCK = (128, 128)  # of matrices that were not stored in FP8
_TRUNK = re.compile(r"(layers\.\d+\.|norm\.weight$|hc_head_|vision\.|aligner\.|image_)")
_ALIAS = re.compile(r"mtp\.\d+\.(embed|head)\.weight")  # copies of the target's tables
_MATRICES = {
    "q", "kv", "o", "qkv", "gate_up", "down", "q_a", "q_b", "o_a", "o_b", "context_proj",
    "shared_gate_up", "shared_down",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint whose headers have been checked.

    Attributes:
      kind: "target", "dense draft" or "deepseek draft".
      hf: its decoded `config.json`.
      raw: the tensors as they are stored.
      plain: the tensors, dequantised.
      rules: one per parameter.
      extras: stored tensors that are kept as they are.
      left_out: stored tensors that are not converted.
      block: of FP8 weights, if there are any.
    """

    kind: str
    hf: dict[str, Any]
    raw: TensorReader
    plain: TensorReader | DequantisingReader
    rules: list[TensorRule]
    extras: tuple[str, ...]
    left_out: tuple[str, ...]
    block: tuple[int, int] | None


def open_source(directory: str | Path, *, only: str | None = None) -> Source:
    """Checks a checkpoint by its headers.

    Args:
      directory: in the Hugging Face layout.
      only: "draft" or "target": what the checkpoint is expected to give; None takes either.

    Returns:
      What there is to convert.

    Raises:
      FileNotFoundError: files are missing.
      ValueError: of no known kind, not of the kind asked for, damaged, or tensors are missing,
        unknown, of another shape or type.
    """
    if is_converted(directory):
        raise ValueError(f"{directory} is converted already; give the checkpoint it was made from.")
    hf = read_config_json(directory)
    if is_deepseek(hf):
        kind, build = "deepseek draft", _deepseek
    elif any(name in TARGET_ARCHITECTURES for name in hf.get("architectures") or []):
        kind, build = "target", _target
    else:
        kind, build = "dense draft", _dense_draft
    if only and only not in kind:
        hint = "; there is no target of this family here yet" if is_deepseek(hf) else ""
        raise ValueError(f"{directory} is a {kind}, but only the {only} was asked for{hint}.")
    return build(directory, hf)


def _deepseek(directory: str | Path, hf: dict[str, Any]) -> Source:
    raw = TensorReader(directory, strip=("model.",))
    config = read_deepseek_config(hf, raw.names())
    draft_reader(hf, raw, config)
    rules = deepseek_rules(config) + shared_rules(config)
    wanted = {name for rule in rules for name in rule.names}
    scales = {scale_of(name) for name in wanted} & raw.names()
    rest = raw.names() - wanted - scales
    left_out = {name for name in rest if _TRUNK.match(name) or _ALIAS.fullmatch(name)}
    plain = DequantisingReader(raw, block=weight_block(hf), names=raw.names() - left_out)
    check_stored(plain, rules, what="draft")
    return Source(
        kind="deepseek draft", hf=hf, raw=raw, plain=plain, rules=rules, extras=(),
        left_out=tuple(sorted(left_out)), block=weight_block(hf),
    )  # fmt: skip


def _dense_draft(directory: str | Path, hf: dict[str, Any]) -> Source:
    raw = TensorReader(directory, strip=("module.", "model."))
    rules, extras, buffers = rules_and_extras(read_draft_config(hf, raw), raw.names())
    check_stored(raw, rules, ignore=(*extras, *buffers), what="draft")
    return Source(
        kind="dense draft", hf=hf, raw=raw, plain=raw, rules=rules, extras=extras,
        left_out=buffers, block=None,
    )  # fmt: skip


def _target(directory: str | Path, hf: dict[str, Any]) -> Source:
    raw, config = TensorReader(directory), TargetConfig.from_hf(hf)
    rules, names = target_rules(config), raw.names()
    tied = {"lm_head.weight"} & names if config.tie_word_embeddings else set()
    left_out = sorted(tied | {n for n in names if n.endswith("rotary_emb.inv_freq")})
    check_stored(raw, rules, ignore=left_out, what="target")
    return Source(
        kind="target", hf=hf, raw=raw, plain=raw, rules=rules, extras=(),
        left_out=tuple(left_out), block=None,
    )  # fmt: skip


def plan_leaves(source: Source, form: str) -> list[tuple[Leaf, TensorRule]]:
    """How every parameter will be kept.

    Args:
      source: of `open_source`.
      form: one of `FORMS`. "float8" puts matrices into FP8 and leaves tables and vectors as
        stored; "bfloat16" leaves what the reference computes in float32 as stored.

    Returns:
      A leaf and its rule per parameter and kept tensor.

    Raises:
      ValueError: the form is not known.
    """
    if form not in FORMS:
        raise ValueError(f"dtype {form!r} is not known; expected one of {FORMS}.")
    extras = [same((EXTRA, name), name, source.raw.shape(name)) for name in source.extras]
    return [(_leaf(source, rule, form), rule) for rule in source.rules + extras]


def _leaf(source: Source, rule: TensorRule, form: str) -> Leaf:
    kinds = {source.raw.dtype(name) for name in rule.names}
    extra, floats, fp8 = rule.path[0] == EXTRA, kinds <= {*FLOAT_TYPES}, kinds == {"F8_E4M3"}
    as_stored = form in ("as-stored", "float8")
    if not extra and not kinds & {*FLOAT_TYPES} and (form == "as-stored" or fp8 and as_stored):
        kept, block = ("fp8", source.block) if fp8 else ("fp4", ROW_GROUP)
        return _quantised_leaf(rule, kept, block)
    matrix = rule.path[-1] in _MATRICES and all(len(shape) == 2 for shape in rule.shapes)
    if form == "float8" and matrix and not rule.exact:
        return _quantised_leaf(rule, "fp8", source.block or FP8_BLOCK)
    if (extra and not floats) or (floats and (rule.exact or as_stored)):
        dtype = NUMPY_TYPES[kinds.pop() if len(kinds) == 1 else "F32"]
    else:
        dtype = NUMPY_TYPES["BF16" if form == "bfloat16" and not rule.exact else "F32"]
    shape = parameter_shape(rule)
    return Leaf(path=rule.path, names=rule.names, form="plain", shape=shape, dtype=dtype.name)


def _quantised_leaf(rule: TensorRule, form: str, block: tuple[int, int]) -> Leaf:
    rows, columns = rule.shapes[0]
    count, group = len(rule.names), rule.group
    lead = (count // group, group) if group > 1 else (count,) if group or count > 1 else ()
    width, heights = columns // 2 if form == "fp4" else columns, ()
    if len({*rule.shapes}) > 1:  # fused Q, K and V
        heights = tuple(shape[0] for shape in rule.shapes)
        lead, rows = (), sum(heights)
    return Leaf(
        path=rule.path, names=rule.names, form=form, shape=(*lead, rows, width), dtype="uint8",
        block=block, heights=heights,
    )  # fmt: skip


def pieces(source: Source, leaf: Leaf, rule: TensorRule) -> Iterator[list[np.ndarray]]:
    """The arrays of a parameter, a few rows of the first axis at a time.

    Args:
      source: where its tensors are.
      leaf: how it is kept.
      rule: what it is made of.

    Yields:
      For each array of the leaf its next rows: all of them, or those of one expert.
    """
    step = rule.group or len(rule.names)
    for begin in range(0, len(rule.names), step):
        names = rule.names[begin : begin + step]
        if leaf.form == "plain":
            dtype = np.dtype(leaf.dtype)
            yield [_pack(rule, (source.plain.read(n).astype(dtype, copy=False) for n in names))]
        elif source.raw.dtype(names[0]) in FLOAT_TYPES or _recast(source, leaf, names[0]):
            pairs = [quantise_fp8(_float32(source, name), leaf.block) for name in names]
            join = np.concatenate if leaf.heights else functools.partial(stack, group=rule.group)
            yield [join(side) for side in zip(*pairs, strict=True)]
        else:
            codes = [source.raw.read(name).view(np.uint8) for name in names]
            scales = [source.raw.read(scale_of(name)).view(np.uint8) for name in names]
            yield [stack(codes, rule.group), stack(scales, rule.group)]


def _pack(rule: TensorRule, parts: Iterable[np.ndarray]) -> np.ndarray:
    """Packs tensors that nothing holds on to while the result is written."""
    return rule.pack(*parts)


def _recast(source: Source, leaf: Leaf, name: str) -> bool:
    return leaf.form == "fp8" and source.raw.dtype(name) != "F8_E4M3"


def _float32(source: Source, name: str) -> np.ndarray:
    return source.plain.read(name).astype(np.float32, copy=False)


def convert(
    directory: str | Path,
    destination: str | Path,
    *,
    form: str = "as-stored",
    only: str | None = None,
    mesh: MeshShape | None = None,
    say: Callable[[str], None] = print,
) -> Manifest:
    """Converts a checkpoint.

    Args:
      directory: in the Hugging Face layout.
      destination: a directory that does not exist yet.
      form: one of `FORMS`.
      only: "draft" or "target", see `open_source`.
      mesh: arrays are cut into files that no device of it needs a part of.
      say: called with a line of progress.

    Returns:
      The manifest.

    Raises:
      FileNotFoundError: files are missing.
      FileExistsError: the destination exists, or another process is writing it.
      ValueError: the checkpoint does not fit, see `open_source`, or the mesh does not divide it.
      OSError: the disk is full or not writable. What was written is kept beside the destination
        and used by the next attempt.
    """
    source = open_source(directory, only=only)
    leaves = plan_leaves(source, form)
    total = sum(leaf.nbytes() for leaf, _ in leaves)
    sizes = dataclasses.asdict(mesh) if mesh else {}
    parts = {name: p for leaf, _ in leaves for name, p in _parts(leaf, sizes).items()}
    settings = {"form": form, "only": only, "mesh": sizes}
    with Workplace(destination, source.raw.files(), settings, total, say) as work:
        work.directory.joinpath(ARRAYS).mkdir(exist_ok=True)
        for leaf, rule in leaves:
            write = functools.partial(_write, work.directory, source, leaf, rule, parts)
            work.keep(leaf.describe(), tuple(leaf.arrays()), leaf.nbytes(), write)
        copy_side_files(Path(directory), work.directory)
        manifest = _manifest(source, [leaf for leaf, _ in leaves], form, sizes, work.sha256)
        manifest.write(work.directory)
        work.move_into_place()
    return manifest


def _parts(leaf: Leaf, mesh: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For each array of a leaf, over how many devices its axes are spread."""
    out = {}
    for name, (shape, _) in leaf.arrays().items():
        node = jax.ShapeDtypeStruct(shape, np.uint8)
        for key in reversed(name.split(".")[-2:]):
            node = {key: node}
        (spec,) = jax.tree.leaves(param_specs(node), is_leaf=lambda x: isinstance(x, PartitionSpec))
        counts = [1 if axis is None else mesh.get(axis, 1) for axis in spec]
        counts += [1] * (len(shape) - len(counts))
        if any(size % count for size, count in zip(shape, counts, strict=True)):
            raise ValueError(
                f"{name} {list(shape)} does not divide over {spec} of the mesh {dict(mesh)}; "
                "choose axes that divide these sizes."
            )
        out[name] = tuple(counts)
    return out


def _write(
    directory: Path,
    source: Source,
    leaf: Leaf,
    rule: TensorRule,
    parts: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    """Writes the arrays of a leaf; returns their digests."""
    writers = []
    for name, (shape, dtype) in leaf.arrays().items():
        entries = 1 if rule.group else 0
        chunk = chunk_shape(shape, dtype.itemsize, entries=entries, parts=parts[name])
        writers.append(ArrayWriter(directory, name, shape, dtype, chunk))
    for rows in pieces(source, leaf, rule):
        for writer, part in zip(writers, rows, strict=True):
            writer.write(part)
    return {writer.name: writer.finish() for writer in writers}


def _manifest(
    source: Source, leaves: list[Leaf], form: str, mesh: dict[str, int], sha256: dict[str, str]
) -> Manifest:
    raw = source.raw
    names = [name for leaf in leaves for name in leaf.names]
    have = raw.names()
    names += [scale_of(n) for n in names if n.endswith(".weight") and scale_of(n) in have]
    fingerprint = None
    if source.kind == "target":
        fingerprint = fingerprint_target(raw.directory).to_json()
    return Manifest(
        kind=source.kind,
        dtype=form,
        mesh=mesh,
        tensors={name: (raw.dtype(name), raw.shape(name), raw.stored_name(name)) for name in names},
        leaves=tuple(leaves),
        left_out=tuple(raw.stored_name(name) for name in source.left_out),
        sha256=sha256,
        fingerprint=fingerprint,
    )
