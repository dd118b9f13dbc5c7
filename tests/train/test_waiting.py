"""Ranks wait for one that works on files longer than collectives of training may take."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch.distributed as dist

from megafp8.errors import RunError
from megafp8.parallel.rendezvous import _allow_open_files, group_that_waits
from tests.parallel import rank_joins
from tests.ranks import run_ranks


def test_saves_and_loads_may_take_longer_than_collectives(tmp_path: Path) -> None:
    """NCCL's collectives may take 10 minutes, and those of this job 2 seconds while it saves.

    The save takes longer; other times the other rank is seen to wait in the same group.
    """
    slow = run_ranks(
        rank_joins.wait_for_files,
        2,
        {"folder": str(tmp_path), "timeout": 2.0},
    )
    assert slow == [["verify", "why_damaged"], ["write_shard", "_load_states", "_load_states"]]


def test_a_rank_that_dies_is_not_waited_for() -> None:
    """The wait may last a day, but a broken connection ends it at once."""
    error, _ = run_ranks(rank_joins.miss_a_rank, 2)
    assert "onnection" in error


def test_hosts_that_cannot_connect_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [tcp.cc] timed out\nand more")

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", fails)
    with pytest.raises(
        RunError, match="connectFullMesh failed .*timed out. Set GLOO_SOCKET_IFNAME"
    ):
        group_that_waits()


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 4096), (3072, 4096)),
        ((1024, 2000), (2000, 2000)),
        ((1024, resource.RLIM_INFINITY), (3072, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_job_of_2048_ranks_may_open_as_many_more_connections(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: tuple[int, int] | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: asked.append(pair))
    _allow_open_files(2048)
    assert asked == ([] if wanted is None else [wanted])
