"""Adam over stored tensors: the slow specification, bit for bit, in C, in torch and in Triton."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from fp8_numerics.kernels.triton_launch import unavailable
from megafp8.fp8.scaled import Dither, ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.optim import scaled_adam
from megafp8.optim.scaled_adam import NO_DITHERS, Constants, Dithers, Tensors
from megafp8.specs.optim import StorageName
from tests.c_kernels import need_kernels
from tests.spec import scaled as spec

KINDS: list[tuple[StorageName, ...]] = [  # parameter, exp_avg, exp_avg_sq, gradient
    ("fp16", "fp32", "fp32", "fp8"),  # O1
    ("fp16", "fp8", "fp16", "fp8"),  # O2, O3
    ("bf16", "fp8", "fp16", "fp8"),  # the paper's #2b
    ("fp8", "fp8", "fp16", "fp8"),  # #3
    ("fp16", "fp8", "fp8", "fp8"),  # #4
    ("fp32", "fp8", "fp8_e5m2", "fp32"),
    ("fp32", "bf16", "bf16", "fp32"),
    ("fp32", "fp32", "fp32", "fp32"),
]


@pytest.fixture(params=["C", "torch", "Triton"])
def update(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "C":
        need_kernels()
    if request.param == "Triton":
        if (why := unavailable(torch.device("cpu"))) is not None:
            pytest.skip(why)
        name = "megafp8.fp8.kernels.triton_adam.BLOCK"
        monkeypatch.setattr(name, 256)  # the tests' tensors are small
    ways = (scaled_adam.update_c, scaled_adam.update_torch, scaled_adam.update_triton)
    return dict(zip(("C", "torch", "Triton"), ways, strict=True))[request.param]


@pytest.mark.parametrize("on_cpu", [False, True], ids=["no C", "C"])
@pytest.mark.parametrize("on_triton", [False, True], ids=["no Triton", "Triton"])
def test_the_fastest_kernel_that_can_runs(
    on_cpu: bool, on_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    for name in ("update_c", "update_torch", "update_triton"):
        monkeypatch.setattr(scaled_adam, name, lambda *args, name=name: used.append(name))
    monkeypatch.setattr(scaled_adam, "_kernel_reproduces_torch", lambda: on_cpu)
    monkeypatch.setattr(scaled_adam, "runs_triton", lambda device: on_triton)
    monkeypatch.setattr(scaled_adam, "_triton_reproduces_torch", lambda *kinds: True)
    formats = [STORAGE_FORMATS[name] for name in ("fp16", "fp8", "fp16", "fp8")]
    param, m, v, grad = (ScaledTensor.zeros((4, 8), fmt) for fmt in formats)
    scaled_adam.update(
        Tensors(param, m, v, grad), Constants(0.01, (0.9, 0.98), 1e-8, 0.1, False, 1)
    )
    fits = "update_triton" if on_triton else "update_torch"
    assert used == ["update_c" if on_cpu else fits]


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kinds))
@pytest.mark.parametrize("is_l2", [False, True], ids=["adamw", "adam"])
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_steps_are_the_specifications(
    update: Any, kinds: tuple[StorageName, ...], is_l2: bool, stochastic: bool
) -> None:
    """Four steps of an odd shape; what is stored has the very bits."""
    formats = [STORAGE_FORMATS[kind] for kind in kinds]
    start, steps = specified(kinds, is_l2, stochastic)
    param = ScaledTensor.of(start.clone(), formats[0])
    m, v, grad = (ScaledTensor.zeros(start.shape, fmt) for fmt in formats[1:])
    for t, (raw, keys, slow) in enumerate(steps, start=1):
        store_clipped(grad, raw)
        constants = Constants(0.01, (0.9, 0.98), 1e-8, 0.1, is_l2, t)
        dithers: Any = tuple(None if key is None else Dither(key) for key in keys)
        update(Tensors(param, m, v, grad), constants, dithers)
        for ours, theirs in zip((param, m, v), slow, strict=True):
            assert torch.equal(ours.values(), torch.from_numpy(theirs))


def store_clipped(grad: ScaledTensor, raw: torch.Tensor) -> None:
    """Store a gradient as clipping leaves it."""
    grad.store(raw)
    grad.dequant_scale.mul_(0.3 if grad.fmt.max else 1)


@functools.cache
def specified(
    kinds: tuple[StorageName, ...], is_l2: bool, stochastic: bool
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, list[int | None], list[Any]]]]:
    """Return the start, and of four steps the gradient, the keys and what the specification stores.

    Every way of updating is compared with it.
    """
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(7, 31, generator=generator)
    grad, steps = ScaledTensor.zeros(start.shape, STORAGE_FORMATS[kinds[3]]), []
    slow = [torch.from_numpy(spec.stored(start.numpy(), kinds[0])).numpy()]
    slow += [torch.zeros(start.shape).numpy()] * 2
    for t in range(1, 5):
        raw = torch.randn(start.shape, generator=generator) * 10.0 ** (-t)
        store_clipped(grad, raw)
        keys = [10 * t + k if stochastic else None for k in range(3)]
        fresh = spec.adam(
            slow, grad.values().numpy(), spec.Adam(0.01, 0.9, 0.98, 1e-8, 0.1, is_l2, t)
        )
        slow = [
            spec.stored(x, kind, key) for x, kind, key in zip(fresh, kinds[:3], keys, strict=True)
        ]
        steps.append((raw, keys, slow))
    return start, steps


@pytest.mark.parametrize("m_kind, v_kind", [*itertools.product(["fp8", "fp16"], repeat=2)])
@pytest.mark.parametrize("is_l2", [False, True], ids=["adamw", "adam"])
def test_ms_amps_acceptance(m_kind: Any, v_kind: Any, is_l2: bool) -> None:
    """4 steps on a 4x4 weight: within 3e-4 of torch's Adam and AdamW, at every pair of formats."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4, 4, generator=generator)
    plain = torch.nn.Parameter(start.clone())
    kind = torch.optim.Adam if is_l2 else torch.optim.AdamW
    theirs = kind([plain], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    param = ScaledTensor.of(start, STORAGE_FORMATS["fp32"])
    m = ScaledTensor.zeros((4, 4), STORAGE_FORMATS[m_kind])
    v = ScaledTensor.zeros((4, 4), STORAGE_FORMATS[v_kind])
    grad = torch.randn(4, 4, generator=generator)
    for t in range(1, 5):
        plain.grad = grad + 0.1 * torch.randn(4, 4, generator=generator)
        tensors = Tensors(param, m, v, ScaledTensor.of(plain.grad, STORAGE_FORMATS["fp32"]))
        scaled_adam.update(tensors, Constants(1e-3, (0.9, 0.999), 1e-8, 0.01, is_l2, t))
        theirs.step()
    torch.testing.assert_close(param.values(), plain.detach(), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("dithers", [NO_DITHERS, (Dither(1), None, Dither(2))])
@pytest.mark.parametrize("size", [0, 1, 15, 63, 1024, 1025, 200_003])
def test_c_has_torchs_bits_at_every_size(size: int, dithers: Dithers) -> None:
    """With one thread and with two, whose parts begin at multiples of a cache line."""
    need_kernels()
    generator = torch.Generator().manual_seed(size)
    start, raw = (torch.randn(size, generator=generator) for _ in range(2))
    found = []
    threads = torch.get_num_threads()
    for run, count in (
        (scaled_adam.update_torch, 1),
        (scaled_adam.update_c, 1),
        (scaled_adam.update_c, 2),
    ):
        torch.set_num_threads(count)
        try:
            tensors = Tensors(
                ScaledTensor.of(start, STORAGE_FORMATS["fp16"]),
                ScaledTensor.zeros((size,), STORAGE_FORMATS["fp8"]),
                ScaledTensor.zeros((size,), STORAGE_FORMATS["fp16"]),
                ScaledTensor.of(raw, STORAGE_FORMATS["fp8"]),
            )
            for t in (1, 2):
                run(
                    tensors,
                    Constants(0.01, (0.9, 0.98), 1e-8, 0.1, False, t),
                    dithers,
                )
            found.append([x.values() for x in tensors.written])
        finally:
            torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_c_keeps_old_numbers_of_two_bytes_at_even_addresses() -> None:
    """Also behind an odd number of bytes: 10 and 5 of them begin at 0 and 16."""
    need_kernels()
    names: tuple[StorageName, ...] = ("fp16", "fp8", "fp16", "fp8")
    start = torch.linspace(0, 1, 5)
    tensors = Tensors(*(ScaledTensor.of(start, STORAGE_FORMATS[name]) for name in names))
    backup = torch.zeros(scaled_adam.backup_bytes(tensors), dtype=torch.uint8)
    old = tensors.written[2].payload.clone()
    scaled_adam.update_c(tensors, Constants(0.01, (0.9, 0.98), 1e-8, 0.1, False, 1), backup=backup)
    assert torch.equal(backup[32:42].view(torch.float16), old)


def test_c_has_torchs_bits_where_its_fastest_loop_does_not_apply() -> None:
    """O2 with codes of NaN, factors that are no powers of two or extreme, and infinite gradients.

    The fastest loop leaves such tensors to others, or they are written again: also at the scale 1,
    which is that of an amax of 0 and of one that is not finite.
    """
    need_kernels()
    generator = torch.Generator().manual_seed(5)
    names: tuple[StorageName, ...] = ("fp16", "fp8", "fp16", "fp8")
    starts = [10.0**-k * torch.randn(60_000, generator=generator) for k in range(4)]
    starts[2].abs_()
    whole = [ScaledTensor.of(x, STORAGE_FORMATS[n]) for x, n in zip(starts, names, strict=True)]

    def check(change: Any, size: int = 300, betas: tuple[float, float] = (0.9, 0.98)) -> None:
        found = []
        for run in (scaled_adam.update_torch, scaled_adam.update_c):
            tensors = [
                ScaledTensor(x.payload[:size].clone(), x.dequant_scale.clone(), x.fmt)
                for x in whole
            ]
            change(tensors)
            for t in (1, 2):
                constants = Constants(0.01, betas, 1e-8, 0.1, False, t)
                run(Tensors(*tensors), constants)
            found.append([x.values() for x in tensors])
            found[-1] += [x.values().nan_to_num().signbit() for x in tensors]
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)

    def huge(tensors: list[ScaledTensor]) -> None:
        tensors[3].payload.view(torch.uint8).fill_(3)
        tensors[3].dequant_scale.fill_(2.0**121)

    def nan_at(row: int, at: int) -> Any:
        return lambda tensors: tensors[row].payload.view(torch.uint8)[at].fill_(0x7F)

    def times(row: int, factor: float) -> Any:
        return lambda tensors: tensors[row].dequant_scale.mul_(factor)

    def odd(row: int, parity: int) -> Any:
        """Multiply one of three scales, whose exponents are all even or all odd, by 1.2."""

        def change(tensors: list[ScaledTensor]) -> None:
            # The parameter keeps its scale, 2^(parity - 15), and all bits of the updates.
            first = torch.arange(len(tensors[0].payload)) == 0
            tensors[0].store(1.5 * 2**parity * first)
            for tensor in tensors[:3]:
                _, exponent = torch.frexp(tensor.dequant_scale / tensors[0].dequant_scale)
                tensor.dequant_scale.mul_(1 if exponent % 2 else 2)  # of 1 it is 1
            tensors[row].dequant_scale.mul_(1.2)

        return change

    for changed in (lambda tensors: None, huge, nan_at(1, 70), nan_at(1, 299), nan_at(3, 10)):
        check(changed)
    check(lambda tensors: None, betas=(0.0, 0.0))
    for row, parity in itertools.product((1, 2), (0, 1)):
        check(odd(row, parity), 60_000)
    for row, factor in itertools.product(
        range(4), (0.3, 0.6, 2.0**-120, 2.0**110, -1.0, torch.nan)
    ):
        check(times(row, factor))
    for number in (torch.inf, torch.nan):
        check(lambda tensors, same=number: tensors[3].store(torch.full((300,), same)))


def test_the_kernel_is_used_here() -> None:
    need_kernels()
    assert scaled_adam._kernel_reproduces_torch()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS[:-1], ids=lambda kinds: "-".join(kinds))
