"""Store tensors in low precision with one scale: gradients, master weights and moments (FP8-LM).

The rule of the scale is FP8-LM's (arXiv 2310.18313; MS-AMP): the largest power of two that brings
the amax to at most the format's largest magnitude, so that the scaled amax lies in its upper half.
An amax of 0 has the scale 1. Beyond 2^126 the scale does not grow, so that its inverse is a normal
FP32 number. An amax that is not finite makes all values NaN: nothing saturates unseen.

Every device and the C kernels have the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8_numerics.cast import amax_of, quantize
from fp8_numerics.formats import E4M3, E5M2
from fp8_numerics.kernels.compile import library
from fp8_numerics.kernels.triton_launch import runs_triton
from fp8_numerics.meta import device_kind
from fp8_numerics.scales import power_2_below
from megafp8.fp8.stored_formats import STORAGE_FORMATS, StorageFormat
from megafp8.specs.optim import StorageName

LARGEST_SCALE = 2.0**126

_FP8 = {"fp8": E4M3, "fp8_e5m2": E5M2}
_IN_C: tuple[StorageName, ...] = ("fp32", "bf16", "fp16", "fp8", "fp8_e5m2")
_KINDS = {STORAGE_FORMATS[name].dtype: number for number, name in enumerate(_IN_C)}
"""The formats' numbers in stored_cpu.h."""


@dataclass(frozen=True)
class Dither:
    """Ask for stochastic rounding: up with the probability of the distance from below.

    The random bits of element i are a hash of `key` (64 bits) and i, the element's place in memory
    order, so that they need no state and repeat after a resume.
    """

    key: int


