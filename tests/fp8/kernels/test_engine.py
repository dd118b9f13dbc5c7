"""The linear as it runs on FP8 tensor cores, on a CPU: Triton's interpreter casts, a float64
product that makes tensor cores' demands (or torch's own CPU product) multiplies.

Compared with the ordinary path: casts, scales and histories bit for bit, products within bounds.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3, E5M2
from fp8_numerics.gemm import EMULATED, Engine, GemmCounter, gemm
from megafp8.backends import native
from megafp8.backends.native import kernels_of
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.engine import LAYOUTS, engine_of
from megafp8.fp8.grad_sink import AutogradSink, MainGradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.probe import values
from megafp8.fp8.quantizer import Operands, Role, WantsFp8
from megafp8.fp8.recipes import nvfp4
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.weights import GatheredFp8, StoredFp8
from megafp8.parallel.mesh import Mesh
from megafp8.specs import Fp8Recipe
from megafp8.specs import recipes as specs_recipes
from megafp8.specs.precision import GEMMS, RecipeName
from megafp8.specs.recipes import find_recipe
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.fp8.quantized import quantized
from tests.fp8_numerics.kernels.helpers import assert_same_bytes, hard_matrix, whole
from tests.fp8_numerics.kernels.tensor_cores import TensorCores, needs_rows_on_a_cpu
from tests.tiny import build_run, microbatch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
RECIPES: tuple[RecipeName, ...] = (
    *(n for n in specs_recipes.RECIPES if find_recipe(n).has_kernels()),
    "nvfp4-no_sr-no_rht-no_2d",
)
"""Those whose casts run as Triton kernels."""
recipes = pytest.mark.parametrize("name", RECIPES)
CPU = torch.device("cpu")


def hopper(matmul: Any = None) -> Engine:
    layouts = frozenset(LAYOUTS)
    return Engine(
        uses_triton=True, layouts=layouts, fp32_results=layouts, matmul=matmul or TensorCores()
    )


def run_with(engine: Engine, mesh: Mesh | None = None, **choices: Any) -> TrainState:
    """Return the state of a run, built as for a device with this engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "runs_triton", lambda device: engine.uses_triton)
        state = build_run(mesh, compute="bf16", **choices)
    assert isinstance(state.scaling, ScalingState)
    state.scaling.engine = engine
    return state


def recipe_of(name: RecipeName, **changes: Any) -> Fp8Recipe:
    by_tensor = name in ("delayed", "tensorwise")
    if name == "delayed":
        changes = {"amax_history_len": 3, **changes}
    return Fp8Recipe(
        name=name,
        backward_format="e5m2" if by_tensor else "e4m3",
        **{"power_2_scale": not by_tensor, **changes},
    )


def make(
    recipe: Fp8Recipe,
    engine: Engine,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stored: bool = False,
) -> tuple[Linear, ScalingState]:
    """`stored`: the weight is kept in FP8 alone."""
    state = ScalingState(recipe)
    state.engine = engine
    payload = torch.empty(weight.shape).to(E4M3.dtype)
    linear = Linear(
        nn.Parameter(payload, requires_grad=False) if stored else nn.Parameter(weight.clone()),
        None if bias is None else nn.Parameter(bias.clone()),
        name="linear",
        quantizer=linear_quantizer(state, "linear"),
        comm=LinearComm(),
        sink=AutogradSink(),
        counter=GemmCounter(),
        stored_compute_dtype=weight.dtype if stored else None,
    )
    if isinstance(linear.weight_form, StoredFp8):
        linear.weight_form.store(weight.float())
    return linear, state


def noise(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(shape, generator=generator)).bfloat16()


