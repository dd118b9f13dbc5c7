"""Tests of FP16: gradients under a dynamic loss scale, overflows, and the scale in checkpoints."""

from __future__ import annotations

import itertools
import math
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, LossScaleSpec, ParallelSpec
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.kit.runs import each_case
from tests.kit.tensors import assembled
from tests.parallel.rank_work import first_update
from tests.ranks import run_ranks
from tests.tiny import build_run, microbatch, optim_spec, run_spec
from tests.train.runs import TWO_RANKS, Place, assert_same

HISTORY = "model.fp8_amax_history_len=1024"  # the default, without FP8

FP16 = ["trainer.precision=16", "model.fp8=False", HISTORY]


def fp16_run(scale: float, *, fp8: Fp8Recipe | None = None, **rule: Any) -> TrainState:
    spec = run_spec(compute="fp16", fp8=fp8, optim=optim_spec(eps=1e-2))
    loss_scale = LossScaleSpec(init_scale=scale, **rule)
    precision = replace(spec.precision, loss_scale=loss_scale)
    return build(replace(spec, precision=precision), single_rank())


def true_gradients(state: TrainState) -> torch.Tensor:
    """Return the mean gradients of one microbatch, as the optimizer gets them without clipping."""
    state.optimizer.spec = replace(state.optimizer.spec, clip_grad_norm=None)
    seen: list[torch.Tensor] = []
    state.optimizer.step = lambda step: seen.append(state.masters.own_grads[0].clone())  # type: ignore[method-assign]
    result = train_step(state, [microbatch(1, ignored=0.3)])
    assert result.is_finite and result.loss_scale == state.loss_scale.scale  # type: ignore[union-attr]
    return seen[0]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


def fp32_gradients() -> torch.Tensor:
    state = build_run(optim=optim_spec(clip_grad_norm=None))
    state.optimizer.step = lambda step: None  # type: ignore[method-assign]
    train_step(state, [microbatch(1, ignored=0.3)])
    return state.masters.own_grads[0].clone()


def test_gradients_are_unscaled_and_survive_only_with_a_scale() -> None:
    exact = fp32_gradients()
    assert error(true_gradients(fp16_run(2.0**12)), exact) < 3e-3
    assert error(true_gradients(fp16_run(2.0**16)), exact) < 3e-3
    assert error(true_gradients(fp16_run(2.0**-16, min_scale=2.0**-16)), exact) > 0.1


def test_the_scale_is_that_of_the_mean_over_all_replicas() -> None:
    """Otherwise the same scale would overflow earlier, the more replicas there are."""
    state, factors = fp16_run(2.0**12), []
    for size in (1, 2):  # the reductions are those of one rank
        state.mesh = replace(state.mesh, dp=replace(state.mesh.dp, size=size))
        train_step(state, [microbatch(1), microbatch(2)])
        factors.append(state.model.head_loss.grad_scale)
    targets = 2 * microbatch(1).targets_BS.size
    assert factors == [2.0**12 / targets, 2.0**12 / (2 * targets)]


@pytest.mark.parametrize("fp8", [None, Fp8Recipe(amax_history_len=4)], ids=["fp16", "fp16 fp8"])
def test_overflows_are_skipped_until_the_scale_fits(fp8: Fp8Recipe | None) -> None:
    state = fp16_run(2.0**32, fp8=fp8, growth_interval=5)
    before = [master.detach().clone() for master in state.masters.masters]
    results = [train_step(state, [microbatch(1)]) for _ in range(40)]
    finite = [result.is_finite for result in results]
    first = finite.index(True)
    assert first > 2 and all(result.scale_falls for result in results[:first])
    assert results[first].loss_scale == 2.0 ** (
        32 - first + 1
    )  # the first overflow does not lower it
    assert state.optimizer.num_updates == sum(finite)
    assert results[-1].loss < results[first].loss
    grown = [b.loss_scale / a.loss_scale for a, b in zip(results, results[1:], strict=False)]  # type: ignore[operator]
    assert 2.0 in grown[first:]
    assert not any(map(torch.equal, state.masters.masters, before))


