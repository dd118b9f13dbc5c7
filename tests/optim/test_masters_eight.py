"""FP8-LM over eight gloo ranks against one process: sums, levels and ZeRO, and planted mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kit.cases import Case
from tests.kit.runs import alone, on_mesh
from tests.optim.masters_work import Sums, sums, train, train_case
from tests.optim.test_masters import LEVELS
from tests.optim.test_masters_ranks import (
    JOBS,
    Found,
    assert_sums_are_right,
    case,
    exact_gradients,
    of_one_parameter,
    rounding_by_amax,
    together,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

SUMMED = ("fp32", "auto", "pre", "fp32, whole", "auto, whole")
BUGS = [name for name, job in JOBS.items() if job.bug]
EIGHT: dict[str, Any] = {"num_microbatches": 8, "batch": 1}
NO_PRODUCTS: dict[str, Any] = {"fp8": None, "steps": 1, **EIGHT}


def levels() -> dict[str, Case]:
    """Every level as replicas, whole tensors (ZeRO-1, ZeRO-2) and elements; and what has no other
    rounding than that of gradients."""
    cases = {}
    for level in LEVELS:
        cases[level] = case(level, **EIGHT)
        cases[f"{level}, ZeRO-1"] = zero = case(level, zero=True, **EIGHT)
        cases[f"{level}, ZeRO-2"] = replace(zero, optim=replace(zero.optim, shards_grads=True))
        elements = replace(zero.optim, shards_grads=True, shard_by="elements")
        cases[f"{level}, elements"] = replace(zero, optim=elements)
        cases[f"exact {level}"] = case(level, **NO_PRODUCTS)
        exact = replace(cases[f"exact {level}"].optim, name=zero.optim.name, shard_by="elements")
        cases[f"exact {level}, elements"] = replace(cases[f"exact {level}"], optim=exact)
    cases["a mistake"] = replace(cases["exact O2"], bug="gradients' scales are not sent")
    return cases


CASES = levels()


@pytest.fixture(scope="module")
def summed() -> list[dict[str, Sums]]:
    jobs = {name: JOBS[name] for name in (*SUMMED, *BUGS)}
    return on_mesh(sums, 8, jobs=jobs)


@pytest.mark.parametrize("name", SUMMED)
def test_eight_ranks_sum_as_one_process(summed: list[dict[str, Sums]], name: str) -> None:
    assert_sums_are_right(summed, name)


@pytest.mark.parametrize("name", BUGS)
def test_the_bounds_of_eight_ranks_tell_planted_mistakes(
    summed: list[dict[str, Sums]], name: str
) -> None:
    with pytest.raises(AssertionError):
        assert_sums_are_right(summed, name)


@pytest.fixture(scope="module")
def trained() -> Found:
    return run_ranks(train, 8, {"cases": CASES})


def assert_gradients_are_right(ranks: Found, name: str, like: Case) -> None:
    """A rank's one microbatch is rounded once with its own amax, and the sum of all once more."""
    found, exact = together(ranks, name, "first_gradients"), exact_gradients(like)
    assert found.keys() == exact.keys()
    for tensor, parts in exact.items():
        whole = torch.stack(parts).sum(0)
        bound = 1e-5 * whole.abs().max() + torch.full_like(whole, 1e-7)
        if whole.dim() == 2 and tensor.startswith("layers."):
            peers = of_one_parameter(exact, tensor)
            for part, peer in zip(parts, peers, strict=True):
                bound = bound + rounding_by_amax(part, peer.abs().max().item())
            amax = 1.1 * torch.stack(peers).sum(0).abs().max().item()
            bound = bound + rounding_by_amax(whole.abs() + bound, amax)
        assert ((found[tensor] - whole).abs() <= bound).all(), tensor


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("exact")])
def test_gradients_of_eight_ranks_are_one_process_s_within_rounding(
    trained: Found, name: str
) -> None:
    assert_gradients_are_right(trained, name, CASES[name])


def test_the_bounds_of_gradients_tell_scales_that_are_not_sent(trained: Found) -> None:
    with pytest.raises(AssertionError):
        assert_gradients_are_right(trained, "a mistake", CASES["exact O2"])


@pytest.mark.parametrize("level", LEVELS)
def test_eight_ranks_learn_as_one_process_does(trained: Found, level: str) -> None:
    """The losses within 2 %: amaxes of FP8 products are of eight microbatches and not of one."""
    ((one,),) = alone(train_case, {level: CASES[level]}).values()
    for rank in trained:
        assert rank[level].losses == trained[0][level].losses
        assert rank[level].losses == pytest.approx(one.losses, rel=2e-2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["ZeRO-2", "elements"])
def test_eight_shards_train_as_zero_1_bit_for_bit(trained: Found, level: str, kind: str) -> None:
    """Replicas sum FP32 gradients in the order that gloo chooses, so their bits are others."""
    first, name = f"{level}, ZeRO-1", f"{level}, {kind}"
    for rank in trained:
        assert rank[first].losses == rank[name].losses
        assert rank[first].losses == pytest.approx(rank[level].losses, rel=1e-2)
        assert rank[first].norms == pytest.approx(rank[name].norms, rel=1e-6)
        for key, weight in rank[first].weights.items():
            assert torch.equal(weight, rank[name].weights[key]), key
    for field in ("masters", "moments"):
        whole, shards = together(trained, first, field), together(trained, name, field)
        assert whole.keys() == shards.keys()
        assert all(torch.equal(shards[key], tensor) for key, tensor in whole.items())
    params = sum(t.numel() for t in together(trained[:1], level, "masters").values())
    for sharded in (first, name):
        moments = sum(rank[sharded].bytes_of_moments for rank in trained)
        assert moments == (8 if level == "O1" else 3) * params
