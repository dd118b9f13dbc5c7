"""Test the command `megafp8`: its list, its errors, old names, and what it does not import."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from megafp8 import __version__
from megafp8.cli.commands import (
    APART,
    COMMANDS,
    GROUP,
    USES,
    Command,
    main,
    overview,
)
from megafp8.cli.completion import WITH_SETTINGS, values_of
from megafp8.cli.pretrain import typed_words
from megafp8.config.schema import all_keys
from megafp8.neighbours import FOLDERS, how_to_install
from megafp8.parallel.launch import LAUNCHER
from scripts.packages import projects
from tests.test_layers import ROOT
from tests.train.runs import Driver


def run(*argv: str, module: str = "megafp8", **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", module, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_the_list_names_every_command_and_fits_a_screen(capsys: pytest.CaptureFixture) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in [*COMMANDS, *APART])
        assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 80
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megafp8 {__version__}\n"


def test_the_list_has_every_command_once_below_what_it_is_for() -> None:
    assert sorted(name for names in USES.values() for name in names) == sorted([*COMMANDS, *APART])
    lines = overview().splitlines()
    assert lines.index("Before a large job:") < lines.index(
        f"  plan        {COMMANDS['plan'].about}"
    )


def test_every_command_line_module_is_a_command() -> None:
    """A module of cli/ that can be run by its own name is in the table."""
    folder = ROOT / "megafp8" / "cli"
    old = {path.stem for path in folder.glob("*.py") if "run_old_name(" in path.read_text()}
    new = {"pretrain", "finetune", "completion"}
    assert old - {"commands", "migrate"} | new == {command.module for command in COMMANDS.values()}
    for command in COMMANDS.values():
        assert callable(import_module(f"megafp8.cli.{command.module}").main)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("plann", "Did you mean plan?"),
        ("xyz", "Commands are pretrain, finetune"),
        ("model.fp8=True", "megafp8 pretrain model.fp8=True"),
        ("-m", "megafp8 pretrain -m"),
    ],
)
def test_a_wrong_command_is_an_error_with_a_hint(
    word: str, hint: str, capsys: pytest.CaptureFixture
) -> None:
    assert main([word]) == 2
    shown = capsys.readouterr()
    assert hint in shown.err and shown.err.startswith("error: ") and not shown.out


def package_with_commands(folder: Path, *entries: str) -> dict[str, str]:
    """Install a package whose only module prints its arguments; return the environment."""
    (folder / "shouts.py").write_text("def main(argv): return print('!', *argv) or 7\n")
    (folder / "shouts-1.0.dist-info").mkdir()
    (folder / "shouts-1.0.dist-info/METADATA").write_text("Name: shouts\nVersion: 1.0\n")
    text = "\n".join(["[megafp8.commands]", *entries])
    (folder / "shouts-1.0.dist-info/entry_points.txt").write_text(text)
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


def test_commands_of_installed_packages_are_found_by_their_entry_points(tmp_path: Path) -> None:
    others = package_with_commands(tmp_path, "shout = shouts:main")
    done = run("shout", "a", "--b", **others)
    assert (done.returncode, done.stdout) == (7, "! a --b\n")
    assert (
        "\nOther packages:\n  shout       a command of shouts\n" in run("--help", **others).stdout
    )
    assert "Did you mean shout?" in run("shoutt", **others).stderr
    for shell in ("bash", "fish"):
        assert "shout" in run("completion", shell, **others).stdout


def test_our_own_packages_declare_the_commands_that_are_in_the_list() -> None:
    """A clone runs them without an install, by the list; others see what the packages declare."""
    declared = [p.get("entry-points", {}).get(GROUP, {}) for p in projects().values()]
    declared = {name: target for each in declared for name, target in each.items()}
    assert declared == {
        name: f"{command.module}:main"
        for name, command in APART.items()
        if command.module.partition(".")[0] in projects()
    }


def test_no_package_replaces_a_command_of_ours(tmp_path: Path) -> None:
    others = package_with_commands(tmp_path, "runs = shouts:main", "migrate = shouts:main")
    for name in ("runs", "migrate"):
        assert "!" not in run(name, "--help", **others).stdout
    assert "shouts" not in run("--help", **others).stdout


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_command_whose_package_is_missing_is_named_with_the_line_that_installs_it(
    has_folder: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder with what Python has compiled may be left of a package that was removed."""
    if has_folder:
        (tmp_path / "megafp8_migrate_gone/__pycache__").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(APART, "migrate", Command("megafp8_migrate_gone", "translate"))
    for module in ("megafp8.cli.commands", "megafp8.neighbours"):
        monkeypatch.setattr(f"{module}.FOLDERS", (".", "megafp8_migrate_gone"))
    assert main(["migrate", "train.sh"]) == 2
    said = capsys.readouterr().err
    line = "In a clone of megafp8: pip install -e . -e ./megafp8_migrate_gone"
    assert said == f"error: megafp8 migrate needs the package megafp8_migrate_gone. {line}\n"


