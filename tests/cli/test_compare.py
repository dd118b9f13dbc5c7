"""The command `compare` trains configurations and their baseline, and reports verdicts."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from megafp8.cli import compare, plan
from megafp8.cli.help import keys_of_group
from megafp8.config.errors import SettingError
from megafp8.errors import RunError
from megafp8.jobs import processes
from megafp8.jobs.comparison import Outcome, costs_of, worst
from megafp8.jobs.job import Job
from megafp8.report.record import RunRecord
from megafp8.report.verdict import STUDENT, Pair
from megafp8.runs.lock import LOCK_NAME, RunLock
from megafp8.specs import RunSpec, recipes
from megafp8.specs.layer import linear_names
from megafp8.specs.precision import GEMMS
from tests.config.helpers import run_spec
from tests.report.made import make_run
from tests.train.runs import wait_until


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """Let the command make its runs without training; return the jobs that it ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "_loaded", {})
    jobs: list[Job] = []

    def run(job: Job, signals: object, *, quiet: bool) -> int:
        jobs.append(job)
        if not job.directory.exists():
            fp8 = job.label != "baseline"
            make_run(job.directory, model__fp8=fp8, model__seed=job.seed)
        return 0

    monkeypatch.setattr(processes, "_run", run)
    return jobs


def test_the_baseline_has_nothing_of_fp8(made: list[Job]) -> None:
    given = [
        "precision=fp8_rowwise", "model.optim.fp8_opt_level=O2", "model.optim.exp_avg_dtype=fp8",
        "trainer.max_steps=5",
    ]  # fmt: skip
    assert compare.main([*given, "--seeds", "3"]) == 0
    base, other = made
    reset = (
        "model.optim.exp_avg_dtype=null",
        "model.optim.fp8_opt_level=O0",
    )  # a file may set them
    assert base.overrides == ("precision=bf16", "trainer.max_steps=5", "model.fp8=False", *reset)
    assert other.overrides == (*given, "model.fp8_health=full")


LOW_PRECISION = {
    "fp8_opt_level": "O2",
    "main_grads_dtype": "fp8",
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "fp8",
    "exp_avg_sq_dtype": "fp16",
    "low_precision_moments_of": "linears",
    "main_grads_sum_dtype": "fp32",
    "fp8_grad_reduction": "auto",
    "data_parallel_sharding_strategy": "optim_grads",
    "shard_by": "elements",
    "stochastic_rounding": "True",
}
"""For each key of FP8-LM another value than its default."""
PLAIN = ["trainer.devices=2", "model.optim.name=distributed_fused_adam"]


def test_all_keys_of_fp8_lm_are_tried() -> None:
    assert {key.path for key in keys_of_group("fp8_lm")} == {
        f"model.optim.{key}" for key in LOW_PRECISION
    }


@functools.cache
def plain() -> RunSpec:
    return run_spec(*PLAIN)


@pytest.mark.parametrize("key", LOW_PRECISION)
@pytest.mark.parametrize(
    "place", ["command line", "file", "command line and file", "the same in both"]
)
def test_the_baseline_has_no_key_of_fp8_lm(
    key: str, place: str, made: list[Job], tmp_path: Path
) -> None:
    detail = {key: LOW_PRECISION[key]}
    files = {"file": {"fp8_opt_level": "O2"} | detail, "command line and file": detail,
             "the same in both": detail}  # fmt: skip
    in_file = ", ".join(f"{name}: {value}" for name, value in files.get(place, {}).items())
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [pretrain_gpt, _self_]\nmodel: {{fp8: true, optim: {{{in_file}}}}}\n"
    )
    given = [*PLAIN, "model.fp8=True"]
    if place != "file":
        given += ["model.optim.fp8_opt_level=O2"]
    if place in ("command line", "the same in both") and key != "fp8_opt_level":
        given += [f"model.optim.{key}={LOW_PRECISION[key]}"]
    config = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert compare.main([*given, *config, "--out", "out"]) == 0
    base, other = (
        run_spec(*(text for text in job.overrides if not text.startswith("--")),
                 config_dir=tmp_path, config_name="mine")
        for job in made
    )  # fmt: skip
    assert base.optim == plain().optim and base.precision.fp8 is None
    assert other.optim != base.optim and other.precision.fp8 is not None


def test_a_baseline_of_another_level_keeps_what_has_an_effect_there(
    made: list[Job],
) -> None:
    given = ["model.fp8=True", "model.optim.fp8_opt_level=O2", "model.optim.exp_avg_sq_dtype=fp8"]
    assert compare.main([*given, "model.optim.stochastic_rounding=True",
                         "--base", "model.optim.fp8_opt_level=O1"]) == 0  # fmt: skip
    base, _ = made
    assert base.overrides == ("model.fp8=True", given[2], "model.optim.stochastic_rounding=True",
                              "model.optim.fp8_opt_level=O1", "model.fp8_health=full")  # fmt: skip


