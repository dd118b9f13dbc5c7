"""Draw initial weights that are the same for every tensor-parallel size.

Each logical tensor is drawn by a generator of its own, keyed by seed and name. A rank draws the
whole logical tensor and keeps its pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from megafp8.specs.geometry import Piece

Draw = Callable[[str, tuple[int, ...]], torch.Tensor]


def key_of(*parts: object) -> int:
    """Return a 63-bit key of the text of `parts`, the same on every machine."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def normal(std: float, seed: int) -> Draw:
    """Return a function that draws logical tensors from N(0, std), in FP32 on the CPU."""

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(key_of("init", seed, name))
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    return draw


def constant(value: float) -> Draw:
    """Return a function that fills logical tensors with `value`, in FP32 on the CPU."""
    return lambda name, shape: torch.full(shape, value)


def parameter(
    shape: tuple[int, ...], pieces: Sequence[Piece], draw: Draw, dtype: torch.dtype
) -> torch.nn.Parameter:
    """Return a local parameter that is filled from its logical tensors.

    The parameter keeps its `pieces`, and below FP32 its unrounded values as `initial_master`. On
    the meta device no values are drawn.
    """
    local = torch.empty(shape)
    for piece in () if local.is_meta else pieces:
        extent = [
            slice(start, start + part.stop - part.start)
            for start, part in zip(piece.offset, piece.local, strict=True)
        ]
        local[piece.local] = draw(piece.name, piece.global_shape)[tuple(extent)]
    param = torch.nn.Parameter(local.to(dtype))
    param.pieces = tuple(pieces)  # type: ignore[attr-defined]
    param.initial_master = local if dtype != torch.float32 else None  # type: ignore[attr-defined]
    return param


def fp8_parameter(param: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
    """Return an empty parameter for `param`'s FP8 payload, with its pieces and its initial master.

    The payload is undefined until the optimizer first writes the master weights into it.
    """
    payload = torch.nn.Parameter(torch.zeros(param.shape, dtype=dtype))
    payload.pieces = pieces_of(param)  # type: ignore[attr-defined]
    initial = param.initial_master  # type: ignore[attr-defined]
    payload.initial_master = param.detach() if initial is None else initial  # type: ignore[attr-defined]
    return payload


def pieces_of(param: torch.nn.Parameter) -> tuple[Piece, ...]:
    """Return where the parts of a parameter lie in the logical model."""
    pieces: tuple[Piece, ...] = param.pieces  # type: ignore[attr-defined]
    return pieces
