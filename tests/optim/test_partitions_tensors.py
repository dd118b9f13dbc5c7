"""FP8-LM's ZeRO, stage 2: gradients that a rank does not own are freed when they were sent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cases import Case
from tests.kit.runs import alone, on_mesh, on_ranks
from tests.kit.tensors import assert_same, assert_same_pieces
from tests.optim import masters_work
from tests.optim.masters_work import Trained, exchange, going_on, saving, train, train_case
from tests.optim.test_masters import LEVELS
from tests.optim.test_masters_ranks import DEEP, PP, SMALL, SP, Found, case, path_of
from tests.optim.test_partitions_elements import assert_same_whole
from tests.optim.zero_work import memory_of_gradients
from tests.ranks import run_ranks


def stage_2(like: Case) -> Case:
    return replace(like, optim=replace(like.optim, shards_grads=True))


def both(name: str, like: Case) -> dict[str, Case]:
    return {name: like, f"{name}, ZeRO-2": stage_2(like)}


def assert_same_training(one: Trained, two: Trained, name: str) -> None:
    """Bit for bit, but for NaN, which a spoiled step's norm is."""
    assert one.losses == two.losses and str(one.norms) == str(two.norms), name
    assert_same(one.weights, two.weights)
    for field in ("first_gradients", "masters", "moments"):
        assert_same_pieces(getattr(one, field), getattr(two, field))
    assert one.named == two.named and one.traffic == two.traffic, name


