"""Format numbers and tables for people. Functions of a number accept NaN and infinities."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

_THOUSANDS = ("", "k", "M", "G", "T", "P")


def format_count(value: float) -> str:
    """Return a count with three significant digits and a thousands suffix: 21300 -> `21.3k`."""
    if not math.isfinite(value):
        return format_number(value)
    magnitude, suffix = abs(value), 0
    # A magnitude of 999.5 or more would print as `1000`; the next suffix is used for it.
    while magnitude >= 999.5 and suffix < len(_THOUSANDS) - 1:
        magnitude /= 1000
        suffix += 1
    digits = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    if suffix == 0 and magnitude == int(magnitude):
        digits = 0
    return f"{math.copysign(magnitude, value):.{digits}f}{_THOUSANDS[suffix]}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: `1 rank`, `2 ranks`; `many` is a plural not made with an s."""
    return f"{count} {one}" if count == 1 else f"{count} {many or one + 's'}"


def format_number(value: float, digits: int = 4) -> str:
    """Return a number with `digits` decimals, or in scientific notation.

    The latter is for values that would show no significant digit, or 100,000 and more.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value != 0 and not 10**-digits <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.{digits}f}"


def format_percent(fraction: float) -> str:
    """Return a fraction in percent with one decimal: 0.4123 -> `41.2 %`."""
    if not math.isfinite(fraction):
        return format_number(fraction)
    return f"{100 * fraction:.1f} %"


def format_bytes(num_bytes: float) -> str:
    """Return a size in binary units with one decimal: 1288490188 -> `1.2 GiB`."""
    if not math.isfinite(num_bytes):
        return format_number(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1023.95:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_tflops(tflops: float) -> str:
    """Return a number of TFLOP/s with its unit, in GFLOP/s if it is small."""
    if abs(tflops) < 0.1:
        return f"{format_number(1e3 * tflops, 1)} GFLOP/s"
    return f"{format_number(tflops, 2)} TFLOP/s"


def format_duration(seconds: float) -> str:
    """Return a duration such as `0:07`, `3:21`, `1:02:03` or `2d 03:04:05`.

    An unknown duration (NaN or infinite) is `-:--`.
    """
    if not math.isfinite(seconds):
        return "-:--"
    whole = max(0, round(seconds))
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def in_columns(
    rows: Sequence[Sequence[str]], right: Container[int] = (), gap: int = 2
) -> list[str]:
    """Return the rows of a table as lines, however wide they are.

    Args:
        rows: The cells of each row; all rows have equally many.
        right: The columns whose cells end at the right, as those of numbers do.
        gap: How many blanks stand between two columns.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = (
        Column(justify="right" if place in right else "left", no_wrap=True)
        for place in range(max(map(len, rows), default=0))
    )
    table = Table.grid(*columns, padding=(0, gap))
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=1_000_000, force_terminal=False)
    with console.capture() as printed:
        console.print(table)
    return [line.rstrip() for line in printed.get().split("\n")[: -1 if rows else 0]]
