"""Converted linears multiply by the weights of now, however these were written."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune

from megafp8 import fp8
from tests.fp8.models import mlp, noise, old_weight_norm

RECIPES = ("delayed", "tensorwise", "rowwise", "nvfp4")
X = noise(16, 32, seed=1)
Write = Callable[[nn.Parameter, torch.Tensor], None]


def others() -> nn.Sequential:
    """Return an MLP with other weights of about the same size."""
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0) * -1.1)
    return model


def in_flat(model: nn.Module) -> torch.Tensor:
    """Let all parameters be views of one buffer, as apex and DeepSpeed do, and return it."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    begin = 0
    for parameter in model.parameters():
        parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    return flat


def each(write: Write) -> Callable[[nn.Module, nn.Module], None]:
    def write_all(model: nn.Module, new: nn.Module) -> None:
        for parameter, other in zip(model.parameters(), new.parameters(), strict=True):
            write(parameter, other.detach().clone())

    return write_all


def set_data(parameter: nn.Parameter, new: torch.Tensor) -> None:
    parameter.data = new


def replace_parameters(model: nn.Module, new: nn.Module) -> None:
    for index in (0, 2):
        model[index].weight = nn.Parameter(new[index].weight.detach().clone())
        model[index].bias = nn.Parameter(new[index].bias.detach().clone())


def write_flat(model: nn.Module, new: nn.Module) -> None:
    storage = model[0].weight.untyped_storage()
    assert all(p.untyped_storage().data_ptr() == storage.data_ptr() for p in model.parameters())
    flat = torch.empty(0).set_(storage)
    flat.copy_(torch.cat([p.detach().flatten() for p in new.parameters()]))


def write_bytes(parameter: nn.Parameter, new: torch.Tensor) -> None:
    ctypes.memmove(parameter.data_ptr(), new.data_ptr(), new.nbytes)


WAYS: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "in place": torch.no_grad()(each(lambda parameter, new: parameter.copy_(new))),
    "data": each(set_data),
    "data in place": each(lambda parameter, new: parameter.data.copy_(new)),
    "a flat buffer": write_flat,
    "bytes": each(write_bytes),
    "new parameters": replace_parameters,
    "load_state_dict": lambda model, new: model.load_state_dict(new.state_dict()),
    "assigned": lambda model, new: model.load_state_dict(new.state_dict(), assign=True),
    "swapped": each(lambda parameter, new: torch.utils.swap_tensors(parameter, nn.Parameter(new))),
}
UNCOUNTED = ("data in place", "a flat buffer", "bytes")
"""The writes that neither a version nor an address shows."""


def outputs_of(saved: dict[str, torch.Tensor], recipe: str) -> torch.Tensor:
    """Return what the other weights give in a model of their own, by saved scales."""
    model = others()
    state = fp8.convert(model, recipe)
    state.load_state_dict(saved)
    with state.microbatch(), torch.no_grad():
        out: torch.Tensor = model(X)
    return out


