"""The dry run of Transformer Engine's layers with FSDP is compared with real ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from megafp8.plan import memory
from megafp8.plan.dryrun import RankShare
from megafp8.plan.memory import rank_memory
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.te_versions import DEFAULT_VERSION, FIRST_WITH_NVFP4, is_before
from megafp8.train.live_bytes import LiveBytes
from tests.plan.test_memory import NARROW, RECIPES, of_fsdp
from tests.ranks import run_ranks
from tests.te_sources import need_sources
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
    "nvfp4": {
        "fp8": Fp8Recipe(name="nvfp4", backward_format="e4m3"),
        "shape": {"num_layers": 4},
    },
}
FAST = ("bf16", "delayed", "fp8 alone", "tensorwise")
TWO = layout(dp=2)
WITHIN = {"nvfp4": 0.02}
"""Its cast by torch's operations makes more tensors of one layer than the memory without values
has, which is 2.2 % of three layers."""


def spec_of(name: str, parallel: ParallelSpec) -> RunSpec:
    case = dict(SHARDED[name])
    fsdp = case.pop("fsdp", FsdpSpec())
    if parallel.num_nodes > 1:
        fsdp = replace(fsdp, strategy="hybrid")
    layers = {"num_layers": 3} if parallel.pp == 1 else {}
    case["shape"] = SMALL | layers | {"activation": "gelu-tanh"} | case.get("shape", {})
    return with_te(run_spec_of(replace(parallel, fsdp=fsdp), **case))


def measured(parallel: ParallelSpec, names: Iterable[str]) -> list[dict[str, Most]]:
    cases = {name: spec_of(name, parallel) for name in names}
    work = dryrun_work.most_of_fsdp_te
    found: list[dict[str, Most]] = run_ranks(work, parallel.world_size, {"cases": cases})
    return found


def assert_counted(parallel: ParallelSpec, real: list[dict[str, Most]], **planted: Any) -> None:
    """A dry run has the most bytes of each rank within 1 %, at the start and in a step."""
    cases = {name: spec_of(name, parallel) for name in real[0]}
    given = {"cases": cases, **planted}
    shares: dict[str, list[RankShare]]
    (shares,) = run_ranks(dryrun_work.shares_of_te, 1, given)
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


GELU = {"activation": "gelu-tanh"}
PLANNED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {"fp8": RECIPES["delayed"]},
    "fp8 alone": {"fp8": RECIPES["fp8 alone"]},
    "tensorwise": {"fp8": RECIPES["tensorwise"]},
    "mxfp8": {"fp8": RECIPES["mxfp8"]},
    "nvfp4": {"fp8": RECIPES["nvfp4"]},
    "recomputed": {"fp8": RECIPES["delayed"], "shape": RECOMPUTED},
    "kept": {"fp8": RECIPES["delayed"], "fsdp": FsdpSpec(strategy="grad")},
    "pp 2": {"fp8": RECIPES["delayed"], "ranks": 4, "pp": 2},
    "llama": {"fp8": RECIPES["delayed"], "shape": LLAMA},
    "llama, fp8 alone": {"fp8": RECIPES["fp8 alone"], "shape": LLAMA},
}

QUICK = ("delayed", "fp8 alone", "mxfp8")


def planned(name: str, version: str) -> RunSpec:
    """Return a job on GPUs whose weights need more than its activations."""
    case = PLANNED[name]
    spec = with_te(of_fsdp(**(case | {"shape": NARROW | GELU | case.get("shape", {})})))
    return replace(spec, precision=replace(spec.precision, te_version=version))


def dry_runs(version: str, names: Iterable[str], **planted: Any) -> dict[str, list[RankShare]]:
    """Return the shares of the first rank of each pipeline stage."""
    need_sources(version)
    cases = {name: planned(name, version) for name in names}
    every = {name: x.parallel.world_size // x.parallel.pp for name, x in cases.items()}
    given = {"cases": cases, "version": version, "planted": planted, "every": every}
    shares: dict[str, list[RankShare]]
    (shares,) = run_ranks(dryrun_work.shares_of_te, 1, given)
    return shares


def assert_planned(version: str, shares: dict[str, list[RankShare]]) -> None:
    """The plan has a dry run's most bytes within 1 %, and its copies but for a few numbers.

    Those are scales of single weights and, with recomputation, states of random numbers.
    """
    for name, found in shares.items():
        for real in found:
            plan = rank_memory(planned(name, version), real.pipeline_rank)
            assert plan.in_step == pytest.approx(real.in_step, rel=0.01), name
            assert plan.step.gathered == real.step.gathered, name
            copies = real.step.weight_copies
            assert plan.step.weight_copies == pytest.approx(copies, abs=2e4), name


@pytest.fixture(scope="module")
def of_the_default() -> dict[str, list[RankShare]]:
    return dry_runs(DEFAULT_VERSION, QUICK)


def test_a_plan_has_the_bytes_of_a_dry_run(of_the_default: dict[str, list[RankShare]]) -> None:
    assert_planned(DEFAULT_VERSION, of_the_default)


def test_a_plan_of_later_versions_has_casts_for_one_use_in_place_of_copies() -> None:
    """At the worst moment the weight of query, key and value is cast for its input's gradient."""
    steps = [rank_memory(planned("delayed", version), 0).step for version in ("2.15.0", "2.16.0")]
    assert [step.weight_copies for step in steps] == [2 * 6 * 12 * 256**2, 0]
    assert steps[1].workspace - steps[0].workspace == 3 * 256**2


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.4.0", DEFAULT_VERSION, "2.15.0", "2.16.0", "2.20.2"])
def test_a_plan_has_the_bytes_of_a_version(version: str) -> None:
    lacks_nvfp4 = is_before(version, FIRST_WITH_NVFP4)
    names = [name for name in PLANNED if name != "nvfp4" or not lacks_nvfp4]
    assert_planned(version, dry_runs(version, names))


def test_copies_that_a_plan_leaves_out_are_found(
    of_the_default: dict[str, list[RankShare]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_weight_copies", lambda *given: 0)
    with pytest.raises(AssertionError):
        assert_planned(DEFAULT_VERSION, of_the_default)


def test_a_wrong_size_of_a_gathered_weight_is_found(
    of_the_default: dict[str, list[RankShare]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "te", replace(BACKENDS["te"], transposes_gathered=False))
    with pytest.raises(AssertionError, match="alone"):
        assert_planned(DEFAULT_VERSION, of_the_default)


def test_a_dry_run_for_gpus_leaves_out_what_emulates_a_kernel() -> None:
    """A product on a CPU makes two FP32 tensors before its result."""
    wrong = {"megafp8.train.live_bytes.is_in_kernel": bool}
    with pytest.raises(AssertionError, match="delayed"):
        assert_planned(DEFAULT_VERSION, dry_runs(DEFAULT_VERSION, ["delayed"], **wrong))
