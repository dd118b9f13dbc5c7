"""The command line as a user meets it: exit codes, messages, --help, --cfg, sweeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from megafp8.config.app import AppInfo, run_app
from megafp8.config.schema import all_keys
from megafp8.errors import ExitCode, NonFiniteError, RunError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import sys
from megafp8.config.app import run_app
from megafp8.config.resolve import resolve

def task(cfg, info):
    spec = resolve(cfg, lambda: False)
    job = f"job={info.job_num} dir={info.directory} log_dir={spec.observe.explicit_log_dir}"
    print(f"fp8={spec.precision.fp8 is not None} {job} sweep={info.is_sweep}")
    assert spec.model.num_layers != 99, "a bug"
    return {1: 0, 2: 3, 3: 75}.get(spec.model.num_layers, 0)

sys.exit(run_app(sys.argv[1:], task))
"""


def shell(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "app.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *args]
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["+model.fp9=True"], "Did you mean model.fp8?"),
        (["model.fp8=yep", "model.hidden_size=250"], "2 settings cannot be honoured"),
        (["model.fp8=True,False"], "Add -m"),
        (["--nope"], "--nope"),
        (["-cn", "nope"], "There are: pretrain_gpt"),
        (["trainer.accelerator=gpu"], "no GPU"),
        (["-m", "model.fp8=True,maybe"], "'maybe' is not True or False"),
        (["-m", "exp_manager.exp_dir=x", "model.seed=1,2"], "hydra.sweep.dir"),
        (["hydra/launcher=nope"], "hydra/launcher/nope"),
    ],
)
def test_user_errors_end_with_2_and_no_traceback(
    tmp_path: Path, args: list[str], words: str
) -> None:
    done = shell(tmp_path, *args)
    assert done.returncode == ExitCode.USER_ERROR
    assert words in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


def test_one_run(tmp_path: Path) -> None:
    done = shell(tmp_path, "model.fp8=True")
    assert done.stderr == "" and done.returncode == 0
    assert done.stdout == "fp8=True job=None dir=None log_dir=None sweep=False\n"
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]  # Hydra leaves nothing behind


def test_inert_settings_reach_the_task() -> None:
    seen: list[AppInfo] = []

    def task(cfg: DictConfig, info: AppInfo) -> int:
        seen.append(info)
        return 0

    assert run_app(["model.sequence_parallel=False"], task) == 0
    assert len(seen[0].inert) == 1 and seen[0].inert[0].startswith("inert: model.sequence_parallel")


def test_sweep(tmp_path: Path) -> None:
    done = shell(tmp_path, "-m", "model.fp8=True,False", "+model.seed=1,2")
    assert done.stderr == "" and done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("fp8=")]
    assert [line.split()[0] for line in lines] == ["fp8=True"] * 2 + ["fp8=False"] * 2
    (sweep,) = (tmp_path / "multirun").iterdir()
    assert {path.name for path in sweep.iterdir()} == {"0", "1", "2", "3", "multirun.yaml"}
    for number, line in enumerate(lines):
        folder = f"multirun/{sweep.name}/{number}"
        assert line.endswith(f"job={number} dir={folder} log_dir={folder} sweep=True")


def test_sweep_over_presets(tmp_path: Path) -> None:
    done = shell(tmp_path, "-m", "precision=bf16,fp8_delayed_hybrid", "model=gpt3_125m")
    assert done.stderr == "" and done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line.startswith("fp8=")]
    assert [line.split()[0] for line in lines] == ["fp8=False", "fp8=True"]
    done = shell(tmp_path, "-m", "precision=bf16,nope")
    assert done.returncode == 2 and "fp8_delayed_e4m3" in done.stderr


def test_sweep_over_own_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine" / "size").mkdir(parents=True)
    start = "defaults: [pretrain_gpt, _self_]\nhydra: {sweep: {dir: there}}\nmodel: {fp8: true}\n"
    (tmp_path / "mine" / "my.yaml").write_text(start)
    for name, layers in (("one", 1), ("two", 2)):
        yaml = f"# @package _global_\nmodel: {{num_layers: {layers}}}\n"
        (tmp_path / "mine" / "size" / f"{name}.yaml").write_text(yaml)
    done = shell(tmp_path, "-cd", "mine", "-cn", "my", "+size=one,two", "-m")
    assert done.returncode == 3 and done.stderr == ""
    assert "job=1 dir=there/1" in done.stdout and done.stdout.count("fp8=True") == 2


def test_sweep_goes_on_after_a_failed_job_and_tells(tmp_path: Path) -> None:
    done = shell(tmp_path, "-m", "model.num_layers=2,99,1", "hydra.sweep.dir=here")
    assert done.returncode == 3  # of the first job that failed
    assert done.stdout.count("fp8=") == 3 and "here/2" in done.stdout
    assert "AssertionError: a bug" in done.stderr  # a bug keeps its traceback


def test_sweep_ends_when_a_job_was_saved_on_a_signal(tmp_path: Path) -> None:
    done = shell(tmp_path, "-m", "model.num_layers=3,1")
    assert done.returncode == 75 and done.stdout.count("fp8=") == 1


def never(cfg: DictConfig, info: AppInfo) -> int:
    raise AssertionError("the task was not to run")


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["model.fp8=nonsense", "--help"], never, prog="train") == 0
    shown = capsys.readouterr().out
    assert "train model.fp8=True" in shown
    for path, key in all_keys().items():
        assert f"  {path.rpartition('.')[2]}=" in shown and key.help in shown


def test_cfg_prints_the_composed_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["--cfg", "job", "model.seed=7"], never) == 0
    composed = OmegaConf.create(capsys.readouterr().out)
    sections = {"restore_from_path", "trainer", "exp_manager", "model"}
    assert composed.model.seed == 7 and set(composed) == sections
    assert run_app(["-c", "job", "--resolve"], never) == 0
    assert "${" not in capsys.readouterr().out
    assert run_app(["-c", "job", "model.seed=7", "model.sequence_parallel=False"], never) == 0
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert comments[0] == "# model.seed = 7 (command line; default job: 1234)"
    assert comments[1].startswith("# inert: model.sequence_parallel=False (command line): ")
    assert run_app(["-c", "job", "model.seed=x"], never) == 2
    assert run_app(["-c", "job", "-m"], never) == 2


def test_options_between_overrides(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [pretrain_gpt, _self_]\nmodel: {seed: 5}\n")
    seen: list[AppInfo] = []

    def task(cfg: DictConfig, info: AppInfo) -> int:
        seen.append(info)
        assert cfg.model.seed == 5 and cfg.model.fp8 and cfg.model.num_layers == 2
        return 7

    args = ["model.fp8=True", "-cd", str(tmp_path), "--config-name=mine", "model.num_layers=2"]
    assert run_app(args, task) == 7
    assert seen == [
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
    def task(cfg: DictConfig, info: AppInfo) -> int:
        raise error

    assert run_app([], task) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_bugs_of_the_task_are_raised() -> None:
    with pytest.raises(AssertionError):
        run_app([], never)
