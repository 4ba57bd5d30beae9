"""TPU topologies that programs are compiled for on a machine without one."""

import dataclasses
import importlib.util
import math
import os

import jax
from jax.experimental import topologies

from dspark_jax.chips import CHIPS, Chip
from dspark_jax.sharding import AXES, MeshShape

# Google Cloud's names count chips, v5p's and v4's count cores.
_ACCELERATORS = {
    "v5e-1": "v5e:1x1", "v5e-4": "v5e:2x2", "v5e-8": "v5e:2x4", "v5e-16": "v5e:4x4",
    "v5e-32": "v5e:4x8", "v5e-64": "v5e:8x8",
    "v6e-1": "v6e:1x1", "v6e-4": "v6e:2x2", "v6e-8": "v6e:2x4", "v6e-16": "v6e:4x4",
    "v6e-32": "v6e:4x8", "v6e-64": "v6e:8x8",
    "v5p-2": "v5p:1x1x1", "v5p-8": "v5p:2x2x1", "v5p-16": "v5p:2x2x2", "v5p-32": "v5p:2x2x4",
    "v5p-64": "v5p:2x4x4",
    "tpu7x-1": "tpu7x:1x1x1", "tpu7x-4": "tpu7x:2x2x1", "tpu7x-8": "tpu7x:2x2x2",
    "tpu7x-16": "tpu7x:2x2x4",
}  # fmt: skip
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",  # read by libtpu although nothing of the kind is there
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: as `v6e:4x4`.
      chip: figures of one device.
      devices: all of them; TPU7x has two a chip.
    """

    name: str
    chip: Chip
    devices: tuple[jax.Device, ...]

    def device_key(self, shape: MeshShape) -> str:
        """The devices, under a mesh if it has more than one, as an engine's speed tables say it."""
        key = f"{len(self.devices)}x {self.devices[0].device_kind}"
        if shape.devices == 1:
            return key
        return f"{key} as {','.join(f'{axis}={getattr(shape, axis)}' for axis in AXES)}"


def prepare_environment() -> None:
    """Keeps JAX on the CPU and libtpu from looking for a TPU; call before JAX is used."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def has_compiler() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def load_topology(name: str) -> Topology:
    """The devices of a topology.

    Args:
      name: kind and chips along each axis (`v6e:4x4`, `v5p:2x2x4`), or what Google Cloud calls a
        slice (`v6e-16`, `v5p-32`).

    Returns:
      The topology.

    Raises:
      ValueError: no such kind or shape.
      FileNotFoundError: libtpu is not installed.
    """
    shape = _ACCELERATORS.get(name.lower().replace("v5litepod", "v5e"), name.lower())
    kind, _, sizes = shape.partition(":")
    parts = sizes.split("x")
    axes = 2 if kind in ("v5e", "v6e") else 3
    if kind not in CHIPS or len(parts) != axes or not all(p.isdecimal() for p in parts):
        raise ValueError(
            f"topology {name!r} is not known; expected {sorted(CHIPS)} with the chips along each "
            "axis, as v6e:4x4 or v5p:2x2x4, or a slice such as v6e-16."
        )
    if not has_compiler():
        raise FileNotFoundError(
            "the TPU compiler is not installed; install it with: pip install -e '.[tpu]'"
        )
    prepare_environment()
    jax.config.update("jax_enable_compilation_cache", False)  # no client could load what is in it
    single = math.prod(map(int, parts)) == 1
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if single else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=shape, **bounds)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the TPU compiler has no topology {shape}: {error}") from error
    return Topology(name=shape, chip=CHIPS[kind], devices=tuple(found.devices))
