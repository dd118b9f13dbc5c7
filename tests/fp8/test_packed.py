"""Operands that are packed for tensor cores, where they are kept and sent (by the interpreter)."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.gemm import Engine
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.engine import LAYOUTS
from megafp8.fp8.quantizer import LinearQuantizer
from megafp8.fp8.recipe_settings import recipe_named
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.sequence import gather_tokens
from megafp8.specs.precision import GEMMS
from megafp8.specs.recipes import find_recipe
from tests.fp8.quantized import quantized

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
names = pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])


def packing(name: str) -> LinearQuantizer:
    state = ScalingState(recipe_named(name))
    state.engine = Engine(uses_triton=True, layouts=frozenset(LAYOUTS))
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    return quantizer


def operands(name: str, x: torch.Tensor) -> tuple[Fp8Tensor, Fp8Tensor]:
    (last, first), _ = quantized(packing(name), "input", x)
    assert isinstance(last, Fp8Tensor) and isinstance(first, Fp8Tensor)
    return last, first


class Joining:
    """Stands for the tensor-parallel ranks: gathers what rank 0 and rank 1 hand over in turn."""

    size = 2

    def __init__(self, of_rank_0: list[torch.Tensor] | None = None) -> None:
        self.handed: list[torch.Tensor] = []
        self._first = of_rank_0

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        self.handed.append(x)
        return torch.cat([x if self._first is None else self._first.pop(0), x])


@names
@pytest.mark.parametrize("tokens", [32, 96, 128])
def test_gathered_operands_are_those_of_all_tokens(name: str, tokens: int) -> None:
    """Their tiles of scales too, where a rank's tokens fill no tile."""
    x = torch.randn(2 * tokens, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0, 0], x[tokens, 0] = 9.0, 9.0  # both parts have the amax of the whole
    if name == "nvfp4":  # the rotated amaxes would differ
        name = "nvfp4-no_rht"
    for of_whole, *parts in zip(
        operands(name, x), *(operands(name, part) for part in x.chunk(2)), strict=True
    ):
        first = Joining()
        gather_tokens(parts[0], cast(Any, first))
        found = gather_tokens(parts[1], cast(Any, Joining(first.handed)))
        assert isinstance(found, Fp8Tensor) and found.is_packed
        for ours, whole in zip(found.tensors, of_whole.tensors, strict=True):
            pair = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (ours, whole))
            assert torch.equal(*pair)


@names
def test_the_shape_of_packed_operands_is_that_of_the_numbers(name: str) -> None:
    """A byte has two numbers of FP4, along the rows of one operand and the columns of the other."""
    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert [operand.shape for operand in operands(name, x)] == [(48, 80)] * 2


@names
def test_the_form_that_a_compiled_layer_keeps(name: str) -> None:
    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    form, (_, kept) = packing(name).saved_form(), operands(name, x)
    assert form.is_packed and form.dtype == kept.payload.dtype
    assert form.payload_shape(*x.shape) == list(kept.payload.t().shape)
    num_bytes = kept.dequant_scale.numel() + (4 if kept.outer is not None else 0)
    assert form.scale_shape(*x.shape) == [num_bytes] and form.scale_dtype == torch.uint8
    assert kept.shape == tuple(x.shape) and kept.plain().payload.shape == x.shape


@names
@pytest.mark.parametrize("shape", [(48, 80), (128, 256), (144, 272)])
def test_the_plan_counts_the_bytes_of_packed_weights(name: str, shape: tuple[int, int]) -> None:
    """Numbers, tiles of scales and factors, as the kernels write them for each product."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (last, first), _ = quantized(packing(name), "weight", x)
    assert isinstance(last, Fp8Tensor) and isinstance(first, Fp8Tensor)
    traits = find_recipe(name).traits
    for products, copies in (("output",), [last]), (GEMMS[:2], [last, first]):
        found = sum(tensor.nbytes for copy in copies for tensor in copy.tensors)
        assert traits.weight_bytes(*shape, products) == found
