"""An option of a command has an effect, or is refused by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megafp8.cli.commands import main

BYTES = ("--tokenizer", "bytes", "--workers", "0", "--output", "data/mine")
BPE = ("--tokenizer", "bpe", "--output", "data/mine")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some text\n" * 20)
    (tmp_path / "t.jsonl").write_text('{"text": "some"}\n{"text": "more"}\n')
    return tmp_path


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    return said


@pytest.mark.parametrize("option", ["--top-k 5", "--top-p 0.5", "--seed 7"])
def test_without_draws_nothing_is_said_of_them(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("generate", "run", "--prompt", "a", "--temperature", "0", *option.split())
    said = refused(words, capsys)
    assert option.split()[0] in said and "has no effect with --temperature 0" in said


@pytest.mark.parametrize("seed", ["-1", str(2**63), "9" * 30])
def test_a_seed_that_no_generator_takes(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(("generate", "run", "--prompt", "a", "--seed", seed), capsys)
    assert f"{seed} is not allowed" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("t.txt", *BYTES, "--text-key", "body"), "--text-key: has no effect"),
        (("t.jsonl", *BYTES, "--document", "line"), "--document: has no effect"),
        (("t.txt", *BPE, "--vocab-size", "9" * 25), "--vocab-size: is 99"),
        (("t.txt", *BPE, "--train-megabytes", "9" * 25), "--train-megabytes: is 99"),
        (("t.txt", *BPE, "--workers", "9" * 25), "--workers: is 99"),
    ],
)
def test_preprocess(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(("preprocess", *words), capsys)
    assert not Path("data").exists()


def test_both_kinds_of_files_have_both_options() -> None:
    words = ("t.txt", "t.jsonl", *BYTES, "--document", "line", "--text-key", "text")
    assert main(["preprocess", *words]) == 0


def test_a_folder_of_the_doctor_is_shown_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--disk", "\x1b[31mred"]) == 0
    assert "\x1b" not in capsys.readouterr().out
