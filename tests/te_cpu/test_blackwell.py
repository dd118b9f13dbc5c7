"""The specifications of MXFP8 and NVFP4 against torchao, Transformer Engine's own reference, and
arithmetic done by hand."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fp8_numerics.conformance import check
from te_cpu import four_over_six, nv, wheel
from tests.fp8 import conformance_casts
from tests.spec import formats, mxfp8, nvfp4
from tests.spec.data import data
from tests.spec.formats import E4M3, Floats32
from tests.te_sources import need_sources

REFERENCES = {
    "2.20.2": ("gemm", "reference_utils", "reference_nvfp4"),
    "2.12.0": ("quantization", "utils", "quantization_nvfp4"),
}
"""The files of Transformer Engine's own reference by version; the last one quantizes."""
FINITE = (
    *("normal", "wide", "zeros", "subnormal", "tiny", "bits", "edges", "midpoints", "sixteenths"),
)
rows_of = pytest.mark.parametrize("rows", [1, 16])


# MXFP8


@pytest.mark.parametrize("kind", FINITE)
def test_mxfp8_is_torchaos_round_up(kind: str) -> None:
    """Version 0.18 multiplies by 1 where the code is 0, which Transformer Engine 2.13 mended."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = data(kind)
    scales, codes = to_mx(
        torch.from_numpy(x).bfloat16(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL
    )
    ours = mxfp8.quantize_rows(x)
    assert np.array_equal(ours.scale_codes, scales.view(torch.uint8).numpy())
    is_told = np.repeat(ours.scale_codes > 0, mxfp8.BLOCK, axis=1)
    theirs = codes.view(torch.uint8).numpy()
    assert formats.same_codes(ours.codes[is_told], theirs[is_told], E4M3)
    assert is_told.any() or kind == "subnormal"


def test_the_scale_is_the_smallest_power_that_holds_the_block() -> None:
    """This holds for all normal 448 * 2**k and their neighbours, in exact arithmetic."""
    for k in range(-125, 119):
        edge = np.float32(448 * 2.0**k)
        for amax in (
            edge,
            np.nextafter(edge, np.float32(0)),
            np.nextafter(edge, np.float32(np.inf)),
        ):
            code = mxfp8.code_of(np.float32(amax))
            fits = Fraction(float(amax)) <= 448 * Fraction(2) ** (code - 127)
            fits_lower = Fraction(float(amax)) <= 448 * Fraction(2) ** (code - 128)
            assert fits and (code == 0 or not fits_lower), (k, amax, code)


def test_mxfp8_of_nan_infinity_and_nothing() -> None:
    x = np.ones((2, 32), dtype=np.float32)
    x[0, 3], x[1, 4] = math.nan, -math.inf
    found = mxfp8.quantize_rows(x)
    assert found.scale_codes.tolist() == [[mxfp8.code_of(np.float32(1))], [254]]
    assert np.isnan(found.values[0, 3]) and found.values[0, 4] == 1
    assert found.values[1, 4] == -448 * 2.0**127 and found.values[1, 5] == 0
    zeros = mxfp8.quantize_rows(np.zeros((1, 32), dtype=np.float32))
    assert zeros.scale_codes == 0 and not zeros.codes.any()
    assert mxfp8.code_of(np.finfo(np.float32).max) == 247
    assert mxfp8.quantize_rows(np.zeros((0, 64), dtype=np.float32)).scale_codes.shape == (0, 2)


# NVFP4


def test_e2m1_takes_the_nearest_and_at_a_tie_the_even_code() -> None:
    points = np.arange(-(2.0**8), 2.0**8) / 32  # all midpoints, and points between them
    found = nvfp4.to_e2m1(points.astype(np.float32))
    for x, code in zip(points, found, strict=True):
        magnitudes = [abs(Fraction(float(m)) - min(Fraction(abs(x)), 6)) for m in nvfp4.MAGNITUDES]
        best = min(range(8), key=lambda c: (magnitudes[c], c & 1))
        assert code == best + (8 if math.copysign(1, x) < 0 else 0), x
    special = np.array([math.nan, math.inf, -math.inf, -0.0], dtype=np.float32)
    assert nvfp4.to_e2m1(special).tolist() == [7, 7, 15, 8]


def test_random_rounding_goes_up_as_often_as_the_part_says() -> None:
    """Of the 256 bytes, the share that rounds up is the part of the step, to 1 / 256."""
    bytes_ = np.arange(256, dtype=np.uint8)
    for low, high in zip(nvfp4.MAGNITUDES, nvfp4.MAGNITUDES[1:], strict=False):
        for part in (0, 1 / 256, 0.25, 0.5, 0.75, 255 / 256):
            x = np.full(256, -(low + part * (high - low)), dtype=np.float32)
            codes = nvfp4.to_e2m1_at_random(x, bytes_)
            ups = (nvfp4.MAGNITUDES[codes & 7] == high).sum()
            downs = (nvfp4.MAGNITUDES[codes & 7] == low).sum()
            assert ups + downs == 256 and ups == round(part * 256) and (codes >= 8).all()
    beyond = np.array([6.5, math.inf, math.nan], dtype=np.float32)
    assert nvfp4.to_e2m1_at_random(beyond, bytes_[-3:]).tolist() == [7, 7, 7]


@pytest.fixture(scope="module", params=REFERENCES)
def reference(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Transformer Engine's `NVFP4QuantizerRef`, loaded by its file with stand-ins around it, of
    each of the two rules."""
    version: str = request.param
    need_sources(version)
    folder = wheel.sources(version).folder / "transformer_engine/pytorch/custom_recipes"
    base = "transformer_engine.pytorch"
    held = {name: m for name, m in sys.modules.items() if name.startswith("transformer_engine")}
    for name in held:
        del sys.modules[name]

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    names = ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.tensor")
    modules = {f"transformer_engine{name}": types.ModuleType(name) for name in names}
    stand_in: Any = types.ModuleType("quantized_tensor")
    stand_in.QuantizedTensorStorage, stand_in.Quantizer = type("Storage", (), {}), Quantizer
    utils: Any = types.ModuleType("utils")
    utils.is_custom = lambda *args: True
    modules |= {f"{base}.quantized_tensor": stand_in, f"{base}.tensor.utils": utils}
    sys.modules.update(modules)
    try:
        for file in REFERENCES[version]:
            name = f"{base}.custom_recipes.{file}"
            spec = importlib.util.spec_from_file_location(name, folder / f"{file}.py")
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            setattr(modules[f"{base}.custom_recipes"], file, module)
            spec.loader.exec_module(module)
        module.__dict__["sixth_first"] = version == "2.12.0"
        yield module
    finally:
        for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
            del sys.modules[name]
        sys.modules.update(held)


