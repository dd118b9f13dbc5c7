"""Runs of FP8-LM's levels on a tiny GPT: bytes, gradients, clipping, skipped steps, learning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megafp8.fp8.grad_sink import GradSum
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS, StorageFormat
from megafp8.models.init import pieces_of
from megafp8.optim.clipping import clip, grad_norm
from megafp8.optim.partitions import Segment
from megafp8.optim.schedules import learning_rate
from megafp8.optim.stored_adam import StoredAdam
from megafp8.specs import Fp8Recipe, LossScaleSpec, StorageSpec
from megafp8.train.nonfinite import first_nonfinite
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from tests.kit.tensors import state_tensors, stored_states
from tests.tiny import build_run, microbatch, optim_spec

LEVELS = {
    "O1": StorageSpec(main_grads="fp8", main_params="fp16"),
    "O2": StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16"),
    "O3": StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16"),
}
BYTES = {"O1": 11, "O2": 6, "O3": 7}  # docs of MS-AMP, and the table
RECIPE = Fp8Recipe(amax_history_len=4)


def at_level(level: str, **choices: Any) -> TrainState:
    storage = LEVELS[level]
    recipe = choices.pop("fp8", RECIPE)
    changes = choices.pop("storage", {})
    optim = optim_spec(storage=replace(storage, **changes), **choices.pop("optim", {}))
    fp8 = replace(recipe, params_in_fp8=level == "O3")
    return build_run(compute="bf16", fp8=fp8, optim=optim, **choices)


def names_of(state: TrainState) -> list[str]:
    return [pieces_of(param)[0].name for param in state.masters.params]


def linear_bytes(state: TrainState) -> dict[str, int]:
    """Bytes of what is kept for each linear's weight, each memory once, from the live tensors."""
    masters, optimizer = state.masters, state.optimizer
    found = {}
    for index, param in enumerate(masters.params):
        if param in masters.linears:
            tensors = [param, masters.masters[index], masters.param_grads[index]]
            tensors += [state_tensors(optimizer, n)[index] for n in ("exp_avg", "exp_avg_sq")]
            storages = {t.untyped_storage().data_ptr(): t for t in tensors}
            each = sum(t.numel() * t.itemsize for t in storages.values())
            found[names_of(state)[index]] = each // param.numel()
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_a_linear_parameter_are_the_tables(level: str) -> None:
    state = at_level(level)
    train_step(state, [microbatch(0), microbatch(1)])
    held = linear_bytes(state)
    assert len(held) == 8 and set(held.values()) == {BYTES[level]}


