"""Scales of FP8-LM's sums, masters and moments that are wrong by 3 % between ranks are found.

FP8 rounds by up to 6 %, so no bound of rounding finds them. Sums have the bits of the rule. States
of a rank that owns whole tensors, or parts, have those of replicas, which update without messages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.cases import Case
from tests.kit.runs import on_mesh
from tests.optim.masters_bugs import IN_STATES, IN_SUMS
from tests.optim.masters_work import Summed, Sums, sums, train
from tests.optim.test_masters_ranks import (
    SMALL,
    Found,
    assert_the_sum_follows_its_rule,
    assert_the_sum_is_rounded_once,
    case,
)
from tests.optim.test_partitions_elements import assert_same_whole, by
from tests.ranks import run_ranks

SUMS = {
    "fp32": Summed("fp32"),
    "auto": Summed("auto"),
    "received": Summed("fp32", bug="received"),
    "summed": Summed("fp32", bug="summed"),
    "quantized": Summed("fp32", bug="quantized"),
    "summed in FP8": Summed("auto", bug="summed in FP8"),
    "quantized, summed in FP8": Summed("auto", bug="quantized"),
}


def states() -> dict[str, Case]:
    """In small buckets each rank has half of every tensor. In one bucket a rank has no part of
    some tensors, and learns their scales from others."""
    found = {}
    for level in ("O2", "O3"):
        found[level] = case(level, steps=2)
        found[f"{level}, whole"] = whole = case(level, zero=True, steps=2)
        found[f"{level}, halves"] = by(whole, "elements")
        one_bucket = replace(SMALL, grad_bucket_bytes=1 << 20)
        found[f"{level}, parts"] = replace(by(whole, "elements"), parallel=one_bucket)
    return found


STATES = states()
PLANTED = {
    bug: f"{'O3' if 'FP8' in bug else 'O2'}, {'parts' if 'parts' in bug else 'whole'}"
    for bug in IN_STATES
} | {"amaxes of parts, not agreed on": "O2, halves"}


@pytest.fixture(scope="module")
def trained() -> Found:
    wrong = {bug: replace(STATES[name], faults=(IN_STATES[bug],)) for bug, name in PLANTED.items()}
    return run_ranks(train, 2, {"cases": STATES | wrong})


@pytest.fixture(scope="module")
def summed() -> list[dict[str, Sums]]:
    return on_mesh(sums, 2, jobs=SUMS)


def assert_as_replicas(trained: Found, name: str, like: str) -> None:
    """Each rank has the weights of replicas, and the ranks together their masters and moments."""
    replicas = [rank | {like: trained[0][like]} for rank in trained]
    assert_same_whole(replicas, like, name)


def assert_sums(summed: list[dict[str, Sums]], name: str) -> None:
    if SUMS[name].how == "fp32":
        assert_the_sum_is_rounded_once(summed, name)
    else:
        assert_the_sum_follows_its_rule(summed, name, "auto")


@pytest.mark.parametrize("name", [name for name in STATES if "," in name])
def test_states_of_ranks_are_those_of_replicas(trained: Found, name: str) -> None:
    assert_as_replicas(trained, name, name[:2])


@pytest.mark.parametrize("bug", IN_STATES)
def test_a_wrong_scale_of_a_state_is_found(trained: Found, bug: str) -> None:
    with pytest.raises(AssertionError):
        assert_as_replicas(trained, bug, PLANTED[bug][:2])


@pytest.mark.parametrize("name", SUMS)
def test_a_wrong_scale_of_a_sum_is_found(summed: list[dict[str, Sums]], name: str) -> None:
    if SUMS[name].bug is None:
        assert_sums(summed, name)
        return
    with pytest.raises(AssertionError):
        assert_sums(summed, name)


def test_every_bug_is_planted() -> None:
    assert {job.bug for job in SUMS.values() if job.bug} == set(IN_SUMS)
