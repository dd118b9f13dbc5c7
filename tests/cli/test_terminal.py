"""What a terminal gets holds no control character of a value, and no endless value."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.cli.main import AppInfo, run_app
from megafp8.config.load import Loaded
from megafp8.observe.console import PlainConsole
from megafp8.secrets import printable, shortened, shown

ESCAPE = "\x1b[31mred\x07\x9b\u202e"


def refuse(loaded: Loaded, info: AppInfo) -> int:
    raise AssertionError("the task was not to run")


@pytest.mark.parametrize(
    "words",
    [
        [f"model.fp8={ESCAPE}"], [f"exp_manager.name={ESCAPE}"], [f"no.{ESCAPE}=1"], [ESCAPE],
        [f"exp_manager.explicit_log_dir={ESCAPE}"], ["-cn", ESCAPE], ["-cd", f"/no/{ESCAPE}"],
        [f"--{ESCAPE}"], ["-m", f"model.fp8={ESCAPE},True"], ["-m", f"hydra.sweep.{ESCAPE}=1"],
    ],
)  # fmt: skip
def test_a_message_has_no_control_characters(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(words, lambda cfg, info: 0) == 2
    streams = capsys.readouterr()
    for text in (streams.out, streams.err):
        assert all(c.isprintable() or c in "\n\t" for c in text), text
    assert "red" in streams.err


@pytest.mark.parametrize("size", [5_000, 200_000])
def test_a_message_is_shortened(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    for word in (f"model.fp8={'x' * size}", f"no.{'x' * size}=1", f"model.fp8='{'x ' * size}'"):
        assert run_app([word], refuse) == 2
        error = capsys.readouterr().err
        assert len(error) < 13_000 and "characters) …" in error


def test_a_line_feed_of_a_value_makes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(['exp_manager.name="a\nerror: forged"'], refuse) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_ordinary_text_stays() -> None:
    text = "a/long/path " * 20 + "\n\tloss 3.2 ▁▂█ µs ü"
    assert shown(text) == printable(text) == shortened(text) == text


def test_a_console_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    console = PlainConsole(sys.stdout)
    console.event(f"loaded {ESCAPE}")
    console.warn(ESCAPE)
    console.finish([("run", ESCAPE)])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [".x", "' '", '"a\nb"', "'\x1b[31m'", "x" * 300, "a/b"])
def test_a_name_is_refused_before_the_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app([f"exp_manager.name={name}", "--cfg", "job"], refuse) == 2
    assert capsys.readouterr().err.startswith("error: exp_manager.name=")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--resolve"], "--resolve: shows resolved values with --cfg job only"),
        (["-m", "model.seed=range(1,1)"], "the sweep has no job"),
    ],
)
def test_nothing_that_is_typed_is_dropped(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(words, refuse) == 2
    assert named in capsys.readouterr().err and not list(tmp_path.iterdir())
