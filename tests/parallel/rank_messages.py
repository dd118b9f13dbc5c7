"""What ranks tell each other, as `test_messages.py` starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from megafp8.errors import RunError
from megafp8.parallel.agreement import (
    agree,
    agree_on_parameters,
    first_known,
    from_main,
    gather,
    on_all,
    on_main,
)
from megafp8.parallel.mesh import join
from megafp8.specs import ParallelSpec
from megafp8.specs.geometry import Piece
from tests.kit.cases import Case
from tests.kit.runs import each_case
from tests.parallel.rank_work import run_case
from tests.ranks import Rank


def agree_on_values(rank: Rank) -> None:
    """Exchange values of different lengths, and an error."""
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    own = {"rank": rank.index, "path": Path("x" * (1 + 1000 * rank.index))}
    assert [part["rank"] for part in gather(mesh, own)] == list(range(rank.size))
    assert gather(mesh, own)[-1]["path"] == Path("x" * (1 + 1000 * (rank.size - 1)))
    assert from_main(mesh, own if mesh.is_main else None)["rank"] == 0
    assert first_known(mesh, None if mesh.is_main else "second") == "second"

    def fails() -> None:
        raise RunError(f"rank {rank.index}")

    for act in (on_main, on_all):
        with pytest.raises(RunError) as raised:
            act(mesh, fails)
        assert str(raised.value) == "rank 0" and raised.value.is_shared
    assert agree(mesh, rank.index == 1, False) == [True, False]


def name_the_cause(rank: Rank) -> None:
    """Of two errors that of the rank which did not merely miss a folder."""
    mesh = join(ParallelSpec(devices_per_node=rank.size))

    def fails() -> None:
        raise RunError(("folder: ENOENT", "the disk is full")[rank.index])

    with pytest.raises(RunError, match="the disk is full"):
        on_all(mesh, fails)


def hold_other_parts(rank: Rank) -> None:
    """Replicas with other parts of one parameter do not sum its gradients."""
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    param: Any = nn.Parameter(torch.zeros(2))
    param.pieces = (Piece("weight", (4,), (2 * rank.index,), (slice(0, 2),)),)
    with pytest.raises(RunError, match=r"weight \(0,\) on rank 0 and weight \(2,\) on rank 1"):
        agree_on_parameters(mesh, [param])


def without_pickles(rank: Rank, cases: dict[str, Case]) -> None:
    """Run a step of each case while torch can neither pickle nor unpickle."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch pickles an object")

    private: Any = distributed_c10d
    private._object_to_tensor = private._tensor_to_object = refuse
    each_case(rank, run_case, cases)
