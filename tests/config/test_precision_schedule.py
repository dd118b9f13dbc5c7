"""Test which schedules of precision are refused, and which recipe each phase of the others has."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.config.load import load
from megafp8.config.precision_changes import parse_schedule, spell_schedule
from megafp8.config.resolve import resolve
from megafp8.specs.layer import linear_names
from megafp8.specs.precision import GEMMS, Fp8Recipe, PrecisionPhase
from megafp8.specs.recipes import HIGH_PRECISION
from tests.config.helpers import run_spec, the_problem

STEPS = 100
JOB = ["model.fp8=True", "model.num_layers=2", f"trainer.max_steps={STEPS}"]
SCHEDULE = "model.precision_schedule="


def phases(entries: str, *more: str) -> tuple[PrecisionPhase, ...]:
    return run_spec(*JOB, *more, SCHEDULE + entries).precision.schedule


def precisions(recipe: Fp8Recipe) -> dict[str, tuple[str, ...]]:
    """Return for each linear the precision of its products, as the layers will have it."""
    return {
        name: tuple(
            HIGH_PRECISION
            if gemm in recipe.kept_high(recipe.precision_of(name), name)
            else recipe.precision_of(name)
            for gemm in GEMMS
        )
        for name in linear_names(range(2))
    }


REFUSED = {
    "5": "must be a list",
    "[5]": "entry 1 (5) must be a mapping",
    "[{recipe: bf16}]": "entry 1 lacks `from`",
    "[{from: 5}]": "entry 1 lacks `recipe`",
    "[{from: 5, recipe: bf16, module: '*.fc2'}]": "unknown key module; did you mean modules?",
    "[{from: 5, recipe: bf16, recipe: mxfp8}]": "has recipe twice in one mapping",
    "[{from: 5, recipe: bf16, when: 3}]": "unknown key when; it has from, modules",
    "[{from: -1, recipe: bf16}]": "from: -1, which must be",
    "[{from: 1.0, recipe: bf16}]": "from: 1.0, which must be",
    "[{from: True, recipe: bf16}]": "from: True, which must be",
    "[{from: 85%, recipe: bf16}]": "from: '85%', which must be",
    "[{from: null, recipe: bf16}]": "from: None, which must be",
    "[{from: 5, recipe: bf61}]": "no such recipe. Did you mean bf16? There are delayed, ",
    "[{from: 5, recipe: high}]": "high_precision, bf16, and code such as FILE.py:CLASS",
    "[{from: 5, recipe: 7}]": "is no text",
    "[{from: 5, recipe: null}]": "is no text; write a recipe's name",
    "[{from: 5, recipe: bf16, products: output grad}]": "which must be output, grad_input",
    "[{from: 5, recipe: bf16, products: []}]": "which must be output, grad_input",
    "[{from: 5, recipe: bf16, modules: [3]}]": "must be a pattern",
    "[{from: 100, recipe: bf16}]": "begins after step 100, and the run has",
    "[{from: 50, recipe: bf16}, {from: 0.4, recipe: delayed}]": "entry 2 begins after step 40",
    "[{from: 5, recipe: bf16, modules: '*.fc3'}]": "the pattern *.fc3 matches no linear",
    "[{from: 5, recipe: delayed}]": "entry 1 (all linears in delayed) changes nothing",
    "[{from: 5, recipe: bf16}, {from: 6, recipe: bf16, modules: '*.fc2'}]": "changes nothing",
    "[{from: 5, recipe: bf16}, {from: 5, recipe: delayed}]": "entry 1 (all linears in high "
    "precision) changes nothing after step 5: later entries of the same step replace it",
    "[{from: 5, recipe: bf16}, {from: 5, products: forward, recipe: mxfp8}, "
    "{from: 5, products: backward, recipe: mxfp8}]": "entry 1 (all linears in high precision) ch",
    "[{from: 5, recipe: bf16}, {from: 0.05, recipe: delayed}]": "after step 5 change nothing",
    "[{from: 0, recipe: bf16}, {from: 0, recipe: delayed}]": "entry 1 (all linears in high",
    "[{from: 0, recipe: bf16}, {from: 0.001, recipe: delayed}]": "after step 0 change nothing",
    "[{from: 5, recipe: mxfp8, products: forward}]": "a linear has one recipe at a time",
    "[{from: 0, recipe: bf16}]": "leaves no product in FP8 in any step",
}  # fmt: skip


@pytest.mark.parametrize("entries", REFUSED)
def test_an_entry_that_cannot_be_meant_is_refused(entries: str) -> None:
    problem = the_problem(*JOB, SCHEDULE + entries)
    assert problem.key == "model.precision_schedule"
    assert REFUSED[entries] in problem.reason and problem.hint


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["model.fp8_params=True"], "model.precision_schedule"),
        (["model.compile=block"], "model.precision_schedule"),
        (["model.enable_cuda_graph=True", "trainer.accelerator=gpu"], "model.precision_schedule"),
        (["model.optim.fp8_opt_level=O3"], "model.precision_schedule"),
        (["model.fp8_backend=torchao", "model.fp8_recipe=tensorwise"], "model.precision_schedule"),
        (["model.fp8_backend=te"], "model.precision_schedule"),
        (["trainer.precision=32"], "model.precision_schedule"),
    ],
)
def test_what_cannot_change_its_precision_is_refused_by_name(more: list[str], key: str) -> None:
    assert the_problem(*JOB, *more, SCHEDULE + "[{from: 0.5, recipe: bf16}]").key == key


def test_without_fp8_a_schedule_has_no_effect() -> None:
    assert "model.fp8=False" in the_problem(SCHEDULE + "[{from: 0.5, recipe: bf16}]").reason


def test_the_rules_about_recipes_hold_for_those_of_later_phases() -> None:
    narrow = [*JOB, "model.hidden_size=320", "model.num_attention_heads=4"]
    load(narrow)
    found = the_problem(*narrow, SCHEDULE + "[{from: 9, recipe: blockwise}]")
    assert found.key == "model.hidden_size" and "model.precision_schedule" in found.reason


def test_a_key_of_a_later_recipe_has_an_effect() -> None:
    spec = run_spec(*JOB, "model.fp8_recipe=mxfp8", "model.fp8_margin=1",
                    SCHEDULE + "[{from: 9, recipe: delayed}]")  # fmt: skip
    assert spec.precision.schedule[1].recipe.margin == 1


def test_phases_of_whole_models() -> None:
    first, second = phases("[{from: 0.85, recipe: bf16}]", "model.fp8_recipe=nvfp4")
    assert (first.after, second.after) == (0, 85)
    assert set(precisions(first.recipe).values()) == {("nvfp4",) * 3}
    assert set(precisions(second.recipe).values()) == {(HIGH_PRECISION,) * 3}
    assert second.recipe.is_unused and not first.recipe.is_unused


def test_a_recipe_of_a_phase_has_its_own_formats() -> None:
    """E5M2 gradients after MXFP8, as `model.fp8_recipe=delayed` has them, unless E4M3 is asked."""
    entries = "[{from: 9, recipe: delayed}]"
    mx = "model.fp8_recipe=mxfp8"
    assert phases(entries, mx)[1].recipe == run_spec(*JOB).precision.fp8
    assert phases(entries, mx, "model.fp8_e4m3=True")[1].recipe.backward_format == "e4m3"
    after_delayed = phases("[{from: 9, recipe: blockwise}]")[1].recipe
    assert after_delayed == run_spec(*JOB, "model.fp8_recipe=blockwise").precision.fp8


def test_products_of_some_linears() -> None:
    found = phases(
        "[{from: 1, products: [backward], recipe: bf16}, "
        "{from: 2, modules: ['*.fc1', '*.fc2'], products: grad_weight, recipe: delayed}, "
        "{from: 3, products: [grad_input, grad_weight], recipe: delayed}]"
    )
    high, low = HIGH_PRECISION, "delayed"
    assert set(precisions(found[1].recipe).values()) == {(low, high, high)}
    assert precisions(found[2].recipe)["layers.1.mlp.fc1"] == (low, high, low)
    assert precisions(found[2].recipe)["layers.1.attention.qkv"] == (low, high, high)
    assert found[3].recipe == found[0].recipe


def test_entries_without_modules_leave_what_settings_keep_high() -> None:
    entries = "[{from: 1, recipe: mxfp8}, {from: 2, modules: 'layers.0.mlp.fc1', recipe: delayed}]"
    ends = ["model.first_last_layers_bf16=True", "model.num_layers_at_end_in_bf16=0"]
    _, second, third = phases(entries, *ends, "model.fp8_modules=['*.fc2:tensorwise']")
    assert precisions(second.recipe)["layers.0.mlp.fc1"] == (HIGH_PRECISION,) * 3
    # the rule of `fp8_modules` comes before the ends, and its recipe gives way to the schedule's
    assert precisions(second.recipe)["layers.0.mlp.fc2"] == ("mxfp8",) * 3
    assert precisions(second.recipe)["layers.1.mlp.fc1"] == ("mxfp8",) * 3
    assert precisions(third.recipe)["layers.0.mlp.fc1"] == ("delayed",) * 3


def test_several_entries_at_one_step_are_one_phase() -> None:
    found = phases(
        "[{from: 0, recipe: bf16}, {from: 10, products: forward, recipe: mxfp8}, "
        "{from: 0.1, products: backward, recipe: mxfp8}]"
    )
    assert [phase.after for phase in found] == [0, 10]
    assert found[0].recipe.is_unused and len(found[1].changes) == 2
    assert set(precisions(found[1].recipe).values()) == {("mxfp8",) * 3}


def test_fractions_that_are_one_step_of_a_trial_may_replace_each_other() -> None:
    """A run of 4 steps tries settings that are written for a long one."""
    entries = "[{from: 0.8, products: forward, recipe: bf16}, {from: 0.9, recipe: bf16}]"
    found = phases(entries, "trainer.fast_dev_run=4")
    assert [phase.after for phase in found] == [0, 3] and found[1].recipe.is_unused


def test_parts_that_are_switched_off_are_so_in_all_phases() -> None:
    found = phases("[{from: 5, recipe: nvfp4}]", "model.fp4_disable_rht=True")
    assert (
        found[1].recipe
        == run_spec(*JOB, "model.fp8_recipe=nvfp4", "model.fp4_disable_rht=True").precision.fp8
    )


@pytest.mark.parametrize("trial", [1, 4, 20])
def test_a_trial_has_the_changes_of_the_whole_job_in_their_order(trial: int) -> None:
    """Steps and fractions are scaled alike; 80 % were refused as being before step 50."""
    steps, half, later = STEPS, STEPS // 2, 3 * STEPS // 5
    entries = f"[{{from: {half}, recipe: bf16}}, {{from: {later}, recipe: tensorwise}}, "
    entries += "{from: 0.8, recipe: bf16}]"
    found = phases(entries, f"trainer.fast_dev_run={trial}")
    starts = [half * trial // steps, later * trial // steps, int(0.8 * steps) * trial // steps]
    assert [phase.after for phase in found] == sorted({0, *starts})
    assert found[-1].recipe.is_unused


def test_a_trial_refuses_what_the_whole_job_does() -> None:
    words = [*JOB, "trainer.fast_dev_run=3", f"{SCHEDULE}[{{from: {STEPS}, recipe: bf16}}]"]
    assert f"begins after step {STEPS}" in str(the_problem(*words))


def test_a_trial_has_the_fractions_of_its_own_length() -> None:
    found = phases("[{from: 0.5, recipe: bf16}]", "trainer.fast_dev_run=4")
    assert [phase.after for phase in found] == [0, 2]


def test_resolved_settings_can_be_loaded_again() -> None:
    spec = run_spec(*JOB, "model.fp8_recipe=nvfp4",
                    SCHEDULE + "[{from: 0.5, products: forward, recipe: bf16}, "
                    "{from: 60, recipe: delayed, modules: '*.fc2'}]")  # fmt: skip
    resolved: Any = spec.resolved
    entries = resolved["model"]["precision_schedule"]
    again = run_spec(*JOB, "model.fp8_recipe=nvfp4", f"{SCHEDULE}{_typed(entries)}")
    assert again == spec
    assert spell_schedule(entries) == entries


def _typed(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_typed(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_typed, value)) + "]"
    return "null" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def test_a_fraction_is_rounded_down() -> None:
    assert parse_schedule([{"from": 0.29, "recipe": "bf16"}], 10)[0].after == 2


def test_yaml(tmp_path: Any) -> None:
    (tmp_path / "job.yaml").write_text(
        "defaults: [pretrain_gpt, _self_]\n"
        "model:\n  fp8: true\n  fp8_recipe: nvfp4\n  precision_schedule:\n"
        "    - {from: 0.8, products: forward, recipe: bf16}\n"
        "    - from: 0.9\n      recipe: bf16\n"
    )
    spec = resolve(load([], tmp_path, "job"), lambda: False)
    assert [phase.after for phase in spec.precision.schedule] == [0, 720, 810]
