"""A copy of this rank's part of the state in host memory, made in place again and again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megafp8.checkpoint.placement import Placement

_ALIGNMENT_BYTES = 64


class Snapshot:
    """Memory for every tensor that this rank writes, taken and touched when it is made.

    One block: page-locked where the state is on a GPU, so that copies run at the bus's speed.
    """

    def __init__(self, placements: Iterable[Placement]) -> None:
        own = [p for p in placements if _is_written(p)]
        starts, size = [], 0
        for placement in own:
            starts.append(size)
            size += -(-placement.tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        pinned = any(p.tensor.is_cuda for p in own)
        block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        block.fill_(1)  # the first write to a page costs far more than the later ones
        self.num_bytes = sum(p.tensor.nbytes for p in own)
        self._copies = {
            (p.name, p.offset): _over(p, block[start : start + p.tensor.nbytes])
            for p, start in zip(own, starts, strict=True)
        }

    def take(self, placements: Iterable[Placement]) -> list[Placement]:
        """The same placements as they are now, over the copies; replicas stay out.

        The state may change as soon as this returns; the copies hold until the next call.
        """
        own = [p for p in placements if _is_written(p)]
        if not own:  # a replica, which writes nothing
            return []
        taken = [self._copies[p.name, p.offset] for p in own]
        sources = [p.tensor.detach() for p in own]
        # One call for all: most of them are rows of FP8 tables, a few bytes each.
        torch._foreach_copy_([p.tensor for p in taken], sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()
        return taken


def _is_written(placement: Placement) -> bool:
    return placement.replica == 0


def _over(placement: Placement, block: torch.Tensor) -> Placement:
    tensor = block.view(placement.tensor.dtype).view(placement.tensor.shape)
    return Placement(placement.name, placement.global_shape, placement.offset, tensor)