def quantized_by(
    reference: Any, x: Floats32, rows: int, *, with_rht: bool = False, **settings: Any
) -> Any:
    utils = getattr(reference, "reference_utils", None) or reference.utils
    quantizer = reference.NVFP4QuantizerRef(
        dtype=utils.Fp4Formats.E2M1,
        quant_tile_shape=(rows, 16),
        with_rht=with_rht,
        **settings,
    )
    return quantizer.quantize(torch.from_numpy(x).bfloat16())


def unpacked(packed: torch.Tensor) -> formats.Codes:
    pairs = packed.numpy()
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)


def without_negative_zero(codes: formats.Codes) -> formats.Codes:
    """Transformer Engine's reference writes -0 as 0, unlike its kernels."""
    return np.where(codes == 8, 0, codes)


@rows_of
@pytest.mark.parametrize("kind", [*FINITE, "largest", "inf"])
def test_nvfp4_is_transformer_engines_reference(reference: Any, kind: str, rows: int) -> None:
    x = data(kind)
    theirs = quantized_by(reference, x, rows)
    ours = nvfp4.quantize_blocks(x, rows, sixth_first=reference.sixth_first)
    assert theirs.global_amax_row.item() == ours.amax
    scales = np.repeat(ours.scale_codes, rows, axis=0)
    assert np.array_equal(scales, theirs.scale.view(torch.uint8).numpy()[: len(x)])
    theirs_codes = without_negative_zero(unpacked(theirs.data))
    assert np.array_equal(without_negative_zero(ours.codes), theirs_codes)
    assert kind == "inf" or np.isfinite(ours.values).all()


