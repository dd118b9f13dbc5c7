"""Test the command line as a user meets it: exit codes, messages, --help, --cfg and sweeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megafp8.cli.main import AppInfo, run_app
from megafp8.config.load import Loaded
from megafp8.config.schema import all_keys
from megafp8.errors import ExitCode, NonFiniteError, RunError
from tests.cli.app import Shell
from tests.report.made import make_run


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["+model.fp9=True"], "Did you mean model.fp8?"),
        (["model.fp8=yep", "model.hidden_size=250"], "2 settings cannot be used"),
        (["model.fp8=True,False"], "Add -m"),
        (["--nope"], "--nope"),
        (["--model.fp8=True"], "without dashes: model.fp8=True"),
        (["trainer.precision=fp8"], "set model.fp8=True"),
        (["trainer.max_steps=1e5"], "Write 100000"),
        (["-cn", "nope"], "Give one of finetune_gpt, pretrain_gpt"),
        (["trainer.accelerator=gpu"], "no GPU"),
        (["-m", "model.fp8=1,2", "model.sed=3"], "Did you mean model.seed?"),
        (["-m", "model.optim.lr=interval(0,1)"], "Give values"),
        (["-m", "hydra.launcher._target_=os.system"], "must not name code to run"),
        (["-m", "hydra.callbacks.x._target_=os.system"], "must not name code to run"),
        (["-m", "+hydra.job.env_set.HF_TOKEN=planted"], "in the environment"),
        (["-m", "hydra/launcher=nope"], "hydra/launcher/nope"),
        (["-m", "exp_manager.exp_dir=x", "model.seed=1,2"], "hydra.sweep.dir"),
        (["-m", "exp_manager.name=x", "model.seed=1,2"], "hydra.sweep.dir"),
        (["hydra/launcher=joblib"], "in a sweep (-m) only. Add -m"),
        (["hydra.run.dir=here"], "exp_manager.explicit_log_dir=DIR sets the run"),
        (["hydra.verbose=True", "hydra/job_logging=stdout"], "trainer.log_every_n_steps"),
        (["-m", "model.seed=1,2", "hydra.run.dir=here"], "Use hydra.sweep.dir=DIR"),
    ],
)
def test_user_errors_end_with_2_and_no_traceback(
    shell: Shell, tmp_path: Path, args: list[str], words: str
) -> None:
    done = shell(*args)
    assert done.returncode == ExitCode.USER_ERROR
    assert words in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_one_run(process: Shell, tmp_path: Path) -> None:
    done = process("model.fp8=True")
    assert done.stderr == "" and done.returncode == 0
    assert done.stdout == "fp8=True job=None dir=None log_dir=None sweep=False\n"
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]  # Hydra leaves nothing behind


def test_inert_settings_reach_the_task() -> None:
    seen: list[AppInfo] = []

    def task(loaded: Loaded, info: AppInfo) -> int:
        seen.append(info)
        return 0

    assert run_app(["model.cpu_offloading=False"], task) == 0
    assert len(seen[0].inert) == 1 and seen[0].inert[0].startswith("inert: model.cpu_offloading")


@pytest.mark.parametrize(
    ("words", "values", "lines"),
    [
        ("model.seed=1 +model.seed=2", {"model.seed": 2}, ["model.seed=1 model.seed=2"]),
        (
            "model.seed=1 model.seed=2 model.seed=3",
            {"model.seed": 3},
            ["model.seed=1, 2 model.seed=3"],
        ),
        ("model.seed=1 ++model.seed=1", {"model.seed": 1}, []),
        (
            "model.optim={lr:0.1,weight_decay:0.5} model.optim.lr=0.2",
            {"model.optim.lr": 0.2, "model.optim.weight_decay": 0.5},
            ["model.optim.lr=0.1 model.optim.lr=0.2"],
        ),
        (
            "model.optim.lr=0.2 model.optim={lr:0.1,weight_decay:0.5}",
            {"model.optim.lr": 0.1, "model.optim.weight_decay": 0.5},
            ["model.optim.lr=0.2 model.optim.lr=0.1"],
        ),
        (
            "precision=fp8_delayed_hybrid precision=bf16",
            {"model.fp8": False, "trainer.precision": "bf16"},
            ["precision=fp8_delayed_hybrid precision=bf16"],
        ),
        (
            "model.fp8=hybrid model.fp8=False",
            {"model.fp8": False, "model.fp8_hybrid": None},
            ["model.fp8=hybrid model.fp8=False"],
        ),
    ],
)  # fmt: skip
def test_of_a_key_given_twice_the_last_value_counts_and_a_line_says_so(
    words: str, values: dict[str, object], lines: list[str]
) -> None:
    def task(loaded: Loaded, info: AppInfo) -> int:
        assert {key: loaded.values[key] for key in values} == values
        said = [line for line in info.inert if line.startswith("given twice: ")]
        pairs = [line.removeprefix("given twice: ").split(" (command line): ") for line in said]
        assert [f"{old} {new}" for old, new in pairs] == [f"{x}, the last, counts" for x in lines]
        assert info.overrides == tuple(words.split()), "ranks get what was typed"
        return 0

    assert run_app(words.split(), task) == 0


def test_what_a_later_value_replaces_must_be_right_and_no_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(["model.seed=x", "model.seed=2"], never) == 2
    assert "model.seed=x (command line): 'x' is not" in capsys.readouterr().err
    token = "hf_AbCdEfGhIjKlMnOpQrStUv"
    assert run_app([f"exp_manager.name={token}", "exp_manager.name=mine"], never) == 2
    said = capsys.readouterr().err
    assert "exp_manager.name=*** (command line): holds a secret" in said and token not in said


def test_a_sweep_has_jobs_for_the_last_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seeds: list[int] = []

    def task(loaded: Loaded, info: AppInfo) -> int:
        seeds.append(loaded.values["model.seed"])
        return 0

    words = ["-m", "model.seed=1,2", "model.seed=3,4", "hydra.sweep.dir=a", "hydra.sweep.dir=b"]
    assert run_app(words, task) == 0
    assert seeds == [3, 4] and Path("b/1").is_dir() and not Path("a").exists()
    lines = [line for line in capsys.readouterr().out.splitlines() if "given twice" in line]
    assert [line.partition(" (")[0] for line in lines] == [
        "[sweep] given twice: model.seed=1,2", "[sweep] given twice: hydra.sweep.dir=a",
    ]  # fmt: skip


def test_sweep(shell: Shell, tmp_path: Path) -> None:
    done = shell("-m", "model.fp8=True,False", "+model.seed=1,2")
    assert done.stderr == "" and done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("fp8=")]
    assert [line.split()[0] for line in lines] == ["fp8=True"] * 2 + ["fp8=False"] * 2
    (sweep,) = (tmp_path / "multirun").iterdir()
    names = {path.name for path in sweep.iterdir()}
    assert names == {"0", "1", "2", "3", "multirun.yaml", "sweep.json"}
    for number, line in enumerate(lines):
        folder = f"multirun/{sweep.name}/{number}"
        assert line.endswith(f"job={number} dir={folder} log_dir={folder} sweep=True")


def test_the_jobs_of_a_sweep_are_one_group_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    seen: list[tuple[str | None, ...]] = []

    def task(loaded: Loaded, info: AppInfo) -> int:
        names = (f"exp_manager.wandb_logger_kwargs.{leaf}" for leaf in ("group", "name"))
        seen.append(tuple(loaded.values[name] for name in names))
        return 0

    words = ["-m", "model.seed=1,2", "hydra.sweep.dir=there/rates"]
    wandb = "exp_manager.create_wandb_logger=True"
    section = "exp_manager.wandb_logger_kwargs"
    assert run_app(words, task) == 0
    assert run_app([*words[:2], "hydra.sweep.dir=rates", wandb], task) == 0
    given = [f"{section}.group=g", f"{section}.name=n"]
    assert run_app([*words[:2], "hydra.sweep.dir=more", wandb, *given], task) == 0
    assert seen == [
        *[(None, None)] * 2, ("rates", "rates-0"), ("rates", "rates-1"), *[("g", "n")] * 2
    ]  # fmt: skip


def test_sweep_over_presets(shell: Shell) -> None:
    done = shell("-m", "precision=bf16,fp8_delayed_hybrid", "model=gpt3_125m")
    assert done.stderr == "" and done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("fp8=")]
    assert [line.split()[0] for line in lines] == ["fp8=False", "fp8=True"]
    done = shell("-m", "precision=bf16,nope")
    assert done.returncode == 2 and "fp8_delayed_e4m3" in done.stderr


def test_sweep_over_own_yaml(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine" / "size").mkdir(parents=True)
    start = "defaults: [pretrain_gpt, _self_]\nhydra: {sweep: {dir: there}}\nmodel: {fp8: true}\n"
    (tmp_path / "mine" / "my.yaml").write_text(start)
    for name, layers in (("one", 1), ("two", 2)):
        yaml = f"# @package _global_\nmodel: {{num_layers: {layers}}}\n"
        (tmp_path / "mine" / "size" / f"{name}.yaml").write_text(yaml)
    done = shell("-cd", "mine", "-cn", "my", "+size=one,two", "-m")
    assert done.returncode == 3 and done.stderr == ""
    assert "job=1 dir=there/1" in done.stdout and done.stdout.count("fp8=True") == 2


def outcomes(sweep: Path) -> list[tuple[str, int]]:
    return [(r["outcome"], r["code"]) for r in json.loads((sweep / "sweep.json").read_text())]


FAILING = ["model.num_layers=2,99,x,1", "hydra.sweep.dir=here"]
AS_TOLD = [("not finite", 3), ("crashed", 1), ("refused", 2), ("finished", 0)]


@pytest.mark.parametrize(
    "launcher", ["basic", "joblib", pytest.param("submitit_local", marks=pytest.mark.slow)]
)
def test_a_sweep_continues_after_refused_and_failed_jobs_and_reports_them(
    process: Shell, tmp_path: Path, launcher: str
) -> None:
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    done = process("-m", *FAILING, f"hydra/launcher={launcher}")
    assert done.returncode == 3  # of the first job that failed
    assert outcomes(tmp_path / "here") == AS_TOLD
    table = done.stdout[done.stdout.index("[sweep] 4 jobs in here") :].splitlines()
    assert table[1].split() == ["job", "overrides", "outcome"]
    assert [line.split()[:2] for line in table[2:6]] == [
        [str(num), f"model.num_layers={value}"] for num, value in enumerate((2, 99, "x", 1))
    ]
    assert "job 2: model.num_layers=x (command line): 'x' is not a whole number" in done.stdout
    if launcher != "submitit_local":  # whose jobs have log files
        assert done.stdout.count("fp8=") == 3
        assert "AssertionError: a bug" in done.stderr  # a bug keeps its traceback
    assert (tmp_path / "here" / "3" / "job.json").exists()
    assert not (tmp_path / "here" / "2").exists()  # nothing of a refused job


def test_a_refused_job_does_not_show_the_run_of_another_one(shell: Shell, tmp_path: Path) -> None:
    """Its directory has a run of an earlier sweep; a run that began there is the job's own."""
    for number in range(3):
        make_run(tmp_path / "here" / str(number))
    done = shell("-m", "model.num_layers=x,96,97", "hydra.sweep.dir=here")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    results = json.loads((tmp_path / "here" / "sweep.json").read_text())
    assert [(r["code"], r["began"]) for r in results] == [(2, False), (2, False), (2, True)]
    page = (tmp_path / "here" / "report.html").read_text()
    rows = [row for row in page.split("<tr") if "<td class=" in row]
    (failed,) = (row for row in rows if "<td class=failed>" in row)
    assert failed.replace("<wbr>", "").partition("<td>")[2].startswith("2: num_layers=97")
    assert sum("<td class=refused>refused" in row for row in rows) == 2
    assert "a run of other settings" in page and "no disk" in page


