"""What ranks tell each other, as `test_messages.py` starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from megafp8.errors import RunError
from megafp8.parallel.agreement import first_known, from_main, gather, on_all, on_main
from megafp8.parallel.mesh import join
from megafp8.specs import ParallelSpec
from tests.kit.cases import Case
from tests.kit.runs import each_case
from tests.parallel.rank_work import run_case
from tests.ranks import Rank


def agree(rank: Rank) -> None:
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
        try:
            act(mesh, fails)
        except RunError as error:
            assert str(error) == "rank 0" and error.is_shared
        else:
            raise AssertionError("no error")


def without_pickles(rank: Rank, cases: dict[str, Case]) -> None:
    """Run a step of each case while torch can neither pickle nor unpickle."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch pickles an object")

    private: Any = distributed_c10d
    private._object_to_tensor = private._tensor_to_object = refuse
    each_case(rank, run_case, cases)
