"""What ranks do when they join again, or wait long for one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megafp8.checkpoint import store
from megafp8.checkpoint.step_directories import step_name
from megafp8.parallel.agreement import wait_for_all
from megafp8.parallel.mesh import join, leave
from megafp8.specs import ParallelSpec
from megafp8.train import state_dict
from megafp8.train.load import newest_after_cleanup
from megafp8.train.saver import Saver
from tests.parallel.rank_work import Case
from tests.ranks import Rank


def join_again(rank: Rank, times: int) -> list[float]:
    """Join `times` times, as the jobs of a sweep do, and return each job's sum over the ranks."""
    sums = []
    for job in range(times):
        mesh = join(ParallelSpec(devices_per_node=rank.size, tp=rank.size))
        for axis in (mesh.world, mesh.tp):
            sums.append(axis.all_reduce_sum(torch.tensor(float(10**job * (rank.index + 1)))).item())
        assert mesh.store is not None and not mesh.store.check(["of this job"])
        axis.all_gather(torch.zeros(1))  # no rank has set the key yet
        mesh.store.set("of this job", os.environ["RANK"])
        leave()
    return sums


def wait_for_files(rank: Rank, folder: str, timeout: float) -> list[str]:
    """Save, find and load a checkpoint, each longer on one rank than training's collectives may
    take; return what was slow on this rank."""
    dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=timeout))
    noted: list[str] = []

    def slow(module: Any, name: str, slow_rank: int) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def slowed(*args: Any) -> Any:
            if rank.index == slow_rank:
                noted.append(name)
                time.sleep(timeout + 1)
            return function(*args)

        setattr(module, name, slowed)

    slow(store, "write_shard", 1)
    slow(store, "verify", 0)
    slow(store, "why_damaged", 0)
    slow(state_dict, "_load_states", 1)
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    state = Case(parallel=ParallelSpec(devices_per_node=rank.size)).build(mesh)
    root = Path(folder)
    Saver(root, 1, {"config": {}, "data_fingerprint": ""}).save(state)
    newest = newest_after_cleanup(root, mesh, print)
    assert newest == root / step_name(0)
    state_dict.load_checkpoint(newest, state, print)
    assert mesh.world.all_reduce_sum(torch.ones(1)).item() == rank.size
    state_dict.load_weights(store.Reader(newest), state, print)
    assert mesh.world.all_reduce_sum(torch.ones(1)).item() == rank.size
    return noted


def miss_a_rank(rank: Rank) -> str:
    """Wait for a rank that closes its connections, as a dying one does; return the error."""
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    error = ""
    try:
        if rank.index == 0:
            wait_for_all(mesh)
    except RuntimeError as caught:
        error = str(caught)
    leave()
    return error