def test_a_job_of_several_ranks_that_is_refused_does_not_either(
    shell: Shell, tmp_path: Path
) -> None:
    """Its ranks report the error themselves, and the task returns their exit code."""
    make_run(tmp_path / "here" / "0")
    done = shell("-m", "model.num_layers=95", "hydra.sweep.dir=here")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    results = json.loads((tmp_path / "here" / "sweep.json").read_text())
    assert [(r["code"], r["began"]) for r in results] == [(2, False)]


def test_a_sweep_needs_a_folder_that_it_can_write(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = shell("-m", "model.fp8_margin=0,1", "model.fp8=True", "hydra.sweep.dir=file/x")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "making the folder hydra.sweep.dir failed with ENOTDIR" in done.stderr
    assert "[sweep]" not in done.stdout


def test_what_all_jobs_share_is_said_once(shell: Shell) -> None:
    given = [
        "model.fp8=True",
        "model.fp8_margin=0,1",
        "model.fp8_amax_compute_algo=max,most_recent",
    ]
    done = shell("-m", *given)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("[sweep] 4 jobs in multirun") :].splitlines()
    assert table[1] == "all jobs have model.fp8=True"
    assert [" ".join(line.split()) for line in table[3:]] == [
        f"{num} model.fp8_margin={num // 2} model.fp8_amax_compute_algo={algo} finished"
        for num, algo in enumerate(["max", "most_recent"] * 2)
    ]


