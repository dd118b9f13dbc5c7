"""Which part of a logical (unsharded) tensor a local tensor holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """`local` (a slice per dim of the local tensor) is what lies at `offset` in the logical tensor.

    A fused parameter has several pieces: QKV's rows are the pieces of query, key and value, which
    are not contiguous across tensor-parallel ranks. Only replica 0 is written to a checkpoint.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[slice, ...]
    replica: int = 0

    @property
    def is_sharded(self) -> bool:
        return any(
            s.stop - s.start != size for s, size in zip(self.local, self.global_shape, strict=True)
        )


def whole(name: str, shape: tuple[int, ...], replica: int = 0) -> tuple[Piece, ...]:
    """The one piece of a tensor that is not sharded."""
    local = tuple(slice(0, size) for size in shape)
    return (Piece(name, shape, (0,) * len(shape), local, replica),)
