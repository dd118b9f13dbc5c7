"""Experts that transformers fuses compute as one converted linear for each of their projections."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from fp8_numerics.philox import Rows
from megafp8 import fp8
from megafp8.fp8 import experts as fused
from megafp8.fp8.converted import Converted
from tests.fp8.models import deepseek_v3, mixtral, mixture, noise, train

RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mixtral": (mixtral, "lm_head"),
    "qwen3_moe": (lambda: mixture("Qwen3Moe"), "lm_head"),
    "qwen2_moe": (lambda: mixture("Qwen2Moe"), ["lm_head", "*.shared_expert_gate"]),
    "olmoe": (lambda: mixture("Olmoe"), "lm_head"),
    "deepseek_v3": (deepseek_v3, "lm_head"),
}
WIDTH, INNER, NUM = 128, 128, 5
# The experts of each token; expert 3 has none, expert 4 a single one.
CHOSEN = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 0], [0, 4], [2, 1], [0, 2]] * 6)
CHOSEN[8:][CHOSEN[8:] == 4] = 2


class Layer(nn.Module):
    """Experts of Mixtral, whose routing the tests choose."""

    def __init__(self, implementation: str = "eager") -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": NUM}
        config = MixtralConfig(**sizes, experts_implementation=implementation)
        self.experts = MixtralExperts(config)
        with torch.no_grad():
            for index, weight in enumerate(self.experts.parameters()):
                # each expert has numbers, and so scales, of another size
                sizes_E11 = torch.arange(1.0, NUM + 1)[:, None, None]
                weight.copy_(0.05 * sizes_E11 * noise(*weight.shape, seed=index))

    def forward(self, x_TD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x_TD, CHOSEN, weights_TK)
        return out


class Separate(nn.Module):
    """The same with a linear for each projection of each expert, called one after the other."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        gate_up_ENI, down_EDF = (p.detach() for p in layer.experts.parameters())
        self.experts = nn.ModuleList(nn.ModuleDict() for _ in range(NUM))
        for expert, gate_up, down in zip(self.experts, gate_up_ENI, down_EDF, strict=True):
            for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
                expert[name] = nn.Linear(*weight.t().shape, bias=False)
                expert[name].weight = nn.Parameter(weight.clone())
        self.samples: list[int] = []

    def forward(self, x_TD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out_TD = torch.zeros_like(x_TD)
        length = len(x_TD) // len(self.samples)
        for number, expert in enumerate(self.experts):
            tokens = [t for t, chosen in enumerate(CHOSEN.tolist()) if number in chosen]
            weights = [weights_TK[t, CHOSEN[t].tolist().index(number)] for t in tokens]
            places = torch.tensor([(self.samples[t // length], t % length) for t in tokens])
            rows = (
                Rows(*places.view(-1, 2).unbind(1)) if tokens else Rows(*torch.zeros(2, 0).long())
            )

            def run(linear: Any, x: torch.Tensor, rows: Rows = rows) -> torch.Tensor:
                out: torch.Tensor = linear.run(x, linear.weight, None, rows)
                return out

            gate, up = run(expert["gate_up_proj"], x_TD[tokens]).split(INNER, 1)
            out_RD = run(expert["down_proj"], F.silu(gate) * up)
            if tokens:
                out_RD = out_RD * torch.stack(weights)[:, None]
                out_TD = out_TD.index_add(0, torch.tensor(tokens), out_RD.to(out_TD.dtype))
            else:
                out_TD = out_TD + out_RD.sum()
        return out_TD

    def stacked(self, what: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        return [
            torch.stack([what(expert[name].weight) for expert in self.experts])
            for name in ("gate_up_proj", "down_proj")
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_have_the_bits_of_a_linear_each(recipe: Any, dtype: torch.dtype) -> None:
    """Outputs, gradients, scales and updates of two steps of two microbatches."""
    layer = Layer().to(dtype)
    separate = Separate(layer)
    models: tuple[Any, Any] = layer, separate
    states = [fp8.convert(model, recipe) for model in models]
    assert states[0].linears.keys() == states[1].linears.keys()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(2):
        for micro in range(2):
            seed, samples = 10 * step + micro, [2 * micro, 2 * micro + 1]
            separate.samples = samples
            found = []
            for model, state in zip(models, states, strict=True):
                x = noise(len(CHOSEN), WIDTH, seed=seed, dtype=dtype).requires_grad_()
                weights = noise(*CHOSEN.shape, seed=seed + 5).sigmoid().requires_grad_()
                with state.microbatch(first=micro == 0, samples=samples):
                    out = model(x, weights)
                    out.backward(noise(*out.shape, seed=seed + 7, dtype=dtype))
                found.append((out, x.grad, weights.grad))
            for name, one, other in zip(("out", "dx", "dp"), *found, strict=True):
                assert one is not None and one.any(), name
                assert torch.equal(one, other), name
        grads = separate.stacked(lambda weight: weight.grad)
        for parameter, grad in zip(layer.experts.parameters(), grads, strict=True):
            assert torch.equal(parameter.grad, grad)
            assert [bool(part.any()) for part in grad] == [True, True, True, False, True]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, weight in zip(
        layer.experts.parameters(), separate.stacked(lambda w: w), strict=True
    ):
        assert torch.equal(parameter, weight)
    own, theirs = (state.state_dict() for state in states)
    assert own.keys() == theirs.keys() and all(torch.equal(own[key], theirs[key]) for key in own)
    if recipe == "delayed":
        updates = {name: scale.num_updates for name, scale in states[0].scales().items()}
        for name, number in updates.items():
            is_weight, is_empty = name.endswith(".weight"), name.startswith("experts.3.")
            assert number == (2 if is_weight else 0 if is_empty else 4), name
        scales = {s.quant_scale for n, s in states[0].scales().items() if n.endswith("proj.weight")}
        assert len(scales) > NUM  # so that another expert's scale would be seen


def bound_of(layer: Layer, x_TD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return how far FP32 sums of D, F and K terms in any order may lie from the exact result.

    A product of n terms is off by n * u times the sum of the terms' sizes (Higham, Accuracy and
    Stability of Numerical Algorithms, 3.5), |silu(x)| <= |x|, and the slope of silu is below 1.1.
    Eight more roundings are those of silu, of the products by up and by the weight, and of casts.
    """
    sizes = copy.deepcopy(layer.experts).double()
    sizes.act_fn = nn.Identity()
    with torch.no_grad():
        for parameter in sizes.parameters():
            parameter.abs_()
        whole = sizes.forward(x_TD.double().abs(), CHOSEN, weights_TK.double().abs())
    return (2.1 * WIDTH + INNER + 2 + 8) * 2**-24 * whole


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_casts_experts_compute_as_those_of_transformers(implementation: str) -> None:
    plain, layer, low = Layer("eager"), Layer(implementation), Layer(implementation)
    x, weights = noise(len(CHOSEN), WIDTH, seed=1), noise(*CHOSEN.shape, seed=2).sigmoid()
    with fp8.convert(layer, fp8.Fp8Recipe(name="rowwise", fp8_in_evaluation=False)).evaluation():
        got = layer(x, weights)
    with fp8.convert(low, "rowwise").evaluation():
        in_fp8 = low(x, weights)
    exact = copy.deepcopy(plain).double()(x.double(), weights.double())
    bound = bound_of(plain, x, weights)
    assert ((got - exact).abs() <= bound).all()
    assert ((plain(x, weights) - exact).abs() <= bound).all()
    assert ((in_fp8 - exact).abs() > bound).any() and exact.abs().mean() > 10 * bound.mean()


def test_gradients_reach_what_those_of_transformers_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP64, where the experts' own linears compute without FP8; numbers from E on are no one.

    Ours count the rows without `torch.bincount`, for which a GPU's host would wait twice more.
    """
    found = []
    chosen = CHOSEN.clone()
    chosen[::5, 0] = NUM
    for is_ours in (False, True):
        layer = Layer().double()
        x = noise(len(chosen), WIDTH, seed=1, dtype=torch.float64).requires_grad_()
        weights = noise(*chosen.shape, seed=2, dtype=torch.float64).requires_grad_()
        if is_ours:
            monkeypatch.delattr(torch, "bincount")
            out = fused._output(layer.experts, fused.linears_of(layer.experts), x, chosen, weights)
        else:
            out = layer.experts(x, chosen, weights)
        out.square().sum().backward()
        found.append([out, x.grad, weights.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and one.any()
        largest = float(one.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * largest)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_are_converted(family: str) -> None:
    """All but routers, embeddings and what is skipped, whose names are said."""
    make, skip = FAMILIES[family]
    model = make()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    names, plain = list(model.state_dict()), train(make(), None, range(8))
    state = fp8.convert(model, "delayed", skip=skip)
    assert list(model.state_dict()) == names
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert f"{NUMBERED}gate.weight" in repr(state).splitlines()[2].partition("routers: ")[2]
    experts = [name for name in state.linears if ".experts." in name]
    assert f"{len(experts)} ExpertLinear; " in repr(state)
    fused_ones = [p for name, p in model.named_parameters() if ".experts." in name]
    assert len(experts) == sum(map(len, fused_ones)) > 0
    got = train(model, state, range(8))
    assert got != plain and got[-1] < got[0]
    for high, low in zip(plain, got, strict=True):
        assert low == pytest.approx(high, rel=0.03)  # half of E4M3's relative spacing of 2**-4
    assert state.share is not None and state.share > 0.9
    assert model.state_dict().keys() == make().state_dict().keys()
    assert all(scale.num_updates for name, scale in state.scales().items() if "weight" in name)


NUMBERED = "model.layers.*.mlp."


def test_every_implementation_is_replaced_by_the_same_products() -> None:
    losses = []
    for implementation in IMPLEMENTATIONS:
        model = mixture("Qwen3Moe", implementation)
        losses.append(train(model, fp8.convert(model, "tensorwise", skip="lm_head"), range(3)))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_recomputation_changes_no_bit(recipe: Any) -> None:
    grads = []
    for is_recomputed in (False, True):
        model = mixtral()
        state = fp8.convert(model, recipe, skip="lm_head")
        if is_recomputed:
            for layer in model.model.layers:
                recompute(layer)
        train(model, state, range(2))
        grads.append([*model.parameters()])
        scales = state.state_dict()
        grads[-1] += [scales[key].float() for key in sorted(scales)]
    assert all(map(torch.equal, *grads))


def recompute(layer: Any) -> None:
    """Let a layer run its forward pass again in the backward pass."""
    run = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(run, *args, use_reentrant=False, **kwargs)


def test_evaluation_casts_no_weight_of_an_expert_without_tokens() -> None:
    layer = Layer()
    state = fp8.convert(layer, "tensorwise")
    arguments = noise(len(CHOSEN), WIDTH, seed=1), noise(*CHOSEN.shape, seed=2)
    outs = []
    for context in (state.evaluation(), state.evaluation(keep_weights=True), torch.no_grad()):
        with torch.no_grad(), state.health("scales") as report, context:
            outs.append(layer(*arguments))
        cast = {name.split(".")[1] for name in report.tensors}
        assert cast == {"0", "1", "2", "4"}
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert "never called so far: experts.3.gate_up_proj, experts.3.down_proj" in repr(state)
    with state.microbatch():
        layer(*arguments)
    assert "never called" not in repr(state)


def test_saved_scales_of_experts_continue_bit_for_bit() -> None:
    whole, part = mixtral(), mixtral()
    expected = train(whole, fp8.convert(whole, skip="lm_head"), range(4), sgd(whole))
    state = fp8.convert(part, skip="lm_head")
    first = train(part, state, range(2), sgd(part))
    again = mixtral()
    again_state = fp8.convert(again, skip="lm_head")
    again.load_state_dict(part.state_dict())
    again_state.load_state_dict(state.state_dict())
    assert first + train(again, again_state, range(2, 4), sgd(again)) == expected
    assert "model.layers.0.mlp.experts.3.down_proj.weight/quant_scale" in state.state_dict()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_other_weights_that_are_loaded_get_a_scale_for_each_expert() -> None:
    layer = Layer()
    state = fp8.convert(layer)
    arguments = noise(len(CHOSEN), WIDTH, seed=1), noise(*CHOSEN.shape, seed=2)
    with state.microbatch():
        layer(*arguments).sum().backward()
    before = state.scales()
    saved = {name: weight.clone() for name, weight in layer.state_dict().items()}
    saved["experts.down_proj"][2] *= 300
    layer.load_state_dict(saved)
    changed = {n for n, scale in state.scales().items() if scale != before[n]}
    assert changed == {"experts.2.down_proj.weight"}


def test_a_copy_evaluates_by_its_own_weights() -> None:
    layer = Layer()
    state = fp8.convert(layer, "rowwise")
    arguments = noise(len(CHOSEN), WIDTH, seed=1), noise(*CHOSEN.shape, seed=2)
    ema = copy.deepcopy(layer)
    with torch.no_grad():
        assert torch.equal(ema(*arguments), layer(*arguments))
        layer.experts.down_proj.zero_()
        assert not layer(*arguments).any() and ema(*arguments).any()
    assert type(ema.experts) is type(layer.experts) and state.linears


def test_weights_that_change_in_a_step_are_refused_by_the_experts_name() -> None:
    layer = Layer()
    state = fp8.convert(layer)
    arguments = noise(len(CHOSEN), WIDTH, seed=1), noise(*CHOSEN.shape, seed=2)
    with pytest.raises(fp8.Fp8Error, match="experts.0.gate_up_proj: a forward pass with gradients"):
        layer(*arguments)
    with state.microbatch(samples=[0, 1]):
        layer(*arguments).sum().backward()
    with pytest.raises(
        fp8.Fp8Error, match="its input has 48 rows, which are not the tokens of 5 s"
    ):
        with state.microbatch(samples=range(5)):
            layer(*arguments)
    with state.microbatch():
        layer(*arguments).sum().backward()
    with torch.no_grad():
        layer.experts.down_proj.mul_(2)
    with pytest.raises(fp8.Fp8Error, match="experts.0.down_proj: its weight has changed"):
        with state.microbatch(first=False):
            pass
    with state.evaluation(keep_weights=True), torch.no_grad():
        layer(*arguments)
        layer.experts.gate_up_proj.mul_(2)
        with pytest.raises(fp8.Fp8Error, match="experts.0.gate_up_proj: its weight has changed in"):
            layer(*arguments)
    frozen = Layer().requires_grad_(False)
    frozen.experts.down_proj.requires_grad_(True)
    with fp8.convert(frozen).microbatch():
        frozen(*arguments).sum().backward()
    assert frozen.experts.gate_up_proj.grad is None and frozen.experts.down_proj.grad.any()


def test_views_that_fsdp1_keeps_in_place_of_parameters_train() -> None:
    """With `use_orig_params=False` a module has no parameters of its own, and new views at will."""
    arguments = noise(len(CHOSEN), WIDTH, seed=1), noise(*CHOSEN.shape, seed=2)
    found = []
    for is_viewed in (False, True):
        layer = Layer()
        state = fp8.convert(layer)
        flat = {n: layer.experts._parameters[n].flatten() for n in fused.PROJECTIONS}
        for is_first in (True, False):
            for name, whole in flat.items() if is_viewed else ():
                shape = getattr(layer.experts, name).shape
                layer.experts._parameters.pop(name, None)
                setattr(layer.experts, name, whole.view(shape))
            with state.microbatch(first=is_first):
                layer(*arguments).square().sum().backward()
        found.append(state.state_dict())
    assert all(torch.equal(found[1][key], saved) for key, saved in found[0].items())


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_weight_that_is_parametrized_later_is_read_as_it_is_then() -> None:
    layer, twice = Layer(), Layer()
    states = [fp8.convert(model) for model in (layer, twice)]
    register_parametrization(layer.experts, "down_proj", Doubled())
    with torch.no_grad():
        twice.experts.down_proj.mul_(2)
    arguments = noise(len(CHOSEN), WIDTH, seed=1), noise(*CHOSEN.shape, seed=2)
    for first in (True, False):
        outs = []
        for model, state in zip((layer, twice), states, strict=True):
            with state.microbatch(first=first):
                outs.append(model(*arguments))
                outs[-1].sum().backward()
        assert torch.equal(*outs)
    original = layer.experts.parametrizations.down_proj.original
    assert torch.equal(original.grad, 2 * twice.experts.down_proj.grad)
    assert states[0].scales() == states[1].scales()


def test_single_experts_stay_by_pattern_or_rule_and_all_by_a_function() -> None:
    rule = fp8.ModuleRule("*.experts.1.down_proj", "high_precision")
    recipe = fp8.Fp8Recipe(name="tensorwise", modules=(rule,))
    model, fewer = mixtral(), mixtral()
    state = fp8.convert(model, recipe, skip=["lm_head", "*.experts.3"])
    train(model, state, range(2))
    left = {n for n in fp8.convert(fewer, skip="lm_head").linears if n not in state.linears}
    places = ("1.down_proj", "3.down_proj", "3.gate_up_proj")
    assert left == {f"model.layers.{i}.mlp.experts.{p}" for i in range(2) for p in places}
    assert "model.layers.*.mlp.experts.*.gate_up_proj" in repr(state).splitlines()[2]
    again = fp8.convert(model, "rowwise", skip=["lm_head", *state.linears])
    assert again.linears.keys() == left
    train(model, again, [0])
    with pytest.raises(fp8.Fp8Error, match="experts.0.gate_up_proj: is converted to FP8 already"):
        fp8.convert(model, skip=["lm_head", "*.self_attn"])
    for skip in ("*.experts", lambda name, module: name.endswith("experts")):
        model = mixtral()
        state = fp8.convert(model, skip=skip)
        assert not any(".experts" in name for name in state.linears)
        assert "Fp8" not in type(model.model.layers[0].mlp.experts).__name__
        assert "routers: model.layers.*.mlp.gate.weight" in repr(state)


class Otherwise(nn.Module):
    """Experts of the same parameters that compute what `change` makes of it."""

    def __init__(self, change: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 32))
        self.down_proj = nn.Parameter(torch.zeros(4, 32, 32))
        self.act_fn, self.change = nn.SiLU(), change

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        chosen_TKND = self.gate_up_proj[top_k_index]
        gate, up = torch.einsum("tknd,td->tkn", chosen_TKND, hidden_states).chunk(2, -1)
        return self.change(self, gate, up, self.down_proj[top_k_index], top_k_weights)


def summed(inner: torch.Tensor, down: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tkf,tkdf,tk->td", inner, down, weights)


CHANGES: dict[str, tuple[Callable[..., torch.Tensor], str | None]] = {
    "none": (lambda m, g, u, down, p: summed(F.silu(g) * u, down, p), None),
    "gate and up exchanged": (lambda m, g, u, down, p: summed(g * F.silu(u), down, p), "otherwise"),
    "limited": (lambda m, g, u, down, p: summed(F.silu(g.clamp(max=7)) * u, down, p), "otherwise"),
    "without weights": (
        lambda m, g, u, down, p: summed(F.silu(g) * u, down, torch.ones_like(p)), "otherwise"
    ),
    "error": (lambda m, g, u, down, p: m.nothing, "fails on small experts .AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_experts_that_compute_otherwise_are_refused_by_name(change: str) -> None:
    compute, refusal = CHANGES[change]
    model = nn.ModuleDict({"experts": Otherwise(compute), "linear": nn.Linear(32, 32)})
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    if refusal is None:
        assert len(fp8.convert(model).linears) == 9
    else:
        with pytest.raises(
            fp8.Fp8Error, match=f"And the experts of experts are.*{refusal}"
        ) as caught:
            fp8.convert(model)
        assert fp8.convert(model, skip=suggested(caught.value)).linears.keys() == {"linear"}
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == before


def suggested(error: fp8.Fp8Error) -> Any:
    """Return the `skip` that an error's hint has, as a user pastes it."""
    found = re.search(r"skip=(\[.*?\]|'[^']*')", error.hint)
    assert found is not None, error
    return ast.literal_eval(found[1])


def test_other_layouts_of_experts_are_refused_with_their_reasons() -> None:
    model = mixture("GptOss")
    with pytest.raises(fp8.Fp8Error) as caught:
        fp8.convert(model, skip="lm_head")
    assert (
        "And the experts of model.layers.*.mlp.experts are not converted: its weights lie as "
        "[in, out], its rows of gate and up are interleaved, it has biases" in str(caught.value)
    )
    assert not any(isinstance(module, Converted) for module in model.modules())
    assert suggested(caught.value) == ["lm_head", "*.experts", "*.router"]
    assert fp8.convert(model, skip=suggested(caught.value)).linears


def test_sizes_and_dtypes_of_experts_are_checked_as_those_of_linears() -> None:
    with pytest.raises(
        fp8.Fp8Error, match="experts.0.gate_up_proj: its weight is 128 x 32, and bl"
    ):
        fp8.convert(mixtral(), "blockwise", skip=["lm_head", "*.self_attn"])
    double = Layer().double()
    with pytest.raises(fp8.Fp8Error, match="experts.0.gate_up_proj: its weight is torch.float64"):
        fp8.convert(double)
    tied = nn.ModuleDict({"a": Layer().experts, "b": Layer().experts})
    tied.b.down_proj = tied.a.down_proj
    with pytest.raises(
        fp8.Fp8Error, match="a.0.down_proj: its weight is shared, as a.down_proj, b"
    ):
        fp8.convert(tied)
    replaced = Layer()
    replaced.experts.forward = lambda *args, run=replaced.experts.forward: run(*args)
    with pytest.raises(fp8.Fp8Error, match="Conv1D, and the experts of experts are not .*replaced"):
        fp8.convert(replaced)