@recipes
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("shape", [(9, 33), (130, 67), (0, 4)])
def test_casts_are_those_of_the_ordinary_path(
    name: RecipeName, role: Role, shape: tuple[int, int]
) -> None:
    """And the second orientation lies transposed in memory, alone where it alone is needed."""
    shape = whole(name, *shape)
    x = hard_matrix(*shape, torch.bfloat16) if shape[0] else torch.empty(shape).bfloat16()
    found = {}
    for engine in (EMULATED, hopper()):
        state = ScalingState(recipe_of(name))
        quantizer = linear_quantizer(state, "linear")
        assert quantizer is not None
        state.engine = engine
        for need in (WantsFp8(True, True), WantsFp8(True, False), WantsFp8(False, True)):
            operands, sums = quantized(quantizer, role, x, need, with_sum=True)
            last, first = (o if isinstance(o, Fp8Tensor) else None for o in operands)
            assert (last is not None, first is not None) == need
            found[engine is EMULATED, need] = (last, first)
            if engine is not EMULATED:
                for ours, theirs in zip((last, first), found[True, need], strict=True):
                    assert_same_bytes(ours, theirs)
                assert last is None or last.payload.is_contiguous()
                assert first is None or first.payload.t().is_contiguous()
                for packed in (last, first) if x.numel() else ():
                    is_tiled = packed is not None and find_recipe(name).traits.packs is not None
                    assert packed is None or packed.is_packed == is_tiled
        found[engine is EMULATED, "amax"] = state.forward.amax, state.backward.amax
        assert sums is not None
        has_sum = x.double().abs().sum(0) < 3e38  # in FP32, in any order
        has_sum |= ~x.isfinite().all(0)
        total, expected = sums.sum(0)[has_sum], x.float().sum(0)[has_sum]
        torch.testing.assert_close(total, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found[False, "amax"], found[True, "amax"], strict=True):
        assert torch.equal(ours, theirs)


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, a: torch.Tensor, b: torch.Tensor, what: str
) -> None:
    """Each rounded once to BF16, sums in FP32 off by 2 K * 2**-24 of the product of magnitudes."""
    magnitudes = 1.2 * (a.double().abs() @ b.double().abs())
    bound = 2 * (a.shape[1] + 8) * 2.0**-24 * magnitudes + 2.0**-7 * theirs.double().abs()
    assert ((ours.double() - theirs.double()).abs() <= bound + 1e-30).all(), what


@recipes
@pytest.mark.parametrize(
    "shape", [(48, 80, 32), (33, 50, 21), (1, 5, 7), (130, 20, 140), (16, 256, 256)]
)
def test_products_are_those_of_the_ordinary_path(
    name: RecipeName, shape: tuple[int, int, int]
) -> None:
    """The last weight has two blocks of 128 in either dim; its scales cannot be read transposed."""
    assert_same_products(name, shape, TensorCores())


@pytest.mark.skipif(
    "ONEDNN_MAX_CPU_ISA" in os.environ,
    reason="torch asks oneDNN by what the CPU has, which may not use all of it",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_rows_on_a_cpu if name.startswith("rowwise") else ())
        for name in RECIPES
        if name != "blockwise" and find_recipe(name).traits.packs is None
    ],
)
def test_products_by_torch_on_a_cpu(name: RecipeName) -> None:
    """Which takes no scales of blocks, in tiles or not."""
    assert_same_products(name, (33, 50, 21), torch._scaled_mm)


def assert_same_products(name: RecipeName, shape: tuple[int, int, int], matmul: Any) -> None:
    tokens, outs, ins = whole(name, *shape)
    x, weight = noise(tokens, ins, seed=1), noise(outs, ins, seed=2, std=0.02)
    weight[128:] *= 8  # so that blocks below each other have other scales than their neighbours
    bias, grad = noise(outs, seed=3), noise(tokens, outs, seed=4, std=1e-3)
    results = []
    for engine in (EMULATED, hopper(matmul)):
        linear, _ = make(recipe_of(name), engine, weight, bias)
        leaf = x.clone().requires_grad_()
        output = linear(leaf)
        output.backward(grad)
        assert leaf.grad is not None and linear.weight.grad is not None
        assert linear.bias is not None and linear.bias.grad is not None
        results.append((output.detach(), leaf.grad, linear.weight.grad, linear.bias.grad))
        in_fp8 = 2 if name == "rowwise_with_gw_hp" else 3
        backend = "emulated" if engine is EMULATED else "tensor cores"
        assert linear.counter.fp8_backends == {backend: in_fp8 * 2 * tokens * outs * ins}
        assert linear.counter.by_precision()["fp8"] == in_fp8 * 2 * tokens * outs * ins
    if isinstance(matmul, TensorCores):
        meant = {"delayed": {"tensor"}, "tensorwise": {"tensor"}}.get(name, {"row"})
        meant |= {"block", "square"} if name == "blockwise" else set()  # one block is a row too
        packs = find_recipe(name).traits.packs
        meant = meant if packs is None else {packs}
        assert set().union(*matmul.picked) <= meant
    (output, grad_x, grad_w, grad_b), (output2, grad_x2, grad_w2, grad_b2) = results
    assert_close(output2, output, x, weight.t(), "output")
    assert_close(grad_x2, grad_x, grad, weight, "grad_input")
    assert_close(grad_w2, grad_w, grad.t(), x, "grad_weight")
    torch.testing.assert_close(grad_b2, grad_b)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "rowwise_with_gw_hp"])
