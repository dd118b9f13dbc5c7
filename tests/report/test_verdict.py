"""Verdicts on pairs of runs follow from their losses."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megafp8.cli import compare
from megafp8.cli.help import GROUPS, keys_of_group
from megafp8.report.record import RunRecord
from megafp8.report.verdict import (
    STUDENT,
    Pair,
    averaged_gap,
    gaps_of,
    judge,
    ratio,
    weakest_tensors,
)
from tests.config.helpers import run_spec
from tests.report.made import loss_at, make_run

NAMES = ("BF16", "FP8 delayed")


def record(
    gap: float = 0.0, *, val_loss: float | None = 2.0, path: str = "x", from_step: int = 1
) -> RunRecord:
    """Return a run whose losses are `gap` above the baseline's, relatively, from a step on."""
    metrics = [
        {"step": s, "loss": loss_at(s) * (1 + gap * (s >= from_step))} for s in range(1, 101)
    ]
    validations = [] if val_loss is None else [{"step": 100, "val_loss": val_loss * (1 + gap)}]
    return RunRecord(path=Path(path), status="finished", metrics=metrics, validations=validations)


def pairs(gaps: Sequence[float], **more: Any) -> list[Pair]:
    return [Pair(seed, record(**more), record(gap, **more)) for seed, gap in enumerate(gaps)]


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ([0.004], "same"),
        ([0.0], "same"),
        ([0.006], "worse"),
        ([-0.006], "better"),
        ([math.nan], "worse"),
        ([math.inf], "worse"),
        ([0.001, 0.0012, 0.0011], "same"),
        ([0.010, 0.0101, 0.0102], "worse"),
        ([-0.010, -0.0101, -0.0102], "better"),
        ([0.001, 0.009, 0.004], "undecided"),
        ([0.0008, 0.0007, 0.0042], "undecided"),  # an earlier job: ± 0.49 %
    ],
)
def test_the_word_follows_from_the_interval_of_the_gap(gaps: list[float], word: str) -> None:
    verdict = judge(pairs(gaps), 0.005, NAMES)
    assert verdict.word == word and verdict.sentence.startswith(f"{word}: FP8 delayed has ")
    if len(gaps) > 1:
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        assert verdict.half_width == pytest.approx(STUDENT[len(gaps) - 2] * error)
    else:
        assert "more seeds" in verdict.sentence


@pytest.mark.parametrize(
    ("last", "word", "said"),
    [
        (8.0, "undecided", "the training loss of BF16 fell by 0.00 %, too little to compare"),
        (8.0 / 1.009, "undecided", "fell by 0.90 %"),  # half of it is within 0.5 %
        (8.0 / 0.998, "undecided", "the training loss of BF16 rose by 0.20 %, too little"),
        (8.0 / 1.011, "same", ""),
        (math.nan, "undecided", "is not known"),
    ],
)
def test_a_baseline_that_hardly_learned_tells_nothing(last: float, word: str, said: str) -> None:
    found = pairs([0.0])
    for run in (found[0].base, found[0].other):
        for line in run.metrics:
            line["loss"] = 8.0 if line["step"] == 1 else last  # type: ignore[index]
    verdict = judge(found, 0.005, NAMES)
    assert verdict.word == word and said in verdict.sentence
    assert ("train longer" in verdict.sentence) == bool(said)
    worse = pairs([0.02])  # what differs does so, however little the baseline learned
    worse[0].base.metrics[:] = worse[0].base.metrics[:1]  # type: ignore[index]
    verdict = judge(worse, 0.005, NAMES)
    assert verdict.word == "worse" and "too little" not in verdict.sentence
    assert "so BF16 hardly learned: train longer" in verdict.sentence


def with_losses(losses: Sequence[float]) -> list[Pair]:
    found = pairs([0.0])
    for run in (found[0].base, found[0].other):
        run.metrics[:] = [{"step": s, "loss": loss} for s, loss in enumerate(losses, start=1)]  # type: ignore[index]
    return found


def test_a_fall_that_scatter_explains_is_not_learned() -> None:
    """A run with a learning rate of 1e-12 logged these losses, in another order."""
    scattered = [8.3681, 8.3120, 8.2843, 8.3550, 8.3630, 8.3043, 8.3609, 8.3460, 8.2559]
    verdict = judge(with_losses(scattered), 0.005, NAMES)
    assert verdict.learned > 0.013 and verdict.word == "undecided"
    assert "fell by 1.36 %, which its scatter from step to step explains" in verdict.sentence
    learned = [loss - 0.1 * step for step, loss in enumerate(scattered)]
    assert judge(with_losses(learned), 0.005, NAMES).word == "same"


