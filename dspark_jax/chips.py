"""Figures of TPU chips, for modelled times and for what fits. None of them is measured here.

JAX sees a v5p chip (two cores that work as one) as one device and a TPU7x chip as two; every figure
is for one JAX device.

Source: memory, bandwidth and operations: `jax.experimental.pallas.tpu.get_tpu_info_for_chip` of
JAX 0.10 (v5p: twice its core's). Usable memory: what the TPU compiler says it has when a program is
too large. Links: Google Cloud's TPU documentation, inter-chip interconnect per chip, both
directions. The time before a collective moves its first byte is an assumption.
"""

import dataclasses

COLLECTIVE_LATENCY_S = 2e-6  # assumed, for every collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Peak figures of one device of an accelerator.

    Attributes:
      name: as in tables.
      bytes_per_s: main memory.
      flops_per_s: bfloat16.
      hbm_bytes: main memory that programs may use; 0 if unknown.
      link_bytes_per_s: to all neighbours together; 0 if unknown.
      devices_per_chip: JAX devices of one chip.
      vmem_bytes: on-chip memory; 0 if unknown.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    hbm_bytes: float = 0.0
    link_bytes_per_s: float = 0.0
    devices_per_chip: int = 1
    vmem_bytes: float = 0.0


_GIB = 2.0**30

CHIPS = {
    "v5e": Chip(
        name="TPU v5e", bytes_per_s=820e9, flops_per_s=197e12, hbm_bytes=15.75 * _GIB,
        link_bytes_per_s=200e9, vmem_bytes=128 * 2.0**20,
    ),
    "v5p": Chip(
        name="TPU v5p", bytes_per_s=2460e9, flops_per_s=459e12, hbm_bytes=95.74 * _GIB,
        link_bytes_per_s=600e9, vmem_bytes=128 * 2.0**20,
    ),
    "v6e": Chip(
        name="TPU v6e", bytes_per_s=1640e9, flops_per_s=920e12, hbm_bytes=31.25 * _GIB,
        link_bytes_per_s=448e9, vmem_bytes=128 * 2.0**20,
    ),
    "tpu7x": Chip(
        name="TPU v7x core", bytes_per_s=3700e9, flops_per_s=1155e12, hbm_bytes=94.75 * _GIB,
        link_bytes_per_s=600e9, devices_per_chip=2, vmem_bytes=64 * 2.0**20,
    ),
}  # fmt: skip
