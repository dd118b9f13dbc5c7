"""The GELU in its tanh form beside the formula in FP64, and its kernel beside torch operations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_numerics import gelu
from fp8_numerics.gelu import gelu_tanh, in_torch
from tests.c_kernels import need_kernels

EPS = 2.0**-24  # half of the distance between 1 and the next number of FP32
EVERYWHERE = torch.arange(-(1 << 31), 1 << 31, 104729).to(torch.int32).view(torch.float32)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 16.0, -16.0, 3e38, -3e38, math.inf, -math.inf, math.nan]


def of_both(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = gelu_tanh(x)
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad


def test_the_formula_in_fp64() -> None:
    """The bound counts roundings: four of `u`, which the power multiplies by |t|, the power's
    polynomial (1.1e-7) and eight of the rest."""
    x = torch.linspace(-9, 9, 100_003)
    grad = torch.linspace(1, 2, 100_003)
    out, grad_x = of_both(x, grad)
    v = x.double()
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * v**2)
    t = 2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
    gate, other = torch.sigmoid(t), torch.sigmoid(-t)
    relative = (4 * t.abs() + 8) * EPS + 1.1e-7
    assert ((out - v * gate).abs() <= relative * (v * gate).abs()).all()
    parts = gate, v * gate * other * slope
    bound = relative * sum(part.abs() for part in parts) * 2
    assert ((grad_x - grad.double() * sum(parts)).abs() <= grad * bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_has_the_bits_of_torch_operations(dtype: torch.dtype, threads: int) -> None:
    need_kernels()
    x = torch.cat([EVERYWHERE, torch.tensor(SPECIAL)]).to(dtype)
    grad = torch.cat([EVERYWHERE.flip(0), torch.tensor(SPECIAL)]).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = of_both(x, grad)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found, (in_torch(None, x), in_torch(grad, x)), strict=True):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())


def test_the_ends_of_the_range() -> None:
    x = torch.tensor(SPECIAL)
    out, grad = of_both(x, torch.ones_like(x))
    assert out[:9].tolist() == pytest.approx([0, 0, 0, 0, 16, 0, 3e38, 0, math.inf], rel=1e-7)
    assert torch.equal(out[:9].signbit(), x[:9].signbit())
    assert out[9:].isnan().all()  # -inf times 0, as in torch
    assert grad[:6].tolist() == [0.5, 0.5, 0.5, 0.5, 1, 0]


def test_a_matrix_that_does_not_lie_whole_and_one_without_rows() -> None:
    whole = torch.randn(5, 34, generator=torch.Generator().manual_seed(0))
    gate = whole.chunk(2, -1)[0]
    out, grad = of_both(gate, torch.ones(()).expand(5, 17))
    assert torch.equal(out, gelu_tanh(gate.contiguous()))
    assert torch.equal(grad, in_torch(torch.ones(5, 17), gate))
    assert gelu_tanh(whole[:0]).shape == (0, 34)


def test_without_a_compiler_the_operations_of_torch_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-3, 3, 50)
    monkeypatch.setattr(gelu, "library_for", lambda x: None)
    assert torch.equal(gelu_tanh(x), in_torch(None, x))


def test_a_tensor_without_memory_that_is_said_to_be_on_a_cpu_is_not_read() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4, requires_grad=True)
        out = gelu_tanh(x)
        out.sum().backward()
    assert type(out) is type(x) and out.shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_have_the_function_of_torch(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 50, dtype=dtype)
    assert torch.equal(gelu_tanh(x), F.gelu(x, approximate="tanh"))


def test_on_meta_nothing_is_computed() -> None:
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    out = gelu_tanh(x)
    out.sum().backward()
    assert out.is_meta and x.grad is not None and x.grad.shape == (3, 4)
