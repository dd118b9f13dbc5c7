"""Write one run, or several beside each other, as one HTML page that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from megafp8 import __version__
from megafp8.observe.health import state_of, worst_of
from megafp8.observe.units import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_tflops,
)
from megafp8.report import experts
from megafp8.report.curves import charts, differences, heat_maps
from megafp8.report.record import RunRecord, typical
from megafp8.report.tables import cell, label, table
from megafp8.runs.find import CHECKPOINTS_DIR

HERE = Path(__file__).parent
MOST_EVENTS = 300
MOST_SAMPLES = 12
MOST_CONFIG = 60_000  # characters of config.yaml
MOST_DIFFERENCES = 4  # settings that get a column of their own in the table of several runs
SAMPLE_CHARACTERS = 1_500
PAGE_START = (
    "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
    '<meta name=viewport content="width=device-width, initial-scale=1">'
)
"""The beginning of every page, by which `writer.is_page` knows the project's own pages."""

NOT_A_DIFFERENCE = (
    *(f"exp_manager.{name}" for name in ("name", "explicit_log_dir", "exp_dir")),
    *(f"{section}.resume_from_checkpoint" for section in ("model", "exp_manager")),
)
LONG = 40
"""The number of characters from which on a cell is not made as narrow as its longest word."""
BASELINE = "baseline"
"""What stands in the row of the run to which the others are compared."""

Figure = tuple[str, str, str]  # name, value, what it means

_OUTCOMES: tuple[tuple[str, str], ...] = (
    ("validation loss", "val_loss"),
    ("training loss", "train_loss"),
    ("tokens/s", "speed"),
    ("status", "status"),
    ("time", "wall_seconds"),
    ("MFU", "mfu_causal"),
    ("memory", "peak_memory_bytes"),
    ("steps", "step"),
)
"""The columns of what came out, in their order, before the settings that differ."""


def run_page(run: RunRecord) -> str:
    """Return the page of one run."""
    plots = charts([run], [run.name])
    health, loads = heat_maps(run), experts.load_maps(run)
    total = run.max_steps
    steps = f"step {run.last_step}" + (f" of {total}" if total else "")
    epochs = run.summary.get("epochs")
    data = f"epochs of the training data: {epochs}" if epochs else None
    lead = [run.summary.get("precision"), data, run.summary.get("data_warnings"), str(run.path)]
    body = [
        _head(run.name, run.status, f"{run.status}, {steps}", [str(t) for t in lead if t]),
        _checkpoints(run),
        _problems([(None, run.problems)]),
        _tiles(_figures(run)),
        _failure(run),
        _charts(plots),
        experts.load_of_layers(run),
        _load_map(loads),
        _health_map(health),
        _samples(run),
        _settings(run),
        _events(run),
    ]
    heats = {"health": health, "experts": loads}
    return _document(run.name, body, plots, heats)


def runs_page(
    title: str,
    runs: Sequence[RunRecord],
    *,
    labels: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    lead: Sequence[str] = (),
    notes: Sequence[tuple[str, str]] = (),
    outcomes: Mapping[str, str] | None = None,
    gaps: Mapping[str, tuple[float, str]] | None = None,
    more: str = "",
    more_charts: Sequence[Mapping[str, Any]] = (),
    problems: Sequence[str] = (),
    details: str = "",
) -> str:
    """Return a page of several runs: what differs, what came out, and their curves.

    Args:
        title: The page's title.
        runs: The runs.
        labels: Their names on the page; None takes the names of their directories.
        groups: For each run the name of its curve, if several runs have one curve together.
        lead: Lines under the title.
        notes: Failures: the name of a run and what it said.
        outcomes: How those of `notes` ended that left no run, in a word.
        gaps: By the names of runs, their loss over that of a baseline, as a number and in words;
            those of the baseline are `BASELINE`.
        more: HTML that follows the title, such as a verdict.
        more_charts: Plots before those of the runs.
        problems: What could not be read besides what the runs themselves say.
        details: HTML that follows the plots.
    """
    names = list(labels) if labels is not None else _names(runs)
    plots = [*(dict(chart) for chart in more_charts), *charts(runs, names, groups)] if runs else []
    baseline = [at for at, name in enumerate(names) if gaps and BASELINE in gaps.get(name, ())]
    if (best := _best(runs)) is not None and not more_charts:
        plots[1:1] = differences(runs, names, (*baseline, best)[0])
    read = [(name, run.problems) for name, run in zip(names, runs, strict=True)]
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p class=lead>{escape(line)}</p>" for line in lead),
        more,
        _problems([(None, tuple(problems)), *read]),
        _table(runs, names, notes, outcomes or {}, gaps or {}, is_judged=bool(more)),
        _failures(runs, names, notes),
        _charts(plots),
        details,
        _same_settings(runs),
    ]
    return _document(title, body, plots, {})


