"""Norm and linear, activation and linear, with the cast in the pass of the first: Triton's
interpreter against the ordinary modules.

What is cast is compared bit for bit with the ordinary cast of the values that were cast; those
values, computed by Triton or by torch, may differ in BF16's last bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor, quantize
from fp8_numerics.gemm import EMULATED, Engine
from fp8_numerics.kernels import triton_launch
from megafp8.backends.native_block import FusedLayer
from megafp8.fp8 import chain
from megafp8.fp8.linear import Linear
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe, GPTSpec, ParallelSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from megafp8.train.validate import evaluate
from tests.fp8.kernels import rank_chains
from tests.fp8.kernels.test_engine import hopper, run_with
from tests.ranks import run_ranks
from tests.tiny import build_run, gpt_spec, microbatch, moe_spec

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, from numpy
    pytest.mark.skipif(
        triton_launch.unavailable(torch.device("cpu")) is not None,
        reason="needs Triton's interpreter",
    ),
]
DELAYED = Fp8Recipe(amax_history_len=3)
GATED = gpt_spec(
    num_layers=1, activation="swiglu", normalization="rmsnorm", position_embedding_type="rope"
)
EXPERTS = dataclasses.replace(
    GATED, bias=False, moe=moe_spec(layers=(True,), shared_ffn_hidden_size=32)
)
LINEARS = ("attention.qkv", "attention.projection", "mlp.fc1", "mlp.fc2")


def state_of(engine: Engine, *, fp8: Fp8Recipe = DELAYED, **changes: Any) -> TrainState:
    return run_with(engine, fp8=fp8, **changes)


class Fusions:
    """The linears whose input was cast by what is before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        run = chain.run_chain

        def noting(links: Any, *args: Any, **options: Any) -> Any:
            self.names += [link.linear.name for link in links]
            return run(links, *args, **options)

        monkeypatch.setattr(chain, "run_chain", noting)


