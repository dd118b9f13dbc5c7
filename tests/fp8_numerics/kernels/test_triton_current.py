"""Scales a row, a column, a block: the rules written once more in NumPy, payloads by the
specification."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fp8_numerics import cast
from fp8_numerics.formats import FORMATS
from fp8_numerics.kernels import triton_current as current
from fp8_numerics.kernels.triton_current import (
    BothWays,
    cast_blocks,
    cast_rowwise,
    cast_square_blocks,
)
from fp8_numerics.scales import scale_of_amax, scale_of_amax_torchao
from tests.fp8_numerics.kernels.helpers import SPEC, assert_payload, floats, hard_matrix
from tests.spec.delayed import FLT_MAX, amax_of
from tests.spec.formats import Floats32

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy


def scale_torchao(amax: np.float32, fp8_max: float, power_2: bool) -> np.float32:
    """float8_utils.amax_to_scale, one amax; 1 for one that is not finite (our deviation)."""
    if not np.isfinite(amax):
        return np.float32(1)
    scale = np.float32(fp8_max / max(float(amax), 1e-12))
    return np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if power_2 else scale


def scale_te(amax: np.float32, fp8_max: float, power_2: bool) -> np.float32:
    """compute_scale_from_amax, one amax."""
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(fp8_max) / amax
    scale = FLT_MAX if np.isinf(scale) else scale
    return np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if power_2 else scale


def scales_of(
    x: Floats32,
    block: tuple[int, int],
    rule: Callable[[np.float32, float, bool], np.float32],
    fp8_max: float,
    power_2: bool,
) -> Floats32:
    """One scale a block, blocks at the ends cut off."""
    rows, cols = range(0, x.shape[0], block[0]), range(0, x.shape[1], block[1])
    return np.array(
        [[rule(amax_of(x[r : r + block[0], c : c + block[1]]), fp8_max, power_2) for c in cols]
         for r in rows],
        dtype=np.float32,
    )  # fmt: skip


def spread(scales: Floats32, block: tuple[int, int], shape: tuple[int, ...]) -> Floats32:
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def uneven(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows and columns of very different size, zeros, a NaN, an infinity, a tiny row."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp(3 * torch.randn(rows, 1, generator=generator))
    x *= torch.exp(torch.randn(1, cols, generator=generator))
    x[0], x[:, 1] = 0, 0
    x[2, 3], x[min(4, rows - 1), 5] = torch.nan, torch.inf
    x[3] *= 1e-38
    return x.to(dtype)


@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (5, 300)), (torch.bfloat16, (140, 130)), (torch.float16, (9, 140))],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("kind", ["rowwise", "blocks", "square"])
def test_payloads_and_scales(
    device: torch.device,
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    name: str,
    power_2: bool,
) -> None:
    x = uneven(*shape, dtype).to(device)
    kernel = {"rowwise": cast_rowwise, "blocks": cast_blocks, "square": cast_square_blocks}[kind]
    result: BothWays = kernel(x, FORMATS[name], power_2=power_2, with_columns=True)
    rule = scale_torchao if kind == "rowwise" else scale_te
    block = {"rowwise": (1, shape[1]), "blocks": (1, 128), "square": (128, 128)}[kind]
    block_t = {"rowwise": (1, shape[0]), "blocks": (1, 128), "square": (128, 128)}[kind]
    for scaled, values, size in [
        (result.rows, floats(x), block),
        (result.columns, floats(x).T, block_t),
    ]:
        assert scaled is not None
        expected = scales_of(values, size, rule, SPEC[name].max, power_2)
        with np.errstate(over="ignore"):
            assert np.array_equal(floats(scaled.dequant_scale), np.float32(1) / expected)
        assert_payload(scaled.payload, values, spread(expected, size, values.shape), name)


def test_one_direction_alone_is_the_same(device: torch.device) -> None:
    x = hard_matrix(40, 200, torch.bfloat16, finite=True).to(device)
    for kernel in (cast_rowwise, cast_blocks, cast_square_blocks):
        both = kernel(x, FORMATS["e4m3"], power_2=False, with_columns=True)
        rows = kernel(x, FORMATS["e4m3"], power_2=False)
        columns = kernel(x, FORMATS["e4m3"], power_2=False, with_rows=False, with_columns=True)
        assert rows.columns is None and columns.rows is None
        for alone, of_both in ((rows.rows, both.rows), (columns.columns, both.columns)):
            assert alone is not None and of_both is not None
            assert torch.equal(alone.dequant_scale, of_both.dequant_scale)
            assert torch.equal(alone.payload.view(torch.uint8), of_both.payload.view(torch.uint8))


@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("torchao", [False, True])
@pytest.mark.parametrize(
    "amax", [0.0, 1e-45, 1e-38, 1e-12, 0.3, 448.0, 3e38, float("inf")], ids=str
)
def test_scales_of_one_amax(
    device: torch.device, amax: float, torchao: bool, name: str, power_2: bool
) -> None:
    """Bit for bit those of the recipes on other devices, and of the rule in NumPy."""
    result = current.scales_of(
        torch.tensor(amax, device=device), FORMATS[name], power_2=power_2, torchao=torchao
    )
    rule = scale_torchao if torchao else scale_te
    expected = rule(np.float32(amax), SPEC[name].max, power_2)
    by_torch = scale_of_amax_torchao if torchao else scale_of_amax
    assert result[0].item() == expected
    assert result[0].cpu() == by_torch(torch.tensor(amax), FORMATS[name], power_2=power_2)
    with np.errstate(over="ignore", divide="ignore"):
        assert result[1].item() == np.float32(1) / expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(67, 131), (3, 5), (128, 256)])
def test_amax_of_a_matrix(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = hard_matrix(*shape, dtype, finite=True).to(device)
    x[-1, -1] = -60000.0  # the largest magnitude of some, in the last program
    assert current.amax_of_matrix(x).item() == cast.amax_of(x).item() == amax_of(floats(x))
    for bad in (torch.nan, -torch.inf):
        x[shape[0] // 2, 1] = bad
        assert current.amax_of_matrix(x).item() == np.inf
    assert current.amax_of_matrix(x[:0]).item() == 0
