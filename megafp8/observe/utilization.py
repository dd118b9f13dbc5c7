"""Compute which fraction of its devices' peak a run uses.

Model FLOPs utilization (MFU) counts the arithmetic that the model needs; hardware FLOPs utilization
(HFU) also counts what backward recomputes (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
Both are fractions of one rate: the dense BF16 peak of a known accelerator, or the measured rate of
a matrix product on a CPU and on an accelerator that is not known.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import NamedTuple

from megafp8.observe.flops import AttentionCount, ModelFlops, gemm_flops_per_token
from megafp8.specs import RunSpec
from megafp8.specs.rank_shape import layers_with_recomputation

_DATA_SHEET = "data sheet, dense"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Hold the rate of matrix products that utilization is a fraction of.

    Attributes:
        device: The accelerator's name, or `CPU`.
        tflops: 10^12 operations a second of the products `products`, on one rank.
        products: The dtype of these products, as `BF16`.
        fp8_tflops: The rate of FP8 products; None where they have no units of their own.
        source: Where the rates come from: the data sheet, or a measurement.
    """

    device: str
    tflops: float
    products: str
    fp8_tflops: float | None
    source: str

    def text(self, *, fp8: bool) -> str:
        """Return the peak in words; `fp8` says whether the run has FP8 products."""
        rate = f"{self.tflops:.3g} TFLOP/s {self.products}"
        if fp8 and self.fp8_tflops is not None:
            rate += f" and {self.fp8_tflops:.4g} FP8"
        return f"{rate} a rank ({self.device}, {self.source})"


def peak_of_gpu(name: str) -> Peak | None:
    """Return the data sheet's peak of the GPU that CUDA calls `name`, or None if it is unknown."""
    for pattern, device, tflops, fp8_tflops in _GPUS:
        if re.search(pattern, name):
            return Peak(
                device=device,
                tflops=tflops,
                products="BF16",
                fp8_tflops=fp8_tflops,
                source=_DATA_SHEET,
            )
    return None


class Rates(NamedTuple):
    """Hold a GPU's dense rates by NVIDIA's data sheet, in 10^12 operations a second."""

    name: str
    bf16_tflops: float
    fp8_tflops: float | None


H100 = Rates("H100 SXM", 989.4, 1978.9)
H200 = H100._replace(name="H200 SXM")
B200 = Rates("B200 SXM", 2250, 4500)
_GPUS: tuple[tuple[str, str, float, float | None], ...] = (
    (r"\bH100 PCIe\b", "H100 PCIe", 756.0, 1513.0),
    (r"\bH100 NVL\b", "H100 NVL", 835.0, 1671.0),
    (r"\bH100\b.*\bHBM3\b", *H100),
    (r"\bH200\b(?! NVL)", *H200),
    (r"\bB200\b", *B200),
    (r"\bA100\b", "A100", 312.0, None),
)
"""Patterns of the names that CUDA reports, with NVIDIA's dense rates of BF16 and FP8. Variants with
other rates, such as the H200 NVL, have no row, and their rate is measured."""


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """Hold fractions of the peak of all ranks, from 0 to 1, with attention counted in both ways."""

    mfu_causal: float
    mfu_full: float
    hfu_causal: float
    hfu_full: float


def recomputed_flops_per_token(spec: RunSpec, attention: AttentionCount = "causal") -> float:
    """Return the FLOPs per token of the products that backward repeats.

    Whole layers repeat their forward pass, which is a third of their products; selective
    recomputation repeats the forward pass of attention's core alone.
    """
    forward = _third(gemm_flops_per_token(spec.model, attention, seq_length=spec.data.seq_length))
    core = forward.attention * layers_with_recomputation(spec, "selective")
    in_layers = forward.linear + forward.attention + forward.router
    return core + in_layers * layers_with_recomputation(spec, "full")


def _third(flops: ModelFlops) -> ModelFlops:
    return ModelFlops(**{name: of_kind / 3 for name, of_kind in asdict(flops).items()})


def utilization(spec: RunSpec, tokens_per_second: float, peak: Peak) -> Utilization:
    """Return the utilization of all ranks; `spec.model.vocab_size` must be known.

    `tokens_per_second` is the speed of the whole job, over all ranks.
    """
    rate = peak.tflops * 1e12 * spec.parallel.world_size

    def fraction(attention: AttentionCount, *, executed: bool) -> float:
        length = spec.data.seq_length
        flops = gemm_flops_per_token(spec.model, attention, seq_length=length).total
        if executed:
            flops += recomputed_flops_per_token(spec, attention)
        return flops * tokens_per_second / rate

    return Utilization(
        mfu_causal=fraction("causal", executed=False),
        mfu_full=fraction("full", executed=False),
        hfu_causal=fraction("causal", executed=True),
        hfu_full=fraction("full", executed=True),
    )
