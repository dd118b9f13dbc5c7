"""Accumulation, recomputation, evaluation and FP8 weights change nothing that they should not.

Losses, master weights and scales over whole steps are compared bit for bit.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3
from megafp8.models.parts import Parts
from megafp8.parallel.parts import NativeParts, linears_of
from megafp8.specs import Fp8Recipe
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.precision import ModuleRule, RecipeName
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from megafp8.train.validate import evaluate
from tests.tiny import build_run, gpt_spec, microbatch

STEPS = 4
ALL: tuple[RecipeName, ...] = (
    "delayed",
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "blockwise",
)
ONE_COPY: tuple[RecipeName, ...] = ("delayed", "tensorwise", "blockwise")


def recipe_of(name: RecipeName, **changes: Any) -> Fp8Recipe:
    if name == "delayed":
        changes = {"amax_history_len": 3, **changes}
    return Fp8Recipe(name=name, power_2_scale=name not in ("delayed", "tensorwise"), **changes)


def train(
    recipe: Fp8Recipe, *, num_microbatches: int, evaluates: bool = False, **model: Any
) -> tuple[TrainState, list[float]]:
    state = build_run(compute="bf16", fp8=recipe, model=gpt_spec(**model))
    losses = []
    for step in range(STEPS):
        batches = [microbatch(10 * step + i) for i in range(num_microbatches)]
        losses.append(train_step(state, batches).loss)
        state.step += 1
        if evaluates:
            evaluate(state, [microbatch(99)])
    return state, losses


def assert_same(one: TrainState, other: TrainState, *, staged: bool = True) -> None:
    for left, right in zip(one.masters.masters, other.masters.masters, strict=True):
        assert torch.equal(left, right)
    for direction, table in one.scaling.tables.items():
        theirs = other.scaling.tables[direction].tensors()
        for field, tensor in table.tensors().items():
            if staged or field != "amax":
                assert torch.equal(tensor, theirs[field]), (direction, field)


@pytest.mark.parametrize(
    ("granularity", "num_microbatches", "evaluates", "name"),
    [
        (granularity, count, evaluates, name)
        for granularity, count, evaluates in itertools.product(
            ("full", "selective"), (1, 3), (False, True)
        )
        for name in (ALL if granularity == "full" and count == 3 else ALL[:2])
    ],
)
def test_recomputation_changes_nothing(
    granularity: Literal["full", "selective"],
    num_microbatches: int,
    evaluates: bool,
    name: RecipeName,
) -> None:
    """The forward pass runs again in the backward pass, after scales changed, with dropout."""
    plain, losses = train(
        recipe_of(name),
        num_microbatches=num_microbatches,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    spec = RecomputeSpec(granularity=granularity, method="uniform", num_layers=1)
    again, same_losses = train(
        recipe_of(name),
        num_microbatches=num_microbatches,
        evaluates=evaluates,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        recompute=spec,
    )
    assert losses == same_losses
    assert_same(plain, again)
    ran = [s.counter.flops["fp8", "output"] for s in (plain, again)]
    assert ran[0] > 0
    assert (ran[1] > ran[0]) == (granularity == "full" or evaluates), "it was computed again"


def test_recomputation_with_todays_scales_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is planted: recomputation does not use the snapshot of the scales."""
    plain, _ = train(recipe_of("delayed"), num_microbatches=2)
    monkeypatch.setattr(NativeParts, "recompute_contexts", Parts.recompute_contexts)
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    broken, _ = train(recipe_of("delayed"), num_microbatches=2, recompute=full)
    with pytest.raises(AssertionError):
        assert_same(plain, broken)


@pytest.mark.parametrize("name", ONE_COPY)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_weights_in_fp8_alone_train_the_same(name: RecipeName, num_microbatches: int) -> None:
    """The master weight is rounded twice, as through a BF16 weight: all bits are the same."""
    plain, losses = train(recipe_of(name), num_microbatches=num_microbatches, evaluates=True)
    alone, same_losses = train(
        recipe_of(name, params_in_fp8=True), num_microbatches=num_microbatches, evaluates=True
    )
    assert losses == same_losses
    assert_same(plain, alone, staged=False)  # the amaxes of FP8 weights are known a step earlier
    for linear in linears_of(alone.model):
        assert linear.weight.dtype == E4M3.dtype and linear.weight.grad is None
        stored = linear.weight_form.operands(linear.weight, torch.bfloat16, 0).along_last
        assert (
            isinstance(stored, Fp8Tensor) and stored.payload.data_ptr() == linear.weight.data_ptr()
        )
        assert not hasattr(linear.weight, "initial_master") or linear.weight.initial_master is None


def test_masters_are_seeded_from_the_initialization() -> None:
    """They are not those of the FP8 weights, which have 4 significant bits."""
    plain = build_run(compute="fp32")
    alone = build_run(compute="bf16", fp8=recipe_of("delayed", params_in_fp8=True))
    for ours, theirs in zip(alone.masters.masters, plain.masters.masters, strict=True):
        assert torch.equal(ours, theirs)


def test_bytes_of_weights_in_fp8_alone() -> None:
    """Each element of an FP8 linear's weight takes one byte, and no second copy exists."""
    alone, _ = train(recipe_of("delayed", params_in_fp8=True), num_microbatches=1)
    for linear in linears_of(alone.model):
        form = linear.weight_form
        held = [value for of in (linear, form) for value in vars(of).values()]
        tensors = {t.data_ptr(): t for t in held if isinstance(t, torch.Tensor)}
        assert not any(isinstance(value, Fp8Tensor) for value in held)
        sizes = {pointer: t.nbytes for pointer, t in tensors.items() if t.ndim}
        assert sizes == {linear.weight.data_ptr(): linear.weight.numel()}
        operand = linear.weight_form.operands(linear.weight, torch.bfloat16, 0).along_last
        assert isinstance(operand, Fp8Tensor) and operand.grid is None


def test_modules_out_of_fp8_stay_out() -> None:
    rules = (ModuleRule("layers.0.*", "high_precision"),)
    state, _ = train(recipe_of("delayed", modules=rules, params_in_fp8=True), num_microbatches=1)
    assert not any(name.startswith("layers.0") for name in state.scaling.tables["forward"].names)
    dtypes = {linear.name: linear.weight.dtype for linear in linears_of(state.model)}
    assert {dtype for name, dtype in dtypes.items() if name.startswith("layers.0")} == {
        torch.bfloat16
    }
    assert {dtype for name, dtype in dtypes.items() if name.startswith("layers.1")} == {E4M3.dtype}


def test_evaluation_in_high_precision_leaves_training_alone() -> None:
    for changes in ({}, {"params_in_fp8": True}):
        plain, losses = train(recipe_of("delayed", **changes), num_microbatches=2)
        high, same = train(
            recipe_of("delayed", fp8_in_evaluation=False, **changes),
            num_microbatches=2,
            evaluates=True,
        )
        assert losses == same
        assert_same(plain, high)
        assert high.counter.flops["bf16", "output"] > 0
