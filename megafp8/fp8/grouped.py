"""Store tensors in FP8 by groups of 128 elements with range expansion, as COAT does for moments.

COAT (arXiv 2410.19313, section 4.1) raises the magnitudes of a group to a power k before they are
rounded to FP8, so that the group uses the whole range of the format: k is the ratio of the
logarithms of both ranges, rounded down to a multiple of 1/16. The rule here:

    a = largest magnitude of the group,  b = smallest one that is not 0
    k = floor(16 * log2(max^2 / 2) / log2(a / b)) / 16, from 1/16 to 16
    number = sign(x) * max * (|x| / a)^k, rounded to the format
    x      = sign(number) * a * (|number| / max)^(1/k)

COAT divides by sqrt(a * b) first and scales afterwards, which is the same but for rounding. A group
keeps a and k: 8 bytes for 128 elements. What is not 0 never becomes 0, and a comes back as it was.
Magnitudes below 2^-126 are stored as 0. A group with a NaN or an infinity becomes NaN.

Groups run along the last dim; the last group of a row may be shorter. Logarithm and power are
polynomials in FP32, each operation rounded, so that every device and the C kernels have the same
bits (`fp8/kernels/grouped_cpu.h`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafp8.fp8.formats import StorageFormat
from megafp8.fp8.scaled import Dither, ScaledTensor, StoredInC, cast
from megafp8.specs.optim import MOMENT_GROUP

SMALLEST = 2.0**-126
LOG2 = tuple(
    map(
        float.fromhex,
        (
            "0x1.715420p+0", "-0x1.713ca4p-1", "0x1.ea2c0ep-2", "-0x1.63a2e0p-2",
            "0x1.ef56b2p-3", "-0x1.19a4aap-3", "0x1.aa774ep-5", "-0x1.310a96p-7",
        ),
    )
)  # fmt: skip
"""log2(1 + z) = z * (LOG2[0] + z * (LOG2[1] + ...)) for z from 0 to 1, within 2.1e-7."""
EXP2 = tuple(
    map(
        float.fromhex,
        ("0x1.62e4e2p-1", "0x1.ebd53cp-3", "0x1.c9686ep-5", "0x1.260a28p-7", "0x1.ee382ep-10"),
    )
)
"""2^w = 1 + w * (EXP2[0] + w * (EXP2[1] + ...)) for w from 0 to 1, within 2.2e-7."""


@dataclass
class GroupedTensor(ScaledTensor):
    """Hold a tensor in FP8 whose groups of 128 elements each have a range of their own.

    `groups` is FP32, [..., groups of a row, 2]: the largest magnitude and the power of each group.
    `dequant_scale` is 1 for good.
    """

    groups: torch.Tensor

    @classmethod
    def zeros(
        cls, shape: Sequence[int], fmt: StorageFormat, device: torch.device | None = None
    ) -> GroupedTensor:
        """Return a tensor of zeros, of at least one dim; its groups have the power 1."""
        payload = torch.zeros(tuple(shape), dtype=fmt.dtype, device=device)
        ranges = torch.tensor([0.0, 1.0], device=device)
        groups = ranges.repeat(*groups_shape(shape)[:-1], 1)
        return cls(payload, torch.ones((), device=device), fmt, groups)

    @torch.no_grad()
    def values(self) -> torch.Tensor:
        """Return the values in FP32, in a tensor of their own."""
        return values_of(self.payload, self.groups, 0)

    @torch.no_grad()
    def store(
        self,
        values: torch.Tensor,
        dither: Dither | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Store FP32 values of the payload's shape, each group with its own range."""
        assert self.fmt.max is not None and amax is None, "a group has its own amax"
        cols = values.shape[-1]
        whole = self.groups.shape[-2] * MOMENT_GROUP
        padded = torch.nn.functional.pad(values, (0, whole - cols))
        x = padded.unflatten(-1, (-1, MOMENT_GROUP))  # [..., groups, 128]
        magnitude = x.abs()
        magnitude = torch.where(magnitude < SMALLEST, 0.0, magnitude)
        top = magnitude.amax(-1)  # propagates NaN
        low = torch.where(magnitude == 0, torch.inf, magnitude).amin(-1)
        is_used = top.isfinite() & (top > 0)
        top_or_1 = torch.where(is_used, top, 1.0)
        low_or_1 = torch.where(is_used, low, 1.0)
        power = power_of(_log2_ratio(top_or_1, low_or_1), self.fmt.max)
        power = torch.where(is_used, power, 1.0)
        nonzero = torch.where(magnitude == 0, 1.0, magnitude)
        t = _log2_ratio(nonzero, top_or_1.unsqueeze(-1)) * power.unsqueeze(-1)
        number = _times_exp2(torch.full_like(t, self.fmt.max), t)
        number = torch.where(magnitude == 0, 0.0, number.copysign(x))
        number = torch.where(top.isfinite().unsqueeze(-1), number, torch.nan)
        one = torch.ones((), device=values.device)
        numbers = number.flatten(-2)[..., :cols].contiguous()
        self.payload.copy_(cast(numbers, one, self.fmt, dither))
        top = torch.where(top.isfinite(), top, torch.nan)
        self.groups.copy_(torch.stack((top, power), dim=-1))

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the elements and the groups' ranges."""
        return self.payload, self.groups

    def zero_(self) -> None:
        """Fill the tensor with zeros; the powers become 1."""
        self.payload.zero_()
        self.groups[..., 0].fill_(0.0)
        self.groups[..., 1].fill_(1.0)

    def sum_of_squares(self) -> torch.Tensor:
        """Return the sum of the squared values, 0-d FP64."""
        return self.values().double().square_().sum()

    def in_c(self, dither: Dither | None = None) -> StoredInC:
        """Return the tensor as the C kernel of Adam takes it; it must be contiguous."""
        made = StoredInC.of(self.payload, self.dequant_scale, dither)
        made.groups, made.cols = self.groups.data_ptr(), self.payload.shape[-1]
        made.held = *made.held, self.groups
        return made