@pytest.mark.parametrize(
    "model",
    [
        gpt_spec(num_layers=1, layernorm_zero_centered_gamma=True),
        GATED,
        pytest.param(
            gpt_spec(num_layers=1, activation="geglu", fp32_residual_connection=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            gpt_spec(num_layers=1, activation="gelu-tanh", bias=False), marks=pytest.mark.slow
        ),
    ],
    ids=[
        "zero-centred layernorm, gelu",
        "rmsnorm, swiglu, RoPE",
        "FP32 residuals, geglu",
        "gelu-tanh, no bias",
    ],
)
def test_a_step_is_that_of_the_ordinary_path(
    model: GPTSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, every gradient, histories and scales; with and without tensor cores' orientations."""
    for engine in (hopper(), Engine(uses_triton=True)) if model.is_gated else (hopper(),):
        fused, apart = state_of(engine, model=model), state_of(EMULATED, model=model)
        seen = Fusions(monkeypatch)
        for step in range(2):
            batches = [microbatch(step)]
            one, other = forward_backward(fused, batches)[0], forward_backward(apart, batches)[0]
            assert one.item() == pytest.approx(other.item(), rel=2e-4)
        assert sorted(set(seen.names)) == [f"layers.0.{n}" for n in LINEARS if "proj" not in n]
        for mine, theirs in zip(fused.masters.grads, apart.masters.grads, strict=True):
            assert (mine - theirs).norm() <= 0.04 * theirs.norm()
        for direction, table in fused.scaling.tables.items():
            other_table = apart.scaling.tables[direction]
            assert torch.equal(table.num_updates, other_table.num_updates)
            # A value that is one unit of BF16 off may get another FP8 code, which moves an amax
            # by some percent, and one of a gradient in E5M2 by twice as much.
            bound = 2.0**-4 if direction == "forward" else 2.0**-2
            for field in ("history", "quant_scale"):
                torch.testing.assert_close(
                    getattr(table, field), getattr(other_table, field), rtol=bound, atol=0
                )


@pytest.mark.parametrize(
    "model",
    [pytest.param(gpt_spec(num_layers=1), marks=pytest.mark.slow), GATED],
    ids=["layernorm", "gated"],
)
def test_casts_are_the_ordinary_ones_of_the_values_that_were_cast(model: GPTSpec) -> None:
    """Payloads of both orientations, scales and amaxes, bit for bit; seen by an observer."""
    state = state_of(hopper(), model=model)
    scaling = state.scaling
    assert isinstance(scaling, ScalingState)
    amaxes: dict[str, torch.Tensor] = {}

    def see(name: str, x: torch.Tensor, last: Fp8Tensor | None, first: Fp8Tensor | None) -> None:
        direction = "backward" if name.endswith("grad_output") else "forward"
        table = scaling.tables[direction]
        quant_scale = table.quant_scale[table.names.index(name)]
        amax = amaxes.setdefault(name, torch.zeros(()))
        assert x.dtype == torch.bfloat16
        expected = quantize(x, quant_scale, table.fmt, amax=amax, grid_dtype=None).payload
        for operand in (last, first):
            if operand is not None:
                assert torch.equal(operand.payload.view(torch.uint8), expected.view(torch.uint8))
                assert torch.equal(operand.dequant_scale, quant_scale.reciprocal())

    for step in range(2):
        scaling.observers.append(see)
        train_step(state, [microbatch(step)])
        scaling.observers.remove(see)
        for table in scaling.tables.values():
            newest = table.history[:, -1]
            assert newest.tolist() == [amaxes[name].item() for name in table.names]
        amaxes.clear()
    assert {f"layers.0.{name}.input" for name in LINEARS} <= set(scaling.forward.names)


def test_what_is_cast_is_the_norm() -> None:
    """Beside torch's, from the same weights and scales: within one unit of BF16's last place."""
    found: list[dict[str, torch.Tensor]] = []
    for engine in (hopper(), EMULATED):
        state = state_of(engine, model=GATED)
        assert isinstance(state.scaling, ScalingState)
        seen: dict[str, torch.Tensor] = {}
        state.scaling.observers.append(
            lambda name, x, *_, seen=seen: seen.__setitem__(name, x.detach().float())
        )
        forward_backward(state, [microbatch(0)])
        found.append(seen)
    name = "layers.0.attention.qkv.input"  # the first in the model: of the same residual stream
    ours, theirs = found[0][name], found[1][name]
    assert ((ours - theirs).abs() <= 2.0**-7 * theirs.abs() + 1e-6).all()
    assert found[0].keys() == found[1].keys()


@pytest.mark.parametrize(
    ("model", "fp8", "fused"),
    [
        (gpt_spec(num_layers=1), Fp8Recipe(name="tensorwise"), ()),
        (gpt_spec(num_layers=1, activation="squared-relu"), DELAYED, ("qkv", "fc1")),
        (gpt_spec(num_layers=1, ffn_dropout=0.1), DELAYED, ("qkv", "fc1")),
        (gpt_spec(num_layers=1, transformer_block_type="post_ln"), DELAYED, ("fc2",)),
        (
            gpt_spec(num_layers=1),
            dataclasses.replace(DELAYED, high_precision_gemms=frozenset({"grad_weight"})),
            (),
        ),
        (EXPERTS, DELAYED, ("qkv",)),
    ],
    ids=[
        "tensorwise",
        "no kernel",
        "dropout between",
        "no norm before",
        "a product in BF16",
        "a router after the norm",
    ],
)
def test_what_cannot_be_fused_is_not(
    model: GPTSpec, fp8: Fp8Recipe, fused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(hopper(), model=model, fp8=fp8)
    seen = Fusions(monkeypatch)
    train_step(state, [microbatch(0)])
    assert {name.rpartition(".")[2] for name in seen.names} == set(fused)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_run_chains(sequence_parallel: bool) -> None:
    """Losses and gradients of two ranks are those of the same ranks on the ordinary path."""
    parallel = ParallelSpec(devices_per_node=2, tp=2, sequence_parallel=sequence_parallel)
    ranks = run_ranks(rank_chains.both_ways, 2, {"parallel": parallel, "model": GATED})
    for rank in ranks:
        assert rank["names"] == sorted(f"layers.0.{n}" for n in LINEARS if "proj" not in n)
        assert rank["names apart"] == []
        (losses, grads), (expected, their_grads) = rank["chains"], rank["apart"]
        assert losses == pytest.approx(expected, rel=2e-4)
        assert losses == ranks[0]["chains"][0]
        for mine, theirs in zip(grads, their_grads, strict=True):
            assert (mine - theirs).norm() <= 0.04 * theirs.norm()


def test_experts_are_those_of_the_ordinary_path() -> None:
    """Loss and gradients, also of an expert without tokens."""
    losses, grads = [], []
    moe = moe_spec(layers=(True,), has_expert_bias=True, score_function="sigmoid")
    for engine in (hopper(), EMULATED):
        state = state_of(engine, model=dataclasses.replace(EXPERTS, moe=moe))
        (router,) = state.model.parts.routers
        router.bias.copy_(torch.tensor([9.0, 0, 0, -9]))
        losses.append(forward_backward(state, [microbatch(0)])[0].item())
        assert router.counts[3] == 0
        grads.append([grad.clone() for grad in state.masters.grads])
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    for mine, theirs in zip(*grads, strict=True):
        assert (mine - theirs).norm() <= 0.04 * theirs.norm()


def test_hooks_see_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a NaN sets hooks on all modules, and names the first whose output has one."""
    state, seen = state_of(hopper(), model=GATED), Fusions(monkeypatch)
    state.model.eval()
    called: list[str] = []
    for name, module in state.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    evaluate(state, [microbatch(0)])
    linears = [name for name, module in state.model.named_modules() if isinstance(module, Linear)]
    assert len(linears) == len(LINEARS) and set(linears) <= set(called) and seen.names == []


def test_on_a_cpu_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = build_run(compute="bf16", fp8=DELAYED)
    assert not any(isinstance(module, FusedLayer) for module in state.model.modules())
    seen = Fusions(monkeypatch)
    train_step(state, [microbatch(0)])
    assert seen.names == []


@pytest.mark.slow  # in the interpreter: -m slow
def test_a_model_trains_as_on_the_ordinary_path() -> None:
    """Twelve steps with accumulation, recomputation and evaluation: losses within 0.5 %."""
    model = gpt_spec(
        num_layers=2,
        activation="swiglu",
        normalization="rmsnorm",
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    )
    losses = []
    for engine in (EMULATED, hopper()):
        state = state_of(engine, model=model)
        losses.append([])
        for step in range(12):
            batches = [microbatch(2 * step), microbatch(2 * step + 1)]
            losses[-1].append(train_step(state, batches).loss)
            state.step += 1
        losses[-1].append(evaluate(state, [microbatch(99)])[0])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1][-2] < losses[1][0]


def test_recomputed_layers_have_the_same_bits() -> None:
    recompute = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    grads = []
    for model in (GATED, dataclasses.replace(GATED, recompute=recompute)):
        state = state_of(hopper(), model=model)
        train_step(state, [microbatch(0)])
        forward_backward(state, [microbatch(1)])
        grads.append([grad.clone() for grad in state.masters.grads])
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_that_are_put_in_the_norms_place_are_used_and_trained() -> None:
    """As FSDP does with those that it gathers."""
    state = state_of(hopper(), model=gpt_spec(num_layers=1))
    batch = torch.from_numpy(microbatch(0).tokens_BS)
    layer = state.model.layers[0]
    assert isinstance(layer, FusedLayer)
    norms = [layer.attention_norm, layer.mlp_norm]
    with torch.no_grad():
        before = state.model.logits(batch)
    for norm in norms:
        norm.weight = torch.nn.Parameter(3 * norm.weight.detach())
    with torch.no_grad():
        assert not torch.allclose(state.model.logits(batch), before, rtol=0.1)
    forward_backward(state, [microbatch(0)])
    for norm in norms:
        assert norm.weight.grad is not None and norm.weight.grad.abs().max() > 0
