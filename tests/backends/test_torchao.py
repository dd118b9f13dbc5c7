"""torchao as a backend: its config says what our recipe says; it trains, counts and continues."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torchao.float8")

from fp8_numerics.gemm import GemmCounter
from megafp8.backends.torchao import TorchaoLinear, import_torchao, make_config, why_torchao_cannot
from megafp8.fp8.linear import Linear
from megafp8.models.init import pieces_of
from megafp8.observe.health import HEALTH_FILE, read_health
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.layer import first_and_last_linear
from megafp8.specs.precision import GEMMS, ModuleRule
from megafp8.specs.recipes import HIGH_PRECISION
from megafp8.specs.run import HealthMode
from megafp8.train import state_dict
from megafp8.train.build import build
from megafp8.train.report.fp8 import require_fp8
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from megafp8.train.validate import evaluate
from tests.tiny import SEQ, build_run, gpt_spec, microbatch, precision_share, run_spec
from tests.train.test_health import run as health_run

CPU = torch.device("cpu")
RECIPES = {
    "tensorwise": Fp8Recipe(name="tensorwise"),
    "tensorwise e4m3": Fp8Recipe(name="tensorwise", backward_format="e4m3"),
    "rowwise": Fp8Recipe(name="rowwise", backward_format="e4m3", power_2_scale=True),
    "rowwise_with_gw_hp": Fp8Recipe(
        name="rowwise_with_gw_hp",
        backward_format="e4m3",
        power_2_scale=True,
    ),
}
EACH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def spec_of(recipe: Fp8Recipe, compute: str = "bf16", num_layers: int = 2) -> RunSpec:
    spec = run_spec(compute=compute, fp8=recipe, model=gpt_spec(num_layers=num_layers))
    precision = dataclasses.replace(spec.precision, backend="torchao")
    return dataclasses.replace(spec, precision=precision)


def run_of(recipe: Fp8Recipe, compute: str = "bf16", num_layers: int = 2) -> TrainState:
    return build(spec_of(recipe, compute, num_layers), single_rank())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_s_own_recipes_are_reached(name: str) -> None:
    """The config equals `from_recipe_name`'s in every field but `emulate`."""
    own = import_torchao().Float8LinearConfig.from_recipe_name(name)
    ours = make_config(RECIPES[name], emulate=True)
    assert dataclasses.replace(ours, emulate=False) == own


def test_flags_reach_the_config() -> None:
    recipe = dataclasses.replace(
        RECIPES["tensorwise e4m3"],
        power_2_scale=True,
        pad_inner_dim=True,
        fast_accumulation=frozenset({"grad_weight"}),
        high_precision_gemms=frozenset({"grad_input"}),
    )
    config = make_config(recipe, emulate=False)
    assert config.pad_inner_dim and config.round_scales_to_power_of_2 and not config.emulate
    fast = {name: getattr(config, f"gemm_config_{name}").use_fast_accum for name in GEMMS}
    assert fast == {"output": False, "grad_input": False, "grad_weight": True}
    assert config.cast_config_grad_output.scaling_type.value == "disabled"
    assert config.cast_config_weight_for_grad_input.scaling_type.value == "disabled"
    assert config.cast_config_grad_output_for_grad_weight.scaling_type.value == "dynamic"
    assert config.cast_config_grad_output.target_dtype == torch.float8_e4m3fn


def scale_of(x: torch.Tensor, fp8_max: float, pow2: bool, dim: int | None) -> torch.Tensor:
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (fp8_max / amax.double().clamp(min=1e-12)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if pow2 else scale


def cast(x: torch.Tensor, dtype: torch.dtype, pow2: bool, dim: int | None) -> torch.Tensor:
    """The values after the cast, in FP64: an oracle of torch's casts and nothing of torchao."""
    fp8_max = torch.finfo(dtype).max
    scale = scale_of(x.float(), fp8_max, pow2, dim)
    payload = (x.float() * scale).clamp(-fp8_max, fp8_max).to(dtype)
    return payload.double() / scale.double()


@EACH
def test_emulation_is_the_recipe_that_was_asked_for(recipe: Fp8Recipe) -> None:
    """Output and gradients against FP64 products of independently cast operands: 1e-6 relative."""
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(48, 32)), nn.Parameter(torch.randn(48))
    config = make_config(recipe, emulate=True)
    layer = TorchaoLinear(
        weight, bias, config, GemmCounter(), name="linear", fp8_in_evaluation=True
    )
    x = (torch.randn(64, 32) * torch.logspace(-2, 2, 64)[:, None]).requires_grad_()
    grad = torch.randn(64, 48) * torch.logspace(1, -3, 64)[:, None]
    output = layer(x)
    output.backward(grad)
    rows = recipe.name != "tensorwise"
    e4m3 = torch.float8_e4m3fn
    back = e4m3 if recipe.backward_format == "e4m3" else torch.float8_e5m2
    p = recipe.power_2_scale
    gw_hp = recipe.name == "rowwise_with_gw_hp"
    dim0, dim1 = (0, 1) if rows else (None, None)
    w = weight.detach()
    x_q, w_q = cast(x.detach(), e4m3, p, dim1), cast(w, e4m3, p, dim1)
    w_back = cast(w, e4m3, p, None if gw_hp else dim0)
    g_q = cast(grad, back, p, dim1)
    if gw_hp:
        expected_gw = grad.double().t() @ x.detach().double()
    else:
        expected_gw = cast(grad, back, p, dim0).t() @ cast(x.detach(), e4m3, p, dim0)
    for got, expected in (
        (output, x_q @ w_q.t() + bias.detach().double()),
        (x.grad, g_q @ w_back),
        (weight.grad, expected_gw),
        (bias.grad, grad.double().sum(0)),
    ):
        assert got is not None
        scale = expected.abs().max()
        torch.testing.assert_close(got.double() / scale, expected / scale, rtol=0, atol=1e-6)