@pytest.mark.parametrize(("logged", "word"), [(2, "undecided"), (4, "undecided"), (5, "same")])
def test_few_logged_steps_tell_nothing(logged: int, word: str) -> None:
    """An even fall by n - 1 differences d has a half width of t(n - 1) d: 3.18 d and 2.78 d."""
    even = [8.0 - 0.5 * step for step in range(logged)]
    assert judge(with_losses(even), 0.005, NAMES).word == word


def test_the_scatter_is_that_of_a_fall_without_learning() -> None:
    """Of 2000 runs whose losses only scatter, at most 2.5 % and three deviations fall so far."""
    draw = random.Random(1)
    runs = [[8.0 + draw.gauss(0.0, 0.5) for _ in range(9)] for _ in range(2000)]
    told = sum(judge(with_losses(losses), 0.0, NAMES).word == "same" for losses in runs)
    assert told / 2000 < 0.025 + 3 * math.sqrt(0.025 * 0.975 / 2000)


def test_the_least_that_any_seed_learned_counts() -> None:
    found = pairs([0.0, 0.0])
    found[1].base.metrics[:] = found[1].base.metrics[:1]  # type: ignore[index]
    assert judge(found, 0.005, NAMES).word == "undecided"


def test_students_t_is_that_of_the_tables() -> None:
    """The density of t, integrated by Simpson's rule from 0, gives 0.475 at each point."""
    for n, value in enumerate(STUDENT, start=1):
        scale = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
        width = value / 2000
        heights = [(1 + (i * width) ** 2 / n) ** (-(n + 1) / 2) for i in range(2001)]
        total = heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2])
        assert scale * total * width / 3 == pytest.approx(0.475, abs=3e-5)


def test_without_validation_the_training_loss_counts() -> None:
    verdict = judge(pairs([0.01], val_loss=None), 0.005, NAMES)
    assert verdict.measured == "training loss" and verdict.mean == pytest.approx(0.01)


def test_where_curves_part() -> None:
    same = judge(pairs([0.0]), 0.005, NAMES)
    assert (same.first_difference, same.parts_at) == (None, None)
    assert same.largest is not None and same.largest[1] == 0.0
    parted = judge(pairs([0.02], from_step=41), 0.005, NAMES)
    assert parted.first_difference == 41
    # The mean of 5 steps is above 0.5 % as soon as two of them are 2 % higher.
    assert parted.parts_at == 42 and parted.largest == (45, pytest.approx(0.02))
    back = [Pair(0, record(), record(0.02))]
    back[0].other.metrics[-1]["loss"] = loss_at(100)  # type: ignore[index]
    assert judge(back, 0.019, NAMES).parts_at is None  # it ends within the tolerance


def test_gaps_are_of_steps_that_both_logged() -> None:
    base, other = record(), record(0.5)
    other.metrics[:3] = []  # type: ignore[index]
    other.metrics[-1]["loss"] = math.nan  # type: ignore[index]
    steps, gaps = gaps_of(Pair(0, base, other))
    assert steps == list(range(4, 101)) and gaps[0] == pytest.approx(0.5) and math.isnan(gaps[-1])
    assert averaged_gap([Pair(0, base, other)])[-1][0] == 99


def test_the_weakest_tensors() -> None:
    def line(snr: float) -> dict[str, Any]:
        return {"step": 1, "tensors": {"a": {"snr_db": snr, "underflow": 0.5}, "b": {"amax": 1.0},
                                       "c": {"snr_db": 30.0, "overflow": math.nan}}}  # fmt: skip

    run = RunRecord(path=Path("x"), status="finished", health=[line(9.0)] * 6 + [line(20.0)] * 2)
    assert [(s.name, s.snr_db, s.underflow) for s in weakest_tensors(run)] == [
        ("a", 20.0, 0.5),
        ("c", 30.0, 0.0),
    ]
    assert weakest_tensors(record()) == []


def test_times_count_only_if_no_run_was_interrupted() -> None:
    start = {"kind": "start"}
    base = RunRecord(path=Path("a"), status="finished", events=[start],
                     summary={"wall_seconds": 10.0, "peak_memory_bytes": 100})  # fmt: skip
    other = RunRecord(path=Path("b"), status="finished", events=[start],
                      summary={"wall_seconds": 15.0, "peak_memory_bytes": 80})  # fmt: skip
    assert ratio([Pair(0, base, other)], "wall_seconds") == 1.5
    assert ratio([Pair(0, base, other)], "peak_memory_bytes") == 0.8
    twice = RunRecord(
        path=Path("b"), status="finished", events=[start, start], summary=other.summary
    )
    assert ratio([Pair(0, base, twice)], "wall_seconds") is None


