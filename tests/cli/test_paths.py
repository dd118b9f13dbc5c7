"""A path that the user may not enter, or that no file can have, is one message in every command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megafp8.cli.commands import main
from megafp8.cli.main import run_app
from megafp8.cli.pretrain import task
from megafp8.errors import CheckpointError, RunError
from megafp8.runs.find import CHECKPOINTS_DIR
from megafp8.train.load import find_checkpoint

LONG = "x" * 300  # no file system has such a name; a folder without permission gives the same error
PREPARED = ("--output", "data/mine", "--tokenizer", "bytes", "--workers", "0")
NEW = ("preprocess", "t.txt", "--tokenizer", "bytes", "--workers", "0", "--output")
COMMANDS = (
    ("generate", LONG, "--prompt", "a"),
    ("export", LONG, "out"),
    ("report", LONG),
    ("runs", LONG),
    ("inspect", LONG),
    ("recipe", "check", f"{LONG}.py:Mine"),
    ("preprocess", LONG, *PREPARED),
    ("preprocess", "t.txt", *PREPARED[:2], "--tokenizer", f"hf:{LONG}"),
    (*NEW, LONG),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some text\n" * 20)
    return tmp_path


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a command that is refused with the code of a user's mistake."""
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    return said


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2])[:20])
def test_a_path_that_no_file_can_have(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "File name too long" in refused(words, capsys)


@pytest.mark.parametrize(
    "words",
    [
        ("--cfg", "job", "--config-dir", LONG),
        ("--cfg", "job", "--config-name", LONG),
        (f"exp_manager.exp_dir={LONG}", "exp_manager.name=a"),
        (f"exp_manager.explicit_log_dir={LONG}",),
        ("model.fp8=True", f"model.fp8_recipe={LONG}.py:Mine"),
    ],
    ids=lambda words: words[-1][:40],
)  # fmt: skip
def test_a_path_of_a_setting(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path().iterdir())
    assert run_app(words, task) == 2
    assert "File name too long" in capsys.readouterr().err
    assert set(Path().iterdir()) == before


def test_a_checkpoint_that_cannot_be_looked_for() -> None:
    with pytest.raises(RunError, match="File name too long. Give a shorter path"):
        find_checkpoint(Path(LONG), print)


@pytest.mark.parametrize("words", [("preprocess", "~nobody-here/t.txt", *PREPARED),
                                   (*NEW, "~nobody-here/data"),
                                   ("generate", "~nobody-here/run", "--prompt", "a")])  # fmt: skip
def test_the_home_folder_of_nobody(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "~nobody-here" in refused(words, capsys)


def test_the_home_folder_stands_in_every_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A YAML has `~` as it is written, since no shell reads it."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "run" / CHECKPOINTS_DIR).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"{folder}/run: has no checkpoint"):
        find_checkpoint(Path("~/run"), print)


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/.."])
@pytest.mark.parametrize("words", [NEW, ("report", "a", "--output")], ids=["preprocess", "report"])
def test_a_new_file_needs_a_name(
    words: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{name!r} does not end with the name of a file" in refused((*words, name), capsys)


def test_a_pipe_is_not_waited_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe.txt")
    said = refused(("preprocess", "pipe.txt", *PREPARED), capsys)
    assert "pipe.txt: file: cannot be read (it is no ordinary file)" in said
