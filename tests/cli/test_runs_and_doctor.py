"""The list of runs, `latest`, the doctor, and small promises of other commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from megafp8 import __version__
from megafp8.cli import doctor, inspect, report, runs, tried
from megafp8.cli.dryrun import fits
from megafp8.cli.generate import fitting_tokens
from megafp8.cli.preprocess import main as preprocess
from megafp8.config.load import load
from megafp8.config.overrides import quoted
from megafp8.config.resolve import resolve
from megafp8.errors import RunError
from megafp8.files import give_ordinary_mode
from megafp8.jobs.job import Result
from megafp8.jobs.results import print_results
from megafp8.observe.health import HealthRecord
from megafp8.observe.metrics import MetricsFile
from megafp8.plan.hardware import KNOWN
from megafp8.runs.find import find_run
from megafp8.specs import TensorHealth
from megafp8.train.report.summary import continue_command, note_to_continue, rise_of_rate
from tests.report.made import make_run

ROOT = Path(__file__).parents[2]


def test_the_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert runs.main([]) == 2
    assert "runs: no runs" in capsys.readouterr().err
    make_run(Path("runs/second"), steps=110)
    make_run(Path("runs/first"))
    (tmp_path / "runs" / "first" / "run.json").write_text('{"status": "running", "created": "1"}')
    assert runs.main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:6] == ["runs/first", "stopped", "100/100", "2.2789", "2.2345", "4.32k"]
    assert lines[2][:3] == ["runs/second", "finished", "110/110"]


def test_runs_of_several_folders_are_in_the_order_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "NEWEST", 2)
    for name, created in (("a/new", "3"), ("a/newer", "4"), ("b/old", "1"), ("b/older", "0")):
        path = make_run(Path(name))
        (path / "run.json").write_text(f'{{"status": "finished", "created": "{created}"}}')
    assert runs.main(["a", "b", "a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["a/new", "a/newer", "2"]


def test_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="latest: there is no run in runs"):
        find_run(Path("latest"))
    old = make_run(Path("runs/old"))
    new = make_run(Path("runs/new"), steps=110)
    assert find_run(Path("latest")) == new == find_run(Path("runs/latest"))
    assert find_run(old) == old == find_run(Path("old"))
    assert find_run(Path("nowhere")) == Path("nowhere")
    with pytest.raises(RunError, match="no run with a checkpoint"):
        find_run(Path("latest"), with_checkpoint=True)
    (old / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert find_run(Path("latest"), with_checkpoint=True) == old
    Path("latest").mkdir()  # what is really there is taken as it is
    assert find_run(Path("latest")) == Path("latest")
    Path("old").mkdir()
    assert find_run(Path("old")) == Path("old")


@pytest.mark.parametrize("is_nvidias", [False, True])
def test_only_a_package_with_adams_kernel_counts_as_apex(
    is_nvidias: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On PyPI the name is another project's, whose version is no version of NVIDIA's."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, module)
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "optimizers.py").write_text("FusedAdam = object\n" * is_nvidias)
    info = tmp_path / "apex-0.9.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = [entry for entry in doctor.PACKAGES if entry[0] == "apex"]
    found = doctor._package(*line)
    assert found.is_there == is_nvidias
    assert found.text == ("0.9.10" if is_nvidias else "not installed")
    assert "fused_adam and distributed_fused_adam" in line[1]
    for module in ("apex.optimizers", "apex"):
        sys.modules.pop(module, None)


def test_the_doctor_finds_transformer_engine_on_a_cpu_by_its_module() -> None:
    """Its distribution has another name, and a clone has none."""
    (line,) = [entry for entry in doctor.PACKAGES if entry[0] == "te_cpu"]
    assert doctor._package(*line).is_there and "on a CPU" in line[1]


def test_the_doctor_names_what_is_missing_and_what_it_would_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "PACKAGES", (("no-such-package", "nothing"), ("numpy", "arrays")))

    def broken() -> doctor.MachinePart:
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(doctor, "_memory", broken)
    assert doctor.main(["--disk", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "PyTorch finds none; it would give: FP8 products on tensor cores" in said
    assert "no-such-package" in said and "not installed; it would give: nothing" in said
    assert "cannot be examined (RuntimeError: driver too old)" in said
    assert "MiB/s" in said or "GiB/s" in said
    assert not list(tmp_path.iterdir())


def test_the_doctor_names_releases_that_were_never_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = f"{torch.__version__.rpartition('.')[0]}.9"  # another build of a release that was tried
    installed = {"torch": f"{whole}+cu130", "hydra-core": "1.9.1", "wandb": "0.31.3"}

    def released(name: str) -> str:
        if name in installed:
            return installed[name]
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tried, "version", released)
    assert [name for name, *_ in tried.untried()] == ["hydra-core"]
    assert doctor.main(["--disk", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no suite has passed with hydra-core 1.9.1; it has with 1.3.8, in part 1.3.2" in said


def test_the_page_of_versions_has_what_was_tried() -> None:
    page = (ROOT / "docs/guide/versions.md").read_text("utf-8").splitlines()
    for name, releases in tried.TRIED.items():
        (row,) = [line for line in page if line.casefold().startswith(f"| {name} |")]
        assert str(releases) in row, row


def test_the_page_of_versions_has_the_bounds_of_pyproject() -> None:
    """The lowest release that is accepted was tried, or the page says that it was not."""
    page = (ROOT / "docs/guide/versions.md").read_text("utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [line for name in ("data", "wandb", "torchao", "dev") for line in extras[name]]
    for name in ("torchao", "datasets", "wandb", "transformers"):
        bounds = {line.partition(">=")[2] for line in lines if line.startswith(f"{name}>=")}
        (bound,) = bounds
        (row,) = [line for line in page if line.startswith(f"| {name} | {bound} or newer")]
        lowest = [each for each in tried.TRIED[name].part if each.startswith(f"{bound}.")]
        assert lowest or "itself was not tried" in row, name


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((9, 0), "with delayed, tensorwise, rowwise, rowwise_with_gw_hp, blockwise; mxfp8, nvfp4"),
        ((8, 0), "with no recipe; delayed"),
        (None, "on its CPU: every recipe"),
    ],
)
def test_the_doctor_ends_with_what_the_machine_can_do(
    capability: tuple[int, int] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert words in doctor.what_it_can_do()


def test_a_failed_self_test_shows_the_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SELF_TEST", ["model.hidden_size=101"])
    monkeypatch.setattr(doctor, "examine_machine", lambda disk: [doctor.MachinePart("a", "b")])
    assert doctor.main(["--self-test"]) == 1
    said = capsys.readouterr().out
    assert "self-test: exit code 2 at 4 steps" in said and "model.hidden_size=101" in said


def test_a_self_test_that_takes_too_long_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SELF_TEST_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "examine_machine", lambda disk: [doctor.MachinePart("a", "b")])
    assert doctor.main(["--self-test"]) == 1
    assert "self-test: 4 steps were not done after 0.01 s" in capsys.readouterr().out


def test_inspect_says_how_to_measure_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsFile(tmp_path / "health.jsonl") as file:
        tensors = {f"layers.{i}.a.input": TensorHealth(amax=1, quant_scale=2) for i in range(25)}
        file.log(HealthRecord(1, tensors, {}).to_dict())
    assert inspect.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "model.fp8_health=full" in said and "5 more tensors: --all" in said
    assert "underflow  " not in said.splitlines()[2]
    assert inspect.main([str(tmp_path), "--sort", "underflow"]) == 2
    assert "has no underflow to sort by" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_a_command_quietly(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    program = (
        "import sys; sys.argv = ['runs', sys.argv[1]]\n"
        "from megafp8.cli.job import reports_errors\n"
        "main = reports_errors(lambda argv: [print('line ' * 50) for _ in range(5000)] and 0)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "runs")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == "" and child.wait() == 141
    child.stderr.close()


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from megafp8.cli.main import run_app

    assert run_app(["--version"], lambda cfg, info: 1) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"megafp8 {__version__}, torch {version('torch')}, Python 3")


def test_preprocess_leaves_nothing_that_could_not_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    (tmp_path / "bad.tiktoken").write_text("not a vocabulary")
    out = tmp_path / "out"
    tokenizer = f"tiktoken:{tmp_path / 'bad.tiktoken'}"
    assert preprocess([str(text), "--output", str(out), "--tokenizer", tokenizer]) == 2
    assert not list(tmp_path.glob("out*"))
    text.write_text("")
    assert preprocess([str(text), "--output", str(out), "--tokenizer", "bytes"]) == 2
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "out.bin").write_text("")
    capsys.readouterr()
    assert preprocess([str(text), "--output", str(out), "--tokenizer", "bpe"]) == 2
    assert "is trained on" not in capsys.readouterr().out


def test_tokens_that_fit() -> None:
    spec = resolve(load(["model.encoder_seq_length=64"]), lambda: False).model
    assert [fitting_tokens(spec, prompt) for prompt in (2, 63, 64, 200)] == [62, 1, 1, 1]
    long = resolve(load(["model.encoder_seq_length=1024"]), lambda: False).model
    assert fitting_tokens(long, 2) == 100


def test_files_have_ordinary_permissions(tmp_path: Path) -> None:
    plain, made = tmp_path / "plain", tmp_path / "made"
    plain.write_text("")
    made.touch(mode=0o600)
    give_ordinary_mode(made)
    assert made.stat().st_mode == plain.stat().st_mode


def test_a_longer_run_warns_of_a_higher_learning_rate() -> None:
    spec = resolve(load(["model.fp8=True"]), lambda: False)
    note = rise_of_rate(spec)
    assert (
        note is not None and "rises from 1.0e-04 to 1.2e-03" in note
    )  # its warm-up is twice as long
    flat = resolve(load(["model.optim.sched.min_lr=2e-3"]), lambda: False)
    assert rise_of_rate(flat) is None
    wsd = ["model.optim.sched.name=WSD", "model.optim.sched.wsd_decay_ratio=0.75"]
    note = rise_of_rate(resolve(load(wsd), lambda: False))
    assert note is not None and "rises from 1.0e-04 to 1.2e-03" in note


def test_a_run_past_the_steps_of_a_command_is_told_so_and_can_continue() -> None:
    spec = resolve(load(["model.fp8=True", "trainer.max_steps=2"]), lambda: False)
    note = note_to_continue(spec, 6)
    assert note is not None and "trained nothing" in note
    assert "step 6" in note and "trainer.max_steps=2" in note
    assert note_to_continue(spec, 2) == rise_of_rate(spec)
    command = ["python", "pretrain_gpt.py", "exp_manager.name=a", "trainer.max_steps=2"]
    for step, longer in ((6, 12), (2, 4)):
        text = continue_command(spec, Path("runs/a"), command, True, step)
        assert text == f"python pretrain_gpt.py exp_manager.name=a trainer.max_steps={longer}"
    many = [f"model.data.dataloader_{n}={n}" for n in range(9)]
    text = continue_command(spec, Path("runs/a b"), ["megafp8", "pretrain", *many], True, 2)
    own = "--config-dir 'runs/a b' --config-name config"
    assert text == f"megafp8 pretrain {own} trainer.max_steps=4"
    code = [*many, "model.fp8_recipe=lab.py:Mine"]  # which a file may not name
    text = continue_command(spec, Path("runs/a"), ["megafp8", "pretrain", *code], True, 2)
    assert text is not None and text.endswith("exp_manager.name=a trainer.max_steps=4")


def test_an_ordinary_path_needs_no_quotes() -> None:
    assert quoted("multirun/2026-01-01_10-00-00/3") == "multirun/2026-01-01_10-00-00/3"
    for text in ("a b/c", "it's/x", "true", "a,b/c", "${x}/y", "", "x=1/y"):
        assert quoted(text).startswith("'") and quoted(text).endswith("'")


class Share:
    """Stand in for a rank's share: what it holds, and what a step adds at its peak."""

    def __init__(self, held: int, peak: int) -> None:
        self.total = held + peak