SWEEPER = """\
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Halving(Sweeper):
    '''A search: each batch follows from the objectives of the one before.'''

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context, task_function, config
        )

    def sweep(self, arguments):
        first = [["model.seed=1"], ["model.num_layers=99"], ["model.fp8=x"]]
        losses = [job.return_value for job in self.launcher.launch(first, 0)]
        assert all(isinstance(loss, float) for loss in losses), losses
        best = losses.index(min(losses))
        self.launcher.launch([[*arguments, *first[best], "model.num_layers=1"]], len(first))

node = {"_target_": "hydra_plugins.halving.Halving"}
ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=node)
"""


def test_another_sweeper_chooses_jobs_by_what_came_of_others(
    process: Shell, tmp_path: Path
) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "halving.py").write_text(SWEEPER)
    given = ["hydra/sweeper=halving", "model.fp8=True", "hydra.sweep.dir=here"]
    done = process("-m", *given)
    assert done.returncode == 1, done.stderr
    assert outcomes(tmp_path / "here") == [
        ("finished", 0), ("crashed", 1), ("refused", 2), ("finished", 0),
    ]  # fmt: skip
    assert "job 3: model.fp8=True model.seed=1 model.num_layers=1 -> here/3" in done.stdout


def test_sweep_of_refused_jobs_starts_nothing(shell: Shell, tmp_path: Path) -> None:
    done = shell("-m", "model.fp8=yep,maybe")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("is not True or False") == 2 and "fp8=" not in done.stdout[:8]
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_sweep_ends_when_a_job_was_saved_on_a_signal(shell: Shell, tmp_path: Path) -> None:
    done = shell("-m", "model.num_layers=3,1", "hydra.sweep.dir=here")
    assert done.returncode == 75 and done.stdout.count("fp8=") == 1
    assert outcomes(tmp_path / "here") == [("saved on a signal", 75), ("not started", 1)]
    assert "left no result" not in done.stdout


