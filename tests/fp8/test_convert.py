"""What conversion leaves as it was, what it refuses, and how a converted model is used."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune

from fp8_coverage.flops import FLOPS
from fp8_numerics.formats import E4M3
from megafp8 import fp8
from megafp8.fp8 import converted as modules_of_others
from megafp8.fp8 import engine
from megafp8.fp8.converted import MULTIPLYING, Converted
from megafp8.ops import torch_private
from megafp8.specs.run import HealthSpec
from tests.fp8.models import (
    deepseek_v3,
    gpt2,
    llama,
    mixtral,
    mixture,
    mlp,
    noise,
    old_weight_norm,
    train,
)

STEPS = range(16)


def step(model: nn.Module, state: fp8.Fp8State, seed: int = 0, *, first: bool = True) -> None:
    with state.microbatch(first=first):
        model(noise(8, 32, seed=seed)).square().mean().backward()


def test_the_package_alone_loads_no_torch() -> None:
    program = "import sys, megafp8; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("make", [gpt2, llama], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_model_of_transformers_trains_as_in_high_precision(
    make: Callable[[], nn.Module], recipe: Any
) -> None:
    plain, model = make(), make()
    state = fp8.convert(model, recipe, skip="lm_head")
    assert len(state.linears) == (8 if make is gpt2 else 14)
    expected, got = train(plain, None, STEPS), train(model, state, STEPS)
    assert got != expected
    assert expected[-1] < expected[0] - 0.5
    for high, low in zip(expected, got, strict=True):
        assert low == pytest.approx(high, rel=0.03)  # half of E4M3's relative spacing of 2**-4
    assert state.counter.share("fp8") == 1


def test_a_tied_head_is_refused_and_nothing_is_converted() -> None:
    model = gpt2()
    with pytest.raises(fp8.Fp8Error, match="lm_head: its weight is shared, as transformer.wte"):
        fp8.convert(model)
    assert not any(isinstance(module, Converted) for module in model.modules())


def test_a_converted_model_looks_as_before() -> None:
    model = llama()
    before, parameters = model.state_dict(), dict(model.named_parameters())
    hooked: list[str] = []
    linear = model.model.layers[0].mlp.up_proj
    linear.register_forward_hook(lambda *_: hooked.append("hook"))
    state = fp8.convert(model, skip=["lm_head", "model.layers.1"])
    assert isinstance(linear, nn.Linear) and isinstance(linear, fp8.Fp8Linear)
    assert "fp8=delayed" in repr(linear)
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    assert set(state.linears) == {n for n in state.linears if n.startswith("model.layers.0.")}
    assert list(model.state_dict()) == list(before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    llama().load_state_dict(model.state_dict())
    train(model, state, [0])
    assert hooked == ["hook"]
    assert not model.eval().training and not linear.training
    assert model.to(torch.bfloat16).model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    losses = train(model.train(), state, [1])
    assert losses[0] == losses[0]


def pruned(change: Callable[[nn.Module], Any]) -> nn.Module:
    """An MLP whose second linear was changed."""
    model = mlp()
    change(model[2])
    return model


def replace_forward(linear: nn.Module) -> None:
    """As the hooks of accelerate and many tracers do."""
    linear.forward = lambda x, before=linear.forward: before(x)


def as_buffer(linear: nn.Module) -> None:
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)


def without_weight(linear: nn.Module) -> None:
    del linear.weight


class Wrapped(torch.Tensor):
    """A tensor that answers operations itself, as quantized weights of others do."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


class FarAway(nn.Parameter):
    """A parameter that says that it lies on another device."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def wrap_weight(linear: nn.Module) -> None:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Wrapped))


class Shared(nn.Module):
    """One linear at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = self.a


def converted() -> nn.Module:
    model = mlp()
    fp8.convert(model, skip="0")
    return model


class Doubled(nn.Linear):
    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x_TI)


