"""Compute Adam's update over tensors stored in low precision, in FP32, and store the results.

The order of the operations, each of them in FP32:

    adamw    p' = p * (1 - lr * weight_decay),  g' = g
    adam     p' = p,                            g' = g + weight_decay * p
    m'       = m * beta1 + g' * (1 - beta1)
    v'       = v * beta2 + (g' * g') * (1 - beta2)
    p''      = p' - (m' / (sqrt(v') * (1 / sqrt(1 - beta2^t)) + eps)) * (lr / (1 - beta1^t))

The update reads the fresh moments, from before they are stored. Constants are computed in FP64 and
rounded once. On CPUs a C kernel makes one pass over memory, and a second one over a parameter of
which a scale changes; Triton kernels do the same on GPUs. Elsewhere, and where a kernel turns out
to have other bits, torch operations compute the update.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from fp8_numerics.cast import amax_of
from fp8_numerics.kernels.compile import library
from fp8_numerics.kernels.triton_launch import runs_triton
from megafp8.fp8.scaled import Dither, ScaledTensor, StoredInC
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.specs.optim import StorageName

Dithers = tuple[Dither | None, Dither | None, Dither | None]
"""Those of the parameter and the two moments; None rounds to nearest."""
NO_DITHERS: Dithers = (None, None, None)
Kinds = tuple[StorageName, StorageName, StorageName, StorageName]
"""The formats of parameter, moments and gradient."""


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

    @property
    def factors(self) -> tuple[float, ...]:
        """Return the numbers that the kernels take, in the order of `struct adam`."""
        beta1, beta2 = self.betas
        betas = (beta1, 1 - beta1, beta2, 1 - beta2)
        return *betas, self.inverse_root, self.eps, self.step_size, self.decay


@dataclass(frozen=True)
class Tensors:
    """Hold the four tensors of one parameter, all of one shape and contiguous."""

    param: ScaledTensor
    exp_avg: ScaledTensor
    exp_avg_sq: ScaledTensor
    grad: ScaledTensor

    @property
    def have_kernels(self) -> bool:
        """Whether the kernels know all formats."""
        return all(stored.has_kernels for stored in (*self.written, self.grad))

    @property
    def written(self) -> tuple[ScaledTensor, ScaledTensor, ScaledTensor]:
        """Return the tensors that a step changes."""
        return self.param, self.exp_avg, self.exp_avg_sq


OneUpdate = tuple[Tensors, Constants, Dithers]
"""The update of one parameter, as arguments of `update`."""


@torch.no_grad()
def update(
    tensors: Tensors,
    constants: Constants,
    dithers: Dithers = NO_DITHERS,
    backup: torch.Tensor | None = None,
    skips: torch.Tensor | None = None,
) -> None:
    """Run one step of Adam on one parameter, in place, by the fastest way that there is.

    `backup` is memory of `backup_bytes` (uint8) that several updates may share. Where `skips` (0-d
    FP32, on the device) is not 0, nothing is updated; only Triton's kernels take it.
    """
    device, stochastic = tensors.param.payload.device, dithers != NO_DITHERS
    if updates_by_triton(tensors, is_l2=constants.is_l2, stochastic=stochastic):
        update_triton(tensors, constants, dithers, backup, skips)
        return
    assert skips is None, "only Triton's kernels read it"
    if tensors.have_kernels and device.type == "cpu" and _kernel_reproduces_torch():
        update_c(tensors, constants, dithers, backup)
    else:
        update_torch(tensors, constants, dithers)


def updates_by_triton(tensors: Tensors, *, is_l2: bool, stochastic: bool) -> bool:
    """Whether `update` runs Triton's kernels for these tensors."""
    device = tensors.param.payload.device
    if not tensors.have_kernels or (device.type == "cpu" and _kernel_reproduces_torch()):
        return False
    return runs_triton(device) and (
        _triton_reproduces_torch(device, _kinds(tensors), is_l2, stochastic)
    )


