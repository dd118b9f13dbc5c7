"""How FP8 runs on a device: who casts, and which products go to FP8 tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.precision.formats import Fp8Format
from megafp8.precision.kernels import triton_launch
from megafp8.precision.kernels.scaled_mm import Layout, ScaledMatmul, unsupported

LAYOUTS: tuple[Layout, ...] = ("tensor", "row", "block", "square")


@dataclass(frozen=True)
class Engine:
    """`layouts`: the scales that `matmul` takes; products with others are emulated.

    Tensor cores read both operands with the dim that they sum over innermost. So where they
    multiply, a tensor that two products read is kept in two orientations, written by one cast.
    """

    uses_triton: bool = False
    layouts: frozenset[Layout] = frozenset()
    matmul: ScaledMatmul = torch._scaled_mm

    def multiplies(self, layout: Layout, work: torch.dtype | None = None) -> bool:
        """Whether operands scaled so go to tensor cores, in `work` if it is known.

        Scales of rows and blocks are promised for results in BF16 only.
        """
        in_bf16 = work is None or work == torch.bfloat16 or layout == "tensor"
        return layout in self.layouts and in_bf16

    def orients(self, layout: Layout) -> bool:
        """Whether a cast writes each product's own orientation."""
        return self.uses_triton and self.multiplies(layout)


EMULATED = Engine()


def engine_of(device: torch.device) -> Engine:
    """What this device can do."""
    if device.type != "cuda":
        return EMULATED
    return Engine(
        uses_triton=triton_launch.unavailable(device) is None,
        layouts=frozenset(name for name in LAYOUTS if unsupported(device, name) is None),
    )


def in_e5m2(a: Fp8Format, b: Fp8Format) -> bool:
    """Tensor cores need one operand in E4M3."""
    return a.name == b.name == "e5m2"
