"""Hold the texts of a shell script that is read and not run: pieces of words, and holes in them."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Private characters around the number of a hole; a script's own are replaced before."""
_HOLE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
SETS = r"(?:(?:\+\+|--)\s*([A-Za-z_]\w*)|\b([A-Za-z_]\w*)\s*(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--))"
"""The names that an arithmetic expression sets."""
_LARGEST = 10**15
_LONGEST_CUT = 4096
"""The longest text of which a pattern cuts a part; the time grows with the square of it."""
_LONGEST_PATTERN = 1024
_LONGEST_SOURCE, _LONGEST_SHOWN = 300, 3000
"""The longest text of what a hole depends on, and of a word with holes that a report shows."""
_COMPARES: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_ORDERS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip


class WordPart(NamedTuple):
    """Hold a part of a word; an unquoted one is split at blanks."""

    text: str
    is_quoted: bool


BREAK = WordPart("\0", False)
"""Stands between two words, such as the elements of an array."""


@dataclass
class Holes:
    """Number the holes in a script's texts.

    Each of `found` names what a part of a text depends on that the script does not say.
    """

    found: list[str] = field(default_factory=list)

    def new(self, source: str) -> str:
        """Return the text that stands for something unknown."""
        self.found.append(shortened(_without_marks(source), _LONGEST_SOURCE))
        return f"{_OPEN}{len(self.found) - 1}{_CLOSE}"

    def inside(self, text: str) -> list[str]:
        """Return what a text depends on, without what occurs twice."""
        return list(dict.fromkeys(self._source(number) for number in _HOLE.findall(text)))

    def shown(self, text: str) -> str:
        """Return a text as the script has it: each hole as the expansion that it comes from."""
        shown = _HOLE.sub(lambda found: self._source(found[1]), text[: 2 * _LONGEST_SHOWN])
        return text if shown == text else shortened(shown, _LONGEST_SHOWN)

    def _source(self, number: str) -> str:
        place = int(number[:9])
        return self.found[place] if place < len(self.found) else "?"