MANY: dict[str, Any] = {"zero": True, "num_microbatches": 6}
TWO = {
    **{key: c for level in LEVELS for key, c in both(level, case(level, zero=True)).items()},
    **both("three microbatches a rank", case("O2", **MANY)),
    **both("summed in FP8", case("O2", **MANY, storage={"reduction": "auto"})),
    **both("clipped", case("O3", zero=True, clip=0.5)),
    **both("spoiled", case("O3", spoiled=1, **MANY)),
    **both("gradients in FP32", case("O2", zero=True, storage={"main_grads": "fp32"})),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    root = tmp_path_factory.mktemp("checkpoints")
    cases = saving(TWO, {"three microbatches a rank, ZeRO-2"}, root)
    return root, run_ranks(train, 2, {"cases": cases})


@pytest.mark.parametrize("name", [name for name in TWO if "ZeRO-2" not in name])
def test_stage_2_trains_as_stage_1_bit_for_bit(trained: tuple[Path, Found], name: str) -> None:
    for rank in trained[1]:
        assert_same_training(rank[name], rank[f"{name}, ZeRO-2"], name)


def test_a_skip_is_named_by_the_owner_of_the_gradient(trained: tuple[Path, Found]) -> None:
    for rank in trained[1]:
        found = rank["spoiled, ZeRO-2"]
        assert math.isnan(found.norms[1]) and math.isfinite(found.norms[2])
        assert found.named is not None and found.named.startswith("gradient of layers.0.")


def test_its_checkpoint_continues_in_stage_1_and_in_one_process(
    trained: tuple[Path, Found],
) -> None:
    root, before = trained
    name = "three microbatches a rank"
    path = path_of(root, f"{name}, ZeRO-2")
    loads = {"same": TWO[f"{name}, ZeRO-2"], "stage 1": TWO[name]}
    cases = {key: going_on(like, path) for key, like in loads.items()}
    ranks = run_ranks(train, 2, {"cases": cases})
    for rank, was in zip(ranks, before, strict=True):
        for found in rank.values():
            assert found.losses == was[f"{name}, ZeRO-2, continued"].losses
            assert_same_pieces(found.masters, was[f"{name}, ZeRO-2, continued"].masters)
    ((one,),) = alone(train_case, {"one": going_on(TWO[name], path)}).values()
    assert one.losses == pytest.approx(ranks[0]["same"].losses, rel=2e-2)


LINEARS = 4 * 32 * (96 + 32 + 2 * 64)
LARGEST = 32 * 96
ALONE: dict[str, Any] = {
    "zero": True,
    "fp8": None,
    "model": DEEP,
    "storage": {"exp_avg": "fp32", "exp_avg_sq": "fp32"},
}


def test_a_rank_holds_its_own_gradients_and_those_on_their_way() -> None:
    """The linears' gradients are the only FP8 tensors of these runs, and each of 16 fills a bucket.

    All are sent during the backward pass; in stage 1 the first step only learns their order. With
    one microbatch a rank has at most its own half, two buckets that are filled or sent, and what
    arrives of a third. With two microbatches the gradients of the first wait for the second.
    """
    cases = {
        **both("one microbatch", case("O1", num_microbatches=2, **ALONE)),
        **both("two microbatches", case("O1", num_microbatches=4, **ALONE)),
    }
    half = LINEARS // 2
    limits = {
        (2, False): (2 * LINEARS, LINEARS),
        (2, True): (half + 3 * LARGEST, half),
        (4, False): (2 * LINEARS, LINEARS),
        (4, True): (LINEARS + 2 * LARGEST, half),
    }
    found = on_ranks(memory_of_gradients, cases, 2, limits=limits)
    for rank in range(2):
        for name in ("one microbatch", "two microbatches"):
            first, second = found[name][rank], found[f"{name}, ZeRO-2"][rank]
            assert first.losses == second.losses
            assert first.started == [0, 16, 16] and second.started == [16, 16, 16]
            assert first.after == [LINEARS] * 3 and second.after == [half] * 3
            assert all(min(step) >= LINEARS for step in first.at_gradients)
        single, summed = (
            found[f"{n}, ZeRO-2"][rank] for n in ("one microbatch", "two microbatches")
        )
        for step in single.at_gradients:  # the first step too
            assert max(step) <= half + 3 * LARGEST < LINEARS
        for step in summed.at_gradients[1:]:  # the sums of the first step are there before
            assert LINEARS <= max(step) <= LINEARS + 2 * LARGEST and min(step) < LINEARS // 4


@pytest.mark.parametrize("how", ["FP32", "in low precision", "summed in FP8"])
def test_an_owner_receives_no_more_than_a_bucket_at_a_time(how: str) -> None:
    """Four ranks, of which one owns nine tenths of a bucket. From all ranks together no more than a
    bucket arrives in a round; beside it are a copy of what is sent, and the FP32 sums of numbers in
    low precision. In one round 3.6 buckets would arrive. The sums are those of the values."""
    size = 4 if how == "FP32" else 1
    bucket = size * (9 + 1) * EXCHANGED
    sums = 4 * 9 * EXCHANGED if how != "FP32" else 0
    small = 4096  # scales and amaxes
    ranks = on_mesh(exchange, 4, how=how, elements=EXCHANGED)
    for most, num_sent, is_right in ranks:
        assert is_right and num_sent == bucket
        assert most <= 2 * bucket + sums + small
    assert max(most for most, *_ in ranks) >= bucket


EXCHANGED = 40_000
PP_TIED = {"model": DEEP, "parallel": replace(SMALL, pp=2, pipeline=PP)}
ZB = replace(PP, schedule="ZBVZeroBubble", stages_per_rank=2)
FOUR = {
    **both("tp x dp", case("O2", **MANY | {"num_microbatches": 4}, parallel=replace(SMALL, tp=2))),
    **both("tp x dp, sequence", case("O3", **MANY | {"num_microbatches": 4}, parallel=SP)),
    **both("pp x dp, tied", case("O2", **MANY | {"num_microbatches": 4}, **PP_TIED)),
    **both(
        "zero bubble",
        case(
            "O1",
            **MANY | {"num_microbatches": 4},
            model=DEEP,
            parallel=replace(SMALL, pp=2, pipeline=ZB),
        ),
    ),
    **both("cp x dp", case("O2", **MANY | {"num_microbatches": 4}, parallel=replace(SMALL, cp=2))),
}


@pytest.mark.slow
def test_stage_2_in_all_layouts_of_four_ranks() -> None:
    ranks = run_ranks(train, 4, {"cases": FOUR})
    for name in FOUR:
        if "ZeRO-2" not in name:
            for rank in ranks:
                assert_same_training(rank[name], rank[f"{name}, ZeRO-2"], name)


def test_a_new_partition_is_one_entry() -> None:
    """Ranks that own one tensor after the other store the numbers of the replicas."""
    zero = case("O3", zero=True)
    turns: Any = "turns"
    cases = {
        "replicas": case("O3"),
        "by size": zero,
        "by turns": replace(zero, optim=replace(zero.optim, shard_by=turns)),
    }
    ranks = run_ranks(masters_work.train_with_turns, 2, {"cases": cases})
    assert_same_whole(ranks, "replicas", "by turns")
    owned = [tuple(rank[name].num_owned for rank in ranks) for name in cases]
    assert owned[0][0] == owned[0][1] == sum(owned[1]) == sum(owned[2])
    assert owned[2][0] - owned[2][1] in (0, 1) and owned[1] != owned[2]
