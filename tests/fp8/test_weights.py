"""What FSDP gathers of a weight in FP8, and sums of gradients that products add to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.grad_sink import MainGradSink
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.weights import GatheredFp8
from megafp8.specs import Fp8Recipe


@pytest.mark.parametrize("fills", [None, False, True])
def test_the_gathered_weight_is_written_only_for_linears_that_read_it(fills: bool | None) -> None:
    """Our own products read the bytes: values are neither made nor written by default."""
    quantizer = linear_quantizer(ScalingState(Fp8Recipe(name="tensorwise")), "linear")
    assert quantizer is not None
    more = {} if fills is None else {"fills_weight": fills}
    form = GatheredFp8(quantizer, torch.bfloat16, **more)
    weight = torch.linspace(-3, 2, 32).view(8, 4)
    form.agree_on_scale(weight.abs().amax(), weight)
    payload, out = form.bytes_of(weight), torch.full((8, 4), 7.0, dtype=torch.bfloat16)
    form.receive(payload, 8, torch.bfloat16, out)
    read, _ = form.operands(out, torch.bfloat16, 1)
    assert isinstance(read, Fp8Tensor)
    assert torch.equal(read.payload.view(torch.uint8), payload)
    assert torch.equal(out, read.dequantize(torch.bfloat16) if fills else torch.full_like(out, 7.0))


def test_products_add_to_sums_that_are_held_and_zero() -> None:
    """A sum gets its memory and zeros before the first product of a step, and not again."""
    params = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    sums = [torch.full((2, 3), 7.0) for _ in params]
    sink, held = MainGradSink(), list[nn.Parameter]()
    sink.hold = held.append
    sink.attach(zip(params, sums, strict=True))
    sink.begin_step()
    sink.begin_products(params[:1])
    assert [id(param) for param in held] == [id(params[0])]
    assert not sums[0].any() and (sums[1] == 7).all()
    sink.add(params[0], lambda into: torch.ones(2, 3))
    held.clear()
    sink.begin_products(params[:1])
    assert not held and (sums[0] == 1).all()


def test_gradients_of_look_ups_are_summed_and_the_first_of_a_step_overwrites() -> None:
    """A table that a microbatch reads twice, and that no look-up is added to without a sum."""
    table, rows = nn.Parameter(torch.ones(4, 3)), torch.tensor([2, 0, 2])
    grads = torch.arange(9.0).view(3, 3)
    expected = torch.zeros(4, 3)
    for row, grad in zip(rows.tolist(), grads, strict=True):
        expected[row] += grad
    total, sink = torch.full((4, 3), 7.0), MainGradSink()
    alone = sink.add_rows(table, rows, grads)
    assert alone is not None and torch.equal(alone, expected)
    sink.attach([(table, total)])
    for _ in range(2):
        sink.begin_step()
        for number in (1, 2, 3):
            assert sink.add_rows(table, rows, grads) is None
            assert torch.equal(total, number * expected)
