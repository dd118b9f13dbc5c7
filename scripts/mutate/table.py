"""Write the table of a mutation run: the score of each part of the code, and the survivors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EQUIVALENT = Path(__file__).with_name("equivalent.json")
BY_HAND = Path(__file__).with_name("by_hand.json")
PARTS = {
    "C sources": "*.[ch]",
    "numerics": "fp8_numerics/",
    "fp8": "megafp8/fp8/",
    "parallel": "megafp8/parallel/",
    "optim": "megafp8/optim/",
    "TE's side": "te_cpu/",
    "ops": "megafp8/ops/",
}
TITLE = "# Would a test notice? Mutations of the code that handles FP8"
EXPLANATION = """\
`python -m scripts.mutate` changes one place of the code at a time and runs the fast tests that
should notice it: [scope.py](../../scripts/mutate/scope.py) says which files and tests,
[mutants.py](../../scripts/mutate/mutants.py) which changes, and
[covering.py](../../scripts/mutate/covering.py) chooses the tests that run the line. A mutant is
killed if a test fails, and survives if all pass; it is not decided if one is skipped that is not
skipped without it. [results.jsonl](../../scripts/mutate/results.jsonl) has every result. A mutant
that changes no result that anything reads is equivalent: it is justified in
[equivalent.json](../../scripts/mutate/equivalent.json), and neither tried from then on nor counted.
Triton's kernels are not mutated."""
PLANTED = """\
Mistakes that a person would make, also in files that the command does not mutate, each planted
alone beside the fast tests of its part. [by_hand.json](../../scripts/mutate/by_hand.json) has all
of them, with the first test that noticed each. Those below had survived: a test was then written
that notices them, which is named, or they change no result that anything reads, or nothing notices
them yet."""
SIDE_BY_SIDE = """\
Files were tried side by side (`--files`), so the decided ones are not the first of the seed's
order. They were among its first 200 when they were tried."""


@dataclass(frozen=True)
class Row:
    """Hold the result of one mutant."""

    key: str
    file: str
    line: int
    before: str
    after: str
    verdict: str  # killed, survived, timeout, error, or equivalent, which was not tried
    by: str
    seconds: float
    commit: str  # where it was tried


def why_equivalent(row: Row) -> str:
    """Return why the mutant cannot be noticed, or an empty string."""
    known = json.loads(EQUIVALENT.read_text())
    for one in known:
        if (one["file"], one["before"], one["after"]) == (row.file, row.before, row.after):
            return str(one["why"])
    return ""


def part_of(file: str) -> str:
    """Return the part of the code that a file belongs to."""
    if file.endswith((".c", ".h")):
        return "C sources"
    return next(part for part, start in PARTS.items() if file.startswith(start))


def page(rows: Sequence[Row], seed: int, wanted: int) -> str:
    """Return the page with the scores and all mutants that were not killed."""
    spared = ("survived", "equivalent")
    counted = [row for row in rows if not (row.verdict in spared and why_equivalent(row))]
    commits = ", ".join(dict.fromkeys(row.commit for row in sorted(rows, key=lambda r: r.commit)))
    lines = [TITLE, "", EXPLANATION, "", f"Seed {seed}, tried at the commits {commits}.", ""]
    lines += ["| part | decided | killed | survived | not decided |", "|---|---|---|---|---|"]
    parts = [part for part in PARTS if any(part_of(row.file) == part for row in counted)]
    for part in (*parts, "all"):
        own = [row for row in counted if part in ("all", part_of(row.file))]
        killed, survived = (sum(r.verdict == v for r in own) for v in ("killed", "survived"))
        left = len(own) - killed - survived
        lines.append(f"| {part} | {killed + survived} | {killed} | {survived} | {left} |")
    killed, survived = (sum(r.verdict == v for r in counted) for v in ("killed", "survived"))
    share = 100 * killed / max(1, killed + survived)
    decided = killed + survived
    lines += ["", f"**{killed} of {decided} decided mutants killed, {share:.1f} %.**"]
    if decided < wanted:
        lines[-1] += f" The target is {wanted} decided mutants: {wanted - decided} are left."
        lines += ["", SIDE_BY_SIDE]
    for title, chosen in (
        ("Survivors", [r for r in counted if r.verdict == "survived"]),
        ("Not decided", [r for r in counted if r.verdict not in ("survived", "killed")]),
        ("Equivalent", [r for r in rows if r not in counted]),
    ):
        lines += ["", f"## {title}", ""]
        lines += [_line(row) for row in sorted(chosen, key=lambda r: (r.file, r.line))] or ["None."]
    return "\n".join([*lines, *_by_hand()]) + "\n"


def _by_hand() -> Iterator[str]:
    """Yield the lines about mistakes that were planted by hand."""
    planted = json.loads(BY_HAND.read_text())
    verdicts = Counter(one["verdict"] for one in planted)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    yield from ("", "## Planted by hand", "", PLANTED, "", f"Of {len(planted)}: {counts}.", "")
    for one in planted:
        if one["verdict"] != "killed":
            yield f"- `{one['file']}`: `{one['before']}` → `{one['after']}` ({one['why']})"


def _line(row: Row) -> str:
    reason = why_equivalent(row) or row.by
    return f"- `{row.file}:{row.line}`: `{row.before}` → `{row.after}`" + (
        f" ({reason})" if reason else ""
    )