IDLE: dict[str, Any] = {
    "margin": 2, "interval": 3, "amax_history_len": 4, "amax_compute_algo": "most_recent",
    "reduce_amax": False,
}  # fmt: skip
"""Options of delayed scaling, which other recipes do not read."""


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no linear": (lambda: nn.Conv1d(1, 1, 1), {}, "model: Conv1d has neither an nn.Linear"),
    "no module": (lambda: "gpt2", {}, "model: is a str"),
    "recipe": (mlp, {"recipe": "delayd"}, "recipe='delayd': .*Did you mean 'delayed'"),
    "no recipe": (mlp, {"recipe": 8}, "recipe=8: is neither a name nor an Fp8Recipe"),
    "size": (lambda: nn.Linear(24, 16), {}, "linear: its weight is 16 x 24, .* multiples of 16"),
    "padding": (
        lambda: nn.Linear(24, 16),
        {"recipe": "rowwise"},
        r"Use dataclasses.replace\(fp8.recipe_named\('rowwise'\), pad_inner_dim=True\), or",
    ),
    "padding of a recipe": (
        lambda: nn.Linear(24, 16),
        {"recipe": fp8.Fp8Recipe(amax_history_len=16)},
        r"Use dataclasses.replace\(recipe, pad_inner_dim=True\), or",
    ),
    "format of rules": (
        mlp,
        {"recipe": fp8.Fp8Recipe(
            modules=(fp8.ModuleRule("2", "mxfp8"),), modules_backward_format="e4m3"
        )},
        "recipe.modules_backward_format='e4m3': has no effect without a rule",
    ),
    "block": (mlp, {"recipe": "blockwise"}, "0: its weight is 64 x 32, .* multiples of 128"),
    "converted": (converted, {}, "2: is converted to FP8 already"),
    "shared": (Shared, {}, "a: its weight is shared, as a.weight, b.weight"),
    "skip": (mlp, {"skip": ["3"]}, "skip='3': matches no linear"),
    "skip of a number": (mlp, {"skip": 3}, "skip=3: is neither names nor a function"),
    "skip with a number": (mlp, {"skip": ["0", 3]}, "skip=.'0', 3.: is neither names nor a func"),
    "skip all": (mlp, {"skip": "*"}, "skip: leaves no linear"),
    "skip all by function": (mlp, {"skip": lambda name, module: True}, "skip: leaves no linear"),
    "subclass": (
        lambda: nn.MultiheadAttention(16, 2), {}, "out_proj: is a NonDynamicallyQuantizableLinear"
    ),
    "own forward": (lambda: Doubled(16, 16), {}, "linear: is a Doubled, a subclass of nn.Linear"),
    "lazy": (lambda: nn.LazyLinear(16), {}, "linear: is a LazyLinear, a subclass of nn.Linear"),
    "fast path": (
        lambda: nn.TransformerEncoderLayer(16, 2, 16), {"skip": "self_attn"},
        "model: evaluation of an nn.TransformerEncoderLayer bypasses",
    ),
    "dtype": (lambda: mlp().double(), {}, "0: its weight is torch.float64"),
    "dtype of one": (lambda: pruned(lambda m: m.double()), {}, "2: its weight is .*float64"),
    "forward": (
        lambda: pruned(replace_forward), {}, "2: its forward is replaced by .*, or use skip='2'"
    ),
    "pruned": (
        lambda: pruned(lambda m: prune.l1_unstructured(m, "weight", 0.5)), {},
        "2: its weight is no parameter but a Tensor that is computed .*prune.remove.* skip='2'",
    ),
    "weight_norm": (lambda: pruned(old_weight_norm), {}, "2: its weight is no param.* skip='2'"),
    "spectral_norm": (
        lambda: pruned(torch.nn.utils.spectral_norm), {}, "2: its weight is no param.* skip='2'"
    ),
    "parametrized": (
        lambda: pruned(torch.nn.utils.parametrizations.weight_norm), {},
        "2: its weight is no param.* remove_parametrizations .*, or use skip='2'",
    ),
    "buffer": (
        lambda: pruned(as_buffer), {}, "2: its weight is no parameter but a Tensor. Make it an nn"
    ),
    "without weight": (
        lambda: pruned(without_weight), {}, "2: its weight is no parameter but a NoneType"
    ),
    "wrapped": (
        lambda: pruned(wrap_weight), {}, "2: its weight is a Wrapped, which has no numbers"
    ),
    "two devices": (
        lambda: pruned(lambda m: setattr(m, "weight", FarAway(m.weight.detach()))), {},
        "2: lies on cuda:0, while 0 lies on cpu",
    ),
    "rule": (
        mlp, {"recipe": fp8.Fp8Recipe(modules=(fp8.ModuleRule("fc*", "rowwise"),))},
        "recipe.modules pattern 'fc\\*': matches no linear",
    ),
    "all high": (
        mlp, {"recipe": fp8.Fp8Recipe(modules=(fp8.ModuleRule("*", "high_precision"),))},
        "every linear stays in high precision",
    ),
    "stored": (mlp, {"recipe": fp8.Fp8Recipe(params_in_fp8=True)}, "recipe.params_in_fp8=True"),
    "history": (mlp, {"recipe": fp8.Fp8Recipe(amax_history_len=0)}, "amax_history_len=0"),
    "margin": (mlp, {"recipe": fp8.Fp8Recipe(margin=3000)}, "margin=3000: must be a whole number"),
    "products": (
        mlp, {"recipe": fp8.Fp8Recipe(high_precision_gemms=frozenset({"foo"}))},
        "high_precision_gemms=.*'foo'.*: must be a frozenset of output, ",
    ),
    **{
        f"idle {option}": (
            mlp, {"recipe": fp8.Fp8Recipe(name="rowwise", **{option: value})},
            f"recipe.{option}={value!r}: has no effect: rowwise takes scales from the tensor",
        )
        for option, value in IDLE.items()
    },
    "idle history": (
        mlp,
        {"recipe": fp8.Fp8Recipe(amax_history_len=4, amax_compute_algo="most_recent")},
        "amax_history_len=4: has no effect with amax_compute_algo='most_recent'",
    ),
    "format": (mlp, {"recipe": fp8.Fp8Recipe(forward_format="e3m4")}, "forward_format='e3m4'"),
    "gradients": (
        mlp, {"recipe": fp8.Fp8Recipe(name="mxfp8", backward_format="e5m2")},
        "backward_format='e5m2': is no format that mxfp8 has for gradients.*'e4m3'",
    ),
    "power of two": (mlp, {"recipe": fp8.Fp8Recipe(power_2_scale=True)}, "power_2_scale=True"),
    "group": (mlp, {"recipe": "rowwise", "amax_group": object()}, "amax_group: recipe rowwise"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_error(case: tuple[Callable[[], Any], dict[str, Any], str]) -> None:
    make, arguments, message = case
    model = make()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [(type(module), set(vars(module))) for module in modules]
    with pytest.raises(fp8.Fp8Error, match=message) as caught:
        fp8.convert(model, **arguments)
    assert [(type(module), set(vars(module))) for module in modules] == before
    skip = re.search(r"skip=(\['.*?'\]|'[^']*')", caught.value.hint)
    if skip is not None and not arguments and len(modules) == 4:  # the MLP: one linear is left
        assert fp8.convert(model, skip=ast.literal_eval(skip[1])).linears.keys() == {"0"}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "mxfp8", "nvfp4"])
def test_a_dtype_of_later_is_refused_as_conversion_does(recipe: Any) -> None:
    model = mlp()
    state = fp8.convert(model, recipe)
    for dtype in (torch.float64, torch.float8_e4m3fn):
        model.to(dtype)
        x = noise(16, 32, seed=0).to(dtype)
        for context in (state.microbatch(), state.evaluation(), torch.no_grad()):
            with pytest.raises(fp8.Fp8Error, match=f"0: its weight is {dtype}") as caught, context:
                model(x)
            assert caught.value.hint == "Use FP32, BF16 or FP16, or skip it in fp8.convert"
    model.half()
    with state.microbatch():
        model(noise(16, 32, seed=0, dtype=torch.float16)).sum().backward()


def test_tensor_parallelism_of_dtensor_is_refused_by_name() -> None:
    model = mlp()
    state = fp8.convert(model, "tensorwise")
    torch_private.join_simulated_group(rank=0, world_size=2)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        weight = model.get_parameter("0.weight").data
        part = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        model.get_submodule("0").register_parameter("weight", nn.Parameter(part))
        with pytest.raises(fp8.Fp8Error, match="0: its weight is a DTensor"), state.microbatch():
            model(noise(16, 32, seed=0))
    finally:
        torch.distributed.destroy_process_group()