def shortened(text: str, length: int) -> str:
    """Return a text as it is, or its beginning and dots if it is longer."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _without_marks(text: str) -> str:
    return _HOLE.sub("...", text).replace(_OPEN, "").replace(_CLOSE, "")


def clean(text: str) -> str:
    """Return a script without the private characters that mark holes, and without NUL.

    Lines end as on Unix, and the last one is not continued.
    """
    marks = {ord(_OPEN): "?", ord(_CLOSE): "?", 0: "?"}
    return re.sub(r"\\\s*\Z", "\n", text.translate(marks).replace("\r\n", "\n"))


def fields_of(pieces: Sequence[WordPart]) -> list[str]:
    """Return the words of pieces: unquoted blanks and breaks separate them."""
    words: list[str] = []
    current: str | None = None
    for piece in pieces:
        if piece is BREAK:
            if current is not None:
                words.append(current)
            current = None
        elif piece.is_quoted:
            current = (current or "") + piece.text
        else:
            current = _split(piece.text, current, words)
    if current is not None:
        words.append(current)
    return [word for word in words if word]


def _split(text: str, current: str | None, words: list[str]) -> str | None:
    parts = re.split(r"[ \t\r\n]+", text)
    for number, part in enumerate(parts):
        if number and current is not None:
            words.append(current)
            current = None
        if part:
            current = (current or "") + part
    return current


def joined(pieces: Sequence[WordPart]) -> str:
    """Return the pieces as one text, as an assignment takes them."""
    return "".join(" " if piece is BREAK else piece.text for piece in pieces)


def compared(first: str, test: str, second: str) -> bool | None:
    """Return what a test of two known texts says; None for an operator that is not known."""
    if test in ("=", "=="):
        return first == second
    if test == "!=":
        return first != second
    if test in _COMPARES and re.fullmatch(r"-?\d{1,15}", first.strip()):
        if re.fullmatch(r"-?\d{1,15}", second.strip()):
            return _COMPARES[test](int(first), int(second))
    return None


def fits(text: str, pattern: str) -> bool | None:
    """Return whether a known text fits a pattern of `case` or `[[`; None if that is not decided."""
    expression = _glob(pattern)
    return None if expression is None else re.fullmatch(expression, text, re.DOTALL) is not None


def _glob(pattern: str) -> str | None:
    """Return a regular expression for a pattern with `*` and `?`; None if it has anything else."""
    for quote in ("'", '"'):
        if len(pattern) > 1 and pattern[0] == pattern[-1] == quote:
            inner = pattern[1:-1]
            return None if re.search(r"[$`\\'\"]", inner) else re.escape(inner)
    if len(pattern) > _LONGEST_PATTERN or re.search(r"""[][$`\\'"(){}~]""", pattern):
        return None
    return fnmatch.translate(pattern)


def cut(text: str, operation: str) -> str | None:
    """Return what `${NAME%suffix}` or `${NAME#prefix}` makes of a text, or None.

    Args:
        text: The value of the variable.
        operation: What follows the name, as `%.sh`.
    """
    match = re.fullmatch(r"(%%?|##?)(.*)", operation, re.DOTALL)
    if match is None:
        return None
    sign, rest = match.groups()
    glob = _glob(rest)
    if glob is None or len(text) > _LONGEST_CUT:
        return None
    lengths = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    for length in lengths:
        start = len(text) - length
        part, left = (
            (text[start:], text[:start]) if sign[0] == "%" else (text[:length], text[length:])
        )
        if re.fullmatch(glob, part, re.DOTALL):
            return left
    return text


def cost_of_cut(text: str) -> int:
    """Return how many characters `cut` reads of a text, about."""
    return min(len(text), _LONGEST_CUT) ** 2 // 8


def arithmetic(text: str, known: Mapping[str, str]) -> int | None:
    """Return the value of `$((...))` with whole numbers and known variables, or None.

    A choice `A ? B : C` is read where it is the whole.
    """
    inner = text.removeprefix("$((").removesuffix("))")
    inner = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda found: found[1] or found[2], inner)
    if len(inner) > 200 or not re.fullmatch(r"[\w\s+*/%()<>=!?:-]*", inner, re.ASCII):
        return None
    if choice := re.fullmatch(r"([^?:]*)\?([^?:]*):([^?:]*)", inner):
        inner = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
    try:
        return _evaluated(ast.parse(inner.strip().replace("/", "//"), mode="eval").body, known)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr, known: Mapping[str, str]) -> int | None:
    """Return the number that arithmetic gives, with `known` variables; None if it is not known."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        value = known.get(node.id, "")
        return int(value) if re.fullmatch(r"-?\d{1,15}", value) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _evaluated(node.operand, known)
        return None if inner is None else -inner
    if isinstance(node, ast.IfExp):
        test = _evaluated(node.test, known)
        return None if test is None else _evaluated(node.body if test else node.orelse, known)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ORDERS:
        first, second = (_evaluated(side, known) for side in (node.left, node.comparators[0]))
        if first is None or second is None:
            return None
        return int(_ORDERS[type(node.ops[0])](first, second))
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _evaluated(node.left, known), _evaluated(node.right, known)
    if left is None or right is None:
        return None
    result: int | None = None
    if type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](left, right)
    elif right and isinstance(node.op, ast.FloorDiv | ast.Mod):
        quotient = abs(left) // abs(right) * (1 if (left < 0) is (right < 0) else -1)  # as in C
        result = quotient if isinstance(node.op, ast.FloorDiv) else left - quotient * right
    return result if result is not None and abs(result) < _LARGEST else None


@dataclass(frozen=True)
class ShellCommand:
    """Hold the words of a command, in which holes stand for what is not known.

    `condition` says which condition decides whether the command runs; empty if it always runs.
    `environment` has the variables that the script exports before it.
    """

    words: tuple[str, ...]
    line: int
    condition: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Script:
    """Hold what was read of a script: its commands, and what was assumed on the way."""

    commands: list[ShellCommand] = field(default_factory=list)
    assumed: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    holes: Holes = field(default_factory=Holes)
