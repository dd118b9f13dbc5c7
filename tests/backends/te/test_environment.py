"""Environment variables of Transformer Engine that ask for another rule than the settings."""

from __future__ import annotations

import os

import pytest

from megafp8.config.te_environment import VARIABLES, findings
from megafp8.config.te_settings import of_recipe
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import AttentionInFp8

DELAYED, BLOCKWISE = Fp8Recipe(), Fp8Recipe(name="blockwise", backward_format="e4m3")
TENSORWISE, POWERS = (
    Fp8Recipe(name="tensorwise", power_2_scale=is_power_2) for is_power_2 in (False, True)
)
NAMES = [variable.name for variable in VARIABLES]


def why_not_environment(recipe: Fp8Recipe | None, attention: AttentionInFp8 = "none") -> str | None:
    """What the environment asks for that a recipe does not, with the hint."""
    values = {"model.fp8": False} if recipe is None else of_recipe(recipe)
    values |= {"model.fp8_dot_product_attention": attention != "none"}
    found = [f"{f.reason}. {f.hint}" for f in findings(values, os.environ)]
    return found[0] if found else None


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


CASES: list[tuple[str, str, list[Fp8Recipe | None], list[Fp8Recipe | None]]] = [
    ("NVTE_UNFUSED_FP8_UPDATE", "1", [DELAYED], [None, TENSORWISE, BLOCKWISE]),
    ("NVTE_APPLY_QK_LAYER_SCALING", "1", [None, DELAYED], []),
    ("NVTE_DPA_FP8_RECIPE", "DelayedScaling", [DELAYED, TENSORWISE], [None]),
    ("NVTE_BACKWARD_OVERRIDE", "high_precision", [DELAYED, TENSORWISE], [None]),
    ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1", [TENSORWISE], [POWERS, DELAYED, None]),
    ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", [], [DELAYED, None, TENSORWISE, BLOCKWISE]),
]


@pytest.mark.parametrize(("name", "value", "refused", "allowed"), CASES)
def test_what_changes_a_rule_is_named_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    refused: list[Fp8Recipe | None],
    allowed: list[Fp8Recipe | None],
) -> None:
    for off in ("", "0"):
        monkeypatch.setenv(name, off)
        assert all(why_not_environment(recipe) is None for recipe in refused)
    monkeypatch.setenv(name, value)
    for recipe in refused:
        reason = str(why_not_environment(recipe))
        assert f"{name}={value} " in reason and "Unset it" in reason
    assert all(why_not_environment(recipe) is None for recipe in allowed)


def test_blockwise_scales_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    powers = Fp8Recipe(name="blockwise", backward_format="e4m3", power_2_scale=True)
    assert "model.fp8_power_2_scale=False" in str(why_not_environment(powers))


OF_ATTENTION = (("NVTE_FP8_DPA_BWD", "0", "1"), ("NVTE_UnfusedDPA_Emulate_FP8", "1", "0"))


@pytest.mark.parametrize(("name", "bad", "good"), OF_ATTENTION)
def test_what_takes_attention_out_of_fp8_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, bad: str, good: str
) -> None:
    """Of the two variables 0 asks the one and 1 the other for another rule."""
    asked: tuple[AttentionInFp8, ...] = ("core", "whole")
    monkeypatch.setenv(name, bad)
    for attention in asked:
        reason = str(why_not_environment(DELAYED, attention))
        assert f"{name}={bad} " in reason and "Unset it" in reason
    assert why_not_environment(DELAYED) is None
    for value in ("", good):
        monkeypatch.setenv(name, value)
        assert all(why_not_environment(DELAYED, attention) is None for attention in asked)


def test_every_variable_is_tested() -> None:
    assert {name for name, *_ in [*CASES, *OF_ATTENTION]} == set(NAMES)