class Fused(nn.Module):
    """Attention's three projections by one product of their weights, as some models do it."""

    def __init__(self, join: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.spare = (nn.Linear(32, 32) for _ in range(5))
        self.join = join
        self.register_buffer("mask", torch.ones(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.join is None:
            weights = [each.weight for each in (self.q, self.k, self.v)]
            q, k, v = F.linear(x, torch.cat(weights)).chunk(3, -1)
        else:
            q, k, v = self.join(self, x), self.k(x), self.v(x)
        out: torch.Tensor = self.o(q.sigmoid() * k + v)
        return out


READS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.q.weight, m.q.bias),
    "product": lambda m, x: x @ m.q.weight.t(),
    "cast": lambda m, x: F.linear(x.bfloat16(), m.q.weight.bfloat16()).float(),
    "masked": lambda m, x: F.linear(x, m.q.weight * m.mask),
    "a part": lambda m, x: F.pad(F.linear(x, m.q.weight[:16]), (0, 16)),
    "einsum": lambda m, x: torch.einsum("ti,oi->to", x, m.q.weight),
    "addmm": lambda m, x: torch.addmm(x, x, m.q.weight),
    "batched": lambda m, x: torch.bmm(x[None], m.q.weight[None])[0],
    "stacked": lambda m, x: torch.matmul(x, torch.stack([m.q.weight, m.q.weight]))[0],
    "autocast": lambda m, x: _under_autocast(lambda: F.linear(x, m.q.weight)).float(),
    "detached": lambda m, x: F.linear(x, m.q.weight.detach()),
    "recomputed": lambda m, x: torch.utils.checkpoint.checkpoint(
        lambda y: F.linear(y, m.q.weight), x, use_reentrant=True
    ),
}  # fmt: skip


def _under_autocast(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return compute()


@pytest.mark.parametrize("join", READS.values(), ids=READS)
def test_a_weight_that_a_product_in_high_precision_reads_is_an_error(join: Any) -> None:
    model = Fused(join)
    state = fp8.convert(model, "tensorwise", skip=["spare"])
    with pytest.raises(fp8.Fp8Error, match="^q: converted, but other code multiplies") as caught:
        with state.microbatch():
            model(noise(16, 32, seed=0).requires_grad_()).sum().backward()
    assert "skip=['spare', 'q']" in caught.value.hint
    again = Fused(join)
    with fp8.convert(again, "tensorwise", skip=["spare", "q"]).microbatch():
        again(noise(16, 32, seed=0).requires_grad_()).sum().backward()


def test_linears_whose_weights_other_code_reads_are_named() -> None:
    """In the first microbatch that has products; what was not called at all is no error."""
    model = Fused()
    state = fp8.convert(model, "tensorwise")
    with state.microbatch():
        pass
    with state.evaluation(), torch.no_grad():
        model(noise(16, 32, seed=0))
    with pytest.raises(fp8.Fp8Error, match="^q, k, v: converted, but other code multiplies"):
        with state.microbatch():
            model(noise(16, 32, seed=0)).sum().backward()
    assert state.share == 3 / 9  # o alone: the others have two products each, o also its input's
    assert "; never called so far: q, k, v, spare\n" in repr(state)
    with state.health() as report, state.microbatch():
        model(noise(16, 32, seed=0)).sum().backward()
    never = dict.fromkeys(("q", "k", "v", "spare"), "the linear was never called, so FP8 never ran")
    assert report.complaints() == never
    with state.microbatch():
        model.q(noise(16, 32, seed=0))
    assert "; never called so far: k, v, spare\n" in repr(state)


def test_a_weight_that_is_read_later_on_is_a_warning() -> None:
    """A linear that runs first and is bypassed later has its gradient from both, and no warning."""
    model = Fused(lambda m, x: x)
    state = fp8.convert(model, "tensorwise")

    def run() -> None:
        with state.microbatch():
            model(noise(16, 32, seed=0)).sum().backward()

    run()
    model.join = READS["linear"]
    run()  # its gradient appears
    with pytest.warns(UserWarning, match="^q: converted, but other code multiplies"):
        run()
    run()


def test_products_of_another_thread_hide_no_bypass() -> None:
    model = Fused(lambda m, x: x)
    state = fp8.convert(model, "tensorwise")
    model.join = READS["linear"]
    multiplies, ends = Event(), Event()

    def other_model() -> None:
        MULTIPLYING.depth += 1
        multiplies.set()
        ends.wait()

    thread = Thread(target=other_model)
    thread.start()
    multiplies.wait()
    try:
        with pytest.raises(fp8.Fp8Error, match="^q: converted, but other code multiplies"):
            with state.microbatch():
                model(noise(16, 32, seed=0)).sum().backward()
    finally:
        ends.set()
        thread.join()


def dropped(model: Fused, x: torch.Tensor) -> torch.Tensor:
    return x


def penalized(model: Fused, x: torch.Tensor) -> torch.Tensor:
    weight = model.q.weight
    return x + weight.square().mean() + (weight @ weight.t()).sum()


def read_beside(model: Fused, x: torch.Tensor) -> torch.Tensor:
    """A metric, or DoRA's norm, beside the linear's own product."""
    with torch.no_grad():
        F.linear(x, model.q.weight)
    out: torch.Tensor = model.q(x)
    return out


def looked_up(model: Fused, x: torch.Tensor) -> torch.Tensor:
    """A row of a weight is added, as of an embedding; no product reads it."""
    return x + model.q.weight[torch.zeros(16, dtype=torch.long)]


@pytest.mark.parametrize("join", [dropped, penalized, read_beside, looked_up])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_linear_that_did_not_run_is_no_alarm(
    join: Any, is_frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Fused(join)
    state = fp8.convert(model, "tensorwise")
    model.q.requires_grad_(not is_frozen)
    for first in (True, False, True):
        with state.microbatch(first=first):
            x = noise(16, 32, seed=0)
            torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)
            model(x).sum().backward()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("make", "skip", "share"),
    [
        (gpt2, "lm_head", 1.0),
        (llama, "lm_head", 1.0),
        (mixtral, "lm_head", 0.992),
        (mixtral, ["lm_head", "*.experts", "*.gate"], 0.198),
        (deepseek_v3, "lm_head", 0.987),
        (deepseek_v3, ["lm_head", "*.experts"], 0.671),
    ],
)
def test_the_share_has_all_products_that_ran(
    make: Callable[[], nn.Module], skip: Any, share: float
) -> None:
    """As `fp8.coverage` counts it; the counter of converted linears says 1 of each of them."""
    model = make()
    state = fp8.convert(model, "tensorwise", skip=skip)
    assert state.share is None
    train(model, state, [0])
    assert state.counter.share("fp8") == 1
    assert state.share == pytest.approx(share, abs=5e-4)
    assert f"; {share:.1%} of the FLOPs of the first microbatch ran in FP8" in repr(state)
    with fp8.coverage(model) as recorded:
        train(model, state, [1])
    assert recorded.share == pytest.approx(state.share, rel=1e-3)  # tokens choose other experts
    recorded.assert_at_least(share - 0.01)
    assert any("mlp.gate" in line for line in recorded.missing()) == (share < 1)
    if share < 0.85:
        with pytest.raises(AssertionError, match="ran in FP8"):
            recorded.assert_at_least(0.85)


def test_a_question_ends_a_message() -> None:
    with pytest.raises(fp8.Fp8Error, match=r"Did you mean 'delayed'\?$"):
        fp8.convert(nn.Sequential(nn.Linear(16, 16)), "delay")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("skip", "share"), [((), 1.0), ("qkv", 3 / 15)])
