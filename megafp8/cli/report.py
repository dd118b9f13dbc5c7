"""Write the report of runs as one HTML page, also of unfinished and failed runs.

megafp8 report RUN… [--output FILE]

One run gets its report as report.html in its own directory. Several runs, or a folder of runs, are
compared on one page. `latest` stands for the newest run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.commands import run_old_name
from megafp8.cli.job import command_parser, new_file, reports_errors
from megafp8.errors import ExitCode, RunError
from megafp8.files import write_atomically
from megafp8.jobs.results import read_sweep, sweep_page
from megafp8.report.page import run_page, runs_page
from megafp8.report.record import RunRecord, read_run
from megafp8.report.writer import REPORT_FILE, require_page
from megafp8.runs.find import find_run, is_run, runs_below
from megafp8.secrets import say


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the page and print its path; return 0, or 2 after printing an error."""
    parser = command_parser("report", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run, or a folder")
    parser.add_argument(
        "--output", "-o", type=new_file, help="the page's file (default: report.html)"
    )
    options = parser.parse_args(argv)
    say(str(write_report(options.runs, options.output)))
    return ExitCode.FINISHED


def write_report(named: Sequence[Path], output: Path | None) -> Path:
    """Write the page of the named runs, and return its path.

    Raises:
        RunError: None of the runs can be read, or the page cannot be written or would replace
            another program's file.
    """
    if output is not None:
        require_page(output, "Name another file with --output")
    runs: list[RunRecord] = []
    problems: list[str] = []
    folder: Path | None = None
    for path in map(find_run, named):
        below = [path] if is_run(path) else runs_below(path)
        if not is_run(path) and below and len(named) == 1:
            folder = path
        try:
            runs += [read_run(run_path) for run_path in below or [path]]
        except RunError as error:
            problems.append(str(error))
    if not runs:
        raise RunError("\n".join(problems))
    if len(runs) == 1 and not problems and folder is None:
        page = run_page(runs[0])
        target = output or runs[0].path / REPORT_FILE
    elif folder is not None and (of_sweep := _page_of_sweep(folder, runs, problems)):
        page, target = of_sweep, output or folder / REPORT_FILE
    else:
        title = f"{len(runs)} runs" if folder is None else f"{len(runs)} runs in {folder}"
        page = runs_page(title, runs, problems=problems)
        target = output or (folder or Path()) / REPORT_FILE
    if output is None:
        require_page(target, "Name another file with --output")
    page = page.encode("utf-8", "replace").decode()  # the names of folders may be of any bytes
    try:
        write_atomically(target, page)
    except OSError as error:
        raise RunError(f"{target}: cannot be written ({error.strerror}). Use --output") from error
    return target


def _page_of_sweep(folder: Path, runs: Sequence[RunRecord], problems: Sequence[str]) -> str | None:
    """Return the page of a folder that a sweep wrote, unless it has runs of other jobs besides."""
    results = read_sweep(folder)
    if results is None:
        return None
    of_jobs = {Path(result.directory).name for result in results}
    if not {run.path.name for run in runs} <= of_jobs:
        return None
    return sweep_page(results, folder, problems)


if __name__ == "__main__":
    run_old_name("report")