# ---- the document


def _document(
    title: str,
    body: Sequence[str],
    plots: Sequence[dict[str, Any]],
    heats: Mapping[str, Mapping[str, Any] | None],
) -> str:
    for index, plot in enumerate(plots):
        plot["id"] = f"chart{index}"
    # "<" inside the JSON could end the script element.
    maps = {name: heat for name, heat in heats.items() if heat is not None}
    data = json.dumps({"charts": plots, "heats": maps}, allow_nan=False, separators=(",", ":"))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return "".join(
        (
            PAGE_START,
            f"<title>{escape(title)}</title>",
            f"<style>{_asset('vendor/uPlot.min.css')}{stylesheet()}</style></head><body>",
            *body,
            f"<footer>Written by megafp8 {__version__} on {now}. Plots: uPlot (MIT).</footer>",
            f'<script type="application/json" id=data>{data.replace("<", chr(92) + "u003c")}',
            f"</script><script>{_asset('vendor/uPlot.iife.min.js')}</script>",
            f"<script>{_asset('page.js')}</script></body></html>\n",
        )
    )


def stylesheet() -> str:
    """Return the style of all pages."""
    return _asset("page.css")


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _head(name: str, status: str, text: str, lead: Sequence[str]) -> str:
    lines = "".join(f"<p class=lead>{escape(line)}</p>" for line in lead)
    return f"<h1>{escape(name)}<span class='pill {status}'>{escape(text)}</span></h1>{lines}"


def _problems(problems_of_runs: Sequence[tuple[str | None, Sequence[str]]]) -> str:
    lines = [
        escape(f"{name}: {problem}" if name else problem)
        for name, problems in problems_of_runs
        for problem in problems
    ]
    if not lines:
        return ""
    items = "".join(f"<li>{line}</li>" for line in lines)
    what = "Some files could not be read; the rest is shown:"
    return f"<div class=problems>{what}<ul>{items}</ul></div>"


# ---- figures


def _figures(run: RunRecord) -> list[Figure]:
    """Return what a run came to: name, value and meaning of each figure that it has."""
    figures: list[Figure] = []

    def add(name: str, value: float | None, text: str, meaning: str = "") -> None:
        if value is not None:
            figures.append((name, text, meaning))

    val, train = run.figure("val_loss"), run.figure("train_loss")
    add("validation loss", val, format_number(val or 0.0), "nats per token")
    if val is not None and val < 50:
        add("perplexity", val, format_number(math.exp(val), 2))
    bits = run.figure("val_bits_per_byte")
    beside = [
        f"{name} {format_number(other, 3)}"
        for name, key in (("unigram", "unigram_bits_per_byte"), ("xz", "xz_bits_per_byte"))
        if (other := run.figure(key)) is not None
    ]
    add("bits per byte", bits, format_number(bits or 0.0, 3), ", ".join(beside))
    steps = run.figure("train_loss_steps") or 1.0
    mean = int(steps) if math.isfinite(steps) else 1
    meaning = f"mean of the last {mean} steps" if mean > 1 else "last logged step"
    add("training loss", train, format_number(train or 0.0), meaning)
    speed = typical(run.metrics, "tokens_per_second")
    add("tokens per second", speed, format_count(speed or 0.0), "median of logged steps")
    mfu = typical(run.metrics, "mfu_causal")
    add("MFU", mfu, format_percent(mfu or 0.0), experts.meaning_of_mfu(run))
    tflops = typical(run.metrics, "tflops_causal")
    add("model FLOP/s", tflops, format_tflops(tflops or 0.0), "causal attention, all ranks")
    memory = run.figure("peak_memory_bytes")
    add("peak memory", memory, format_bytes(memory or 0.0), "of rank 0")
    share = run.figure("fp8_share_of_gemm_flops")
    if share:
        add("FP8 share", share, f"{100 * share:.1f} %", "of GEMM FLOPs, without attention")
    if (health := run.last_health) is not None:
        add("FP8 health", 1.0, state_of(health), f"{worst_of(health)}, at step {health.step}")
    wall = run.figure("wall_seconds")
    add("time", wall, format_duration(wall or 0.0), "of the last process")
    consumed = run.figure("consumed_tokens")
    add("tokens", consumed, format_count(consumed or 0.0), "trained on")
    figures += experts.figures(run)
    skipped = run.figure("num_skipped_steps")
    if skipped:
        add("skipped steps", skipped, f"{skipped:.0f}", "not finite")
    return figures


