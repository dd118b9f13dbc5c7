"""Run every suite that this machine can run, and write one table of their results.

python scripts/nightly.py [SUITE …] [--table FILE] [--logs FOLDER]

Without names all suites run. One that cannot run is a row with the reason, unless an earlier night
ran it: results stay in the table, with their date and commit, so that a night can be done in parts
and on several machines. A suite that is named and cannot run is a failure. The exit code is 1 if a
suite failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/evidence/nightly.md"
TITLE = "# The last run of every suite"
EXPLANATION = """\
`make nightly` runs all suites that a machine can run and writes this table. `make nightly
ARGS="slow slurm"` runs the named ones and leaves the other rows as they are. A suite without a row
has not been run so yet. The last column has the reason where a suite could not run, otherwise the
machine. Skipped tests need a device or a
package that the machine lacks; the logs are in `build/nightly`."""
COLUMNS = ("suite", "passed", "failed", "skipped", "minutes", "date", "commit", "reason, machine")
SLURM = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "bwrap")
NOT_RUN = "not run"
NOT_FAST = "not gpu and not slow and not slurm and not hosts"


@dataclass(frozen=True)
class Suite:
    """Describe one suite.

    Attributes:
        name: The name in the table and on the command line.
        what: What it tries, in words.
        command: The words of its command; `{junit}` is a file for pytest's results.
        programs: Programs that it needs.
        packages: What to install if one is missing.
        root: Whether it needs root.
    """

    name: str
    what: str
    command: tuple[str, ...]
    programs: tuple[str, ...] = ()
    packages: str = ""
    root: bool = False

    def why_not(self) -> str:
        """Return why this machine cannot run the suite, or an empty string if it can."""
        missing = [name for name in self.programs if not shutil.which(name)]
        if missing:
            hint = f"; Debian: apt-get install {self.packages}" if self.packages else ""
            return f"{', '.join(missing)} not found{hint}"
        if self.root and os.geteuid() != 0:
            return "needs root"
        if self.name == "gpu" and not _has_gpu():
            return "this machine has no CUDA device"
        return ""


@dataclass(frozen=True)
class Result:
    """Hold one row of the table."""

    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None
    seconds: float | None = None
    reason: str = ""


def _pytest(*words: str) -> tuple[str, ...]:
    start = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    return (*start, "--junitxml", "{junit}", *words)


SUITES = (
    Suite("lint", "format, lint rules, spelling, types", ("make", "--no-print-directory", "lint")),
    Suite(
        "fast", "`make test`",
        _pytest("-m", NOT_FAST, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
    ),
    Suite(
        "torch-2.11", "fast tests on Python 3.12 with torch 2.11",
        (
            "make", "--no-print-directory", "test",
            "VENV=build/torch-2.11", "PYTHON=python3.12", "TORCH_PIN=2.11.0",
        ),
        ("python3.12",),
    ),
    Suite(
        "slow", "tests that take minutes each",
        _pytest("-m", "slow and not gpu and not slurm and not hosts", "-n", "2"),
    ),
    Suite(
        "fuzz", "10,000 settings and 1,000 damaged files; also in `slow`",
        _pytest("-m", "slow", "-s", "tests/foreign/test_fuzz.py"),
    ),
    Suite(
        "cpus", "numeric tests on imitated older CPUs",
        (sys.executable, "-m", "tests.cpu_levels", "--junitxml", "{junit}"),
        ("cc",), "gcc libc6-dev",
    ),
    Suite(
        "te", "Transformer Engine's own Python on CPUs: 2.4.0, 2.12.0 and 2.20.2",
        _pytest("tests/backends/te/test_real.py", "-k", "in_its_own_process"),
    ),
    Suite(
        "te-versions", "every release of Transformer Engine from 2.4 on, over the CPU's kernels",
        (sys.executable, "-m", "scripts.te_versions"),
    ),
    Suite(
        "tritons", "the GPU kernels, compiled by the Triton of each supported PyTorch",
        (sys.executable, "-m", "scripts.tritons"),
    ),
    Suite(
        "slurm", "jobs on a Slurm of two nodes", _pytest("-m", "slurm"),
        SLURM, "--no-install-recommends slurmctld slurmd slurm-client munge iproute2 bubblewrap",
        root=True,
    ),
    Suite(
        "hosts", "torchrun on two imitated hosts", _pytest("-m", "hosts"),
        ("ip", "nsenter"), "iproute2", root=True,
    ),
    Suite(
        "container", "the image: quick tests and the default job, without a network",
        ("make", "--no-print-directory", "test-container"),
        ("buildah", "podman", "runc", "mmdebstrap"),
        "--no-install-recommends buildah podman runc mmdebstrap", root=True,
    ),
    Suite(
        "slurm-container", "a Slurm job in the unpacked image is preempted and continues",
        ("make", "--no-print-directory", "test-slurm-container"),
        (*SLURM, "buildah", "podman", "mmdebstrap"),
        "--no-install-recommends buildah podman runc mmdebstrap bubblewrap slurmctld slurmd "
        "slurm-client munge iproute2", root=True,
    ),
    Suite(
        "removals", "each application and option is taken out; packages must be separable",
        (sys.executable, "-m", "scripts.removals"),
    ),
    Suite("gpu", "tests that need a CUDA device", _pytest("-m", "gpu")),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the suites and write the table; return 1 if a suite failed or a named one cannot run."""
    known = {suite.name: suite for suite in SUITES}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(known))
    parser.add_argument(
        "--table", type=Path, default=TABLE, help="default: docs/evidence/nightly.md"
    )
    parser.add_argument("--logs", type=Path, default=ROOT / "build/nightly")
    options = parser.parse_args(argv)
    unknown = [name for name in options.suites if name not in known]
    if unknown:
        parser.error(f"no suite {unknown[0]}: choose from {', '.join(known)}")
    options.logs.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.suites or known:
        suite = known[name]
        reason = suite.why_not()
        if reason:
            print(f"nightly: {name}: {NOT_RUN}: {reason}", flush=True)
            result = Result(reason=f"{NOT_RUN}: {reason}")
            if options.suites:
                failed.append(name)
        else:
            result = run(suite, options.logs)
            if result.failed:
                failed.append(name)
        rows = read_table(options.table)  # now: another night may have written it meanwhile
        if reason and name in rows and not rows[name][-1].startswith(NOT_RUN):
            continue  # what another machine, or an earlier night, found
        rows[name] = row_of(suite, result)
        options.table.write_text(table_of(rows))  # after each suite: a night may be cut short
    print(f"nightly: the table is {options.table}; commit it")
    if failed:
        print(f"nightly: failed: {', '.join(failed)}; the logs are in {options.logs}")
    return 1 if failed else 0


