"""Numbers are formatted for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.observe.units import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    plural,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.51, "0.51"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (21300, "21.3k"),
        (1e6, "1.00M"),
        (2.5e15, "2.50P"),
        (-21300, "-21.3k"),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
    ],
)
def test_count(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (5.12341, 4, "5.1234"),
        (0.0, 2, "0.00"),
        (0.00098, 2, "9.80e-04"),
        (123456.0, 2, "1.23e+05"),
        (-math.inf, 2, "-Infinity"),
        (math.nan, 2, "NaN"),
    ],
)
def test_number(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1288490188, "1.2 GiB"), (2**40, "1.0 TiB")],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (201, "3:21"),
        (3723, "1:02:03"),
        (2 * 86400 + 11045, "2d 03:04:05"),
        (-5, "0:00"),
        (math.nan, "-:--"),
        (math.inf, "-:--"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_has_a_short_text(value: float) -> None:
    assert 0 < len(format_number(value)) <= 12
    assert format_duration(value)
    assert format_bytes(value)
    assert format_count(value)


@given(st.floats(0.01, 9.99e17))
def test_count_is_within_half_a_percent(value: float) -> None:
    text = format_count(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1], 1.0)
    number = float(text.rstrip("kMGTP")) * scale
    assert number == pytest.approx(value, rel=5.1e-3, abs=5.1e-3)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 global batches"), (1, "1 global batch"), (2, "2 global batches")]
)
def test_a_count_has_the_right_form_of_its_noun(count: int, text: str) -> None:
    assert plural(count, "global batch", "global batches") == text
    assert plural(count, "rank") == ("1 rank" if count == 1 else f"{count} ranks")