@EACH
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_it_trains(recipe: Fp8Recipe, compute: str) -> None:
    state = run_of(recipe, compute)
    losses = []
    for number in range(12):
        result = train_step(state, [microbatch(2 * number), microbatch(2 * number + 1)])
        state.step += 1
        losses.append(result.loss)
    assert losses[-1] < losses[0] - 0.2
    assert not any(table.names for table in state.scaling.tables.values())


def test_first_and_last_linear_stay_in_high_precision() -> None:
    state = run_of(RECIPES["tensorwise"], num_layers=3)
    ours = {m.name for m in state.model.modules() if isinstance(m, Linear)}
    assert ours == set(first_and_last_linear(3))
    assert sum(isinstance(m, TorchaoLinear) for m in state.model.modules()) == 4 * 3 - 2


def test_a_run_continues_bit_for_bit(tmp_path: Path) -> None:
    recipe = RECIPES["tensorwise"]
    whole, begun, continued = (run_of(recipe) for _ in range(3))

    def step(state: TrainState, number: int) -> None:
        train_step(state, [microbatch(2 * number), microbatch(2 * number + 1)])
        state.step += 1

    for number in range(5):
        step(whole, number)
    for number in range(3):
        step(begun, number)
    saver = Saver(tmp_path, 1, {"config": {}, "data_fingerprint": ""})
    state_dict.load_checkpoint(saver.save(begun), continued, print)
    for number in range(3, 5):
        step(continued, number)
    for one, other in zip(whole.masters.masters, continued.masters.masters, strict=True):
        assert torch.equal(one, other)


def test_the_linears_weights_are_those_of_our_own_layers() -> None:
    """Muon updates them, and not those alone that torchao leaves in high precision."""
    names = [
        [pieces_of(weight)[0].name for weight in state.backend.weights(state.model)]
        for state in (run_of(RECIPES["tensorwise"], "fp32"), build_run(compute="fp32"))
    ]
    assert names[0] == names[1] and len(names[0]) == 4 * gpt_spec().num_layers


def test_rules_over_names_decide() -> None:
    """One linear out of FP8, the first one into it, another under rowwise."""
    rules = (
        ModuleRule("layers.0.attention.qkv", "tensorwise"),
        ModuleRule("*.mlp.fc1", HIGH_PRECISION),
        ModuleRule("*.projection", "rowwise"),
    )
    state = run_of(dataclasses.replace(RECIPES["tensorwise"], modules=rules), num_layers=1)
    layer = state.model.layers[0]
    assert isinstance(layer.mlp.fc1, Linear) and isinstance(layer.mlp.fc2, Linear)
    qkv, projection = layer.attention.qkv, layer.attention.projection
    assert isinstance(qkv, TorchaoLinear) and isinstance(projection, TorchaoLinear)
    granularity = [m.linear.config.cast_config_input.scaling_granularity.value
                   for m in (qkv, projection)]  # fmt: skip
    assert granularity == ["tensorwise", "axiswise"]


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_weights_and_gradients_are_the_project_s_own(compute: str) -> None:
    """The same initial weights by logical name as native, FP32 masters and FP32 gradients."""
    state, native = run_of(RECIPES["tensorwise"], compute), build_run(compute=compute)
    pairs = list(zip(state.masters.params, native.masters.params, strict=True))
    for ours, reference in pairs:
        assert pieces_of(ours) == pieces_of(reference)
        assert torch.equal(ours, reference)
    for master, reference_master in zip(state.masters.masters, native.masters.masters, strict=True):
        assert torch.equal(master, reference_master) and master.dtype == torch.float32
    train_step(state, [microbatch(0), microbatch(1)])
    assert all(grad.abs().max() > 0 for grad in state.masters.grads)
    assert all(param.grad is None for param in state.masters.params)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise_with_gw_hp"])
