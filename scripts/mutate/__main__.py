"""Mutate the code that handles FP8, and write a table of the mutants that no test notices.

python -m scripts.mutate [--decided N] [--seed N] [--files PATTERN …] [--again] [--minutes N]

The seed orders the mutants (`mutants.py`); they are tried one after the other, each by the tests
of the files that `scope.py` names which run its line (`covering.py`), until N are decided: killed
or survived. Those that are justified as equivalent in `equivalent.json` are not tried. Results
are kept in `results.jsonl` beside this file, so that the command continues where it ended, also in
another checkout; a result is dropped when the text of its line is gone. --again tries those that
survived, or were not decided, again. A test that notices a mutant must pass without it, and one
that is skipped says nothing. The table is docs/evidence/mutation.md. The command needs
`pip install -e '.[mutation]'`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.mutate import scope, table
from scripts.mutate.covering import Tests
from scripts.mutate.mutants import Mutant, places
from scripts.mutate.runner import Outcome, copy_tree, measure, preload, run_tests

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
    parser.add_argument(
        "--files",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="try those among the first mutants which are in such files",
    )
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutate")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.jsonl"))
    parser.add_argument("--table", type=Path, default=ROOT / "docs/evidence/mutation.md")
    given = parser.parse_args(argv)
    preload()
    run = Run(given.folder.absolute(), given.results, given.seed)
    end = time.monotonic() + 60 * given.minutes
    run.decide(given.files, given.decided, given.again, end)
    given.table.write_text(table.page(list(run.rows.values()), given.seed, given.decided))
    return 0


def _commit() -> str:
    words = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Run:
    """Try mutants in a copy of the tree and keep each result as a line of a file."""

    def __init__(self, folder: Path, results: Path, seed: int) -> None:
        self.folder, self.results, self.tree = folder, results, folder / "tree"
        self.commit = _commit()
        self.places = {place.key: place for place in places(ROOT, scope.files(ROOT), seed)}
        self.rows: dict[str, table.Row] = {}
        if results.exists():
            known = [table.Row(**json.loads(line)) for line in results.read_text().splitlines()]
            kept = {row.key: row for row in known if row.key in self.places}
            for key, row in kept.items():
                self.rows[key] = replace(row, line=self.places[key].change.begin[0])
        folder.mkdir(parents=True, exist_ok=True)
        copy_tree(ROOT, self.tree)
        log = folder / "log-measured.txt"
        self.tests = Tests(
            self.tree,
            folder / "measured",
            lambda file: measure(self.tree, file, LIMIT_SECONDS, log),
        )
        self._sound: dict[str, bool] = {}  # tests, without a mutant

    def decide(self, patterns: Sequence[str], wanted: int, again: bool, end: float) -> None:
        """Try mutants until enough are decided or the time is over."""
        decided = 0
        for place in self.places.values():
            if decided >= wanted or time.monotonic() > end:
                break
            row = self.rows.get(place.key)
            if not any(fnmatchcase(place.file, pattern) for pattern in patterns):
                decided += 1  # it is left to another call
                continue
            if row is None or self._is_due(row, again):
                mutant = place.make()
                if mutant is None:
                    continue
                row = self._row(mutant, Outcome("equivalent", 0.0))
                if not table.why_equivalent(row):
                    row = self._row(mutant, self._try(mutant))
                self._keep(row)
            decided += row.verdict in ("killed", "survived") and not table.why_equivalent(row)

    def _is_due(self, row: table.Row, again: bool) -> bool:
        """Whether a mutant is tried once more; one that is justified as equivalent is not."""
        wanted = {"equivalent"} | ({"survived", "timeout", "error"} if again else set())
        return row.verdict in wanted and not table.why_equivalent(row)

    def _try(self, mutant: Mutant) -> Outcome:
        """Return what the tests say of a mutant; a test that fails without it is an error."""
        kills = Counter(r.by for r in self.rows.values() if r.file == mutant.file)
        target, log = self.tree / mutant.file, self.folder / "log.txt"
        outcome = Outcome("survived", 0.0, "no test runs the line")
        for batch in self.tests.batches(mutant, scope.tests_of(mutant.file), kills):
            target.write_text(mutant.source)
            try:
                last = run_tests(self.tree, list(batch), 120 + 10 * sum(batch.values()), log)
            finally:
                target.write_text(mutant.original)
            seconds = outcome.seconds + last.seconds
            if outcome.verdict == "error" and last.verdict == "survived":
                last = outcome
            outcome = replace(last, seconds=seconds)
            if outcome.verdict in ("killed", "timeout"):
                break
        if outcome.verdict == "killed" and not self._passes(outcome.by):
            return Outcome("error", outcome.seconds, f"{outcome.by} fails without a mutant")
        return outcome

    def _passes(self, test: str) -> bool:
        """Whether a test passes alone without a mutant; a file that cannot be imported did."""
        if "::" in test and test not in self._sound:
            log = self.folder / "log-sound.txt"
            self._sound[test] = (
                run_tests(self.tree, [test], LIMIT_SECONDS, log).verdict == "survived"
            )
        return self._sound.get(test, True)

    def _row(self, mutant: Mutant, outcome: Outcome) -> table.Row:
        return table.Row(
            key=mutant.key,
            file=mutant.file,
            line=mutant.line,
            before=mutant.before,
            after=mutant.after,
            verdict=outcome.verdict,
            by=outcome.by,
            seconds=round(outcome.seconds, 1),
            commit=self.commit,
        )

    def _keep(self, row: table.Row) -> None:
        self.rows[row.key] = row
        rows = sorted(self.rows.values(), key=lambda kept: kept.key)
        text = "".join(json.dumps(asdict(kept), ensure_ascii=False) + "\n" for kept in rows)
        self.results.write_text(text)
        words = f"{row.verdict:9}{row.seconds:6.0f} s  {row.file}:{row.line}  {row.after}"
        print(f"{words}  [{row.by}]", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
