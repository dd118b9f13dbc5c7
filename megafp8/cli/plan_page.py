"""Write a plan as one offline HTML page: the verdict, bars of memory and time, and tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape

from megafp8 import __version__
from megafp8.cli.plan_text import (
    PARTS,
    Plan,
    Table,
    about_job,
    about_speed,
    assumptions,
    format_seconds,
    layout_text,
    memory_rows,
    memory_table,
    shown_ranks,
    time_table,
    traffic_table,
    verdict,
    whether_it_fits,
)
from megafp8.observe.units import format_bytes, plural
from megafp8.plan.search import Found
from megafp8.report import tables
from megafp8.report.page import PAGE_START, stylesheet
from megafp8.secrets import shown

COLORS = (
    "#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7",
    "#9c755f", "#bab0ac", "#2f4b7c", "#d45087", "#7a9e3a", "#a05195", "#665191", "#17becf",
    "#c49c2e", "#8c564b", "#5f6b77", "#2a9d8f", "#e76f51", "#c9184a", "#90a955",
)  # fmt: skip
"""Colors of all parts of a page: no part has the color of another one, also of another picture."""
STYLE = """
.bar { margin: .5rem 0; } .bar b { float: right; font-weight: 600; }
.track { display: flex; position: relative; height: 1.6rem; background: var(--box); }
.track i { display: block; height: 100%; }
.track u { position: absolute; top: -.25rem; bottom: -.25rem; border-left: 2px dashed var(--fg); }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .45em; }
td:first-child { white-space: normal; } th.number { text-align: right; }
ol { padding-left: 1.6rem; } li { margin: .6rem 0; }
li code { display: block; overflow-wrap: anywhere; font-size: .82rem; }
"""


@dataclass(frozen=True)
class _Section:
    """Hold a part of the page.

    Attributes:
        heading: Its title.
        table: Its table; None without one.
        bars: What its picture shows: the size of each part, by the name of the bar.
        limit: The size at which the picture has a line; None without one.
        lines: What follows the table.
    """

    heading: str
    table: Table | None
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    limit: float | None = None
    lines: Sequence[str] = ()


def page(
    plan: Plan,
    vocabulary: str,
    tokens: float | None,
    found: Sequence[Found],
    instead: str,
    argv: Sequence[str],
) -> str:
    """Return the page, which begins with the verdict and has all that is printed.

    Args:
        plan: The plan.
        vocabulary: Whose vocabulary it is, if it was not given.
        tokens: The tokens of the whole training, if they were given.
        found: The best layouts of a search.
        instead: Why the plan is not that of the layout that was asked for; else empty.
        argv: The arguments of the command.
    """
    spec, sections = plan.spec, list(_sections(plan, tokens))
    title = (
        f"Plan: {plural(spec.model.num_layers, 'layer')} x {spec.model.hidden_size} on "
        f"{spec.parallel.world_size} x {plan.hardware.name}"
    )
    replaced = [f"{instead}. This is the plan of the best layout:"] if instead else []
    pays = [] if plan.bf16 is None else verdict(plan, plan.bf16)
    names = dict.fromkeys(name for s in sections for parts in s.bars.values() for name in parts)
    colors = dict(zip(names, COLORS, strict=False))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = shown(f"megafp8 plan {shlex.join(argv)}")
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<div class='verdict {'same' if plan.fits else 'worse'}'>",
        *(
            f"<div><span>{escape(line)}</span></div>"
            for line in (*replaced, whether_it_fits(plan), *pays)
        ),
        f"</div>{_lines(about_job(plan, vocabulary))}<pre>{escape(command)}</pre>",
        *(_section(section, colors) for section in sections),
        _layouts(found),
        f"<h2>What the figures rest on</h2>{_lines(assumptions(plan))}",
        f"<footer>Written by megafp8 {__version__} on {now}.</footer></body></html>\n",
    ]
    style = f"<style>{stylesheet()}{STYLE}</style></head><body>"
    return "".join((PAGE_START, f"<title>{escape(title)}</title>", style, *body))


def _sections(plan: Plan, tokens: float | None) -> Iterator[_Section]:
    """Yield the pictures and tables of memory, time and messages."""
    bars = {
        f"stage rank {rank.pipeline_rank}": {
            name: float(values[place]) for name, values in memory_rows(plan)
        }
        for place, rank in enumerate(shown_ranks(plan))
    }
    yield _Section("Memory of one rank", memory_table(plan), bars, plan.hardware.memory_bytes)
    if plan.fits:
        both = {"FP8": plan.time, "BF16": plan.bf16} if plan.bf16 else {"step": plan.time}
        times = {
            name: {label: getattr(time, field) for field, label in PARTS.items()}
            for name, time in both.items()
        }
        speed = tuple(about_speed(plan, tokens))
        yield _Section("Predicted time of a step", time_table(plan), times, lines=speed)
    traffic = traffic_table(plan)
    none = () if traffic else ("messages: none, there is one rank",)
    yield _Section("Messages", traffic, lines=none)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"<p class=lead>{escape(line)}</p>" for line in lines)


def _section(section: _Section, colors: Mapping[str, str]) -> str:
    said = ""
    if section.limit is not None:
        said = f"<p class=dim>The line is the device's memory, {format_bytes(section.limit)}.</p>"
    table = "" if section.table is None else _table(section.table, colors)
    bars = _bars(section.bars, section.limit, section.table, colors)
    return f"<h2>{escape(section.heading)}</h2>{bars}{said}{table}{_lines(section.lines)}"


def _bars(
    rows: Mapping[str, Mapping[str, float]],
    limit: float | None,
    table: Table | None,
    colors: Mapping[str, str],
) -> str:
    """Return one stacked bar a row, with a line at `limit`; its total is the table's last row."""
    if not rows or table is None:
        return ""
    longest = max([sum(parts.values()) for parts in rows.values()] + [limit or 0.0])
    totals = next(cells for name, cells in table.rows if name in ("in all", "step"))
    drawn = []
    for (row, parts), total in zip(rows.items(), totals, strict=True):
        pieces = "".join(
            f"<i style='width:{100 * size / longest:.2f}%;background:{colors[name]}' "
            f"title='{escape(name)}'></i>"
            for name, size in parts.items()
            if size > 0
        )
        line = "" if limit is None else f"<u style='left:{100 * limit / longest:.2f}%'></u>"
        drawn.append(
            f"<div class=bar>{escape(row)}<b>{escape(total)}</b>"
            f"<div class=track>{pieces}{line}</div></div>"
        )
    return "".join(drawn)


def _table(table: Table, colors: Mapping[str, str]) -> str:
    """Return the table; a part of the picture has its color before its name."""
    rows = []
    for name, cells in table.rows:
        color = colors.get(name)
        swatch = f"<span class=swatch style='background:{color}'></span>" if color else ""
        rows.append(
            [f"<td>{swatch}{escape(name)}", *(tables.cell(text, "number") for text in cells)]
        )
    return tables.table([table.title, *table.columns], rows, kind_of_heads="number")


def _layouts(found: Sequence[Found]) -> str:
    """Return the layouts of a search, each with its settings below it."""
    if not found:
        return ""
    items = "".join(
        f"<li><b>{escape(format_seconds(layout.step_seconds))}, "
        f"{escape(format_bytes(layout.num_bytes))}</b>, {escape(layout_text(layout.spec))}"
        f"<code>{escape(' '.join(layout.overrides()))}</code>"
        for layout in found
    )
    return (
        "<h2>Layouts that fit, the fastest first (predicted)</h2><p class=dim>The settings add to "
        f"yours or replace them.</p><ol>{items}</ol>"
    )
