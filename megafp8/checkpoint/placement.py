"""Say which piece of a logical (unsharded) tensor a local tensor is.

Checkpoints know nothing else about parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """Name the rectangle of a logical tensor that a local tensor holds.

    `tensor` may be a view of a part of a parameter, with any strides. Saving reads `tensor`, and
    loading copies into it in place. Replicas hold the same bytes, and only replica 0 is written.
    """

    name: str  # logical name, for example "layers.3.attention.query.weight"
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
