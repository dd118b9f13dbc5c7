"""An import or an export that failed does not block the same command."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from megafp8.cli import import_hf
from megafp8.errors import CheckpointError, RunError
from megafp8.files import whole_folder
from megafp8.runs.tokenizer import copy_tokenizer


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_is_complete_or_as_it_was(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "a" / "model"
    if exists:
        folder.mkdir(parents=True)
    with pytest.raises(CheckpointError), whole_folder(folder, "last") as build:
        (build / "part").write_text("half")
        raise CheckpointError(build, "is wrong", "Mend it")
    assert folder.exists() == exists and (not exists or not list(folder.iterdir()))
    assert list((tmp_path / "a").iterdir()) == ([folder] if exists else [])
    with whole_folder(folder, "last") as killed:  # as a process that dies leaves it
        (killed / "half").write_text("x")
        left = killed.with_name(killed.name + "x")
        left.mkdir()
        (left / "half").write_text("x")
        (killed / "half").unlink()
        (killed / "sub").mkdir()
        (killed / "sub" / "file").write_text("whole")
    assert (folder / "sub" / "file").read_text() == "whole"
    assert folder.stat().st_mode & 0o777 == (tmp_path / "a").stat().st_mode & 0o777


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / ".model.part-abc").mkdir(parents=True)
    with whole_folder(folder, "last") as build:
        (build / "file").write_text("whole")
    assert (folder / "file").read_text() == "whole"
    with (
        pytest.raises(RunError, match="exists already and is not empty"),
        whole_folder(folder, "last"),
    ):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="exists already and is not empty"):
        whole_folder(tmp_path / "file", "last").__enter__()


def test_an_existing_folder_gets_the_file_that_makes_it_whole_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{letter}.json" for letter in "abcdefgh"]
    moved: list[str] = []
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        moved.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted)
    for last in names:
        folder = tmp_path / last
        folder.mkdir()
        with whole_folder(folder, last) as build:
            for name in names:
                (build / name).write_text("")
        assert sorted(moved) == names and moved[-1] == last
        moved.clear()


def test_a_full_disk_is_named_when_a_tokenizer_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(RunError, match=r"to.tokenizer.json: .*ENOSPC.*Free space"):
        copy_tokenizer(tmp_path / "from", tmp_path / "to")


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_import_leaves_nothing(
    tmp_path: Path,
    exists: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model has a configuration and no weights, as after a download that was interrupted."""
    config = '{"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, '
    config += '"n_positions": 8}'
    model, folder = tmp_path / "theirs", tmp_path / "ours"
    model.mkdir()
    (model / "config.json").write_text(config)
    if exists:
        folder.mkdir()
    for _ in range(2):
        assert import_hf.main([str(model), str(folder)]) == 2
        assert "is not empty" not in capsys.readouterr().err
    assert folder.exists() == exists and (not exists or not list(folder.iterdir()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"][1 - exists :]