@dataclass
class ScaledTensor:
    """Hold a tensor in low precision; its value is payload * dequant_scale.

    `dequant_scale` is 0-d FP32, and 1 for formats without a scale. Both tensors stay in place for
    good: `store` writes into them. Multiplying `dequant_scale` multiplies the value and touches no
    payload; the clipping of gradients does that.
    """

    payload: torch.Tensor
    dequant_scale: torch.Tensor
    fmt: StorageFormat

    @classmethod
    def zeros(
        cls, shape: Sequence[int], fmt: StorageFormat, device: torch.device | None = None
    ) -> ScaledTensor:
        """Return a tensor of zeros with the scale 1."""
        payload = torch.zeros(tuple(shape), dtype=fmt.dtype, device=device)
        return cls(payload, torch.ones((), dtype=torch.float32, device=device), fmt)

    @classmethod
    def of(cls, values: torch.Tensor, fmt: StorageFormat) -> ScaledTensor:
        """Return a new tensor that stores `values` (FP32, any shape)."""
        stored = cls.zeros(values.shape, fmt, values.device)
        stored.store(values)
        return stored

    @torch.no_grad()
    def values(self) -> torch.Tensor:
        """Return the values in FP32, in a tensor of their own."""
        numbers = self.payload.to(torch.float32, copy=True)  # FP32 numbers, too: callers change it
        return numbers if self.fmt.max is None else numbers.mul_(self.dequant_scale)

    @torch.no_grad()
    def store(
        self,
        values: torch.Tensor,
        dither: Dither | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Store FP32 values of the payload's shape.

        The scale is that of `amax` (0-d FP32), or of the values' own one.
        """
        quant_scale = self._rescale(amax_of(values) if amax is None else amax)
        self.payload.copy_(cast_stored(values, quant_scale, self.fmt, dither))

    @torch.no_grad()
    def add(self, addend: torch.Tensor, *, is_first: bool) -> None:
        """Add a tensor (FP32, BF16 or FP16) and requantize; the first one overwrites.

        The sum is in FP32, and its scale new: one rounding for each call.
        """
        if self.fmt.max is None and is_first:
            self.payload.copy_(addend)
        elif self._fits_kernel(addend) and (lib := library().lib) is not None:
            unit_scale = torch.ones((), dtype=torch.float32)
            total, addend_in_c = self.in_c(), StoredInC.of(addend, unit_scale)
            lib.megafp8_scaled_sum(
                ctypes.byref(total),
                ctypes.byref(addend_in_c),
                ctypes.c_size_t(addend.numel()),
                int(not is_first),
                torch.get_num_threads(),
            )
        elif self._fits_triton(addend) and _triton_reproduces_torch(
            addend.device, self.fmt.name, addend.dtype
        ):
            add_by_triton(self, addend, is_first=is_first)
        elif not (addend.is_meta and self._has_kernel_of_a_plan(addend)):
            self.add_by_torch(addend, is_first=is_first)

    def add_by_torch(self, addend: torch.Tensor, *, is_first: bool) -> None:
        """Run `add` with torch operations."""
        self.store(addend.float() if is_first else self.values() + addend.float())

    @property
    def has_kernels(self) -> bool:
        """Whether the kernels know the format; torch operations serve any other."""
        return self.payload.dtype in _KINDS

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that grow with the number of elements."""
        return (self.payload,)

    @property
    def held_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the payload's values as they are stored, in FP32, and the scale."""
        return self.payload.float(), self.dequant_scale

    def zero_(self) -> None:
        """Fill the tensor with zeros; the scale becomes 1."""
        self.payload.zero_()
        self.dequant_scale.fill_(1.0)

    def sum_of_squares(self) -> torch.Tensor:
        """Return the sum of the squared values, 0-d FP64."""
        numbers = self.payload.double()  # the square of a scale of 2**-126 is no FP32 number
        return (numbers.square_().sum()) * self.dequant_scale.double().square()

    def in_c(self, dither: Dither | None = None) -> StoredInC:
        """Return the tensor as the C kernels take it; it must be contiguous."""
        return StoredInC.of(self.payload, self.dequant_scale, dither)

    def _rescale(self, amax: torch.Tensor) -> torch.Tensor:
        """Set `dequant_scale` for an amax (0-d FP32), and return the scale to quantize with."""
        quant_scale, dequant_scale = scales_for(amax, self.fmt)
        self.dequant_scale.copy_(dequant_scale)
        return quant_scale

    def _fits_kernel(self, addend: torch.Tensor) -> bool:
        return self.payload.device.type == "cpu" and self._is_plain(addend)

    def _fits_triton(self, addend: torch.Tensor) -> bool:
        return self.fmt.max is not None and runs_triton(addend.device) and self._is_plain(addend)

    def _has_kernel_of_a_plan(self, addend: torch.Tensor) -> bool:
        """Whether a device for which a dry run stands has a kernel that adds in place."""
        on_cpu = device_kind(addend.device) == "cpu"
        return self._is_plain(addend) and (on_cpu or self.fmt.max is not None)

    def _is_plain(self, addend: torch.Tensor) -> bool:
        """Whether the kernels take this tensor, and the addend with it."""
        return (
            self.has_kernels
            and self.payload.is_contiguous()
            and addend.is_contiguous()
            and addend.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )


class StoredInC(ctypes.Structure):
    """Mirror `struct stored` of stored_cpu.h, and keep the tensors that it points to alive."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dequant_scale", ctypes.c_void_p),
        ("key", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
    )

    @classmethod
    def of(
        cls, payload: torch.Tensor, dequant_scale: torch.Tensor, dither: Dither | None = None
    ) -> StoredInC:
        key = 0 if dither is None else dither.key
        places = payload.data_ptr(), dequant_scale.data_ptr()
        stored = cls(*places, key, _KINDS[payload.dtype], int(dither is not None))
        stored.held = payload, dequant_scale
        return stored


def add_by_triton(total: ScaledTensor, addend: torch.Tensor, *, is_first: bool) -> None:
    """Run `ScaledTensor.add` by Triton's kernels, where they can run. The format has a scale."""
    from megafp8.fp8.kernels.triton_sums import add

    add(total, addend, is_first=is_first)


@functools.cache
def _triton_reproduces_torch(device: torch.device, name: StorageName, dtype: torch.dtype) -> bool:
    """Whether sums by Triton's kernels have the bits of torch's operations on this device."""
    by_triton, by_torch = (
        ScaledTensor.zeros((4112,), STORAGE_FORMATS[name], device) for _ in range(2)
    )
    for number in (1, 2, 3):  # the scale stays once, and changes in the last sum
        addend = (1 + 9 * (number == 3)) * torch.linspace(-1, 1, 4112, device=device) ** 3
        add_by_triton(by_triton, addend.to(dtype), is_first=number == 1)
        by_torch.add_by_torch(addend.to(dtype), is_first=number == 1)
        pairs = zip(by_triton.held_and_scale, by_torch.held_and_scale, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return False
    return True


@torch.no_grad()
def sums_of_squares(tensors: Sequence[ScaledTensor]) -> torch.Tensor:
    """Return the sum of the squared values of each tensor, FP64 [tensors]; there is at least one.

    On GPUs a kernel reads each number once, and adds in an order of its own.
    """
    in_triton = all(t.has_kernels and t.payload.is_contiguous() for t in tensors)
    if in_triton and runs_triton(tensors[0].payload.device):
        from megafp8.fp8.kernels import triton_sums

        return triton_sums.sums_of_squares(tensors)
    return torch.stack([tensor.sum_of_squares() for tensor in tensors])


def scales_for(amax: torch.Tensor, fmt: StorageFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (quant_scale, dequant_scale) for an amax, 0-d FP32 each, without a host copy."""
    one = torch.ones_like(amax)
    if fmt.max is None:
        return one, one
    largest = power_2_below(torch.full_like(amax, fmt.max).div_(amax)).clamp_(max=LARGEST_SCALE)
    quant_scale = torch.where(amax.isfinite() & (amax > 0), largest, one)
    return quant_scale, torch.where(amax.isfinite(), quant_scale.reciprocal(), torch.nan)


@torch.no_grad()
def add_up(parts: Sequence[ScaledTensor], total: torch.Tensor) -> torch.Tensor:
    """Write the sum of tensors into `total` (FP32, flat), and return its amax, 0-d FP32.

    The values are added in FP32, in the order of `parts`. All tensors are contiguous.
    """
    have_kernels = total.device.type == "cpu" and all(part.has_kernels for part in parts)
    if have_kernels and (lib := library().lib) is not None:
        amax = torch.zeros(())
        in_c = (StoredInC * len(parts))(*(part.in_c() for part in parts))
        lib.megafp8_sum_of(
            in_c,
            len(parts),
            ctypes.c_size_t(total.numel()),
            ctypes.c_void_p(total.data_ptr()),
            ctypes.c_void_p(amax.data_ptr()),
            torch.get_num_threads(),
        )
        return amax
    total.copy_(parts[0].values())
    for part in parts[1:]:
        total.add_(part.values())
    return amax_of(total)


def resize_memory(tensor: torch.Tensor, *, has_memory: bool) -> None:
    """Free or allocate the memory of a tensor that owns its whole storage; its views stay valid."""
    storage = tensor.untyped_storage()
    if bool(storage.nbytes()) != has_memory:
        storage.resize_(tensor.nbytes if has_memory else 0)


def cast_stored(
    values: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: StorageFormat,
    dither: Dither | None = None,
) -> torch.Tensor:
    """Return the payload of FP32 values: to nearest, ties to even, or stochastically."""
    if dither is not None and fmt.name != "fp32":
        return _cast_stochastically(values, quant_scale, fmt, dither)
    if fmt.name in _FP8:
        return quantize(values, quant_scale, _FP8[fmt.name], amax=None, grid_dtype=None).payload
    if fmt.max is None:
        return values.to(fmt.dtype)
    # A scale of another amax may leave values beyond the largest, which would become infinite.
    return (values * quant_scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def _cast_stochastically(
    values: torch.Tensor, quant_scale: torch.Tensor, fmt: StorageFormat, dither: Dither
) -> torch.Tensor:
    """Return the payload, each magnitude rounded up if its random number is below its fraction.

    The fraction is what lies above the number below, in steps of the format there; it is exact.
    """
    index = torch.arange(values.numel(), device=values.device).view(values.shape)
    random = random_bits(dither.key, index)
    if fmt.max is None:  # BF16, the upper half of FP32's bits; its largest number is not rounded up
        bits = values.abs().clamp(max=torch.finfo(fmt.dtype).max).view(torch.int32).long()
        up = (random >> 16) < (bits & 0xFFFF)
        magnitude = (((bits >> 16) + up) << 16).to(torch.int32).view(torch.float32)
        rounded = torch.where(values.isnan(), torch.nan, magnitude)
        return rounded.copysign(values).to(fmt.dtype)
    scaled = values * quant_scale
    magnitude = scaled.abs().clamp(max=fmt.max)
    smallest = torch.finfo(fmt.dtype).smallest_normal  # smaller numbers have the steps of this one
    exponent = torch.frexp(magnitude.clamp(min=smallest)).exponent - 1
    step = torch.finfo(fmt.dtype).eps * torch.ldexp(torch.ones_like(magnitude), exponent)
    steps = magnitude / step
    whole = steps.floor()
    # 24 of the random bits, since FP32 has so many.
    up = (random >> 8).float() * 2.0**-24 < steps - whole
    return ((whole + up) * step).copysign(scaled).to(fmt.dtype)


def random_bits(key: int, index: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each index (int64): two rounds of MurmurHash3's finalizer."""
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    first = _mix((index & 0xFFFFFFFF) ^ low)
    return _mix(first ^ high ^ (index >> 32))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