def test_whether_a_job_fits() -> None:
    shares = [Share(10 << 30, 1 << 30), Share(60 << 30, 11 << 30)]
    assert fits(shares, KNOWN["h100"]).startswith("fits on H100 SXM: 71.0 GiB of 79.1 GiB")  # type: ignore[arg-type]
    shares.append(Share(60 << 30, 12 << 30))
    assert fits(shares, KNOWN["h100"]).startswith("does not fit on H100 SXM: 72.0 GiB")  # type: ignore[arg-type]


def result_of(job: int, folder: Path, code: int = 0, problem: str | None = None) -> Result:
    return Result(
        job=job, overrides=[f"model.seed={job}"], directory=str(folder / str(job)), code=code,
        outcome="finished" if code == 0 else "refused", val_loss=2.0 if code == 0 else None,
        train_loss=None, tokens_per_second=None, wall_seconds=None, problem=problem,
    )  # fmt: skip


def test_the_report_of_a_sweeps_folder_keeps_refused_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "0")
    print_results([result_of(0, tmp_path), result_of(1, tmp_path, 2, "no such recipe")], tmp_path)
    assert report.main([str(tmp_path)]) == 0
    assert "no such recipe" in (tmp_path / "report.html").read_text()
    make_run(tmp_path / "other")  # the page shows this run too, and so is not the sweep's
    assert report.main([str(tmp_path)]) == 0
    assert "2 runs in" in (tmp_path / "report.html").read_text()


