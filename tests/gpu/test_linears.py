"""Linears of each recipe on a GPU against the CPU: casts, scales and histories bit for bit given
the same inputs, products within a bound; whole steps; compiled layers; NCCL with one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.engine import engine_of
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.quantizer import Role
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import RecipeName
from megafp8.specs.recipes import RECIPES, find_recipe
from megafp8.train.compile import cannot_trace
from megafp8.train.step import train_step
from tests.fp8.quantized import quantized
from tests.fp8_numerics.kernels.helpers import assert_same_bytes, hard_matrix, whole
from tests.fp8_numerics.kernels.tensor_cores import accumulation_bound
from tests.tiny import build_run, microbatch

pytestmark = pytest.mark.gpu
recipes = pytest.mark.parametrize("name", RECIPES)
# Multiples of 16 and 128, and odd ones, which are padded.
SHAPES = [(256, 384, 128), (48, 80, 32), (33, 50, 21), (1, 5, 7), (130, 20, 140)]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


def recipe_of(name: RecipeName, **changes: Any) -> Fp8Recipe:
    by_tensor = name in ("delayed", "tensorwise")
    if name == "delayed":
        changes = {"amax_history_len": 3, **changes}
    return Fp8Recipe(
        name=name,
        backward_format="e5m2" if by_tensor else "e4m3",
        **{"power_2_scale": not by_tensor, **changes},
    )


@recipes
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(9, 33), (130, 67), (256, 384)])
def test_casts(
    name: RecipeName, role: Role, dtype: torch.dtype, shape: tuple[int, int], cuda: torch.device
) -> None:
    """Saturation, subnormals, infinities and NaN included."""
    x = hard_matrix(*whole(name, *shape), dtype)
    found = []
    for device in (torch.device("cpu"), cuda):
        state = ScalingState(recipe_of(name))
        quantizer = linear_quantizer(state, "linear")
        assert quantizer is not None
        state.to(device)
        for table in state.tables.values():
            table.quant_scale.fill_(3.7)
        found.append(quantized(quantizer, role, x.to(device))[0])
        found[-1] = (*found[-1], [table.amax.cpu() for table in state.tables.values()])
    for ours, theirs in zip(found[1][:2], found[0][:2], strict=True):
        assert isinstance(ours, Fp8Tensor) and isinstance(theirs, Fp8Tensor)
        assert_same_bytes(ours, theirs)
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def make(recipe: Fp8Recipe, device: torch.device, tensors: list[torch.Tensor]) -> Linear:
    state = ScalingState(recipe)
    linear = Linear(
        nn.Parameter(tensors[0].to(device, copy=True)),
        nn.Parameter(tensors[1].to(device, copy=True)),
        name="linear",
        quantizer=linear_quantizer(state, "linear"),
        comm=LinearComm(),
        sink=AutogradSink(),
        counter=GemmCounter(),
    )
    state.to(device)
    return linear


@recipes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fast", [False, True])
def test_outputs_gradients_and_histories(
    name: RecipeName, shape: tuple[int, int, int], fast: bool, cuda: torch.device
) -> None:
    """Products are off by what their sums are, and by two roundings to BF16."""
    tokens, outs, ins = whole(name, *shape)
    generator = torch.Generator().manual_seed(3)

    def noise(*size: int, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(size, generator=generator)).bfloat16()

    weight, bias, x = noise(outs, ins, std=0.02), noise(outs), noise(tokens, ins)
    grad = noise(tokens, outs, std=1e-3)
    changes = {} if fast else {"fast_accumulation": frozenset()}
    results, states = [], []
    for device in (torch.device("cpu"), cuda):
        linear = make(recipe_of(name, **changes), device, [weight, bias])
        assert linear.quantizer is not None
        state = linear.quantizer.state
        for index in range(3):
            state.begin_microbatch(index % 2)
            leaf = x.to(device, copy=True).requires_grad_()
            linear.weight.grad = None
            output = linear(leaf)
            state.end_forward()
            output.backward(grad.to(device, copy=True))
            state.end_backward()
        assert leaf.grad is not None and linear.weight.grad is not None
        results.append([t.detach().double().cpu() for t in (output, leaf.grad, linear.weight.grad)])
        states.append(state)
    engine = engine_of(cuda)
    layouts = find_recipe(name).traits.layouts
    expected = all(layout is not None and engine.multiplies(layout) for layout in layouts)
    assert set(linear.counter.fp8_backends) == {"tensor cores" if expected else "emulated"}
    for direction, table in states[0].tables.items():
        for field, tensor in table.tensors().items():
            assert torch.equal(states[1].tables[direction].tensors()[field].cpu(), tensor), field
    x64, w64, g64 = (t.double().abs() for t in (x, weight, grad))
    magnitudes = [x64 @ w64.t() + bias.double().abs(), g64 @ w64, g64.t() @ x64]
    is_narrow = expected and (fast or torch.cuda.get_device_capability(cuda) < (10, 0))
    for ours, theirs, size, inner in zip(
        results[1], results[0], magnitudes, (ins, outs, tokens), strict=True
    ):
        slack = accumulation_bound(size, inner, is_narrow=is_narrow, is_fast=fast)
        assert ((ours - theirs).abs() <= slack + 2.0**-7 * theirs.abs() + 1e-30).all()


@recipes
@pytest.mark.parametrize("choice", ["off", "block"])
def test_a_model_trains_as_on_the_cpu(name: RecipeName, choice: str, cuda: torch.device) -> None:
    losses = []
    for device, compiled in ((torch.device("cpu"), "off"), (cuda, choice)):
        state = build_run(
            single_rank(device), compute="bf16", fp8=recipe_of(name), compile=compiled
        )
        losses.append([train_step(state, [microbatch(step)]).loss for step in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    if state.compiled is not None:
        assert state.compiled.graphs == 1 or cannot_trace() is not None
        assert state.compiled.recompilations == 0


def test_nccl_with_one_rank(cuda: torch.device) -> None:
    torch.cuda.set_device(cuda)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        amax = torch.tensor([1.0, float("inf")], device=cuda)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        assert amax.tolist() == [1.0, float("inf")]
    finally:
        dist.destroy_process_group()
