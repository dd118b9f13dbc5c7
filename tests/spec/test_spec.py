"""The specification against facts from outside it: the formats' paper, torch's casts, arithmetic
done by hand, and properties. Torch is an oracle here; the specification itself never imports it."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.spec import delayed, formats, linear, mxfp8, nvfp4
from tests.spec.delayed import FLT_MAX, DelayedScalingModel, Recipe, TensorState
from tests.spec.formats import (
    ALL_FORMATS,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    Codes,
    Floats32,
    Format,
)

ONE = np.float32(1)
TORCH_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
every_format = pytest.mark.parametrize("fmt", ALL_FORMATS.values(), ids=lambda fmt: fmt.name)
float32s = st.floats(width=32)
finite_float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
scales = st.floats(min_value=2.0**-100, max_value=2.0**100, width=32).map(np.float32)
some_format = st.sampled_from([*ALL_FORMATS.values()])


def f32(*values: float) -> Floats32:
    return np.array(values, dtype=np.float32)


def torch_cast(x: Floats32, fmt: Format) -> Codes:
    """Torch's cast of clamped values (unclamped, only its E5M2 does not overflow to NaN)."""
    clamped = torch.from_numpy(x).clamp(-fmt.max, fmt.max)
    codes: Codes = clamped.to(TORCH_DTYPES[fmt.name]).view(torch.uint8).numpy()
    return codes


def test_specification_imports_neither_megafp8_nor_torch() -> None:
    for name in ("__init__", "formats", "delayed", "linear", "mxfp8", "nvfp4"):
        tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        allowed = {"__future__", "collections", "contextlib", "dataclasses", "fractions"}
        assert imported <= allowed | {"functools", "math", "numpy", "tests", "typing"}


# Formats: table 1 of arXiv 2209.05433


def test_e4m3_table() -> None:
    assert E4M3.max == 448
    assert E4M3.value(0x7E) == 448
    assert E4M3.value(0x08) == 2.0**-6  # smallest normal
    assert E4M3.value(0x07) == 0.875 * 2.0**-6  # largest subnormal
    assert E4M3.value(0x01) == 2.0**-9  # smallest subnormal
    assert E4M3.value(0x38) == 1
    assert E4M3.value(0xB8) == -1
    assert np.isinf(E4M3.table).sum() == 0
    assert np.flatnonzero(np.isnan(E4M3.table)).tolist() == [0x7F, 0xFF]


def test_e5m2_table() -> None:
    assert E5M2.max == 57344
    assert E5M2.value(0x7B) == 57344
    assert E5M2.value(0x04) == 2.0**-14
    assert E5M2.value(0x03) == 0.75 * 2.0**-14
    assert E5M2.value(0x01) == 2.0**-16
    assert E5M2.value(0x3C) == 1
    assert E5M2.value(0x7C) == math.inf
    assert E5M2.value(0xFC) == -math.inf
    assert np.flatnonzero(np.isnan(E5M2.table)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest_normal", "smallest", "one"),
    [(E4M3FNUZ, 240, 2.0**-7, 2.0**-10, 0x40), (E5M2FNUZ, 57344, 2.0**-15, 2.0**-17, 0x40)],
    ids=lambda value: getattr(value, "name", None),
)
def test_tables_of_amds_formats(
    fmt: Format, largest: float, smallest_normal: float, smallest: float, one: int
) -> None:
    """Table 1 of arXiv 2206.02915, with the biases 8 and 16."""
    assert fmt.max == largest == fmt.value(0x7F) == -fmt.value(0xFF)
    assert fmt.value(1 << fmt.mantissa_bits) == smallest_normal
    assert fmt.value(0x01) == smallest and fmt.value(one) == 1
    assert np.isinf(fmt.table).sum() == 0
    assert np.flatnonzero(np.isnan(fmt.table)).tolist() == [0x80]


