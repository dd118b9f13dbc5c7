"""FP8-LM's levels over Transformer Engine's layers on two gloo ranks: layouts, ZeRO, checkpoints.

The oracle of the gradients is one process of our own engine in FP32, microbatch by microbatch; the
bounds are those of roundings to FP8 alone (`test_masters_ranks.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.plan.dryrun import rank_share
from megafp8.specs import PipelineSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.backends.te.same_codes import OF_A_FLIP
from tests.kit.cases import Case
from tests.optim import masters_work
from tests.optim.masters_work import Trained, going_on, saving
from tests.optim.test_masters_ranks import PP, SMALL, SP, assert_gradients_are_right, case, together
from tests.ranks import run_ranks
from tests.te_sources import need_sources
from tests.tiny import gpt_spec, run_spec
from tests.train import dryrun_work

GPT = gpt_spec(activation="gelu-tanh")
DEEP = gpt_spec(activation="gelu-tanh", num_layers=4)
TP, STAGES = replace(SMALL, tp=2), replace(SMALL, pp=2, pipeline=PP)
INTERLEAVED = PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)
FULL = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
FORMS: dict[str, dict[str, Any]] = {
    "ZeRO": {},
    "ZeRO-2": {"shards_grads": True},
    "elements": {"shard_by": "elements"},
    "elements, ZeRO-2": {"shard_by": "elements", "shards_grads": True},
}


def of_te(level: str, optim: dict[str, Any] | None = None, **choices: Any) -> Case:
    made = case(level, **({"backend": "te", "model": GPT} | choices))
    return replace(made, optim=replace(made.optim, eps=1e-2, **(optim or {})))


EXACT = {
    "exact, replicas": of_te("O2", fp8=None, steps=1),
    "exact, ZeRO": of_te("O2", fp8=None, steps=1, zero=True),
    "exact, tp": of_te("O2", fp8=None, steps=1, parallel=TP),
    "exact, sp": of_te("O2", fp8=None, steps=1, parallel=SP),
    "exact, pp": of_te("O2", fp8=None, steps=1, parallel=STAGES, model=DEEP),
}
IN_FP32 = {"storage": {"main_grads": "fp32"}}
REPLICAS = {f"{level}, replicas": of_te(level) for level in ("O2", "O3")}
REPLICAS["FP32 gradients, replicas"] = of_te("O2", **IN_FP32)
SHARDED = {
    f"{level}, {form}": of_te(level, optim, zero=True)
    for level in ("O2", "O3")
    for form, optim in FORMS.items()
}
SHARDED |= {
    f"FP32 gradients, {form}": of_te("O2", FORMS[form], zero=True, **IN_FP32)
    for form in ("ZeRO-2", "elements")
}
LAYOUTS = {
    "replicas": of_te("O2"),
    "summed in FP8": of_te("O2", storage={"reduction": "auto"}),
    "tp": of_te("O2", parallel=TP),
    "sp": of_te("O2", parallel=SP),
    "O3, tp": of_te("O3", parallel=TP),
    "pp": of_te("O2", parallel=STAGES, model=DEEP),
    "interleaved stages, recomputed": of_te(
        "O2",
        parallel=replace(SMALL, pp=2, pipeline=INTERLEAVED),
        model=replace(DEEP, recompute=FULL),
    ),
}
BESIDE = {
    f"{name}, {backend}": replace(asked, compute="fp32", backend=backend)
    for name, asked in LAYOUTS.items()
    for backend in ("te", "native")
}
SAVED = ("O2, ZeRO", "O3, elements")
FAST = {*EXACT, "O2, replicas", "O2, ZeRO", "O2, elements, ZeRO-2", "replicas", "tp"}
"""Runs whose tests are fast; the others are trained together too, for slow tests."""
Ranks = list[dict[str, Trained]]
Training = Callable[[str], tuple[Path, Ranks]]


@pytest.fixture(scope="module")
def trained_with(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return what trains a run together with the others of its kind, and the folder of these."""
    need_sources(DEFAULT_VERSION)

    @functools.cache
    def train(is_fast: bool) -> tuple[Path, Ranks]:
        root = tmp_path_factory.mktemp("checkpoints")
        cases = {
            name: asked
            for name, asked in (EXACT | REPLICAS | SHARDED | BESIDE).items()
            if (name in FAST or name.rpartition(", ")[0] in FAST) is is_fast or name in REPLICAS
        }
        return root, run_ranks(masters_work.train, 2, {"cases": saving(cases, SAVED, root)})

    return lambda name: train(name in FAST)


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for each name; those that need the other runs are slow."""
    slow = pytest.mark.slow
    given = [name if name in FAST else pytest.param(name, marks=slow) for name in names]
    return pytest.mark.parametrize("name", given)


@each(EXACT)
def test_gradients_over_ranks_are_those_of_one_process(trained_with: Training, name: str) -> None:
    """In each layout, within the roundings to FP8."""
    assert_gradients_are_right(trained_with(name)[1], name, replace(EXACT[name], backend="native"))


@each(SHARDED)
def test_zero_is_replicas(trained_with: Training, name: str) -> None:
    """Three steps: losses, masters, moments and what the layers read, bit for bit."""
    _, ranks = trained_with(name)
    level = f"{name.partition(', ')[0]}, replicas"
    for field in ("masters", "moments"):
        whole, sharded = (together(ranks, each, field) for each in (level, name))
        assert whole.keys() == sharded.keys()
        for key, tensor in whole.items():
            assert torch.equal(tensor, sharded[key]), (name, key)
    for rank in ranks:
        assert rank[name].losses == rank[level].losses
        assert rank[name].norms == pytest.approx(rank[level].norms, rel=1e-6)
        for key, weight in rank[level].weights.items():
            assert torch.equal(weight, rank[name].weights[key]), (name, key)


@each(LAYOUTS)
def test_layouts_train_as_ours_do(trained_with: Training, name: str) -> None:
    """FP8 products in FP32: numbers that differ in their last bit may be rounded to another FP8
    number. The first step's loss and norm are within 1e-4 and 1 %, all within 1e-3 and 2 %."""
    for rank in trained_with(name)[1]:
        theirs, ours = rank[f"{name}, te"], rank[f"{name}, native"]
        assert theirs.losses[0] == pytest.approx(ours.losses[0], rel=OF_A_FLIP.losses)
        assert theirs.losses == pytest.approx(ours.losses, rel=1e-3)
        assert theirs.norms[0] == pytest.approx(ours.norms[0], rel=OF_A_FLIP.norms)
        assert theirs.norms == pytest.approx(ours.norms, rel=2e-2)
        assert theirs.num_owned == ours.num_owned
        assert theirs.bytes_of_moments == ours.bytes_of_moments
        if name == "replicas":  # gradients in FP8 cross as bytes, there and back
            sent = [[n for key, n in one.traffic.items() if key[2] == "uint8"]
                    for one in (theirs, ours)]  # fmt: skip
            assert sorted(sent[0]) == sorted(sent[1]) and len(sent[0]) == 2


