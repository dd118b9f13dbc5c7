"""Where pieces of logical (unsharded) tensors lie: all that a checkpoint knows of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """One rectangle of a logical tensor, held by a live local tensor.

    `tensor` may be a view of part of a parameter; its strides are free. Saving reads it, loading
    copies into it in place. Replicas hold the same bytes; only replica 0 is written.
    """

    name: str  # logical name, e.g. "layers.3.attention.query.weight"
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of this piece in the logical tensor, in elements
    tensor: torch.Tensor
    replica: int = 0

    def __post_init__(self) -> None:
        shape, offset, whole = self.tensor.shape, self.offset, self.global_shape
        fits = len(shape) == len(offset) == len(whole) and all(
            0 <= start <= end - size for start, size, end in zip(offset, shape, whole, strict=True)
        )
        assert fits, f"{self.name}: piece {tuple(shape)} at {offset} of {whole}"
