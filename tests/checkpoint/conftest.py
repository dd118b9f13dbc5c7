"""Provide small checkpoints that tests damage, reshard and interrupt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import Placement


def sample_tensors() -> dict[str, torch.Tensor]:
    """Return one tensor of every dtype that training stores, always with the same values."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "weight": noise(6, 10),
        "weight_bf16": noise(5, 3).bfloat16(),
        "weight_e4m3": noise(4, 4).to(torch.float8_e4m3fn),
        "grad_e5m2": noise(7).to(torch.float8_e5m2),
        "rng": torch.randint(0, 256, (33,), dtype=torch.uint8, generator=generator),
        "step": torch.tensor(12, dtype=torch.int64),
        "nothing": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return sample_tensors()


def whole(name: str, tensor: torch.Tensor) -> Placement:
    shape = tuple(tensor.shape)
    return Placement(name, shape, (0,) * len(shape), tensor)


def save_two_shards(root: Path, step: int) -> Path:
    """Save a checkpoint as two ranks would.

    Each rank has half of the rows of `weight`. Rank 0 writes the other tensors, of which rank 1 has
    replicas.
    """
    tensors = sample_tensors()
    weight = tensors.pop("weight") + step
    ranks = []
    for rank in (0, 1):
        rows = slice(3 * rank, 3 * rank + 3)
        cut = Placement("weight", tuple(weight.shape), (3 * rank, 0), weight[rows])
        rest = [whole(name, tensor) for name, tensor in tensors.items()]
        rest = [Placement(p.name, p.global_shape, p.offset, p.tensor, rank) for p in rest]
        ranks.append([cut, *rest])
    staging = store.begin(root, step)
    shards = [
        store.write_shard(staging, f"model-rank{rank}.safetensors", placements)
        for rank, placements in enumerate(ranks)
    ]
    return store.commit(staging, root, step, shards, {"note": f"step {step}"})


@pytest.fixture
def save() -> Callable[[Path, int], Path]:
    return save_two_shards


@pytest.fixture
def place_whole() -> Callable[[str, torch.Tensor], Placement]:
    return whole
