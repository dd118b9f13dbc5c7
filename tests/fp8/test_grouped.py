"""Moments by groups: the specification in FP64, what must hold for any values, and C's bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.fp8.formats import STORAGE_FORMATS
from megafp8.fp8.grouped import GroupedTensor, groups_shape, range_of
from megafp8.fp8.scaled import Dither, ScaledTensor
from megafp8.optim import scaled_adam
from megafp8.optim.scaled_adam import Constants, Tensors
from megafp8.specs.optim import StorageName
from tests.c_kernels import need_kernels
from tests.spec import grouped as spec

FP8: tuple[StorageName, ...] = ("fp8", "fp8_e5m2")
both = pytest.mark.parametrize("name", FP8)


def hard_matrix(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Rows of small and of very large range, with zeros, one sign or both, and equal magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= 10.0 ** (torch.rand(rows, cols, generator=generator) * torch.arange(rows)[:, None] * 2)
    x *= 10.0 ** -torch.arange(rows)[:, None]
    x[1] = x[1].abs()
    x[2] = x[2].sign() * 3e-5
    x[3, ::3] = 0
    x[4] = 0
    return x


@both
def test_numbers_are_the_specifications(name: StorageName) -> None:
    """The powers are the very ones, and numbers differ only where two are about equally near."""
    x = hard_matrix(9, 300, 1)
    stored = GroupedTensor.of(x, STORAGE_FORMATS[name])
    numbers = stored.payload.float()
    for row in range(len(x)):
        groups = spec.groups_of(x[row].numpy(), name)
        assert stored.groups[row, :, 1].tolist() == [group.power for group in groups]
        assert stored.groups[row, :, 0].tolist() == [group.largest for group in groups]
        exact = [number for group in groups for number in group.exact]
        for ours, number in zip(numbers[row].tolist(), exact, strict=True):
            near = {spec.rounded(number * (1 + side * 2e-5), name) for side in (-1, 0, 1)}
            assert ours in near, (row, ours, number)


@both
def test_values_are_the_specifications(name: StorageName) -> None:
    """Every number that a group can hold, at powers of 1/16 to 16: a relative error below 3e-5.

    The logarithm, of at most 32, is rounded by 2^-20 and has twice the polynomial's error, 2.1e-7;
    k = 1/16 multiplies both by 16 and rounds by 2^-16. The value's error is ln 2 times that:
    2.6e-5, and some roundings of 2^-24.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(STORAGE_FORMATS[name].dtype)
    numbers = codes[codes.float().isfinite()]
    largest = STORAGE_FORMATS[name].max
    assert largest is not None
    for power in (1 / 16, 3 / 16, 1.0, 2.5, 16.0):
        tensor = GroupedTensor.zeros((1, len(numbers)), STORAGE_FORMATS[name])
        tensor.payload.copy_(numbers[None])
        tensor.groups[..., 0], tensor.groups[..., 1] = 2.0**100, power
        group = spec.Group(2.0**100, power, [])
        expected = [spec.value(n, group, name) for n in numbers.float().tolist()]
        in_range = np.abs(expected) >= 2.0**-126
        found = tensor.values()[0].double().numpy()
        np.testing.assert_allclose(found[in_range], np.array(expected)[in_range], rtol=3e-5)


@both
def test_what_holds_for_any_values(name: StorageName) -> None:
    """Nothing becomes 0, signs stay, the largest comes back, and errors are those of the format.

    A number that is rounded to a normal one is off by a factor of at most 1 / (1 - 2^-m-1), and one
    that is rounded to a subnormal one by 2; the power 1/k takes the root of that.
    """
    fmt = STORAGE_FORMATS[name]
    mantissa = {"fp8": 3, "fp8_e5m2": 2}[name]
    for seed, cols in itertools.product(range(4), (1, 5, 128, 129, 400)):
        x = hard_matrix(9, cols, seed)
        stored = GroupedTensor.of(x, fmt)
        back = stored.values()
        assert torch.equal(back.sign(), x.sign())
        places = torch.arange(cols) // 128
        tops = stored.groups[..., 0][:, places]
        is_largest = x.abs() == tops
        assert torch.equal(back[is_largest], x[is_largest])
        assert (back.abs() <= tops * (1 + 1e-6)).all()
        power = stored.groups[..., 1][:, places].double()
        nonzero = x != 0
        ratio = (back[nonzero].double() / x[nonzero].double()).log2().abs() * power[nonzero]
        is_normal = stored.payload.float().abs()[nonzero] >= torch.finfo(fmt.dtype).smallest_normal
        assert (ratio[is_normal] <= -np.log2(1 - 2.0 ** -(mantissa + 1)) + 2e-4).all()
        assert (ratio <= 1.0).all()


