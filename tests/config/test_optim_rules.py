"""Test which settings of optimizer, schedule, ramp-up and loss scale fit together."""

from __future__ import annotations

import pytest

from megafp8.config.load import load_all
from megafp8.config.resolve import resolve
from megafp8.config.schema import all_keys
from megafp8.config.values import SCHEDULES
from megafp8.specs import LossScaleSpec, RampupSpec
from tests.config.helpers import load_problems, run_spec, the_problem

SCHED = "model.optim.sched"
BATCH = ("model.micro_batch_size=8", "model.global_batch_size=32")
VALUES = {
    "warmup_steps": 7,
    "warmup_ratio": 0.02,
    "constant_steps": 8,
    "constant_ratio": 0.03,
    "hold_steps": 9,
    "hold_ratio": 0.04,
    "power": 2.0,
    "decay_rate": 1.0,
    "wsd_decay_steps": 3,
    "wsd_decay_ratio": 0.1,
    "wsd_decay_style": "cosine",
    "d_model": 64,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_takes_the_keys_it_reads_and_no_others(name: str) -> None:
    schedule = f"{SCHED}.name={name}"
    read, rest = SCHEDULES[name], VALUES.keys() - set(SCHEDULES[name])
    given = [f"{SCHED}.{key}={VALUES[key]}" for key in read if not key.endswith("ratio")]
    spec = run_spec(schedule, *given).optim.schedule
    assert spec.name == name
    for key in read:
        if not key.endswith("ratio"):
            assert getattr(spec, key) == VALUES[key]
    found = load_problems(schedule, *(f"{SCHED}.{key}={VALUES[key]}" for key in rest))
    assert {problem.key for problem in found} == {f"{SCHED}.{key}" for key in rest}
    assert len(found) == len(rest), "keys without effect do not exclude each other besides"
    assert any(schedule in problem.reason for problem in found)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("warmup", "CosineAnnealing"),
        ("constant", "CosineAnnealing"),
        ("hold", "PolynomialHoldDecayAnnealing"),
        ("wsd_decay", "WSD"),
    ],
)
def test_shares_of_the_run(part: str, name: str) -> None:
    overrides = [f"{SCHED}.name={name}", "trainer.max_steps=199"]
    spec = run_spec(*overrides, f"{SCHED}.{part}_ratio=0.25").optim.schedule
    assert getattr(spec, f"{part}_steps") == 49  # 49.75 rounded down
    problem = the_problem(*overrides, f"{SCHED}.{part}_ratio=0.25", f"{SCHED}.{part}_steps=3")
    assert problem.key == f"{SCHED}.{part}_ratio" and f"{part}_steps=3" in problem.reason


@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("NoamHoldAnnealing", ("hold_ratio=0.6", "warmup_steps=40"), None),
        ("CosineAnnealing", ("constant_steps=90",), None),  # the warm-up is a tenth
        ("WarmupPolicy", ("warmup_steps=100",), None),
        (
            "NoamHoldAnnealing",
            ("hold_ratio=0.6", "warmup_steps=41"),
            f"{SCHED}.warmup_steps=41 and {SCHED}.hold_steps=60 (NoamHoldAnnealing) do not fit "
            "into trainer.max_steps=100: the run ends at the highest rate, before the decay",
        ),
        (
            "CosineAnnealing",
            ("constant_steps=12500", "warmup_steps=115"),
            "the run ends in the warm-up, before the highest rate, as in NeMo",
        ),
        (
            "CosineAnnealing",
            ("constant_steps=91",),
            f"{SCHED}.warmup_steps=10 and {SCHED}.constant_steps=91 (CosineAnnealing) do not fit "
            "into trainer.max_steps=100: there is no decay",
        ),
        ("WarmupPolicy", ("warmup_steps=101",), f"{SCHED}.warmup_steps=101 (WarmupPolicy)"),
        ("WSD", ("wsd_decay_ratio=0.9",), None),  # the warm-up is a tenth
        (
            "WSD",
            ("wsd_decay_steps=91",),
            f"{SCHED}.warmup_steps=10 and {SCHED}.wsd_decay_steps=91 (WSD) do not fit into "
            "trainer.max_steps=100: the decay begins before the warm-up ends, and the rate jumps "
            "there, as in Megatron",
        ),
        (
            "WSD",
            ("warmup_steps=0", "wsd_decay_steps=101"),
            f"{SCHED}.wsd_decay_steps=101 (WSD) do not fit into trainer.max_steps=100: the run "
            "begins in the decay, below the highest rate, as in Megatron",
        ),
    ],
)
def test_a_schedule_longer_than_the_run_is_cut_and_said(
    name: str, parts: tuple[str, ...], expected: str | None
) -> None:
    given = [f"{SCHED}.name={name}", "trainer.max_steps=100", *(f"{SCHED}.{p}" for p in parts)]
    loaded = load_all(given)
    assert resolve(loaded.values, lambda: False).optim.schedule.max_steps == 100
    if expected is None:
        assert loaded.notes == ()
    else:
        (line,) = loaded.inert_lines()
        assert line.startswith("cut: ") and expected in line