def typical_speed(run: RunRecord) -> float | None:
    """Return the median of the tokens per second of a run's logged steps, without its first."""
    return typical(run.metrics, "tokens_per_second")


def _tiles(figures: Sequence[Figure]) -> str:
    tiles = "".join(
        f"<div><small>{escape(name)}</small><b>{escape(value)}</b>"
        f"<small>{escape(meaning)}</small></div>"
        for name, value, meaning in figures
    )
    return f"<div class=tiles>{tiles}</div>" if tiles else ""


# ---- sections of one run


def _checkpoints(run: RunRecord) -> str:
    """Return links to the folders of the run's checkpoints, which lie beside its page."""
    links = ", ".join(
        f"<a href='{CHECKPOINTS_DIR}/{name}/'>{name}</a>" for name in map(escape, run.checkpoints)
    )
    return f"<p class=lead>checkpoints: {links}</p>" if links else ""


def _failure(run: RunRecord) -> str:
    if run.status != "failed" or not run.tail:
        return ""
    reasons = [str(e.get("text")) for e in run.events if e.get("kind") == "failed"]
    why = f"<p class=failed>{escape(reasons[-1])}</p>" if reasons else ""
    return f"<h2>How it ended</h2>{why}<pre>{escape(chr(10).join(run.tail))}</pre>"


def _charts(plots: Sequence[Mapping[str, Any]]) -> str:
    boxes = "".join(
        f"<div class='chart{' wide' if index == 0 else ''}' id=chart{index}><header>"
        f"<span>{escape(plot['title'])}</span><button type=button></button></header>"
        "<div class=plot></div></div>"
        for index, plot in enumerate(plots)
    )
    if not boxes:
        return ""
    hint = "<p class=dim>Drag over a plot to enlarge it; double-click to see all of it.</p>"
    return f"<h2>Curves</h2>{hint}<div class=charts>{boxes}</div>{_phases(plots)}"


def _phases(plots: Sequence[Mapping[str, Any]]) -> str:
    """Return in words the bands under the curve of the loss: the phases of a run's precision."""
    items = "".join(
        f"<li>steps {phase['begin']} to {phase['end']}: {escape(phase['text'])}</li>"
        for plot in plots
        for phase in plot.get("phases", ())
    )
    title = "The bands under the loss are phases of <code>model.precision_schedule</code>:"
    return f"<div class=dim><p>{title}</p><ol>{items}</ol></div>" if items else ""


def _health_map(heat: Mapping[str, Any] | None) -> str:
    if heat is None:
        return ""
    only_scales = all(
        set(measures) <= {"amax", "quant_scale"} for measures in heat["maps"].values()
    )
    hint = ""
    if only_scales:
        hint = (
            "<p class=dim>Only amaxes and scales were measured. A run with "
            "<code>model.fp8_health=full</code>, or of 100 steps on a CPU, also measures "
            "underflow, saturation and the signal-to-noise ratio.</p>"
        )
    return _map("health", heat, f"FP8 health: {heat['rows_are']} × steps", "tensor", hint)