def test_what_checkpointing_computes_again_is_counted_by_its_kind(
    use_reentrant: bool, skip: Any, share: float
) -> None:
    """Attention is left out; of the linears `qkv` has four products of three parts, `o` three."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

        def attend(self, x_BSI: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*self.qkv(x_BSI).chunk(3, dim=-1))

        def forward(self, x_BSI: torch.Tensor) -> torch.Tensor:
            again = torch.utils.checkpoint.checkpoint(
                self.attend, x_BSI, use_reentrant=use_reentrant
            )
            return cast("torch.Tensor", self.o(again))

    state = fp8.convert(model := Attention(), "tensorwise", skip=skip)
    with state.microbatch(), fp8.coverage(model) as recorded:
        model(noise(16, 32, seed=0)[None].requires_grad_()).sum().backward()
    assert state.share == recorded.share == share


def test_a_converted_output_layer_is_left_out_of_the_share() -> None:
    """As `fp8.coverage` leaves it out; other linears have a quarter of what is left."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 64)
            self.other = nn.Linear(32, 96)

        def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
            hidden_TI: torch.Tensor = self.inner(x_TI)
            return torch.cat([self.lm_head(hidden_TI), self.other(hidden_TI)], 1)

    state = fp8.convert(model := Headed(), "tensorwise", skip="other")
    for recorded in (contextlib.nullcontext(), fp8.coverage(model)):
        with state.microbatch(), recorded as counted:
            model(noise(16, 32, seed=0).requires_grad_()).sum().backward()
    assert state.share == counted.share == 0.25
    assert state.counter.share("fp8") == 1 and "lm_head" in repr(state)


class Named(nn.Linear):
    """A subclass as of a framework that gives its linears something of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.place = "encoder"


def test_a_subclass_that_computes_as_nn_linear_is_converted() -> None:
    layer = Named(32)
    plain = nn.Linear(32, 32)
    plain.load_state_dict(layer.state_dict())
    for each in (layer, plain):
        step(each, fp8.convert(each, "tensorwise"))
    assert isinstance(layer, Named) and layer.place == "encoder"
    assert layer.weight.grad is not None and plain.weight.grad is not None
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_linears_of_another_state_do_not_lower_the_share() -> None:
    """As of a generator and a discriminator, of which each has a state."""
    both = [nn.Linear(32, 64), nn.Linear(64, 32)]
    first, second = (fp8.convert(each, "tensorwise") for each in both)
    with first.microbatch(), second.microbatch():
        both[1](both[0](noise(16, 32, seed=0))).sum().backward()
    assert first.share == second.share == 1


TRACERS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "torch.jit": torch.jit.trace,
    "torch.fx": lambda model, x: torch.fx.symbolic_trace(model),
    "torch.export": lambda model, x: torch.export.export(model, (x,)),
}


@pytest.mark.parametrize("name", TRACERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_traces_a_model_is_told_to_take_one_that_was_not_converted(name: str) -> None:
    fp8.convert(model := mlp(), "tensorwise")
    with pytest.raises(fp8.Fp8Error, match=r"0: torch.export.* Export a model that was not conv"):
        TRACERS[name](model, noise(16, 32, seed=0))


def test_a_share_with_a_product_that_cannot_be_counted_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **words: object) -> int:
        raise ValueError("a form of the operation that is not known")

    monkeypatch.setitem(FLOPS, torch.ops.aten.mm, fail)
    state = fp8.convert(model := Fused(lambda m, x: m.q(x)), "tensorwise")
    with state.microbatch():
        model(noise(16, 32, seed=0)).sum().backward()
        noise(16, 32, seed=0) @ noise(32, 16, seed=0)
    assert state.share is None and "first microbatch" not in repr(state)


def test_a_model_that_is_converted_in_inference_mode_trains() -> None:
    model = nn.Linear(32, 32)
    with torch.inference_mode():
        state = fp8.convert(model, "delayed")
    with state.microbatch():
        model(noise(16, 32, seed=0)).sum().backward()
    assert state.scales()["linear.weight"].num_updates == 1


RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_defaults_of_torch_change_no_bit(recipe: Any) -> None:
    """Models are often made and converted where BF16 is the default dtype, or meta the device."""

    inputs = [noise(128, 128, seed=seed) for seed in range(2)]

    def trained(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        try:
            torch.set_default_dtype(dtype)
            with torch.device(device):
                state = fp8.convert(model, recipe)
            for x in inputs:
                with state.health() as report, state.microbatch():
                    model(x).sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        assert report.tensors
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    usual = trained(torch.float32, "cpu")
    for other in (trained(torch.bfloat16, "meta"), trained(torch.float64, "cpu")):
        assert len(usual) == 4 and all(map(torch.equal, usual, other))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_watching_the_first_microbatch_leaves_compilation_as_it_is() -> None:
    """In a mode of torch's that says nothing of it, a frame would be left uncompiled for good."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Fused(lambda model, x: model.q(x))
    state = fp8.convert(model, "tensorwise")
    with state.microbatch():
        torch.compile(model, backend=backend)(noise(8, 32, seed=0)).sum().backward()
    assert graphs


class Experts(nn.Module):
    """A layer of a mixture, with experts that are one parameter, and a position's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 16)
        self.up, self.down = (nn.Parameter(torch.zeros(4, 32, 32)) for _ in range(2))
        self.position = nn.Parameter(torch.zeros(1, 8, 32))


def suggested(error: fp8.Fp8Error) -> Any:
    """Return the `skip` that an error's hint has, as a user pastes it."""
    found = re.search(r"skip=(\[.*?\]|'[^']*')", error.hint)
    assert found is not None, error
    return ast.literal_eval(found[1])


def test_what_is_neither_converted_nor_skipped_is_refused_with_its_share() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(3))})
    model["lm_head"] = nn.Linear(32, 64)
    total = sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(fp8.Fp8Error, match="^layers.*.up: would stay in high prec") as caught:
        fp8.convert(model, "rowwise", skip="layers.1")
    share = f"{2 * 4096 / total:.1%}"
    for name in ("up", "down"):
        assert f"layers.*.{name} (4 x 32 x 32) with {share}" in str(caught.value)
    skip = suggested(caught.value)
    assert skip == ["layers.1", "*.up", "*.down"]  # and what was skipped before
    assert not any(isinstance(module, Converted) for module in model.modules())
    state = fp8.convert(model, "rowwise", skip=skip)
    left = f"{(512 + 6 * 4096) / total:.1%}"
    assert repr(state).splitlines() == [
        f"converted: 3 Linear; {(2 * 512 + 2048) / total:.1%} of the parameters; among them the "
        "output layer: lm_head; among them routers or gates: layers.*.router",
        "recipe: 3 rowwise",
        f"stays in high precision: layers.1.router, layers.*.up, layers.*.down ({left}); "
        f"embeddings: layers.*.position ({3 * 256 / total:.1%})",
    ]
    with torch.no_grad():
        model["lm_head"](noise(8, 32, seed=0))
    assert "; never called so far: layers.*.router\n" in repr(state)
    mixed = mlp()
    state = fp8.convert(mixed, "rowwise")
    with torch.no_grad():
        mixed[0](noise(8, 32, seed=0))
    assert repr(state).splitlines()[0].endswith("; never called so far: 2")


def holder(**weights: torch.Tensor) -> nn.Module:
    """A module with weights of its own beside a linear."""
    module = nn.Module()
    module.linear = nn.Linear(32, 32)
    for name, weight in weights.items():
        module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    return module


