"""Megatron-core's own layers over Transformer Engine's Python, on two gloo ranks and on one.

The program is one for GPUs (`megatron_program.py`), and torchrun starts it as a user would. All
ranks see the same tokens, so that every layout computes the function of one rank.

Bounds. In FP32 the layouts differ by the order in which sums are added up: a sum of n terms moves
by at most n 2^-24 of its size, and no more than 12 products of up to 128 terms follow each other.
In FP8 such a difference can also move a number at a tie to its neighbour. All codes together make
the distance between FP8 and FP32, of which the tests know the size. A code changes where a number
is within 12 * 128 * 2^-24 of a tie; E4M3's steps are at least 2^-4 of a number, so that holds for
less than 1 code in 100; each moves by a whole step, at most 4 times the root mean square of
roundings (1 / sqrt(12) of a step); so the layouts are apart by less than 4 sqrt(1 / 100) = 0.4 of
the distance to FP32. Where each rank has a scale of its own, every code is another one: no number
is rounded in steps that are more than twice as wide, so the distance to FP32 is at most twice that
of one rank.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from te_cpu.versions import DEFAULT_VERSION
from tests.te_sources import need_sources

pytest.importorskip("megatron.core", reason="needs the package megatron-core")
pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("megatron_program.py")
ORDER = 12 * 128 * 2.0**-24
FIRST = 2
"""Microbatches of the first step, in which the weights are those of FP32 too."""
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
CURRENT = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
GROUPED = {"moe_grouped_gemm": True}
APART = {"moe_router_padding_for_fp8": True}
MODELS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "dense": (None, {}),
    "dense, delayed": (None, DELAYED),
    "dense, current": (None, CURRENT),
    "experts": (GROUPED, {}),
    "experts, delayed": (GROUPED, DELAYED),
    "experts, current": (GROUPED, CURRENT),
    "experts apart, delayed": (APART, DELAYED),
}
"""By name: settings of the experts, and of the whole model."""
Found = dict[str, Any]


def run(folder: Path, ranks: int, *words: str) -> list[dict[str, Found]]:
    """Start the program as a user does; return what each rank saw."""
    models = {
        name: (ranks if experts is None else 1, 1 if experts is None else ranks, experts, more)
        for name, (experts, more) in MODELS.items()
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "te_cpu", "run", str(PROGRAM)]
    folder.mkdir()
    done = subprocess.run(
        [*command, str(folder), json.dumps(models)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Found]], ...]:
    """Return what one rank saw and what two did, of all models."""
    need_sources(DEFAULT_VERSION)
    folder = tmp_path_factory.mktemp("megatron")
    return tuple(run(folder / str(ranks), ranks) for ranks in (1, 2))


def losses(run: Found) -> torch.Tensor:
    """Return the losses of the tokens, [microbatches, tokens]."""
    return torch.tensor(run["losses"], dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_as_one(name: str, found: Any) -> None:
    [one], two = found
    runs = [each[name] for each in two]
    for key in ("losses", "norms", "histories"):
        if key != "histories" or "experts" not in name:  # each rank has experts of its own
            assert runs[0][key] == runs[1][key], key
    here, there = losses(one[name]), losses(runs[0])
    assert there.shape == (4, 64) and there.isfinite().all()
    assert all(0 < norm < float("inf") for norm in runs[0]["norms"])
    exact = losses(one[name.partition(" ")[0].rstrip(",")])[:FIRST]
    here, there = here[:FIRST], there[:FIRST]
    if "," not in name:
        assert ((here - there).abs() <= ORDER * exact).all()
        assert runs[0]["norms"][0] == pytest.approx(one[name]["norms"][0], rel=3 * ORDER)
        return
    step = (here - exact).norm()
    assert step > ORDER * exact.norm(), "FP8 changes nothing"
    if name == "dense, current":  # each rank's part of a tensor has a scale of its own
        assert (there - exact).norm() <= 2 * step
    elif "delayed" in name:  # experts of two ranks share a history, after scales of 1
        order = ORDER * exact[0].norm()
        assert (there[0] - here[0]).norm() <= 0.4 * (here[0] - exact[0]).norm() + order
        assert (there - exact).norm() <= 2 * step
    else:
        assert (there - here).norm() <= 0.4 * step + ORDER * exact.norm()


@pytest.mark.parametrize("name", [name for name in MODELS if "delayed" in name])
def test_histories_are_filled(name: str, found: Any) -> None:
    """Each tensor has an amax of each of the last three microbatches, and a weight one of each
    step, in the first of which all layouts have the same weights: the amaxes are the same bits."""
    [one], two = found
    of_weights = []
    for run in (one, *two):
        tables = {name: torch.tensor(table) for name, table in run[name]["histories"].items()}
        assert len(tables) >= 16  # four linears of two layers, in both directions
        forward = [table for name, table in tables.items() if name.endswith("scaling_fwd")]
        for table in tables.values():
            assert table.isfinite().all()
            assert (table[:, ::2] > 0).all() and (table[1:] > 0).all()
        of_weights.append(torch.cat([table[1, 1::2] for table in forward]))
    if name == "dense, delayed":
        assert torch.equal(of_weights[0], of_weights[1])


def test_megatron_takes_one_maximum_of_different_experts(found: Any) -> None:
    """Ranks match amaxes by the place of an expert on its rank: 0 and 2 share one, 1 and 3 another.

    tests/parallel/test_experts.py shows that ours have rows of their own, and the scales of one
    process. The weights of the first step are the same in both layouts.
    """
    [one], two = found
    name = "experts, delayed"
    tables = [key for key in one[name]["histories"] if re.search(r"experts\..*scaling_fwd$", key)]
    assert len(tables) == 4  # two linears of two layers
    for key in tables:
        apart = torch.tensor(one[name]["histories"][key])[1, 1::2]
        assert len(set(apart.tolist())) == 4
        mixed = apart.view(2, 2).amax(0)
        for rank in two:
            assert torch.equal(torch.tensor(rank[name]["histories"][key])[1, 1::2], mixed)
