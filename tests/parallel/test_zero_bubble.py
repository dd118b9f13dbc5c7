"""A step on two stages, looked at from inside: what is cast, recorded, multiplied, and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.parallel.rank_probes import Recorded, record
from tests.parallel.test_pipeline import SCHEDULES
from tests.tiny import gpt_spec

MICROBATCHES = 4
ONE = Case("bf16", Fp8Recipe(), gpt_spec(num_layers=4), num_microbatches=MICROBATCHES)
CASES = {
    name: replace(ONE, parallel=ParallelSpec(pp=2, pipeline=SCHEDULES[name]))
    for name in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
}
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Recorded]]:
    return on_ranks(record, CASES, 2)


@pytest.fixture(scope="module")
def one() -> Recorded:
    return record(ONE, single_rank())


@pytest.mark.parametrize("schedule", CASES)
def test_each_tensor_is_cast_once_a_microbatch(
    ranks: dict[str, list[Recorded]], one: Recorded, schedule: str
) -> None:
    """And each weight once a step: both ranks' casts together are those of one process."""
    casts: Counter[str] = Counter()
    for rank in ranks[schedule]:
        assert not casts.keys() & rank.casts.keys(), "each tensor is on one stage"
        casts.update(rank.casts)
    assert casts == one.casts and len(casts) == 4 * 4 * 3
    for name, count in casts.items():
        assert count == (1 if name.endswith(".weight") else MICROBATCHES), name


@pytest.mark.parametrize("schedule", CASES)
def test_amaxes_are_rolled_once_a_microbatch_and_stage(
    ranks: dict[str, list[Recorded]], schedule: str
) -> None:
    for rank in ranks[schedule]:
        assert rank.num_stages == SCHEDULES[schedule].stages_per_rank
        count = MICROBATCHES * rank.num_stages
        assert rank.updates == {"forward": count, "backward": count}


@pytest.mark.parametrize("schedule", CASES)
def test_every_product_is_computed_once_a_microbatch(
    ranks: dict[str, list[Recorded]], one: Recorded, schedule: str
) -> None:
    products = Counter(product for rank in ranks[schedule] for product in rank.products)
    assert products == Counter(one.products) and set(products.values()) == {MICROBATCHES}


def waiting(rank: Recorded) -> list[int]:
    """How many other products lie between each input gradient and its weight's gradient."""
    begun: dict[str, list[int]] = {}
    distances = []
    for place, (kind, linear) in enumerate(rank.products):
        if kind == "grad_input":
            begun.setdefault(linear, []).append(place)
        elif kind == "grad_weight":
            distances.append(place - begun[linear].pop(0) - 1)
    assert not any(begun.values())
    return distances


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_zero_bubble_computes_weight_gradients_later(
    ranks: dict[str, list[Recorded]], schedule: str
) -> None:
    """All of a stage's input gradients come first (of 4 linears: a stage is one layer here); on
    some rank the weight gradients wait until other microbatches have been worked on."""
    distances = [waiting(rank) for rank in ranks[schedule]]
    assert all(min(found) >= 3 for found in distances)
    assert max(map(max, distances)) >= 2 * 4


def test_other_schedules_compute_them_at_once(ranks: dict[str, list[Recorded]]) -> None:
    for rank in ranks["1F1B"]:
        assert set(waiting(rank)) == {0}
