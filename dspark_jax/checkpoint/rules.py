"""Strict mapping between checkpoint tensors and parameter trees, both ways.

A rule says which stored tensors make up one parameter and how. Loading consumes every stored
tensor or fails naming those left; every problem is collected and reported at once.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.safetensors import FLOAT_TYPES, TensorReader
from dspark_jax.types import Params

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One parameter and the stored tensors it is built from.

    Attributes:
      path: where the parameter lies in the tree.
      names: stored tensors, in the order `pack` takes them.
      shapes: their stored shapes.
      pack: stored tensors -> parameter.
      unpack: parameter -> stored tensors.
      exact: the parameter is float32 whatever type the others are loaded as.
      group: of experts, how many stored tensors make up one entry of the first axis, so that
        `pack` takes any multiple of them; 0 when it needs them all.
    """

    path: Path
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    pack: Callable[..., np.ndarray]
    unpack: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    exact: bool = False
    group: int = 0


def same(path: Path, name: str, shape: tuple[int, ...], *, exact: bool = False) -> TensorRule:
    """A parameter stored as it is."""
    return TensorRule(
        path=path, names=(name,), shapes=(shape,), pack=lambda x: x, unpack=lambda x: (x,),
        exact=exact,
    )  # fmt: skip


def reshaped(
    path: Path,
    name: str,
    stored: tuple[int, ...],
    ours: tuple[int, ...],
    *,
    transpose: bool = True,
    exact: bool = False,
) -> TensorRule:
    """A matrix stored as [out, in] and kept as [in, out], axes split into `ours`."""
    flip = (lambda x: x.T) if transpose else (lambda x: x)
    flat = stored[::-1] if transpose else stored
    return TensorRule(
        path=path,
        names=(name,),
        shapes=(stored,),
        pack=lambda x: flip(x).reshape(ours),
        unpack=lambda x: (flip(x.reshape(flat)),),
        exact=exact,
    )


