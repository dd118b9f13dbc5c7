"""Compute Adam's update over tensors stored in few bits, in FP32, and store the results.

The order of the operations, each of them in FP32:

    adamw    p' = p * (1 - lr * weight_decay),  g' = g
    adam     p' = p,                            g' = g + weight_decay * p
    m'       = m * beta1 + g' * (1 - beta1)
    v'       = v * beta2 + (g' * g') * (1 - beta2)
    p''      = p' - (m' / (sqrt(v') * (1 / sqrt(1 - beta2^t)) + eps)) * (lr / (1 - beta1^t))

The update reads the fresh moments, from before they are stored. Constants are computed in FP64 and
rounded once. On CPUs one C kernel makes one pass over memory, and a second one over a parameter of
which a scale changes; elsewhere torch operations compute the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from megafp8.precision.formats import STORAGE_FORMATS
from megafp8.precision.kernels.compile import library
from megafp8.precision.scaled import Dither, ScaledTensor, StoredInC


@dataclass(frozen=True)
class Constants:
    """Hold what one step of Adam needs beside the tensors; `weight_decay` is of this tensor."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    is_l2: bool
    num_updates: int  # Adam's t, counted from 1

    @property
    def step_size(self) -> float:
        """Return the learning rate with the correction of the first moment's bias."""
        return self.lr / (1 - self.betas[0] ** self.num_updates)

    @property
    def inverse_root(self) -> float:
        """Return the factor that corrects the second moment's bias, on its root."""
        return 1 / math.sqrt(1 - self.betas[1] ** self.num_updates)

    @property
    def decay(self) -> float:
        """Return the weight's factor (AdamW), or its share in the gradient (Adam)."""
        return self.weight_decay if self.is_l2 else 1 - self.lr * self.weight_decay


@dataclass(frozen=True)
class Tensors:
    """Hold the four tensors of one parameter, all of one shape and contiguous.

    The dithers are of the parameter and the two moments; None rounds to nearest.
    """

    param: ScaledTensor
    exp_avg: ScaledTensor
    exp_avg_sq: ScaledTensor
    grad: ScaledTensor

    @property
    def written(self) -> tuple[ScaledTensor, ScaledTensor, ScaledTensor]:
        """Return the tensors that a step changes."""
        return self.param, self.exp_avg, self.exp_avg_sq


Dithers = tuple[Dither | None, Dither | None, Dither | None]
NO_DITHERS: Dithers = (None, None, None)


@torch.no_grad()
def update(
    tensors: Tensors,
    constants: Constants,
    dithers: Dithers = NO_DITHERS,
    backup: torch.Tensor | None = None,
) -> None:
    """Run one step of Adam on one parameter, in place, by the fastest way that there is.

    `backup` is memory of `backup_bytes` (uint8) that several updates may share.
    """
    on_cpu = tensors.param.payload.device.type == "cpu"
    if on_cpu and _kernel_reproduces_torch():
        update_c(tensors, constants, dithers, backup)
    else:
        update_torch(tensors, constants, dithers)


def kernel_name(device: torch.device) -> str:
    """Return what `update` runs on a device, for the log."""
    if device.type == "cpu" and _kernel_reproduces_torch():
        return "our C kernel over stored tensors"
    return "torch operations over stored tensors"


def update_torch(tensors: Tensors, constants: Constants, dithers: Dithers = NO_DITHERS) -> None:
    """Run `update` with torch operations, which keep three FP32 tensors for a moment."""
    param, m, v, grad = (
        t.values() for t in (tensors.param, tensors.exp_avg, tensors.exp_avg_sq, tensors.grad)
    )
    (beta1, beta2), c = constants.betas, constants
    if c.is_l2:
        grad = grad + param * c.decay
    else:
        param = param * c.decay
    m = m * beta1 + grad * (1 - beta1)
    v = v * beta2 + (grad * grad) * (1 - beta2)
    root = v.double().sqrt_().float()  # torch's FP32 root by MKL is not always correctly rounded
    param = param - (m / (root * c.inverse_root + c.eps)) * c.step_size
    for stored, values, dither in zip(tensors.written, (param, m, v), dithers, strict=True):
        stored.store(values, dither)


class _AdamInC(ctypes.Structure):
    """Mirror `struct adam` of scaled_cpu.h."""

    _fields_ = (
        ("param", StoredInC),
        ("exp_avg", StoredInC),
        ("exp_avg_sq", StoredInC),
        ("grad", StoredInC),
        ("n", ctypes.c_size_t),
        ("beta1", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("inverse_root", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("is_l2", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("backup", ctypes.c_void_p),
    )


def backup_bytes(tensors: Tensors) -> int:
    """Return how many bytes the C kernel needs to keep what a step overwrites."""
    param, *moments = tensors.written
    kept = [param, *(moment for moment in moments if moment.fmt.name != "fp32")]
    return sum(stored.payload.nbytes for stored in kept)


def update_c(
    tensors: Tensors,
    constants: Constants,
    dithers: Dithers = NO_DITHERS,
    backup: torch.Tensor | None = None,
) -> None:
    """Run `update` with the C kernel, which there must be."""
    lib, c = library().lib, constants
    assert lib is not None, library().note
    beta1, beta2 = c.betas
    if backup is None or backup.numel() < backup_bytes(tensors):
        backup = torch.empty(backup_bytes(tensors), dtype=torch.uint8)
    written = zip(tensors.written, dithers, strict=True)
    asked = _AdamInC(
        *(stored.in_c(dither) for stored, dither in written),
        tensors.grad.in_c(),
        tensors.param.payload.numel(),
        *(beta1, 1 - beta1, beta2, 1 - beta2),
        *(c.inverse_root, c.eps, c.step_size, c.decay),
        int(c.is_l2),
        torch.get_num_threads(),
        backup.data_ptr(),
    )
    lib.megafp8_scaled_adam(ctypes.byref(asked))


@functools.cache
def _kernel_reproduces_torch() -> bool:
    """Whether there is a C kernel, and two of its updates have the bits of torch's operations."""
    if library().lib is None:
        return False
    return all(
        _same(names, is_l2, stochastic)
        for names in (("fp16", "fp8", "fp16"), ("fp32", "fp8_e5m2", "bf16"))
        for is_l2 in (False, True)
        for stochastic in (False, True)
    )


def _same(names: tuple[str, str, str], is_l2: bool, stochastic: bool) -> bool:
    start = torch.linspace(-1, 1, 4099) ** 3  # no multiple of a vector's length
    dithers: Dithers = (Dither(3), Dither(5), Dither(7)) if stochastic else NO_DITHERS
    found: list[list[torch.Tensor]] = []
    for run in (update_c, update_torch):
        formats = [STORAGE_FORMATS[name] for name in names]  # type: ignore[index]
        written = [ScaledTensor.of(start, formats[0])]
        written += [ScaledTensor.zeros(start.shape, fmt) for fmt in formats[1:]]
        for number in (1, 2):
            grad = ScaledTensor.of(number * start.square() - 0.3, STORAGE_FORMATS["fp8"])
            tensors = Tensors(written[0], written[1], written[2], grad)
            run(tensors, Constants(0.01, (0.9, 0.98), 1e-8, 0.1, is_l2, number), dithers)
        found.append([t.values() for t in written])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))