def test_weight_gradients_leave_tensor_cores_in_fp32(name: RecipeName) -> None:
    """The first of a step is written into the sum itself. Sums err by FP32 accumulation alone."""
    cores, sink = TensorCores(), MainGradSink()
    linear, _ = make(recipe_of(name), hopper(cores), noise(32, 16, seed=0))
    plain, _ = make(recipe_of(name), EMULATED, noise(32, 16, seed=0))
    total, expected = torch.full((32, 16), torch.nan), torch.zeros(32, 16, dtype=torch.float64)
    linear.sink = sink
    sink.attach([(linear.weight, total)])
    sink.begin_step()
    for seed in (1, 2):
        x, grad = noise(128, 16, seed=seed), noise(128, 32, seed=9 + seed)
        linear(x).backward(grad)
        assert plain.quantizer is not None
        left = plain.quantizer.operands("grad_output", grad)[0].along_first
        right = plain.quantizer.operands("input", x)[0].along_first
        assert isinstance(left, Fp8Tensor) and isinstance(right, Fp8Tensor)
        wide = (operand.dequantize(torch.float32).double() for operand in (left, right))
        left64, right64 = wide
        factor = math.prod(float(o) for o in (left.outer, right.outer) if o is not None)
        expected += factor * (left64.t() @ right64)
    assert cores.wrote[1::2] == [(torch.float32, True), (torch.float32, False)]
    assert (total.double() - expected).abs().max() <= 2.0**-20 * expected.abs().max()


def test_engines_without_fp32_results_for_rows_write_bf16() -> None:
    cores, sink = TensorCores(), MainGradSink()
    engine = dataclasses.replace(hopper(cores), fp32_results=frozenset({"tensor"}))
    linear, _ = make(recipe_of("rowwise"), engine, noise(32, 16, seed=0))
    linear.sink = sink
    sink.attach([(linear.weight, torch.zeros(32, 16))])
    linear(noise(48, 16, seed=1)).backward(noise(48, 32, seed=2))
    assert cores.wrote == [(torch.bfloat16, False)] * 2


ODD_TOKENS = pytest.mark.parametrize("tokens", [1, 33, 130])
SQUARES: tuple[RecipeName, ...] = ("nvfp4", "nvfp4-no_sr-no_rht-no_2d")
HOPPER_ITSELF = Engine(uses_triton=True)  # it has no product of FP4


@ODD_TOKENS
@pytest.mark.parametrize("name", SQUARES)
def test_fp4_evaluates_any_number_of_tokens_by_kernels(name: RecipeName, tokens: int) -> None:
    """As another engine would: no cast and no product goes another way."""
    x, weight = noise(tokens, 48, seed=1), noise(32, 48, seed=2)
    results = []
    for engine in (EMULATED, hopper()):
        linear, state = make(recipe_of(name), engine, weight)
        with torch.no_grad(), state.evaluation():
            results.append(linear(x))
        assert linear.quantizer is not None
        state.engine = dataclasses.replace(engine, layouts=frozenset())
        for role in ("input", "grad_output"):
            results.append(quantized(linear.quantizer, role, x, WantsFp8(True, False))[0][0])
        backend = "emulated" if engine is EMULATED else "tensor cores"
        assert linear.counter.fp8_backends == {backend: 2 * tokens * 48 * 32}
    assert_close(results[3], results[0], x, weight.t(), "output")
    for ours, theirs in zip(results[4:], results[1:3], strict=True):
        assert_same_bytes(ours, theirs)