def with_buffer() -> nn.Module:
    module = holder()
    module.register_buffer("qweight", torch.zeros(32, 32, dtype=torch.int8))
    module.register_buffer("mask", torch.zeros(32, 32))
    return module


def with_alias() -> nn.Module:
    """A weight under two names, the second of which a pattern names."""
    module = holder(first=torch.zeros(32, 32))
    module.second = module.first
    return module


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def beside(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.Linear(32, 32))


LEFT: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "frozen": (lambda: holder(other=torch.zeros(16, 32)), "other"),
    "experts": (lambda: holder(experts=torch.zeros(4, 32, 32)), "experts"),
    "meta": (lambda: on_meta(lambda: holder(other=torch.zeros(16, 32))), "other"),
    "buffer": (with_buffer, "qweight"),
    "alias": (with_alias, "first"),
    "position in a word": (lambda: holder(proposal=torch.zeros(16, 32)), "proposal"),
    "inside of embeddings": (
        lambda: nn.ModuleDict({"patch_embed": nn.Conv2d(3, 32, 4), "linear": nn.Linear(32, 32)}),
        "patch_embed",
    ),
    "convolution": (lambda: beside(nn.Conv2d(3, 32, 4)), "0"),
    "recurrent": (lambda: beside(nn.LSTM(32, 32)), "0"),
    "lazy": (lambda: beside(nn.LazyConv1d(4, 1)), "0"),
    "parametrized": (
        lambda: beside(torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 32, 3))), "0"
    ),
    "attention": (lambda: beside(nn.MultiheadAttention(32, 2)), "0"),
    "in a linear": (
        lambda: nn.Sequential(pruned(lambda m: setattr(m, "a", nn.Parameter(torch.zeros(4, 4))))),
        "0.2.a",
    ),
    "many": (
        lambda: nn.Sequential(*(beside(nn.Conv1d(32, 32, 3)) for _ in range(3)), nn.Linear(32, 40)),
        ["3", "*.0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_a_weight_outside_of_linears_is_named_with_a_skip_that_fits(case: Any) -> None:
    make, skip = case
    model = make()
    with pytest.raises(fp8.Fp8Error) as caught:
        fp8.convert(model)
    assert suggested(caught.value) == skip
    before = set(state_names(model))
    state = fp8.convert(model, skip=suggested(caught.value))
    assert state.linears and set(state_names(model)) == before


def state_names(model: nn.Module) -> list[str]:
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: holder(
            vector=torch.zeros(32), column=torch.zeros(32, 1), row=torch.zeros(1, 1, 32)
        ),
        lambda: holder(pos_embed=torch.zeros(1, 8, 32), position=torch.zeros(8, 32)),
        lambda: holder(relative_position_bias_table=torch.zeros(9, 2)),
        lambda: beside(nn.Embedding(16, 32)),
        lambda: beside(nn.EmbeddingBag(16, 32)),
        lambda: beside(nn.Sequential(nn.LayerNorm(32), nn.BatchNorm1d(32), nn.PReLU(32))),
        gpt2,
        llama,
    ],
)
def test_vectors_and_embeddings_need_no_skip(make: Callable[[], nn.Module]) -> None:
    model = make()
    has_head = any(name == "lm_head" for name, _ in model.named_modules())
    fp8.convert(model, skip="lm_head" if has_head else ())


def test_a_function_skips_other_weights_by_the_module_that_holds_them() -> None:
    """It is asked about them where there are any, so that one for linears alone stays valid."""
    asked = []

    def skip(name: str, module: nn.Module) -> bool:
        asked.append(name)
        return name.endswith("experts")

    with pytest.raises(fp8.Fp8Error, match=r"also returns True for \*.router\.$"):
        fp8.convert(mixture("GptOss"), "tensorwise", skip=skip)
    model = mixture("GptOss")
    state = fp8.convert(model, "tensorwise", skip=lambda n, m: skip(n, m) or n.endswith("router"))
    assert "lm_head" in state.linears and "model.layers.0.mlp.experts" in asked
    assert fp8.convert(llama(), skip=lambda name, linear: linear.out_features == 64).linears


def test_a_converted_output_layer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """And a router, by its name; a layer of another name by its shape, that of the embedding."""
    fp8.convert(llama(), skip="lm_head")
    fp8.convert(nn.ModuleDict({"gate": nn.Linear(32, 64), "gate_proj": nn.Linear(64, 32)}))
    assert not [text for text in caplog.messages if text.startswith("fp8.convert: ")]
    fp8.convert(llama())
    fp8.convert(nn.Sequential(nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48)))
    fp8.convert(nn.ModuleList(Experts() for _ in range(2)), skip=["*.up", "*.down"])
    said = [text for text in caplog.messages if text.startswith("fp8.convert: ")]
    assert (
        "lm_head, the output layer, is converted too" in said[0] and "skip=['lm_head']" in said[0]
    )
    assert "2, the output layer, is converted too" in said[1] and "skip=['2']" in said[1]
    assert "*.router, by its name a router or gate," in said[2]
    assert "skip=['*.up', '*.down', '*.router']" in said[2] and len(said) == 3


def test_a_trainer_without_its_callback_is_told_of_it() -> None:
    model = mlp()
    fp8.convert(model)
    with pytest.raises(fp8.Fp8Error, match="callbacks=.Fp8Callback.state.. of megafp8.fp8.train"):
        model(noise(8, 32, seed=0))


def test_hooks_that_replace_a_forward_after_the_conversion_keep_fp8() -> None:
    model = mlp()
    state = fp8.convert(model, "tensorwise")
    replace_forward(model[2])
    step(model, state)
    assert state.counter.share("fp8") == 1 and "never called" not in repr(state)


def test_the_rest_of_a_model_may_get_another_recipe() -> None:
    """By rules, or by two conversions; a size that is padded is taken."""
    rules = (fp8.ModuleRule("0", "rowwise"),)
    by_rules = fp8.convert(mlp(), fp8.Fp8Recipe(modules=rules))
    assert {name.partition(".")[0] for name in by_rules.scales()} == {"2"}
    model = mlp()
    fp8.convert(model, "rowwise", skip="2")
    fp8.convert(model, "delayed", skip=lambda name, module: name == "0")
    odd = nn.Linear(5, 7)
    state = fp8.convert(odd, fp8.Fp8Recipe(pad_inner_dim=True))
    with state.microbatch():
        assert odd(noise(3, 5, seed=0)).shape == (3, 7)
        assert odd(noise(5, seed=0)).shape == (7,)
        assert odd(torch.empty(0, 5)).shape == (0, 7)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
