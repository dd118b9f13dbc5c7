"""Choose the tests of a mutant: those that run its line, the most promising first.

Each file of tests runs once without a mutant. What passes there can kill a mutant; what is skipped
there cannot. The lines are those that the test's own process runs: tests that start processes (of
ranks) are taken for any line. All tests are taken for lines of Python outside of functions, and for
C sources those that run a call of the library.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.mutate.mutants import Mutant
from scripts.mutate.runner import Report
from scripts.mutate.scope import needs_own_process

IN_LIBRARY = "lib.megafp8_"  # a call of a C function


@dataclass(frozen=True)
class Measured:
    """Hold what a file of tests did without a mutant."""

    seconds: dict[str, float]  # of the tests that passed
    lines: dict[str, dict[str, list[str]]]  # by file and line
    starting: list[str]  # tests that start processes
    sources: dict[str, str]  # a digest of each of the files in `lines`


class Tests:
    """Measure files of tests when they are needed first, and keep that in a folder."""

    def __init__(self, tree: Path, folder: Path, measure: Callable[[str], Report]) -> None:
        self.tree, self.folder, self.measure = tree, folder, measure
        self._known: dict[str, Measured] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def measured(self, test: str, file: str) -> Measured:
        """Return what a file of tests does; kept while it and the mutated file stay the same."""
        path = self.folder / f"{test.replace('/', '-')}-{self._digest(test)}.json"
        if test not in self._known and path.exists():
            self._known[test] = Measured(**json.loads(path.read_text()))
        known = self._known.get(test)
        if known is None or known.sources.get(file, self._digest(file)) != self._digest(file):
            self._known[test] = known = self._measure(test)
            path.write_text(json.dumps(asdict(known)))
        return known

    def _digest(self, file: str) -> str:
        return hashlib.sha256((self.tree / file).read_bytes()).hexdigest()[:16]

    def _measure(self, test: str) -> Measured:
        report = self.measure(test)
        passed = [name for name, outcome in report.outcomes.items() if outcome == "passed"]
        if not passed:
            raise RuntimeError(f"{test}: no test passes without a mutant; see {self.folder}'s log")
        seconds = {name: round(report.seconds[name], 4) for name in passed}
        sources = {file: self._digest(file) for file in report.lines}
        return Measured(seconds, report.lines, report.starting, sources)

    def batches(
        self, mutant: Mutant, files: Sequence[str], kills: Counter[str]
    ) -> Iterator[dict[str, float]]:
        """Yield the tests that may notice a mutant with their seconds, file by file.

        Those that killed other mutants come first, also in the files that are measured already, and
        then the quick ones.
        """
        tried: set[str] = set()
        for number, file in enumerate(files):
            found = self._able(mutant, file)
            if number == 0:
                together = [f for f in files[1:] if not needs_own_process(f)]
                for other in (f for f in together if f in self._known):
                    able = self._able(mutant, other)
                    found |= {test: able[test] for test in able if kills[test]}
            found = {test: seconds for test, seconds in found.items() if test not in tried}
            tried |= set(found)
            if found:
                order = sorted(found, key=lambda test: (-kills[test], found[test], test))
                yield {test: found[test] for test in order}

    def _able(self, mutant: Mutant, file: str) -> dict[str, float]:
        """Return the tests of a file that may notice a mutant, and their seconds."""
        known = self.measured(file, mutant.file)
        first, last, is_inside = statement(mutant.original, mutant.line, mutant.file)
        chosen = self._calling_c(file, known) if mutant.file.endswith((".c", ".h")) else None
        chosen = set(known.seconds) if chosen is None else chosen
        if is_inside:
            lines = known.lines.get(mutant.file, {})
            chosen = {t for n, tests in lines.items() if first <= int(n) <= last for t in tests}
            if "" in chosen:  # the line runs when the file of tests is imported
                chosen = set(known.seconds)
            chosen |= set(known.starting)
        return {test: known.seconds[test] for test in chosen if test in known.seconds}

    def _calling_c(self, test: str, known: Measured) -> set[str] | None:
        """Return the tests that run a line which calls the library; None: that is not known."""
        if IN_LIBRARY in (self.tree / test).read_text():
            return None  # the tests call it themselves
        chosen = set(known.starting)
        for file, lines in known.lines.items():
            if known.sources[file] != self._digest(file):
                return None
            texts = (self.tree / file).read_text().splitlines()
            for number, tests in lines.items():
                if IN_LIBRARY in texts[int(number) - 1]:
                    chosen |= set(tests)
        return chosen


def statement(source: str, line: int, file: str) -> tuple[int, int, bool]:
    """Return the lines of the statement at a line, and whether it is inside of a function."""
    if not file.endswith(".py"):
        return line, line, False
    spans, is_inside = [(line, line)], False
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body, begin, end = getattr(node, "body", None), node.lineno, node.end_lineno or 0
        if body:
            is_function = isinstance(node, ast.FunctionDef)
            is_inside = is_inside or (is_function and body[0].lineno <= line <= end)
            end = max(begin, body[0].lineno - 1)  # a compound statement's own lines
        if begin <= line <= end:
            spans.append((begin, end))
    first, last = max(spans[1:] or spans, key=lambda span: span[0])
    return first, last, is_inside
