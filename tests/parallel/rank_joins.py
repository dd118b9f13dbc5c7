"""What ranks do when they join again, or wait long for one of them."""

from __future__ import annotations

import os

import torch

from megafp8.parallel.mesh import join, leave
from megafp8.specs import ParallelSpec
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
