"""Kernels over matrices of more than 2**31 elements, whose offsets fit no 32 bits.

Triton's interpreter computes in the widths that the kernels declare. It runs the last program of
each launch alone, so that the pages of no other program get memory. An offset in 32 bits is outside
of every tensor: it ends the tests with a segmentation fault, as it did when four were planted.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter

from fp8_numerics.formats import E4M3, E5M2
from fp8_numerics.kernels import triton_blocks, triton_cast, triton_current, triton_fp4
from fp8_numerics.nvfp4 import SIGN_BITS
from megafp8.fp8.kernels import triton_loss, triton_norm, triton_sums
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, from numpy
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here"),
]
ROWS, COLS = 2**19 + 128, 2**12  # 2**31 + 2**19 elements
TILE = 128


@pytest.fixture(autouse=True)
def last_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a launch run its last program, over tensors that lie where they are."""

    def of_launch(*bounds: int) -> Any:
        whole = range(*bounds)
        return whole[-1:] if sys._getframe(1).f_code.co_name == "__call__" else whole

    monkeypatch.setattr(interpreter, "range", of_launch, raising=False)
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    yield


def zeros(dtype: torch.dtype) -> torch.Tensor:
    """A matrix of zeros whose pages get memory when they are written.

    `torch.empty` may reuse memory that an earlier test has written, and `torch.zeros` may fill it.
    """
    pages = mmap.mmap(-1, ROWS * COLS * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(ROWS, COLS)


def matrix() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of BF16 whose last tile has numbers, and this tile."""
    x = zeros(torch.bfloat16)
    tile = torch.randn(TILE, TILE, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[-TILE:, -TILE:] = tile
    return x, tile


def bytes_of(payload: torch.Tensor | None) -> torch.Tensor:
    assert payload is not None
    return payload.view(torch.uint8)


def test_a_cast_in_both_orientations() -> None:
    x, tile = matrix()
    scale = torch.tensor(3.0)
    made = triton_cast.cast(x, scale, E5M2, with_columns=True, with_sums=True)
    here = triton_cast.cast(tile[-64:].contiguous(), scale, E5M2, with_columns=True, with_sums=True)
    assert torch.equal(bytes_of(made.payload)[-64:, -TILE:], bytes_of(here.payload))
    assert torch.equal(bytes_of(made.payload_t)[-TILE:, -64:], bytes_of(here.payload_t))
    assert made.partial_sums is not None and here.partial_sums is not None
    assert torch.equal(made.partial_sums[-1:, -TILE:], here.partial_sums)
    turned = triton_cast.transpose_payload(bytes_of(made.payload))
    assert torch.equal(turned[-TILE:, -64:], bytes_of(here.payload_t))


@pytest.mark.parametrize("square", [False, True])
def test_casts_in_blocks_of_128(square: bool) -> None:
    x, tile = matrix()
    cast = triton_current.cast_square_blocks if square else triton_current.cast_blocks
    made, here = (cast(each, E4M3, power_2=True, with_columns=True) for each in (x, tile))
    assert made.rows is not None and made.columns is not None
    assert here.rows is not None and here.columns is not None
    assert torch.equal(bytes_of(made.rows.payload)[-TILE:, -TILE:], bytes_of(here.rows.payload))
    assert torch.equal(
        bytes_of(made.columns.payload)[-TILE:, -TILE:], bytes_of(here.columns.payload)
    )
    last = -1 if square else -TILE
    assert torch.equal(made.rows.dequant_scale[last:, -1:], here.rows.dequant_scale)
    assert torch.equal(made.columns.dequant_scale[last:, -1:], here.columns.dequant_scale)


@pytest.mark.parametrize("packed", [False, True])
def test_casts_in_blocks_of_32_and_of_16(packed: bool) -> None:
    x, tile = matrix()
    made, here = (
        triton_blocks.cast_mx(each, packed=packed, with_columns=True) for each in (x, tile)
    )
    assert made.rows is not None and made.columns is not None
    assert here.rows is not None and here.columns is not None
    assert torch.equal(bytes_of(made.rows.payload)[-TILE:, -TILE:], bytes_of(here.rows.payload))
    theirs = bytes_of(made.columns.payload.t() if packed else made.columns.payload)
    ours = bytes_of(here.columns.payload.t() if packed else here.columns.payload)
    assert torch.equal(theirs[-TILE:, -TILE:], ours)
    if packed:  # one tile of 512 bytes
        assert torch.equal(bytes_of(made.rows.scale)[-512:], bytes_of(here.rows.scale))
        assert torch.equal(bytes_of(made.columns.scale)[-512:], bytes_of(here.columns.scale))
    else:
        assert torch.equal(made.rows.scale[-TILE:, -4:], here.rows.scale)
        assert torch.equal(made.columns.scale[-4:, -TILE:], here.columns.scale)
    options: dict[str, Any] = {"signs": SIGN_BITS, "square": False, "packed": packed}
    (rows, _, _), _ = triton_fp4.cast_fp4(x, torch.ones(2), **options)
    (own, _, _), _ = triton_fp4.cast_fp4(tile, torch.ones(2), **options)
    assert rows is not None and own is not None
    width = 32 if packed else 64
    assert torch.equal(bytes_of(rows.payload)[-TILE:, -width:], bytes_of(own.payload)[:, -width:])


def test_norms_and_losses() -> None:
    x, _ = matrix()
    x[-64:] = torch.randn(64, COLS, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight, scale = torch.ones(COLS).bfloat16(), torch.tensor(3.0)
    made = triton_norm.norm_cast(x, weight, None, 1e-5, scale, E4M3, out_dtype=x.dtype)
    rstd = (x[-1].double().square().mean() + 1e-5).rsqrt()
    assert made.statistics.rstd[-1] == pytest.approx(float(rstd), rel=1e-5)
    grads = triton_norm.norm_backward(
        x, x, weight, triton_norm.NormStatistics(None, torch.full((ROWS,), float(rstd)))
    )
    assert grads.input[-1].float().abs().sum() > 0 and grads.weight_parts[-1].abs().sum() > 0
    targets = torch.full((ROWS,), COLS - 1)
    logits = x[-1].double()
    sums = triton_loss.to_gradient(x, targets, -100)
    assert sums.largest[-1] == logits.max() and sums.target[-1] == logits[-1]
    softmax = logits.softmax(0)
    softmax[-1] -= 1
    torch.testing.assert_close(x[-1].double(), softmax, rtol=2**-7, atol=1e-6)


def test_amaxes_and_sums_of_flat_tensors() -> None:
    x, _ = matrix()
    amax = torch.zeros(())
    triton_current.raise_amax_of(amax, x)
    assert amax == x.view(-1)[-8192:].abs().max() > 0
    payload = zeros(torch.uint8).view(E4M3.dtype)
    stored = ScaledTensor(payload, torch.ones(()), STORAGE_FORMATS["fp8"])
    triton_sums.add(stored, x, is_first=True)
    assert bytes_of(payload)[-1, -TILE:].any() and not bytes_of(payload)[-3, :].any()