def kernel_name(
    device: torch.device,
    updated: Iterable[Tensors] = (),
    *,
    is_l2: bool = False,
    stochastic: bool = False,
    in_parts: bool = False,
) -> str:
    """Return what `update` runs on a device for tensors like `updated`, for the log.

    With `in_parts` it is what `update_part` runs, for which there is no kernel on GPUs.
    """
    updated = list(updated)
    if not all(tensors.have_kernels for tensors in updated):
        return "torch operations over stored tensors"
    if in_parts and not (device.type == "cpu" and _split_kernel_reproduces_torch()):
        return "torch operations over parts of stored tensors"
    if device.type == "cpu" and _kernel_reproduces_torch():
        return "our C kernel over stored tensors"
    if not runs_triton(device):
        return "torch operations over stored tensors"
    kinds = sorted({_kinds(tensors) for tensors in updated})
    wrong = [k for k in kinds if not _triton_reproduces_torch(device, k, is_l2, stochastic)]
    name = "our Triton kernel over stored tensors"
    if wrong:
        names = ", ".join("-".join(kind) for kind in wrong)
        name += f" (torch operations for {names}, where the kernel has other bits)"
    return name


def _kinds(tensors: Tensors) -> Kinds:
    param, exp_avg, exp_avg_sq = (stored.fmt.name for stored in tensors.written)
    return param, exp_avg, exp_avg_sq, tensors.grad.fmt.name


def update_torch(tensors: Tensors, constants: Constants, dithers: Dithers = NO_DITHERS) -> None:
    """Run `update` with torch operations, which keep three FP32 tensors for a moment."""
    for stored, values, dither in zip(
        tensors.written, _fresh(tensors, constants), dithers, strict=True
    ):
        stored.store(values, dither)


