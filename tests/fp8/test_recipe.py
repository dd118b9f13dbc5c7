"""Every field of a recipe that a caller gives is checked, and one table says what has a history."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megafp8 import fp8
from tests.fp8.models import mlp

ROOT = Path(__file__).parents[2]

WRONG: dict[str, list[Any]] = {
    "name": ["delayd", 8, ["delayed"], None],
    "forward_format": ["e3m4", "e4m3fnuz", None, ["e4m3"]],
    "backward_format": ["E5M2", 5],
    "modules_backward_format": ["E5M2", 5],
    "margin": ["1", 0.5, True, 3000, None],
    "interval": [0, 2.0, "1", True],
    "amax_history_len": [0, 16.0, "16", False, 10**12],
    "amax_compute_algo": ["maximum", None, ["max"]],
    "reduce_amax": ["False", 0, None],
    "power_2_scale": ["true", 1],
    "params_in_fp8": ["False", 0, True],
    "high_precision_gemms": ["output", ["output"], frozenset({"foo"}), frozenset({1}), None],
    "fast_accumulation": ["output", frozenset({"forward"}), True],
    "fp8_in_evaluation": ["no", 1.0],
    "pad_inner_dim": ["yes", None],
    "modules": ["*.fc2", [fp8.ModuleRule("0", "rowwise")], ("0:rowwise",), None],
}
WRONG_RULES: dict[str, list[Any]] = {
    "pattern": ["", 2, None],
    "precision": ["bf16", None, ["rowwise"], 16],
    "source": [None, 1],
    "kept_high": ["output", {"output"}, frozenset({"head"})],
}


def test_each_field_has_wrong_values() -> None:
    """A new field needs an entry here, and a check."""
    assert set(WRONG) == {field.name for field in dataclasses.fields(fp8.Fp8Recipe)}
    assert set(WRONG_RULES) == {field.name for field in dataclasses.fields(fp8.ModuleRule)}


def refused(recipe: fp8.Fp8Recipe) -> fp8.Fp8Error:
    with pytest.raises(fp8.Fp8Error) as caught:
        fp8.convert(mlp(), recipe)
    return caught.value


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("as_object", [False, True])
def test_a_wrong_field_is_named_with_its_value(name: str, as_object: bool) -> None:
    for value in [object()] if as_object else WRONG[name]:
        error = refused(fp8.Fp8Recipe(**{name: value}))
        assert error.subject == f"recipe.{name}={value!r}"
        assert error.reason and error.hint


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_field_of_a_rule_is_named_with_its_value(name: str) -> None:
    for value in [object(), *WRONG_RULES[name]]:
        rule = dataclasses.replace(fp8.ModuleRule("0", "rowwise"), **{name: value})
        error = refused(fp8.Fp8Recipe(modules=(fp8.ModuleRule("2", "delayed"), rule)))
        assert error.subject == f"recipe.modules[1].{name}={value!r}"


def test_some_product_stays_in_fp8() -> None:
    recipe = fp8.Fp8Recipe(high_precision_gemms=frozenset({"output", "grad_input", "grad_weight"}))
    assert refused(recipe).reason == "leaves no product in FP8"


def test_one_table_says_which_recipes_have_a_history(tmp_path: Path) -> None:
    """In a copy where `tensorwise` has one, every place outside the plan and TE follows."""
    for folder in ("megafp8", "fp8_numerics", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    table = tmp_path / "megafp8/fp8/recipes/tensorwise.py"
    source = table.read_text("utf-8")
    changes = {"agrees=True": "has_history=True", 'power_2="off"': 'power_2="never"'}
    for old, new in changes.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    table.write_text(source, "utf-8")
    program = """
import dataclasses
from torch import nn
import megafp8
from megafp8 import fp8
from megafp8.config.load import load_all
from megafp8.errors import UserError
from megafp8.specs.run import HealthSpec

def refuses(key, call):
    try:
        call()
    except UserError as error:
        assert key in str(error), error
    else:
        raise AssertionError(f"{key} is accepted")

assert megafp8.__file__.startswith(FOLDER), megafp8.__file__
recipe = fp8.Fp8Recipe(name="tensorwise", margin=2)
assert HealthSpec(mode="scales").reads_tables(recipe)
state = fp8.convert(nn.Linear(16, 16), recipe)
assert all(linear.fp8.is_delayed for linear in state.linears.values())
in_powers = dataclasses.replace(recipe, power_2_scale=True)
refuses("power_2_scale", lambda: fp8.convert(nn.Linear(16, 16), in_powers))
given = ["model.fp8=True", "model.fp8_recipe=tensorwise"]
load_all([*given, "model.fp8_margin=2"])
for value in (True, False):
    key = "model.fp8_power_2_scale"
    refuses(key, lambda: load_all([*given, f"{key}={value}"]))
"""
    command = [sys.executable, "-c", f"FOLDER = {str(tmp_path)!r}\n{program}"]
    subprocess.run(command, cwd=tmp_path, check=True)
