"""A double of `torch._scaled_mm` on a GPU with FP8 tensor cores, for tests on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F


def takes_rows_on_a_cpu() -> bool:
    """Whether torch's own CPU product takes a scale for each row; 2.11 does not."""
    a, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale, scale.t(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


needs_rows_on_a_cpu = pytest.mark.skipif(
    not takes_rows_on_a_cpu(), reason="this torch takes scales of rows on GPUs alone"
)


def from_tiles(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Scales [rows, blocks] in FP64 from their tiles of 512 bytes, one by one, as cuBLAS documents
    where each lies. Nothing may follow the last tile."""
    tiles_in_row = -(-blocks // 4)
    assert scale.shape == (-(-rows // 128) * tiles_in_row * 512,)
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tile = row // 128 * tiles_in_row + block // 4
    inside = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    return scale.double()[tile * 512 + inside]


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(payload: torch.Tensor) -> torch.Tensor:
    """The numbers of FP4 in FP64: of two in a byte the first is in the low half."""
    found = torch.stack([payload.view(torch.uint8) & 15, payload.view(torch.uint8) >> 4], -1)
    found = found.flatten(-2).long()
    signed = torch.tensor([*FP4, *(-x for x in FP4)], dtype=torch.float64)
    return signed[found]


def spread(scale: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
    scale = scale.double().reshape(-1, 1) if scale.dim() < 2 else scale.double()
    for dim, size in enumerate((rows, inner)):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
    return scale.expand(rows, inner)


def exact(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and that of the magnitudes."""
    a64, b64 = (values(x, scale) for x, scale in ((a, a_scale), (b, b_scale)))
    return a64 @ b64.t(), a64.abs() @ b64.abs().t()


def values(x: torch.Tensor, scale: Any) -> torch.Tensor:
    if isinstance(scale, tuple):
        in_tiles, outer = scale
        numbers = unpacked(x)
        of_blocks = from_tiles(in_tiles, len(x), -(-numbers.shape[1] // 16))
        return numbers * of_blocks.repeat_interleave(16, 1)[:, : numbers.shape[1]] * outer.double()
    if scale.dtype == torch.float8_e8m0fnu:
        of_blocks = from_tiles(scale, len(x), -(-x.shape[1] // 32))
        return x.double() * of_blocks.repeat_interleave(32, 1)[:, : x.shape[1]]
    return x.double() * spread(scale, *x.shape)


class TensorCores:
    """Stands for torch's FP8 product on Hopper and on Blackwell: its demands and cuBLASLt's, and a
    float64 product.

    Demands known from torch's source (`ScaledBlas.cpp`): sizes, strides, dtypes of bias and
    result, one operand in E4M3, scales of the shapes and strides of a pair in `PAIRS`. From
    cuBLASLt: pointers of 16 bytes; with scales of blocks, M a multiple of 4 and precise
    accumulation. Scales in tiles are contiguous bytes; those of FP4 come with a factor.
    """

    def __init__(self) -> None:
        self.fast: list[bool] = []
        self.picked: list[tuple[str, str]] = []  # by what the scales of a and b are read
        self.wrote: list[tuple[torch.dtype, bool]] = []  # and whether into a given tensor

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_a: Any,
        scale_b: Any,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k, n = b.shape
        assert a.is_contiguous() and b.t().is_contiguous(), "row-major times column-major"
        assert k % 16 == 0 and n % 16 == 0
        assert not (a.dtype == b.dtype == torch.float8_e5m2)
        assert bias is None or (bias.dtype == out_dtype != torch.float32 and bias.shape == (n,))
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0, "operands begin at 16 bytes"
        if not isinstance(scale_b, tuple):  # 1-d scales stay as they are
            scale_b = scale_b.t()
        picked = picked_tiles(a, b.t(), scale_a, scale_b)
        if picked is None:
            assert scale_a.dtype == scale_b.dtype == torch.float32
            picked = picked_scaling(a, b.t(), scale_a, scale_b)
        elif picked == ("mx", "mx"):
            assert k % 32 == 0, "whole blocks"
        assert (picked == ("nv", "nv")) <= (not use_fast_accum)
        if "block" in picked:  # cuBLASLt reads these scales four rows at a time
            assert k % 128 == 0 and a.shape[0] % 4 == 0 and not use_fast_accum
        self.picked.append(picked)
        self.fast.append(use_fast_accum)
        product, _ = exact(a, b.t(), scale_a, scale_b)
        product = (product if bias is None else product + bias.double()).to(out_dtype)
        self.wrote.append((out_dtype, out is not None))
        if out is None:
            return product
        assert out.dtype == out_dtype and out.shape == product.shape
        assert out.is_contiguous() and out.data_ptr() % 16 == 0
        return out.copy_(product)


def accumulation_bound(
    magnitudes: torch.Tensor, inner: int, *, is_narrow: bool, is_fast: bool
) -> torch.Tensor:
    """What tensor cores' sums of `inner` products, whose magnitudes add up to these, may be off by.

    Before Blackwell they keep 14 bits of a sum (DeepSeek-V3, 3.3.2; arXiv 2511.10909). Precise
    accumulation adds that to a sum in FP32 after 128 terms; fast accumulation does so at the end.
    """
    terms = min(inner, 128) if is_narrow and not is_fast else inner
    unit = 2.0**-13 if is_narrow else 2.0**-22
    return 1.2 * (terms + 8) ** 0.5 * unit * magnitudes


def summed_as_on_hopper(a_MK: torch.Tensor, b_NK: torch.Tensor, *, is_fast: bool) -> torch.Tensor:
    """The product of FP8 numbers as those papers describe it, in FP64: 32 terms and the sum before
    are cut off 13 bits below the largest one's first, and so is their sum."""

    def cut(x: torch.Tensor, first_bit: torch.Tensor) -> torch.Tensor:
        return x.ldexp(13 - first_bit).trunc().ldexp(first_bit - 13)

    a_MK, b_NK = (F.pad(x.double(), (0, -x.shape[1] % 32)) for x in (a_MK, b_NK))
    total = torch.zeros(len(a_MK), len(b_NK), dtype=torch.float64)
    narrow = total.clone()
    for begin in range(0, a_MK.shape[1], 32):
        if begin % 128 == 0 and not is_fast:
            total, narrow = total + narrow, torch.zeros_like(total)
        of_terms = a_MK[:, None, begin : begin + 32] * b_NK[None, :, begin : begin + 32]
        terms = torch.cat((of_terms, narrow[..., None]), -1)
        narrow = cut(terms, terms.frexp().exponent.amax(-1, keepdim=True) - 1).sum(-1)
        narrow = cut(narrow, narrow.frexp().exponent - 1)
    return total + narrow


PAIRS = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("square", "block"),
    ("block", "square"),
    ("block", "block"),
)
"""In the order in which torch tries them (get_joint_scaling in ScaledBlas.cpp)."""


def picked_tiles(
    a_MK: torch.Tensor, b_NK: torch.Tensor, scale_a: Any, scale_b: Any
) -> tuple[str, str] | None:
    """Whether torch reads scales in tiles, of `mx` or `nv`."""
    if isinstance(scale_a, tuple) and isinstance(scale_b, tuple):
        for x, (scale, outer) in ((a_MK, scale_a), (b_NK, scale_b)):
            assert x.dtype == torch.float4_e2m1fn_x2 and scale.dtype == torch.float8_e4m3fn
            assert scale.is_contiguous() and (outer.numel(), outer.dtype) == (1, torch.float32)
        return "nv", "nv"
    if scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu:
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        return "mx", "mx"
    return None


def picked_scaling(
    a_MK: torch.Tensor, b_NK: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[str, str]:
    """How torch reads scales of these shapes and strides; it takes no others."""
    for pair in PAIRS:
        if fits(a_MK, scale_a, pair[0]) and fits(b_NK, scale_b, pair[1]):
            return pair
    raise AssertionError(f"scales {scale_a.shape} {scale_a.stride()}, {scale_b.shape}")


def fits(payload: torch.Tensor, scale: torch.Tensor, kind: str) -> bool:
    rows, blocks = payload.shape[0], -(-payload.shape[1] // 128)
    if kind == "tensor":
        return scale.numel() == 1
    if kind == "row":
        return scale.shape == (rows, 1) and scale.is_contiguous()
    sizes, strides = ((rows, blocks), (1, rows))
    if kind == "square":
        sizes, strides = ((-(-rows // 128), blocks), (-(-blocks // 4) * 4, 1))
    has_strides = all(
        size <= 1 or stride == asked
        for size, stride, asked in zip(scale.shape, scale.stride(), strides, strict=True)
    )
    return scale.shape == sizes and has_strides
