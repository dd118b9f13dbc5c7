"""Run every matrix product, in FP8 or not, and count what really ran.

FP8 operands with one scale each are multiplied as their numbers, and the scales are applied to the
FP32 accumulator. Without FP8 tensor cores the product runs in a wider format that holds every FP8
number exactly: BF16 with FP32 accumulation for BF16 work where the device is fast at it, FP32
otherwise. On a CPU there is one rounding to the output dtype, as on FP8 hardware; only the order of
accumulation differs. A GPU without FP8 tensor cores rounds twice in BF16 work. Plain BF16 operands
are multiplied in FP32 on CPUs without BF16 instructions (bf16.py).

Operands with a scale for each row or block are multiplied as their values. A power of two moves the
exponent alone, so the values stay exact in BF16; with other scales they are rounded to FP32 once.

Where the engine's FP8 tensor cores take such scales, they multiply the bytes. The counter records
which of the two ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from fp8_numerics import bf16, cpu, torch_private
from fp8_numerics.addmm import Scales, factor, mm_into, scaled_addmm, times_scales
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.dtypes import DTYPE_NAMES
from fp8_numerics.formats import SIMULATED, Fp8Format
from fp8_numerics.kernels import triton_launch
from fp8_numerics.meta import device_kind
from fp8_numerics.scaled_mm import ALIGNMENT, Layout, ScaledMatmul, scaled_mm

Fp8Backend = Literal["tensor cores", "emulated"]
Operand = torch.Tensor | Fp8Tensor


@dataclass(frozen=True)
class Engine:
    """Say how a device casts to FP8 and which FP8 products its tensor cores run.

    `uses_triton` runs casts as Triton kernels. `layouts` are the kinds of scales that `matmul`
    takes; products with other scales are emulated. Tensor cores read both operands with the dim
    that they sum over innermost. So where they multiply, a tensor that two products read is kept in
    two orientations, written by one cast. `fp32_results` are the layouts for which `matmul` writes
    FP32.
    """

    uses_triton: bool = False
    layouts: frozenset[Layout] = frozenset()
    fp32_results: frozenset[Layout] = frozenset({"tensor"})
    matmul: ScaledMatmul = torch_private.scaled_mm

    def multiplies(self, layout: Layout, work: torch.dtype | None = None) -> bool:
        """Whether tensor cores multiply operands with scales of this layout.

        `work` is the dtype of the result, if it is known: scales of rows and blocks are guaranteed
        for BF16 results only.
        """
        in_bf16 = work is None or work == torch.bfloat16 or layout == "tensor"
        return layout in self.layouts and in_bf16

    def orients(self, layout: Layout) -> bool:
        """Whether a cast writes a separate orientation for each product."""
        return self.uses_triton and self.multiplies(layout)


EMULATED = Engine()
LISTENER: Callable[..., torch.Tensor] | None = None
"""What each product of FP8 operands is given to, if anything records them (`fp8_coverage`).

