"""Draw initial weights that are the same for every tensor-parallel size.

Each logical tensor is drawn by a generator of its own, keyed by seed and name. A rank draws the
whole logical tensor and keeps its pieces. Inside `values_later` parameters get no memory; when they
are needed, `initial_values` draws them, several at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from megafp8.specs.geometry import Piece

Draw = Callable[[str, torch.Tensor], object]
"""Fills a contiguous FP32 tensor on the CPU with the values of the logical tensor of a name."""
_ARE_LATER = ContextVar("_ARE_LATER", default=False)


def key_of(*parts: object) -> int:
    """Return a 63-bit key of the text of `parts`, the same on every machine."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def normal(std: float, seed: int) -> Draw:
    """Return a function that draws logical tensors from N(0, std)."""

    def draw(name: str, values: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(key_of("init", seed, name))
        values.normal_(0.0, std, generator=generator)

    return draw


def constant(value: float) -> Draw:
    """Return a function that fills logical tensors with `value`."""
    return lambda name, values: values.fill_(value)


@contextmanager
def values_later() -> Iterator[None]:
    """Let `parameter` return parameters without memory, which `initial_values` draws later.

    They are views of one element on the meta device, so that a dry run counts no memory either.
    """
    token = _ARE_LATER.set(True)
    try:
        yield
    finally:
        _ARE_LATER.reset(token)


def are_later() -> bool:
    """Whether this code runs inside `values_later`."""
    return _ARE_LATER.get()


def parameter(
    shape: tuple[int, ...], pieces: Sequence[Piece], draw: Draw, dtype: torch.dtype
) -> torch.nn.Parameter:
    """Return a local parameter that is filled from its logical tensors.

    The parameter keeps its `pieces`, and below FP32 its unrounded values as `initial_master`. On
    the meta device no values are drawn; inside `values_later` the parameter keeps `draw` instead.
    """
    if are_later():
        param = torch.nn.Parameter(torch.empty((), dtype=dtype, device="meta").expand(shape))
        param.draw, param.initial_master = draw, None  # type: ignore[attr-defined]
    else:
        local = torch.empty(shape)
        if not local.is_meta:
            local = _drawn(shape, pieces, draw)
        param = torch.nn.Parameter(local.to(dtype))
        param.initial_master = local if dtype != torch.float32 else None  # type: ignore[attr-defined]
    param.pieces = tuple(pieces)  # type: ignore[attr-defined]
    return param


def _drawn(shape: Sequence[int], pieces: Sequence[Piece], draw: Draw) -> torch.Tensor:
    """Return the values of a rank's part, FP32 on the CPU, from its logical tensors.

    A whole logical tensor is drawn in its place: a copy would take its memory again, and torch
    copies with threads of its own, which hinder the other threads that draw.
    """
    local = torch.empty(*shape)
    for piece in pieces:
        place = local[piece.local]
        if place.shape == piece.global_shape and place.is_contiguous():
            draw(piece.name, place)
            continue
        extent = [
            slice(start, start + part.stop - part.start)
            for start, part in zip(piece.offset, piece.local, strict=True)
        ]
        draw(piece.name, whole := torch.empty(piece.global_shape))
        place.copy_(whole[tuple(extent)])
    return local


def initial_values(
    params: Iterable[torch.nn.Parameter], device: torch.device
) -> list[torch.Tensor]:
    """Return the unrounded initial values of `params`, FP32 on `device`.

    Those that `values_later` left out are drawn now, on as many threads as torch has for one
    operation: drawing releases Python's lock, and each logical tensor has a generator of its own.
    On the meta device they are not drawn.
    """

    def values(param: torch.nn.Parameter) -> torch.Tensor:
        draw: Draw | None = getattr(param, "draw", None)
        if draw is not None and device.type == "meta":
            return torch.empty(param.shape, device=device)
        if draw is not None:
            return _drawn(param.shape, pieces_of(param), draw).to(device)
        initial = getattr(param, "initial_master", None)
        return (param.detach().float() if initial is None else initial).to(device)

    if (count := torch.get_num_threads()) == 1:
        return [values(param) for param in params]
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(values, params))


def give_values(params: Iterable[torch.nn.Parameter], device: torch.device) -> None:
    """Fill the parameters of `values_later` as `parameter` and `fp8_parameter` would have.

    The parameters stay the same objects and lie on `device` then; a master weight that waits for
    the optimizer stays on the CPU.
    """
    params = list(params)
    for param, values in zip(params, initial_values(params, torch.device("cpu")), strict=True):
        is_payload = param.dtype.itemsize == 1  # undefined until the master weight is written
        filled = torch.zeros(param.shape, dtype=param.dtype) if is_payload else values
        replacement = torch.nn.Parameter(filled.to(device, param.dtype))
        replacement.pieces = pieces_of(param)  # type: ignore[attr-defined]
        replacement.initial_master = values if param.dtype != torch.float32 else None  # type: ignore[attr-defined]
        torch.utils.swap_tensors(param, replacement)


def fp8_parameter(param: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
    """Return an empty parameter for `param`'s FP8 payload, with its pieces and its initial master.

    The payload is undefined until the optimizer first writes the master weights into it.
    """
    draw = getattr(param, "draw", None)
    empty = torch.zeros(() if draw is not None else param.shape, dtype=dtype, device=param.device)
    payload = torch.nn.Parameter(empty.expand(param.shape))
    payload.pieces = pieces_of(param)  # type: ignore[attr-defined]
    initial = param.initial_master  # type: ignore[attr-defined]
    if draw is not None:
        payload.draw, payload.initial_master = draw, None  # type: ignore[attr-defined]
    else:
        payload.initial_master = param.detach() if initial is None else initial  # type: ignore[attr-defined]
    return payload


def pieces_of(param: torch.nn.Parameter) -> tuple[Piece, ...]:
    """Return where the parts of a parameter lie in the logical model."""
    pieces: tuple[Piece, ...] = param.pieces  # type: ignore[attr-defined]
    return pieces
