"""List runs with their status, loss and speed, the newest last.

megafp8 runs [FOLDER …] [--all]
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megafp8.cli.commands import run_old_name
from megafp8.cli.job import command_parser, reports_errors
from megafp8.errors import ExitCode, RunError
from megafp8.observe.units import format_count, format_number
from megafp8.report.page import typical_speed
from megafp8.report.record import RunRecord, read_run
from megafp8.runs.find import USUAL_FOLDER, age, runs_below
from megafp8.secrets import printable, shown

NEWEST = 20
PIPE_WIDTH = 160  # columns if the output is not a terminal, so that names are not cut
COLORS = {"finished": "green", "failed": "red", "diverged": "red", "running": "cyan"}


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the list; return 0, or 2 after printing an error."""
    parser = command_parser("runs", __doc__)
    parser.add_argument(
        "folders", type=Path, nargs="*", default=[USUAL_FOLDER], help="folders of runs (runs)"
    )
    parser.add_argument("--all", action="store_true", help=f"not only the newest {NEWEST}")
    options = parser.parse_args(argv)
    _list(options.folders, None if options.all else NEWEST)
    return ExitCode.FINISHED


def _list(folders: Sequence[Path], newest: int | None) -> None:
    paths = sorted({path for folder in folders for path in _runs_in(folder)}, key=age)
    if not paths:
        named = ", ".join(map(str, folders))
        raise RunError(f"{named}: no runs. Name the folder that has them (exp_manager.exp_dir)")
    listed = paths if newest is None else paths[-newest:]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run", "status", "step", "loss", "val loss", "tokens/s", "last written"):
        is_number = title in ("step", "loss", "val loss", "tokens/s")
        table.add_column(
            title, justify="right" if is_number else "left", no_wrap=True, overflow="fold"
        )
    for path in listed:
        table.add_row(*_row(path))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    console.print(table)
    if len(listed) < len(paths):
        console.print(f"{len(paths) - len(listed)} older runs: --all")


def _row(path: Path) -> list[Text]:
    """Return the cells of a run; text from outside is never read as rich's markup."""
    name = Text(printable(shown(str(path)), kept=""))
    try:
        run = read_run(path)
    except RunError:  # it was removed meanwhile
        return [name, Text("removed", "red")]
    status = Text(printable(shown(run.status), kept=""), COLORS.get(run.status, "yellow"))
    return [name, status, *map(Text, _figures(run)), Text(_written(path))]


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, or in its folders, as a folder of sweeps has them."""
    below = sorted(folder.glob("*")) if folder.is_dir() else []
    return runs_below(folder) or [run for each in below for run in runs_below(each)]


def _figures(run: RunRecord) -> tuple[str, str, str, str]:
    total = run.max_steps
    steps = f"{run.last_step}/{total}" if total else str(run.last_step)
    losses = [run.figure(key) for key in ("train_loss", "val_loss")]
    loss, val = ("" if value is None else format_number(value) for value in losses)
    speed = typical_speed(run)
    return steps, loss, val, "" if speed is None else format_count(speed)


def _written(path: Path) -> str:
    times = []
    for file in path.glob("*"):
        with suppress(OSError):  # it was removed meanwhile
            times.append(file.stat().st_mtime)
    try:
        return datetime.fromtimestamp(max(times)).strftime("%Y-%m-%d %H:%M") if times else ""
    except (ValueError, OverflowError, OSError):  # a year beyond 9999
        return ""


if __name__ == "__main__":
    run_old_name("runs")
