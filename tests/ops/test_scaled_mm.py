"""The layouts, paddings and refusals around `torch._scaled_mm`.

torch's CPU version multiplies with scales of tensors and rows; for blocks a float64 product stands
in, which makes the demands of torch's CUDA version and of cuBLASLt.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from fp8_numerics.scaled_mm import Layout, check_scales, scaled_mm, writes_fp32
from megafp8.fp8.engine import unsupported
from tests.fp8_numerics.kernels.tensor_cores import TensorCores, exact, needs_rows_on_a_cpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    return a.to(E5M2), b.to(E4M3)


def assert_close(got: torch.Tensor, a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any) -> None:
    expected, magnitudes = exact(a, b, a_scale, b_scale)
    expected = expected if bias is None else expected + bias.double()
    magnitudes = magnitudes if bias is None else magnitudes + bias.double().abs()
    rounding = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    bound = a.shape[1] * 2.0**-24 * magnitudes + 2 * rounding[got.dtype] * expected.abs() + 1e-7
    assert got.shape == expected.shape
    assert got.is_contiguous(), "NCCL refuses other tensors, here the rest of a padded one"
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(32, 16, 48), (33, 17, 50), (1, 1, 1), (7, 130, 129)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rowwise", [False, pytest.param(True, marks=needs_rows_on_a_cpu)])
def test_torch_on_a_cpu(shape: tuple[int, int, int], out_dtype: torch.dtype, rowwise: bool) -> None:
    m, n, k = shape
    a, b = operands(m, n, k)
    a_scale = torch.rand(m, 1) + 0.5 if rowwise else torch.tensor(0.75)
    b_scale = torch.rand(n, 1) + 0.5 if rowwise else torch.tensor(1.5)
    for bias in (None, torch.randn(n).to(out_dtype)):
        kind: Layout = "row" if rowwise else "tensor"
        got = scaled_mm(
            a, b, a_scale, b_scale, layouts=(kind, kind), out_dtype=out_dtype, bias_N=bias
        )
        assert_close(got, a, b, a_scale, b_scale, bias)


@pytest.mark.parametrize("shape", [(256, 128, 512), (130, 140, 300), (5, 17, 130)])
@pytest.mark.parametrize("kinds", [("block", "square"), ("square", "block"), ("block", "block")])
def test_blocks(shape: tuple[int, int, int], kinds: tuple[Layout, Layout]) -> None:
    m, n, k = shape
    a, b = operands(m, n, k)
    a_scale, b_scale = (
        torch.rand(rows if kind == "block" else -(-rows // 128), -(-k // 128)) + 0.5
        for kind, rows in zip(kinds, (m, n), strict=True)
    )
    bias = torch.randn(n).bfloat16()
    got = scaled_mm(
        a, b, a_scale, b_scale, layouts=kinds, out_dtype=torch.bfloat16, bias_N=bias,
        matmul=TensorCores(),
    )  # fmt: skip
    assert_close(got, a, b, a_scale, b_scale, bias)


def test_the_three_products_of_a_linear() -> None:
    """Each reads the orientation that the module's docstring names."""
    tokens, inputs, outputs = 48, 32, 16
    x, w = torch.randn(tokens, inputs).to(E4M3), torch.randn(outputs, inputs).to(E4M3)
    g = torch.randn(tokens, outputs).to(E5M2)
    one = torch.ones(())
    x64, w64, g64 = x.double(), w.double(), g.double()
    for a, b, expected in [
        (x, w, x64 @ w64.t()),
        (g, w.t().contiguous(), g64 @ w64),
        (g.t().contiguous(), x.t().contiguous(), g64.t() @ x64),
    ]:
        got = scaled_mm(a, b, one, one, out_dtype=torch.float32)
        assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)


def test_empty_operands() -> None:
    a, b = torch.empty(0, 16).to(E4M3), torch.ones(8, 16).to(E4M3)
    one = torch.ones(())
    assert scaled_mm(a, b, one, one, out_dtype=torch.bfloat16).shape == (0, 8)
    no_sum = scaled_mm(a[:, :0].new_empty(3, 0), b[:, :0], one, one, out_dtype=torch.float32)
    assert torch.equal(no_sum, torch.zeros(3, 8))


