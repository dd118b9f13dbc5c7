"""The plan of a run that changes its precision is that of its largest phase."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megafp8.cli import dryrun, plan
from megafp8.plan.memory import rank_memory
from megafp8.plan.phases import largest_phase, specs_of_phases
from megafp8.specs import RunSpec
from tests.config.helpers import run_spec

JOB = [
    "model.fp8=True", "model.fp8_recipe=nvfp4", "model.num_layers=2", "model.hidden_size=256",
    "model.num_attention_heads=4", "model.ffn_hidden_size=1024", "trainer.max_steps=100",
]  # fmt: skip
ENTRIES = "[{from: 0.5, products: forward, recipe: bf16}, {from: 0.8, recipe: bf16}]"
SCHEDULE = f"model.precision_schedule={ENTRIES}"
HIGH = "model.override_linear_precision=[True,False,False]"
PHASES = [[], [HIGH], ["model.fp8=False"]]
VOCABULARY = ["--vocab-size", "1024"]


def with_vocabulary(spec: RunSpec) -> RunSpec:
    return replace(spec, model=replace(spec.model, vocab_size=1024))


def alone(settings: list[str]) -> list[str]:
    """The settings of a run that has one phase's precision throughout."""
    job = [word for word in JOB if settings != PHASES[2] or "fp8" not in word]
    return [*job, *settings]


def test_each_phase_is_planned_as_the_run_that_has_its_precision_throughout() -> None:
    spec = with_vocabulary(run_spec(*JOB, SCHEDULE, gpu=True))
    found = [rank_memory(each, 0) for each in specs_of_phases(spec)]
    wanted = [rank_memory(with_vocabulary(run_spec(*alone(s), gpu=True)), 0) for s in PHASES]
    assert found == wanted
    assert rank_memory(largest_phase(spec), 0) == max(wanted, key=lambda memory: memory.total)
    assert len({memory.total for memory in wanted}) > 1


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    plan.main([*words, "hardware=b200", *VOCABULARY, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_plan_shows_the_largest_phase_and_the_time_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = planned(capsys, *JOB, SCHEDULE)
    each = [planned(capsys, *alone(settings)) for settings in PHASES]
    totals = [each_plan["ranks"][0]["total"] for each_plan in each]
    assert whole["ranks"][0]["total"] == max(totals)
    seconds = [each_plan["step_seconds"]["total"] for each_plan in each]
    assert [phase["num_steps"] for phase in whole["phases"]] == [50, 30, 20]
    assert [phase["step_seconds"] for phase in whole["phases"]] == seconds
    days = sum(n * s for n, s in zip([50, 30, 20], seconds, strict=True)) / 86400
    assert whole["days"] == pytest.approx(days)
    plan.main([*JOB, SCHEDULE, "hardware=b200", *VOCABULARY])
    text = capsys.readouterr().out
    assert "phase of model.precision_schedule that needs the most memory: nvfp4" in text
    assert "20 steps of" in text and "all linears in high precision" in text


def test_a_dry_run_shows_the_largest_phase(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of memory, in the words that a run of that precision has."""
    words = ["trainer.accelerator=gpu", *VOCABULARY]
    dryrun.main([*JOB, *words])  # the first one of a process makes the table of the rotation
    capsys.readouterr()
    assert dryrun.main([*JOB, SCHEDULE, *words]) == 0
    whole = capsys.readouterr().out
    assert "phase of model.precision_schedule that needs the most memory: nvfp4" in whole
    assert dryrun.main([*JOB, *words]) == 0
    table = capsys.readouterr().out.partition("model: 2 layers")[2]
    assert table and table in whole


def test_a_dry_run_of_a_phase_in_bf16_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """`tensorwise` keeps inputs in one byte, so that BF16 is the larger phase on CPUs."""
    settings = [word for word in JOB if "recipe" not in word]
    entries = "model.precision_schedule=[{from: 0.5, recipe: bf16}]"
    words = ["trainer.accelerator=cpu", *VOCABULARY, "model.fp8_recipe=tensorwise"]
    assert dryrun.main([*settings, entries, *words, "model.micro_batch_size=64",
                        "model.global_batch_size=64"]) == 0  # fmt: skip
    assert "needs the most memory: BF16" in capsys.readouterr().out
