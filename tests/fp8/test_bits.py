"""Converted modules compute what our own linears and the specification compute, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.gemm import GemmCounter
from megafp8 import fp8
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.scaling import ScalingState
from megafp8.models.gpt import GPT
from megafp8.models.parts import Parts, PlainLinear
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.parts import NativeParts, PartsArgs
from megafp8.specs.recipes import RECIPES, find_recipe
from tests.fp8.models import mlp, noise
from tests.spec.delayed import DelayedScalingModel, Recipe
from tests.spec.formats import same_codes
from tests.tiny import SEQ, gpt_spec

SIZES = {name: max(16, find_recipe(name).traits.multiple) for name in RECIPES}


def modules_of(kind: str, width: int, bias: bool, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """A foreign linear of [2 width, width], and its weight as [O, I]."""
    if kind == "nn.Linear":
        module: nn.Module = nn.Linear(width, 2 * width, bias=bias)
    else:
        module = Conv1D(2 * width, width)
    module.to(dtype)
    weight = noise(2 * width, width, seed=1, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(weight if kind == "nn.Linear" else weight.t())
        if module.bias is not None:
            module.bias.copy_(noise(2 * width, seed=2, dtype=dtype))
    return module, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["nn.Linear", "without bias", "Conv1D"])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
def test_a_linear_has_the_bits_of_our_own(name: str, kind: str, dtype: torch.dtype) -> None:
    """Two steps of two microbatches: outputs and all gradients, of [B, S, I] inputs."""
    width = SIZES.get(name, 16)
    bias, kind = kind != "without bias", kind.replace("without bias", "nn.Linear")
    module, weight = modules_of(kind, width, bias, dtype)
    recipe = fp8.recipe_named(name)
    own_state = ScalingState(recipe)
    own = Linear(
        nn.Parameter(weight.clone()),
        nn.Parameter(module.bias.detach().clone()) if bias else None,
        name="linear",
        quantizer=linear_quantizer(own_state, "linear"),
        comm=LinearComm(),
        sink=AutogradSink(),
        counter=GemmCounter(),
    )
    state = fp8.convert(module, name)
    for step in range(2):
        for index in range(2):
            x = noise(3, 5, width, seed=10 * step + index, dtype=dtype)
            grad = noise(3, 5, 2 * width, seed=50 + 10 * step + index, dtype=dtype)
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            own_state.begin_microbatch(index)
            expected = own(ours)
            own_state.end_forward()
            expected.backward(grad)
            own_state.end_backward()
            with state.microbatch(first=index == 0):
                got = module(theirs)
                got.backward(grad)
            assert got.dtype == dtype
            assert torch.equal(got, expected)
            assert torch.equal(theirs.grad, ours.grad)
        weight_grad = module.weight.grad if kind == "nn.Linear" else module.weight.grad.t()
        assert torch.equal(weight_grad, own.weight.grad)
        if bias:
            assert torch.equal(module.bias.grad, own.bias.grad)
        with torch.no_grad():
            for parameter in (*module.parameters(), *own.parameters()):
                parameter.mul_(1.5)
    assert state.counter.flops == own.counter.flops


def test_an_mlp_casts_as_the_specification_says() -> None:
    """Payloads and scales of every tensor, over three steps of two microbatches."""
    model = mlp(16)
    state = fp8.convert(model, fp8.Fp8Recipe(amax_history_len=3))
    kinds = {f"{n}.{k}": k for n in ("0", "2") for k in ("input", "weight", "grad_output")}
    specified = DelayedScalingModel(kinds, Recipe(amax_history_len=3))
    casts: list[str] = []

    def see(name: str, x: torch.Tensor, last: Fp8Tensor, first: Fp8Tensor) -> None:
        expected = specified.quantize(name, x.detach().numpy())
        assert last is first
        assert same_codes(last.payload.view(torch.uint8).numpy(), expected.codes, expected.fmt)
        assert np.float32(last.dequant_scale.item()) == expected.dequant_scale
        casts.append(name)

    state.scaling.observers.append(see)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        for index in range(2):
            specified.begin_microbatch(index)
            with state.microbatch(first=index == 0):
                model(noise(8, 16, seed=2 * step + index)).square().mean().backward()
            specified.end_forward()
            specified.end_backward()
        optimizer.step()
    for name, count in {"input": 6, "weight": 3, "grad_output": 6}.items():
        assert sum(cast.endswith(name) for cast in casts) == 2 * count
    scales = state.scales()
    assert {n: np.float32(s.quant_scale) for n, s in scales.items()} == {
        n: s.scale for n, s in specified.states.items()
    }


def own_and_converted(recipe: fp8.Fp8Recipe) -> tuple[GPT, ScalingState, GPT, fp8.Fp8State]:
    """Our GPT with our linears; and with nn.Linear modules of the same weights, converted."""
    spec, streams, scaling = gpt_spec(), RandomStreams(0), ScalingState(recipe)
    parts_args = PartsArgs(
        spec=spec, dtype=torch.float32, seed=0, streams=streams, tp=single_rank().tp,
        sink=AutogradSink(), counter=GemmCounter(),
    )  # fmt: skip
    native = NativeParts(parts_args, scaling)
    plain = GPT(Parts(spec, torch.float32, 0, streams))
    for parent in list(plain.modules()):
        for name, child in parent.named_children():
            if isinstance(child, PlainLinear):
                out_features, in_features = child.weight.shape
                linear = nn.Linear(in_features, out_features, bias=child.bias is not None)
                linear.weight, linear.bias = child.weight, child.bias
                setattr(parent, name, linear)
    return GPT(native), scaling, plain, fp8.convert(plain, recipe)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "rowwise"])
def test_a_gpt_has_the_bits_of_our_own(name: str) -> None:
    recipe = fp8.recipe_named(name)
    own, scaling, other, state = own_and_converted(recipe)
    assert len(state.linears) == 4 * own.spec.num_layers
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (own, other)]
    for step in range(3):
        words = torch.randint(
            own.spec.vocab_size, (2, SEQ + 1), generator=torch.Generator().manual_seed(step)
        )
        tokens_BS, targets_BS = words[:, :-1], words[:, 1:]
        scaling.begin_microbatch(0)
        expected = own(tokens_BS, targets_BS)
        scaling.end_forward()
        expected.backward()
        scaling.end_backward()
        with state.microbatch():
            got = other(tokens_BS, targets_BS)
            got.backward()
        assert torch.equal(got, expected)
        for ours, theirs in zip(own.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant: bool) -> None:
    found = []
    for is_checkpointed in (False, True):
        model = mlp()
        state = fp8.convert(model)
        for step in range(2):
            x = noise(8, 32, seed=step).requires_grad_()
            with state.microbatch():
                if is_checkpointed:
                    out = checkpoint(model, x, use_reentrant=use_reentrant)
                else:
                    out = model(x)
                out.square().mean().backward()
        found.append([*gradients(model), *state.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_code_around_the_linears_changes_no_bit() -> None:
    found = []
    for is_compiled in (False, True):
        model = mlp()
        state = fp8.convert(model)
        run = torch.compile(model, backend="eager") if is_compiled else model
        for step in range(2):
            with state.microbatch():
                run(noise(8, 32, seed=step)).square().mean().backward()
        found.append([*gradients(model), *state.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.compiler.reset()  # else the code that was compiled in parts is used again
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="megafp8's FP8 linears"), state.microbatch():
        whole(noise(8, 32, seed=0))


@pytest.mark.parametrize(
    "recipe",
    [
        fp8.Fp8Recipe(),
        fp8.Fp8Recipe(high_precision_gemms=frozenset({"output", "grad_weight"})),
        fp8.Fp8Recipe(name="rowwise"),  # products of FP32 values, which BF16 does not hold
    ],
    ids=["delayed", "partly in high precision", "rowwise"],
)
def test_autocast_computes_as_a_model_in_that_dtype(recipe: fp8.Fp8Recipe) -> None:
    rounded = mlp().bfloat16()
    wide = mlp()
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.bfloat16())
    grads = []
    for model, is_autocast in ((rounded, False), (wide, True)):
        state = fp8.convert(model, recipe)
        for step in range(2):
            x = noise(8, 32, seed=step, dtype=torch.bfloat16)
            with state.microbatch(), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                out = model(x.float() if is_autocast else x)
                assert out.dtype == torch.bfloat16
                out.backward(noise(8, 32, seed=9, dtype=torch.bfloat16))  # inside of autocast
            if step == 0:
                grads.append(gradients(model))
    for narrow, exact in zip(*grads, strict=True):
        assert narrow.dtype == torch.bfloat16 and exact.dtype == torch.float32
        assert torch.equal(narrow, exact.bfloat16())
