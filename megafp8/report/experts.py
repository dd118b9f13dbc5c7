"""Show how evenly the tokens of a run are divided among the experts of each layer."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

from megafp8.observe.experts import EMPTY, LARGEST, UPDATES, layer_of, of_layer
from megafp8.observe.units import format_percent
from megafp8.report.curves import MOST_CELLS
from megafp8.report.record import RunRecord, thinned
from megafp8.report.tables import cell, table

_NUMBER = re.compile(r"\d{1,6}", re.ASCII)

HINT = (
    "The load is the number of tokens of the fullest expert over the mean of its layer, in a "
    "logged step. An expert without a token in a step is no fault."
)

MAP_HINT = "Tokens of an expert over the mean of its layer; 1 is even."


def meaning_of_mfu(run: RunRecord) -> str:
    """Return what a run's MFU is a fraction of, and which FLOPs it counts."""
    active = ", FLOPs of active parameters" if _numbers(run, LARGEST) else ""
    return f"of the device's peak{active}"


def figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return name, value and meaning of the figures of a model with experts; none for others."""
    found, updates = [], run.figure(UPDATES)
    if loads := _numbers(run, LARGEST):
        load = f"{statistics.median(loads):.2f} x"
        found.append(("fullest expert", load, "the mean load; median of logged steps"))
    if updates is not None:
        found.append(("rarest history", f"{updates:.0f}", "updates of an expert's input scale"))
    return found


def load_of_layers(run: RunRecord) -> str:
    """Return a table of the load in each layer over the logged steps; empty for a dense model."""
    keys = {key for line in run.metrics for key in line}
    layers = sorted({layer for key in keys if (layer := layer_of(key)) is not None})
    rows = [row for layer in layers if (row := _row(run, layer))]
    if not rows:
        return ""
    heads = ("layer", "load in the last step", "median", "largest", "experts without a token, mean")
    return f"<h2>Experts: load of each layer</h2><p class=dim>{HINT}</p>{table(heads, rows)}"


def load_maps(run: RunRecord) -> dict[str, Any] | None:
    """Return the load of each expert over the logged steps, a map for each layer; None without any.

    The form is that of `curves.heat_maps`: a row for each expert, and a load of 1 is the mean.
    """
    lines = [line["tokens"] for line in run.experts]
    layers = sorted(
        {layer for line in lines for layer in line if _NUMBER.fullmatch(layer)}, key=int
    )
    sizes = {len(c) for line in lines for layer in layers if isinstance(c := line.get(layer), list)}
    rows = range(max(sizes, default=0))
    most = max(10, MOST_CELLS // max(1, len(layers) * len(rows)))
    kept = thinned(run.experts, most, lambda _: False)
    maps = {}
    for layer in layers if rows else ():
        columns = [_loads(line["tokens"].get(layer), len(rows)) for line in kept]
        if any(column[0] is not None for column in columns):
            maps[f"layer {layer}"] = {"load": [[column[row] for column in columns] for row in rows]}
    if not maps:
        return None
    return {
        "steps": [line["step"] for line in kept],
        "rows": [f"expert {row}" for row in rows],
        "maps": maps,
        "titles": {"load": "tokens over the mean"},
    }


def _loads(counts: object, size: int) -> list[float | None]:
    """Return tokens over their mean; None for each expert where a line has no such counts."""
    if not isinstance(counts, list) or len(counts) != size:
        return [None] * size
    if not all(type(count) is int and count >= 0 for count in counts) or not sum(counts):
        return [None] * size
    return [round(count * size / sum(counts), 3) for count in counts]


def _row(run: RunRecord, layer: int) -> list[str]:
    loads, empty = _numbers(run, of_layer(LARGEST, layer)), _numbers(run, of_layer(EMPTY, layer))
    if not (loads and empty):
        return []
    shown = [f"{load:.2f}" for load in (loads[-1], statistics.median(loads), max(loads))]
    texts = (str(layer), *shown, format_percent(statistics.fmean(empty)))
    return [cell(text, "number") for text in texts]


def _numbers(run: RunRecord, key: str) -> list[float]:
    """Return the finite numbers that logged steps have under a key."""
    values = (line.get(key) for line in run.metrics)
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
