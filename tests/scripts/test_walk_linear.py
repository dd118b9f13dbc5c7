"""A linear stays short: the calls of one pass through it, by `scripts/walk_linear.py`."""

from __future__ import annotations

import pytest

from megafp8.fp8 import linear, quantizer
from scripts.walk_linear import NUM_LINEARS, Walk, walk
from tests.c_kernels import need_kernels

MEASURED = {"delayed": 74.25, "tensorwise": 75.0}
"""Calls with Python 3.11 and torch 2.13; no comprehension is called in Python 3.12."""


@pytest.mark.parametrize("recipe", MEASURED)
def test_a_linear_stays_short(recipe: str) -> None:
    need_kernels()
    found = walk(recipe)
    most = 1.05 * MEASURED[recipe]  # so that a tenth more is too many
    assert found.per_linear <= most, found.calls.most_common(20)
    assert found.deepest <= 8
    if recipe == "delayed":
        assert len(found.files) <= 9, found.files


def test_calls_of_the_package_alone_are_counted_with_their_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_kernels()
    before, right = walk("delayed"), quantizer.operands_of

    def with_one_more(layer: object, *args: object, **options: object) -> object:
        right(args[1].payload, None, None)  # type: ignore[attr-defined]
        return product(layer, *args, **options)  # type: ignore[arg-type]

    product = linear.product
    monkeypatch.setattr(linear, "product", with_one_more)
    after: Walk = walk("delayed")
    extra = {key: n - before.calls[key] for key, n in after.calls.items() if n != before.calls[key]}
    assert extra == {("fp8/quantizer.py", "operands_of"): 3 * NUM_LINEARS}
    assert after.per_linear == before.per_linear + 3 and after.deepest == before.deepest