Its arguments are a function that computes the product, both dtypes, the shape (M, N, K), and
whether the product is emulated. It returns the product.
"""


class Sum(Protocol):
    """Name the FP32 sum that a product is meant for.

    `total` has the product's shape. With `is_first` the product overwrites it.
    """

    @property
    def total(self) -> torch.Tensor:
        """Return the sum itself."""

    @property
    def is_first(self) -> bool:
        """Whether nothing has been added yet."""


class GemmCounter:
    """Count FLOPs (2 per multiply-add) by (operand precision, place) as products run."""

    def __init__(self) -> None:
        self.flops: dict[tuple[str, str], int] = defaultdict(int)
        self.fp8_backends: dict[Fp8Backend, int] = defaultdict(
            int
        )  # FLOPs of FP8 products, by what ran them

    def add(self, precision: str, place: str, flops: int) -> None:
        """Add the FLOPs of a product whose operands have `precision` ("fp8", "bf16", …)."""
        self.flops[precision, place] += flops

    def by_precision(self) -> dict[str, int]:
        """Return the counted FLOPs of each precision."""
        totals: dict[str, int] = defaultdict(int)
        for (precision, _), flops in self.flops.items():
            totals[precision] += flops
        return dict(totals)

    def share(self, precision: str) -> float:
        """Return the fraction of all counted FLOPs in `precision`; 0 when nothing was counted."""
        return self.by_precision().get(precision, 0) / max(1, sum(self.flops.values()))


def wide_dtype(device: torch.device, work: torch.dtype) -> torch.dtype:
    """Return the dtype in which FP8 numbers are multiplied where there are no FP8 tensor cores."""
    if work != torch.bfloat16:
        return torch.float32
    if device.type == "cpu":
        return torch.bfloat16 if cpu.FAST_AT_BF16 else torch.float32
    return torch.float32 if bf16.fp32_products(device) else torch.bfloat16


def gemm(
    a: Operand,
    b: Operand,
    *,
    work: torch.dtype,
    counter: GemmCounter,
    place: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: torch.Tensor | None = None,
    engine: Engine = EMULATED,
    use_fast_accum: bool = False,
    into: Sum | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a @ b (+ bias) for 2-d operands, both FP8 or both plain, in the dtype `work`.

    `transpose_a` and `transpose_b` transpose an operand first. `place` names the product for the
    counter. `use_fast_accum` concerns FP8 tensor cores only, and never scales of blocks.

    With `into` the result (without bias) is meant for this sum: it is FP32 where the device has
    such a product, otherwise of dtype `work`. It is `into.total` itself if the product wrote or
    added it there. Without `into` the result is `out`, of its shape and dtype, if the product
    wrote it there, which products of tensor cores, and those that round afterwards, do not.
    """
    if LISTENER is not None and isinstance(a, Fp8Tensor):
        return _announced(LISTENER, locals())  # the arguments
    assert into is None or bias is None
    if isinstance(a, Fp8Tensor) and isinstance(b, Fp8Tensor):
        assert a.rotation == b.rotation, "the product would not cancel the rotation"
        precision = "fp8"
        flops = 2 * a.payload.numel() * b.payload.shape[0 if transpose_b else 1]  # 2 M K N
        flops *= 2 if a.payload.dtype == torch.float4_e2m1fn_x2 else 1  # K is packed
        if engine.layouts and _on_tensor_cores(a, b, engine, work):
            counter.flops[precision, place] += flops
            counter.fp8_backends["tensor cores"] += flops
            return _tensor_core_product(
                a, b, transpose_a, transpose_b, bias, work, engine, use_fast_accum, into
            )
        counter.fp8_backends["emulated"] += flops
        wide = wide_dtype(a.payload.device, work)
        is_exact = a.fmt is not SIMULATED and b.fmt is not SIMULATED
        if a.block is None and b.block is None and is_exact:
            # One scale each: multiply the numbers, which are exact, and scale the FP32 sums.
            scales: Scales | None = (a.dequant_scale, b.dequant_scale)
            a, b = a.numbers(wide), b.numbers(wide)
        else:
            scales = _outer_factors(a, b)
            wide = wide if a.is_exact_in_bf16 and b.is_exact_in_bf16 else torch.float32
            a, b = a.dequantize(wide), b.dequantize(wide)
            bias = None if bias is None else bias.to(wide)
    else:
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor), "mixed operands"
        flops = 2 * a.numel() * b.shape[0 if transpose_b else 1]
        precision = DTYPE_NAMES[a.dtype]
        scales = None
    a = a.t() if transpose_a else a
    b = b.t() if transpose_b else b
    counter.flops[precision, place] += flops
    if into is not None:
        product = mm_into(into.total, a, b, is_first=into.is_first, scales=scales)
        if product is not None:
            return product
    out = out if out is not None and out.dtype == a.dtype else None
    if scales is None:
        product = bf16.mm(a, b, bias, out)
    else:
        product = _scaled_product(a, b, scales, bias, out)
    return product if product.dtype == work else product.to(work)


def _announced(listener: Callable[..., torch.Tensor], arguments: dict[str, Any]) -> torch.Tensor:
    """Let `listener` run the product of these arguments of `gemm`, and say what it is."""
    a, b, engine = arguments["a"], arguments["b"], arguments["engine"]
    in_byte = 2 if a.payload.dtype == torch.float4_e2m1fn_x2 else 1
    rows, inner = reversed(a.payload.shape) if arguments["transpose_a"] else a.payload.shape
    columns = b.payload.shape[0 if arguments["transpose_b"] else 1]
    is_emulated = not (engine.layouts and _on_tensor_cores(a, b, engine, arguments["work"]))

    def run() -> torch.Tensor:
        global LISTENER  # what runs inside is this product, and is not announced again
        LISTENER, before = None, LISTENER
        try:
            return gemm(**arguments)
        finally:
            LISTENER = before

    return listener(
        run,
        (a.payload.dtype, b.payload.dtype),
        (rows, columns, inner * in_byte),
        is_emulated,
    )


