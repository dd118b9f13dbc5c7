"""Inputs that try every rule of a cast, and comparison with the specification."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fp8_numerics.cast import Fp8Tensor
from tests.spec import formats
from tests.spec.formats import Codes, Floats32

SPEC = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}


def hard_matrix(rows: int, cols: int, dtype: torch.dtype, *, finite: bool = False) -> torch.Tensor:
    """Magnitudes of the dtype's whole range, zeros of both signs, subnormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    bits = torch.randint(-(1 << 31), 1 << 31, (rows, cols), generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    normal = torch.randn(rows, cols, generator=generator)
    x = torch.where(torch.rand(rows, cols, generator=generator) < 0.5, normal, x)
    special = [0.0, -0.0, 1e-45, -1e-40, 448.0, 464.0, 480.0, -57344.0, 61440.0, 2**-10, 3 * 2**-10]
    special += [] if finite else [float("inf"), -float("inf"), float("nan")]
    flat = x.flatten()
    count = min(len(special), flat.numel())
    flat[:count] = torch.tensor(special[:count])
    x = flat.view(rows, cols).to(dtype)
    return x.nan_to_num_(nan=1.0, posinf=2.0, neginf=-3.0) if finite else x


def floats(x: torch.Tensor) -> Floats32:
    return x.float().cpu().numpy()


def codes(payload: torch.Tensor) -> Codes:
    return payload.cpu().view(torch.uint8).numpy()


def assert_payload(payload: torch.Tensor, x: Floats32, scale: Floats32, name: str) -> None:
    """`payload` is the specification's cast; `scale` broadcasts over x."""
    fmt = SPEC[name]
    expected = np.empty(x.shape, dtype=np.uint8)
    spread = np.broadcast_to(scale, x.shape)
    for value in np.unique(spread):
        here = spread == value
        expected[here] = formats.quantize(x[here], np.float32(value), fmt)
    assert formats.same_codes(codes(payload), expected, fmt)


def whole(name: str, *sizes: int) -> tuple[int, ...]:
    """Sizes that a recipe takes: a rotation needs blocks that are whole."""
    return tuple(-(-n // 16) * 16 for n in sizes) if name.startswith("nvfp4") else sizes


def replaced(square: Fp8Tensor, like: Fp8Tensor) -> Fp8Tensor:
    """A square-blocked tensor with the blocks of another one, which are lines of 16."""
    assert like.block is not None
    scale = square.dequant_scale.repeat_interleave(16, like.block.index(1))
    return dataclasses.replace(square, block=like.block, dequant_scale=scale)


def assert_same_bytes(ours: Fp8Tensor | None, theirs: Fp8Tensor | None) -> None:
    """`ours` may be packed for tensor cores; `theirs` is as CPUs and torch's operations cast."""
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        ours, spec = ours.plain(), SPEC.get(ours.fmt.name, formats.E4M3)
        if theirs.block != ours.block:  # each row of a square has its scale
            assert theirs.block == (16, 16) and theirs.outer is not None
            theirs = replaced(theirs, ours)
        factors = [None if x.outer is None else x.outer.item() for x in (ours, theirs)]
        assert factors[0] == factors[1]
        assert formats.same_codes(codes(ours.payload), codes(theirs.payload), spec)
        assert torch.equal(ours.dequant_scale.cpu(), theirs.dequant_scale.cpu())
        kept = ("fmt", "block", "layout", "is_exact_in_bf16")
        assert all(getattr(ours, field) == getattr(theirs, field) for field in kept)