@pytest.mark.parametrize("where", ["microbatch", "evaluation"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_was_written_is_cast_again(way: str, recipe: Any, where: str) -> None:
    model = mlp()
    state = fp8.convert(model, recipe)
    flat = in_flat(model)
    with state.microbatch():
        model(X).square().mean().backward()
    saved = state.state_dict()
    with torch.no_grad(), state.microbatch() if where == "microbatch" else state.evaluation():
        before = model(X)
        WAYS[way](model, others())
        after = model(X)
    assert flat.numel() == sum(parameter.numel() for parameter in model.parameters())
    assert not torch.equal(before, after)
    assert torch.equal(after, outputs_of(saved, recipe))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", UNCOUNTED)
def test_an_uncounted_write_between_microbatches_is_seen(way: str, recipe: Any) -> None:
    """By the scale of the step's first microbatch. The other writes are refused (test_convert)."""
    model = mlp()
    state = fp8.convert(model, recipe)
    in_flat(model)
    with state.microbatch():
        model(X).square().mean().backward()
    first = state.state_dict()
    with state.microbatch():
        model(X).square().mean().backward()
    second = state.state_dict()
    WAYS[way](model, others())
    with torch.no_grad(), state.microbatch(first=False):
        after = model(X)
    scales = second | {key: row for key, row in first.items() if "weight" in key}
    assert torch.equal(after, outputs_of(scales, recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_evaluation_keeps_copies_where_the_caller_promises_that_nothing_changes(
    recipe: Any,
) -> None:
    """What torch counts is refused all the same; each dtype of products has a copy of its own."""
    model, casts = mlp(), list[str]()
    state = fp8.convert(model, recipe)
    with state.microbatch():
        model(X).square().mean().backward()
    with state.evaluation(), torch.no_grad():
        expected = model(X)
    state.scaling.observers.append(lambda name, *_: casts.append(name))
    with state.evaluation(keep_weights=True), torch.no_grad():
        assert all(torch.equal(model(X), expected) for _ in range(3))
        assert casts.count("0.weight") == 1 and casts.count("0.input") == 3
        with torch.autocast("cpu", torch.bfloat16):
            model(X)
        assert torch.equal(model(X), expected) and casts.count("0.weight") == 2
    for way in set(WAYS) - set(UNCOUNTED):
        with state.evaluation(keep_weights=True), torch.no_grad():
            model(X)
            WAYS[way](model, others())
            with pytest.raises(fp8.Fp8Error, match="0: its weight has changed inside of state.eva"):
                model(X)
    with state.evaluation(), torch.no_grad():
        assert not torch.equal(model(X), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_element_is_enough(recipe: Any) -> None:
    """A sample of the weight, or a sum of it, would not see each of these writes."""
    model = mlp()
    state = fp8.convert(model, recipe)
    with state.evaluation(), torch.no_grad():
        for write in (
            lambda w: w[3, 5].mul_(-7),
            lambda w: w.copy_(w.flip(1)),
            lambda w: w[[0, 1]].copy_(w[[1, 0]]),
        ):
            model(X)
            write(model[0].weight.data)
            found = model(X)
            with contextlib.ExitStack() as fresh:
                other = mlp()
                other.load_state_dict(model.state_dict())
                fresh.enter_context(fp8.convert(other, recipe).evaluation())
                assert torch.equal(found, other(X))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_set_of_weights_is_that_of_each_call(recipe: Any) -> None:
    """Outputs and gradients have the bits of a model that has these weights."""
    model, new = mlp(), others()
    state = fp8.convert(model, recipe)
    weights = {name: p.detach().clone().requires_grad_() for name, p in new.named_parameters()}
    with state.microbatch():
        model(X)
        got = functional_call(model, weights, (X,))
        got.square().mean().backward()
    reference = others()
    with fp8.convert(reference, recipe).microbatch():
        expected = reference(X)
        expected.square().mean().backward()
    assert torch.equal(got, expected)
    for name, parameter in reference.named_parameters():
        assert torch.equal(weights[name].grad, parameter.grad), name
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_no_matrix_or_batched_are_refused_by_name() -> None:
    model = mlp()
    state = fp8.convert(model, "tensorwise")
    stacked, _ = stack_module_state([mlp(), others()])

    def call(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, weights, (X,))

    with state.evaluation(), torch.no_grad():
        with pytest.raises(fp8.Fp8Error, match="0: its weight is 2 x 64 x 32 by now"):
            call(stacked)
        with pytest.raises(fp8.Fp8Error, match="0: runs inside a transform of torch.func"):
            vmap(call)(stacked)
        with pytest.raises(fp8.Fp8Error, match="0: runs inside a transform of torch.func"):
            vmap(model)(X[None])
        model[2].weight = nn.Parameter(torch.zeros(32, 60))
        with pytest.raises(fp8.Fp8Error, match="2: its weight is 32 x 60 by now, .* of 16"):
            model(X)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_several_steps_in_one_microbatch_are_those_of_several(recipe: Any) -> None:
    found = []
    for in_one in (True, False):
        model = mlp()
        state, optimizer = fp8.convert(model, recipe), torch.optim.SGD(model.parameters(), lr=1.0)
        with state.microbatch() if in_one else contextlib.nullcontext():
            for _ in range(3):
                with contextlib.nullcontext() if in_one else state.microbatch():
                    model(X).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_amax_of_each_weight_of_a_microbatch_enters_the_history() -> None:
    """As in the second forward pass of sharpness-aware steps."""
    model = mlp()
    state = fp8.convert(model)
    first = model[0].weight.abs().max()
    with state.microbatch(), torch.no_grad():
        model(X)
        model[0].weight.data.mul_(3)
        model(X)
    assert state.scales()["0.weight"].quant_scale == (448 / (3 * first)).item()
    with state.microbatch(first=False), torch.no_grad():
        model[0].weight.data.mul_(3)  # a later microbatch records no weight
        model(X)
    assert state.scales()["0.weight"].quant_scale == (448 / (3 * first)).item()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_products_of_another_dtype_read_the_weight_itself(recipe: Any) -> None:
    """After BF16 autocast FP32 products do not read the weight as it was rounded to BF16."""
    x, found = noise(16, 128, seed=1), []
    for before in (False, True):
        model = mlp(128)
        state = fp8.convert(model, recipe)
        with state.microbatch(), torch.no_grad():
            if before:
                with torch.autocast("cpu", torch.bfloat16):
                    model(x)
            found.append(model(x))
    assert torch.equal(*found)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_write_before_the_backward_pass_is_refused_as_torch_does(is_counted: bool) -> None:
    """What torch does not count it does not refuse; then the gradient is the forward pass's."""

    def write(model: nn.Sequential) -> None:
        with torch.no_grad():
            (model[2].weight if is_counted else model[2].weight.data).mul_(2)

    plain, model = mlp(), mlp()
    loss = plain(X).sum()
    write(plain)
    with pytest.raises(RuntimeError, match="inplace") if is_counted else contextlib.nullcontext():
        loss.backward()
    state = fp8.convert(model, "tensorwise")
    with state.microbatch():
        loss = model(X).sum()
        write(model)
        with (
            pytest.raises(fp8.Fp8Error, match="2: its weight was written between its forward")
            if is_counted
            else contextlib.nullcontext()
        ):
            loss.backward()
    untouched = mlp()
    with fp8.convert(untouched, "tensorwise").microbatch():
        untouched(X).sum().backward()
    if not is_counted:
        assert torch.equal(model[0].weight.grad, untouched[0].weight.grad)
    lone = nn.Linear(32, 32)  # no gradient is needed that would read the weight
    state = fp8.convert(lone, "tensorwise")
    with state.microbatch():
        loss = lone(X).sum()
        with torch.no_grad():
            lone.weight.mul_(2)
        loss.backward()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_parametrization_is_computed_as_often_as_without_fp8(recipe: Any) -> None:
    """The spectral norm of a training pass moves its vectors at each reading of the weight."""
    vectors = []
    for is_converted in (False, True):
        model = mlp()
        state = fp8.convert(model, recipe) if is_converted else None
        torch.manual_seed(0)
        parametrizations.spectral_norm(model[0])
        for step in range(2):
            for index in range(2):
                with state.microbatch(first=index == 0) if state else contextlib.nullcontext():
                    model(noise(16, 32, seed=step)).square().mean().backward()
            with torch.no_grad():
                model[0].parametrizations.weight.original.mul_(0.9)
        vectors.append(model[0].parametrizations.weight[0]._u)
    assert torch.equal(*vectors)
    with state.microbatch():
        model(X)
    with torch.no_grad():
        model[0].parametrizations.weight.original.mul_(0.9)
    with pytest.raises(fp8.Fp8Error, match="0: its weight has changed since"):
        with state.microbatch(first=False):
            pass


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("way", ["pruned", "weight_norm", "spectral_norm"])
def test_weights_that_are_computed_from_others_after_the_conversion_are_multiplied(
    way: str, recipe: Any
) -> None:
    change: Any = {
        "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
        "weight_norm": old_weight_norm,
        "spectral_norm": torch.nn.utils.spectral_norm,
    }[way]
    model = mlp()
    state = fp8.convert(model, recipe)
    change(model[0])
    model.eval()  # the spectral norm of training is another one in each pass
    for first in (True, False):
        with state.microbatch(first=first):
            model(X).square().mean().backward()
    saved = state.state_dict()
    with state.evaluation(), torch.no_grad():
        got = model(X)
    plain = mlp()
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight)
    plain_state = fp8.convert(plain, recipe)
    plain_state.load_state_dict(saved)
    with plain_state.evaluation(), torch.no_grad():
        assert torch.equal(got, plain(X))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "nvfp4"])
def test_weights_that_deepspeed_gathers_for_each_use_have_the_same_bits(recipe: Any) -> None:
    """ZeRO 3 keeps a part between uses, or some weights as a whole, each time in other memory."""
    found = []
    for is_sharded in (False, True):
        model = mlp()
        state = fp8.convert(model, recipe)
        parts = {p: p.detach().clone() for p in model.parameters()}

        def gather(module: nn.Module, *_: object, parts: Any = parts) -> None:
            for p in module.parameters(recurse=False):
                p.data = parts[p].clone()

        def free(module: nn.Module, *_: object) -> None:
            for p in module.parameters(recurse=False):
                p.data = torch.empty(0)

        for p in model.parameters() if is_sharded else ():
            p.ds_id = 0
        for linear in (model[0], model[2]) if is_sharded else ():
            linear.register_forward_pre_hook(gather)
            linear.register_forward_hook(free)
            linear.register_full_backward_pre_hook(gather)
            free(linear)
        for is_first in (True, False):
            with state.microbatch(first=is_first):
                model(X.clone().requires_grad_()).square().mean().backward()
        keeps = [linear.fp8.weight_form.is_saved_for_backward for linear in state.linears.values()]
        assert keeps == [not is_sharded] * 2
        found.append([*(p.grad for p in model.parameters()), *state.state_dict().values()])
    assert all(map(torch.equal, *found))
    model = mlp()
    model[0].weight.data = torch.empty(0)
    with pytest.raises(fp8.Fp8Error, match="0: its weight has 1 dims.*without deepspeed.zero.Init"):
        fp8.convert(model, recipe)


class WithHeads(nn.Module):
    def __init__(self, reads_unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)
        self.lm_head, self.gate = nn.Linear(32, 10), nn.Linear(32, 10)
        self.reads_unused = reads_unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.reads_unused:
            x = nn.functional.linear(x, self.unused.weight)
        out: torch.Tensor = self.lm_head(x) + self.gate(x)
        return out


def test_parameters_in_one_flat_buffer_are_told_apart() -> None:
    """As ZeRO 1 and 2 of DeepSpeed keep them: a skipped weight's product reads no other weight."""
    shares = []
    for is_flat in (False, True):
        for reads_unused in (False, True):
            model = WithHeads(reads_unused)
            state = fp8.convert(model, "tensorwise", skip=["lm_head", "gate"])
            flat = in_flat(model) if is_flat else None
            told = pytest.raises(fp8.Fp8Error, match="^unused: converted, but other code")
            with told if reads_unused else contextlib.nullcontext(), state.microbatch():
                model(X).sum().backward()
            shares.append(state.share)
            assert flat is None or flat.numel()
    assert shares[:2] == shares[2:] and 0 < shares[1] < shares[0] < 1


def test_an_evaluation_between_two_microbatches_of_a_step_leaves_no_trace() -> None:
    """The second microbatch repeats the first one's scale of the weight, and records nothing."""
    found = []
    for evaluates in (False, True):
        model = mlp()
        state = fp8.convert(model)
        for first in (True, False):
            with state.microbatch(first=first):
                model(X).square().mean().backward()
            if evaluates:
                with torch.no_grad():
                    model(5 * X)
        found.append([*(p.grad for p in model.parameters()), *state.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