def test_gemms_are_counted_by_what_they_ran_in(name: str) -> None:
    """Six of the eight linears of two layers, counted from their shapes."""
    state = run_of(RECIPES[name])
    train_step(state, [microbatch(0)])
    hidden, ffn, tokens = 32, 64, 2 * SEQ
    kept = 3 * hidden * hidden + hidden * ffn
    linears = 2 * (4 * hidden * hidden + 2 * hidden * ffn) - kept
    flops = state.counter.flops
    assert flops["fp8", "output"] == flops["fp8", "grad_input"] == 2 * tokens * linears
    assert flops["fp8", "grad_weight"] == (2 * tokens * linears if name == "tensorwise" else 0)


@EACH
def test_the_planned_share_is_the_counted_one(recipe: Fp8Recipe) -> None:
    state = run_of(recipe)
    share = precision_share(state, gpt_spec())
    require_fp8(share)
    assert any("layers.0.attention.qkv, layers.1.mlp.fc2 (first or last" in t for t in share.higher)
    train_step(state, [microbatch(1)])
    flops = {key: n for key, n in state.counter.flops.items() if key[1] != "attention"}
    counted = sum(n for (precision, _), n in flops.items() if precision == "fp8")
    assert share.share == pytest.approx(counted / sum(flops.values()), rel=1e-9)


def test_evaluation_in_fp8_or_not() -> None:
    """`fp8_in_evaluation` False evaluates in the compute dtype: as a model without FP8 does."""
    batches = [microbatch(5)]
    plain, _ = evaluate(build_run(compute="fp32"), batches)
    recipe = RECIPES["tensorwise"]
    in_fp8, _ = evaluate(run_of(recipe, "fp32"), batches)
    off = dataclasses.replace(recipe, fp8_in_evaluation=False)
    state = run_of(off, "fp32")
    in_fp32, _ = evaluate(state, batches)
    assert in_fp8 != plain
    assert in_fp32 == pytest.approx(plain, rel=1e-6)
    assert ("fp8", "output") not in state.counter.flops


def test_what_torchao_cannot_do_is_said() -> None:
    assert "no delayed recipe" in str(why_torchao_cannot(Fp8Recipe(), CPU))
    assert "fp8_params" in str(
        why_torchao_cannot(Fp8Recipe(name="rowwise", params_in_fp8=True), CPU)
    )
    assert why_torchao_cannot(RECIPES["rowwise"], CPU) is None


def test_a_linear_in_high_precision_evaluation_is_torch_s() -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(16, 32)), torch.randn(16, 32)
    config = make_config(RECIPES["tensorwise"], emulate=True)
    layer = TorchaoLinear(
        weight, None, config, GemmCounter(), name="linear", fp8_in_evaluation=False
    ).eval()
    assert torch.equal(layer(x), F.linear(x, weight))


@pytest.mark.parametrize("mode", ["scales", "full"])
@EACH
def test_health_is_measured_and_training_is_untouched(
    recipe: Fp8Recipe, mode: HealthMode, tmp_path: Path
) -> None:
    """Amaxes and scales are those of the tensors that torchao was given."""
    plain, _ = health_run(tmp_path, "off", state=run_of(recipe))
    assert not (tmp_path / HEALTH_FILE).exists()
    state = run_of(recipe)
    seen: dict[str, float] = {}

    def look(module: TorchaoLinear, given: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if module.training:
            amax = given[0].detach().abs().max().item()
            seen[module.name] = max(amax, seen.get(module.name, 0.0))

    linears = [module for module in state.model.modules() if isinstance(module, TorchaoLinear)]
    for linear in linears:
        linear.register_forward_hook(look)
    losses, _ = health_run(tmp_path, mode, steps=1, state=state)
    assert losses == plain[:1]
    (record,) = read_health(tmp_path / HEALTH_FILE)
    roles = ("input", "weight", "grad_output")
    assert set(record.tensors) == {f"{ln.name}.{role}" for ln in linears for role in roles}
    for linear in linears:
        of_input = record.tensors[f"{linear.name}.input"]
        assert of_input.amax == seen[linear.name]
        if recipe.name == "tensorwise":
            assert of_input.quant_scale == pytest.approx(448 / of_input.amax, rel=1e-6)
        assert (of_input.snr_db is not None) == (mode == "full")
        assert record.tensors[f"{linear.name}.grad_output"].amax > 0
