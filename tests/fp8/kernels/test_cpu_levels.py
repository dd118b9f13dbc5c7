"""The C kernels give the specification's bits at every CPU level and by every compiler here, and
all their loops are vectorized."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8_numerics import formats
from fp8_numerics.cast import amax_of, decode, quantize
from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.compile import COMPILE_FLAGS, SOURCE, library
from megafp8.fp8.grad_sink import accumulate
from megafp8.fp8.scaled import ScaledTensor, add_up
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.optim import scaled_adam
from tests import compiled
from tests.cpu_levels import LEVELS, compiler_for, missing
from tests.spec import delayed
from tests.spec import formats as spec

KINDS = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (formats.E4M3, formats.E5M2)
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129, 1000)
NUM_CAST_LOOPS = 22
"""For each format: FP32 and FP16 with a grid or none, BF16 with either grid or none, and column
sums with each of those grids."""
NUM_PRODUCTS = NUM_CAST_LOOPS + 6  # by the scale, and another one where FP16 is widened
ASK_GCC = ("-fopt-info-vec-all", "--param=vect-epilogues-nomask=0")


# The lowest level and the machine's own by default: each compilation takes a second or two.
all_levels = pytest.mark.parametrize(
    ("compiler", "level"),
    [
        pytest.param(
            compiler,
            level,
            marks=[] if compiler == "gcc" and level in ("x86-64", "native") else [pytest.mark.slow],
        )
        for compiler in ("gcc", "clang")
        for level in LEVELS
    ],
)


def need(compiler: str, level: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    if missing(level):
        pytest.skip(missing(level))


@pytest.fixture
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No library is loaded or cached, before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path
    library.cache_clear()


def hard_values(dtype: torch.dtype) -> torch.Tensor:
    """Random bits, all of NaN's and infinity's, subnormals, both signs of zero; ties, and numbers
    around the largest that do not saturate."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 6_000, dtype=np.uint32)
    edges = [
        0.0,
        1e-45,
        1.2e-38,
        1e-40,
        448.0,
        464.0,
        464.1,
        57344.0,
        61440.0,
        1e30,
        np.inf,
        np.nan,
    ]
    magnitudes = [spec.FORMATS[fmt.name].finite_magnitudes for fmt in FORMATS]
    ties = np.concatenate([(each[:-1] + each[1:]) / 2 for each in magnitudes])
    chosen = np.concatenate([np.array(edges), ties]).astype(np.float32)
    values = torch.from_numpy(np.concatenate([bits.view(np.float32), chosen, -chosen]))
    if dtype == torch.float32:
        return values
    halves = np.random.default_rng(1).integers(0, 1 << 16, 6_000, dtype=np.uint16)
    return torch.cat([values.to(dtype), torch.from_numpy(halves.view(np.int16)).view(dtype)])


def assert_same(got: torch.Tensor, expected: np.ndarray, where: str) -> None:
    """Equal numbers and signs; a NaN where there is one."""
    values = got.double().numpy()
    np.testing.assert_array_equal(values, expected, err_msg=where)
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[real]), np.signbit(expected[real]))


def check_casts(x: torch.Tensor, fmt: Fp8Format, scale: float, cuts: list[slice]) -> None:
    """The whole of `x` and its parts, which start and end anywhere."""
    model, quant_scale = spec.FORMATS[fmt.name], torch.tensor(scale)
    codes = spec.quantize(x.float().numpy(), np.float32(scale), model)
    numbers = spec.dequantize(codes, model)
    for cut, grid_dtype in itertools.product(cuts, (torch.float32, torch.bfloat16, None)):
        where, amax = f"{x.dtype} {fmt.name} * {scale}, {cut}, {grid_dtype}", torch.zeros(())
        got = quantize(x[cut], quant_scale, fmt, amax=amax, grid_dtype=grid_dtype)
        assert spec.same_codes(got.payload.view(torch.uint8).numpy(), codes[cut], model), where
        assert amax.item() == delayed.amax_of(x[cut].float().numpy()), where
        if grid_dtype is not None:
            assert got.grid is not None and got.grid.dtype == grid_dtype
            assert_same(got.grid, numbers[cut], where)
            assert_same(decode(got.payload, fmt, grid_dtype), numbers[cut], where)


