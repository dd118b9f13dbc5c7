"""How many ranks there are and which axes they form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Sizes of the mesh axes; `world_size` is their product."""

    num_nodes: int = 1
    devices_per_node: int = 1
    tp: int = 1  # tensor-parallel ranks
    accelerator: str = "cpu"  # "cpu" or "gpu", never "auto": resolved already

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def dp(self) -> int:
        return self.world_size // self.tp
