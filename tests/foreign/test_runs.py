"""Test that the commands `runs` and `report` lose only what is damaged of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.cli import report, runs
from tests.report.made import make_run

DEEP = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
LINE = '{"step": 2, "loss": 1.0}\n'


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(content) and None


def fifo(name: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return make


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deep run.json": text("run.json", DEEP),
    "deep summary.json": text("summary.json", DEEP),
    "summary of other types": text("summary.json", '{"train_loss_steps": "x", "val_loss": [1]}'),
    "summary of large numbers": text("summary.json", '{"train_loss_steps": 1e400, "mfu": 1e308}'),
    "recursive config.yaml": text("config.yaml", "a: &a [*a]\n"),
    "deep config.yaml": text("config.yaml", f"a: {'[' * 3000}{']' * 3000}\n"),
    "bomb of config.yaml": text("config.yaml", BOMB),
    "fast_dev_run": text("config.yaml", "trainer: {fast_dev_run: abc, max_steps: [1]}\n"),
    "max_steps": text("config.yaml", f"trainer: {{max_steps: {'9' * 60}}}\n"),
    "a large step": text("metrics.jsonl", LINE + f'{{"step": {"9" * 300}, "loss": 1.0}}\n'),
    "a large loss": text("metrics.jsonl", LINE + f'{{"step": 3, "loss": {"9" * 39}}}\n'),
    "a loss of 1e308": text("metrics.jsonl", LINE * 3 + '{"step": 3, "loss": -1e308}\n'),
    "losses of other types": text("metrics.jsonl", LINE + '{"step": 3, "loss": "x"}\n'),
    "deep line": text("metrics.jsonl", LINE + DEEP + "\n"),
    "half a letter": text("events.jsonl", '{"kind": "start", "text": "\\ud800"}\n'),
    "settings that are no list": text(
        "events.jsonl", '{"kind": "start", "settings": {"non_default": 5}}\n'
    ),
    "health of other types": text(
        "health.jsonl", '{"step": 1, "tensors": {"layers.0.a.input": {"amax": 1e400, "mse": []}}}'
    ),
    "FIFO as metrics.jsonl": fifo("metrics.jsonl"),
    "FIFO as config.yaml": fifo("config.yaml"),
    "FIFO as console.log": fifo("console.log"),
    "FIFO as run.json": fifo("run.json"),
    "FIFO as .lock": fifo(".lock"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_costs_only_what_it_hits(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "good")
    DAMAGE[damage](make_run(tmp_path / "bad", model__seed=2))
    assert runs.main([str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "good" in listed
    assert "bad" in listed
    page = tmp_path / "page.html"
    for named in (tmp_path / "bad", tmp_path):
        assert report.main([str(named), "--output", str(page)]) == 0
        assert "bad" in page.read_text()


@pytest.mark.parametrize("name", ["[red]x[bold]", "a[/b]", "x\x1b[31m", "new\nline", "\udcff"])
def test_a_name_is_no_markup_and_no_control_sequence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / name)
    assert runs.main([str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "\x1b[31m" not in listed
    if name.isprintable():
        assert name in listed
    assert report.main([str(tmp_path / name)]) == 0


@pytest.mark.parametrize("content", ["[5]", '[{"job": "x"}]', DEEP, '{"a": 1}', "[[1]]"])
def test_a_damaged_sweep_is_a_page_of_its_runs(content: str, tmp_path: Path) -> None:
    make_run(tmp_path / "0")
    (tmp_path / "sweep.json").write_text(content)
    assert report.main([str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