def run(suite: Suite, logs: Path) -> Result:
    """Run one suite, with its output in a file of `logs`."""
    log, junit = logs / f"{suite.name}.log", logs / f"{suite.name}.xml"
    junit.unlink(missing_ok=True)
    command = [word.replace("{junit}", str(junit)) for word in suite.command]
    print(f"nightly: {suite.name}: {' '.join(command)} > {log}", flush=True)
    # As in the Makefile: bytecode is kept, or each worker compiles all files of tests again.
    # `make nightly ARGS=…` would hand its ARGS to the make of a suite.
    left_out = ("PYTHONDONTWRITEBYTECODE", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "ARGS")
    kept = {name: text for name, text in os.environ.items() if name not in left_out}
    began = time.monotonic()
    with log.open("w") as stream:
        code = subprocess.run(
            command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=kept, check=False
        ).returncode
    seconds = time.monotonic() - began
    result = counted(log.read_text(errors="replace"), junit, code, seconds)
    print(f"nightly: {suite.name}: {result.passed} passed, {result.failed} failed", flush=True)
    return result


def counted(output: str, junit: Path, code: int, seconds: float) -> Result:
    """Return the counts of a suite: pytest's, where there are any, otherwise 1 for the command.

    pytest's last lines are counted, as a suite may call pytest several times. A suite that exits
    with another code than 0 has at least one failure.
    """
    passed = failed = skipped = 0
    for line in re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", output, re.MULTILINE):
        for number, kind in re.findall(r"(\d+) (\w+)", line):
            passed += int(number) * (kind == "passed")
            failed += int(number) * (kind in ("failed", "error", "errors"))
            skipped += int(number) * (kind == "skipped")
    if not passed + failed + skipped and junit.exists():
        suites = ElementTree.parse(junit).getroot().iter("testsuite")  # noqa: S314 (our own file)
        for node in suites:
            wrong = int(node.get("failures", 0)) + int(node.get("errors", 0))
            skipped += int(node.get("skipped", 0))
            failed += wrong
            passed += int(node.get("tests", 0)) - wrong - int(node.get("skipped", 0))
    if not passed + failed + skipped:
        passed = int(code == 0)
    reason = ""
    if code != 0 and not failed:
        failed = 1
        last = [line for line in output.splitlines() if line.strip()][-1:] or [""]
        reason = f"exit code {code}: {last[0][:160]}"
    return Result(passed, failed, skipped, seconds, reason)


def row_of(suite: Suite, result: Result) -> tuple[str, ...]:
    """Return the cells of a suite's row, without bars."""
    counts = (result.passed, result.failed, result.skipped)
    numbers = tuple("–" if number is None else str(number) for number in counts)
    minutes = "–" if result.seconds is None else f"{result.seconds / 60:.1f}"
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    note = (result.reason or _machine(suite)).replace("|", "/")
    what = suite.what.replace("|", "/")
    return (f"`{suite.name}`: {what}", *numbers, minutes, date, _commit(), note)


def table_of(rows: dict[str, tuple[str, ...]]) -> str:
    """Return the text of the table, in the order of the suites."""
    lines = [TITLE, "", EXPLANATION, "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(rows[s.name])} |" for s in SUITES if s.name in rows]
    return "\n".join(lines) + "\n"


def read_table(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the rows of an earlier table, by suite; none if there is no file."""
    rows = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))
        found = re.match(r"`([\w.-]+)`", cells[0])
        if line.startswith("|") and found and len(cells) == len(COLUMNS):
            rows[found[1]] = cells
    return rows


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/evidence/nightly.md"
    )
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + (
        " with changes" if changed else ""
    )


def _machine(suite: Suite) -> str:
    named = [word for word in suite.command if word.startswith("PYTHON=python")]
    version = named[0].removeprefix("PYTHON=python") if named else "{}.{}".format(*sys.version_info)
    return f"Python {version}, {os.cpu_count()} cores"


def _has_gpu() -> bool:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