def test_what_cannot_be_multiplied_is_refused() -> None:
    a, b = operands(16, 16, 256)
    one, rows, blocks = torch.ones(()), torch.ones(16, 1), torch.ones(1, 2)
    cases: list[tuple[Any, Any, Any, Any, Layout, Layout, str]] = [
        (a, a, one, one, "tensor", "tensor", "E5M2"),
        (a, b[:, :128], one, one, "tensor", "tensor", "differ in K"),
        (a, b, rows, one, "row", "tensor", "scaled by row times one scaled by tensor"),
        (a, b, torch.ones(3, 3), one, "tensor", "tensor", "fit no payload"),
        (a, b, rows, rows, "block", "block", "fit no payload"),
        (a, b, blocks, blocks, "square", "square", "by square times one scaled by square"),
    ]
    for left, right, a_scale, b_scale, left_layout, right_layout, what in cases:
        with pytest.raises(ValueError, match=what):
            scaled_mm(
                left, right, a_scale, b_scale,
                layouts=(left_layout, right_layout), out_dtype=torch.bfloat16,
            )  # fmt: skip


def test_a_cpu_has_no_fp8_tensor_cores() -> None:
    assert unsupported(torch.device("cpu")) is not None


@pytest.mark.parametrize(
    ("capability", "cuda", "runs"),
    [
        ((8, 6), "13.0", ""),
        ((8, 9), "13.0", "tensor"),
        ((9, 0), "12.8", "tensor row"),
        ((9, 0), "12.9", "tensor row block square"),
        ((9, 0), "13.0", "tensor row block square"),
        ((10, 0), "12.7", "tensor row"),
        ((10, 0), "12.8", "tensor row mx nv"),
        ((12, 0), "13.0", "tensor row mx nv"),
    ],
)
def test_the_scales_that_a_gpu_multiplies(
    capability: tuple[int, int], cuda: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for layout in get_args(Layout):
        reason = unsupported(torch.device("cuda"), layout)
        assert (reason is None) == (layout in runs.split()), reason


@pytest.mark.parametrize(
    ("capability", "cuda", "does"),
    [
        ((9, 0), None, False),
        ((9, 0), "12.8", False),
        ((9, 0), "12.9", True),
        ((9, 0), "13.0", True),
        ((10, 0), "13.0", False),
    ],
)
def test_products_with_scales_of_rows_that_write_fp32(
    capability: tuple[int, int], cuda: str | None, does: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for layout in get_args(Layout):
        assert writes_fp32(torch.device("cuda"), layout) == (does or layout != "row")
    assert not writes_fp32(torch.device("cpu"), "row")


@needs_rows_on_a_cpu
@pytest.mark.parametrize("inner", [16, 100, 128])
def test_a_short_row_is_what_it_is_said_to_be(inner: int) -> None:
    """One scale for up to 128 elements is a row's or a block's: their partners differ."""
    a, b = operands(16, 16, inner)
    scale, square = torch.rand(16, 1) + 0.5, torch.rand(1, 1) + 0.5
    check_scales(a, scale, "row")
    check_scales(a, scale, "block")
    by_row = scaled_mm(a, b, scale, scale, layouts=("row", "row"), out_dtype=torch.float32)
    assert_close(by_row, a, b, scale, scale, None)
    by_block = scaled_mm(
        a, b, scale, square, layouts=("block", "square"), out_dtype=torch.bfloat16,
        matmul=TensorCores(),
    )  # fmt: skip
    assert_close(by_block, a, b, scale, square, None)


@pytest.mark.parametrize("layout", ["tensor", "row", "block"])
def test_what_fits_is_not_copied(layout: Layout) -> None:
    """Scales of blocks fit where they lie as the cast writes them: blocks innermost in memory."""
    a, b = operands(32, 16, 256)
    scales = [
        {
            "tensor": torch.rand(()),
            "row": torch.rand(x.shape[0], 1),
            "block": torch.rand(2, x.shape[0]).t(),
        }[layout]
        for x in (a, b)
    ]
    bias, given = torch.zeros(16, dtype=torch.bfloat16), {}

    def matmul(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        given.update(options, a=a, b=b)
        return torch.zeros(a.shape[0], b.shape[1])

    scaled_mm(
        a, b, *scales, layouts=(layout, layout), out_dtype=torch.bfloat16, bias_N=bias,
        matmul=matmul,
    )  # fmt: skip
    pairs = [(given["a"], a), (given["b"], b), (given["bias"], bias)]
    pairs += [(given["scale_a"], scales[0]), (given["scale_b"], scales[1])]
    assert all(got.data_ptr() == own.data_ptr() for got, own in pairs)