def test_a_skipped_step_changes_nothing_but_the_scale() -> None:
    state = fp16_run(2.0**32)
    before = [master.detach().clone() for master in state.masters.masters]
    for _ in range(2):
        assert not train_step(state, [microbatch(1)]).is_finite
    assert all(map(torch.equal, state.masters.masters, before))
    assert state.optimizer.num_updates == 0
    assert state.loss_scale is not None and state.loss_scale.scale == 2.0**31


def test_at_the_smallest_scale_it_is_not_the_scalers_any_more() -> None:
    state = fp16_run(2.0, hysteresis=1)
    state.masters.params[0].data[0] = math.inf
    results = [train_step(state, [microbatch(1)]) for _ in range(2)]
    assert [result.scale_falls for result in results] == [True, False]
    assert not any(result.is_finite for result in results)


LAYOUTS = {
    "replicas": ParallelSpec(),
    "ZeRO-1": ParallelSpec(),
    "FSDP": ParallelSpec(fsdp=FsdpSpec()),
    "tensor": ParallelSpec(tp=2),
    "sequence": ParallelSpec(tp=2, sequence_parallel=True),
    "context": ParallelSpec(cp=2),
    "stages": ParallelSpec(pp=2),
}


def clipped_case(limit: tuple[str, float], scale: float | None, layout: str = "") -> Case:
    name = "distributed_fused_adam" if layout == "ZeRO-1" else "adamw"
    optim = optim_spec(name=name, clip_algorithm=limit[0], clip_grad_norm=limit[1])
    loss_scale = None if scale is None else LossScaleSpec(init_scale=scale)
    return Case(
        "fp32" if scale is None else "fp16",
        num_microbatches=4,
        optim=optim,
        loss_scale=loss_scale,
        parallel=LAYOUTS.get(layout, ParallelSpec()),
    )


def test_gradients_are_clipped_as_without_a_scale() -> None:
    """Scales below and above the 128 tokens of a step, on which the factor of the summed loss
    depends. The norm, and gradients clipped by norm or by value, are those of FP32 within a few of
    FP16's roundings of 2^-11, in one process and on two ranks."""
    limits, scales = (("norm", 0.5), ("value", 0.02)), (8.0, 128.0, 2.0**12)
    cases = {
        f"{limit}, {scale}, {layout}": clipped_case(limit, scale, layout)
        for limit, scale, layout in itertools.product(limits, scales, LAYOUTS)
        if scale == 8.0 or layout == "replicas"
    }
    ranks = run_ranks(each_case, 2, {"work": first_update, "cases": cases})
    for limit in limits:
        norm, exact = first_update(clipped_case(limit, None), single_rank())
        wanted = assembled([exact])
        whole = torch.cat([x.flatten() for x in wanted.values()])
        size = whole.norm() if limit[0] == "norm" else whole.abs().max()
        assert size.item() == pytest.approx(limit[1], rel=1e-4) and norm > 2 * limit[1]
        found = {name: [rank[name] for rank in ranks] for name in cases if str(limit) in name}
        for scale in scales:
            alone = first_update(clipped_case(limit, scale), single_rank())
            found[f"{limit}, {scale}, one process"] = [alone]
        for name, results in found.items():
            ours = assembled([grads for _, grads in results])
            own = torch.cat([ours[key].flatten() for key in wanted])
            assert error(own, whole) < 2.0**-7, name
            assert [each for each, _ in results] == pytest.approx(
                [norm] * len(results), rel=2.0**-7
            ), name


# ---- whole runs