def test_the_line_that_installs_names_folders_and_no_package_of_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "a clone"
    for name in FOLDERS:
        (clone / name).mkdir(parents=True, exist_ok=True)
        (clone / name / "pyproject.toml").touch()
    monkeypatch.setattr("megafp8.neighbours.__file__", str(clone / "megafp8/neighbours.py"))
    for folder in FOLDERS:
        said, _, line = how_to_install(folder).partition("pip install ")
        words = shlex.split(line)
        assert said == "Install it: " and words[::2] == ["-e"] * (len(words) // 2)
        assert Path(words[-1]) == clone / folder and all(Path(p).is_dir() for p in words[1::2])


NEEDLESS = {"--help": [[], *([name] for name in COMMANDS)]}
NEEDLESS["--nowhere"] = [
    [name] for name in ("generate", "export", "import", "dryrun", "serve-diff")
]


def all_imported_by(lines: list[list[str]]) -> list[set[str]]:
    """Return which of torch, hydra and omegaconf each command imports, one after the other."""
    program = (
        "import sys\nfrom megafp8.cli.commands import main\nseen = set()\n"
        f"for argv in {lines!r}:\n"
        "    try: main(argv)\n    except SystemExit: pass\n"
        "    new = {'torch', 'hydra', 'omegaconf'} & sys.modules.keys() - seen\n"
        "    seen |= new\n    print('\\nimported:', *new)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        cwd=ROOT,
    )  # fmt: skip
    return [
        set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("imported:")
    ]


def imported_by(*argv: str) -> set[str]:
    """Return which of torch, hydra and omegaconf a command imports before it ends."""
    return all_imported_by([[*argv]])[0]


@cache
def imported() -> dict[tuple[str, ...], set[str]]:
    """Return what each command's help and check of arguments import first, in one process."""
    lines = [[*words, option] for option, all_words in NEEDLESS.items() for words in all_words]
    return dict(zip(map(tuple, lines), all_imported_by(lines), strict=True))


def test_the_list_of_commands_imports_no_library() -> None:
    assert imported()["--help",] == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_waits_for_torch(name: str) -> None:
    assert "torch" not in imported()[name, "--help"]


@pytest.mark.parametrize("name", [name for (name,) in NEEDLESS["--nowhere"]])
def test_no_check_of_arguments_waits_for_torch(name: str) -> None:
    assert "torch" not in imported()[name, "--nowhere"]


def test_an_old_name_runs_the_command_and_names_the_new_one(tmp_path: Path) -> None:
    done = run(str(tmp_path / "nowhere"), module="megafp8.cli.report")
    assert done.returncode == 2
    assert "`python -m megafp8.cli.report` is `megafp8 report` now" in done.stderr
    assert "error: " in done.stderr


def test_pretrain_checks_settings_and_finetune_has_its_own_job(
    driver: Driver, tmp_path: Path
) -> None:
    def forked(*words: str) -> subprocess.CompletedProcess:
        return driver.run_python("-m", "megafp8", *words, cwd=ROOT, folder=tmp_path)

    done = forked("pretrain", "model.fp9=True")
    assert done.returncode == 2 and "Did you mean model.fp8" in done.stderr
    done = forked("finetune", "--cfg", "job")
    assert done.returncode == 2 and "Give model.data.train_ds.file_names=FILE.jsonl" in done.stderr
    done = forked("pretrain", "--help")
    assert "megafp8 pretrain" in done.stdout


def test_training_sees_its_settings_and_the_words_that_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line `continue with` is made of the two."""
    seen: list[object] = []

    def run_process(run: Callable[[], int]) -> None:
        seen.extend([run(), sys.argv[1:], os.environ["MEGAFP8_STARTED_AS"]])

    monkeypatch.setenv("MEGAFP8_STARTED_AS", "")
    monkeypatch.delenv("MEGAFP8_STARTED_AS")
    monkeypatch.setattr(sys, "argv", ["megafp8", "finetune", "a=1", "b=2"])
    monkeypatch.setattr("megafp8.parallel.launch.run_process", run_process)
    monkeypatch.setattr("megafp8.cli.finetune.main", lambda argv: len(argv))
    main(["finetune", "a=1", "b=2"])
    assert seen == [2, ["a=1", "b=2"], "megafp8 finetune"]


@pytest.mark.parametrize(
    ("job", "words"),
    [("finetune_gpt", ["a=1"]), ("mine", ["--config-name=mine", "a=1"])],
)
def test_a_rank_shows_the_words_that_its_user_typed(
    job: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of `megafp8 finetune` get the name of its job as an option."""
    monkeypatch.setenv("MEGAFP8_STARTED_AS", "megafp8 finetune")
    for name in ("RANK", "WORLD_SIZE", LAUNCHER):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "argv", ["megafp8", f"--config-name={job}", "a=1"])
    assert typed_words() == ["megafp8", "finetune", *words]


