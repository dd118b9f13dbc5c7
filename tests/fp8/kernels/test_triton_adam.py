"""Adam over stored tensors by Triton kernels: torch's bits, and when the second kernel computes.

`tests/optim/test_scaled_adam.py` holds the kernels to the slow specification.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from megafp8.fp8.kernels import triton_adam, triton_stored
from megafp8.fp8.scaled import Dither, ScaledTensor, random_bits
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.optim import scaled_adam
from megafp8.optim.scaled_adam import NO_DITHERS, Constants, Dithers, Tensors

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy

FP8 = STORAGE_FORMATS["fp8"]
DITHERS = (Dither(1 << 63 | 1), Dither(0xFFFFFFFF), Dither(2))
O2: Any = ("fp16", "fp8", "fp16", "fp8")
MIXED: Any = ("bf16", "fp8_e5m2", "fp32", "fp8_e5m2")
CASES = [
    pytest.param(O2, NO_DITHERS, id="O2-nearest"),
    pytest.param(O2, DITHERS, id="O2-stochastic"),
    pytest.param(MIXED, DITHERS, id="mixed-stochastic"),
]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_adam, "BLOCK", 256)


def tensors_of(start: torch.Tensor, grad: torch.Tensor, kinds: Any) -> Tensors:
    formats = [STORAGE_FORMATS[kind] for kind in kinds]
    moments = [ScaledTensor.zeros(start.shape, fmt, start.device) for fmt in formats[1:3]]
    grads = ScaledTensor.of(grad, formats[3])
    return Tensors(ScaledTensor.of(start, formats[0]), moments[0], moments[1], grads)


def constants(number: int, *, eps: float = 1e-8, is_l2: bool = False) -> Constants:
    return Constants(0.01, (0.9, 0.98), eps, 0.1, is_l2, number)


def assert_same(ours: Tensors, theirs: Tensors, what: object = None) -> None:
    for a, b in zip(ours.written, theirs.written, strict=True):
        torch.testing.assert_close(
            a.values(), b.values(), rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )
        assert torch.equal(a.dequant_scale.nan_to_num(), b.dequant_scale.nan_to_num()), what


@pytest.mark.parametrize("kinds, dithers", CASES)
@pytest.mark.parametrize("size", [0, 15, 771])
def test_torchs_bits_at_every_size(
    device: torch.device, size: int, kinds: Any, dithers: Dithers
) -> None:
    """Without eps, what lies past the end would give 0/0."""
    generator = torch.Generator().manual_seed(size)
    start, grad = (torch.randn(size, generator=generator).to(device) for _ in range(2))
    ours, theirs = (tensors_of(start, grad, kinds) for _ in range(2))
    for number in (1, 2, 3):
        asked = constants(number, eps=0.0, is_l2=number == 2)
        scaled_adam.update_triton(ours, asked, dithers)
        scaled_adam.update_torch(theirs, asked, dithers)
        assert_same(ours, theirs, number)


@pytest.mark.parametrize("kinds, dithers", CASES)
@pytest.mark.parametrize("value", [0.0, 1e-36, 3e38, torch.inf, -torch.inf, torch.nan])
def test_hard_gradients(device: torch.device, value: float, kinds: Any, dithers: Dithers) -> None:
    start = torch.linspace(-1, 1, 300, device=device)
    grad = torch.zeros(300, device=device)
    grad[77] = value
    kinds = (*kinds[:3], "fp32")  # what E5M2 could not hold
    ours, theirs = (tensors_of(start, grad, kinds) for _ in range(2))
    for number in (1, 2):
        scaled_adam.update_triton(ours, constants(number), dithers)
        scaled_adam.update_torch(theirs, constants(number), dithers)
        assert_same(ours, theirs, number)


def test_old_bytes_are_read_only_where_a_scale_changed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old bytes are spoilt between the kernels: then the bits differ if they were read."""
    second = triton_adam._adam_again_kernel
    is_spoilt = False
    backup = torch.empty(8192, dtype=torch.uint8, device=device)

    class Spoils:
        def __getitem__(self, grid: Any) -> Any:
            def launch(**arguments: Any) -> None:
                if is_spoilt:
                    backup.fill_(0x38)
                second[grid](**arguments)

            return launch

    monkeypatch.setattr(triton_adam, "_adam_again_kernel", Spoils())
    start = torch.linspace(-1, 1, 600, device=device)
    seen = []
    ours, theirs = (tensors_of(start, start.square() - 0.3, O2) for _ in range(2))
    for number in range(1, 9):
        before = [stored.dequant_scale.item() for stored in theirs.written]
        scaled_adam.update_torch(theirs, constants(number))
        stays = before == [stored.dequant_scale.item() for stored in theirs.written]
        is_spoilt = stays
        scaled_adam.update_triton(ours, constants(number), backup=backup)
        assert_same(ours, theirs, number)
        seen.append(stays)
    assert set(seen) == {True, False}
    other = tensors_of(start, start, O2)
    is_spoilt = True
    scaled_adam.update_triton(
        other, constants(1), backup=backup
    )  # the moments' first scales are new
    expected = tensors_of(start, start, O2)
    scaled_adam.update_torch(expected, constants(1))
    assert not torch.equal(other.exp_avg.values(), expected.exp_avg.values())


