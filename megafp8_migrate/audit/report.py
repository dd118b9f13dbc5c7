"""Write the report of an audit as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megafp8_migrate.audit.request import Request
from megafp8_migrate.audit.sources import CodeFound
from megafp8_migrate.audit.verdict import NONE, OPEN, REACHES, REFUSED, FlagVerdict

_ORDER = (NONE, REFUSED, REACHES, OPEN)
LAYOUTS = {"tp2": "two tensor-parallel ranks", "dp2": "two replicas"}


def page(
    request: Request, found: Sequence[CodeFound], te_version: str, verdicts: Sequence[FlagVerdict]
) -> str:
    """Return the report: what was run, each flag with its answer, and what the answers rest on."""
    code = ", ".join(f"{one.distribution} {one.version or '(unknown version)'}" for one in found)
    ranks = " and ".join(LAYOUTS[layout] for layout in request.layouts)
    if request.framework == "accelerate":
        size = "a model of two norms and two linears"
    else:
        size = f"a GPT of {request.layers} layers"
    lines = [
        f"{code}, over Transformer Engine {te_version} on a CPU: {size}, {ranks}",
        "",
    ]
    width = max(len(verdict.flag.shown) for verdict in verdicts)
    for answer in _ORDER:
        for verdict in verdicts:
            if verdict.answer == answer:
                shown = verdict.flag.shown.ljust(min(width, 44))
                lines += [f"{shown}  {answer}: {verdict.why}", f"    {_where(verdict)}"]
    count = Counter(verdict.answer for verdict in verdicts)
    lines += ["", ", ".join(f"{count[answer]} {answer}" for answer in _ORDER if count[answer])]
    if request.features:
        lines.append(f"The small model does not have: {', '.join(request.features)}")
    return "\n".join(lines) + "\n"


def _where(verdict: FlagVerdict) -> str:
    if not verdict.places:
        return "never read"
    first, *others = verdict.places
    more = f", and {len(others)} more" if others else ""
    return f"read at {first}{more}"