def _load_map(loads: Mapping[str, Any] | None) -> str:
    hint = f"<p class=dim>{experts.MAP_HINT}</p>"
    return _map("experts", loads, "Experts: load of each one × steps", "layer", hint)


def _map(name: str, heat: Mapping[str, Any] | None, title: str, parts: str, hint: str = "") -> str:
    """Return the place where the page's script draws the maps of this name."""
    if heat is None:
        return ""
    return (
        f"<h2>{title}</h2>{hint}<div class=maps id=map-{name}><header>"
        f"<span><select class=role aria-label={parts}></select> "
        "<select class=measure aria-label=measure></select></span>"
        "<span class='steps dim'></span></header><div class=maprow><ul></ul>"
        "<canvas class=map></canvas></div><div class=legend><span class=low></span>"
        "<span class=scale></span><span class=high></span></div></div>"
    )


def _samples(run: RunRecord) -> str:
    if not run.samples:
        return ""
    shown = []
    for line in run.samples[-MOST_SAMPLES:]:
        prompt, text = str(line.get("prompt", "")), str(line.get("text", ""))
        shown.append(
            f"<p class=dim>after step {escape(str(line.get('step')))}; the prompt is bold</p>"
            f"<pre><b>{escape(prompt)}</b>{escape(text[:SAMPLE_CHARACTERS])}</pre>"
        )
    return f"<h2>Text that the model wrote</h2>{''.join(shown)}"


def _settings(run: RunRecord) -> str:
    parts = []
    commands = [str(event["command"]) for event in run.events if event.get("command")]
    if commands:
        parts.append(f"<pre>{escape(commands[-1])}</pre>")
    if run.changed:
        rows = (
            (cell(str(row.get("key"))), cell(_text(row.get("value"))), cell(str(row.get("origin"))),
             cell(_text(row.get("default")), "dim"))
            for row in run.changed
        )  # fmt: skip
        parts.append(table(("setting", "value", "set by", "default job"), rows))
    if run.config_text:
        text = run.config_text[:MOST_CONFIG]
        parts.append(f"<details><summary>all settings</summary><pre>{escape(text)}</pre></details>")
    return f"<h2>Settings</h2>{''.join(parts)}" if parts else ""


def _events(run: RunRecord) -> str:
    if not run.events:
        return ""
    left_out = len(run.events) - MOST_EVENTS
    rows = (
        (cell(str(e.get("time", ""))[:19].replace("T", " "), "dim"),
         cell(str(e.get("step", "")), "number"), cell(str(e.get("kind", ""))),
         cell(str(e.get("text", "")), "text"))
        for e in run.events[-MOST_EVENTS:]
    )  # fmt: skip
    note = f"<p class=dim>{left_out} earlier events are left out.</p>" if left_out > 0 else ""
    heads = ("time (UTC)", "step", "kind", "what happened")
    return f"<h2>Events</h2>{note}{table(heads, rows)}"


