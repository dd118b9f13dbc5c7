"""A double of `torch._scaled_mm` on a GPU with FP8 tensor cores, for tests on a CPU."""

from __future__ import annotations

import pytest
import torch


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
    a64 = a.double() * spread(a_scale, *a.shape)
    b64 = b.double() * spread(b_scale, *b.shape)
    return a64 @ b64.t(), a64.abs() @ b64.abs().t()


class TensorCores:
    """Stands for `torch._scaled_mm` on Hopper: its demands and cuBLASLt's, and a float64 product.

    Demands known from torch's source (`ScaledBlas.cpp`): sizes, strides, dtypes of bias and
    result, one operand in E4M3, scales of the shapes and strides of a pair in `PAIRS`. From
    cuBLASLt: pointers of 16 bytes; with scales of blocks, M a multiple of 4 and precise
    accumulation.
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
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
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
        assert scale_a.dtype == scale_b.dtype == torch.float32
        picked = picked_scaling(a, b.t(), scale_a, scale_b.t())
        if "block" in picked:  # cuBLASLt reads these scales four rows at a time
            assert k % 128 == 0 and a.shape[0] % 4 == 0 and not use_fast_accum
        self.picked.append(picked)
        self.fast.append(use_fast_accum)
        product, _ = exact(a, b.t(), scale_a, scale_b.t())
        product = (product if bias is None else product + bias.double()).to(out_dtype)
        self.wrote.append((out_dtype, out is not None))
        if out is None:
            return product
        assert out.dtype == out_dtype and out.shape == product.shape
        assert out.is_contiguous() and out.data_ptr() % 16 == 0
        return out.copy_(product)


PAIRS = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("square", "block"),
    ("block", "square"),
    ("block", "block"),
)
"""In the order in which torch tries them (get_joint_scaling in ScaledBlas.cpp)."""


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
