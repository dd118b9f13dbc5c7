"""The axes of a run's ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megafp8.parallel import rendezvous
from megafp8.parallel.collectives import Axis, Traffic
from megafp8.specs import ParallelSpec


@dataclass(frozen=True)
class Mesh:
    """`world` holds all ranks; tensor-parallel ranks are neighbours, data-parallel ones apart."""

    device: torch.device
    world: Axis
    tp: Axis
    dp: Axis
    traffic: Traffic

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0


def single_rank(device: torch.device | None = None) -> Mesh:
    """One process, no groups."""
    traffic = Traffic()
    world, tp, dp = (Axis(name, traffic=traffic) for name in ("world", "tp", "dp"))
    return Mesh(device or torch.device("cpu"), world, tp, dp, traffic)


def join(spec: ParallelSpec) -> Mesh:
    """Join the ranks that the launcher's environment (RANK, WORLD_SIZE, …) describes."""
    on_gpu = spec.accelerator == "gpu"
    device = rendezvous.local_gpu() if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if spec.world_size == 1:
        return single_rank(device)
    rendezvous.connect("nccl" if on_gpu else "gloo")
    device_type = "cuda" if on_gpu else "cpu"
    mesh = init_device_mesh(device_type, (spec.dp, spec.tp), mesh_dim_names=("dp", "tp"))
    traffic = Traffic()
    tp, dp = (
        Axis(name, mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim), traffic)
        for dim, name in ((1, "tp"), (0, "dp"))
    )
    world = Axis("world", spec.world_size, dist.get_rank(), dist.group.WORLD, traffic)
    return Mesh(device, world, tp, dp, traffic)


def leave() -> None:
    """Drop the process groups; no collective, so a failed rank cannot hang the others."""
    if dist.is_initialized():
        dist.destroy_process_group()