def test_the_command_reports_and_says_the_verdict_last(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["model.fp8=True", "--seeds", "1", "2", "3", "--out", "out"]
    assert compare.main(argv) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith(
        "verdict: same: the validation loss of FP8 delayed is within 0.01 % of that of BF16, betw"
    )
    assert "differs: model.fp8: False and True" in said
    assert [(job.label, job.seed) for job in made[:3]] == [
        ("baseline", 1), ("given", 1), ("baseline", 2),
    ]  # fmt: skip
    result = json.loads(Path("out/compare.json").read_text())
    (only,) = result["configurations"]
    assert result["verdict"] == only["verdict"] == "same" and only["figures"]["gaps"] == {
        "1": 0,
        "2": 0,
        "3": 0,
    }
    assert len(only["weakest_tensors"]) == 10
    page = Path("out/report.html").read_text()
    assert "BF16, seed 1" in page and "layers.0.<wbr>attention.<wbr>qkv.<wbr>grad_output" in page
    assert "training loss of FP8 delayed over BF16, %" in page


def test_worse_undecided_and_failed_runs(
    made: list[Job],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compare.main(["model.fp8=True", "--seeds", "1", "2", "--out", "out"]) == 0

    def set_loss(seed: int, loss: float) -> None:
        file = Path(f"out/given-{seed}/summary.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), "val_loss": loss}))

    again = ["model.fp8=True", "--seeds", "1", "2", "--out", "out"]
    set_loss(1, 2.5)
    set_loss(2, 2.5)
    assert compare.main(again) == compare.WORSE
    set_loss(2, 2.2345)
    assert compare.main(again) == compare.UNDECIDED
    monkeypatch.setattr(
        processes, "_run", lambda job, signals, *, quiet: 3 * (job.label == "given")
    )
    assert compare.main(again) == compare.WORSE
    assert "did not finish (seed 1 ended with exit code 3" in capsys.readouterr().out
    monkeypatch.setattr(
        processes, "_run", lambda job, signals, *, quiet: int(job.label == "baseline")
    )
    assert compare.main(again) == 2
    assert "the baseline's run ended with exit code 1" in capsys.readouterr().err
    monkeypatch.setattr(processes, "_run", lambda job, signals, *, quiet: 75)
    assert compare.main(again) == 75


def test_runs_of_other_configurations_do_not_count(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["model.fp8=True", "--out", "out"]) == 0
    count = len(made)
    assert compare.main(["model.fp8=True", "model.fp8_margin=1", "--out", "out"]) == 2
    assert "out: has runs of other configurations" in capsys.readouterr().err
    assert len(made) == count
    assert compare.main(["model.fp8=True", "model.fp8_margin=0", "--out", "out"]) == 0, "the same"
    assert compare.main(["model.fp8=True"]) == compare.main(["model.fp8=True"]) == 0
    assert len(list(Path("compare").iterdir())) == 1


def test_a_directory_without_a_run_is_free(
    made: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose data do not exist ends before its first run; another one may follow."""
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_run", lambda job, signals, *, quiet: 2)
        wrong = ["model.fp8=True", "model.data.data_prefix=no/such", "--out", "out"]
        assert compare.main(wrong) == 2
    assert {file.name for file in Path("out").iterdir()} == {compare.INPUT_FILE, LOCK_NAME}
    assert compare.main(["model.fp8=True", "--out", "out"]) == 0
    capsys.readouterr()
    Path("out", compare.INPUT_FILE).unlink()
    assert compare.main(["model.fp8=True", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert "out: has runs of other configurations (there is no compare-input.json" in said


def test_a_second_comparison_in_the_same_directory_names_the_process_of_the_first(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["model.fp8=True", "--out", "out"]
    Path("out").mkdir()
    with RunLock.acquire(Path("out")):
        assert compare.main(given) == 2 and not made
    said = capsys.readouterr().err
    assert f"out is in use by process {os.getpid()} on " in said and "Wait for it" in said
    assert compare.main(given) == 0 and len(made) == 2


def test_a_setting_of_gpus_is_refused_where_there_is_none(
    made: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["model.fp8=True", "model.enable_cuda_graph=True"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert compare.main(given) == 2 and not made
    said = capsys.readouterr().err
    assert "model.enable_cuda_graph=True (command line): has no effect with" in said
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert compare.main(given) == 0
    graphs_replay_logged_steps = all("model.fp8_health=full" not in job.overrides for job in made)
    assert made and graphs_replay_logged_steps


def test_ctrl_c_while_a_run_starts_is_an_interruption(
    made: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has not begun to train cannot save, and ends with the signal's own code."""

    def interrupted(job: Job, signals: Any, *, quiet: bool) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: signals.received, "the main thread has received the signal")
        return 128 + signal.SIGINT

    monkeypatch.setattr(processes, "_run", interrupted)
    assert compare.main(["model.fp8=True", "--out", "out"]) == 75
    assert not Path("out/report.html").exists()


def test_no_run_starts_after_an_error(made: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def fail(job: Job, signals: Any, *, quiet: bool) -> int:
        started.append(job)
        raise RunError("the disk is full")

    monkeypatch.setattr(processes, "_run", fail)
    jobs = [Job(num, (), Path(f"out/{num}")) for num in range(3)]
    with pytest.raises(RunError, match="the disk is full"):
        processes.run_all(jobs, at_once=1)
    assert started == jobs[:1]


def test_a_mistake_is_no_verdict(
    made: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["model.fp8=True", "--out", "out"]) == 0
    monkeypatch.setattr(
        processes, "_run", lambda job, signals, *, quiet: 2 * (job.label == "given")
    )
    assert compare.main(["model.fp8=True", "--out", "out"]) == 2
    assert "the configuration's run ended with exit code 2" in capsys.readouterr().err


def test_what_is_refused(made: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["trainer.max_steps=5"]) == 2
    assert "the configuration is its own baseline" in capsys.readouterr().err
    assert compare.main(["--seeds", "1", "2", "model.fp8=True"]) == 2
    assert "Settings stand before --seeds, not after it" in capsys.readouterr().err
    assert compare.main(["model.fp8=True", "model.hidden_size=101"]) == 2
    assert "model.hidden_size=101" in capsys.readouterr().err
    for of_one_run in (
        "exp_manager.exp_dir=x",
        "exp_manager.name=x",
        "+exp_manager.explicit_log_dir=x",
    ):
        assert compare.main(["model.fp8=True", of_one_run]) == 2
        assert "Set the comparison's with --out DIR" in capsys.readouterr().err
    for of_a_seed in (["model.seed=3"], ["++model.seed=3"], ["--base", "model.seed=3"]):
        assert compare.main(["model.fp8=True", *of_a_seed, "--seeds", "1", "2"]) == 2
        assert "model.seed=3 (command line): has no effect with --seeds" in capsys.readouterr().err
    assert not made and not list(Path().iterdir())
    given = ["model.fp8=True", "model.fp8_recipe=tensorwise"]
    assert compare.main([*given, "--base", "model.fp8=True"]) == 2
    assert "--base model.fp8_recipe=delayed" in capsys.readouterr().err


def test_two_configurations_in_fp8_are_both_measured(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["model.fp8=True", "model.fp8_recipe=tensorwise", "--out", "out",
            "--base", "model.fp8_recipe=delayed"]  # fmt: skip
    assert compare.main(argv) == 0
    assert all("model.fp8_health=full" in job.overrides for job in made)
    for job, snr in zip(made, (21.0, 25.0), strict=True):
        shutil.rmtree(job.directory)
        make_run(job.directory, model__fp8_health="full")
        file = job.directory / "health.jsonl"
        file.write_text(file.read_text().replace("25.0", str(snr)))
    assert compare.main(argv) == 0
    said = capsys.readouterr().out
    assert "measure FP8 health" not in said
    (only,) = json.loads(Path("out/compare.json").read_text())["configurations"]
    weakest = only["weakest_tensors"]
    assert all((s["snr_db"], s["snr_db_of_baseline"]) == (25.0, 21.0) for s in weakest)
    assert "<td class=number data-value=21.0>21.0" in Path("out/report.html").read_text()


def test_one_side_in_fp8_says_that_its_time_includes_measuring() -> None:
    def run(**config: Any) -> RunRecord:
        return RunRecord(path=Path("x"), status="finished", config=config,
                         events=[{"kind": "start"}], summary={"wall_seconds": 9.0})  # fmt: skip

    full = {"model.fp8": True, "model.fp8_health": "full"}
    costs = costs_of([Pair(1, run(), run(**full))])
    assert ("note", "logged steps of the configuration alone also measure FP8 health, which its "
            "time includes") in costs  # fmt: skip
    assert not any(what == "note" for what, _ in costs_of([Pair(1, run(**full), run(**full))]))


def test_a_run_is_shown_without_how_to_continue_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [b"step 5/5 | loss 2.0\n", b"\n", b"  continue with  python pretrain_gpt.py x=1\n",
             b"         beware  it prolongs\n", b"time  0:07\n"]  # fmt: skip
    processes._show(lines)
    assert capsys.readouterr().out.splitlines() == ["  step 5/5 | loss 2.0", "", "  time  0:07"]


# ---- schedules of precision

FP8, BIG = "model.fp8=True", ["model.hidden_size=4096", "model.ffn_hidden_size=16384",
       "model.num_attention_heads=32", "model.encoder_seq_length=2048", "trainer.max_steps=100",
       "model.optim.lr=1e-4"]  # fmt: skip


def planned_seconds(capsys: pytest.CaptureFixture[str], *settings: str) -> float:
    """The time of the job by `megafp8 plan`."""
    plan.main([*BIG, *settings, "--json"])
    return float(json.loads(capsys.readouterr().out)["days"]) * 86400


@pytest.mark.parametrize("hardware", ["h100", "h200"])
def test_the_time_of_a_switch_is_predicted_as_the_plan_predicts_it(
    made: list[Job], capsys: pytest.CaptureFixture[str], hardware: str
) -> None:
    schedule = "model.precision_schedule=[{from: 0.25, recipe: bf16}]"
    given = [] if hardware == "h100" else ["hardware=h200"]
    fp8 = planned_seconds(capsys, FP8, *given)
    switched = planned_seconds(capsys, FP8, schedule, *given)
    bf16 = planned_seconds(capsys, "model.fp8=False", *given)
    assert switched == pytest.approx(0.25 * fp8 + 0.75 * bf16) and switched > 1.1 * fp8
    argv = [FP8, *BIG, schedule, *given, "--out", "out", "--base", "model.precision_schedule=[]"]
    compare.main(argv)
    said = capsys.readouterr().out
    assert f"predicted time: {switched / fp8:.2f} of the baseline's (" in said
    assert f"{hardware.upper()} S" in said
    (only,) = json.loads(Path("out/compare.json").read_text())["configurations"]
    assert only["costs"]["predicted time"] in said
    assert only["costs"]["predicted time"] in html.unescape(Path("out/report.html").read_text())


def test_a_time_is_not_predicted_where_the_plan_does_not(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    fp4 = [
        FP8,
        *BIG,
        "model.fp8_recipe=nvfp4",
        "model.precision_schedule=[{from: 9, recipe: bf16}]",
    ]
    compare.main([*fp4, "--out", "a", "--base", "model.precision_schedule=[]"])
    assert "predicted time: none (nvfp4: " in capsys.readouterr().out
    compare.main([FP8, *BIG, "--out", "b"])
    assert "predicted time" not in capsys.readouterr().out
    compare.main([FP8, *BIG, "--out", "b", "hardware=h200"])
    assert "predicted time: 0." in capsys.readouterr().out
    assert compare.main([FP8, *BIG, "hardware=h2000"]) == 2


def test_schedules_have_names_of_their_own(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    several = ("model.precision_schedule=[],[{from: 0.5, products: forward, recipe: bf16}],"
               "[{from: 9, modules: '*.fc2', recipe: mxfp8}]")  # fmt: skip
    compare.main(["model.fp8=True", several, "--out", "out"])
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert names == [
        "no change of precision",
        "output of all linears in high precision from 0.5",
        "*.fc2 in mxfp8 from 9",
    ]
    assert [job.label for job in made][1:] == [
        "given",
        "from-0.5-products-forward-recipe-bf16",
        "from-9-modules-.fc2-recipe-mxfp8",
    ]


# ---- several configurations

ONE = """
from megafp8.fp8 import ROW, Recipe, Traits, alike

class One(Recipe):
    traits = Traits(input=alike(ROW), weight=alike(ROW), grad_output=alike(ROW), is_simulated=True)
    def cast(self, x_MK, cast):
        return x_MK
"""
SEVERAL = ["model.fp8=True", "model.fp8_recipe=delayed,lab.py:One,tensorwise"]


def set_loss(label: str, seed: int, loss: float) -> None:
    file = Path(f"out/{label}-{seed}/summary.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "val_loss": loss}))


def test_several_recipes_have_one_baseline_and_one_table(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lab.py").write_text(ONE)
    argv = [*SEVERAL, "--seeds", "1", "2", "--out", "out"]
    assert compare.main(argv) == 0
    labels = ["baseline", "delayed", "One", "tensorwise"]
    assert [(job.label, job.seed) for job in made] == [(n, s) for s in (1, 2) for n in labels]
    assert [job.overrides[1].replace("\\:", ":") for job in made[1:4]] == [
        f"model.fp8_recipe={name}" for name in ("delayed", "lab.py:One", "tensorwise")
    ]
    capsys.readouterr()
    for seed, loss in ((1, 2.2346 * 1.02), (2, 2.2345 * 1.0204)):
        set_loss("One", seed, loss)
    set_loss("tensorwise", 1, 2.27)
    assert compare.main(argv) == compare.WORSE
    said = capsys.readouterr().out
    assert "verdict: worse: the validation loss of simulated One (lab.py) is 2.02 % higher" in said
    assert [line.split("  ")[0] for line in said.splitlines()[-4:]] == [
        "configuration", "FP8 delayed", "simulated One (lab.py)", "FP8 tensorwise",
    ]  # fmt: skip
    rows = [[c for c in line.split("  ") if c] for line in said.splitlines()[-3:]]
    assert [row[1].strip() for row in rows] == ["same", "worse", "undecided"]
    # Student's t with one degree of freedom: 12.706 times half of the difference of two gaps.
    first, second = (100 * (loss / 2.2345 - 1) for loss in (2.2346 * 1.02, 2.2345 * 1.0204))
    mean, half = (first + second) / 2, 12.706 * abs(first - second) / 2
    assert rows[1][3].strip() == f"{mean - half:+.2f} to {mean + half:+.2f} %"
    result = json.loads(Path("out/compare.json").read_text())
    assert result["verdict"] == "worse" and len(result["runs"]) == 8
    assert [c["verdict"] for c in result["configurations"]] == ["same", "worse", "undecided"]
    page = Path("out/report.html").read_text()
    assert "<td>simulated One (lab.py)<td>worse" in page and "BF16, seed 2" in page
    assert "training loss over BF16, mean of the seeds, %" in page
    assert "3 configurations against BF16" in page
    assert page.index("<h2>Curves") < page.index("<h2>FP8 delayed"), "details follow the plots"
    assert page.index("class='verdict worse'") < page.index("<h2>Curves"), "verdicts come first"


def test_the_word_on_several_is_the_worst() -> None:
    def of(word: str) -> Outcome:
        return Outcome(name="", base_name="", word=word, sentence="", verdict=None, pairs=(),
                       differs=(), signals={}, of_base={})  # fmt: skip

    for words, word in (("same better", "same"), ("same undecided", "undecided"),
                        ("worse undecided better", "worse"), ("better", "better")):  # fmt: skip
        assert worst([of(w) for w in words.split()]) == word


def test_another_rule_in_the_same_file_is_another_configuration(
    made: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the runs of the rule before would be shown as those of the new one."""
    Path("lab.py").write_text(ONE)
    argv = ["model.fp8=True", "model.fp8_recipe=lab.py:One", "--out", "out"]
    assert compare.main(argv) == compare.main(argv) == 0
    Path("lab.py").write_text(ONE.replace("return x_MK", "return x_MK / 2"))
    assert compare.main(argv) == 2
    assert "out: has runs of other configurations" in capsys.readouterr().err


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_rule_that_changes_while_runs_train_ends_the_comparison(
    is_deleted: bool,
    made: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path("lab.py")
    file.write_text(ONE)
    run = processes._run

    def run_and_edit(job: Job, signals: object, *, quiet: bool) -> int:
        file.write_text(ONE.replace("return x_MK", "return x_MK / 2"))
        if is_deleted:
            file.unlink()
        return run(job, signals, quiet=quiet)

    monkeypatch.setattr(processes, "_run", run_and_edit)
    assert compare.main(["model.fp8=True", "model.fp8_recipe=lab.py:One", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert ("lab.py: cannot be read any more" in said) == is_deleted
    assert ("lab.py:One: its file changed after the comparison" in said) != is_deleted
    assert [job.label for job in made] == ["baseline"]


def test_a_file_that_names_a_recipe_is_trusted_by_the_command_line_alone(
    made: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.py").write_text(ONE)
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [pretrain_gpt, _self_]\nmodel: {{fp8: true, fp8_recipe: {tmp_path}/lab.py}}\n"
    )
    argv = ["--config-dir", str(tmp_path), "--config-name", "mine", "--out", "out"]
    assert compare.main(argv) == 2 and not made
    assert "--trust-recipe" in capsys.readouterr().err
    assert compare.main([*argv, "--trust-recipe"]) == 0
    assert all("--trust-recipe" in job.overrides for job in made) and len(made) == 2


REFUSED = {
    "trainer.max_steps: the baseline would have 5 and 6": ["trainer.max_steps=5,6"],
    "model.fp8_margin=1,2,1": ["model.fp8_margin=1,2,1"],
    "is its own baseline. Give another --base, such as --base model.fp8_recipe=tensorwise": [
        "model.fp8_recipe=delayed,rowwise", "--base", "model.fp8_recipe=delayed",
    ],
    "model.fp8_margn=1,2 (command line)": ["model.fp8_margn=1,2"],
    "model.fp8_recipe=none.py:One": ["model.fp8_recipe=delayed,none.py:One"],
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_of_several(
    words: str, made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["model.fp8=True", *REFUSED[words]]) == 2
    said = capsys.readouterr().err
    assert words.replace("model.fp8_margin=1,2,1", "model.fp8_margin=1 is given twice") in said
    assert not made and not list(Path().iterdir())


def test_of_a_key_given_twice_the_last_value_is_compared(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["model.fp8=True", "model.seed=1", "+model.seed=2", "--out", "out"]
    assert compare.main([*argv, "--base", "model.fp8=True", "model.fp8=False"]) == 0
    assert all("model.seed=2" in job.overrides for job in made) and len(made) == 2
    assert not any("model.seed=1" in job.overrides for job in made)
    lines = [line for line in capsys.readouterr().out.splitlines() if "given twice" in line]
    assert [line.partition(" (")[0] for line in lines] == [
        "given twice: model.seed=1", "given twice: model.fp8=True",
    ]  # fmt: skip


def test_configurations_of_one_recipe_are_named_by_what_differs(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["model.fp8=True", "model.fp8_margin=0,1", "--out", "out"]
    assert compare.main(argv) == 0
    assert [job.label for job in made] == ["baseline", "0", "1"]
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        "fp8_margin=0", "fp8_margin=1",
    ]  # fmt: skip


NAMED: dict[str, tuple[list[str], list[str]]] = {
    "modules": (
        ["model.fp8_recipe=nvfp4", "model.fp8_amax_history_len=1024",
         "model.fp8_modules=[],['layers.0.*:high_precision'],['layers.1.*:high_precision']"],
        ["fp8_modules=[]", "fp8_modules=['layers.0.*:high_precision']",
         "fp8_modules=['layers.1.*:high_precision']"],
    ),
    "numbers with a dot": (
        ["model.hidden_dropout=0.1,0.2", "--base", "model.fp8=False", "model.hidden_dropout=0.1"],
        ["hidden_dropout=0.1", "hidden_dropout=0.2"],
    ),
    "recipes of one name": (
        ["model.fp8_recipe=a/lab.py:One,b/lab.py:One,b/lab.py:Two"],
        [f"model.fp8_recipe={name}" for name in ("a/lab.py:One", "b/lab.py:One", "b/lab.py:Two")],
    ),
    "rules beside another recipe": (
        ["model.fp8_modules=['*.fc2:high_precision','*.fc1:mxfp8','*.qkv:mxfp8']",
         "model.fp8_recipe=mxfp8,blockwise", "--base", "model.fp8=False"],
        [f"FP8 {name} with *.fc2 in high_precision, *.fc1 in mxfp8, 1 rule more"
         for name in ("mxfp8", "blockwise")],
    ),
    "quoted": (
        ["exp_manager.wandb_logger_kwargs.group=3.10,'3.1'",
         "exp_manager.create_wandb_logger=True", "exp_manager.wandb_logger_kwargs.project=p",
         "--base", "model.fp8=False", "exp_manager.wandb_logger_kwargs.group=x"],
        ["exp_manager.wandb_logger_kwargs.group=3.10", "exp_manager.wandb_logger_kwargs.group=3.1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMED)
def test_rows_of_different_configurations_have_different_names(
    kind: str, made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """`[…:high_precision]` was named by what follows its last colon, which several have."""
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "lab.py").write_text(ONE + ONE.replace("One", "Two"))
    given, names = NAMED[kind]
    assert compare.main(["model.fp8=True", *given, "--out", "out"]) == 0
    said = capsys.readouterr().out.splitlines()[-len(names) :]
    assert [line.split("  ")[0] for line in said] == names
    labels = [job.label for job in made]
    assert len(set(labels)) == len(labels) == len(names) + 1
    page = Path("out/report.html").read_text()
    assert all(html.escape(name) in page for name in names)


def test_a_run_that_another_process_trains_is_no_mistake(
    made: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Correct that first` was said of a run that only went on after its comparison was ended."""
    held = Path("out/given-1234")
    held.mkdir(parents=True)
    given = ["model.fp8=True", "model.seed=1234", "--out", "out"]
    with RunLock.acquire(held):
        assert compare.main(given) == 2 and not made
    said = capsys.readouterr().err
    assert f"{held} is in use by process {os.getpid()} on " in said and "the same command" in said
    assert "Correct" not in said
    with monkeypatch.context() as patch:  # the other process begins after the look

        def run(job: Job, signals: object, *, quiet: bool) -> int:
            locks.append(RunLock.acquire(held)) if job.label == "given" else None
            return 2 * (job.label == "given")

        locks: list[RunLock] = []
        patch.setattr(processes, "_run", run)
        assert compare.main(given) == 2
        locks[0].release()
    said = capsys.readouterr().err
    assert f"{held} is in use by process {os.getpid()} on " in said and "Correct" not in said


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "lab.py:One"])
def test_the_hint_names_a_recipe_with_other_traits(
    recipe: str, made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lab.py").write_text(ONE)
    given = ["model.fp8=True", f"model.fp8_recipe={recipe}"]
    assert compare.main([*given, "--base", f"model.fp8_recipe={recipe}"]) == 2
    other = "tensorwise" if recipe == "delayed" else "delayed"
    assert f"such as --base model.fp8_recipe={other}" in capsys.readouterr().err


def test_presets_of_ones_own_stand_for_settings_that_exclude_each_other(
    made: list[Job], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "precision").mkdir(parents=True)
    (tmp_path / "mine" / "precision" / "delayed_margin2.yaml").write_text(
        "# @package _global_\nmodel: {fp8: true, fp8_recipe: delayed, fp8_margin: 2}\n"
    )
    spec = run_spec("precision=delayed_margin2", config_dir=tmp_path / "mine")
    assert spec.precision.fp8 is not None and spec.precision.fp8.margin == 2
    with pytest.raises(SettingError, match="fp8_margin"):
        run_spec("model.fp8=True", "model.fp8_recipe=tensorwise", "model.fp8_margin=2")


# ---- one part at a time in high precision

TWO_LAYERS = [FP8, "model.num_layers=2"]


def test_a_seed_that_is_given_twice_is_refused(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["model.fp8=True", "--seeds", "1", "2", "1", "--out", "out"]) == 2
    assert not made and "--seeds=1 2 1" in (said := capsys.readouterr().err)
    assert "has a seed twice" in said


@pytest.mark.parametrize(
    "rules",
    [
        "['*.fc2:rowwise','layers.0.mlp.fc1:high_precision']",
        "['layers.0.mlp.fc1:rowwise','layers.0.*:high_precision']",  # as the layer's own rule says
    ],
)
def test_each_layer_stays_in_high_precision_once(made: list[Job], rules: str) -> None:
    rules = f"model.fp8_modules={rules}"
    assert compare.main([*TWO_LAYERS, rules, "--each-layer", "--out", "out"]) == 0
    assert [job.label for job in made] == ["baseline", "given", "high-layers.0", "high-layers.1"]
    _, given, first, second = (run_spec(*job.overrides).precision.fp8 for job in made)
    assert given is not None and first is not None and second is not None
    for recipe, high in ((first, "layers.0."), (second, "layers.1.")):
        for name in linear_names(range(2)):
            kept = given.precision_of(name) if not name.startswith(high) else "high_precision"
            assert recipe.precision_of(name) == kept, name


def test_each_part_is_the_only_one_in_fp8(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    rules = "model.fp8_modules=['*.fc2:rowwise','layers.0.mlp.fc1:high_precision']"
    argv = [*TWO_LAYERS, rules, "--each-layer", "--alone", "--seeds", "1", "2", "--out", "out"]
    assert compare.main(argv) == 0
    given, *only = (run_spec(*job.overrides).precision.fp8 for job in made if job.seed == 1
                    and (job.label == "given" or job.label.startswith("only-")))  # fmt: skip
    assert given is not None and len(only) == 2
    for recipe, kept in zip(only, ("layers.0.", "layers.1."), strict=True):
        assert recipe is not None
        for name in linear_names(range(2)):
            own = given.precision_of(name) if name.startswith(kept) else "high_precision"
            assert recipe.precision_of(name) == own, name
    set_losses({"baseline": [2.0, 2.0], "only-layers.1": [2.02, 2.04]})
    compare.main(argv)
    row = next(
        line for line in capsys.readouterr().out.splitlines()[::-1] if "layers.1.*  " in line
    )
    assert row.split("  ")[-1].startswith("+1.50 % (")
    parts = json.loads(Path("out/compare.json").read_text())["parts"]
    alone = {part["part"]: part["alone"]["mean"] for part in parts}
    assert alone["layers.1.*"] == pytest.approx(0.015)
    assert "gap with it alone in FP8" in Path("out/report.html").read_text()
    products = [*TWO_LAYERS, "--each", "product", "--alone", "--out", "products"]
    made.clear()
    compare.main(products)
    found = (run_spec(*job.overrides).precision.fp8 for job in made if "only" in job.label)
    assert [recipe and recipe.high_precision_gemms for recipe in found] == [
        set(GEMMS) - {name} for name in GEMMS
    ]


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["model.fp8_modules=['*.attention.*:high_precision']", "--each", "linear"],
         [f"layers.{n}.mlp.fc{i}" for n in (0, 1) for i in (1, 2)]),
        (["model.override_linear_precision=[False,False,True]", "--each", "product"],
         ["output", "grad_input"]),
        (["model.num_moe_experts=4", "model.bias=False", "--each", "linear"],
         [f"layers.{n}.{name}" for n in (0, 1) for name in (
             "attention.qkv", "attention.projection", "mlp.experts.*.fc1", "mlp.experts.*.fc2")]),
    ],
)  # fmt: skip
def test_a_part_that_is_in_high_precision_anyway_is_left_out(
    more: list[str], parts: list[str], made: list[Job]
) -> None:
    assert compare.main([*TWO_LAYERS, *more, "--out", "out"]) == 0
    result = json.loads(Path("out/compare.json").read_text())
    assert sorted(part["part"] for part in result["parts"]) == sorted(parts)
    for part, job in zip(parts, made[2:], strict=True):
        fp8 = run_spec(*job.overrides).precision.fp8
        assert fp8 is not None
        if part in GEMMS:
            assert fp8.high_precision_gemms == {part, "grad_weight"}
        else:
            high = [n for n in fp8.modules if n.precision == "high_precision"]
            assert high[0].pattern == part


def set_losses(losses: dict[str, list[float]]) -> None:
    for label, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds, start=1):
            set_loss(label, seed, loss)


def test_parts_are_ranked_by_what_the_loss_gains(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TWO_LAYERS, "--each-layer", "--seeds", "1", "2", "3", "--out", "out"]
    assert compare.main(argv) == 0
    set_losses({
        "baseline": [2.0, 2.1, 2.2], "given": [2.2, 2.3, 2.4],
        "high-layers.0": [2.19, 2.3, 2.41], "high-layers.1": [2.02, 2.12, 2.22],
    })  # fmt: skip
    for label, share in (("given", 0.8), ("high-layers.0", 0.5), ("high-layers.1", 0.4)):
        for seed in (1, 2, 3):
            file = Path(f"out/{label}-{seed}/summary.json")
            summary = json.loads(file.read_text())
            file.write_text(json.dumps({**summary, "fp8_share_of_gemm_flops": share}))
    capsys.readouterr()
    assert compare.main(argv) == compare.WORSE
    said = capsys.readouterr().out
    first, second = json.loads(Path("out/compare.json").read_text())["parts"]
    assert (first["part"], second["part"]) == ("layers.1.*", "layers.0.*")
    gains = [2.02 / 2.2 - 1, 2.12 / 2.3 - 1, 2.22 / 2.4 - 1]
    assert list(first["figures"]["gaps"].values()) == pytest.approx(gains)
    assert first["gap_to_baseline"] == pytest.approx((0.02 / 2 + 0.02 / 2.1 + 0.02 / 2.2) / 3)
    assert (first["flops"], second["flops"]) == pytest.approx((0.4, 0.3))
    row = next(line for line in said.splitlines() if line.startswith("layers.1.*"))
    assert re.split(" {2,}", row)[1] == f"{-100 * sum(gains) / 3:+.2f} %"
    advice = "model.fp8_modules=['layers.1.*:high_precision']"
    assert said.splitlines()[-1] == advice and "with layers.1.* in high precision:" in said
    page = html.unescape(Path("out/report.html").read_text())
    assert advice in page and page.index("gains with a part") < page.index("<h2>Curves")


def test_the_ranking_says_how_many_seeds_would_decide(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TWO_LAYERS, "--each-layer", "--out", "out", "--seeds"]
    compare.main([*argv, "1"])
    assert "one seed cannot tell a gain from chance" in capsys.readouterr().out
    compare.main([*argv, "1", "2", "3"])
    gaps = [-0.01, -0.02, 0.003]
    set_losses({"given": [2.0] * 3, "high-layers.1": [2.0 * (1 + gap) for gap in gaps]})
    compare.main([*argv, "1", "2", "3"])
    # Of n seeds, half of the interval is Student's t times the deviation over the root of n.
    deviation, mean = statistics.stdev(gaps), -statistics.fmean(gaps)
    enough = next(n for n in range(4, 99) if STUDENT[n - 2] * deviation / n**0.5 <= mean)
    said = capsys.readouterr().out.splitlines()[-1]
    assert f"about {enough} seeds would decide whether the loss gains {100 * mean:.2f} %" in said
    set_losses({"high-layers.1": [2.0 - 8e-5, 2.0, 2.0]})  # a gain of 0.001 %, with an interval
    compare.main([*argv, "1", "2", "3"])
    assert "the loss gains with no part in high precision" in capsys.readouterr().out


def test_how_many_seeds_would_decide_is_said_in_advance(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TWO_LAYERS, "--each-layer", "--out", "out", "--seeds"]
    compare.main([*argv, "1", "2"])
    assert "in advance" not in capsys.readouterr().out, "all runs of two seeds have just ended"
    gains = [-0.02, 0.01]
    set_losses({"given": [2.0] * 2, "high-layers.1": [2.0 * (1 + gain) for gain in gains]})
    made.clear()
    compare.main([*argv, "1", "2", "3", "4"])
    said = capsys.readouterr().out
    # Of n seeds, half of the interval is Student's t times the deviation over the root of n.
    points = (*STUDENT, *[STUDENT[-1]] * 190)
    ratio = statistics.stdev(gains) / 0.005
    enough = next(n for n in range(2, 200) if points[n - 2] * ratio <= n**0.5)
    assert said.count("in advance") == 1 and said.index("in advance") < said.index("result")
    assert (
        f"in advance: by the spread of seed 1, seed 2, about {enough} seeds would decide 0.5 % "
        "(layers.1.*); 4 are given" in said
    )
    shutil.rmtree("out")
    compare.main([*argv, "1", "2", "3"])
    assert "about 2 seeds would decide 0.5 %" in capsys.readouterr().out, "after the second seed"


def test_parts_are_ranked_where_the_recipe_alone_does_not_finish(
    made: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TWO_LAYERS, "--each-layer", "--out", "out", "--seeds", "1"]
    compare.main(argv)
    for label in ("given", "high-layers.1"):
        (record := Path(f"out/{label}-1/run.json")).write_text(
            json.dumps({**json.loads(record.read_text()), "status": "diverged"})
        )
    capsys.readouterr()
    compare.main(argv)
    said = capsys.readouterr().out
    assert "did not finish" in said and "it does with any of layers.0.* in high" in said
    assert said.splitlines()[-1] == "model.fp8_modules=['layers.0.*:high_precision']"


def test_what_each_refuses(made: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    several = ["model.fp8=True", "model.fp8_margin=0,1", "--each-layer"]
    none = ["model.optim.lr=1e-4", "--base", "model.optim.lr=1e-3", "--each", "layer"]
    alone = ["model.fp8=True", "--alone"]
    for argv, words in ((several, "there are several"), (none, "Give model.fp8=True"),
                        (alone, "no effect without --each")):  # fmt: skip
        assert compare.main(argv) == 2 and not made
        assert words in capsys.readouterr().err
