"""Compiled layers under each kind of parallelism do what eager ones do on the same ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec
from megafp8.train.compile import cannot_trace, why_not_compilable
from tests.parallel import rank_compile
from tests.ranks import run_ranks

if reason := why_not_compilable(torch.device("cpu")) or cannot_trace():
    pytest.skip(reason, allow_module_level=True)

DELAYED = Fp8Recipe(amax_history_len=4)
TENSORWISE = Fp8Recipe(name="tensorwise")
FSDP = ParallelSpec(devices_per_node=2, fsdp=FsdpSpec())
CASES: dict[str, dict[str, Any]] = {
    "FSDP, tensorwise": {"fp8": TENSORWISE, "parallel": FSDP},
    "FSDP, torchao": {"fp8": TENSORWISE, "parallel": FSDP, "backend": "torchao"},
    "tensor parallel": {"fp8": DELAYED, "parallel": ParallelSpec(devices_per_node=2, tp=2)},
}
MORE: dict[str, dict[str, Any]] = {
    "FSDP, BF16": {"fp8": None, "parallel": FSDP},
    "FSDP, delayed": {"fp8": DELAYED, "parallel": FSDP},
    "FSDP that keeps weights": {
        "fp8": DELAYED,
        "parallel": ParallelSpec(devices_per_node=2, fsdp=FsdpSpec(strategy="grad")),
    },
    "FSDP, FP8 weights": {"fp8": replace(DELAYED, params_in_fp8=True), "parallel": FSDP},
    "sequence parallel": {
        "fp8": DELAYED,
        "parallel": ParallelSpec(devices_per_node=2, tp=2, sequence_parallel=True),
    },
    "pipeline": {"fp8": DELAYED, "parallel": ParallelSpec(devices_per_node=2, pp=2)},
}
HYBRID = ParallelSpec(num_nodes=2, devices_per_node=2, fsdp=FsdpSpec(strategy="hybrid"))
RING = ParallelSpec(devices_per_node=2, cp=2)


def compared(
    cases: dict[str, dict[str, Any]], *, with_inductor: bool = False, ranks: int = 2
) -> dict[str, Any]:
    of_bf16 = {name: {"compute": "bf16", **case} for name, case in cases.items()}
    arguments = {"cases": of_bf16, "with_inductor": with_inductor}
    of_ranks = run_ranks(rank_compile.compare, ranks, arguments)
    assert of_ranks[0].keys() == of_ranks[1].keys() == cases.keys()
    for name in cases:
        assert "error" not in of_ranks[0][name], (name, of_ranks[0][name])
        assert of_ranks[0][name]["compiled"] == of_ranks[1][name]["compiled"], name
    return dict(of_ranks[0])


def check(cases: dict[str, dict[str, Any]], *, ranks: int = 2) -> None:
    """Without fusion the bits are the same, and a layer with our linears is one graph."""
    for name, found in compared(cases, ranks=ranks).items():
        assert found["compiled"] == found["eager"], (name, found)
        if cases[name].get("backend", "native") == "native":
            assert found["graphs"] == 1 and found["breaks"] == [], (name, found)


def test_two_ranks_that_compile_are_the_eager_ones() -> None:
    check(CASES)


@pytest.mark.slow
def test_more_layouts_of_two_ranks() -> None:
    check(MORE)


@pytest.mark.slow
def test_two_nodes_that_shard_within_each() -> None:
    check({"hybrid": {"fp8": DELAYED, "parallel": HYBRID}}, ranks=4)


@pytest.mark.slow
def test_why_context_parallelism_is_refused() -> None:
    """torch compiles no messages between two ranks, so that a layer is many graphs."""
    found = compared({"ring": {"fp8": DELAYED, "parallel": RING}})["ring"]
    assert found["compiled"] == found["eager"]
    assert found["graphs"] > 1 and any("P2P" in reason for reason in found["breaks"])


@pytest.mark.slow
def test_inductor_on_two_ranks_stays_near() -> None:
    """A last bit of BF16 may change an FP8 code to its neighbour."""
    for name, found in compared(CASES, with_inductor=True).items():
        eager, fused = ([loss for loss, _ in found[how]] for how in ("eager", "compiled"))
        assert fused == pytest.approx(eager, rel=2e-3), (name, found)
        assert found["graphs"] >= 1, (name, found)
