"""Make the data of a page's plots: curves of few points, and heat maps of FP8 health."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megafp8.observe.experts import EMPTY, LARGEST, UPDATES
from megafp8.observe.health import ROLES
from megafp8.report.record import Line, RunRecord, thinned

MOST_NUMBERS = 60_000  # of all curves of a page: with five digits each, less than half a megabyte
MOST_CELLS = 40_000  # of all heat maps of one kind on a page
MOST_ROWS = 64  # of a heat map; a model with more linears gets a row for each layer

SHARED_BY_RUNS = ("loss", "grad_norm", "tokens_per_second", "peak_memory_bytes", "mfu_causal")
"""The curves of a page of several runs."""
MEASURES = {
    "snr_db": ("signal to noise, dB", 1.0, min),
    "underflow": ("underflow, % of the values", 100.0, max),
    "overflow": ("saturation, % of the values", 100.0, max),
    "quant_scale": ("scale, log2", None, min),
    "amax": ("amax, log2", None, max),
}
"""The measures of FP8 health: title, factor (None: the logarithm), and the worse of two values."""


@dataclass(frozen=True)
class Curve:
    """Say which values a plot shows, and how.

    Attributes:
        key: The key in metrics.jsonl.
        title: The plot's title, with the unit.
        factor: What the values are multiplied by to get the unit.
        is_log: Whether the plot begins with a logarithmic axis.
    """

    key: str
    title: str
    factor: float = 1.0
    is_log: bool = False


CURVES = (
    Curve("loss", "loss, nats per token"),
    Curve("grad_norm", "gradient norm, before clipping", is_log=True),
    Curve("lr", "learning rate"),
    Curve("tokens_per_second", "thousand tokens per second", 1e-3),
    Curve("mfu_causal", "model FLOPs utilization (MFU), %", 100.0),
    Curve("peak_memory_bytes", "peak memory, GiB", 2.0**-30),
    Curve("step_seconds", "seconds per step"),
    Curve("data_wait_fraction", "waiting for data, % of a step", 100.0),
    Curve("aux_loss", "balance of the router (aux_loss, 1 is even)"),
    Curve("seq_aux_loss", "balance of the router (seq_aux_loss, 1 is even)"),
    Curve("z_loss", "router z-loss, without its coefficient"),
    Curve(LARGEST, "tokens of the fullest expert over the mean"),
    Curve(EMPTY, "experts without a token in a step, %", 100.0),
    Curve(UPDATES, "updates of the rarest history of an expert's input"),
    Curve("loss_scale", "loss scale (FP16)", is_log=True),
    Curve("global_batch_size", "global batch, samples"),
)


def number(value: float) -> float | None:
    """Return a value with five digits for a page; None for one that is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def points(lines: Sequence[Line], curve: Curve, most: int) -> tuple[list[int], list[float | None]]:
    """Return steps and values of a curve as at most `most` points, each a mean of its lines."""
    pairs = [
        (int(line["step"]), float(line[curve.key]))
        for line in lines
        if isinstance(line.get(curve.key), int | float)
    ]
    pairs.sort(key=lambda pair: pair[0])
    per_point = -(-len(pairs) // most) if pairs else 1
    steps, values = [], []
    for first in range(0, len(pairs), per_point):
        bucket = pairs[first : first + per_point]
        finite = [value for _, value in bucket if math.isfinite(value)]
        mean = sum(finite) / len(finite) * curve.factor if finite else math.nan
        steps.append(bucket[-1][0])
        values.append(number(mean))
    return steps, values


def charts(
    runs: Sequence[RunRecord], labels: Sequence[str], groups: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the plots of one or several runs, for the page's script; empty ones are left out.

    Runs of the same group, as the seeds of a configuration, become one curve: mean and range.
    """
    one = len(runs) == 1
    wanted = [c for c in CURVES if one or c.key in SHARED_BY_RUNS]
    most = max(50, MOST_NUMBERS // (2 * len(runs) * (len(wanted) + 1)))
    plots = []
    for curve in wanted:
        series: list[dict[str, Any]] = []
        for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
            for lines, key, name in (
                (run.metrics, curve.key, "training" if one else label),
                (run.validations, "val_loss", "validation" if one else f"{label}, validation"),
            ):
                if key == "val_loss" and curve.key != "loss":
                    continue
                steps, values = points(lines, Curve(key, "", curve.factor), most)
                if any(value is not None for value in values):
                    is_val = key == "val_loss"
                    series.append(_series(name, steps, values, index + (one and is_val), is_val))
        is_dull = curve.key == "data_wait_fraction" and all(
            (value or 0.0) < 1.0 for each in series for value in each["y"]
        )
        if groups is not None:
            series = _grouped(series, groups)
        if series and not is_dull:
            is_dashed = not one and any(each["points"] for each in series)
            title = curve.title + (" (dashed, dots: validation)" if is_dashed else "")
            plots.append({"title": title, "log": curve.is_log, "series": series})
            if one and curve.key == "loss" and (phases := phases_of(runs[0])):
                plots[-1]["phases"] = phases
    return plots


def _grouped(series: Sequence[dict[str, Any]], groups: Sequence[str]) -> list[dict[str, Any]]:
    """Return one curve for the runs of each group, at the steps that all of them have.

    The color of a given series is the place of its run among `groups`.
    """
    members: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for each in series:
        members.setdefault((groups[each["color"]], each["points"]), []).append(each)
    order = list(dict.fromkeys(groups))
    curves = []
    for (group, is_validation), runs in members.items():
        of_step = [
            {x: y for x, y in zip(each["x"], each["y"], strict=True) if y is not None}
            for each in runs
        ]
        steps = [step for step in of_step[0] if all(step in values for values in of_step)]
        rows = [[values[step] for values in of_step] for step in steps]
        label = f"{group}, validation" if is_validation else group
        mean = [number(sum(row) / len(row)) for row in rows]
        curve = _series(label, steps, mean, order.index(group), is_validation)
        if len(runs) > 1:
            curve |= {"low": [min(row) for row in rows], "high": [max(row) for row in rows]}
        curves.append(curve)
    return curves


def phases_of(run: RunRecord) -> list[dict[str, Any]]:
    """Return the phases of a run that changed its precision: first and last step, and in words.

    A start from an earlier checkpoint takes back the changes that came after it.
    """
    changes: dict[int, str] = {}
    for event in run.events:
        kind = event.get("kind")
        step = event.get("first_step" if kind == "start" else "step")
        if not isinstance(step, int):
            continue
        if kind == "start":
            changes = {at: text for at, text in changes.items() if at < step}
        elif kind == "precision":
            changes[step] = str(event.get("text")).partition(": ")[2]
    if not changes:
        return []
    begins = [0, *sorted(changes)]
    texts = ["as the run began", *(changes[at] for at in begins[1:])]
    ends = [*begins[1:], max(run.last_step, begins[-1] + 1)]
    rows = zip(begins, ends, texts, strict=True)
    return [{"begin": begin + 1, "end": end, "text": text} for begin, end, text in rows]


def differences(
    runs: Sequence[RunRecord], labels: Sequence[str], base: int
) -> list[dict[str, Any]]:
    """Return a plot of the training losses minus that of one run, at the steps that both logged.

    It shows what curves that lie on each other do not. There is none if no step is common.
    """
    curve = CURVES[0]
    most = max(50, MOST_NUMBERS // (2 * len(runs) * (len(SHARED_BY_RUNS) + 1)))
    losses = [
        {int(line["step"]): float(line["loss"]) for line in run.metrics if curve.key in line}
        for run in runs
    ]
    series: list[dict[str, Any]] = []
    for index, (label, loss) in enumerate(zip(labels, losses, strict=True)):
        gaps = [
            {"step": step, curve.key: value - losses[base][step]}
            for step, value in loss.items()
            if index != base and step in losses[base]
        ]
        steps, values = points(gaps, curve, most)
        if any(value is not None for value in values):
            series.append(_series(label, steps, values, index))
    title = f"training loss minus that of {labels[base]}"
    return [{"title": title, "log": False, "series": series}] if series else []


def _series(
    label: str, x: Sequence[int], y: Sequence[float | None], color: int, points: bool = False
) -> dict[str, Any]:
    return {"label": label, "x": list(x), "y": list(y), "color": color, "points": points}


def gap_chart(
    title: str, gaps: Sequence[tuple[str, Sequence[int], Sequence[float]]]
) -> dict[str, Any]:
    """Return a plot of differences: label, steps and values of each curve."""
    series = [
        _series(label, x, [number(v) for v in y], index) for index, (label, x, y) in enumerate(gaps)
    ]
    return {"title": title, "log": False, "series": series}


def heat_maps(run: RunRecord) -> dict[str, Any] | None:
    """Return the FP8 health of a run as maps of linears or layers over steps; None without any.

    The result has `steps`, `rows` and, for each role and measure that was measured, the values: a
    list for each row. Where a row stands for several tensors, the worst of them counts.
    """
    groups: dict[str, dict[str, list[str]]] = {role: {} for role in ROLES}
    names = {name for line in run.health for name in line["tensors"]}
    linears = {name.rpartition(".")[0] for name in names}
    by_layer = len(linears) > MOST_ROWS
    for name in names:
        linear, _, role = name.rpartition(".")
        if role in groups:
            row = _layer(linear) if by_layer else linear.removeprefix("layers.")
            groups[role].setdefault(row, []).append(name)
    rows = sorted({row for group in groups.values() for row in group}, key=_natural)
    if not rows:
        return None
    per_step = len(rows) * len(ROLES) * len(MEASURES)
    lines = thinned(run.health, max(10, MOST_CELLS // per_step), _is_full)
    maps: dict[str, dict[str, Any]] = {}
    for role, group in groups.items():
        for measure in MEASURES:
            values = [[_worst(line, group.get(row, ()), measure) for line in lines] for row in rows]
            if any(value is not None for row in values for value in row):
                maps.setdefault(role, {})[measure] = values
    return {
        "steps": [line["step"] for line in lines],
        "rows": rows,
        "maps": maps,
        "titles": {name: title for name, (title, *_) in MEASURES.items()},
        "rows_are": "layers" if by_layer else "linears",
    }


def _worst(line: Mapping[str, Any], names: Sequence[str], measure: str) -> float | None:
    _, factor, worse = MEASURES[measure]
    values = []
    for name in names:
        tensor = line["tensors"].get(name)
        value = tensor.get(measure) if isinstance(tensor, dict) else None
        if isinstance(value, int | float) and math.isfinite(value):
            values.append(float(value))
    if not values:
        return None
    value = worse(values)
    if factor is None:
        return round(math.log2(value), 1) if value > 0 else None
    return float(f"{value * factor:.3g}")


def _is_full(line: Line) -> bool:
    return any(isinstance(x, dict) and "snr_db" in x for x in line["tensors"].values())


def _layer(linear: str) -> str:
    match = re.match(r"layers\.(\d+)\.", linear)
    return match[1] if match else linear


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