def test_a_refused_sweep_leaves_the_results_of_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "0")
    print_results([result_of(0, tmp_path)], tmp_path)
    before = [(tmp_path / name).read_text() for name in ("sweep.json", "report.html")]
    refused = replace(result_of(0, tmp_path, 2, "is a run of others"), overrides=["model.seed=9"])
    assert print_results([refused], tmp_path) == 2
    assert before == [(tmp_path / name).read_text() for name in ("sweep.json", "report.html")]
    assert "choose another hydra.sweep.dir" in capsys.readouterr().out


def test_the_results_of_an_earlier_sweep_are_kept_beside_those_of_a_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same sweep again continues, and its results take the place of the earlier ones."""
    first = [result_of(0, tmp_path)]
    for _ in range(2):
        print_results(first, tmp_path)
    earlier = (tmp_path / "sweep.json").read_text()
    assert "are kept" not in capsys.readouterr().out
    for number in (1, 2):
        others = [
            result_of(0, tmp_path, 2, "is a run of others"),
            replace(result_of(1, tmp_path), overrides=[f"model.seed={number + 5}"]),
        ]
        print_results(others, tmp_path)
        assert f"are kept in {tmp_path / f'sweep-{number}.json'}" in capsys.readouterr().out
        assert (tmp_path / f"sweep-{number}.json").read_text() == earlier
        earlier = (tmp_path / "sweep.json").read_text()
        assert f"model.seed={number + 5}" in earlier


def test_only_the_first_rank_of_torchrun_writes_a_sweeps_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_results([result_of(0, tmp_path)], tmp_path)
    before = (tmp_path / "sweep.json").read_text()
    others = [replace(result_of(0, tmp_path), overrides=["model.seed=9"])]
    for rank, is_kept in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        assert print_results(others, tmp_path) == 0
        assert (tmp_path / "sweep-1.json").exists() == is_kept
        assert ((tmp_path / "sweep.json").read_text() == before) != is_kept


def test_the_report_of_a_sweep_that_was_continued_shows_the_runs_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for in another folder than the one in which the sweep was started."""
    (tmp_path / "elsewhere").mkdir()
    sweep = tmp_path / "multirun" / "today"
    make_run(sweep / "0")
    monkeypatch.chdir(tmp_path)
    stopped = replace(result_of(0, Path("multirun/today"), 75, "saved on SIGTERM"), began=True)
    refused = result_of(1, Path("multirun/today"), 2, "no such recipe")
    print_results([stopped, refused], Path("multirun/today"))
    page = (sweep / "report.html").read_text()
    assert "saved on SIGTERM" in page and "<td class=stopped>" in page
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert report.main([str(sweep)]) == 0
    page = (sweep / "report.html").read_text()
    assert "<td class=finished>" in page and "saved on SIGTERM" not in page
    assert "no such recipe" in page


