"""What a rank holds of the parameters, as rectangles of logical tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megafp8.checkpoint.placement import Placement
from megafp8.checkpoint.rectangles import Box
from megafp8.models.init import pieces_of
from megafp8.optim.masters import Segment
from megafp8.parallel.mesh import Mesh
from megafp8.specs.placement import rectangles_of_run


def placements_of(
    prefix: str, segment: Segment, tensor: torch.Tensor, mesh: Mesh, *, num_shards: int
) -> Iterator[Placement]:
    """The pieces that lie in a segment, with their values in `tensor` (any shape, in memory order).

    `num_shards` consecutive replicas share out the parameters; those after them have the same.
    """
    shape, flat, begin = tuple(segment.param.shape), tensor.detach().view(-1), 0
    for rectangle in rectangles_of_run(shape, segment.begin, segment.end):
        held = Box(rectangle.offset, rectangle.shape)
        values = flat[begin : begin + held.volume].view(held.shape)
        begin += held.volume
        for piece in pieces_of(segment.param):
            local = Box(
                tuple(s.start for s in piece.local), tuple(s.stop - s.start for s in piece.local)
            )
            if (common := local.overlap(held)) is None:
                continue
            inside = zip(piece.offset, common.offset, local.offset, strict=True)
            is_replica = mesh.data.rank >= num_shards
            is_replica = is_replica or (mesh.tp.rank > 0 and not piece.is_sharded)
            yield Placement(
                prefix + piece.name,
                piece.global_shape,
                tuple(start + at - first for start, at, first in inside),
                values[common.slices_within(held)],
                replica=int(is_replica or piece.replica > 0),
            )