def test_parts_are_shares_of_the_schedule_where_the_run_is_shorter() -> None:
    given = [f"{SCHED}.name=WSD", "trainer.max_steps=100", f"{SCHED}.max_steps=400"]
    loaded = load_all(given)
    spec = resolve(loaded.values, lambda: False).optim.schedule
    assert (spec.max_steps, spec.warmup_steps, spec.wsd_decay_steps) == (400, 40, 80)
    assert loaded.notes == ()
    (line,) = load_all([*given, f"{SCHED}.warmup_steps=401"]).inert_lines()
    assert f"do not fit into {SCHED}.max_steps=400" in line
    (line,) = load_all([*given, f"{SCHED}.warmup_steps=101"]).inert_lines()
    assert "warmup_steps=101 (WSD) do not fit into trainer.max_steps=100: the run ends in" in line
    ratios = [f"{SCHED}.{part}_ratio=0.25" for part in ("warmup", "wsd_decay")]
    spec = run_spec(*given, *ratios).optim.schedule
    assert (spec.warmup_steps, spec.wsd_decay_steps) == (100, 100)


def test_noam_with_a_hold_needs_a_warmup() -> None:
    problem = the_problem(f"{SCHED}.name=NoamHoldAnnealing", f"{SCHED}.warmup_steps=0")
    assert problem.key == f"{SCHED}.warmup_steps"
    tiny = the_problem(f"{SCHED}.name=NoamHoldAnnealing", "trainer.max_steps=9")
    assert tiny.key == f"{SCHED}.warmup_steps"
    of_run = (f"{SCHED}.name=NoamHoldAnnealing", "trainer.max_steps=100")
    assert the_problem(*of_run, f"{SCHED}.max_steps=9").key == f"{SCHED}.warmup_steps"
    short = run_spec(of_run[0], "trainer.max_steps=9", f"{SCHED}.max_steps=100")
    assert short.optim.schedule.warmup_steps == 10


def test_noams_width_is_the_models_unless_given() -> None:
    assert run_spec(f"{SCHED}.name=NoamAnnealing").optim.schedule.d_model == 256


@pytest.mark.parametrize("text", ["16", "'16'", "16-mixed"])
def test_precision_fp16_has_a_loss_scale(text: str) -> None:
    spec = run_spec(f"trainer.precision={text}", "model.hysteresis=3").precision
    assert spec.compute == "fp16" and spec.loss_scale == LossScaleSpec(hysteresis=3)
    named = run_spec(f"trainer.precision={text}").resolved
    assert named == run_spec("trainer.precision=16").resolved


@pytest.mark.parametrize(
    "override",
    [
        "model.native_amp_init_scale=65536",
        "model.native_amp_growth_interval=7",
        "model.hysteresis=3",
    ],
)
def test_a_loss_scale_without_fp16_is_refused(override: str) -> None:
    assert the_problem(override).reason == "has no effect with trainer.precision=bf16"
    assert run_spec("trainer.precision=16", override).precision.loss_scale != LossScaleSpec()


def test_fp32_has_no_half_weights_to_choose() -> None:
    problem = the_problem("trainer.precision=32", "model.megatron_amp_O2=False")
    assert problem.reason == "has no effect with trainer.precision=32"
    problem = the_problem("trainer.precision=32", "model.fp32_residual_connection=True")
    assert problem.reason == "has no effect with trainer.precision=32"
    problem = the_problem("model.megatron_amp_O2=False", "model.fp32_residual_connection=True")
    assert problem.reason == "has no effect with model.megatron_amp_O2=False"


def test_clipping_by_value_without_a_limit_is_refused() -> None:
    problem = the_problem("trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=null")
    assert problem.key == "trainer.gradient_clip_algorithm"


def test_rampup() -> None:
    spec = run_spec(*BATCH, "model.rampup_batch_size=[8,8,100]").train
    assert spec.rampup == RampupSpec(start=8, increment=8, samples=100)


@pytest.mark.parametrize(
    ("ramp", "reason"),
    [
        ("[32,8,100]", "steps of 8 do not lead from 32"),
        ("[8,16,100]", "steps of 16 do not lead from 8"),
        ("[4,4,100]", "4 is not a multiple of model.micro_batch_size=8 times 1"),
        ("[8,12,100]", "12 is not a multiple of model.micro_batch_size=8 times 1"),
    ],
)
def test_a_rampup_that_does_not_lead_to_the_global_batch(ramp: str, reason: str) -> None:
    problem = the_problem(*BATCH, f"model.rampup_batch_size={ramp}")
    assert problem.key == "model.rampup_batch_size" and reason in problem.reason


def test_a_rampup_over_ranks() -> None:
    run_spec(*BATCH, "model.rampup_batch_size=[16,16,100]", "trainer.devices=2")
    problem = the_problem(*BATCH, "model.rampup_batch_size=[8,8,100]", "trainer.devices=2")
    assert "2 data-parallel ranks" in problem.reason and "Nearest: 16" in problem.hint


def test_every_key_of_the_schedules_is_in_the_schema() -> None:
    read = {f"{SCHED}.{key}" for keys in SCHEDULES.values() for key in keys}
    assert read <= all_keys().keys() and {f"{SCHED}.{key}" for key in VALUES} == read
