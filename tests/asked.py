"""Say whether pytest's option `-m` asks for the tests of one marker by name."""

from __future__ import annotations

import re


def asked_for(marker: str, expression: str) -> bool:
    """Whether the expression has the marker, without `not` before it: `slurm`, `slurm or hosts`."""
    words = re.findall(r"\w+", expression)
    return any(word == marker and words[at - 1 : at] != ["not"] for at, word in enumerate(words))