@pytest.mark.parametrize("reference", ["2.20.2"], indirect=True)  # earlier rules differ
def test_the_vectors_are_transformer_engines_nvfp4(reference: Any) -> None:
    """Its reference reads BF16, and writes -0 as 0, unlike its kernels."""

    def run(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        rows = {"nvfp4": 1, "nvfp4_weight": 16}.get(case["rule"])
        if rows is None or case["input"] in ("fp32", "subnormal"):
            return None
        wanted = conformance_casts.run(case, dict(tensors))
        found = quantized_by(reference, tensors["x"], rows)
        codes = without_negative_zero(unpacked(found.data))
        assert wanted is not None
        assert np.array_equal(codes, without_negative_zero(wanted["codes"]))
        scales = found.scale.view(torch.uint8).numpy()
        return {
            "codes": wanted["codes"],
            "scale_codes": scales[: len(tensors["x"]) : rows],
            "amax": np.array(found.global_amax_row.item(), dtype=np.float32),
        }

    counts, wrong = check.check(run)
    assert wrong == [] and counts["nvfp4: the same"] == counts["nvfp4_weight: the same"] == 6


CHOICES = [
    (256, False, False),
    (256, True, True),
    (448, True, False),
    (448, False, True),
]  # the largest scale, squares of errors, errors before the factor of the tensor
choices = pytest.mark.parametrize(("largest", "squared", "scaled"), CHOICES)


@choices
@rows_of
@pytest.mark.parametrize("reference", ["2.20.2"], indirect=True)
@pytest.mark.parametrize("kind", ["normal", "wide", "bits", "midpoints", "largest"])
def test_the_better_of_two_scales_is_transformer_engines(
    reference: Any, kind: str, rows: int, largest: int, squared: bool, scaled: bool
) -> None:
    x = data(kind)
    theirs = quantized_by(
        reference, x, rows, nvfp4_use_4over6=True, nvfp4_e4m3_max=largest, columnwise=False,
        nvfp4_4over6_err_mode="MSE" if squared else "MAE", nvfp4_4over6_err_use_fast_math=scaled,
    )  # fmt: skip
    ours = nvfp4.four_over_six(x, rows, largest, squared=squared, scaled=scaled)
    scales = np.repeat(ours.scale_codes, rows, axis=0)
    assert np.array_equal(scales, theirs.scale.view(torch.uint8).numpy()[: len(x)])
    theirs_codes = without_negative_zero(unpacked(theirs.data))
    assert np.array_equal(without_negative_zero(ours.codes), theirs_codes)


@choices
@pytest.mark.parametrize("rows", [1, 16, 0], ids=["lines", "squares", "scaled rows"])
@pytest.mark.parametrize("kind", ["normal", "bits", "edges", "sixteenths", "inf", "nan"])
def test_the_better_of_two_scales_is_taken(
    kind: str, rows: int, largest: int, squared: bool, scaled: bool
) -> None:
    """Bit for bit as the specification does, for a whole tensor and for each row by its amax."""
    x = data(kind)
    settings = {"squared": squared, "scaled": scaled}
    parts = np.split(x, len(x)) if rows == 0 else [x]
    exact = [nvfp4.four_over_six(part, rows or 1, largest, **settings) for part in parts]
    choice = four_over_six.Choice(float(largest), is_squared=squared, is_scaled=scaled)
    amax = nv._amax_of(torch.from_numpy(x), of_rows=rows == 0)
    numbers, scale = nv.quantize_rows(torch.from_numpy(x), rows or 1, amax, None, (2, 17), choice)
    assert np.array_equal(np.ravel(amax), [part.amax for part in exact])
    codes = unpacked(nv._packed(numbers))
    assert np.array_equal(codes, np.concatenate([part.codes for part in exact]))
    found = scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(found, np.concatenate([part.scale_codes for part in exact]))
    if kind == "normal" and rows == 1 and largest == 448:  # each of the two is taken somewhere
        plain = nvfp4.quantize_blocks(x, sixth_first=True).scale_codes
        assert 0 < (found != plain).sum() < found.size


@pytest.mark.parametrize("kind", [*FINITE, "largest", "inf", "nan"])
def test_scaled_rows_are_tensors_of_their_own(kind: str) -> None:
    x = data(kind)
    exact = [nvfp4.quantize_blocks(row) for row in np.split(x, len(x))]
    amax = nv._amax_of(torch.from_numpy(x), of_rows=True)
    numbers, scale = nv.quantize_rows(torch.from_numpy(x), 1, amax, None, (2, 17))
    assert np.array_equal(np.ravel(amax), [row.amax for row in exact])
    codes = unpacked(nv._packed(numbers))
    assert np.array_equal(codes, np.concatenate([row.codes for row in exact]))
    found = scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(found, np.concatenate([row.scale_codes for row in exact]))


@pytest.mark.parametrize("kind", ["normal", "zeros", "tiny", "midpoints"])
def test_the_rotation_is_transformer_engines(reference: Any, kind: str) -> None:
    x = data(kind)
    theirs = quantized_by(reference, x, 1, with_rht=True)
    rotated = torch.from_numpy(nvfp4.rotate(x.T)).bfloat16().float().numpy()
    ours = nvfp4.quantize_blocks(rotated, sixth_first=reference.sixth_first)
    assert theirs.global_amax_col.item() == ours.amax
    assert np.array_equal(ours.scale_codes, theirs.scale_t.view(torch.uint8).numpy())
    theirs_codes = without_negative_zero(unpacked(theirs.data_t))
    assert np.array_equal(without_negative_zero(ours.codes), theirs_codes)


def test_the_two_rules_of_a_scale_differ(reference: Any) -> None:
    """The reference of a version has the scales of its own rule alone."""
    x = data("sixteenths")
    codes = quantized_by(reference, x, 1).scale.view(torch.uint8).numpy()[: len(x)]
    by_rule = [
        nvfp4.quantize_blocks(x, sixth_first=is_first).scale_codes for is_first in (False, True)
    ]
    assert np.array_equal(codes, by_rule[reference.sixth_first])
    assert not np.array_equal(codes, by_rule[not reference.sixth_first])


def test_a_product_cancels_the_rotation() -> None:
    matrix = nvfp4.hadamard()
    assert np.array_equal(matrix @ matrix.T, 16 * np.eye(16))
    a, b = data("normal")[:4], data("normal")[4:12]
    assert np.allclose(nvfp4.rotate(a) @ nvfp4.rotate(b).T, a.astype(float) @ b.T.astype(float))


def test_a_product_is_that_of_the_values() -> None:
    a, b = nvfp4.quantize_blocks(data("normal")), nvfp4.quantize_blocks(data("wide"), rows=16)
    expected, magnitudes = a.values @ b.values.T, np.abs(a.values) @ np.abs(b.values).T
    assert (np.abs(nvfp4.product(a, b) - expected) <= 1e-13 * magnitudes).all()


def test_a_part_with_the_amax_of_the_whole_is_a_part_of_the_whole() -> None:
    x = data("wide")
    whole = nvfp4.quantize_blocks(x)
    part = nvfp4.quantize_blocks(x[:8], amax=whole.amax)
    assert np.array_equal(part.codes, whole.codes[:8])
    assert np.array_equal(part.scale_codes, whole.scale_codes[:8])
    assert np.array_equal(mxfp8.quantize_rows(x[:8]).codes, mxfp8.quantize_rows(x).codes[:8])