def test_directories_of_jobs_by_their_overrides(shell: Shell, tmp_path: Path) -> None:
    subdir = "hydra.sweep.subdir=${hydra.job.num}-${hydra.job.override_dirname}"
    done = shell("-m", "model.seed=1,2", "model.fp8=True", subdir, "hydra.sweep.dir=here")
    assert done.returncode == 0, done.stderr
    there = {path.name for path in (tmp_path / "here").iterdir() if path.is_dir()}
    assert there == {f"{n}-model.fp8=True,model.seed={n + 1}" for n in (0, 1)}
    done = shell("-m", "model.seed=1,2", "hydra.sweep.subdir=../x")
    assert done.returncode == 2 and "inside the sweep" in done.stderr


EVIL = "_target_: os.system\n"


@pytest.mark.parametrize(
    "yaml",
    [
        f"hydra:\n  launcher:\n    {EVIL}",
        f"hydra:\n  sweeper:\n    {EVIL}",
        f"hydra:\n  callbacks:\n   x:\n    {EVIL}    command: touch planted\n",
        f"model:\n  optim:\n    {EVIL}",
        f"trainer:\n    {EVIL}",
    ],
)
@pytest.mark.parametrize("more", [[], ["-m", "model.seed=1,2"]])
def test_files_name_no_code_to_run(
    tmp_path: Path,
    yaml: str,
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"defaults: [pretrain_gpt, _self_]\n{yaml}")
    code = run_app(["-cd", ".", "-cn", "mine", *more], lambda cfg, info: 0)
    if not more and yaml.startswith("hydra"):
        assert run_app(["-cd", ".", "-cn", "mine", "-c", "job"], never) == 0
        assert "# inert: hydra (mine.yaml): Hydra's own settings" in capsys.readouterr().out
    harmless = not more and yaml.startswith("hydra")  # Hydra's own settings shape sweeps only
    assert code == (0 if harmless else 2), capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def never(loaded: Loaded, info: AppInfo) -> int:
    raise AssertionError("the task was not to run")


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["--help"], never, prog="train") == 0
    shown = capsys.readouterr().out
    assert "train model.fp8=True" in shown
    in_one_line = " ".join(shown.split())
    for path, key in all_keys().items():
        assert f"\n  {path}=" in shown and key.help in in_one_line