# ---- the command


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[compare.Job]:
    """Let the command make its runs without training; return the jobs that it ran."""
    monkeypatch.chdir(tmp_path)
    jobs: list[compare.Job] = []

    def run(job: compare.Job, *, quiet: bool) -> int:
        jobs.append(job)
        if not job.directory.exists():
            fp8 = job.label == "given"
            make_run(job.directory, model__fp8=fp8, model__seed=job.seed)
        return 0

    monkeypatch.setattr(compare, "_run", run)
    return jobs


def test_the_baseline_has_nothing_of_fp8(made: list[compare.Job]) -> None:
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


FEW_BITS = {
    "fp8_opt_level": "O2",
    "main_grads_dtype": "fp8",
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "fp8",
    "exp_avg_sq_dtype": "fp16",
    "low_precision_moments_of": "linears",
    "moments_scaling": "group",
    "main_grads_sum_dtype": "fp32",
    "fp8_grad_reduction": "auto",
    "data_parallel_sharding_strategy": "optim_grads",
    "shard_by": "elements",
    "stochastic_rounding": "True",
}
"""For each key of FP8-LM another value than its default."""
PLAIN = ["trainer.devices=2", "model.optim.name=distributed_fused_adam"]


def test_all_keys_of_fp8_lm_are_tried() -> None:
    (group,) = [group for group in GROUPS if group.title.startswith("States in few bits")]
    assert {key.path for key in keys_of_group(group)} == {f"model.optim.{key}" for key in FEW_BITS}


@pytest.mark.parametrize("key", FEW_BITS)
@pytest.mark.parametrize(
    "place", ["command line", "file", "command line and file", "the same in both"]
)
def test_the_baseline_has_no_key_of_fp8_lm(
    key: str, place: str, made: list[compare.Job], tmp_path: Path
) -> None:
    detail = {key: FEW_BITS[key]}
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
        given += [f"model.optim.{key}={FEW_BITS[key]}"]
    config = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert compare.main([*given, *config, "--out", "out"]) == 0
    base, other = (
        run_spec(*(text for text in job.overrides if not text.startswith("--")),
                 config_dir=tmp_path, config_name="mine")
        for job in made
    )  # fmt: skip
    assert base.optim == run_spec(*PLAIN).optim and base.precision.fp8 is None
    assert other.optim != base.optim and other.precision.fp8 is not None


def test_a_baseline_of_another_level_keeps_what_has_an_effect_there(
    made: list[compare.Job],
) -> None:
    given = ["model.fp8=True", "model.optim.fp8_opt_level=O2", "model.optim.exp_avg_sq_dtype=fp8"]
    assert compare.main([*given, "model.optim.moments_scaling=group",
                         "--base", "model.optim.fp8_opt_level=O1"]) == 0  # fmt: skip
    base, _ = made
    assert base.overrides == ("model.fp8=True", given[2], "model.optim.moments_scaling=group",
                              "model.optim.fp8_opt_level=O1", "model.fp8_health=full")  # fmt: skip