@pytest.mark.parametrize("rows", [(0, 5), (5, 0), (0, 0)])
def test_a_linear_without_rows_casts_its_weight_in_a_microbatch(
    rows: tuple[int, int], shape: tuple[int, ...]
) -> None:
    """As an expert that no token has chosen: the scales are those of every other order of rows."""
    layer = nn.Linear(32, 48)
    state = fp8.convert(layer, fp8.Fp8Recipe(amax_history_len=3))
    for _ in range(2):
        layer.zero_grad()
        with state.health("scales") as report:
            for index, number in enumerate(rows):
                x = (noise(number, 32, seed=1) if number else torch.empty(shape)).requires_grad_()
                with state.microbatch(first=index == 0, samples=range(number or 2)):
                    out = layer(x)
                    out.sum().backward()
                assert out.shape == (*x.shape[:-1], 48) and x.grad.shape == x.shape
        assert report.complaints() == {}
        assert "linear.weight" in report.tensors
        assert len(report.tensors) == (3 if any(rows) else 1)
    assert layer.weight.grad.any() == layer.bias.grad.any() == any(rows)
    found = {name: scale.num_updates for name, scale in state.scales().items()}
    used = 2 if any(rows) else 0
    of_roles = {"input": used, "weight": 2, "grad_output": used}
    assert found == {f"linear.{role}": number for role, number in of_roles.items()}
    assert "never called" not in repr(state)


@pytest.mark.parametrize("number", [1, 17])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "nvfp4-no_rht"])
def test_recipes_of_blocks_train_with_any_number_of_tokens(recipe: Any, number: int) -> None:
    """As with zeros after them, up to rounding."""
    grads = []
    for more in (0, -number % 32):
        model = mlp(bias=False)  # so that zeros stay zeros
        state = fp8.convert(model, recipe)
        x = F.pad(noise(number, 32, seed=1), (0, 0, 0, more))
        with state.microbatch(samples=[3]):
            model(x)[:number].square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_delayed_scaling_outside_of_a_microbatch_is_refused() -> None:
    model = mlp()
    state = fp8.convert(model)
    with pytest.raises(fp8.Fp8Error, match="0: a forward pass with gradients ran outside"):
        model(noise(8, 32, seed=0))
    with state.microbatch():
        loss = model(noise(8, 32, seed=0)).sum()
    with pytest.raises(fp8.Fp8Error, match="2: its backward pass ran outside"):
        loss.backward()
    with pytest.raises(fp8.Fp8Error, match="is used inside of state.microbatch"):
        with state.microbatch(), state.evaluation():
            pass
    with pytest.raises(fp8.Fp8Error, match="state_dict..: is used inside"), state.microbatch():
        state.state_dict()
    with pytest.raises(fp8.Fp8Error, match="0: its input is torch.bfloat16"), state.microbatch():
        model(noise(8, 32, seed=0, dtype=torch.bfloat16))


