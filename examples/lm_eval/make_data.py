"""Make the data of two local tasks for lm-eval from the source of megafp8.

    python examples/lm_eval/make_data.py data/eval    # writes text.jsonl and next_line.jsonl

The default job trains on the standard library of Python, which does not have this text.
`text.jsonl` has every tenth file. `next_line.jsonl` has questions: eight lines of code, and four lines
of which one comes next; the other three come from other places of the same file.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import megafp8

SHOWN, CHOICES = 8, 4
SHORTEST = 12  # characters of a line, so that brackets and `else:` are not asked for


def files() -> list[str]:
    """Return the texts of all modules, in the order of their paths."""
    folder = Path(megafp8.__file__).parent
    return [path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))]


def questions(texts: Iterable[str]) -> Iterator[dict[str, object]]:
    """Yield one question of each file that is long enough."""
    draw = random.Random(1)
    for text in texts:
        lines = text.splitlines()
        asked = [i for i in range(SHOWN, len(lines)) if len(lines[i].strip()) >= SHORTEST]
        if len({lines[i] for i in asked}) < SHOWN + CHOICES:
            continue
        at = draw.choice(asked)
        others = sorted({lines[i] for i in asked} - set(lines[at - SHOWN : at + 1]))
        choices = [lines[at], *draw.sample(others, CHOICES - 1)]
        draw.shuffle(choices)
        context = "\n".join(lines[at - SHOWN : at]) + "\n"
        yield {"context": context, "choices": choices, "answer": choices.index(lines[at])}


def main(folder: Path) -> None:
    """Write both files and say how much is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for text in files() if text]
    for name, rows in (
        ("text", [{"text": text} for text in texts[::10]]),
        ("next_line", list(questions(texts))),
    ):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        print(f"{path}: {len(rows)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