def groups_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the groups' ranges for a tensor's shape, of at least one dim."""
    return (*shape[:-1], -(-shape[-1] // MOMENT_GROUP), 2)


@torch.no_grad()
def values_of(payload: torch.Tensor, groups: torch.Tensor, first: int) -> torch.Tensor:
    """Return the FP32 values of a payload whose last dim begins at column `first` of `groups`."""
    number = payload.float()
    largest = torch.finfo(payload.dtype).max
    columns = torch.arange(first, first + payload.shape[-1], device=payload.device) // MOMENT_GROUP
    top, power = groups.index_select(-2, columns).unbind(-1)
    magnitude = number.abs()
    is_number = (magnitude > 0) & magnitude.isfinite()
    full = torch.full_like(number, largest)
    t = _log2_ratio(torch.where(is_number, magnitude, 1.0), full) * power.reciprocal()
    value = torch.where(is_number, _times_exp2(top, t), 0.0).copysign(number)
    return torch.where(magnitude.isfinite() & top.isfinite(), value, torch.nan)


def power_of(span: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the power k for log2(a / b) and the largest number of the format."""
    sixteenths = (torch.full_like(span, range_of(largest)) / span).floor_()
    return sixteenths.clamp_(1.0, 256.0) * 0.0625


def range_of(largest: float) -> float:
    """Return 16 * log2(max^2 / 2) of a format, which is rounded to FP32 where it is used."""
    return 16 * math.log2(largest * largest / 2)


def _log2_ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return log2(x / y) of normal FP32 numbers above 0."""
    (x_exponent, x_fraction), (y_exponent, y_fraction) = _log2_parts(x), _log2_parts(y)
    return (x_exponent - y_exponent).float() + (x_fraction - y_fraction)


def _log2_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = x.contiguous().view(torch.int32)
    z = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    return bits >> 23, _horner(LOG2, z) * z


def _times_exp2(top: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return top * 2^t for t at most 0; its size is 2^-252 at least, so that two steps do it."""
    t = t.clamp(-252.0, 0.0)
    whole = t.floor()
    w = t - whole
    power = _horner(EXP2, w) * w + 1.0
    first = whole.clamp(min=-126.0)
    return top * _exp2_of_whole(first) * _exp2_of_whole(whole - first) * power


def _exp2_of_whole(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _horner(coefficients: Sequence[float], z: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * z + coefficient
    return total