def check_sums(x: torch.Tensor, fmt: Fp8Format) -> None:
    """Added row by row in FP32, bit for bit, beside the same cast."""
    rows, scale = 7, torch.tensor(3.7)
    x_MN = x[: x.numel() // rows * rows].view(rows, -1)
    expected = np.zeros(x_MN.shape[1], np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in x_MN.float().numpy():
            expected = expected + row
    for grid_dtype in (torch.float32, torch.bfloat16):
        amaxes = torch.zeros(2)
        alone = quantize(x_MN, scale, fmt, amax=amaxes[0], grid_dtype=grid_dtype)
        sums = torch.empty(x_MN.shape[1])
        both = quantize(x_MN, scale, fmt, amax=amaxes[1], grid_dtype=grid_dtype, column_sum=sums)
        assert torch.equal(both.payload.view(torch.uint8), alone.payload.view(torch.uint8))
        assert alone.grid is not None and both.grid is not None and amaxes[0] == amaxes[1]
        assert_same(both.grid, alone.grid.double().numpy(), "grid beside sums")
        np.testing.assert_array_equal(sums.numpy(), expected)


@all_levels
def test_same_bits(
    compiler: str, level: str, forgotten: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(compiler, level)
    monkeypatch.setenv("CC", str(compiler_for(level, forgotten, compiler)))
    assert library().lib is not None, library().note
    for kind, fmt in itertools.product(KINDS, FORMATS):
        x = hard_values(kind)
        parts = [slice(at, at + size) for at, size in zip(range(3, 999, 67), LENGTHS, strict=False)]
        check_casts(x, fmt, 1.0, [slice(None), *parts])
        for scale in (3.7, 2.0**-149, 2.0**127):
            check_casts(x, fmt, scale, [slice(None)])
        check_sums(x, fmt)
    x = hard_values(torch.bfloat16)
    total = torch.ones(x.shape)
    expected = total + x.float()
    accumulate(total, x, is_first=False)
    assert_same(total, expected.double().numpy(), "accumulate")
    check_stored_tensors()


def check_stored_tensors() -> None:
    """Steps of Adam over stored tensors, and sums of them, have the bits of torch's operations."""
    steps = (
        ("fp16", "fp8", "fp8"),
        ("fp16", "fp8", "fp16"),
        ("fp16", "fp32", "fp32"),
        ("bf16", "fp8_e5m2", "fp8"),
    )
    for names, is_l2, stochastic in itertools.product(steps, (False, True), (False, True)):
        assert scaled_adam._same(names, is_l2, stochastic), (names, is_l2, stochastic)
    generator = torch.Generator().manual_seed(5)
    for name, size in itertools.product(STORAGE_FORMATS, (0, 1, 15, 1041)):
        parts = [
            ScaledTensor.of(torch.randn(size, generator=generator), STORAGE_FORMATS[name])
            for _ in range(3)
        ]
        expected = (parts[0].values() + parts[1].values()) + parts[2].values()
        amax = add_up(parts, total := torch.empty(size))
        assert torch.equal(total, expected) and amax == amax_of(expected), (name, size)


def span_lines() -> list[int]:
    """Of the loops over elements that are inlined for each kind; the first is the casts'."""
    lines = SOURCE.read_text().splitlines()
    return [number + 2 for number, line in enumerate(lines) if "GCC ivdep" in line]


def assembly(compiler: str, level: str, folder: Path, *flags: str) -> tuple[str, str]:
    """Compiled as the library is, and what the compiler says of it."""
    out = folder / "kernels.s"
    known = [flag for flag in COMPILE_FLAGS if flag != "-c"]
    once = compiled.compiler(compiler, folder)
    command = [str(once), *known, f"-march={level}", *flags, "-S", "-o", str(out), str(SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True, check=True)
    return out.read_text(), built.stderr


def num_packed_products(code: str) -> int:
    return len(re.findall(r"\tv?mulps\b", code))


def clang_vectorizes_every_loop(level: str, tmp_path: Path) -> None:
    ask = ("-Rpass=loop-vectorize", "-Rpass-missed=loop-vectorize")
    code, report = assembly("clang", level, tmp_path, *ask)
    casts, decoding = (
        [line for line in report.splitlines() if f"{SOURCE.name}:{number}:" in line]
        for number in span_lines()
    )
    assert sum("vectorized loop" in line for line in casts) == NUM_CAST_LOOPS
    assert sum("vectorized loop" in line for line in decoding) == 4
    assert not any("not vectorized" in line for line in casts + decoding), report
    if not missing("x86-64"):
        assert num_packed_products(code) >= NUM_PRODUCTS


def gcc_vectorizes_every_loop(level: str, tmp_path: Path) -> None:
    """One vectorized loop for each combination (gcc would make others of their remainders)."""
    code, report = assembly("gcc", level, tmp_path, *ASK_GCC)
    casts, decoding = (
        [line for line in report.splitlines() if f"{SOURCE.name}:{number}:" in line]
        for number in span_lines()
    )
    assert sum("loop vectorized" in line for line in casts) == NUM_CAST_LOOPS
    assert sum("loop vectorized" in line for line in decoding) >= 4
    assert not any("couldn't vectorize loop" in line for line in casts + decoding)
    if not missing("x86-64"):
        assert num_packed_products(code) >= NUM_PRODUCTS


@all_levels
def test_every_loop_is_vectorized(compiler: str, level: str, tmp_path: Path) -> None:
    need(compiler, level)
    {"gcc": gcc_vectorizes_every_loop, "clang": clang_vectorizes_every_loop}[compiler](
        level, tmp_path
    )


def test_the_look_at_the_code_finds_scalar_loops(tmp_path: Path) -> None:
    """Stored tensors (scaled_cpu.h) have packed products of their own in both builds."""
    need("gcc", "x86-64")
    scalar, _ = assembly("gcc", "x86-64", tmp_path, "-ftrapping-math")
    vectorized, _ = assembly("gcc", "x86-64", tmp_path, *ASK_GCC)  # which is compiled already
    assert num_packed_products(vectorized) - num_packed_products(scalar) >= NUM_PRODUCTS