@pytest.mark.parametrize("vectors_decay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_norms_and_biases_decay_only_if_asked(level: str, vectors_decay: bool) -> None:
    """With zero gradients only decay moves anything; at O1 they are FP32, at O2 stored."""
    optim = {"weight_decay": 0.5, "lr": 0.1, "decays_vectors": vectors_decay}
    state = at_level(level, optim=optim)
    held = [master.detach().clone() for master in state.masters.masters]
    for grad in state.masters.grads:
        grad.zero_()
    state.optimizer.step(1)
    factor = 1 - 0.5 * learning_rate(state.optimizer.spec, 1)
    vectors = 0
    for master, old in zip(state.masters.masters, held, strict=True):
        if master.dim() == 1 and old.any():
            vectors += 1
            expected = old * factor if vectors_decay else old
            torch.testing.assert_close(master.detach(), expected, rtol=2e-3, atol=0)
    assert vectors > 0


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_moments_take_three_eighths_of_fp32s(level: str) -> None:
    """Of all parameters; of the linears alone where that is asked."""
    whole = 8 * sum(p.numel() for p in build_run().masters.params)
    for only in (False, True):
        state = at_level(level, storage={"linears_only": only})
        masters, optimizer = state.masters, state.optimizer
        held = sum(
            t.numel() * t.itemsize
            for name in ("exp_avg", "exp_avg_sq")
            for t in state_tensors(optimizer, name)
        )
        in_linears = sum(param.numel() for param in masters.linears)
        assert held == (whole - 5 * in_linears if only else whole * 3 // 8)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_a_level_learns_as_fp32_states_do(level: str, recipe: Any) -> None:
    if level == "O3" and recipe == "blockwise":
        pytest.skip("its weights keep one copy; the configuration says which recipes do")
    fp8 = replace(RECIPE, name=recipe, power_2_scale=False)
    if recipe == "blockwise":
        fp8 = replace(fp8, power_2_scale=True, backward_format="e4m3")
    few = at_level(level, fp8=fp8)
    plain = build_run(compute="bf16", fp8=replace(fp8, params_in_fp8=level == "O3"))
    found = []
    for state in (few, plain):
        losses = []
        for step in range(25):
            losses.append(train_step(state, [microbatch(2 * step), microbatch(2 * step + 1)]).loss)
            state.step += 1
        found.append(losses)
    ours, theirs = found
    assert ours[0] == pytest.approx(theirs[0], rel=2e-3)
    assert ours[-1] < ours[0] - 0.3
    assert ours[-1] == pytest.approx(theirs[-1], abs=0.08)


def test_weights_are_read_from_their_masters() -> None:
    """At O1 and O2 a linear computes with what it would read from a BF16 copy."""
    state = at_level("O2")
    masters = state.masters
    plain = build_run(compute="bf16", fp8=RECIPE)
    for param, stored in masters.own_weights.items():
        assert param.dtype == torch.float16 and param.data_ptr() == stored.payload.data_ptr()
    loss, _ = forward_backward(state, [microbatch(0)])
    expected, _ = forward_backward(plain, [microbatch(0)])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_gradients_are_those_of_fp32_rounded_once() -> None:
    """With one microbatch, and with several where the sum is in FP32."""
    for count, sums in ((1, False), (3, True)):
        batches = [microbatch(i) for i in range(count)]
        few = at_level("O2", storage={"main_params": "fp32", "sums_in_fp32": sums})
        plain = build_run(compute="bf16", fp8=RECIPE)
        for state in (few, plain):
            forward_backward(state, batches)
        exact = dict(zip(names_of(plain), plain.masters.grads, strict=True))
        for name, grad in zip(names_of(few), few.masters.stored_grads, strict=True):
            expected = ScaledTensor.of(exact[name], grad.fmt).values()
            assert torch.equal(grad.values(), expected), name


def test_sums_in_fp32_have_memory_during_a_step_alone() -> None:
    """A weight that gets no gradient in a step has none of the step before."""
    state = at_level("O2", storage={"main_params": "fp32", "sums_in_fp32": True})
    sink = state.sink
    param, stored = next(state.masters.scaled_grads())

    def held() -> int:
        totals = (each.total for each in sink.scaled_sums)
        return sum(total.untyped_storage().nbytes() for total in totals if total is not None)

    sink.begin_step()
    assert held() == 0
    sink.add(param, lambda _: torch.ones(param.shape))
    assert held() == 4 * param.numel()
    sink.end_step()
    assert held() == 0 and bool((stored.values() == 1).all())
    sink.begin_step()
    sink.end_step()
    assert not stored.values().any()


def test_microbatches_accumulate_by_read_add_requantize() -> None:
    """The sink's sum is the specification's of the same gradients, one rounding a microbatch."""
    state = at_level("O2", storage={"main_params": "fp32"})
    sink, masters = state.sink, state.masters
    param, stored = next(masters.scaled_grads())
    generator = torch.Generator().manual_seed(0)
    sink.begin_step()
    expected = torch.zeros(param.shape)
    for number in range(4):
        grad = torch.randn(param.shape, generator=generator) * 3.0**number

        def compute(into: GradSum | None, /, grad: torch.Tensor = grad) -> torch.Tensor:
            return grad

        assert sink.add(param, compute) is None
        fmt = STORAGE_FORMATS["fp8"]
        expected = ScaledTensor.of(expected + grad if number else grad, fmt).values()
    sink.end_step()
    assert torch.equal(stored.values(), expected)
    sink.begin_step()
    sink.end_step()
    assert not stored.values().any(), "without a gradient in a step it is zero"


def test_after_clipping_the_norm_is_the_limit() -> None:
    """FP8 gradients count, and are scaled: by their scales alone."""
    state = at_level("O2", optim={"clip_grad_norm": 0.01})
    forward_backward(state, [microbatch(0)])
    masters = state.masters
    tp, pp = state.mesh.tp, state.mesh.pp
    payloads = [grad.payload.clone() for _, grad in masters.scaled_grads()]
    values = torch.cat([grad.values().flatten() for grad in masters.stored_grads]).double()
    norm = grad_norm(masters, tp, pp).item()
    assert norm == pytest.approx(values.norm().item(), rel=1e-6)
    clip(masters.own_grads, norm / 32, state.optimizer.spec, divisor=32)
    clipped = torch.cat([grad.values().flatten() for grad in masters.stored_grads]).double()
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-5)
    torch.testing.assert_close(clipped, values * (0.01 / norm), rtol=1e-5, atol=0)
    for before, (_, grad) in zip(payloads, masters.scaled_grads(), strict=True):
        assert torch.equal(before.view(torch.uint8), grad.payload.view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_is_not_finite_skips_the_step(level: str, bad: float) -> None:
    state = at_level(level)
    train_step(state, [microbatch(0)])
    masters, sink = state.masters, state.sink
    tensors = [*masters.stored, *stored_states(state.optimizer, "exp_avg_sq")]
    before = [stored.values() for stored in tensors]
    victim, add = next(masters.scaled_grads())[0], sink.add

    def spoiled(weight: nn.Parameter, compute: Any) -> torch.Tensor | None:
        def compute_bad(into: GradSum | None, /) -> torch.Tensor:
            grad = compute(None)
            if weight is victim:
                grad[0, 0] = bad
            return grad

        return add(weight, compute_bad)

    sink.add = spoiled  # type: ignore[method-assign]
    result = train_step(state, [microbatch(1), microbatch(2)])
    assert not result.is_finite and state.optimizer.num_updates == 1
    assert not masters.is_finite(victim)
    name = pieces_of(victim)[0].name
    assert first_nonfinite(state, [microbatch(1)]) == f"gradient of {name}"
    for stored, old in zip(tensors, before, strict=True):
        assert torch.equal(stored.values(), old)
    sink.add = add  # type: ignore[method-assign]
    assert train_step(state, [microbatch(1)]).is_finite, "and the next step is good again"


def test_fp32_parts_have_the_bits_of_todays_adamw() -> None:
    """Where only the gradients of linears are in FP8, all else moves as before."""
    few = at_level("O1", storage={"main_params": "fp32"})
    plain = build_run(compute="bf16", fp8=RECIPE)
    for step in (1, 2, 3):
        forward_backward(few, [microbatch(step)])
        masters = dict(zip(names_of(plain), plain.masters.grads, strict=True))
        for name, grad in zip(names_of(few), few.masters.stored_grads, strict=True):
            masters[name].copy_(grad.values())
        few.optimizer.step(step)
        plain.optimizer.step(step)
        theirs = dict(zip(names_of(plain), plain.masters.masters, strict=True))
        for param, name, own in zip(
            few.masters.params, names_of(few), few.masters.masters, strict=True
        ):
            if param in few.masters.linears:
                torch.testing.assert_close(
                    own.detach(), theirs[name].detach(), rtol=1e-5, atol=1e-7
                )
            else:
                assert torch.equal(own, theirs[name]), name


def test_stochastic_rounding_repeats_and_depends_on_seed_and_step() -> None:
    found = []
    for _ in range(2):
        state = at_level("O2", storage={"stochastic_rounding": True})
        for step in range(3):
            train_step(state, [microbatch(step)])
            state.step += 1
        found.append([stored.values() for stored in state.masters.stored])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    stored = state.optimizer.optimizers[0]
    assert isinstance(stored, StoredAdam)
    first, second = state.masters.segments[:2]
    part = Segment(first.param, 64, 128)  # as ranks that own elements have
    keys = {stored._dithers(of, step) for of in (first, second, part) for step in (1, 2)}
    assert len({dither for each in keys for dither in each}) == 18


def test_each_gradient_has_its_own_norm_in_either_format() -> None:
    """Tensor-parallel ranks add up those of some parameters, and take the mean of the others'."""
    state = at_level("O2")
    train_step(state, [microbatch(0)])
    grads = state.masters.stored_grads
    assert len({grad.fmt.name for grad in grads}) == 2
    expected = torch.stack([grad.values().double().square().sum() for grad in grads])
    torch.testing.assert_close(state.masters.squared_norms(), expected, rtol=1e-6, atol=0)


def test_masters_in_fp16_move_where_bf16_ones_stand_still() -> None:
    """Why the paper's masters have 11 significant bits (#2a), and not BF16's 8 (#2b)."""
    moved = {}
    for name in ("fp16", "bf16"):
        state = at_level("O2", storage={"main_params": name}, optim={"lr": 2e-5})
        before = {p: s.values() for p, s in state.masters.own_weights.items()}
        train_step(state, [microbatch(0)])
        same = [(s.values() == before[p]).float() for p, s in state.masters.own_weights.items()]
        moved[name] = 1 - torch.cat([x.flatten() for x in same]).mean().item()
    assert moved["fp16"] > 2 * moved["bf16"] > 0


def test_linears_in_high_precision_read_their_masters_too() -> None:
    """Without FP8 products, at each use; the gradients are those of a weight in BF16."""
    storage = StorageSpec(main_params="fp16", exp_avg="bf16", exp_avg_sq="bf16")
    few = build_run(compute="bf16", optim=optim_spec(storage=storage))
    plain = build_run(compute="bf16")
    for state in (few, plain):
        for step in range(12):
            last = train_step(state, [microbatch(step)])
            state.step += 1
        assert last.is_finite
    assert len(few.masters.own_weights) == 8
    ours, theirs = (forward_backward(state, [microbatch(99)])[0].item() for state in (few, plain))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_fp16_with_its_loss_scale_at_a_level() -> None:
    """A loss scale that overflows FP16 skips the step and falls, as without a level."""
    fp8 = replace(RECIPE, name="tensorwise", power_2_scale=False)
    optim = optim_spec(storage=LEVELS["O2"])
    state = build_run(
        compute="fp16", fp8=fp8, optim=optim, loss_scale=LossScaleSpec(init_scale=2.0**24)
    )
    results = []
    for step in range(16):
        results.append(train_step(state, [microbatch(step)]))
        state.step += 1
    finite = [result for result in results if result.is_finite]
    assert not results[0].is_finite and len(finite) >= 5
    assert finite[-1].loss < finite[0].loss


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_o3_trains_as_o2_bit_for_bit(recipe: Any) -> None:
    """O3 keeps the FP8 weights that O2 makes of its masters at their first use."""
    fp8 = replace(RECIPE, name=recipe, power_2_scale=False)
    losses = []
    for level in ("O2", "O3"):
        state, found = at_level(level, fp8=fp8), []
        for step in range(8):
            found.append(train_step(state, [microbatch(2 * step), microbatch(2 * step + 1)]).loss)
            state.step += 1
        losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("rounding", [False, True])
def test_a_new_format_is_one_entry(rounding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4M3 without a negative zero: stored values are its nearest numbers, found in a table here.

    Neither the C kernels nor the casts know it.
    """
    name: Any = "fp8_e4m3fnuz"
    fmt = StorageFormat(name, torch.float8_e4m3fnuz, 240.0)
    monkeypatch.setitem(STORAGE_FORMATS, name, fmt)
    formats = {"main_grads": name, "main_params": name, "exp_avg": name}
    in_fp32 = build_run(compute="bf16")
    plain = dict(zip(names_of(in_fp32), map(torch.clone, in_fp32.masters.masters), strict=True))
    state = at_level("O2", storage={**formats, "stochastic_rounding": rounding})
    numbers = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    numbers = numbers[numbers.isfinite()]
    assert len(state.masters.own_weights) == 8
    for param, stored in state.masters.own_weights.items():
        exact = plain[pieces_of(param)[0].name]
        table = numbers * stored.dequant_scale
        assert stored.payload.dtype == fmt.dtype and exact.abs().max() > table.max() / 2
        nearest = (exact.flatten()[:, None] - table).abs().min(1).values
        assert torch.equal((stored.values() - exact).abs().flatten(), nearest)
    losses = []
    for step in range(8):
        losses.append(train_step(state, [microbatch(step)]).loss)
        state.step += 1
    assert losses[-1] < losses[0] - 0.05
    assert {x.payload.dtype for x in stored_states(state.optimizer, "exp_avg")} == {fmt.dtype}
