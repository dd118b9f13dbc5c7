"""Describe which part of a logical (unsharded) tensor a local tensor holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Say that the slices `local` of a local tensor lie at `offset` in the logical tensor `name`.

    A fused parameter has several pieces: the rows of QKV are the pieces of query, key and value,
    which are not contiguous across tensor-parallel ranks. Only replica 0 is written to a
    checkpoint.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[slice, ...]
    replica: int = 0

    @property
    def is_sharded(self) -> bool:
        """Whether the piece is smaller than the logical tensor."""
        return any(
            s.stop - s.start != size for s, size in zip(self.local, self.global_shape, strict=True)
        )


def whole(name: str, shape: tuple[int, ...], replica: int = 0) -> tuple[Piece, ...]:
    """Return the one piece of a tensor that is not sharded."""
    local = tuple(slice(0, size) for size in shape)
    return (Piece(name, shape, (0,) * len(shape), local, replica),)


@dataclass(frozen=True)
class Rectangle:
    """Name a rectangular part of a tensor: `shape` elements from `offset` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def rectangles_of_run(shape: tuple[int, ...], begin: int, end: int) -> list[Rectangle]:
    """Return the elements `begin` to `end` (exclusive, in memory order) of a tensor as rectangles.

    The tensor is a vector or a matrix of `shape`. A matrix needs at most three rectangles: the end
    of a row, whole rows, and the beginning of a row. Empty ones are left out.
    """
    assert len(shape) in (1, 2) and 0 <= begin <= end, f"{begin} to {end} of {shape}"
    if begin == end:
        return []
    if len(shape) == 1:
        return [Rectangle((begin,), (end - begin,))]
    columns = shape[1]
    (first, start), (last, rest) = divmod(begin, columns), divmod(end, columns)
    if first == last:
        return [Rectangle((first, start), (1, end - begin))]
    found = []
    if start:
        found.append(Rectangle((first, start), (1, columns - start)))
        first += 1
    if first < last:
        found.append(Rectangle((first, 0), (last - first, columns)))
    if rest:
        found.append(Rectangle((last, 0), (1, rest)))
    return found