def _outer_factors(a: Fp8Tensor, b: Fp8Tensor) -> Scales | None:
    """Return the factors of the whole operands (0-d FP32); None where neither has one."""
    if a.outer is None and b.outer is None:
        return None
    return _factor_of(a), _factor_of(b)


def _factor_of(x: Fp8Tensor) -> torch.Tensor:
    return (
        torch.ones((), dtype=torch.float32, device=x.payload.device) if x.outer is None else x.outer
    )


def _on_tensor_cores(a: Fp8Tensor, b: Fp8Tensor, engine: Engine, work: torch.dtype) -> bool:
    multiplies_both = all(engine.multiplies(operand.layout, work) for operand in (a, b))
    return multiplies_both and not in_e5m2(a.fmt, b.fmt)


def in_e5m2(a: Fp8Format, b: Fp8Format) -> bool:
    """Whether both operands are E5M2; tensor cores need one operand in E4M3."""
    return a.name == b.name == "e5m2"


def _tensor_core_product(
    a: Fp8Tensor,
    b: Fp8Tensor,
    transpose_a: bool,
    transpose_b: bool,
    bias: torch.Tensor | None,
    work: torch.dtype,
    engine: Engine,
    use_fast_accum: bool,
    into: Sum | None,
) -> torch.Tensor:
    """Multiply both operands as [rows, K], transposing one that lies the other way in memory."""
    a_MK, a_scale = _rows_of(a, transpose_a)
    b_NK, b_scale = _rows_of(b, not transpose_b)
    a_layout, b_layout = a.layout, b.layout
    if {a_layout, b_layout} == {"tensor", "row"}:  # one scale for every row
        a_scale, b_scale = (
            scale.expand(payload.shape[0], 1)
            for payload, scale in ((a_MK, a_scale), (b_NK, b_scale))
        )
        a_layout = b_layout = "row"
    target = None
    if into is not None and {a_layout, b_layout} <= engine.fp32_results:
        work = torch.float32
        target = into.total if into.is_first and _is_target(into.total) else None
    return scaled_mm(
        a_MK,
        b_NK,
        a_scale,
        b_scale,
        layouts=(a_layout, b_layout),
        outers=_outer_factors(a, b),
        out_dtype=work,
        bias_N=bias,
        use_fast_accum=use_fast_accum and a_layout in ("tensor", "row"),
        matmul=engine.matmul,
        out_MN=target,
    )


def _is_target(total: torch.Tensor) -> bool:
    """Whether tensor cores can write their result into this tensor."""
    return total.is_contiguous() and total.data_ptr() % ALIGNMENT == 0


def _rows_of(x: Fp8Tensor, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload as [rows, K] with K innermost, and its scales."""
    payload = x.payload.t() if transpose else x.payload
    is_turned = transpose and x.block is not None and not x.is_packed
    scale = x.dequant_scale.t() if is_turned else x.dequant_scale
    if not payload.is_contiguous():
        payload = transposed(payload.t())
    return payload, scale


def transposed(payload_MN: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as a contiguous [N, M], by Triton where it runs."""
    if payload_MN.device.type == "cpu" or triton_launch.unavailable(payload_MN.device) is not None:
        return payload_MN.t().contiguous()
    from fp8_numerics.kernels.triton_cast import transpose_payload

    return transpose_payload(payload_MN)


def _scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return a @ b times both scales (+ bias); on a CPU they enter before the one rounding."""
    if not a.is_cpu and device_kind(a.device) != "cpu":
        product = times_scales(torch.mm(a, b).float(), scales)
        return product if bias is None else product + bias
    if bias is None:
        return scaled_addmm(a.new_empty(()), a, b, factor(scales), beta=0, out=out)
    start = bias if bias.dtype == a.dtype else bias.to(a.dtype)
    return scaled_addmm(start, a, b, factor(scales), out=out)
