"""Say which flags of a job do nothing: with Megatron, Megatron Bridge or Accelerate.

megafp8 audit SCRIPT [ARGUMENT ...] [--env NAME=VALUE] [--source FOLDER_OR_WHEEL ...]
megafp8 audit --line 'pretrain_gpt.py --fp8-format hybrid ...'
megafp8 audit ACCELERATE_OR_BRIDGE_YAML

The framework's own code runs over Transformer Engine's Python on the CPU: it builds its
configuration, its recipe and a small model, and trains two steps on two ranks, with all flags about
FP8 and FP4 and without each of them. An answer is "reaches TE", "refused", "no effect" (the
configuration is the same, or the recipe and the step are) or "not decided". The script itself is
never run, nor any code or file that it names.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megafp8.cli import job
from megafp8.errors import ExitCode
from megafp8.secrets import say
from megafp8.specs.te_versions import DEFAULT_VERSION
from megafp8_migrate import environment_of, file_or_line
from megafp8_migrate.audit import report, request, runs, sources
from megafp8_migrate.audit.reads import Code

_GIVE_ONE = "Give a script of Megatron, or a YAML of Megatron Bridge or Accelerate"


@job.reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the answer for each flag; return 0, or 2 after printing an error."""
    parser = job.command_parser("audit", __doc__)
    parser.add_argument("file", type=Path, nargs="?", help="a script, or a YAML; it is not changed")
    parser.add_argument("argument", nargs="*", help="the script's own arguments: $1, $2, ...")
    parser.add_argument("--line", help="a command of Megatron's, instead of a file")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE",
        help="a variable of the environment in which the job runs",
    )  # fmt: skip
    parser.add_argument(
        "--source", action="append", default=[], type=Path, metavar="PATH",
        help="a wheel, a folder of wheels, or a folder that has the package (default: the "
        "installed package); may be given for several packages",
    )  # fmt: skip
    parser.add_argument(
        "--te", default=DEFAULT_VERSION, metavar="VERSION",
        help=f"the version of Transformer Engine (default: {DEFAULT_VERSION})",
    )  # fmt: skip
    options = parser.parse_args(argv)
    file, text, beside = file_or_line(options, _GIVE_ONE)
    env = environment_of(options.env)
    asked = request.read(text, file.name, options.argument, env, beside)
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="megafp8-audit-") as folder:
        work, unpacked = Path(folder, "work"), Path(folder, "wheels")
        work.mkdir()
        found = [
            sources.find(name, options.source, unpacked, needs)
            for name, needs in runs.NEEDED[asked.framework].items()
        ]
        code = Code([one.folder for one in found], runs.PACKAGES[asked.framework])
        asked, verdicts = runs.audit(asked, code, options.te, work)
    say(report.page(asked, found, options.te, verdicts).rstrip("\n"))
    return ExitCode.FINISHED


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a signal that ends the process raise an exception first, so that its folder is removed.

    The exit code is the one that a shell gives to a process that a signal has ended.
    """

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one does not disturb the end
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
