"""BF16 products as FP32 ones: their numbers, and that nothing else multiplies BF16 there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_numerics import cpu
from fp8_numerics.bf16 import fp32_products, linear, mm
from fp8_numerics.meta import planning_for
from megafp8.models.gpt import GPT
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import simulated_rank, single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec
from megafp8.train.build import build
from megafp8.train.generate import sample
from megafp8.train.report.header import precision_of
from megafp8.train.step import train_step
from tests.documents import borders_of
from tests.tiny import SEQ, gpt_spec, microbatch, run_spec

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "flash_attention_for_cpu", "linear", "matmul")


@pytest.fixture(params=[True, False], ids=["BF16 instructions", "none"])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu, "FAST_AT_BF16", request.param)
    return bool(request.param)


@pytest.fixture
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FAST_AT_BF16", False)


class Products(TorchDispatchMode):
    """Which products ran, in which dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS or "attention" in name:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.seen |= {(name, tensor.dtype) for tensor in tensors}
        return func(*args, **(kwargs or {}))


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_mm_is_the_fp32_product_rounded_once(slow_cpu: None) -> None:
    """With zeros, infinities and NaNs among the operands."""
    a, b, bias = noise(7, 33, seed=0), noise(33, 5, seed=1), noise(5, seed=2)
    a[0], a[1, 3], a[2, 4], a[3, 5] = 0.0, float("inf"), float("nan"), 1e-39
    assert torch.equal(bits(mm(a, b)), bits((a.float() @ b.float()).bfloat16()))
    wide = torch.addmm(bias.float(), a.float(), b.float())
    assert torch.equal(bits(mm(a, b, bias)), bits(wide.bfloat16()))
    turned = mm(b.t(), a.t())
    assert turned.dtype == torch.bfloat16 and turned.isnan().equal(mm(a, b).t().isnan())


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.tensor(-1, dtype=torch.int16), x.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype, slow_cpu: None) -> None:
    a, b = noise(4, 6, seed=0).to(dtype), noise(6, 3, seed=1).to(dtype)
    assert torch.equal(mm(a, b), torch.mm(a, b))
    assert torch.equal(linear(a, b.t()), F.linear(a, b.t()))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 9), (2, 3, 9), (0, 9)])
def test_linear_and_its_gradients_have_one_rounding(
    shape: tuple[int, ...], has_bias: bool, has_bf16: bool
) -> None:
    """Against FP64: half a unit of BF16's last place (2^-8 of the result) and FP32's sums of n
    terms, n 2^-24 of the sum of magnitudes. FP32's sums on either kind of CPU; order is free."""
    x, weight, bias = noise(*shape, seed=0), noise(5, 9, seed=1), noise(5, seed=2)
    grad = noise(*shape[:-1], 5, seed=3)
    given = [x, weight, *([bias] if has_bias else [])]
    found = [tensor.clone().requires_grad_() for tensor in given]
    exact = [tensor.double().requires_grad_() for tensor in given]
    sizes = [tensor.double().abs().requires_grad_() for tensor in given]
    out, expected, size = (
        linear(found[0], found[1], *found[2:]),
        F.linear(*exact),
        F.linear(*sizes),
    )
    out.backward(grad)
    expected.backward(grad.double())
    size.backward(grad.double().abs())
    pairs = [(out, expected, size)]
    pairs += [(f.grad, e.grad, s.grad) for f, e, s in zip(found, exact, sizes, strict=True)]
    for ours, theirs, magnitude in pairs:
        assert ours.dtype == torch.bfloat16
        bound = 2.0**-8 * theirs.abs() + 16 * 2.0**-24 * magnitude
        assert ((ours.double() - theirs).abs() <= bound).all()


def test_what_is_kept_for_backward_stays_bf16(slow_cpu: None) -> None:
    kept: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    x, weight = noise(6, 9, seed=0).requires_grad_(), noise(5, 9, seed=1).requires_grad_()
    with hooks:
        linear(x, weight)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), weight.data_ptr()]


def test_meta_tensors_stand_for_the_device_that_is_planned_for(has_bf16: bool) -> None:
    meta = torch.device("meta")
    assert fp32_products(torch.device("cpu")) == (not has_bf16)
    assert not fp32_products(torch.device("cuda"))
    with planning_for("cuda"):
        assert not fp32_products(meta)
        assert fp32_products(torch.device("cpu")) == (not has_bf16)
    for accelerator, expected in (("gpu", False), ("cpu", not has_bf16)):
        spec = ParallelSpec(accelerator=accelerator)  # type: ignore[arg-type]
        with simulated_rank(spec, 0):
            assert fp32_products(meta) == expected


DELAYED = Fp8Recipe(amax_history_len=4)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, untied": {
        "model": gpt_spec(num_query_groups=2, share_embeddings_and_output_weights=False)
    },
    "ALiBi": {"model": gpt_spec(position_embedding_type="alibi")},
    "documents": {},
    "dropout": {"model": gpt_spec(attention_dropout=0.1, hidden_dropout=0.1)},
    "FP8": {"fp8": DELAYED},
    "FP8, grad_weight in BF16": {
        "fp8": dataclasses.replace(DELAYED, name="rowwise_with_gw_hp", backward_format="e4m3")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_multiplies_bf16_where_the_cpu_cannot(name: str, has_bf16: bool) -> None:
    """In a step, in evaluation and in generation; where the CPU can, something does."""
    spec = run_spec(compute="bf16", **CASES[name])
    state = build(spec, single_rank())
    batches = [microbatch(0), microbatch(1)]
    if name == "documents":
        ends = np.tile(np.arange(SEQ), (2, 1)) // 5
        batches = [dataclasses.replace(b, cu_seqlens_N1=borders_of(ends)) for b in batches]
    with Products() as products:
        train_step(state, batches)
        if name != "documents":
            sample(state, [1, 2, 3], 2, vocab_size=96, temperature=1.0, seed=0)
    dtypes = {dtype for _, dtype in products.seen}
    assert products.seen and (torch.bfloat16 in dtypes) == has_bf16, products.seen
    said = "BF16 values, FP32 products: " in precision_of(spec, state)
    assert said == (not has_bf16)


def test_plain_parts_multiply_in_fp32_too(slow_cpu: None) -> None:
    spec = gpt_spec()
    model = GPT(Parts(spec, torch.bfloat16, 0, RandomStreams(0)))
    tokens_BS = torch.zeros(2, SEQ, dtype=torch.int64)
    with Products() as products:
        model(tokens_BS, tokens_BS).backward()
    assert products.seen and {dtype for _, dtype in products.seen} == {torch.float32}


def test_fp32_runs_say_nothing_of_it(slow_cpu: None) -> None:
    spec = run_spec()
    assert "products" not in precision_of(spec, build(spec, single_rank()))
