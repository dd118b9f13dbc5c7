"""Mutate the code that handles FP8, and write a table of the mutants that no test notices.

python -m scripts.mutate [--decided N] [--seed N] [--files PATTERN …] [--again] [--minutes N]

The seed orders the mutants (`mutants.py`); they are tried one after the other, each by the tests
that `scope.py` names for its file, until N are decided: killed or survived. Those that are
justified as equivalent in `equivalent.json` are not counted. Results are kept in build/mutate and
used again, so that the command continues where it ended; --again tries those that survived, or ran
out of time, again. A test that notices a mutant must pass without it. The table is
docs/mutation.md. The command needs `pip install -e '.[mutation]'`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.mutate import scope, table
from scripts.mutate.mutants import Mutant, candidates
from scripts.mutate.runner import Outcome, copy_tree, preload, run_tests

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900.0
SEED = 20261123


def main(argv: Sequence[str]) -> int:
    """Try mutants and write the table; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--decided", type=int, default=200, help="mutants to decide")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--files", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutate")
    parser.add_argument("--table", type=Path, default=ROOT / "docs/mutation.md")
    given = parser.parse_args(argv)
    files = [f for f in scope.files(ROOT) if any(fnmatchcase(f, p) for p in given.files)]
    preload()
    run = Run(given.folder.absolute(), given.seed)
    run.decide(files, given.decided, given.again, time.monotonic() + 60 * given.minutes)
    if given.files == ["*"]:
        given.table.write_text(
            table.page(list(run.rows.values()), given.seed, _commit(), given.decided)
        )
    return 0


def _commit() -> str:
    words = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Run:
    """Try mutants in a copy of the tree and keep each result as a line of a file."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.tree = folder, seed, folder / "tree"
        self.rows: dict[str, table.Row] = {}
        self._passing: dict[str, bool] = {}  # tests, without a mutant
        folder.mkdir(parents=True, exist_ok=True)
        self.results = folder / f"results-{seed}.jsonl"
        if self.results.exists():
            for line in self.results.read_text().splitlines():
                row = table.Row(**json.loads(line))
                self.rows[row.key] = row
        copy_tree(ROOT, self.tree)

    def decide(self, files: Sequence[str], wanted: int, again: bool, end: float) -> None:
        """Try mutants until enough are decided or the time is over."""
        decided = 0
        for mutant in candidates(ROOT, files, self.seed):
            if decided >= wanted or time.monotonic() > end:
                break
            row = self.rows.get(mutant.key)
            if row is None or (again and row.verdict != "killed"):
                row = self._keep(mutant, self._try(mutant))
            decided += row.verdict in ("killed", "survived") and not table.why_equivalent(row)

    def _try(self, mutant: Mutant) -> Outcome:
        """Return what the tests say of a mutant; a test that fails without it is an error."""
        tests, log = scope.tests_of(mutant.file), self.folder / "log.txt"
        target = self.tree / mutant.file
        original = target.read_text()
        target.write_text(mutant.source)
        try:
            outcome = run_tests(self.tree, tests, LIMIT_SECONDS, log)
        finally:
            target.write_text(original)
        if outcome.verdict == "killed" and not self._passes(outcome.by):
            return Outcome("error", outcome.seconds, f"{outcome.by} fails without a mutant")
        return outcome

    def _passes(self, test: str) -> bool:
        """Whether a test passes without a mutant; a file that pytest could not end, as a whole."""
        if test not in self._passing:
            log = self.folder / "log-sound.txt"
            sound = run_tests(self.tree, [test], LIMIT_SECONDS, log)
            self._passing[test] = sound.verdict == "survived"
        return self._passing[test]

    def _keep(self, mutant: Mutant, outcome: Outcome) -> table.Row:
        row = table.Row(
            key=mutant.key,
            file=mutant.file,
            line=mutant.line,
            before=mutant.before,
            after=mutant.after,
            verdict=outcome.verdict,
            by=outcome.by,
            seconds=round(outcome.seconds, 1),
        )
        self.rows[row.key] = row
        with self.results.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(
            f"{row.verdict:9}{row.seconds:6.0f} s  {row.file}:{row.line}  {row.after}", flush=True
        )
        return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