@ODD_TOKENS
def test_fp4_without_rotation_trains_with_any_number_of_tokens(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Triton kernel casts: neither the C kernel nor the rule in torch operations does."""
    recipe, x = recipe_of("nvfp4-no_rht"), noise(tokens, 48, seed=1)
    found = []
    for engine in (EMULATED, HOPPER_ITSELF):
        linear, state = make(recipe, engine, noise(48, 48, seed=2))
        assert linear.quantizer is not None
        if engine is HOPPER_ITSELF:
            monkeypatch.setattr(nvfp4.Nvfp4, "cast", None)
            monkeypatch.setattr(nvfp4.Nvfp4, "in_c", lambda *_: None)
        for role in ("input", "grad_output"):
            operands, sums = quantized(linear.quantizer, role, x, with_sum=True)
            assert sums is not None
            found.append((*operands, sums.sum(0)))
    for ours, theirs in zip(found[2:], found[:2], strict=True):
        for one, other in zip(ours[:2], theirs[:2], strict=True):
            assert isinstance(one, Fp8Tensor) and isinstance(other, Fp8Tensor)
            assert_same_bytes(one, other)
        torch.testing.assert_close(ours[2], theirs[2])


@ODD_TOKENS
@pytest.mark.parametrize(
    ("name", "engine"), [("nvfp4", HOPPER_ITSELF), ("nvfp4", None), ("nvfp4-no_rht", None)]
)
def test_kernels_fill_the_last_tokens_of_fp4_with_zeros(
    name: RecipeName, engine: Engine | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the rule in torch operations does, where operands cannot be cut off; None: Blackwell."""
    x, weight, grad = noise(tokens, 48, seed=1), noise(32, 48, seed=2), noise(tokens, 32, seed=3)
    found, results = [], []
    for each in (EMULATED, engine or hopper()):
        linear, _ = make(recipe_of(name), each, weight)
        assert linear.quantizer is not None
        if each is not EMULATED:
            monkeypatch.setattr(nvfp4.Nvfp4, "cast", None)
            monkeypatch.setattr(nvfp4.Nvfp4, "in_c", lambda *_: None)
        leaf = x.clone().requires_grad_()
        out = linear(leaf)
        out.backward(grad)
        results.append((out, leaf.grad, linear.weight.grad))
        for role, each_MN in (("input", x), ("grad_output", grad)):
            operands, sums = quantized(linear.quantizer, role, each_MN, with_sum=True)
            assert sums is not None
            found.append((*(o.plain() for o in operands), sums.sum(0)))
    for theirs, ours in zip(found[:2], found[2:], strict=True):
        (last, first, sums), (of_kernel, filled, sums_of_kernel) = theirs, ours
        assert_same_numbers(of_kernel, last, tokens)
        assert_same_numbers(filled, first, len(first.payload))
        assert filled.payload.shape[0] == tokens + -tokens % 16
        torch.testing.assert_close(sums_of_kernel, sums)
    pairs = ((x, weight.t()), (grad, weight), (grad.t(), x))
    for theirs, ours, (a, b) in zip(*results, pairs, strict=True):
        slack = 2.0**-12 * (a.abs() @ b.abs())  # rotated terms are up to 16 times as large
        assert ((ours - theirs).abs() <= slack + 2.0**-7 * theirs.abs()).all()


@recipes
@pytest.mark.parametrize("engine", [HOPPER_ITSELF, hopper()], ids=["casts", "casts and products"])
def test_a_linear_without_rows_gets_zeros_on_tensor_cores(name: RecipeName, engine: Engine) -> None:
    linear, state = make(recipe_of(name), engine, noise(32, 48, seed=1), noise(32, seed=2))
    sink, params = MainGradSink(), list(linear.parameters())
    linear.sink, totals = sink, [torch.full(param.shape, torch.nan) for param in params]
    sink.attach(zip(params, totals, strict=True))
    sink.begin_step()
    state.begin_microbatch(0)
    x = torch.empty(0, 48, requires_grad=True)
    out = linear(x)
    out.backward(torch.empty(0, 32))
    state.end_forward()
    state.end_backward()
    assert out.shape == (0, 32) and x.grad is not None and x.grad.shape == (0, 48)
    assert all(bool((total == 0).all()) for total in totals)
    assert state.forward.num_updates.tolist() == ([0, 1] if name == "delayed" else [])


def assert_same_numbers(ours: Fp8Tensor, theirs: Fp8Tensor, rows: int) -> None:
    """The same values in the first rows, and zeros after them."""
    ours64, theirs64 = values(ours), values(theirs)
    assert torch.equal(ours64[:rows], theirs64[:rows]) and len(theirs64) == rows
    assert not ours64[rows:].any()


@recipes
def test_accumulation_is_chosen_by_product(name: RecipeName) -> None:
    cores = TensorCores()
    recipe = recipe_of(name, fast_accumulation=frozenset({"output", "grad_weight"}))
    linear, _ = make(recipe, hopper(cores), noise(32, 16, seed=0))
    linear(noise(48, 16, seed=1).requires_grad_()).backward(noise(48, 32, seed=2))
    expected = [True, False, True][: 2 if name == "rowwise_with_gw_hp" else 3]
    is_precise = name == "blockwise" or find_recipe(name).traits.packs is not None
    assert cores.fast == ([False] * 3 if is_precise else expected)


@recipes
def test_overridden_products_never_reach_tensor_cores(name: RecipeName) -> None:
    cores = TensorCores()
    recipe = recipe_of(name, high_precision_gemms=frozenset(GEMMS) - {"grad_input"})
    linear, _ = make(recipe, hopper(cores), noise(32, 16, seed=0))
    linear(noise(48, 16, seed=1).requires_grad_()).backward(noise(48, 32, seed=2))
    assert len(cores.fast) == 1
    assert {place for precision, place in linear.counter.flops if precision == "fp8"} == {
        "grad_input"
    }


@recipes
def test_one_saved_copy_as_backward_reads_it(name: RecipeName) -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    linear, _ = make(recipe_of(name), hopper(), noise(32, 48, seed=0))
    x = noise(64, 48, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x)
    is_fp4 = name.startswith("nvfp4")
    size = x.numel() // 2 if is_fp4 else x.numel()
    (large,) = [tensor for tensor in saved if tensor.numel() == size]
    if name == "rowwise_with_gw_hp":
        assert large.dtype == torch.bfloat16
    else:
        assert large.dtype == (torch.float4_e2m1fn_x2 if is_fp4 else torch.float8_e4m3fn)
        assert large.t().is_contiguous()
        assert large.untyped_storage().nbytes() == size, "one copy"


def test_weights_are_cached_in_both_orientations() -> None:
    linear, state = make(recipe_of("delayed"), hopper(), noise(32, 16, seed=0))
    state.begin_microbatch(0)
    first = linear.weight_form.operands(linear.weight, torch.bfloat16, 0)
    assert isinstance(first.along_last, Fp8Tensor) and isinstance(first.along_first, Fp8Tensor)
    assert first.along_last.payload.is_contiguous()
    assert first.along_first.payload.t().is_contiguous()
    state.begin_microbatch(1)
    assert linear.weight_form.operands(linear.weight, torch.bfloat16, 0) is first
    state.begin_microbatch(0)
    assert linear.weight_form.operands(linear.weight, torch.bfloat16, 0) is not first


def test_histories_and_recomputation() -> None:
    """Tables over microbatches, and a forward pass repeated after the scales have moved on."""
    states, outputs = [], []
    for engine in (EMULATED, hopper()):
        linear, state = make(recipe_of("delayed"), engine, noise(32, 16, seed=0))
        for step in range(4):
            x = noise(24, 16, seed=10 + step, std=2.0**step).requires_grad_()
            state.begin_microbatch(step % 2)
            again = state.recomputation()
            output = linear(x)
            state.end_forward()
            output.backward(noise(24, 32, seed=20 + step, std=2.0**-step))
            state.end_backward()
            with again, torch.no_grad():
                assert torch.equal(linear(x), output)
            with torch.no_grad():
                outputs.append(linear(x))
        states.append(state)
    for direction, table in states[0].tables.items():
        for field, tensor in table.tensors().items():
            assert torch.equal(states[1].tables[direction].tensors()[field], tensor), field
    assert (states[0].forward.quant_scale != 1).all()


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_weights_in_fp8_alone(name: RecipeName) -> None:
    """One copy is kept; the product for the input gradient transposes it."""
    weight, x, grad = noise(32, 48, seed=0), noise(16, 48, seed=1), noise(16, 32, seed=2)
    results = []
    for stored in (False, True):
        linear, _ = make(recipe_of(name), hopper(), weight, stored=stored)
        leaf = x.clone().requires_grad_()
        output = linear(leaf)
        linear.sink = _Nowhere()
        output.backward(grad)
        results.append((output.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] is not None and results[1][1] is not None
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
@pytest.mark.parametrize("engine", [EMULATED, hopper()], ids=["emulated", "tensor cores"])
def test_gathered_bytes_are_multiplied_as_they_are(name: RecipeName, engine: Engine) -> None:
    """Two ranks cast their rows with one scale; no product reads the parameter."""
    weight, x, grad = noise(32, 48, seed=0), noise(16, 48, seed=1), noise(16, 32, seed=2)
    plain, state = make(recipe_of(name), engine, weight)
    gathered, own = make(recipe_of(name), engine, torch.full_like(weight, torch.nan))
    assert gathered.quantizer is not None
    form = GatheredFp8(gathered.quantizer, weight.dtype)
    gathered.weight_form = form
    form.agree_on_scale(weight.float().abs().amax(), weight)
    parts = [form.agreed.quantized(part).payload.view(torch.uint8) for part in weight.chunk(2)]
    form.receive(torch.cat(parts), weight.shape[0], weight.dtype, None)
    results = []
    for linear in (plain, gathered):
        linear.sink = _Nowhere()
        leaf = x.clone().requires_grad_()
        output = linear(leaf)
        output.backward(grad)
        results.append((output.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] is not None and results[1][1] is not None
    assert torch.equal(results[0][1], results[1][1])
    for scaling in (state, own):
        scaling.fp8_enabled = False
    off = gathered.weight_form.operands(gathered.weight, torch.float32, 0).along_last
    assert isinstance(off, torch.Tensor) and (off - weight.float()).abs().max() < 0.5


class _Nowhere(AutogradSink):
    def add(self, weight: nn.Parameter, compute: Any) -> None:
        return None


def test_what_tensor_cores_do_not_take_is_emulated() -> None:
    x, cores = torch.randn(4, 16), TensorCores()
    one, counter = torch.ones(()), GemmCounter()
    a, b = (Fp8Tensor.quantize(x, one, E5M2) for _ in range(2))
    gemm(a, b, work=torch.bfloat16, counter=counter, place="x", transpose_b=True,
         engine=hopper(cores))  # fmt: skip
    rows = dataclasses.replace(
        Fp8Tensor.quantize(x, one, E4M3),
        layout="row",
        block=(1, 16),
        dequant_scale=torch.ones(4, 1),
    )
    gemm(rows, rows, work=torch.float32, counter=counter, place="x", transpose_b=True,
         engine=hopper(cores))  # fmt: skip
    assert not cores.fast and set(counter.fp8_backends) == {"emulated"}


@pytest.mark.parametrize("name", ["delayed", "rowwise_with_gw_hp"])
def test_a_model_trains_the_same(name: RecipeName) -> None:
    """Losses of three steps beside the ordinary path's; equal casts, other order of sums."""
    losses = []
    for engine in (EMULATED, hopper()):
        state = run_with(engine, fp8=recipe_of(name))
        losses.append([])
        for step in range(3):
            losses[-1].append(train_step(state, [microbatch(step)]).loss)
            state.step += 1
    ours = set(state.counter.fp8_backends)
    assert ours == {"tensor cores"}
    assert losses[1] == pytest.approx(losses[0], rel=2e-3) and losses[0][2] < losses[0][0]


def test_a_cpu_emulates_and_what_runs_is_said() -> None:
    assert engine_of(CPU) is EMULATED
    recipe, work = recipe_of("rowwise"), torch.bfloat16
    assert "emulated" in kernels_of(recipe, EMULATED, CPU, work)
    said = kernels_of(recipe, hopper(), CPU, work)
    assert said == "FP8 tensor cores, casts in Triton"
    assert "emulated: FP32 GEMMs" in kernels_of(recipe, hopper(), CPU, torch.float32)
    ada = Engine(uses_triton=True, layouts=frozenset({"tensor"}))
    assert "emulated" in kernels_of(recipe, ada, CPU, work)


def test_operands_of_a_device_without_row_products_are_one_copy() -> None:
    """Ada's tensor cores: Triton casts, products of rows emulated."""
    ada = Engine(uses_triton=True, layouts=frozenset({"tensor"}), matmul=TensorCores())
    for name in ("blockwise", "rowwise"):
        linear, _ = make(recipe_of(name), ada, noise(32, 16, seed=0))
        plain, _ = make(recipe_of(name), EMULATED, noise(32, 16, seed=0))
        x = noise(48, 16, seed=1)
        with torch.no_grad():
            assert torch.equal(linear(x), plain(x))
        weight: Operands = linear.weight_form.operands(linear.weight, torch.bfloat16, 0)
        assert (weight.along_last is weight.along_first) == (name == "blockwise")