def paired(path: Path, names: tuple[str, str], out: int, width: int, split: tuple) -> TensorRule:
    """Two matrices [out, D] kept as one kernel [D, 2, *split]."""

    def pack(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([a.T, b.T], axis=1).reshape(width, 2, *split)

    def unpack(x: np.ndarray) -> tuple[np.ndarray, ...]:
        x = x.reshape(width, 2, out)
        return x[:, 0].T, x[:, 1].T

    return TensorRule(path=path, names=names, shapes=((out, width),) * 2, pack=pack, unpack=unpack)


def check_stored(
    reader: TensorReader, rules: Sequence[TensorRule], *, ignore: Iterable[str] = (), what: str
) -> None:
    """Compares stored names, shapes and types with what the rules consume; reads no data.

    Args:
      reader: the stored tensors.
      rules: one per parameter.
      ignore: stored names that may be present and are not used.
      what: names the checkpoint in errors, such as "target".

    Raises:
      ValueError: tensors are missing, left over, of another shape, or not floating point.
    """
    have = reader.names()
    wanted = {name for rule in rules for name in rule.names}
    problems = [f"missing tensor {name}" for name in sorted(wanted - have)]
    problems += [f"unexpected tensor {name}" for name in sorted(have - wanted - set(ignore))]
    for rule in rules:
        for name, shape in zip(rule.names, rule.shapes, strict=True):
            if name not in have:
                continue
            if reader.shape(name) != tuple(shape):
                got = list(reader.shape(name))
                problems.append(f"{name} has shape {got}, expected {list(shape)}")
            elif reader.dtype(name) not in FLOAT_TYPES:
                problems.append(f"{name} is {reader.dtype(name)}, expected one of {FLOAT_TYPES}")
    if problems:
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise ValueError(
            f"{what} checkpoint {reader.directory} does not match its config.json:\n  "
            + "\n  ".join(shown)
            + "\nCheck that config.json and the weights belong together."
        )


def load_params(
    reader: TensorReader,
    rules: Iterable[TensorRule],
    *,
    dtype: jnp.dtype,
    ignore: Iterable[str] = (),
    what: str,
) -> Params:
    """Builds a parameter tree.

    Args:
      reader: the stored tensors.
      rules: one per parameter.
      dtype: floating type of the result, but for rules marked exact.
      ignore: stored names that may be present and are not used.
      what: names the checkpoint in errors, such as "target".

    Returns:
      Nested dict of device arrays; integer path parts become tuple entries.

    Raises:
      ValueError: tensors are missing, left over, of another shape, or not floating point.
    """
    rules = list(rules)
    check_stored(reader, rules, ignore=ignore, what=what)
    tree = {}
    for rule in rules:
        kept = np.dtype(jnp.float32 if rule.exact else dtype)
        _put(tree, rule.path, jnp.asarray(read_parameter(reader, rule, kept)))
    return _tuples(tree)


def read_parameter(reader: TensorReader, rule: TensorRule, dtype: np.dtype) -> np.ndarray:
    """One parameter: packed from stored tensors, or read at once where a reader keeps it whole."""
    whole = getattr(reader, "parameter", None)
    value = whole(rule, dtype) if whole else pack_groups(rule, reader.read, dtype)
    return np.asarray(value, order="C")


def pack_groups(rule: TensorRule, read: Callable[[str], np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Packs a parameter, of experts one at a time, so that only the result is held whole.

    Args:
      rule: of the parameter.
      read: gives a stored tensor by its name.
      dtype: of the result.

    Returns:
      The parameter.
    """
    step = rule.group or len(rule.names)
    out = None
    for i in range(len(rule.names) // step):
        names = rule.names[i * step : (i + 1) * step]
        value = np.asarray(rule.pack(*(read(name) for name in names)), dtype)
        if not rule.group:
            return value
        if out is None:
            out = np.empty((len(rule.names) // step, *value.shape[1:]), dtype)
        out[i] = value[0]
    return out


def stored_tensors(
    params: Params, rules: Iterable[TensorRule], dtype: jnp.dtype | None = None
) -> dict[str, np.ndarray]:
    """The inverse of `load_params`: a parameter tree as checkpoint tensors.

    Args:
      params: the tree, on device or host; layers split or stacked.
      rules: as for `load_params`.
      dtype: type to store; None keeps each parameter's own.

    Returns:
      name -> array in the stored layout.
    """
    out = {}
    for rule in rules:
        leaf = leaf_at(params, rule.path)
        value = np.asarray(leaf if dtype is None else jnp.asarray(leaf).astype(dtype))
        out.update(zip(rule.names, rule.unpack(value), strict=True))
    return out


def leaf_at(params: Params, path: Path) -> jax.Array:
    """The parameter at a rule's path, from a tree with split or stacked layers.

    Args:
      params: the tree.
      path: of a `TensorRule`; an integer picks a layer.

    Returns:
      The array; of a stacked tree, that layer's part.
    """
    node, layer = params, None
    for part in path:
        if isinstance(part, int) and isinstance(node, Mapping):
            layer = part
        else:
            node = node[part]
    return node if layer is None else node[layer]


def parameter_shape(rule: TensorRule) -> tuple[int, ...]:
    """Shape of the parameter of a rule, from one expert where there are several."""
    step = rule.group or len(rule.names)
    blank = rule.pack(*(np.broadcast_to(np.int8(0), shape) for shape in rule.shapes[:step]))
    return (len(rule.names) // step, *blank.shape[1:]) if rule.group else blank.shape


def abstract_params(rules: Iterable[TensorRule], dtype: jnp.dtype) -> Params:
    """Shapes of the tree that the rules describe, without reading anything."""
    tree = {}
    for rule in rules:
        kept = jnp.float32 if rule.exact else dtype
        _put(tree, rule.path, jax.ShapeDtypeStruct(parameter_shape(rule), kept))
    return _tuples(tree)


def _put(tree: dict, path: Path, value: object) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _tuples(tree: Mapping) -> Params | tuple:
    if not isinstance(tree, Mapping):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return tuple(_tuples(tree[i]) for i in range(len(tree)))
    return {key: _tuples(value) for key, value in tree.items()}