def test_cfg_prints_the_composed_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["--cfg", "job", "model.seed=7"], never) == 0
    composed = OmegaConf.create(capsys.readouterr().out)
    sections = {"restore_from_path", "trainer", "exp_manager", "model"}
    assert composed.model.seed == 7 and set(composed) == sections
    assert run_app(["-c", "job", "--resolve"], never) == 0
    assert "${" not in capsys.readouterr().out
    assert run_app(["-c", "job", "model.seed=7", "model.cpu_offloading=False"], never) == 0
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert comments[0] == "# model.seed = 7 (command line; default job: 1234)"
    assert comments[1].startswith("# inert: model.cpu_offloading=False (command line): ")
    assert run_app(["-c", "job", "model.seed=x"], never) == 2
    assert run_app(["-c", "job", "-m"], never) == 2


def test_options_between_overrides(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [pretrain_gpt, _self_]\nmodel: {seed: 5}\n")
    seen: list[AppInfo] = []

    def task(loaded: Loaded, info: AppInfo) -> int:
        seen.append(info)
        names = ("model.seed", "model.fp8", "model.num_layers")
        assert [loaded.values[name] for name in names] == [5, True, 2]
        return 7

    for option in ("-cd", "--config-dir", "--config-path", "-cp"):
        args = ["model.fp8=True", option, str(tmp_path), "--config-name=mine", "model.num_layers=2"]
        assert run_app(args, task) == 7
    assert seen[1:] == seen[:-1]
    assert seen[:1] == [
        AppInfo(
            overrides=("model.fp8=True", "model.num_layers=2"),
            config_dir=tmp_path,
            config_name="mine",
        )
    ]


@pytest.mark.parametrize(("error", "code"), [(RunError("locked"), 2), (NonFiniteError("nan"), 3)])
def test_user_errors_of_the_task_give_their_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(loaded: Loaded, info: AppInfo) -> int:
        raise error

    assert run_app([], task) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_bugs_of_the_task_are_raised() -> None:
    with pytest.raises(AssertionError):
        run_app([], never)