@pytest.mark.parametrize("is_l2", [False, True], ids=["adamw", "adam"])
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_triton_is_used_on_a_gpu(kinds: Any, is_l2: bool, stochastic: bool) -> None:
    device = torch.device("cuda")
    assert scaled_adam._triton_reproduces_torch(device, kinds, is_l2, stochastic)


def test_a_kernel_is_tried_with_the_format_of_each_tensor() -> None:
    """The reference is run with what the kernel is run with."""
    tried: list[list[object]] = []

    def kernel(tensors: Tensors, constants: Constants, dithers: Dithers) -> None:
        of_step = (tensors.param, tensors.exp_avg, tensors.exp_avg_sq, tensors.grad)
        tried.append([tensor.fmt for tensor in of_step])
        scaled_adam.update_torch(tensors, constants, dithers)

    names: tuple[StorageName, ...] = ("fp16", "fp8", "bf16")
    assert scaled_adam._same(names, False, False, "fp8", kernel, reference=kernel)  # type: ignore[arg-type]
    assert tried == [[STORAGE_FORMATS[name] for name in (*names, "fp8")]] * 6


def test_parts_are_updated_in_c_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    need_kernels()
    assert scaled_adam._split_kernel_reproduces_torch()  # is tried once
    asked: list[bool] = []
    monkeypatch.setattr(scaled_adam, "_split_c", lambda *_, writes: asked.append(writes))
    part = [ScaledTensor.of(torch.ones(8), STORAGE_FORMATS["fp16"]) for _ in range(4)]
    constants = Constants(0.01, (0.9, 0.98), 1e-8, 0.1, False, 1)
    scaled_adam.fresh_amaxes(Tensors(*part), constants, torch.zeros(3))
    scaled_adam.update_part(Tensors(*part), constants, torch.ones(3))
    assert asked == [False, True]
