"""The dry run of Transformer Engine's layers with FSDP is compared with real ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.te_cpu import DEFAULT_VERSION
from megafp8.train.dryrun import RankShare
from megafp8.train.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.te_cpu.sources import need_sources
from tests.train import dryrun_work
from tests.train.dryrun_work import Most, is_start
from tests.train.test_dryrun import ALONE, FP8, LLAMA, SMALL, layout, run_spec_of, with_te

RECOMPUTED = {"recompute": RecomputeSpec(granularity="full", method="uniform", num_layers=1)}
SHARDED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {"fp8": FP8},
    "fp8 alone": {"fp8": ALONE},
    "tensorwise": {"fp8": Fp8Recipe(name="tensorwise")},
    "fp32": {"compute": "fp32"},
    "one microbatch": {"fp8": FP8, "batch": 4},
    "kept, sums in bf16": {
        "fp8": FP8,
        "fsdp": FsdpSpec(strategy="grad", grad_reduce_dtype="bf16"),
    },
    "fp8 alone, tensorwise, llama": {
        "fp8": Fp8Recipe(name="tensorwise", params_in_fp8=True),
        "shape": LLAMA,
    },
    "mxfp8, llama": {"fp8": Fp8Recipe(name="mxfp8", backward_format="e4m3"), "shape": LLAMA},
    "recomputed": {"fp8": FP8, "shape": RECOMPUTED},
    "nvfp4": {"fp8": Fp8Recipe(name="nvfp4", backward_format="e4m3")},
}
FAST = ("bf16", "delayed", "fp8 alone", "tensorwise")
TWO = layout(dp=2)
WITHIN = {"nvfp4": 0.02}
"""Its cast by torch's operations makes more tensors than the memory without values has."""


def spec_of(name: str, parallel: ParallelSpec) -> RunSpec:
    case = dict(SHARDED[name])
    fsdp = case.pop("fsdp", FsdpSpec())
    if parallel.num_nodes > 1:
        fsdp = replace(fsdp, strategy="hybrid")
    case["shape"] = SMALL | {"activation": "gelu-tanh"} | case.get("shape", {})
    return with_te(run_spec_of(replace(parallel, fsdp=fsdp), **case))


def measured(parallel: ParallelSpec, names: Iterable[str]) -> list[dict[str, Most]]:
    cases = {name: spec_of(name, parallel) for name in names}
    work = dryrun_work.most_of_fsdp_te
    found: list[dict[str, Most]] = run_ranks(
        work, parallel.world_size, {"cases": cases}, timeout=400
    )
    return found


def assert_counted(parallel: ParallelSpec, real: list[dict[str, Most]], **planted: Any) -> None:
    """A dry run has the most bytes of each rank within 1 %, at the start and in a step."""
    cases = {name: spec_of(name, parallel) for name in real[0]}
    given = {"cases": cases, **planted}
    shares: dict[str, list[RankShare]]
    (shares,) = run_ranks(dryrun_work.shares_of_te, 1, given, timeout=400)
    for rank, found in enumerate(real):
        for name, most in found.items():
            share, where, rel = shares[name][rank], f"{name}, rank {rank}", WITHIN.get(name, 0.01)
            assert is_start(most.start, share, cases[name].parallel), where
            assert share.in_step == pytest.approx(min(most.steps), rel=rel), where


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[str, Most]]:
    need_sources(DEFAULT_VERSION)
    return measured(TWO, FAST)


def test_ranks_hold_what_the_dry_run_says(of_two_ranks: list[dict[str, Most]]) -> None:
    assert_counted(TWO, of_two_ranks)


def no_copies(self: LiveBytes, tensors: object) -> int:
    """All bytes that the first microbatch leaves are those of gradients and scales."""
    return self.bytes()


def no_gathers(self: LiveBytes) -> int:
    return 0


@pytest.mark.parametrize(
    ("place", "wrong", "name"),
    [
        ("megafp8.train.live_bytes.LiveBytes.bytes_of", no_copies, "delayed"),
        ("megafp8.train.live_bytes.LiveBytes.watched", no_gathers, "bf16"),
    ],
    ids=["copies of weights", "gathered weights"],
)
def test_a_wrong_size_is_found(
    place: str, wrong: Any, name: str, of_two_ranks: list[dict[str, Most]]
) -> None:
    some = [{name: rank[name]} for rank in of_two_ranks]
    with pytest.raises(AssertionError, match=name):
        assert_counted(TWO, some, planted={place: wrong})


@pytest.mark.slow
def test_two_ranks_in_other_cases() -> None:
    need_sources(DEFAULT_VERSION)
    assert_counted(TWO, measured(TWO, [name for name in SHARDED if name not in FAST]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelSpec(num_nodes=2, devices_per_node=2),
        layout(dp=2, tp=2, sequence_parallel=True),
        layout(dp=2, pp=2),
    ],
    ids=["hybrid", "tp 2, sequence", "pp 2"],
)
def test_four_ranks_hold_what_the_dry_run_says(parallel: ParallelSpec) -> None:
    need_sources(DEFAULT_VERSION)
    assert_counted(parallel, measured(parallel, ["delayed", "fp8 alone"]))