# ---- several runs


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the runs' directory names, with as much of the path as makes them different."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.path)
        for name, run in zip(names, runs, strict=True)
    ]


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, with the value of each run.

    A run whose settings are not known has None, which is no difference.
    """
    known = [run.config for run in runs]
    keys = list(dict.fromkeys(key for config in known for key in config))
    differing = {}
    for key in keys:
        values = [config.get(key) for config in known]
        if key not in NOT_A_DIFFERENCE and any(
            value != values[0] for value, config in zip(values, known, strict=True) if config
        ):
            differing[key] = values
    return differing


def _outcome(run: RunRecord, key: str) -> tuple[float | None, str]:
    """Return a figure of a run as a number and as text."""
    if key == "speed":
        value = typical_speed(run)
        return value, "" if value is None else format_count(value)
    if key == "mfu_causal":
        return (value := typical(run.metrics, key)), "" if value is None else format_percent(value)
    if key == "step":
        return float(run.last_step), str(run.last_step)
    value = run.figure(key)
    if value is None:
        return None, ""
    if key == "peak_memory_bytes":
        return value, format_bytes(value)
    return value, format_duration(value) if key == "wall_seconds" else format_number(value)


def _table(
    runs: Sequence[RunRecord],
    names: Sequence[str],
    notes: Sequence[tuple[str, str]],
    outcomes_without: Mapping[str, str],
    gaps: Mapping[str, tuple[float, str]],
    *,
    is_judged: bool,
) -> str:
    """Return the table of what came out, then of what differs, with jobs that left no run.

    The best run is marked unless the page has a verdict: seeds validate on other texts.
    """
    if not runs:
        return ""
    differ = differing_settings(runs)
    given = {row.get("key") for run in runs for row in run.changed}
    columns = ([key for key in differ if key in given] or list(differ))[:MOST_DIFFERENCES]
    outcomes = [
        (title, key)
        for title, key in _OUTCOMES
        if key == "status" or any(_outcome(run, key)[0] is not None for run in runs)
    ]
    best = None if is_judged else _best(runs)
    to_base = ["to baseline"] if gaps else []
    heads = ["run", *to_base, *(title for title, _ in outcomes)]
    heads += [key.removeprefix("model.") for key in columns]
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        cells = [label(name)]
        if gaps:
            gap, words = gaps.get(name, (math.inf, ""))
            cells.append(cell(words, "number", gap))
        for _, key in outcomes:
            if key == "status":
                cells.append(cell(run.status, run.status))
                continue
            figure, text = _outcome(run, key)
            mark = " best" if index == best and key in ("val_loss", "train_loss") else ""
            cells.append(cell(text, f"number{mark}", figure))
        values = [(differ[key][index], _text(differ[key][index])) for key in columns]
        rows.append([*cells, *(cell(t, "text" if len(t) > LONG else "", v) for v, t in values)])
    for name in (name for name, _ in notes if name not in names):
        word = cell(outcomes_without.get(name, "no run"), "refused")
        cells = [word if key == "status" else cell() for _, key in outcomes]
        empty = [cell() for _ in to_base]
        rows.append([label(name), *empty, *cells, *(cell() for _ in columns)])
    more = ""
    if len(differ) > len(columns):
        rest = [key for key in differ if key not in columns]
        more = f"<p class=dim>Other settings that differ: {escape(', '.join(rest))}</p>"
    return f"<h2>What came out, and what differs</h2>{table(heads, rows, 'sortable')}{more}"


def _best(runs: Sequence[RunRecord]) -> int | None:
    places = [place for _, place in ranked([run.figure for run in runs])]
    return places[0] if places else None


def ranked(figures: Sequence[Callable[[str], float | None]]) -> list[tuple[float, int]]:
    """Return validation losses, else training losses, of at least two runs, the least first.

    Each is beside its place among `figures`, which return a run's figure by its name.
    """
    for key in ("val_loss", "train_loss"):
        values = ((figure(key), place) for place, figure in enumerate(figures))
        known = [(v, place) for v, place in values if v is not None and math.isfinite(v)]
        if len(known) > 1:
            return sorted(known)
    return []


def _failures(
    runs: Sequence[RunRecord], names: Sequence[str], notes: Sequence[tuple[str, str]]
) -> str:
    parts = [f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in notes]
    told = {name for name, _ in notes}
    for run, name in zip(runs, names, strict=True):
        if run.status == "failed" and name not in told:
            parts.append(f"<h3>{escape(name)}</h3><pre>{escape(chr(10).join(run.tail))}</pre>")
    return f"<h2>Failures</h2>{''.join(parts)}" if parts else ""


def _same_settings(runs: Sequence[RunRecord]) -> str:
    if not runs or not runs[0].config:
        return ""
    differ = differing_settings(runs)
    lines = [
        f"{key}: {_text(value)}"
        for key, value in runs[0].config.items()
        if key not in differ and key not in NOT_A_DIFFERENCE
    ]
    text = escape("\n".join(lines)[:MOST_CONFIG])
    what = "<summary>what all runs have</summary>"
    return f"<h2>Settings</h2><details>{what}<pre>{text}</pre></details>"


def _text(value: object) -> str:
    return "null" if value is None else str(value)
