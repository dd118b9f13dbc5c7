"""Describe the accelerators that a plan knows, by the figures of their data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megafp8.errors import ConfigError
from megafp8.observe import utilization
from megafp8.specs.gpus import Capability

GIVEN = "given on the command line"

MOST = 1e12  # of any figure of hardware
NUMBERS = ("bf16_tflops", "fp8_tflops", "memory_gib", "memory_gb_s", "node_gb_s", "network_gb_s")
NEEDED = NUMBERS[:4]
"""The figures that hardware of another name must give; links are those of an H100 by default."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hold the peaks of one accelerator and of its links, each in one direction.

    `tflops` are dense matrix products in 10^12 operations a second. `memory_gib` is what the driver
    reports, in units of 2^30 bytes; bandwidths are decimal gigabytes a second. `capability` is the
    compute capability, None where it is not known.

    A data sheet's "80 GB" are neither 80 * 10^9 bytes nor 80 GiB. So the memory of `KNOWN` is the
    smallest that PyTorch's public out-of-memory messages ("total capacity of …") were found to
    name, rounded down to 0.1 GiB: 79.11 GiB for an H100 (vLLM's issue 27508) and 139.72 GiB for an
    H200 (most say 139.80 or 139.81). For a B200 they say 178.35 GiB, as the driver does in
    torchao's pull request 4002. `nvidia-smi` shows more, with what the driver keeps for itself
    (81,559, 143,771 and 183,359 MiB).
    """

    name: str
    source: str
    bf16_tflops: float
    fp8_tflops: float
    memory_gib: float
    memory_gb_s: float
    node_gb_s: float  # between the accelerators of a node, sent by one of them
    network_gb_s: float  # between nodes, sent by one accelerator
    capability: Capability | None = None
    node_devices: int | None = None  # the most of them in a node; None if it is not known

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of its memory."""
        return int(self.memory_gib * 2**30)


H100 = Hardware(
    **utilization.H100._asdict(),
    memory_gib=79.1,
    memory_gb_s=3350,
    node_gb_s=450,
    network_gb_s=50,
    capability=(9, 0),
    node_devices=8,
    source="NVIDIA's H100 data sheet; one 400 Gbit/s network adapter for each GPU",
)
KNOWN = {
    "h100": H100,
    "h200": replace(
        H100,
        **utilization.H200._asdict(),
        memory_gib=139.7,
        memory_gb_s=4800,
        source="NVIDIA's H200 data sheet; one 400 Gbit/s network adapter for each GPU",
    ),
    "b200": Hardware(
        **utilization.B200._asdict(),
        memory_gib=178.3,
        memory_gb_s=8000,
        node_gb_s=900,
        network_gb_s=50,
        capability=(10, 0),
        node_devices=8,
        source="NVIDIA's DGX B200 data sheet (an eighth of its figures); one 400 Gbit/s network "
        "adapter for each GPU",
    ),
}


def hardware_of(name: str, numbers: dict[str, float]) -> Hardware:
    """Return the named hardware with the given figures in place of its own.

    Raises:
        ConfigError: The name is not known and not all of `NEEDED` are given, a figure's name is not
            known, or a figure is not positive.
    """
    for key, value in numbers.items():
        if key == "memory_gb":
            raise ConfigError(
                "hardware.memory_gb",
                value,
                "is not a figure of hardware",
                "Use hardware.memory_gib, in GiB as the driver reports them: an H100 of 80 GB has "
                f"{H100.memory_gib}",
            )
        if key not in NUMBERS:
            raise ConfigError(
                f"hardware.{key}", value, "is not a figure of hardware", f"Use {_listed(NUMBERS)}"
            )
        if not 0 < value <= MOST:
            reason = f"must be above 0 and at most {MOST:g}"
            raise ConfigError(f"hardware.{key}", value, reason, "Give the data sheet's figure")
    known = KNOWN.get(name.lower())
    if known is None:
        missing = [key for key in NEEDED if key not in numbers]
        if missing:
            raise ConfigError(
                "hardware",
                name,
                f"is not known, and {_listed(missing)} are not given",
                f"Use one of {', '.join(KNOWN)}, or give the figures, for example "
                f"hardware.{missing[0]}=…",
            )
        links = {key: getattr(H100, key) for key in NUMBERS[4:]}
        return Hardware(name=name, source=GIVEN, **(links | numbers))
    if not numbers:
        return known
    source = f"{known.source}; {_listed(list(numbers))} as given"
    figures: dict[str, Any] = {"source": source, **numbers}
    return replace(known, **figures)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"hardware.{name}" for name in names)