def test_a_dry_run_runs_a_microbatch_at_a_level() -> None:
    """On the meta device autograd delivers the gradients; the bytes of the states are those of our
    own engine."""
    need_sources(DEFAULT_VERSION)
    cases = {}
    for level in ("O1", "O2"):
        asked = of_te(level)
        spec = run_spec(compute="bf16", fp8=asked.fp8, model=GPT, optim=asked.optim)
        cases[level] = replace(spec, precision=replace(spec.precision, backend="te"))
    (shares,) = run_ranks(dryrun_work.shares_of_te, 1, {"cases": cases})
    for level, spec in cases.items():
        (theirs,) = shares[level]
        ours = rank_share(replace(spec, precision=replace(spec.precision, backend="native")), 0)
        assert replace(theirs.held, scaling=0) == replace(ours.held, scaling=0)
        assert theirs.step.workspace > 0 < theirs.step.microbatch


@each(SAVED)
def test_checkpoints_continue_in_other_layouts(trained_with: Training, name: str) -> None:
    """What a sharded run has saved continues bit for bit as replicas and in the other way of
    sharding, and near it under tensor parallelism and in our own engine."""
    root, before = trained_with(name)
    (path,) = (root / name).glob("step*")
    level, other = name[:2], FORMS["elements" if name.endswith("ZeRO") else "ZeRO"]
    loads = {
        "replicas": of_te(level),
        "sharded otherwise": of_te(level, other, zero=True),
        "native": of_te(level, backend="native"),
        "tp": of_te(level, parallel=TP),
    }
    cases = {layout: going_on(like, path) for layout, like in loads.items()}
    ranks = run_ranks(masters_work.train, 2, {"cases": cases})
    for rank, was in zip(ranks, before, strict=True):
        expected = was[f"{name}, continued"]
        for layout in ("replicas", "sharded otherwise"):
            assert rank[layout].losses == expected.losses, layout
            for key, weight in rank[layout].weights.items():
                assert torch.equal(weight, expected.weights[key]), (layout, key)
        for layout in ("native", "tp"):
            assert rank[layout].losses == pytest.approx(expected.losses, rel=5e-3), layout
