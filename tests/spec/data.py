"""Make matrices for the specifications of blocks: ordinary, tiny, saturating, special numbers."""

from __future__ import annotations

import math

import numpy as np

from tests.spec.formats import Floats32


def data(kind: str, shape: tuple[int, int] = (32, 64)) -> Floats32:
    """Data whose numbers are exact in BF16, so that every oracle reads the same."""
    generator = np.random.default_rng(20261123)
    normal = generator.standard_normal(shape)
    if kind == "wide":
        normal *= 2.0 ** generator.integers(-40, 40, shape)
    elif kind == "zeros":
        normal = np.where(generator.random(shape) < 0.9, np.copysign(0.0, normal), normal)
        normal[0] = 0.0
    elif kind == "subnormal":
        normal *= 2.0**-128
    elif kind == "tiny":
        normal *= 2.0**-100
    elif kind == "bits":
        bits = generator.integers(0, 2**16, shape, dtype=np.uint32) << 16
        finite = np.where(bits >> 23 & 255 == 255, np.uint32(0x3F800000), bits)
        normal = finite.view(np.float32).astype(np.float64)
    elif kind == "edges":  # a block's largest element is next to 448 * 2**k
        powers = 448 * 2.0 ** generator.integers(-20, 20, shape)
        normal = powers * (1 + generator.choice([-1, 0, 1], shape) * 2.0**-8)
    elif kind == "midpoints":
        halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, -0.0, -5.0])
        normal = generator.choice(halves, shape)
        normal[:, ::16] = 6.0
    elif kind == "sixteenths":  # the largest of 16 elements is 192 / 16, 191 / 16, and so on
        most = 192 - np.arange(normal.size // 16)[:, None] % 192
        normal = generator.integers(-most, most + 1, (len(most), 16)) / 16
        normal[:, :1] = most / 16
        normal = normal.reshape(shape)
    elif kind == "largest":
        normal = np.copysign(2.0**128 - 2.0**120, normal)  # the largest in BF16
    found = to_bf16(normal.astype(np.float32))
    if kind == "inf":
        found[3, 5] = math.inf
    elif kind == "nan":
        found[3, 5] = math.nan
    return found


def to_bf16(x: Floats32) -> Floats32:
    """Round finite numbers to BF16, ties to even."""
    bits = x.view(np.uint32)
    up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