def test_a_stale_weight_is_refused_where_microbatches_accumulate() -> None:
    model = mlp()
    state = fp8.convert(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(fp8.Fp8Error, match="no microbatch of this step came before"):
        step(model, state, first=False)
    step(model, state)
    step(model, state, first=False)
    optimizer.step()
    with pytest.raises(fp8.Fp8Error, match="0: its weight has changed"):
        step(model, state, first=False)
    step(model, state)
    with state.evaluation():
        pass
    with pytest.raises(fp8.Fp8Error, match="no microbatch of this step came before"):
        step(model, state, first=False)


def test_recipes_without_history_need_no_microbatch() -> None:
    """And a weight that has changed is quantized anew."""
    found = []
    for is_enclosed in (False, True):
        model = mlp()
        state = fp8.convert(model, "tensorwise")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            if is_enclosed:
                step(model, state, seed)
            else:
                model(noise(8, 32, seed=seed)).square().mean().backward()
            optimizer.step()
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    with pytest.raises(fp8.Fp8Error, match="keeps none"):
        state.scales()
    assert state.state_dict() == {}


def test_an_exception_inside_leaves_the_scales_as_they_were() -> None:
    model = mlp()
    state = fp8.convert(model)
    step(model, state)
    before = state.state_dict()
    with pytest.raises(KeyboardInterrupt), state.microbatch():
        model(100 * noise(8, 32, seed=0)).sum().backward()
        raise KeyboardInterrupt
    with state.microbatch():
        pass
    assert all(torch.equal(before[key], row) for key, row in state.state_dict().items())


@pytest.mark.parametrize("in_fp8", [True, False])
def test_evaluation_leaves_no_trace(in_fp8: bool) -> None:
    plain, model = mlp(), mlp()
    state = fp8.convert(model, dataclasses.replace(fp8.Fp8Recipe(), fp8_in_evaluation=in_fp8))
    step(model, state)
    before, x = state.state_dict(), noise(8, 32, seed=1)
    with state.evaluation():
        inside = model(x)
    with torch.no_grad():
        alone = model(x)
    assert torch.equal(inside, alone)
    difference = (alone - plain(x)).abs().max()
    assert (difference > 1e-3) == in_fp8
    assert all(torch.equal(before[key], row) for key, row in state.state_dict().items())


def test_weights_may_get_their_memory_after_the_conversion() -> None:
    with torch.device("meta"):
        model = mlp()
    state = fp8.convert(model)
    with pytest.raises(fp8.Fp8Error, match="0: has its weight on the meta device"):
        step(model, state)
    model.to_empty(device="cpu").load_state_dict(mlp().state_dict())
    step(model, state)
    expected = mlp()
    step(expected, fp8.convert(expected))
    assert torch.equal(model[0].weight.grad, expected[0].weight.grad)


def test_second_derivatives_are_refused() -> None:
    model = mlp()
    state, x = fp8.convert(model), noise(8, 32, seed=0).requires_grad_()
    with state.microbatch():
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_frozen_weights_have_no_gradients() -> None:
    model = mlp()
    state = fp8.convert(model)
    model[2].requires_grad_(False)
    step(model, state)
    assert model[2].weight.grad is None and model[0].weight.grad is not None
    assert state.counter.flops["fp8", "grad_weight"] == 2 * 8 * 32 * 64  # the first one's alone


def test_health_says_what_a_cast_loses() -> None:
    model = mlp()
    state = fp8.convert(model, fp8.Fp8Recipe(amax_history_len=1))
    with state.health() as report:
        step(model, state)
    assert set(report.tensors) == set(state.scales())
    assert report.tensors["0.input"].amax == noise(8, 32, seed=0).abs().max()
    assert report.complaints() == {} or all("underflow" in s for s in report.complaints().values())
    with state.health() as report, state.microbatch():
        model(1e6 * noise(8, 32, seed=0)).mean().backward()
    assert "saturate" in report.complaints()["0.input"]
    with state.health("scales") as report, state.microbatch():
        model(noise(8, 32, seed=0) * float("nan")).mean().backward()
    assert report.num_nonfinite["0.input"] == 1
    assert state.scales()["0.input"].num_nonfinite == 1


def test_health_knows_what_is_normal_in_a_recipe() -> None:
    """Scales of `nvfp4` are rounded to nearest, so that some blocks saturate."""
    model = torch.nn.Linear(64, 64)
    state = fp8.convert(model, "nvfp4")
    with state.health() as report, state.microbatch():
        model(noise(64, 64, seed=0)).backward(noise(64, 64, seed=1))
    saturated = [health.overflow or 0.0 for health in report.tensors.values()]
    assert max(saturated) > HealthSpec().max_overflow and report.complaints() == {}


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("enclosed", [True, False])
def test_health_of_an_evaluation_is_measured(recipe: Any, enclosed: bool) -> None:
    model = mlp()
    state = fp8.convert(model, recipe)
    if recipe == "delayed":
        step(model, state)
    x = noise(8, 32, seed=1)
    with state.health() as report, torch.no_grad():
        with state.evaluation() if enclosed else contextlib.nullcontext():
            model(x)
    assert set(report.tensors) == {"0.input", "0.weight", "2.input", "2.weight"}
    assert report.tensors["0.input"].amax == x.abs().max()
    with state.health() as report, torch.no_grad():
        model(x * float("inf"))
    assert not math.isfinite(report.tensors["0.input"].amax)


def test_health_of_nothing_is_an_error_and_not_healthy() -> None:
    model = mlp()
    state = fp8.convert(model, fp8.Fp8Recipe(fp8_in_evaluation=False))
    for evaluate in (False, True):
        with pytest.raises(fp8.Fp8Error, match="no tensor was cast to FP8 inside"):
            with state.health(), torch.no_grad():
                if evaluate:
                    model(noise(8, 32, seed=0))
    with pytest.raises(KeyError), state.health():  # an error inside stays what it was
        raise KeyError
    with state.health() as report:
        step(model, state)
    assert report.tensors


def test_a_copy_of_a_converted_model_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no state, so it evaluates only; a copy of both together is whole."""
    model = mlp()
    state = fp8.convert(model)
    step(model, state)
    average, x = copy.deepcopy(model), noise(8, 32, seed=1)
    with state.microbatch():
        inside = copy.deepcopy(model)
        pickled = pickle.dumps(model)
        monkeypatch.setattr(modules_of_others, "id", lambda _: 1, raising=False)
        read = pickle.loads(pickled)  # an address may be that of an object that is gone
        for ema in (average, inside, read):
            with pytest.raises(fp8.Fp8Error, match="0: belongs to a copy of the converted model"):
                ema(x)
            with torch.no_grad():
                assert torch.equal(ema(x), model(x))
                assert ema[0].fp8.quantizer.tensors["input"].fmt is E4M3
    step(model, state, seed=1)
    both_model, both_state = copy.deepcopy((model, state))
    step(both_model, both_state, seed=2)
    step(model, state, seed=2)
    own, theirs = state.state_dict(), both_state.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in own)


def test_a_copy_without_scales_is_said_to_keep_them(caplog: pytest.LogCaptureFixture) -> None:
    fp8.convert(model := mlp())
    with torch.no_grad():
        copy.deepcopy(model)(noise(8, 32, seed=1))
    assert "copy the model before fp8.convert, and convert the copy" in caplog.text


def test_the_hint_for_attention_of_torch_covers_all_layers() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    models = {
        "'*.self_attn'": nn.TransformerEncoder(layer, 2),
        "['*.self_attn', '*.multihead_attn']": nn.TransformerDecoder(
            nn.TransformerDecoderLayer(32, 2, 64, batch_first=True), 2
        ),
        "'self_attn'": layer,
    }
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for hint, model in models.items():
            with pytest.raises(fp8.Fp8Error, match="may compute otherwise") as caught:
                fp8.convert(model)
            assert caught.value.hint == f"Use skip={hint}"
            state = fp8.convert(model, skip=ast.literal_eval(hint))
            assert {name.rpartition(".")[2] for name in state.linears} == {"linear1", "linear2"}
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_saved_state_continues_bit_for_bit(tmp_path: Path) -> None:
    """Model, optimizer and scales through files, against a run that was never interrupted."""
    whole, part = llama(), llama()
    whole_state = fp8.convert(whole, skip="lm_head")
    expected = train(whole, whole_state, range(6), torch.optim.AdamW(whole.parameters(), lr=3e-3))
    state = fp8.convert(part, skip="lm_head")
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    first = train(part, state, range(3), optimizer)
    save_file(part.state_dict(), tmp_path / "model.safetensors")
    save_file(state.state_dict(), tmp_path / "fp8.safetensors")
    saved_optimizer = copy.deepcopy(optimizer.state_dict())
    again = llama()
    again_state = fp8.convert(again, skip="lm_head")
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    again_state.load_state_dict(load_file(tmp_path / "fp8.safetensors"))
    again_optimizer = torch.optim.AdamW(again.parameters(), lr=3e-3)
    again_optimizer.load_state_dict(saved_optimizer)
    assert first + train(again, again_state, range(3, 6), again_optimizer) == expected
    own, theirs = whole_state.state_dict(), again_state.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in own)


def error_of(model: nn.Module, state: fp8.Fp8State) -> float:
    """Return the relative error of an evaluation against the same weights in high precision."""
    plain, x = mlp(), noise(8, 32, seed=5)
    plain.load_state_dict(model.state_dict())
    with state.evaluation(), torch.no_grad():
        got, expected = model(x), plain(x)
    return ((got - expected).norm() / expected.norm()).item()


def scaled(factor: float) -> dict[str, torch.Tensor]:
    return {name: factor * value for name, value in mlp().state_dict().items()}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("factor", [300.0, 2.0, 1e-4])
def test_other_weights_that_are_loaded_get_scales_of_their_own(factor: float, inside: bool) -> None:
    """The inputs of the second linear have scales of earlier inputs, so the first one is judged."""
    model = mlp()
    state, x = fp8.convert(model), noise(8, 32, seed=0)
    for seed in range(3):
        step(model, state, seed)
    before = state.state_dict()
    with state.evaluation() if inside else contextlib.nullcontext():
        model.load_state_dict(scaled(factor))
    after = state.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    fields = ("history", "quant_scale")
    assert changed == {f"{i}.weight/{field}" for i in (0, 2) for field in fields}
    expected = nn.functional.linear(x, model[0].weight, model[0].bias)
    with state.microbatch(), torch.no_grad():
        got = model[0](x)
    assert (got - expected).norm() < 0.05 * expected.norm()
    step(model, state)
    step(model, state)
    assert error_of(model, state) < 0.1


def test_weights_of_about_the_same_size_leave_no_trace_in_the_scales() -> None:
    """As averaged weights that are loaded for an evaluation, and the trained ones after it."""
    model = mlp()
    state = fp8.convert(model)
    step(model, state)
    before, own = state.state_dict(), copy.deepcopy(model.state_dict())
    with state.evaluation(), torch.no_grad():
        model.load_state_dict(scaled(1.2))
        model(noise(8, 32, seed=0))
        model.load_state_dict(scaled(0.1))
        model.load_state_dict(own)
    assert all(torch.equal(before[key], row) for key, row in state.state_dict().items())


@pytest.mark.parametrize("order", ["weights first", "scales first"])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_weights_and_scales_are_loaded_in_any_order(order: str, num_steps: int) -> None:
    """Also where the weights have left their scales far behind, or there were none yet."""
    model, again = mlp(), mlp()
    state, again_state = fp8.convert(model), fp8.convert(again)
    for seed in range(num_steps):
        step(model, state, seed)
        step(again, again_state, seed + 9)
    with torch.no_grad():
        model[0].weight.mul_(30)
    weights, scales = copy.deepcopy(model.state_dict()), state.state_dict()
    loads = [lambda: again.load_state_dict(weights), lambda: again_state.load_state_dict(scales)]
    for load in loads if order == "weights first" else reversed(loads):
        load()
    for each, its_state in ((model, state), (again, again_state)):
        each.zero_grad()
        step(each, its_state)
    own, theirs = state.state_dict(), again_state.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in own)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("enclosed", [True, False])
def test_an_evaluation_by_scales_of_one_is_said(
    enclosed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and neither after a microbatch nor where scales were loaded or none are kept."""

    def evaluate(model: nn.Module, state: fp8.Fp8State) -> int:
        caplog.clear()
        for _ in range(2):
            with torch.no_grad(), state.evaluation() if enclosed else contextlib.nullcontext():
                model(noise(8, 32, seed=0))
        return sum("before the first microbatch" in message for message in caplog.messages)

    for recipe, said in (("delayed", 1), ("tensorwise", 0)):
        model, trained = mlp(), mlp()
        assert evaluate(model, fp8.convert(model, recipe)) == said
        state = fp8.convert(trained, recipe)
        step(trained, state)
        assert evaluate(trained, state) == 0
    model = mlp()
    loaded = fp8.convert(model)
    loaded.load_state_dict(fp8.convert(mlp()).state_dict())
    assert evaluate(model, loaded) == 0


def test_a_foreign_state_is_refused_and_changes_nothing() -> None:
    state, other = fp8.convert(mlp()), fp8.convert(mlp(), fp8.Fp8Recipe(amax_history_len=7))
    part = fp8.convert(mlp(), skip="0")
    model = mlp()
    trained = fp8.convert(model)
    step(model, trained)
    before = state.state_dict()
    with pytest.raises(fp8.Fp8Error, match="takes a dictionary of tensors and got NoneType"):
        state.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(fp8.Fp8Error, match="0.input/history: is a list in the saved state"):
        state.load_state_dict(before | {"0.input/history": [0.0]})  # type: ignore[dict-item]
    with pytest.raises(fp8.Fp8Error, match="history: is torch.float32 of shape .6,. in the saved"):
        state.load_state_dict(trained.state_dict() | {"0.input/history": torch.zeros(6)})
    with pytest.raises(fp8.Fp8Error, match="is missing in the saved state"):
        state.load_state_dict(part.state_dict())
    with pytest.raises(fp8.Fp8Error, match="belongs to no linear here"):
        part.load_state_dict(state.state_dict())
    with pytest.raises(fp8.Fp8Error, match="of shape"):
        state.load_state_dict(other.state_dict())
    assert all(torch.equal(before[key], row) for key, row in state.state_dict().items())


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/guide/own_model.md").read_text("utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/guide/own_model.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines[:3]]
    assert losses[2] < losses[1] < losses[0]
    assert lines[4:] == [
        "share of FP8 in the FLOPs: 97.7%",
        "40 updates of the first weight's scale",
    ]
    assert (tmp_path / "checkpoint.pt").exists()