def test_the_power_is_coats() -> None:
    """COAT divides log2(448^2 / 2) = 16.6147 by the range's logarithm, rounded down to 1/16."""
    assert abs(range_of(448.0) / 16 - 16.6147) < 1e-4
    for span, sixteenths in ((0, 256), (4, 66), (8, 33), (16, 16), (33, 8), (250, 1)):
        x = torch.tensor([[1.0, -(2.0 ** -(span // 2)), 2.0 ** -(span // 2), 0.0]])
        x[0, 0] = 2.0 ** (span - span // 2)
        tensor = GroupedTensor.of(x, STORAGE_FORMATS["fp8"])
        assert tensor.groups[0, 0, 1].item() == sixteenths / 16


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_spoils_its_group_alone(name: StorageName, bad: float) -> None:
    x = hard_matrix(9, 300, 2)
    x[3, 140] = bad
    back = GroupedTensor.of(x, STORAGE_FORMATS[name]).values()
    expected = torch.zeros(x.shape, dtype=torch.bool)
    expected[3, 128:256] = True
    assert torch.equal(back.isnan(), expected)


@both
def test_magnitudes_below_the_smallest_normal_number_are_0(name: StorageName) -> None:
    tiny = 2.0**-126
    x = torch.tensor([[tiny, -tiny * 0.999, 3 * tiny, 1e-42, 0.0], [1e-39] * 5])
    back = GroupedTensor.of(x, STORAGE_FORMATS[name]).values()
    assert back.sign().tolist() == [[1, 0, 1, 0, 0], [0] * 5]


def test_bytes() -> None:
    """A byte an element, and 8 bytes for each group of 128."""
    stored = GroupedTensor.zeros((256, 1024), STORAGE_FORMATS["fp8"])
    held = stored.payload.nbytes + stored.groups.nbytes
    assert held / stored.payload.numel() == 1 + 8 / 128
    assert groups_shape((3, 129)) == (3, 2, 2)


KINDS: list[tuple[tuple[StorageName, ...], tuple[bool, bool]]] = [
    (("fp16", "fp8", "fp8", "fp8"), (True, True)),
    (("fp16", "fp8", "fp8_e5m2", "fp8"), (True, True)),
    (("fp32", "fp8", "fp8", "fp32"), (True, True)),
    (("fp16", "fp8", "fp16", "fp8"), (True, False)),
    (("bf16", "fp32", "fp8", "fp32"), (False, True)),
]


@pytest.mark.parametrize(("names", "grouped"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_c_has_torchs_bits(names: Any, grouped: Any, stochastic: bool) -> None:
    """Steps of Adam of both kinds at several shapes, threads, and gradients of wide range.

    The gradients shrink, so that the parameter's scale changes in some steps and its update is
    computed again from the moments of before.
    """
    need_kernels()
    threads = torch.get_num_threads()
    for shape, is_l2 in itertools.product(((9, 300), (200, 512), (9, 1), (9, 128)), (False, True)):
        found = []
        for run, count in ((scaled_adam.update_torch, 1), (scaled_adam.update_c, 2)):
            torch.set_num_threads(count)
            try:
                generator = torch.Generator().manual_seed(4)
                start = torch.randn(shape, generator=generator)
                formats = [STORAGE_FORMATS[name] for name in names]
                kinds = [GroupedTensor if is_so else ScaledTensor for is_so in grouped]
                param = ScaledTensor.of(start, formats[0])
                m, v = (k.zeros(shape, f) for k, f in zip(kinds, formats[1:3], strict=True))
                for t in range(1, 4):
                    raw = hard_matrix(*shape, t) * 10.0 ** (2 - t)
                    dithers: Any = tuple(
                        Dither(9 * t + k) if stochastic else None for k in range(3)
                    )
                    tensors = Tensors(param, m, v, ScaledTensor.of(raw, formats[3]))
                    run(tensors, Constants(1.0, (0.9, 0.98), 1e-8, 0.1, is_l2, t), dithers)
                found.append([x.values() for x in (param, m, v)])
                found[-1] += [x.groups for x in (m, v) if isinstance(x, GroupedTensor)]
            finally:
                torch.set_num_threads(threads)
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