@pytest.mark.parametrize("stochastic", [False, True])
def test_many_parameters_in_few_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, stochastic: bool
) -> None:
    """Each has the bits of an update of its own, also an empty one, one of another format, one that
    lies at an odd place, and one without decay; old bytes need no more room than the largest has. A
    step that is not finite changes none of them.
    """
    launches: list[int] = []
    real = triton_adam.adam

    def counted(updates: Any, *rest: Any, **options: Any) -> None:
        launches.append(len(updates))
        kept = sum(x.nbytes for update in updates for x in update.backup)
        assert kept <= 5 * 1500 + 16
        real(updates, *rest, **options)

    monkeypatch.setattr(triton_adam, "adam", counted)
    monkeypatch.setattr(scaled_adam, "_kernel_reproduces_torch", lambda: False)
    monkeypatch.setattr(scaled_adam, "_triton_reproduces_torch", lambda *_: True)
    monkeypatch.setattr(scaled_adam, "runs_triton", lambda device: True)
    generator = torch.Generator().manual_seed(1)
    sizes = (700, 0, 257, 1500, 33, 300, 300)
    starts = [torch.randn(size, generator=generator).to(device) for size in sizes]
    kinds = [O2] * 5 + [MIXED, O2]
    ours, theirs = (
        [tensors_of(x, 0.1 * x, k) for x, k in zip(starts, kinds, strict=True)] for _ in range(2)
    )
    odd = ours[4]
    odd.param.payload = torch.cat((odd.param.payload[:1], odd.param.payload))[1:]
    for number in (1, 2):
        asked = []
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            decay = 0.0 if place == 2 else 0.1
            c = Constants(0.01, (0.9, 0.98), 1e-8, decay, False, number)
            keys: Any = [Dither((1 << 63) + 10 * place + x) for x in range(3)]
            dithers = tuple(keys) if stochastic else NO_DITHERS
            asked.append((mine, c, dithers))
            scaled_adam.update_torch(other, c, dithers)
        scaled_adam.update_all(asked)
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, (number, place))
    scaled_adam.update_all(asked, torch.ones((), device=device))
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(mine, other, ("a step that is not finite", place))
    assert len(launches) < 3 * len(sizes) and sum(launches) == 3 * len(sizes)


def test_a_step_that_is_not_finite_changes_nothing(device: torch.device) -> None:
    """The flag is on the device; all bits stay, scales and NaN gradients too."""
    start = torch.linspace(-1, 1, 600, device=device)
    ours, before = (tensors_of(start, start * torch.nan, O2) for _ in range(2))
    scaled_adam.update_triton(ours, constants(1), skips=torch.ones((), device=device))
    assert_same(ours, before)
    ours, theirs = (tensors_of(start, start, O2) for _ in range(2))
    scaled_adam.update_triton(ours, constants(1), skips=torch.zeros((), device=device))
    scaled_adam.update_torch(theirs, constants(1))
    assert_same(ours, theirs)


@triton.jit
def _bits_kernel(out, low, high, program):
    at = tl.arange(0, 16)
    bits = triton_stored.random_bits(low, high, program.to(tl.int64) * 16, at)
    tl.store(out + at, bits.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("first", [0, 1 << 31, (1 << 32) - 16, (5 << 32) + 48])
def test_random_bits_of_elements_beyond_32_bits(device: torch.device, first: int) -> None:
    key = 0xFEDC_BA98_8765_4321
    halves = [half - (half >> 31 << 32) for half in (key & 0xFFFFFFFF, key >> 32)]
    out = torch.empty(16, dtype=torch.int32, device=device)
    _bits_kernel[(1,)](out, *halves, first // 16)
    expected = random_bits(key, torch.arange(first, first + 16))
    assert torch.equal(out.cpu().long() & 0xFFFFFFFF, expected)


def test_it_is_chosen_where_it_runs_and_has_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for the GPU: without C, and as if Triton ran on it."""
    cpu = torch.device("cpu")
    calls: list[str] = []
    real = scaled_adam.update_triton

    def counted(*args: Any) -> None:
        calls.append("Triton")
        real(*args)

    monkeypatch.setattr(scaled_adam, "update_triton", counted)
    monkeypatch.setattr(scaled_adam, "_kernel_reproduces_torch", lambda: False)
    monkeypatch.setattr(scaled_adam, "runs_triton", lambda device: True)
    scaled_adam._triton_reproduces_torch.cache_clear()
    tensors = tensors_of(torch.ones(8), torch.ones(8), O2)
    assert scaled_adam.kernel_name(cpu, [tensors]) == "our Triton kernel over stored tensors"
    assert calls == ["Triton"] * 3, "it was compared first"
    scaled_adam.update(tensors, constants(1))
    assert len(calls) == 4
    monkeypatch.setattr(scaled_adam, "_triton_reproduces_torch", lambda *_: False)
    scaled_adam.update(tensors, constants(2))
    assert len(calls) == 4 and "torch operations" in scaled_adam.kernel_name(cpu, [tensors])
    name = scaled_adam.kernel_name(cpu, [tensors])
    assert "torch operations for fp16-fp8-fp16-fp8" in name and "other bits" in name
    monkeypatch.setattr(scaled_adam, "_split_kernel_reproduces_torch", lambda: False)
    parts = scaled_adam.kernel_name(cpu, [tensors], in_parts=True)
    assert parts == "torch operations over parts of stored tensors"


def test_a_cpu_does_not_choose_it() -> None:
    assert not scaled_adam.runs_triton(torch.device("cpu"))
