"""Make the data of two local tasks for lm-eval from the source of megafp8.

    python examples/lm_eval/make_data.py data/eval    # writes text.jsonl and word_order.jsonl

The default job trains on the standard library of Python, which does not have this text.
`text.jsonl` has every twentieth file. `word_order.jsonl` has questions, one of every second file:
a line of code with the three lines before it, and the same line with its words in another order. A
model that has learned nothing prefers either as often.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import megafp8

SHOWN = 3
FEWEST_WORDS = 5


def files() -> list[str]:
    """Return the texts of all modules, in the order of their paths."""
    folder = Path(megafp8.__file__).parent
    return [path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))]


def questions(texts: Iterable[str]) -> Iterator[dict[str, object]]:
    """Yield one question of each text that has a line with enough words."""
    draw = random.Random(1)
    for text in texts:
        lines = text.splitlines()
        asked = [i for i in range(SHOWN, len(lines)) if len(set(lines[i].split())) >= FEWEST_WORDS]
        if not asked:
            continue
        at = draw.choice(asked)
        words = lines[at].split()
        other = list(words)
        while other == words:
            draw.shuffle(other)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        choices = [indent + " ".join(words), indent + " ".join(other)]
        context = "\n".join(lines[at - SHOWN : at]) + "\n"
        yield {"context": context, "choices": choices, "answer": 0}


def main(folder: Path) -> None:
    """Write both files and say how much is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = files()
    found = {
        "text": [{"text": text} for text in texts[::20] if text],
        "word_order": list(questions(texts[::2])),
    }
    for name, rows in found.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        print(f"{path}: {len(rows)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
