"""Integer boxes in n dimensions: what resharding and completeness checks are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The elements `offset[i] <= index[i] < offset[i] + shape[i]`; one element where 0-d."""

    offset: Sizes
    shape: Sizes

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The common elements, or None where there are none."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(map(min, self._end(), other._end()))
        shape = tuple(e - s for s, e in zip(start, end, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def slices_within(self, outer: Box) -> tuple[slice, ...]:
        """How to index a tensor that holds `outer` to see this box."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))

    def _end(self) -> Sizes:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))


def why_not_a_partition(boxes: Sequence[Box], global_shape: Sizes) -> str | None:
    """None if each element of `global_shape` lies in exactly one box, else what is wrong."""
    whole = Box((0,) * len(global_shape), global_shape)
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
    """Sweeps along the first dimension, so that only neighbours there are compared."""
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
