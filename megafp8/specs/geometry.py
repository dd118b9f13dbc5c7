"""Describe slices of tensors: boxes of integers, and pieces of logical (unsharded) tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Sizes = tuple[int, ...]
DENSE = "dense"
"""The group of replicas of all parameters whose piece names no other."""
EXPERTS = "experts"
"""The group of experts, whose ranks and their tokens are others than those of a dense linear."""


@dataclass(frozen=True)
class Box:
    """Hold the elements `offset[i] <= index[i] < offset[i] + shape[i]`; one element where 0-d."""

    offset: Sizes
    shape: Sizes

    @property
    def volume(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the common elements, or None where there are none."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(map(min, self._end(), other._end()))
        shape = tuple(e - s for s, e in zip(start, end, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def slices_within(self, outer: Box) -> tuple[slice, ...]:
        """Return how to index a tensor that holds `outer` to see this box."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))

    def _end(self) -> Sizes:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))


def why_not_a_partition(boxes: Sequence[Box], global_shape: Sizes) -> str | None:
    """Return None if each element of `global_shape` lies in exactly one box, else what is wrong."""
    whole = Box((0,) * len(global_shape), global_shape)
    if len(boxes) == 1 and boxes[0] == whole:
        return None  # most tensors are whole
    solid = [box for box in boxes if box.volume]
    for box in solid:
        if box.overlap(whole) != box:
            return f"a piece of shape {box.shape} at {box.offset} leaves the shape {global_shape}"
    if clash := _first_overlap(solid):
        return f"pieces at {clash[0].offset} and {clash[1].offset} overlap"
    covered = sum(box.volume for box in solid)
    if covered != whole.volume:
        return f"pieces hold {covered} of {whole.volume} elements"
    return None


def _first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that have an element in common; None if there are none.

    Boxes are visited by where they begin along the first dimension, and compared with those alone
    that have not ended there.
    """
    if boxes and not boxes[0].shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offset):
        open_boxes = [o for o in open_boxes if o.offset[0] + o.shape[0] > box.offset[0]]
        for other in open_boxes:
            if box.overlap(other):
                return other, box
        open_boxes.append(box)
    return None


@dataclass(frozen=True)
class Piece:
    """Say that the slices `local` of a local tensor lie at `offset` in the logical tensor `name`.

    A fused parameter has several pieces: the rows of QKV are the pieces of query, key and value,
    which are not contiguous across tensor-parallel ranks. Only replica 0 is written to a
    checkpoint. `is_of_heads` says that a whole tensor acts on the heads of a tensor-parallel rank,
    so that its gradient there is a part of a sum. `group` names the group of replicas (`Replicas`
    of parallel/mesh.py): which ranks have the same part, and which have others.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[slice, ...]
    replica: int = 0
    is_of_heads: bool = False
    group: str = DENSE

    @property
    def local_box(self) -> Box:
        """Return `local` as a box of the local tensor."""
        shape = tuple(s.stop - s.start for s in self.local)
        return Box(tuple(s.start for s in self.local), shape)

    @property
    def is_sharded(self) -> bool:
        """Whether tensor-parallel ranks, or those that have the parts of a group, have others."""
        return self.group != DENSE or any(
            s.stop - s.start != size for s, size in zip(self.local, self.global_shape, strict=True)
        )


def whole_pieces(name: str, shape: Sizes, replica: int = 0) -> tuple[Piece, ...]:
    """Return the one piece of a tensor that is not sharded."""
    local = tuple(slice(0, size) for size in shape)
    return (Piece(name, shape, (0,) * len(shape), local, replica),)


def boxes_of_run(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Return the elements `begin` to `end` (exclusive, in memory order) of a tensor as boxes.

    The tensor is a vector or a matrix of `shape`. A matrix needs at most three boxes: the end
    of a row, whole rows, and the beginning of a row. Empty ones are left out.
    """
    assert len(shape) in (1, 2) and 0 <= begin <= end, f"{begin} to {end} of {shape}"
    if begin == end:
        return []
    if len(shape) == 1:
        return [Box((begin,), (end - begin,))]
    columns = shape[1]
    (first, start), (last, rest) = divmod(begin, columns), divmod(end, columns)
    if first == last:
        return [Box((first, start), (1, end - begin))]
    boxes = []
    if start:
        boxes.append(Box((first, start), (1, columns - start)))
        first += 1
    if first < last:
        boxes.append(Box((first, 0), (last - first, columns)))
    if rest:
        boxes.append(Box((last, 0), (1, rest)))
    return boxes