def test_a_rank_of_a_batch_script_shows_the_line_that_submitted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started_as = r"env CONTAINER_MOUNTS=/my\ data,/runs sbatch --nodes=2 /a/pretrain.sbatch"
    monkeypatch.setenv("MEGAFP8_STARTED_AS", started_as)
    monkeypatch.setenv("MEGAFP8_ADDED", "trainer.num_nodes=2 trainer.devices=4")
    given = ["trainer.num_nodes=2", "a=1", "trainer.devices=4"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *given])
    submitted = ["env", "CONTAINER_MOUNTS=/my data,/runs", "sbatch", "--nodes=2"]
    assert typed_words() == [*submitted, "/a/pretrain.sbatch", "a=1"]


@pytest.mark.parametrize("command", [["pretrain_gpt.py"], ["-m", "megafp8", "pretrain"]])
def test_a_python_without_the_packages_says_which_to_use(command: list[str]) -> None:
    """`-S` leaves out installed packages, as the system's Python does after `make`."""
    done = subprocess.run(
        [sys.executable, "-S", *command], capture_output=True, text=True, cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 2 and "source .venv/bin/activate" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- completion


@cache
def bash_script() -> str:
    return run("completion", "bash").stdout


def completed(words: list[str]) -> list[str]:
    """Return what bash offers for the last of the words, which follow `megafp8`."""
    quoted = " ".join(f"'{word}'" for word in ["megafp8", *words])
    probe = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _megafp8 2>/dev/null\n"
    done = subprocess.run(
        ["bash", "-c", bash_script() + probe + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_settings() -> None:
    assert completed(["p"]) == ["pretrain", "preprocess", "plan"]
    assert completed(["pretrain", "model.fp8_amax"]) == [
        f"{key}=" for key in all_keys() if key.startswith("model.fp8_amax")
    ]
    assert completed(["plan", "preci"]) == ["precision="]
    assert completed(["runs", "model.f"]) == []
    assert completed(["pretrain", "model.fp8_recipe", "=", "row"]) == [
        "rowwise",
        "rowwise_with_gw_hp",
    ]
    assert completed(["pretrain", "model.fp8_recipe=row"]) == [  # a shell that keeps it together
        "model.fp8_recipe=rowwise",
        "model.fp8_recipe=rowwise_with_gw_hp",
    ]
    assert completed(["plan", "hardware", "="]) == ["h100", "h200", "b200"]
    assert completed(["pretrain", "model.fp8_hybrid", "="]) == ["True", "False", "null"]
    assert "llama3_8b" in completed(["compare", "model", "="])
    assert completed(["pretrain", "model.num_layers", "="]) == []
    assert completed(["recipe", ""]) == ["for", "table", "check"]
    assert set(WITH_SETTINGS) <= COMMANDS.keys()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_the_options_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell asks the command itself, here a file that runs this package."""
    program = tmp_path / "megafp8"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megafp8 "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert completed(["doctor", "--se"]) == ["--self-test"]
    assert completed(["compare", "--se"]) == ["--seeds"]


def test_keys_of_few_values_accept_each_that_is_completed() -> None:
    names = {"True": True, "False": False, "null": None}
    for path, key in all_keys().items():
        for value in values_of(key):
            read = int(value) if value.isdigit() else names.get(value, value)
            assert key.valid is None or key.valid.accepts(read), (path, value)
    assert sum(bool(values_of(key)) for key in all_keys().values()) > 80
    assert {"migrate", "audit"} <= set(completed([""]))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_words(shell: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    assert all(name in done.stdout for name in [*COMMANDS, *APART]) and "model.fp8=" in done.stdout
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=done.stdout, text=True, check=True)