def test_a_run_overflows_stops_and_continues(place: Place) -> None:
    """The run is stopped while the scale still falls, and again while it grows."""
    other = replace(place, cwd=place.cwd / "other")
    other.cwd.mkdir()
    flags = [*FP16, "model.native_amp_init_scale=1048576", "model.native_amp_growth_interval=3"]
    flags.append("trainer.max_steps=12")
    done = other.run(*flags)
    assert done.code == 0, done.output
    assert "precision: FP16, FP32 masters, dynamic loss scale" in done.output
    rows = [row for row in other.metrics() if "lr" in row]
    skipped = [row for row in rows if row["grad_norm"] in ("Infinity", "NaN")]
    assert skipped and len(rows) == 12
    assert other.summary()["num_skipped_steps"] == len(skipped)
    assert f"{len(skipped)} of 12, whose gradients were not finite" in done.output
    assert "FP16 overflow: weights unchanged, next loss scale" in done.output
    scales = [row["loss_scale"] for row in rows]
    assert min(scales) < scales[0] == 2**20 and any(
        b > a for a, b in zip(scales, scales[1:], strict=False)
    )
    assert rows[-1]["loss"] < rows[0]["loss"]

    for step in (2, 7):
        done = place.run(*flags, fault=["signalled", int(signal.SIGTERM), step])
        assert done.code == 75, done.output
    assert place.run(*flags).code == 0
    assert_same(place, other)


def test_weights_in_fp8_continue_from_a_skipped_step(place: Place) -> None:
    """An overflow moves the scales of FP8. Weights kept in FP8 are stored by the moved ones, in a
    run that goes on as in one that is continued."""
    other = replace(place, cwd=place.cwd / "other")
    other.cwd.mkdir()
    flags = ["trainer.precision=16", "model.fp8_params=True", "model.native_amp_init_scale=1048576"]
    assert other.run(*flags).code == 0
    first = [row["grad_norm"] for row in other.metrics() if "lr" in row][:2]
    assert all(norm in ("Infinity", "NaN") for norm in first), first
    done = place.run(*flags, fault=["signalled", int(signal.SIGTERM), 2])
    assert done.code == 75, done.output
    assert place.run(*flags).code == 0
    assert_same(place, other)


def test_an_overflow_that_no_scale_helps_is_the_policys(place: Place) -> None:
    flags = [*FP16, "model.native_amp_init_scale=4", "model.hysteresis=1"]
    done = place.run(*flags, fault=["nan_gradient", "final_norm.weight", list(range(3, 10))])
    assert done.code == 3, done.output
    assert "error: step 5: " in done.output and "gradient of final_norm.weight" in done.output
    assert done.output.count("FP16 overflow") == 2


def test_growth_interval_and_hysteresis_of_a_run(place: Place) -> None:
    flags = [*FP16, "model.native_amp_init_scale=1024", "model.hysteresis=2"]
    flags += ["model.native_amp_growth_interval=2", "trainer.max_steps=8"]
    done = place.run(*flags, fault=["nan_gradient", "final_norm.weight", [4, 5, 6]])
    assert done.code == 0, done.output
    scales = [row["loss_scale"] for row in place.metrics() if "lr" in row]
    assert scales == [1024, 1024, 2048, 2048, 2048, 1024, 512, 512]


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_tensor_parallel_ranks_skip_the_same_steps(fp8: bool, place: Place) -> None:
    """An overflow on one rank counts on both: scale and losses are those of one process."""
    flags = [*([] if fp8 else ["model.fp8=False", HISTORY]), "trainer.precision=16"]
    flags += ["model.native_amp_init_scale=1048576", "model.hysteresis=1", "trainer.max_steps=6"]
    flags += [f"model.{name}_dropout=0" for name in ("hidden", "attention", "ffn")]
    rows = {}
    for name, ranks in (("alone", []), ("two", TWO_RANKS)):
        done = place.run(*flags, *ranks, f"exp_manager.name={name}")
        assert done.code == 0, done.output
        rows[name] = [row for row in place.metrics(name) if "lr" in row]
    scales = {name: [row["loss_scale"] for row in rows[name]] for name in rows}
    assert scales["two"] == scales["alone"] and scales["two"][-1] < 2**20
    losses = {name: [row["loss"] for row in rows[name]] for name in rows}
    assert losses["two"] == pytest.approx(losses["alone"], rel=5e-3)
    assert place.summary("two")["num_skipped_steps"] == place.summary("alone")["num_skipped_steps"]
