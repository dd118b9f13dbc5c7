"""Every product that the engine can ask for meets the demands of torch's FP8 product on a GPU.

Each call goes to torch's own checks, on meta tensors that stand for CUDA ones, and to the stricter
double, which knows what those do not check.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from fp8_numerics import torch_private
from fp8_numerics.scaled_mm import PACKED, Layout, scaled_mm
from fp8_numerics.swizzle import swizzled_size
from tests.fp8_numerics.kernels.tensor_cores import TensorCores, picked_scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0, FP4 = torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
ROLES = {"output": (E4M3, E4M3), "grad_input": (E5M2, E4M3), "grad_weight": (E5M2, E4M3)}
LAYOUTS: list[tuple[Layout, Layout]] = [
    ("tensor", "tensor"), ("row", "row"), ("block", "block"), ("block", "square"),
    ("square", "block"), ("mx", "mx"), ("nv", "nv"),
]  # fmt: skip
SHAPES = [(1, 1, 1), (4, 16, 128), (33, 50, 21), (130, 20, 140), (256, 128, 384), (3, 640, 1030)]


class Contract(TensorCores):
    """The double, and before it torch's checks of the same call on meta tensors."""

    def __call__(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        a, b = (x.to("meta") for x in operands)
        on_meta = {
            name: tree_map_only(torch.Tensor, lambda x: x.to("meta"), value)
            for name, value in options.items()
            if name != "out"  # torch has no such check on meta
        }
        checked = torch_private.scaled_mm(a, b, **on_meta)
        product = super().__call__(*operands, **options)
        assert (checked.shape, checked.dtype) == (product.shape, product.dtype)
        return product


@pytest.fixture(autouse=True)
def _meta_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._meta_registrations, "device_hint", lambda tensor: "cuda")


def scales(rows: int, inner: int, layout: Layout) -> torch.Tensor:
    shapes = {
        "tensor": (),
        "row": (rows, 1),
        "block": (rows, -(-inner // 128)),
        "square": (-(-rows // 128), -(-inner // 128)),
    }
    if layout in PACKED:
        size = swizzled_size(rows, -(-inner // PACKED[layout]))
        codes = torch.randint(120, 130, (size,)) if layout == "mx" else torch.randint(127, (size,))
        return codes.to(torch.uint8).view(E8M0 if layout == "mx" else E4M3)
    return torch.rand(shapes[layout]) + 0.5


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_product_is_one_that_a_gpu_takes(
    role: str, layouts: tuple[Layout, Layout], out_dtype: torch.dtype
) -> None:
    cores = Contract()
    for m, n, k in SHAPES:
        a, b = (
            torch.randn(rows, k).to(dtype) for rows, dtype in zip((m, n), ROLES[role], strict=True)
        )
        outers = None
        if layouts == ("nv", "nv"):
            k = -(-k // 16) * 16  # whole blocks
            a, b = (torch.randint(256, (rows, k // 2)).to(torch.uint8).view(FP4) for rows in (m, n))
            outers = torch.rand(()), torch.rand(())
        of_a, of_b = (scales(rows, k, layout) for rows, layout in zip((m, n), layouts, strict=True))
        for bias in (None, torch.randn(n)):
            for out in (None, torch.empty(m, n, dtype=out_dtype)):
                got = scaled_mm(
                    a, b, of_a, of_b, layouts=layouts, outers=outers, out_dtype=out_dtype,
                    bias_N=bias, use_fast_accum=layouts[0] in ("tensor", "row"), matmul=cores,
                    out_MN=out,
                )  # fmt: skip
                assert got.shape == (m, n) and got.dtype == out_dtype
    # Scales of one block a row are a row's as well: torch takes the simpler reading.
    readings = {layouts} | ({("row", "row")} if layouts == ("block", "block") else set())
    assert layouts in cores.picked and set(cores.picked) <= readings


def call(**changes: Any) -> torch.Tensor:
    """A product of [128, 512] and [256, 512] with scales of blocks, and `changes` of it."""
    arguments: dict[str, Any] = {
        "a": torch.zeros(128, 512).to(E4M3),
        "b": torch.zeros(256, 512).to(E4M3),
        "scale_a": torch.ones(4, 128).t(),
        "scale_b": torch.ones(4, 256).t(),
        "bias": None,
        "out_dtype": torch.bfloat16,
        "use_fast_accum": False,
    } | changes
    a, b = arguments.pop("a"), arguments.pop("b")
    return TensorCores()(a, b.t(), **(arguments | {"scale_b": arguments["scale_b"].t()}))


def test_the_double_refuses_what_a_gpu_refuses() -> None:
    call()
    shifted = torch.zeros(128 * 512 + 8).to(E4M3)[8:].view(128, 512)
    refused: list[dict[str, Any]] = [
        {"scale_a": torch.ones(128, 4)},  # rows innermost in memory is what cuBLASLt reads
        {"scale_b": torch.ones(2, 4).t().contiguous().t()},  # of squares: the other stride
        {"a": torch.zeros(126, 512).to(E4M3), "scale_a": torch.ones(4, 126).t()},
        {"a": shifted},
        {"a": torch.zeros(128, 512).to(E5M2), "b": torch.zeros(256, 512).to(E5M2)},
        {"b": torch.zeros(250, 512).to(E4M3), "scale_b": torch.ones(4, 250).t()},
        {"a": torch.zeros(512, 128).to(E4M3).t()},
        {"bias": torch.zeros(256)},
        {"use_fast_accum": True},
        {"scale_a": torch.ones(4, 128, dtype=torch.float64).t()},
        {"out": torch.empty(256, 128).bfloat16().t()},
    ]
    for changes in refused:
        with pytest.raises(AssertionError):
            call(**changes)


def test_what_torch_would_pick() -> None:
    """Scales that fit several readings are read as the first of torch's list."""
    a, b = torch.zeros(4, 128), torch.zeros(16, 128)
    one, rows = torch.ones(1, 1), (torch.ones(4, 1), torch.ones(16, 1))
    assert picked_scaling(a, b, one, one) == ("tensor", "tensor")
    assert picked_scaling(a, b, *rows) == ("row", "row")
    with pytest.raises(AssertionError):
        picked_scaling(a, b, rows[0], torch.ones(3, 3))