def test_the_reference_lists_the_stable_names() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/architecture.md").read_text("utf-8")
    _, _, section = page.partition("### Stable names")
    lists = "\n- ".join(section.partition("\n## ")[0].split("\n- ")[1:]).partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", lists)) == sorted(fp8.__all__)


def test_the_front_door_loads_what_it_needs() -> None:
    """Recipes are read where torch is not loaded, and a conversion shows and records nothing."""
    program = """
import sys
from megafp8 import fp8
assert "torch" not in sys.modules, "the package itself loads torch"
for name in fp8.__all__:
    getattr(fp8, name)
packages = "train cli report runs checkpoint optim parallel plan config data backends"
names = {"megafp8." + name for name in packages.split()}
names |= {"megafp8.observe." + name for name in ("console", "live", "trackers", "metrics")}
names |= {"te_cpu", "megafp8_migrate", "rich", "hydra", "omegaconf", "tensorboard", "wandb"}
loaded = sorted(n for n in sys.modules if any(n == m or n.startswith(m + ".") for m in names))
assert not loaded, loaded
try:
    fp8.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError("a name that does not exist")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_sizes_that_do_not_fit_are_named_at_once() -> None:
    """Following the hint converts what is left."""

    def model() -> nn.Module:
        layers = [nn.ModuleDict({"up": nn.Linear(128, 256), "down": nn.Linear(256, 128),
                                 "gate": nn.Linear(128, 40)}) for _ in range(3)]  # fmt: skip
        return nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(128, 100)})

    with pytest.raises(fp8.Fp8Error, match="; the sizes of 3 more do not fit") as caught:
        fp8.convert(model(), recipe="blockwise")
    skip = re.search(r"Use skip=(\[.*?\]),", str(caught.value))
    assert skip is not None
    patterns = ast.literal_eval(skip[1])
    assert patterns == ["*.gate", "head"]
    assert len(fp8.convert(model(), recipe="blockwise", skip=patterns).linears) == 6
    with pytest.raises(fp8.Fp8Error, match="Use another recipe, or other sizes"):
        fp8.convert(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), recipe="blockwise")


def test_a_gpu_says_what_it_computes_without_fp8_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights come to a device; tensor cores of Hopper have no products of MXFP8 and FP4."""
    hopper = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(engine.triton_launch, "unavailable", lambda device: None)
    assert engine.slow_parts(hopper, ["delayed", "blockwise", "high_precision"]) == []
    (said,) = engine.slow_parts(hopper, ["delayed", "mxfp8", "mxfp8"])
    assert said.startswith("mxfp8: products are emulated") and "begin at 10.0" in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "delayed: products are emulated" in engine.slow_parts(hopper, ["delayed"])[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(engine.triton_launch, "unavailable", lambda device: "it is not installed")
    (said,) = engine.slow_parts(hopper, ["delayed"])
    assert "torch operations (it is not installed)" in said
    assert engine.slow_parts(torch.device("cpu"), ["mxfp8"]) == []
    model = mlp()
    state = fp8.convert(model, "mxfp8")
    state._shared.device = hopper  # as if they had been there before
    asked: list[Any] = []

    def slow_parts(device: torch.device, recipes: Any) -> list[str]:
        asked.append([*recipes])
        return ["slow"]

    monkeypatch.setattr(modules_of_others, "slow_parts", slow_parts)
    with pytest.warns(UserWarning, match="FP8 on cpu: slow"), state.evaluation(), torch.no_grad():
        model(noise(16, 32, seed=0))
    assert set(asked[0]) == {"mxfp8"}
