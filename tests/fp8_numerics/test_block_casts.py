"""Casts by blocks in C refuse what their kernels, which get addresses, would misread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8_numerics import block_casts, mxfp8, nvfp4
from fp8_numerics.formats import E4M3
from fp8_numerics.kernels.compile import Library
from tests.c_kernels import need_kernels

X, ONE, SIGNS = torch.ones(32, 64), torch.ones(()), nvfp4.signs()
BYTE, CODES = torch.zeros(32, 64, dtype=torch.uint8), torch.zeros(32, 64).to(E4M3.dtype)


def rotate(x: Any = X, signs: Any = SIGNS) -> object:
    return block_casts.rotate_columns(x, signs)


def fp4(
    x: Any = X, block: Any = (1, 16), amax: Any = ONE, byte: Any = None, values: Any = None
) -> object:
    return block_casts.nvfp4(x, block, amax, byte, values)


def mx(x: Any = X, values: Any = None) -> object:
    return block_casts.mxfp8(x, along_columns=False, values=values)


def current(x: Any = X, values: Any = None) -> object:
    return block_casts.current(x, (1, 32), E4M3, power_2=True, values=values)


def values(scale: Any, block: tuple[int, int] = (1, 16)) -> object:
    return block_casts.block_values(CODES, scale, block, torch.float32)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rotate(signs=SIGNS.char()), r"signs .* is torch.int8 \[16\], and kernels read"),
        (lambda: rotate(signs=SIGNS[:8]), r"signs \(nvfp4.signs\(\)\) is torch.float32 \[8\]"),
        (lambda: rotate(signs=SIGNS.repeat(2)[::2]), r"strides \(2,\)"),
        (lambda: rotate(signs=nvfp4.SIGNS), "signs .* is of type tuple"),
        (lambda: rotate(signs=SIGNS.to("meta")), r"is torch.float32 \[16\] on meta"),
        (lambda: rotate(X.double()), r"x is torch.float64 \[32, 64\], and not a matrix of"),
        (lambda: fp4(amax=ONE.bfloat16()), r"amax is torch.bfloat16 \[\], and kernels read"),
        (lambda: fp4(amax=ONE.double()), r"amax is torch.float64 \[\]"),
        (lambda: fp4(amax=torch.ones(32, 1)), r"amax is torch.float32 \[32, 1\]"),
        (lambda: fp4(amax=1.0), "amax is of type float"),
        (lambda: fp4(byte=BYTE.long()), r"byte is torch.int64 \[32, 64\]"),
        (lambda: fp4(byte=BYTE[:1]), r"byte is torch.uint8 \[1, 64\]"),
        (lambda: fp4(block=(1, 32)), r"blocks of \(1, 32\): NVFP4 has \(\(1, 16\)"),
        (lambda: fp4(x=X[:, :40]), r"\[32, 40\] in blocks of \(1, 16\).*which divide the sizes"),
        (lambda: fp4(x=X[:4], block=(16, 16)), r"\[4, 64\] in blocks of \(16, 16\)"),
        (lambda: fp4(x=X.double()), r"x is torch.float64 \[32, 64\], and not a matrix of"),
        (lambda: fp4(values=torch.float16), "values is torch.float16"),
        (lambda: mx(X.double()), r"x is torch.float64 \[32, 64\], and not a matrix"),
        (lambda: mx(X[0]), r"x is torch.float32 \[64\], and not a matrix"),
        (lambda: mx(X.numpy()), "x is of type numpy.ndarray"),
        (lambda: mx(values=torch.float16), "values is torch.float16, .*float32, torch.bfloat16 al"),
        (lambda: current(values=torch.float16), "values is torch.float16"),
        (lambda: current(X[0]), r"x is torch.float32 \[64\], and not a matrix"),
        (lambda: values(torch.ones(32, 4).double()), r"scale is torch.float64 \[32, 4\]"),
        (lambda: values(torch.ones(1, 1)), r"scale is torch.float32 \[1, 1\], .* \[32, 4\] on cpu"),
        (lambda: values(torch.ones(32, 4), (16, 1)), r"float32 \[2, 64\] on cpu"),
    ],
)  # fmt: skip
def test_what_kernels_would_misread_is_refused(call: Callable[[], object], said: str) -> None:
    need_kernels()
    with pytest.raises((TypeError, ValueError), match=said):
        call()


@pytest.mark.parametrize(
    ("call", "rule"),
    [(mx, mxfp8.quantize_rows), (fp4, nvfp4.quantize_blocks), (rotate, nvfp4.rotated)],
)
def test_without_kernels_the_function_of_torch_operations_is_named(
    call: Callable[[], object], rule: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_casts, "library", lambda: Library(None, "no C compiler found"))
    monkeypatch.setattr(block_casts, "library_for", lambda x: None)
    name = f"{rule.__module__}.{rule.__name__}"
    with pytest.raises(RuntimeError, match=rf"no C compiler found. Use {name}, which has the same"):
        call()