@every_format
def test_table_is_torch_decoding(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(TORCH_DTYPES[fmt.name]).to(torch.float64).numpy()
    np.testing.assert_array_equal(fmt.table, theirs)
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(np.signbit(fmt.table[finite]), np.signbit(theirs[finite]))


@every_format
def test_codes_order_like_magnitudes(fmt: Format) -> None:
    assert (np.diff(fmt.finite_magnitudes) > 0).all()
    np.testing.assert_array_equal(fmt.table[: len(fmt.finite_magnitudes)], fmt.finite_magnitudes)


# The cast


@pytest.mark.parametrize(
    ("fmt", "x", "code"),
    [
        # Half way between two codes: the even one, be it below or above.
        (E4M3, 1 + 1 / 16, 0x38),  # between 1 (0x38) and 1.125 (0x39)
        (E4M3, 1 + 3 / 16, 0x3A),  # between 1.125 and 1.25 (0x3A)
        (E4M3, 2.0**-10, 0x00),  # half the smallest subnormal
        (E4M3, 3 * 2.0**-10, 0x02),
        (E4M3, 15 * 2.0**-10, 0x08),  # from the largest subnormal up to the smallest normal
        (E4M3, 1 + 15 / 16, 0x40),  # up to the next exponent
        (E4M3, 432, 0x7E),  # between 416 (0x7D) and 448
        (E5M2, 1 + 1 / 8, 0x3C),
        (E5M2, 1 + 3 / 8, 0x3E),
        (E5M2, 2.0**-17, 0x00),
        (E5M2, 53248, 0x7A),  # between 49152 (0x7A) and 57344 (0x7B)
        # One float32 beside a tie.
        (E4M3, float(np.nextafter(np.float32(2.0**-10), np.float32(1))), 0x01),
        (E4M3, float(np.nextafter(np.float32(1 + 1 / 16), np.float32(2))), 0x39),
        (E4M3, float(np.nextafter(np.float32(1 + 3 / 16), np.float32(1))), 0x39),
        # Saturation; E5M2 never makes an infinity.
        (E4M3, 448.0625, 0x7E),
        (E4M3, 1e30, 0x7E),
        (E4M3, math.inf, 0x7E),
        (E4M3, -math.inf, 0xFE),
        (E5M2, 61440, 0x7B),  # where IEEE 754 rounds to infinity
        (E5M2, math.inf, 0x7B),
        (E5M2, -math.inf, 0xFB),
        # The sign survives.
        (E4M3, 0.0, 0x00),
        (E4M3, -0.0, 0x80),
        (E4M3, -(2.0**-11), 0x80),
        (E5M2, -(2.0**-149), 0x80),
        # AMD's formats have no negative zero: its code would be the NaN.
        (E4M3FNUZ, -0.0, 0x00),
        (E4M3FNUZ, -(2.0**-11), 0x00),  # a tie between zero and the smallest number
        (E4M3FNUZ, float(np.nextafter(np.float32(-(2.0**-11)), np.float32(-1))), 0x81),
        (E5M2FNUZ, -(2.0**-149), 0x00),
        (E4M3FNUZ, -232, 0xFE),  # between -224 (0xFE) and -240 (0xFF)
        (E4M3FNUZ, 240.0625, 0x7F),
        (E4M3FNUZ, -math.inf, 0xFF),
        (E5M2FNUZ, 53248, 0x7E),  # between 49152 (0x7E) and 57344 (0x7F)
        (E5M2FNUZ, math.inf, 0x7F),
    ],
)
def test_known_codes(fmt: Format, x: float, code: int) -> None:
    x = float(np.float32(x))
    assert formats.quantize_value(x, ONE, fmt) == code
    assert formats.quantize(f32(x), ONE, fmt).tolist() == [code]


@every_format
def test_nan_gives_a_nan(fmt: Format) -> None:
    x = f32(math.nan, -math.nan, 1.0)
    assert np.isnan(formats.dequantize(formats.quantize(x, ONE, fmt), fmt)).tolist() == [1, 1, 0]
    assert math.isnan(fmt.value(formats.quantize_value(math.nan, ONE, fmt)))


@every_format
def test_all_bf16_inputs_equal_torch(fmt: Format) -> None:
    x = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    assert formats.same_codes(formats.quantize(x, ONE, fmt), torch_cast(x, fmt), fmt)


@every_format
def test_all_fp16_inputs_equal_torch(fmt: Format) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert formats.same_codes(formats.quantize(x, ONE, fmt), torch_cast(x, fmt), fmt)


@every_format
def test_a_million_float32_patterns_equal_torch(fmt: Format) -> None:
    x = np.random.default_rng(1).integers(2**32, size=10**6, dtype=np.uint32).view(np.float32)
    assert formats.same_codes(formats.quantize(x, ONE, fmt), torch_cast(x, fmt), fmt)


@every_format
def test_a_million_scaled_inputs_equal_torch(fmt: Format) -> None:
    """Within the format's range, where random bit patterns hardly fall; the product is torch's."""
    x = np.random.default_rng(2).standard_normal(10**6).astype(np.float32)
    scale = np.float32(fmt.max / 3.7)
    y: Floats32 = (torch.from_numpy(x) * torch.tensor(scale)).numpy()
    assert formats.same_codes(formats.quantize(x, scale, fmt), torch_cast(y, fmt), fmt)


@every_format
def test_every_midpoint_and_its_neighbours_equal_the_enumeration(fmt: Format) -> None:
    grid = fmt.finite_magnitudes
    midpoints = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    x = np.concatenate(
        [
            midpoints,
            np.nextafter(midpoints, np.float32(0)),
            np.nextafter(midpoints, np.float32(np.inf)),
            grid.astype(np.float32),
        ]
    )
    x = np.concatenate([x, -x])
    one_by_one = [formats.quantize_value(float(value), ONE, fmt) for value in x]
    assert formats.quantize(x, ONE, fmt).tolist() == one_by_one


@settings(deadline=None, max_examples=300)
@given(float32s, scales, some_format)
def test_array_cast_is_the_enumeration(x: float, scale: np.float32, fmt: Format) -> None:
    assert formats.quantize(f32(x), scale, fmt)[0] == formats.quantize_value(x, scale, fmt)


@given(finite_float32s, finite_float32s, scales, some_format)
def test_cast_is_monotone(a: float, b: float, scale: np.float32, fmt: Format) -> None:
    codes = formats.quantize(f32(min(a, b), max(a, b)), scale, fmt)
    low, high = formats.dequantize(codes, fmt)
    assert low <= high


@given(st.integers(0, 255), st.integers(-60, 60), some_format)
def test_cast_is_idempotent_for_powers_of_two(code: int, power: int, fmt: Format) -> None:
    value = fmt.value(code)
    if math.isfinite(value):
        x = f32(value * 2.0**power)
        assert formats.quantize(x, np.float32(2.0**-power), fmt).tolist() == [code]


@given(st.lists(finite_float32s, min_size=1), scales, st.sampled_from([E4M3, E5M2]))
def test_cast_is_odd(values: list[float], scale: np.float32, fmt: Format) -> None:
    x = f32(*values)
    assert (formats.quantize(-x, scale, fmt) ^ 0x80 == formats.quantize(x, scale, fmt)).all()


@given(st.floats(min_value=-448, max_value=448, width=32))
def test_error_is_at_most_half_a_step(x: float) -> None:
    value = E4M3.value(formats.quantize_value(x, ONE, E4M3))
    assert abs(value - x) <= max(abs(x) * 2.0**-4, 2.0**-10)


def test_the_product_is_rounded_to_float32_first() -> None:
    """x * scale lies above a tie; its float32 rounding is the tie, which goes to even."""
    x, scale = np.float32(1 + 2.0**-23), np.float32((1 + 1 / 16) * (1 - 2.0**-24))
    assert float(x) * float(scale) > 1 + 1 / 16
    assert np.float32(x * scale) == np.float32(1 + 1 / 16)
    assert formats.quantize(f32(float(x)), scale, E4M3).tolist() == [0x38]


def test_quantize_keeps_shape_and_takes_float32_only() -> None:
    assert formats.quantize(np.zeros((2, 0, 3), np.float32), ONE, E4M3).shape == (2, 0, 3)
    with pytest.raises(TypeError):
        formats.quantize(np.zeros(3), ONE, E4M3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a float32"):
        formats.quantize_value(0.1, ONE, E4M3)


def test_same_codes_ignores_only_nan_payloads() -> None:
    nans, numbers = np.array([0x7D, 0xFF], np.uint8), np.array([0x00, 0x80], np.uint8)
    assert formats.same_codes(nans, nans[::-1], E5M2)
    assert not formats.same_codes(nans, nans[::-1], E4M3)  # 0x7D is 416 there
    assert not formats.same_codes(numbers, numbers[::-1], E4M3)
    assert not formats.same_codes(numbers, numbers[:1], E4M3)


# The update rule, by hand


def state(history: list[float], scale: float = 1.0) -> TensorState:
    return TensorState("input", E4M3, f32(*history), np.float32(scale))


def test_roll_and_max() -> None:
    """L=4: 9 is the oldest; it is dropped, but counts one last time."""
    tensor = state([3, 9, 1, 2])
    tensor.update(np.float32(3), Recipe(amax_history_len=4))
    assert tensor.history.tolist() == [0, 1, 2, 3]
    assert tensor.scale == np.float32(448) / np.float32(9)
    tensor.record(f32(-4, 2))
    tensor.update(np.float32(5), Recipe(amax_history_len=4))  # another rank saw 5
    assert tensor.history.tolist() == [0, 2, 3, 5]
    assert tensor.scale == np.float32(448) / np.float32(5)


def test_most_recent() -> None:
    tensor = state([0, 9, 1, 2])
    tensor.update(np.float32(3), Recipe(amax_compute_algo="most_recent"))
    assert tensor.history.tolist() == [0, 1, 2, 3]
    assert tensor.scale == np.float32(448) / np.float32(3)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_history_of_one(algo: delayed.Algo) -> None:
    tensor = state([0])
    tensor.record(f32(7))
    assert tensor.history.tolist() == [7]
    tensor.update(np.float32(0), Recipe(amax_compute_algo=algo))
    assert tensor.history.tolist() == [0]
    assert tensor.scale == 64


def test_zero_amax_changes_nothing() -> None:
    tensor = state([0, 9, 1, 2], scale=5)
    tensor.update(np.float32(0), Recipe())
    assert tensor.history.tolist() == [0, 9, 1, 2]
    assert tensor.scale == 5
    assert tensor.num_nonfinite == tensor.num_updates == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nonfinite_amax_is_counted_and_dropped(poison: float) -> None:
    tensor = state([0, 9, 1, 2], scale=5)
    tensor.record(f32(1, poison, 3))
    assert tensor.history[0] == math.inf
    tensor.update(tensor.history[0], Recipe())
    assert tensor.history.tolist() == [0, 9, 1, 2]
    assert tensor.scale == 5
    assert tensor.num_nonfinite == 1
    tensor.record(f32(8))
    tensor.update(np.float32(8), Recipe())
    assert tensor.history.tolist() == [0, 1, 2, 8]


@pytest.mark.parametrize(
    ("amax", "fp8_max", "margin", "scale"),
    [
        (448, 448, 0, 1),
        (7, 448, 0, 64),
        (7, 448, 3, 8),
        (7, 448, -1, 128),
        (57344, 57344, 0, 1),
        (3, 448, 0, 149.3333282470703125),  # float32's neighbour of 448/3, exact decimal expansion
        (2.0**-149, 448, 0, float(FLT_MAX)),  # the quotient overflows
        (448 * 2.0**-127, 448, 0, 2.0**127),  # and here just not
        (0, 448, 0, 5),
        (math.inf, 448, 0, 5),
        (math.nan, 448, 0, 5),
    ],
)
def test_scale_from_amax(amax: float, fp8_max: float, margin: int, scale: float) -> None:
    got = delayed.scale_from_amax(np.float32(amax), np.float32(5), fp8_max, margin)
    assert type(got) is np.float32
    assert float(got) == scale


def test_dequant_scale_is_the_float32_reciprocal() -> None:
    assert delayed.dequant_scale_of(np.float32(4)) == 0.25
    assert float(delayed.dequant_scale_of(np.float32(3))) == 11184811 / 2**25
    assert delayed.dequant_scale_of(FLT_MAX) > 0  # subnormal: must not be flushed


def test_amax_of() -> None:
    assert delayed.amax_of(f32(-3, 2, -0.0)) == 3
    assert delayed.amax_of(f32()) == 0
    assert delayed.amax_of(f32(1, math.nan)) == math.inf


@given(
    st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=6),
    st.floats(0, 2.0**100, width=32),
    st.sampled_from(["max", "most_recent"]),
    st.integers(-4, 8),
)
@example([0.0], 0.0, "max", 0)
def test_update_properties(past: list[float], amax: float, algo: delayed.Algo, margin: int) -> None:
    tensor = state([0, *past[1:]], scale=3)
    before = tensor.history.copy()
    tensor.update(np.float32(amax), Recipe(amax_compute_algo=algo, margin=margin))
    assert tensor.history[0] == 0
    if amax == 0:
        assert (tensor.history == before).all()
        assert tensor.scale == 3
        return
    assert tensor.history[1:].tolist() == [*before[2:], np.float32(amax)][: len(before) - 1]
    assert np.isfinite(tensor.scale)
    assert tensor.scale > 0
    if tensor.scale < FLT_MAX:  # what was just seen does not saturate, up to rounding
        assert float(tensor.scale) * amax <= 448 * 2.0**-margin * (1 + 2.0**-23)


# Events

TENSORS: dict[str, delayed.Kind] = {"x": "input", "w": "weight", "g": "grad_output"}


def snapshot(model: DelayedScalingModel) -> dict[str, tuple[list[float], float, int]]:
    return {
        name: (tensor.history.tolist(), float(tensor.scale), tensor.num_nonfinite)
        for name, tensor in model.states.items()
    }


def run_forward(model: DelayedScalingModel, index: int, x: float, w: float) -> list[int]:
    model.begin_microbatch(index)
    codes = [int(model.quantize("x", f32(x)).codes[0]), int(model.quantize("w", f32(w)).codes[0])]
    model.end_forward()
    return codes


def held(tensor: TensorState) -> tuple[list[float], float]:
    return tensor.history.tolist(), float(tensor.scale)


def test_two_microbatches_by_hand() -> None:
    model = DelayedScalingModel(TENSORS, Recipe(amax_history_len=3))
    x, w, g = (model.states[name] for name in "xwg")

    assert run_forward(model, 0, x=7, w=-14) == [0x4E, 0xD6]  # 7 and -14 at scale 1
    assert held(x) == ([0, 0, 7], 64)
    assert held(w) == ([0, 0, 14], 32)
    assert held(g) == ([0, 0, 0], 1)

    assert model.quantize("g", f32(0.5, -0.4375)).fmt is E5M2
    model.end_backward()
    assert held(g) == ([0, 0, 0.5], 57344 * 2)
    assert x.history.tolist() == [0, 0, 7]

    # The weight rolls once a step, and keeps its payload though its scale has moved.
    assert run_forward(model, 1, x=3.5, w=-14) == [0x76, 0xD6]  # 224 at scale 64; -14 as before
    assert model.quantize("w", f32(99)).dequant_scale == 1
    assert held(x) == ([0, 7, 3.5], 64)
    assert held(w) == ([0, 0, 14], 32)

    # The next step quantizes it anew. No backward ran for microbatch 1: g did not roll.
    assert run_forward(model, 0, x=1, w=14) == [0x68, 0x7E]  # 64; 448
    model.end_backward()
    assert held(x) == ([0, 3.5, 1], 64)  # 7 counted one last time
    assert w.history.tolist() == [0, 14, 14]
    assert g.history.tolist() == [0, 0, 0.5]


def test_staging_keeps_the_running_amax() -> None:
    model = DelayedScalingModel(TENSORS)
    model.begin_microbatch(0)
    for value in (2, -6, 4):
        model.quantize("x", f32(value))
    assert model.staged("forward") == {"x": 6, "w": 0}


def test_evaluation_and_recompute_change_nothing() -> None:
    model = DelayedScalingModel(TENSORS, Recipe(amax_history_len=3))
    first = run_forward(model, 0, x=7, w=14)
    run_forward(model, 1, x=70, w=14)
    model.quantize("g", f32(0.5))
    before = snapshot(model)

    with model.recompute(0):
        assert model.quantize("x", f32(7)).codes.tolist() == first[:1]
        assert model.quantize("w", f32(14)).codes.tolist() == first[1:]
        model.end_forward()
    with model.recompute(1):
        assert model.quantize("x", f32(70)).quant_scale == 64
        assert model.quantize("w", f32(14)).quant_scale == 1  # made at microbatch 0
    with model.evaluation():
        assert model.quantize("x", f32(math.nan)).quant_scale == model.states["x"].scale
        assert model.quantize("w", f32(15)).quant_scale == model.states["w"].scale
        model.end_forward()
        model.end_backward()
    with model.evaluation(), pytest.raises(ValueError, match="g"):
        model.quantize("g", f32(1))
    assert snapshot(model) == before
    assert model.quantize("w", f32(15)).codes.tolist() == first[1:]  # still this step's payload


def test_a_weight_must_be_quantized_at_microbatch_0() -> None:
    model = DelayedScalingModel(TENSORS)
    run_forward(model, 0, x=7, w=14)
    model.begin_microbatch(0)  # a new step: the old payload is gone
    model.begin_microbatch(1)
    with pytest.raises(ValueError, match="w: not quantized at microbatch 0"):
        model.quantize("w", f32(14))


def test_reduce_is_the_max_over_ranks() -> None:
    ranks = [DelayedScalingModel(TENSORS, Recipe(amax_history_len=3)) for _ in range(3)]
    for rank, amax in zip(ranks, (1, 7, 2), strict=True):
        rank.begin_microbatch(0)
        rank.quantize("x", f32(amax))
    ranks[0].quantize("w", f32(14))  # the others did not use it
    reduced = delayed.reduce(ranks, "forward")
    assert reduced == {"x": 7, "w": 14}
    for rank in ranks:
        rank.end_forward(reduced)
        assert snapshot(rank) == snapshot(ranks[0])
    assert ranks[2].states["x"].scale == 64


def test_one_ranks_nan_is_dropped_on_all() -> None:
    ranks = [DelayedScalingModel(TENSORS, Recipe(amax_history_len=3)) for _ in range(2)]
    for rank, value in zip(ranks, (math.nan, 7), strict=True):
        rank.begin_microbatch(0)
        rank.quantize("x", f32(value))
    reduced = delayed.reduce(ranks, "forward")
    for rank in ranks:
        rank.end_forward(reduced)
        assert snapshot(rank)["x"] == ([0, 0, 0], 1, 1)


def test_fp8_interval() -> None:
    """The history takes every amax; the scale follows at the 1st, 4th, 7th, ... of them."""
    model = DelayedScalingModel(
        {"x": "input"}, Recipe(amax_history_len=3, amax_compute_algo="most_recent", fp8_interval=3)
    )
    seen = []
    for amax in (7, 14, 0, 28, 56):  # an amax of 0 is no update
        model.begin_microbatch(0)
        model.quantize("x", f32(amax))
        model.end_forward()
        seen.append(float(model.states["x"].scale))
    assert seen == [64, 64, 64, 64, 8]
    assert model.states["x"].history.tolist() == [0, 28, 56]


# The linear


@pytest.fixture
def operands() -> tuple[Floats32, Floats32, Floats32, Floats32]:
    rng = np.random.default_rng(3)
    shapes = ((5, 7), (3, 7), (3,), (5, 3))
    x, w, b, g = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, w, b, g


def test_linear_is_loops_over_dequantized_values(
    operands: tuple[Floats32, Floats32, Floats32, Floats32],
) -> None:
    x, w, b, g = operands
    result = linear.linear(
        x, w, b, g, input_scale=np.float32(101), weight_scale=np.float32(77.7),
        grad_output_scale=np.float32(9000.5), forward_format=E4M3, backward_format=E5M2,
    )  # fmt: skip
    xq, wq, gq = result.input.values, result.weight.values, result.grad_output.values
    for m in range(5):
        for n in range(3):
            exact = math.fsum([*(xq[m, k] * wq[n, k] for k in range(7)), float(b[n])])
            assert result.output[m, n] == pytest.approx(exact, rel=1e-13, abs=1e-13)
        for k in range(7):
            exact = math.fsum(gq[m, n] * wq[n, k] for n in range(3))
            assert result.grad_input[m, k] == pytest.approx(exact, rel=1e-13, abs=1e-13)
    for n in range(3):
        for k in range(7):
            exact = math.fsum(gq[m, n] * xq[m, k] for m in range(5))
            assert result.grad_weight[n, k] == pytest.approx(exact, rel=1e-13, abs=1e-13)
        assert result.grad_bias[n] == pytest.approx(math.fsum(g[:, n].tolist()), rel=1e-13)
    assert (np.abs(result.output - b) <= result.output_magnitudes * (1 + 1e-13)).all()
    assert (np.abs(result.grad_input) <= result.grad_input_magnitudes * (1 + 1e-13)).all()
    assert (np.abs(result.grad_weight) <= result.grad_weight_magnitudes * (1 + 1e-13)).all()


def test_linear_is_autograd_on_grid_values() -> None:
    """Small integers are on both grids: no rounding anywhere, so torch in float64 must agree."""
    rng = np.random.default_rng(4)
    shapes = ((5, 7), (3, 7), (3,), (5, 3))
    x, w, b, g = (rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes)
    leaves = [torch.from_numpy(a).double().requires_grad_() for a in (x, w, b)]
    output = torch.nn.functional.linear(*leaves)
    torch.autograd.backward(output, torch.from_numpy(g).double())
    result = linear.linear(
        x, w, b, g, input_scale=np.float32(2), weight_scale=np.float32(8),
        grad_output_scale=np.float32(0.5), forward_format=E4M3, backward_format=E5M2,
    )  # fmt: skip
    np.testing.assert_array_equal(result.output, x.astype(np.float64) @ w.T + b)
    for got, leaf in zip(
        (result.grad_input, result.grad_weight, result.grad_bias), leaves, strict=True
    ):
        assert leaf.grad is not None
        np.testing.assert_array_equal(got, leaf.grad.numpy())


def test_grad_bias_is_not_quantized() -> None:
    """2^-20 vanishes in E5M2 at scale 1, and yet reaches the bias."""
    g = f32(1, 2.0**-20).reshape(2, 1)
    one = np.ones((2, 1), np.float32)
    result = linear.linear(
        one, one[:1], None, g, input_scale=ONE, weight_scale=ONE,
        grad_output_scale=ONE, forward_format=E4M3, backward_format=E5M2,
    )  # fmt: skip
    assert result.grad_bias.tolist() == [1 + 2.0**-20]
    assert result.grad_weight.tolist() == [[1]]
    assert result.output.tolist() == [[1], [1]]


@pytest.mark.parametrize("rows", [1, 16])
def test_a_block_of_a_matrix_is_quantized_as_one_alone(rows: int) -> None:
    """Whatever its neighbours hold: zeros, NaN, infinities, subnormals, large numbers."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, (32, 64), dtype=np.uint32).view(np.float32)
    x[:16, :32] = rng.standard_normal((16, 32)) * 1e-40
    x[::3, 16:48] = 0
    whole, made = mxfp8.quantize_rows(x), nvfp4.quantize_blocks(x, rows, np.float32(3e38))
    for top in range(0, 32, rows):
        across = slice(top, top + rows)
        for left in range(0, 64, nvfp4.BLOCK):
            block = x[across, left : left + nvfp4.BLOCK]
            alone = nvfp4.quantize_blocks(block, rows, np.float32(3e38))
            assert (alone.codes == made.codes[across, left : left + nvfp4.BLOCK]).all()
            assert alone.scale_codes == made.scale_codes[top // rows, left // nvfp4.BLOCK]
        for left in range(0, 64, mxfp8.BLOCK):
            single = mxfp8.quantize_rows(x[across, left : left + mxfp8.BLOCK])
            assert (single.codes == whole.codes[across, left : left + mxfp8.BLOCK]).all()
            assert (
                single.scale_codes[:, 0] == whole.scale_codes[across, left // mxfp8.BLOCK]
            ).all()
