"""Write a plan as one offline HTML page with stacked bars of memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from megafp8.observe.units import format_bytes

COLORS = (
    "#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7",
    "#9c755f", "#bab0ac",
)  # fmt: skip
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
svg { width: 100%; height: auto; } text { font: 14px system-ui, sans-serif; fill: currentColor; }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; }
i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; }
pre { overflow-x: auto; font-size: 13px; }
@media (max-width: 40rem) { text { font-size: 22px; } h1 { font-size: 1.5rem; } }
"""
WIDTH, ROW, LABEL, TOTAL = 900, 44, 150, 130
"""Units of the pictures; a row begins with `LABEL` of them for its name, and ends with `TOTAL`."""


def page(
    *,
    title: str,
    lines: Sequence[str],
    memory: Mapping[str, Mapping[str, float]],
    limit: float,
    times: Mapping[str, Mapping[str, float]],
) -> str:
    """Return the page.

    `memory` has bytes by rank and kind, `limit` the bytes of a device, `times` seconds by precision
    and part; it is empty for a job that does not fit.
    """
    seconds = {name: f"{sum(parts.values()):.3g} s" for name, parts in times.items()}
    sizes = {name: format_bytes(sum(parts.values())) for name, parts in memory.items()}
    return "".join(
        (
            "<!doctype html><html lang=en><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>",
            f"<h2>Memory of one rank</h2>{_bars(memory, sizes, limit)}",
            f"<p>The line is the device's memory, {format_bytes(limit)}.</p>",
            f"<h2>Predicted time of a step</h2>{_bars(times, seconds, None)}" if times else "",
            "<h2>All figures</h2><pre>",
            escape("\n".join(lines)),
            "</pre></html>\n",
        )
    )


def _bars(
    rows: Mapping[str, Mapping[str, float]], totals: Mapping[str, str], limit: float | None
) -> str:
    """Return one stacked bar a row, with a line at `limit` and a legend."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    names = [name for name in names if any(parts.get(name, 0) > 0 for parts in rows.values())]
    longest = max([sum(parts.values()) for parts in rows.values()] + [limit or 0.0])
    scale = (WIDTH - LABEL - TOTAL) / longest
    color = dict(zip(names, COLORS * (1 + len(names) // len(COLORS)), strict=False))
    height = ROW * len(rows) + 8
    drawn = [f"<svg viewBox='0 0 {WIDTH} {height}' role=img>"]
    for place, (row, parts) in enumerate(rows.items()):
        top, left = ROW * place + 6, float(LABEL)
        drawn.append(f"<text x=0 y={top + 21}>{escape(row)}</text>")
        for name in names:
            width = parts.get(name, 0.0) * scale
            drawn.append(
                f"<rect x={left:.1f} y={top} width={width:.2f} height={ROW - 12} "
                f"fill='{color[name]}'><title>{escape(name)}</title></rect>"
            )
            left += width
        drawn.append(f"<text x={left + 8:.1f} y={top + 21}>{escape(totals[row])}</text>")
    if limit:
        at = LABEL + limit * scale
        drawn.append(
            f"<line x1={at:.1f} x2={at:.1f} y1=0 y2={height} stroke=currentColor "
            "stroke-dasharray='5 4'/>"
        )
    legend = "".join(
        f"<li><i style='background:{color[name]}'></i>{escape(name)}</li>" for name in names
    )
    return "".join(drawn) + f"</svg><ul>{legend}</ul>"