def test_runs_of_a_folder_of_sweeps_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "multirun" / "today" / "0")
    assert runs.main([str(tmp_path / "multirun")]) == 0
    assert "today/0" in capsys.readouterr().out


def test_the_table_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def result(job: int, lr: str, loss: float | None, problem: str | None = None) -> Result:
        directory = tmp_path / str(job)
        if problem is None:
            make_run(directory)
        overrides = ["trainer.max_steps=20", f"model.optim.lr={lr}", "trainer.max_steps=4"]
        outcome, code = ("finished", 0) if problem is None else ("refused", 2)
        return Result(job, overrides, str(directory), code, outcome, loss, 3.0, 1e4, 60.0, problem)

    results = [result(0, "1e-3", 2.5), result(1, "1e-2", 2.25), result(2, "7", None, "too high")]
    assert print_results(results, tmp_path) == 2
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "from chance" in line]
    assert "all jobs have trainer.max_steps=4" in lines
    assert "1 *  model.optim.lr=1e-2  finished  2.2500    3.0000      10.0k     1:00" in lines
    assert "* best: job 1 (model.optim.lr=1e-2)" in lines and "job 2: too high" in lines
    page = (tmp_path / "report.html").read_text()
    assert "1: lr=1e-2" in page and "too high" in page and "<td class=finished>" in page
    others = [result(3, "2e-2", 2.25 * 1.004), result(4, "3e-2", 2.25 * 1.006)]
    print_results([*results, *others], tmp_path)
    lines = capsys.readouterr().out.splitlines()
    (best,) = (line for line in lines if line.startswith("* best: job "))
    assert ", nearly equal (within 0.5%): job 3; megafp8 compare" in best
    page = (tmp_path / "report.html").read_text()
    assert f"<p class=lead>{best.removeprefix('* ')}</p>" in page
    assert "<td class=refused>refused" in page
    assert os.path.getsize(tmp_path / "sweep.json") > 100
