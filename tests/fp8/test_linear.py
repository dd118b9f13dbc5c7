"""The FP8 linear against its specification in FP64, and who owns what between the passes.

Bounds. `magnitudes` is the same product of absolute values. Accumulating K products in FP32 in any
order errs by at most K * 2**-24 * magnitudes; the product of the two dequant_scales, its
application and the bias add a few roundings more: (K + 4) * 2**-24 * magnitudes. The result is
rounded once to the work's dtype: 2**-24 (FP32) or 2**-8 (BF16) of its own magnitude.
"""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8_numerics import cpu
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.gemm import GemmCounter, gemm
from megafp8.fp8 import linear as linear_module
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.draws import Tokens
from megafp8.fp8.grad_sink import AutogradSink, DeferringSink, MainGradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.probe import values
from megafp8.fp8.quantizer import SavedForm
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.fp8.weights import StoredFp8
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import RecipeName
from megafp8.specs.recipes import RECIPES
from megafp8.specs.traits import ROW
from tests.c_kernels import need_kernels
from tests.fp8.test_own_recipes import own, settings_of
from tests.spec import linear as spec
from tests.spec.delayed import DelayedScalingModel, Quantized, Recipe
from tests.spec.formats import FORMATS
from tests.spec.linear import LinearResult, Operand

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
works = pytest.mark.parametrize("work", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def noise(*shape: int, seed: int, dtype: torch.dtype, std: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(shape, generator=generator)).to(dtype)


@dataclass
class Layer:
    """A linear with a scaling state of its own."""

    linear: Linear
    state: ScalingState | None
    counter: GemmCounter

    def set_scales(self, input: float, weight: float, grad_output: float) -> None:
        assert self.state is not None
        self.state.forward.quant_scale.copy_(torch.tensor([input, weight]))
        self.state.backward.quant_scale.copy_(torch.tensor([grad_output]))


def make(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Fp8Recipe | None,
    sink: Any = None,
    *,
    stored: bool = False,
) -> Layer:
    """`stored`: the weight is kept in FP8 alone."""
    state, counter = None if recipe is None else ScalingState(recipe), GemmCounter()
    linear = Linear(
        nn.Parameter(weight.to(torch.float8_e4m3fn) if stored else weight.clone()),
        None if bias is None else nn.Parameter(bias.clone()),
        name="linear",
        quantizer=None if state is None else linear_quantizer(state, "linear"),
        comm=LinearComm(),
        sink=sink or AutogradSink(),
        counter=counter,
        stored_compute_dtype=weight.dtype if stored else None,
    )
    if isinstance(linear.weight_form, StoredFp8):
        linear.weight_form.store(weight.float())
    return Layer(linear, state, counter)


def assert_within(
    ours: torch.Tensor, exact: np.ndarray, magnitudes: np.ndarray, terms: int, what: str
) -> None:
    """FP32 accumulation of `terms` products, then one rounding to our dtype."""
    error = np.abs(ours.double().numpy() - exact)
    accumulated = (terms + 4) * 2.0**-24 * magnitudes
    bound = accumulated + UNIT_ROUNDOFF[ours.dtype] * (np.abs(exact) + accumulated) + 1e-45
    worst = (error / bound).max()
    assert (error <= bound).all(), f"{what}: {worst:.2f} times the bound"


def assert_follows(
    specified: LinearResult,
    output: torch.Tensor | None,
    grad_input: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor | None,
    grad_output: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    rows, out_features = grad_output.shape
    in_features = grad_input.shape[1]
    if output is not None:
        largest = specified.output_magnitudes + (0 if bias is None else bias.abs().double().numpy())
        assert_within(output, specified.output, largest, in_features, "output")
    magnitudes = specified.grad_input_magnitudes
    assert_within(grad_input, specified.grad_input, magnitudes, out_features, "grad_input")
    magnitudes = specified.grad_weight_magnitudes
    assert_within(grad_weight, specified.grad_weight, magnitudes, rows, "grad_weight")
    if grad_bias is not None:
        summed = np.abs(grad_output.double().numpy()).sum(0)
        assert_within(grad_bias, specified.grad_bias, summed, rows, "grad_bias")


def specification(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grad_output: torch.Tensor,
    scales: tuple[float, float, float],
    recipe: Fp8Recipe,
) -> LinearResult:
    input_scale, weight_scale, grad_output_scale = (np.float32(scale) for scale in scales)
    return spec.linear(
        x.float().numpy(),
        weight.float().numpy(),
        None if bias is None else bias.float().numpy(),
        grad_output.float().numpy(),
        input_scale=input_scale,
        weight_scale=weight_scale,
        grad_output_scale=grad_output_scale,
        forward_format=FORMATS[recipe.forward_format],
        backward_format=FORMATS[recipe.backward_format],
    )


@pytest.fixture(params=[True, False], ids=["BF16 products", "FP32 products"])
def bf16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FAST_AT_BF16", request.param)


@works
@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("backward_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (65, 129, 33), (48, 257, 96)])
@pytest.mark.parametrize("fit", [1.0, 40.0, 1e-4], ids=["scales fit", "saturating", "underflowing"])
def test_output_and_gradients_follow_the_specification(
    work: torch.dtype,
    backward_format: Any,
    has_bias: bool,
    shape: tuple[int, int, int],
    fit: float,
) -> None:
    """M, K and N of no round size; gradients of 1e-12. `fit` times the scale that would fit."""
    rows, in_features, out_features = shape
    recipe = Fp8Recipe(backward_format=backward_format)
    x = noise(rows, in_features, seed=1, dtype=work)
    weight = noise(out_features, in_features, seed=2, dtype=work, std=0.02)
    bias = noise(out_features, seed=3, dtype=work) if has_bias else None
    grad_output = noise(rows, out_features, seed=4, dtype=work, std=1e-12)

    def fitting(t: torch.Tensor, largest: float) -> float:
        return float(np.float32(fit * largest / t.abs().max().item()))

    largest = FORMATS[backward_format].max
    scales = fitting(x, 448), fitting(weight, 448), fitting(grad_output, largest)
    layer = make(weight, bias, recipe)
    layer.set_scales(*scales)
    x.requires_grad_()
    output = layer.linear(x)
    assert output.dtype == work
    output.backward(grad_output)
    linear = layer.linear
    assert x.grad is not None and linear.weight.grad is not None
    specified = specification(x.detach(), weight, bias, grad_output, scales, recipe)
    assert_follows(
        specified,
        output.detach(),
        x.grad,
        linear.weight.grad,
        None if linear.bias is None else linear.bias.grad,
        grad_output,
        bias,
    )


def test_quantization_is_not_a_no_op() -> None:
    """The bounds above are far tighter than the distance between FP8 and FP32 products."""
    x, weight = (noise(n, 64, seed=n, dtype=torch.float32) for n in (16, 24))
    layer = make(weight, None, Fp8Recipe())
    output = layer.linear(x)
    error = (output - x @ weight.t()).abs().max().item()
    assert error > 100 * (64 + 4) * 2.0**-24 * (x.abs() @ weight.abs().t()).max().item()


@works
def test_leading_dimensions_are_kept(work: torch.dtype) -> None:
    weight, bias = noise(6, 10, seed=1, dtype=work), noise(6, seed=2, dtype=work)
    x = noise(2, 3, 10, seed=3, dtype=work)
    flat, batched = make(weight, bias, Fp8Recipe()), make(weight, bias, Fp8Recipe())
    x3, x2 = x.clone().requires_grad_(), x.flatten(0, 1).clone().requires_grad_()
    out3, out2 = batched.linear(x3), flat.linear(x2)
    assert out3.shape == (2, 3, 6)
    assert torch.equal(out3.flatten(0, 1), out2)
    grad = noise(2, 3, 6, seed=4, dtype=work)
    out3.backward(grad)
    out2.backward(grad.flatten(0, 1))
    assert torch.equal(x3.grad.flatten(0, 1), x2.grad)
    assert torch.equal(batched.linear.weight.grad, flat.linear.weight.grad)


@works
@pytest.mark.parametrize("where", ["input", "weight", "grad_output"])
def test_nan_and_infinity(work: torch.dtype, where: str) -> None:
    """A NaN reaches every result that reads it; an infinity saturates; both are counted."""
    for value in (math.nan, math.inf):
        tensors = {
            "input": noise(4, 6, seed=1, dtype=work),
            "weight": noise(5, 6, seed=2, dtype=work),
            "grad_output": noise(4, 5, seed=3, dtype=work),
        }
        tensors[where][1, 2] = value
        layer = make(tensors["weight"], None, Fp8Recipe())
        x = tensors["input"].requires_grad_()
        assert layer.state is not None
        layer.state.begin_microbatch(0)
        output = layer.linear(x)
        layer.state.end_forward()
        output.backward(tensors["grad_output"])
        layer.state.end_backward()
        results = {"output": output, "input": x.grad, "weight": layer.linear.weight.grad}
        has_nan = {name for name, t in results.items() if t is not None and t.isnan().any()}
        reached = {
            "input": {"output", "weight"},
            "weight": {"output", "input"},
            "grad_output": {"input", "weight"},
        }[where]
        assert has_nan == (reached if math.isnan(value) else set())
        counts = {
            name.rpartition(".")[2]: count
            for table in layer.state.tables.values()
            for name, count in zip(table.names, table.num_nonfinite.tolist(), strict=True)
        }
        assert counts == {kind: int(kind == where) for kind in counts}


# Steps and microbatches


def test_weight_is_cast_once_a_step_and_again_for_an_evaluation() -> None:
    layer = make(noise(4, 4, seed=1, dtype=torch.float32), None, Fp8Recipe())
    assert layer.state is not None
    linear, state = layer.linear, layer.state
    x = noise(3, 4, seed=2, dtype=torch.float32).requires_grad_()

    def step() -> list[torch.Tensor]:
        payloads = []
        for index in range(3):
            state.begin_microbatch(index)
            output = linear(x)
            state.end_forward()
            output.sum().backward()
            state.end_backward()
            operand = linear.weight_form.operands(linear.weight, x.dtype, 0).along_last
            assert isinstance(operand, Fp8Tensor)
            payloads.append(operand.payload)
        return payloads

    def value(payload: torch.Tensor) -> float:
        operand = linear.weight_form.operands(linear.weight, x.dtype, 0).along_last
        return payload.float()[0, 0].item() * operand.dequant_scale.item()

    first = step()
    assert first[0] is first[1] is first[2]
    amaxes = state.forward.history[1]
    assert (amaxes > 0).sum() == 1, "recorded once"
    with torch.no_grad():
        linear.weight.fill_(1.0)
    with state.evaluation():
        linear(x)
        evaluated = linear.weight_form.operands(linear.weight, x.dtype, 0).along_last.payload
        linear(x)
        again = linear.weight_form.operands(linear.weight, x.dtype, 0).along_last.payload
        assert again is evaluated, "once per evaluation"
        assert value(evaluated) == pytest.approx(1, rel=0.07)
    with torch.no_grad():
        linear.weight.fill_(0.5)
    second = step()
    assert second[0] is second[1] is second[2]
    assert value(second[0]) == pytest.approx(0.5, rel=0.07)


@works
def test_gradients_of_microbatches_in_flight_follow_the_specification(work: torch.dtype) -> None:
    """Forwards of microbatches 0, 1, 2, then their backwards: the scale tables have moved on, the
    gradients are those of the scales at each forward."""
    recipe = Fp8Recipe(amax_history_len=1)
    weight = noise(9, 15, seed=1, dtype=work, std=0.3)
    layer = make(weight, None, recipe, MainGradSink())
    assert layer.state is not None
    model = DelayedScalingModel(
        {f"linear.{kind}": kind for kind in ("input", "weight", "grad_output")},  # type: ignore
        Recipe(amax_history_len=1),
    )

    def operand(quantized: Quantized) -> Operand:
        return Operand(quantized.codes, quantized.fmt, quantized.dequant_scale)

    for step in range(2):
        inputs = [
            noise(7, 15, seed=10 + i, dtype=work, std=10.0 ** (2 * i - step)) for i in range(3)
        ]
        grads = [noise(7, 9, seed=20 + i, dtype=work, std=10.0**-i) for i in range(3)]
        outputs, inputs_fp8 = [], []
        for index, x in enumerate(inputs):
            layer.state.begin_microbatch(index)
            model.begin_microbatch(index)
            x.requires_grad_()
            outputs.append(layer.linear(x))
            values = x.detach().float().numpy()
            inputs_fp8.append(operand(model.quantize("linear.input", values)))
            weight_operand = operand(model.quantize("linear.weight", weight.float().numpy()))
            layer.state.end_forward()
            model.end_forward()
        for x, output, grad, input_operand in zip(inputs, outputs, grads, inputs_fp8, strict=True):
            layer.linear.weight.grad = None
            output.backward(grad)
            grad_operand = operand(model.quantize("linear.grad_output", grad.float().numpy()))
            layer.state.end_backward()
            model.end_backward()
            grad_input = spec.matmul(grad_operand, weight_operand, "mn,nk->mk")
            grad_weight = spec.matmul(grad_operand, input_operand, "mn,mk->nk")
            assert x.grad is not None and layer.linear.weight.grad is not None
            assert_within(x.grad, grad_input.values, grad_input.magnitudes, 9, "grad_input")
            assert_within(
                layer.linear.weight.grad, grad_weight.values, grad_weight.magnitudes, 7, "weight"
            )
        assert len({float(o.dequant_scale) for o in inputs_fp8}) == 3, "the scales moved"


@works
def test_backward_keeps_the_input_in_fp8_only(work: torch.dtype) -> None:
    layer = make(noise(12, 20, seed=1, dtype=work), noise(12, seed=2, dtype=work), Fp8Recipe())
    saved: list[torch.Tensor] = []
    x = noise(30, 20, seed=3, dtype=work)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    gc.collect()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer.linear(x.requires_grad_() * 1.0)
    large = [t for t in saved if t.numel() == x.numel()]
    assert [t.dtype for t in large] == [torch.float8_e4m3fn]
    assert all(t.numel() == 1 for t in saved if t is not large[0])
    node = output.grad_fn
    while node is not None and "LinearFunction" not in node.name():
        node = node.next_functions[0][0]
    assert node is not None
    held = [v for v in vars(node).values() if isinstance(v, torch.Tensor | Fp8Tensor)]
    assert [type(v) for v in held] == [Fp8Tensor], "nothing but the step's FP8 weight"
    assert held[0] is layer.linear.weight_form.operands(layer.linear.weight, work, 0).along_first


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "blockwise", "rowwise"])
def test_values_of_gradients_are_kept_for_one_product_only(
    name: RecipeName, is_deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first cast are gone at the second product, and none wait for a later one."""
    need_kernels()
    deferring = DeferringSink(Mock(add=lambda weight, compute: compute(None).detach_().grad))
    sink = deferring if is_deferred else AutogradSink()
    weight, read = noise(32, 32, seed=1, dtype=torch.bfloat16), list[Any]()
    layer = make(weight, None, Fp8Recipe(name=name), sink)

    def product(a: Fp8Tensor, b: Fp8Tensor, **options: Any) -> torch.Tensor:
        if options["place"] == "grad_weight":
            assert read[-1]() is None, "the operand of the other product is still there"
        assert (a.grid is None) == (is_deferred and options["place"] == "grad_weight")
        read.append(weakref.ref(a))
        return gemm(a, b, **options)

    monkeypatch.setattr(linear_module, "gemm", product)
    x = noise(32, 32, seed=2, dtype=torch.bfloat16).requires_grad_()
    layer.linear(x).sum().backward()
    if is_deferred:
        deferring.take()()
    assert len(read) == 3


def test_dequant_scale_is_the_tensors_own() -> None:
    layer = make(noise(4, 4, seed=1, dtype=torch.float32), None, Fp8Recipe(amax_history_len=1))
    assert layer.state is not None
    assert layer.linear.quantizer is not None
    operands, _ = layer.linear.quantizer.operands("input", torch.full((2, 4), 7.0))
    operand = operands.along_last
    assert isinstance(operand, Fp8Tensor)
    layer.state.end_forward()
    assert layer.state.forward.quant_scale[0].item() == 64.0
    layer.state.forward.quant_scale.fill_(3.0)
    assert operand.dequant_scale.item() == 1.0


# Without FP8


@works
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_high_precision_is_torchs_linear(work: torch.dtype, has_bias: bool) -> None:
    """Within the order of accumulation, on the output and every gradient."""
    weight, bias = noise(33, 17, seed=1, dtype=work), noise(33, seed=2, dtype=work)
    layer = make(weight, bias if has_bias else None, None)
    x = noise(2, 9, 17, seed=3, dtype=work)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    their_weight, their_bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    output = layer.linear(ours)
    expected = F.linear(theirs, their_weight, their_bias if has_bias else None)
    grad = noise(2, 9, 33, seed=4, dtype=work)
    output.backward(grad)
    expected.backward(grad)
    pairs = [(output, expected), (ours.grad, theirs.grad)]
    pairs.append((layer.linear.weight.grad, their_weight.grad))
    if has_bias:
        assert layer.linear.bias is not None
        pairs.append((layer.linear.bias.grad, their_bias.grad))
    tolerance = 4 * UNIT_ROUNDOFF[work]
    for left, right in pairs:
        assert left is not None and right is not None and left.dtype == work
        difference = (left.double() - right.double()).abs().max()
        assert difference <= tolerance * right.double().abs().max()


@works
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "high precision"])
def test_every_gemm_is_counted_in_its_precision(
    work: torch.dtype, recipe: Fp8Recipe | None
) -> None:
    rows, in_features, out_features = 11, 6, 13
    layer = make(noise(out_features, in_features, seed=1, dtype=work), None, recipe)
    x = noise(rows, in_features, seed=2, dtype=work)
    name = "fp8" if recipe else {torch.float32: "fp32", torch.bfloat16: "bf16"}[work]
    flops = 2 * rows * in_features * out_features
    layer.linear(x.requires_grad_()).sum().backward()
    places = ("output", "grad_input", "grad_weight")
    assert dict(layer.counter.flops) == {(name, place): flops for place in places}
    layer.linear(x.detach()).sum().backward()  # no gradient of the input: one product less
    assert layer.counter.flops[name, "grad_input"] == flops
    assert layer.counter.flops[name, "output"] == layer.counter.flops[name, "grad_weight"]
    assert layer.counter.flops[name, "output"] == 2 * flops


@works
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "plain"])
def test_weight_gradients_are_not_rounded_before_they_are_summed(
    work: torch.dtype, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three microbatches err by FP32 accumulation alone; the first overwrites what was there."""
    monkeypatch.setattr(cpu, "FAST_AT_BF16", False)
    sink, scales = MainGradSink(), (60.0, 5000.0, 90.0)
    weight = noise(24, 40, seed=1, dtype=work, std=0.02)
    layer = make(weight, None, Fp8Recipe() if is_fp8 else None, sink)
    total, exact, magnitudes = torch.full((24, 40), torch.nan), np.zeros(()), np.zeros(())
    sink.attach([(layer.linear.weight, total)])
    sink.begin_step()
    for seed in range(3):
        x, grad = noise(33, 40, seed=10 + seed, dtype=work), noise(33, 24, seed=seed, dtype=work)
        if is_fp8:
            layer.set_scales(*scales)
            of_one = specification(x, weight, None, grad, scales, Fp8Recipe())
            exact = exact + of_one.grad_weight
            magnitudes = magnitudes + of_one.grad_weight_magnitudes
        else:
            left, right = grad.double().numpy(), x.double().numpy()
            exact = exact + left.T @ right
            magnitudes = magnitudes + np.abs(left).T @ np.abs(right)
        layer.linear(x).backward(grad)
    assert_within(total, exact, magnitudes, 3 * 33, "the sum of weight gradients")


@works
def test_main_grads_accumulate_in_fp32_over_microbatches(
    work: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.grad` stays empty; what BF16 accumulation would lose is kept."""
    monkeypatch.setattr(cpu, "FAST_AT_BF16", False)
    sink = MainGradSink()
    weight, bias = noise(4, 6, seed=1, dtype=work), noise(4, seed=2, dtype=work)
    layer = make(weight, bias, None, sink)
    params = list(layer.linear.parameters())
    mains = [torch.zeros(param.shape) for param in params]
    sink.attach(zip(params, mains, strict=True))
    with pytest.raises(AssertionError, match="attached to its parameters already"):
        sink.attach(zip(params, mains, strict=True))
    x = noise(5, 6, seed=3, dtype=work)
    for _ in range(300):
        layer.linear(x).sum().backward()
    of_weight, of_bias = x.double().sum(0).expand(4, 6), torch.full((4,), 5.0).double()
    magnitudes = (x.double().abs().sum(0), torch.full((1,), 5.0))
    for param, main, one, size in zip(params, mains, (of_weight, of_bias), magnitudes, strict=True):
        assert param.grad is None
        assert ((main - 300 * one).abs() <= 300 * 305 * 2.0**-24 * size).all()


def test_a_cast_is_fused_only_if_no_product_reads_the_tensor_as_it_is() -> None:
    state = ScalingState(Fp8Recipe(high_precision_gemms=frozenset({"grad_weight"})))
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    rule = Mock(can_fuse=lambda tensor: True)
    tensors = quantizer.tensors
    quantizer.tensors = {role: replace(tensor, rule=rule) for role, tensor in tensors.items()}
    assert not quantizer.fuses("input")  # the weight gradient reads it in high precision
    assert quantizer.fuses("input", with_first=False)
    assert quantizer.fuses("weight")
    state.fp8_enabled = False
    assert not quantizer.fuses("weight")


def test_an_input_that_is_kept_itself_has_no_payload() -> None:
    assert SavedForm().payload_shape(32, 64) == [0]
    assert SavedForm(ROW).payload_shape(32, 64) == [32, 64]
    assert SavedForm(ROW, is_transposed=True).payload_shape(32, 64) == [64, 32]


# Any number of rows, as an expert gets them


ALL_RECIPES = (*RECIPES, "of our own")
all_recipes = pytest.mark.parametrize("name", ALL_RECIPES)
LEFT_OUT = "left out"


def recipe_of(name: str) -> Fp8Recipe:
    return settings_of(own("four_bits") if name == "of our own" else name, amax_history_len=3)


def step_of(layer: Layer, rows: list[int | str], params: list[Any]) -> list[torch.Tensor]:
    """Sum the gradients of microbatches with these numbers of rows; one may be left out."""
    assert layer.state is not None
    totals = [torch.full(param.shape, torch.nan) for param in params]
    layer.linear.sink = sink = MainGradSink()
    sink.attach(zip(params, totals, strict=True))
    sink.begin_step()
    for index, number in enumerate(rows):
        if number == LEFT_OUT:
            continue
        work = layer.linear.bias.dtype
        layer.state.begin_microbatch(index, 1, Tokens((index,)))
        x = noise(int(number), 64, seed=index, dtype=work).requires_grad_()
        output = layer.linear(x)
        layer.state.end_forward()
        output.backward(noise(int(number), 48, seed=9 + index, dtype=work))
        layer.state.end_backward()
        assert output.shape == (number, 48) and x.grad is not None and x.grad.shape == x.shape
        assert output.dtype == x.grad.dtype == work
        assert output.isfinite().all() and x.grad.isfinite().all()
    sink.end_step()
    return totals


@works
@pytest.mark.parametrize(
    ("name", "stored"),
    [(n, False) for n in ALL_RECIPES] + [(n, True) for n in ("delayed", "tensorwise", "blockwise")],
)
@pytest.mark.parametrize("rows", [(0, 33), (33, 0), (0, 0)], ids=str)
def test_a_microbatch_without_rows_adds_nothing_and_casts_the_weight(
    rows: tuple[int, int], name: str, stored: bool, work: torch.dtype
) -> None:
    """Gradients are those of the other microbatch alone, or zeros; NaN lies where they go."""
    recipe = recipe_of(name)
    seen: list[list[str]] = []
    results = []
    for microbatches in (list(rows), [number or LEFT_OUT for number in rows]):
        weight, bias = noise(48, 64, seed=1, dtype=work), noise(48, seed=2, dtype=work)
        layer = make(weight, bias, recipe, stored=stored)
        seen.append([])
        assert layer.state is not None
        layer.state.observers.append(lambda name, *_: seen[-1].append(name))
        layer.state.begin_microbatch(0)  # a step begins, whichever of its microbatches has rows
        results.append(step_of(layer, microbatches, list(layer.linear.parameters())))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs) and bool(ours.any()) == any(rows)
    assert seen[0].count("linear.weight") == (0 if stored else 1)


@pytest.mark.parametrize("sums_in_fp32", [False, True])
def test_a_microbatch_without_rows_leaves_a_sum_in_low_precision_as_it_is(
    sums_in_fp32: bool,
) -> None:
    sums = []
    for rows in ((33, 0), (33,)):
        layer = make(noise(48, 64, seed=1, dtype=torch.bfloat16), None, recipe_of("rowwise"))
        total = ScaledTensor.zeros((48, 64), STORAGE_FORMATS["fp8"])
        layer.linear.sink = sink = MainGradSink()
        sink.attach_scaled([(layer.linear.weight, total)], sums_in_fp32=sums_in_fp32)
        sink.begin_step()
        for number in rows:
            grad = noise(number, 48, seed=3, dtype=torch.bfloat16)
            layer.linear(noise(number, 64, seed=2, dtype=torch.bfloat16)).backward(grad)
        sink.end_step()
        sums.append(total.values())
    assert torch.equal(*sums) and sums[0].any()


def test_histories_of_an_expert_without_rows_follow_the_specification() -> None:
    """Its weight's history rolls once a step; no other moves. Weights grow from step to step."""
    layer = make(noise(48, 64, seed=1, dtype=torch.float32), None, recipe_of("delayed"))
    kinds = {f"linear.{kind}": kind for kind in ("input", "weight", "grad_output")}
    model = DelayedScalingModel(kinds, Recipe(amax_history_len=3))  # type: ignore[arg-type]
    linear, state = layer.linear, layer.state
    assert state is not None
    for step, rows in enumerate([(0, 0), (7, 0), (0, 5), (0, 0), (0, 0), (3, 0)]):
        with torch.no_grad():
            linear.weight.mul_(1.5)
        for index, number in enumerate(rows):
            x = noise(number, 64, seed=step, dtype=torch.float32, std=2.0**step)
            grad = noise(number, 48, seed=9 + step, dtype=torch.float32, std=2.0**-step)
            state.begin_microbatch(index)
            model.begin_microbatch(index)
            output = linear(x.requires_grad_())
            model.quantize("linear.input", x.detach().numpy())
            model.quantize("linear.weight", linear.weight.detach().numpy())
            with state.evaluation():
                linear(x[:0])
            with state.recomputation():
                linear(x)
            state.end_forward()
            model.end_forward()
            output.backward(grad)
            model.quantize("linear.grad_output", grad.numpy())
            state.end_backward()
            model.end_backward()
            for table in state.tables.values():
                for row, tensor in enumerate(table.names):
                    expected = model.states[tensor]
                    assert table.history[row].tolist() == expected.history[1:].tolist(), tensor
                    assert table.quant_scale[row].item() == expected.scale, tensor
                    assert table.num_updates[row].item() == expected.num_updates, tensor
        assert state.forward.num_updates[1].item() == step + 1


@pytest.mark.parametrize("then", ["tensorwise", "delayed", "nvfp4"])
def test_a_weight_without_rows_is_cast_by_the_recipe_of_now(then: str) -> None:
    layer = make(noise(48, 64, seed=1, dtype=torch.float32), None, recipe_of("delayed"))
    linear, state = layer.linear, layer.state
    assert state is not None
    linear._new_quantizer = lambda: linear_quantizer(state, "linear")
    empty, seen = torch.empty(0, 64, requires_grad=True), []
    state.observers.append(lambda name, x, last, first: seen.append((name, last)))
    for recipe in (None, replace(recipe_of(then), margin=1)):
        if recipe is not None:
            state.change_recipe(recipe, linear.take_recipe)
        state.begin_microbatch(0)
        linear(empty).sum().backward()
        state.end_forward()
        state.end_backward()
    names, operands = zip(*[each for each in seen if each[0] == "linear.weight"], strict=True)
    assert len(names) == 2 and (operands[1].block is None) == (then != "nvfp4")
    if then == "delayed":
        amax = linear.weight.abs().max().item()
        assert state.forward.history.tolist() == [[0, 0], [amax, amax]]
        assert state.forward.num_updates.tolist() == [0, 2]


@works
@all_recipes
@pytest.mark.parametrize("number", [1, 17, 33, 130])
def test_rows_of_zeros_change_no_number(number: int, name: str, work: torch.dtype) -> None:
    """Every number of rows is taken, and a rotated product is that of rows filled up to 16."""
    weight, bias = noise(48, 64, seed=1, dtype=work), noise(48, seed=2, dtype=work)
    x, grad = noise(number, 64, seed=3, dtype=work), noise(number, 48, seed=4, dtype=work)
    results, casts = [], []
    for more in (0, -number % 16):
        layer = make(weight, bias, recipe_of(name))
        assert layer.state is not None
        layer.state.begin_microbatch(0, 1)
        found: dict[str, Any] = {}
        layer.state.observers.append(lambda name, _, *both, to=found: to.update({name: both}))
        leaf = F.pad(x, (0, 0, 0, more)).requires_grad_()
        output = layer.linear(leaf)
        output.backward(F.pad(grad, (0, 0, 0, more)))
        casts.append(found)
        grads = [leaf.grad[:number], *(param.grad for param in layer.linear.parameters())]
        results.append([output[:number], *grads])
    for tensor, operands in casts[0].items():
        for ours, filled in zip(operands, casts[1][tensor], strict=True):
            if ours is not None and filled is not None:
                own_values, of_filled = values(ours), values(filled)
                assert torch.equal(own_values, of_filled[: len(own_values)]), tensor
                assert not of_filled[len(own_values) :].any()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=2.0**-7)
    if name in ("nvfp4", "of our own"):  # both have multiplied the same operands
        assert torch.equal(results[0][2], results[1][2])
