"""Simulate one rank of a large job without the other ranks.

Torch's fake process group completes every collective at once, and tensors on the meta device have
shapes but no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from megafp8.hardware.bf16 import planning_for
from megafp8.parallel import mesh
from megafp8.specs import ParallelSpec
from megafp8.torch_private import join_simulated_group


@contextmanager
def simulated_rank(spec: ParallelSpec, rank: int) -> Iterator[mesh.Mesh]:
    """Yield the mesh of `rank` on the meta device, which is the default device in the context.

    The meta device stands for the accelerator of `spec`.
    """
    assert not dist.is_initialized(), "this process is a rank already"
    assert 0 <= rank < spec.world_size, f"rank {rank} of {spec.world_size}"
    device, planned = torch.device("meta"), "cuda" if spec.accelerator == "gpu" else "cpu"
    if spec.world_size == 1:
        with device, planning_for(planned):
            yield mesh.single_rank(device)
        return
    join_simulated_group(rank, spec.world_size)
    try:
        made = mesh.join(replace(spec, accelerator="cpu"))
        with device, planning_for(planned):
            yield replace(made, device=device)
    finally:
        mesh.leave()
