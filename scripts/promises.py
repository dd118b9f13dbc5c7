"""List the promises of README and guide: sentences that a reader may hold the project to.

    python -m scripts.promises            each promise, with its test
    python -m scripts.promises --missing  those without one

A promise is a sentence with "always", "any", "never", "bit for bit" or "refused", or with a
figure that was measured. `tests/promises.yaml` names for each the test that holds it, or says where
it was measured, or why none can hold it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from scripts.packages import ROOT, packages

PAGES = (
    "README.md",
    *(f"{name}/README.md" for name in packages()[1:]),
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs/guide").glob("*.md")),
    "docs/reference/secrets.md",
)
TABLE = ROOT / "tests/promises.yaml"
SHORTEST = 3  # words; the cells of a table that say one word belong to their row
_WORDS = re.compile(r"\b(always|any|never|bit for bit|refuse[sd]?)\b", re.IGNORECASE)
_FIGURE = re.compile(
    r"(?<![\w.=])\d[\d.,]*(?: to \d[\d.,]*)?\s?"
    r"(?:%|s\b|ms\b|minutes?\b|seconds?\b|hours?\b|[GMK]i?B\b|times\b|bits? a byte\b)"
)


@dataclass(frozen=True)
class Promise:
    """Hold a sentence of a page; `text` has single spaces and no links."""

    page: str
    text: str


def promises_of(page: str, markdown: str | None = None) -> Iterator[Promise]:
    """Yield the promises of a page, or of another text for it, those of tables and lists too."""
    for text in sentences(markdown or (ROOT / page).read_text(encoding="utf-8")):
        if len(text.split()) >= SHORTEST and (_WORDS.search(text) or _FIGURE.search(text)):
            yield Promise(page, text)


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences and cells of a page, without code blocks, headings, links and marks."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=[-|#*] ?|\d+\. )", text):
        if block.lstrip().startswith("#"):
            continue
        for cell in block.split("|"):
            flat = " ".join(re.sub(r"\*\*|^\s*(?:[-*]|\d+\.)\s", "", cell).split())
            yield from (found for found in re.split(r"(?<=[.!?])\s+(?=[A-Z`(])", flat) if found)


def read_table() -> dict[str, dict[str, str]]:
    """Return for each page what names the test of a sentence, by the sentence's beginning."""
    table: dict[str, dict[str, str]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def row_of(promise: Promise, table: dict[str, dict[str, str]]) -> tuple[str, str] | None:
    """Return the row of a promise: the longest beginning that fits, and its test or reason."""
    rows = table.get(promise.page, {})
    fitting = [begin for begin in rows if promise.text.startswith(begin)]
    return max(((b, rows[b]) for b in fitting), key=lambda row: len(row[0]), default=None)


def main() -> None:
    """Print promises, and what the table has for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--missing", action="store_true")
    args = parser.parse_args()
    table = read_table() if TABLE.exists() else {}
    for page in PAGES:
        for promise in promises_of(page):
            row = row_of(promise, table)
            if row is None or not args.missing:
                print(f"{page}: {promise.text}\n    {row[1] if row else 'MISSING'}")


if __name__ == "__main__":
    main()
