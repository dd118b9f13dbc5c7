"""Texts of files and folders reach a terminal and new files without secrets and escape sequences.

A terminal obeys what follows an escape character, and a value may be of any length.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megafp8.cli import generate, preprocess, runs
from megafp8.observe.console import settings_lines

ESCAPE = "\x1b]0;owned\x07"
TOKEN = "hf_planted0123456789"
KEY = "planted_in_a_file_0123"
LONGEST = 5000  # characters of one line on a terminal


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def is_safe(text: str) -> bool:
    """Whether a text has no secret, no control character, and no endless line."""
    lines = text.split("\n")
    no_secret = TOKEN not in text and KEY not in text
    return no_secret and all(len(each) < LONGEST and "\x1b" not in each for each in lines)


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    return capfd


def test_the_list_of_runs(tmp_path: Path, printed: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"run{ESCAPE}{TOKEN}"
    folder.mkdir()
    record = {"identity": "x", "created": "2026", "sweep": False, "status": ESCAPE + "s" * 9000}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text("trainer: {max_steps: 3}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert runs.main([str(tmp_path)]) == 0
    assert is_safe(out := printed.readouterr().out), out


def test_preprocessed_data(tmp_path: Path, printed: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"in{ESCAPE}"
    folder.mkdir()
    lines = [json.dumps({"text": f"text {n} of some words"}) for n in range(50)]
    (folder / f"t{TOKEN}.jsonl").write_text("\n".join(lines))
    words = ["--tokenizer", "bytes", "--workers", "0", "--output", str(tmp_path / f"d{ESCAPE}")]
    assert preprocess.main([str(folder / f"t{TOKEN}.jsonl"), *words]) == 2
    assert "holds the value of the environment variable" in printed.readouterr().err
    assert preprocess.main([str(folder), *words]) == 0
    out, err = printed.readouterr()
    assert is_safe(out) and is_safe(err), out + err
    for file in tmp_path.glob("d*"):
        assert TOKEN.encode() not in file.read_bytes(), file.name


def test_a_setting_of_any_length_is_one_line_of_the_console() -> None:
    row = {"key": "a", "value": "word " * 9000, "origin": "command line", "default": None}
    (line,) = settings_lines([row])
    assert len(line) < LONGEST and "45000 characters" in line
    assert line.endswith("command line, default job null")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_writes(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of others may write anything; a file gets its text as it is."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    generate._write(f"def f():\n\t{ESCAPE}")
    written = capsys.readouterr().out
    assert written.startswith("def f():\n\t") and ("\x1b" in written) is not is_terminal