def _fresh(
    tensors: Tensors, constants: Constants
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the new parameter and moments in FP32."""
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
    return param - (m / (root * c.inverse_root + c.eps)) * c.step_size, m, v


@torch.no_grad()
def fresh_amaxes(tensors: Tensors, constants: Constants, amaxes: torch.Tensor) -> None:
    """Write the amaxes of the new parameter and moments into `amaxes`, FP32 [3]; change no tensor.

    `tensors` are a part of whole ones. Ranks agree on the amaxes, and `update_part` follows.
    """
    on_cpu = tensors.param.payload.device.type == "cpu"
    if on_cpu and tensors.have_kernels and _split_kernel_reproduces_torch():
        _split_c(tensors, constants, NO_DITHERS, amaxes, writes=False)
    else:
        _amaxes_torch(tensors, constants, amaxes)


def _amaxes_torch(tensors: Tensors, constants: Constants, amaxes: torch.Tensor) -> None:
    amaxes.copy_(torch.stack([amax_of(values) for values in _fresh(tensors, constants)]))


@torch.no_grad()
def update_part(
    tensors: Tensors, constants: Constants, amaxes: torch.Tensor, dithers: Dithers = NO_DITHERS
) -> None:
    """Run one step of Adam on a part of a parameter, with the scales of the whole one.

    `amaxes`, FP32 [3], are those of the whole parameter and its moments after the step.
    """
    on_cpu = tensors.param.payload.device.type == "cpu"
    if on_cpu and tensors.have_kernels and _split_kernel_reproduces_torch():
        _split_c(tensors, constants, dithers, amaxes, writes=True)
    else:
        _update_part_torch(tensors, constants, amaxes, dithers)


def _update_part_torch(
    tensors: Tensors, constants: Constants, amaxes: torch.Tensor, dithers: Dithers
) -> None:
    fresh = _fresh(tensors, constants)
    for stored, values, amax, dither in zip(
        tensors.written, fresh, amaxes.unbind(), dithers, strict=True
    ):
        stored.store(values, dither, amax)


class _AdamInC(ctypes.Structure):
    """Mirror `struct adam` of stored_cpu.h."""

    _fields_ = (
        ("param", StoredInC),
        ("exp_avg", StoredInC),
        ("exp_avg_sq", StoredInC),
        ("grad", StoredInC),
        ("n", ctypes.c_size_t),
        ("factors", ctypes.c_float * 8),  # beta1 … decay, as `Constants.factors` has them
        ("is_l2", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("backup", ctypes.c_void_p),
    )


def backup_bytes(tensors: Tensors) -> int:
    """Return how many bytes the kernels need to keep what a step overwrites."""
    return sum(_aligned(stored.payload.nbytes) for stored in _kept(tensors))


def _kept(tensors: Tensors) -> list[ScaledTensor]:
    """Return what is kept: not FP32 moments, as what is written is the fresh moment itself."""
    param, *moments = tensors.written
    return [param, *(moment for moment in moments if moment.fmt.name != "fp32")]


def _aligned(size: int) -> int:
    return -(-size // 16) * 16  # the longest access of a GPU's thread


def update_c(
    tensors: Tensors,
    constants: Constants,
    dithers: Dithers = NO_DITHERS,
    backup: torch.Tensor | None = None,
) -> None:
    """Run `update` with the C kernel, which there must be."""
    lib = library().lib
    assert lib is not None, library().note
    if backup is None or backup.numel() < backup_bytes(tensors):
        backup = torch.empty(backup_bytes(tensors), dtype=torch.uint8)
    lib.megafp8_scaled_adam(ctypes.byref(_asked(tensors, constants, dithers, backup.data_ptr())))


def _split_c(
    tensors: Tensors, constants: Constants, dithers: Dithers, amaxes: torch.Tensor, *, writes: bool
) -> None:
    """Compute an update in C, and write it with the amaxes, or else only find these."""
    lib = library().lib
    assert lib is not None and amaxes.is_contiguous(), library().note
    asked = _asked(tensors, constants, dithers, None)
    if not writes:
        amaxes.zero_()  # the kernel raises them
    lib.megafp8_split_adam(ctypes.byref(asked), int(writes), ctypes.c_void_p(amaxes.data_ptr()))


def _asked(
    tensors: Tensors, constants: Constants, dithers: Dithers, backup: int | None
) -> _AdamInC:
    written = zip(tensors.written, dithers, strict=True)
    return _AdamInC(
        *(stored.in_c(dither) for stored, dither in written),
        tensors.grad.in_c(),
        tensors.param.payload.numel(),
        (ctypes.c_float * 8)(*constants.factors),
        int(constants.is_l2),
        torch.get_num_threads(),
        backup,
    )


def update_triton(
    tensors: Tensors,
    constants: Constants,
    dithers: Dithers = NO_DITHERS,
    backup: torch.Tensor | None = None,
    skips: torch.Tensor | None = None,
) -> None:
    """Run `update` with the Triton kernels, where they can run."""
    if backup is None or backup.numel() < backup_bytes(tensors):
        backup = _memory(backup_bytes(tensors), tensors.param.payload.device)
    _update_all_triton([(tensors, constants, dithers)], backup, skips)


def _memory(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


@torch.no_grad()
def update_all(asked: Sequence[OneUpdate], skips: torch.Tensor | None = None) -> None:
    """Run one step of Adam on many parameters; their constants differ in weight decay alone.

    Triton's kernels take several parameters in a launch: as many as have their old bytes in the
    memory for those of the largest one, so that a step needs no more than for one parameter.
    """
    device = asked[0][0].param.payload.device
    largest = max(backup_bytes(tensors) for tensors, _, _ in asked)
    keeps_backup = device.type == "cpu" or runs_triton(device)
    backup = _memory(largest, device) if keeps_backup else None
    by_triton: list[OneUpdate] = []
    for tensors, constants, dithers in asked:
        stochastic = dithers != NO_DITHERS
        if updates_by_triton(tensors, is_l2=constants.is_l2, stochastic=stochastic):
            by_triton.append((tensors, constants, dithers))
        else:
            update(tensors, constants, dithers, backup, skips)
    if by_triton:
        assert backup is not None
        _update_all_triton(by_triton, backup, skips)


def _update_all_triton(
    asked: Sequence[OneUpdate], backup: torch.Tensor, skips: torch.Tensor | None
) -> None:
    """Run `update_all` with the Triton kernels; `backup` has memory for each parameter alone.

    A launch takes parameters of the same formats, all of them aligned or none.
    """
    from megafp8.fp8.kernels.triton_adam import LARGEST_GROUP, Update, adam, are_aligned

    groups: list[list[Update]] = []
    growing: dict[object, tuple[list[Update], int]] = {}  # a group, and its bytes in the backup
    for tensors, constants, dithers in asked:
        payloads = [stored.payload for stored in (*tensors.written, tensors.grad)]
        kind = _kinds(tensors), are_aligned(payloads)
        group, begin = growing.get(kind, ([], 0))
        end = begin + backup_bytes(tensors)
        if not group or end > backup.numel() or len(group) == LARGEST_GROUP:
            group, begin, end = [], 0, backup_bytes(tensors)
            groups.append(group)
        old_bytes = _kept_in(backup[begin:end], tensors)
        group.append(Update(tensors.written, tensors.grad, constants.decay, dithers, old_bytes))
        growing[kind] = group, end
    shared = asked[0][1]
    for group in groups:
        adam(group, shared.factors[:-1], is_l2=shared.is_l2, skips=skips)


def _kept_in(backup: torch.Tensor, tensors: Tensors) -> list[torch.Tensor]:
    """Return where the old bytes of each written tensor are; FP32 moments are their own."""
    kept, begin, places = _kept(tensors), 0, []
    for stored in tensors.written:
        payload, size = stored.payload, stored.payload.nbytes
        if any(stored is other for other in kept):
            payload = backup[begin : begin + size].view(payload.dtype)
            begin += _aligned(size)
        places.append(payload)
    return places


Tried = tuple[tuple[StorageName, StorageName, StorageName], bool, bool]
TRIED: tuple[Tried, ...] = tuple(
    (kinds, is_l2, stochastic)
    for kinds in (("fp16", "fp8", "fp16"), ("fp32", "fp8_e5m2", "bf16"))
    for is_l2 in (False, True)
    for stochastic in (False, True)
)
"""What the C kernels are tried with: formats, L2, stochastic rounding."""


@functools.cache
def _kernel_reproduces_torch() -> bool:
    """Whether there is a C kernel, and updates by it have the bits of torch's operations."""
    if library().lib is None:
        return False
    return all(_same(*tried) for tried in TRIED)


@functools.cache
def _triton_reproduces_torch(
    device: torch.device, kinds: Kinds, is_l2: bool, stochastic: bool
) -> bool:
    """Whether updates by the Triton kernels have the bits of torch's operations on this device."""
    return _same(kinds[:3], is_l2, stochastic, kinds[3], update_triton, device)


@functools.cache
def _split_kernel_reproduces_torch() -> bool:
    """Whether the C kernel for parts has the bits of torch's operations too."""
    if not _kernel_reproduces_torch():
        return False

    def in_c(tensors: Tensors, constants: Constants, dithers: Dithers = NO_DITHERS) -> None:
        amaxes = torch.empty(3)
        _split_c(tensors, constants, NO_DITHERS, amaxes, writes=False)
        _split_c(tensors, constants, dithers, amaxes * 1.5, writes=True)

    def in_torch(tensors: Tensors, constants: Constants, dithers: Dithers = NO_DITHERS) -> None:
        _amaxes_torch(tensors, constants, amaxes := torch.empty(3))
        _update_part_torch(tensors, constants, amaxes * 1.5, dithers)

    return all(_same(*tried, kernel=in_c, reference=in_torch) for tried in TRIED)


def _same(
    names: tuple[StorageName, StorageName, StorageName],
    is_l2: bool,
    stochastic: bool,
    grad_name: StorageName = "fp8",
    kernel: Callable[[Tensors, Constants, Dithers], None] = update_c,
    device: torch.device | None = None,
    *,
    reference: Callable[[Tensors, Constants, Dithers], None] = update_torch,
) -> bool:
    """Whether three updates by `kernel` have the bits of torch's; the scales change in the first.

    In the third one, scales that the second chose stay right.
    """
    # No multiple of an AVX-512 vector's length, or of a Triton program's but of its widest access.
    size = 4099 if kernel is update_c else 4112
    start = torch.linspace(-1, 1, size, device=device) ** 3
    dithers: Dithers = (Dither(3), Dither(5), Dither(7)) if stochastic else NO_DITHERS
    results: list[list[torch.Tensor]] = []
    for run in (kernel, reference):
        formats = [STORAGE_FORMATS[name] for name in names]
        written = [ScaledTensor.of(start, formats[0])]
        written += [ScaledTensor.zeros(start.shape, fmt, device) for fmt in formats[1:]]
        for number in (1, 2, 3):
            values = min(number, 2) * start.square() - 0.3
            grad = ScaledTensor.of(values, STORAGE_FORMATS[grad_name])
            tensors = Tensors(written[0], written[1], written[2], grad)
            run(tensors, Constants(0.01, (0.9, 0.98), 1e-8, 0.1, is_l2, number), dithers)
        results.append([t.values() for t in written])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))
