"""Models made to divide over a mesh, without changing what they compute.

A KV head with its query heads is the unit of tensor parallelism. Where there are fewer KV heads
than devices, each is repeated and its query heads are shared out among the copies; where they do
not divide, heads of zeros are added, which no output projection looks at. MLPs are padded the same
way. What cannot be padded without being seen (a vocabulary) is refused when arrays are placed.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.types import Params

Config = TypeVar("Config", TargetConfig, DraftConfig)
Change = Callable[[jax.Array], jax.Array]


def fit_target(config: TargetConfig, params: Params, devices: int) -> tuple[TargetConfig, Params]:
    """A target whose KV heads and MLP divide over `devices`.

    Args:
      config: of the target.
      params: its tree, layers stacked or split.
      devices: along the mesh axis `model`.

    Returns:
      The config with its new numbers of heads, and the tree; both as given where they divide.
    """
    repeat, groups = _head_plan(config, devices)
    changes = {
        "qkv": [lambda x: _repeat_grouped(x, repeat, config), lambda x: _pad(x, -3, groups)],
        "qkv_bias": [lambda x: _repeat_grouped(x, repeat, config), lambda x: _pad(x, -3, groups)],
        "o": [lambda x: _regroup(x, -4, repeat), lambda x: _pad(x, -4, groups)],
    }
    moe = config.moe
    width = _round_up(
        config.intermediate_size if moe is None else moe.moe_intermediate_size, devices
    )
    if moe is None:
        config = dataclasses.replace(config, intermediate_size=width)
    else:
        moe = dataclasses.replace(moe, moe_intermediate_size=width)
        config = dataclasses.replace(config, moe=moe)
    return _with_heads(config, repeat, groups), _change_layers(
        params, changes | _mlp_changes(width)
    )


def fit_draft(config: DraftConfig, params: Params, devices: int) -> tuple[DraftConfig, Params]:
    """The same as `fit_target` for a dense draft."""
    repeat, groups = _head_plan(config, devices)
    per_group = config.num_attention_heads // config.num_key_value_heads // repeat
    heads = groups * per_group
    changes = {
        "q": [lambda x: _pad(x, -2, heads)],
        "q_bias": [lambda x: _pad(x, -2, heads)],
        "o": [lambda x: _pad(x, -3, heads)],
        "kv": [lambda x: _pad(jnp.repeat(x, repeat, axis=-2), -2, groups)],
        "kv_bias": [lambda x: _pad(jnp.repeat(x, repeat, axis=-2), -2, groups)],
    } | _mlp_changes(_round_up(config.intermediate_size, devices))
    config = dataclasses.replace(
        config, intermediate_size=_round_up(config.intermediate_size, devices)
    )
    return _with_heads(config, repeat, groups), _change_layers(params, changes)


def _head_plan(config: TargetConfig | DraftConfig, devices: int) -> tuple[int, int]:
    """How often every KV head is repeated, and how many there are then, padding included."""
    groups = config.num_key_value_heads
    per_group = config.num_attention_heads // groups
    repeat = devices // groups if devices > groups and devices % groups == 0 else 1
    if per_group % repeat:
        repeat = 1
    return repeat, _round_up(groups * repeat, devices)


def _round_up(size: int, devices: int) -> int:
    return -(-size // devices) * devices


def _with_heads(config: Config, repeat: int, groups: int) -> Config:
    per_group = config.num_attention_heads // config.num_key_value_heads // repeat
    return dataclasses.replace(
        config, num_key_value_heads=groups, num_attention_heads=groups * per_group
    )


def _mlp_changes(width: int) -> dict[str, list[Change]]:
    return {"gate_up": [lambda x: _pad(x, -1, width)], "down": [lambda x: _pad(x, -2, width)]}


def _repeat_grouped(x: jax.Array, repeat: int, config: TargetConfig) -> jax.Array:
    """[.., G, N/G + 2, H]: every KV head `repeat` times, its query heads shared out."""
    if repeat == 1:
        return x
    per_group = config.num_attention_heads // config.num_key_value_heads
    q, kv = x[..., :per_group, :], x[..., per_group:, :]
    lead, (groups, _, head_dim) = x.shape[:-3], x.shape[-3:]
    q = q.reshape(*lead, groups * repeat, per_group // repeat, head_dim)
    return jnp.concatenate([q, jnp.repeat(kv, repeat, axis=-3)], axis=-2)


def _regroup(x: jax.Array, axis: int, repeat: int) -> jax.Array:
    """[.., G, N/G, ..] as [.., G*repeat, N/G/repeat, ..]."""
    shape = list(x.shape)
    shape[axis] *= repeat
    shape[axis + 1] //= repeat
    return x.reshape(shape)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end of an axis, up to `size`."""
    if x.shape[axis] == size:
        return x
    margins = [(0, 0)] * x.ndim
    margins[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, margins)


def _change_layers(params: Params, changes: dict[str, list[Change]]) -> Params:
    """The tree with the named parameters of its layers changed."""

    def change(path: tuple, leaf: jax.Array) -> jax.Array:
        for function in changes.get(path[-1].key, ()):
            leaf = function(leaf)
        return leaf

    layers = jax.tree_util.tree_map_with_path(change, params["layers"])
    return params | {"layers": layers}
