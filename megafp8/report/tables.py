"""Write the tables of pages as HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape


def table(
    heads: Sequence[str], rows: Iterable[Iterable[str]], kind: str = "", kind_of_heads: str = ""
) -> str:
    """Return a table that scrolls where a page is too narrow.

    Args:
        heads: The titles of the columns.
        rows: The cells of each row, as `cell` returns them.
        kind: The table's class: a reader sorts the rows of a `sortable` one.
        kind_of_heads: The class of all titles but the first.
    """
    first, *others = map(escape, heads)
    titles = "".join([f"<th>{first}", *(f"<th{_class(kind_of_heads)}>{head}" for head in others)])
    body = "".join(f"<tr>{''.join(cells)}" for cells in rows)
    return (
        f"<div class=scroll><table{_class(kind)}><thead><tr>{titles}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def cell(text: str = "", kind: str = "", number: object = None) -> str:
    """Return a cell of a class; a finite `number` is what its column is sorted by."""
    value = ""
    if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < math.inf:
        value = f" data-value={number!r}"
    return f"<td{_class(kind)}{value}>{escape(text)}"


def label(name: str) -> str:
    """Return a cell with the name of a run or a tensor, which may be parted between words."""
    return "<td>" + re.sub(r"=|\.(?=[A-Za-z])", r"\g<0><wbr>", escape(name))


def _class(kind: str) -> str:
    return f" class='{kind}'" if " " in kind else f" class={kind}" if kind else ""