def test_the_command_reports_and_says_the_verdict_last(
    made: list[compare.Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["model.fp8=True", "--seeds", "1", "2", "3", "--out", "out"]
    assert compare.main(argv) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("verdict: same: FP8 has +0.00 % ± 0.00 % of the ")
    assert "differs: model.fp8: False and True" in said
    assert [(job.label, job.seed) for job in made[:3]] == [
        ("baseline", 1), ("given", 1), ("baseline", 2),
    ]  # fmt: skip
    result = json.loads(Path("out/compare.json").read_text())
    assert result["verdict"] == "same" and result["figures"]["gaps"] == {"1": 0, "2": 0, "3": 0}
    assert len(result["weakest_tensors"]) == 10
    page = Path("out/report.html").read_text()
    assert "BF16, seed 1" in page and "layers.0.attention.qkv.grad_output" in page
    assert "training loss of FP8 over BF16, %" in page


def test_worse_undecided_and_failed_runs(
    made: list[compare.Job],
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
    monkeypatch.setattr(compare, "_run", lambda job, *, quiet: 3 * (job.label == "given"))
    assert compare.main(again) == compare.WORSE
    assert "did not finish (seed 1 ended with exit code 3" in capsys.readouterr().out
    monkeypatch.setattr(compare, "_run", lambda job, *, quiet: int(job.label == "baseline"))
    assert compare.main(again) == 2
    assert "the baseline's run ended with exit code 1" in capsys.readouterr().err
    monkeypatch.setattr(compare, "_run", lambda job, *, quiet: 75)
    assert compare.main(again) == 75


def test_runs_of_other_configurations_do_not_count(
    made: list[compare.Job], capsys: pytest.CaptureFixture[str]
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
    made: list[compare.Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose data do not exist ends before its first run; another one may follow."""
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_run", lambda job, *, quiet: 2)
        wrong = ["model.fp8=True", "model.data.data_prefix=no/such", "--out", "out"]
        assert compare.main(wrong) == 2
    assert [file.name for file in Path("out").iterdir()] == [compare.INPUT_FILE]
    assert compare.main(["model.fp8=True", "--out", "out"]) == 0
    capsys.readouterr()
    Path("out", compare.INPUT_FILE).unlink()
    assert compare.main(["model.fp8=True", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert "out: has runs of other configurations (there is no compare-input.json" in said


def test_a_setting_of_gpus_is_refused_where_there_is_none(
    made: list[compare.Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    made: list[compare.Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has not begun to train cannot save, and ends with the signal's own code."""

    def interrupted(job: compare.Job, *, quiet: bool) -> int:
        signal.raise_signal(signal.SIGINT)
        return 128 + signal.SIGINT

    monkeypatch.setattr(compare, "_run", interrupted)
    assert compare.main(["model.fp8=True", "--out", "out"]) == 75
    assert not Path("out/report.html").exists()


def test_a_mistake_is_no_verdict(
    made: list[compare.Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["model.fp8=True", "--out", "out"]) == 0
    monkeypatch.setattr(compare, "_run", lambda job, *, quiet: 2 * (job.label == "given"))
    assert compare.main(["model.fp8=True", "--out", "out"]) == 2
    assert "the configuration's run ended with exit code 2" in capsys.readouterr().err


def test_what_is_refused(made: list[compare.Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["trainer.max_steps=5"]) == 2
    assert "the configuration is its own baseline" in capsys.readouterr().err
    assert compare.main(["model.fp8=True", "model.hidden_size=101"]) == 2
    assert "model.hidden_size=101" in capsys.readouterr().err
    assert not made and not list(Path().iterdir())
    given = ["model.fp8=True", "model.fp8_recipe=tensorwise"]
    assert compare.main([*given, "--base", "model.fp8=True"]) == 2
    assert "--base model.fp8_recipe=delayed" in capsys.readouterr().err


def test_two_configurations_in_fp8_are_both_measured(
    made: list[compare.Job], capsys: pytest.CaptureFixture[str]
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
    weakest = json.loads(Path("out/compare.json").read_text())["weakest_tensors"]
    assert all((s["snr_db"], s["snr_db_of_baseline"]) == (25.0, 21.0) for s in weakest)
    assert "<td class=number data-value=21.0>21.0" in Path("out/report.html").read_text()


def test_one_side_in_fp8_says_that_its_time_includes_measuring() -> None:
    def run(**config: Any) -> RunRecord:
        return RunRecord(path=Path("x"), status="finished", config=config,
                         events=[{"kind": "start"}], summary={"wall_seconds": 9.0})  # fmt: skip

    full = {"model.fp8": True, "model.fp8_health": "full"}
    costs = compare._costs([Pair(1, run(), run(**full))])
    assert ("note", "logged steps of the configuration alone also measure FP8 health, which its "
            "time includes") in costs  # fmt: skip
    assert not any(
        what == "note" for what, _ in compare._costs([Pair(1, run(**full), run(**full))])
    )


def test_a_baseline_behind_token_frequencies_tells_nothing() -> None:
    found = pairs([0.0001, 0.0])
    assert judge(found, 0.005, NAMES).word == "same"
    for bits, word in ((2.784, "undecided"), (2.6, "same")):
        found[1].base.summary.update(val_bits_per_byte=bits, unigram_bits_per_byte=2.685)
        verdict = judge(found, 0.005, NAMES)
        assert verdict.word == word
        assert ("the tokens alone give 2.685: train longer" in verdict.sentence) == (bits > 2.685)
    worse = pairs([0.02])
    worse[0].base.summary.update(val_bits_per_byte=3.0, unigram_bits_per_byte=2.685)
    assert judge(worse, 0.005, NAMES).word == "worse"


def test_a_run_is_shown_without_how_to_continue_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [b"step 5/5 | loss 2.0\n", b"\n", b"  continue with  python pretrain_gpt.py x=1\n",
             b"         beware  it prolongs\n", b"time  0:07\n"]  # fmt: skip
    compare._show(lines)
    assert capsys.readouterr().out.splitlines() == ["  step 5/5 | loss 2.0", "", "  time  0:07"]
