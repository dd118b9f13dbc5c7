"""Show the FP8 health of a run as tables: the tensors that lose most, and amaxes over the run.

megafp8 inspect RUN [--step N] [--all] [--sort snr|underflow|overflow|amax|name]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megafp8.cli.commands import run_old_name
from megafp8.cli.job import command_parser, reports_errors
from megafp8.errors import CheckpointError, ExitCode
from megafp8.observe.health import (
    HEALTH_FILE,
    ROLES,
    HealthRecord,
    last_full,
    read_health,
    verdict,
    worst_first,
)
from megafp8.runs.find import find_run
from megafp8.secrets import printable
from megafp8.specs import TensorHealth

ROWS = 20
PIPE_WIDTH = 160  # columns if the output is not a terminal, so that names are not cut
FULL_HINT = "A run with model.fp8_health=full also measures underflow, saturation and SNR"
SORTS = ("snr", "underflow", "overflow", "amax", "name")


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the tables; return 0, or 2 after printing an error."""
    parser = command_parser("inspect", __doc__)
    parser.add_argument("run", type=Path, help="a run's directory, its health.jsonl, or latest")
    parser.add_argument(
        "--step",
        type=int,
        help="the log step to show (default: the last one in which losses were measured)",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"show all tensors, and not only the first {ROWS}"
    )
    parser.add_argument(
        "--sort",
        choices=SORTS,
        help="the column that is sorted, worst first (default: snr, the harm to products, if "
        "measured, else the name)",
    )
    options = parser.parse_args(argv)
    run = find_run(options.run)
    path = run / HEALTH_FILE if run.is_dir() else run
    records = read_health(path)
    record = _chosen(records, options.step, path)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    if options.sort in ("underflow", "overflow", "snr") and not record.is_full:
        raise CheckpointError(path, f"has no {options.sort} to sort by", FULL_HINT)
    console.print(_tensors(record, options.sort, None if options.all else ROWS))
    if record.is_full:
        console.print(Text(f"FP8 health: {printable(verdict(record))}"))
    for name, why in record.beyond.items():
        console.print(Text(f"  {printable(name)}: {printable(why)}"))
    if record.tensors and not record.is_full:
        console.print(f"Only amaxes and scales were measured. {FULL_HINT}")
    in_fp8 = [known.step for known in records if known.tensors]
    if not record.tensors and in_fp8:
        console.print(
            f"No linear was in FP8 in step {record.step}. The last step with one is {in_fp8[-1]}: "
            f"--step {in_fp8[-1]}"
        )
    if not options.all and len(record.tensors) > ROWS:
        console.print(f"{len(record.tensors) - ROWS} more tensors: --all")
    console.print(_roles(records))
    if record.num_nonfinite:
        console.print("updates that were left out because of a NaN or an infinity:")
        for name, count in sorted(record.num_nonfinite.items()):
            console.print(f"  {name}: {count}")
    return ExitCode.FINISHED


def _chosen(records: list[HealthRecord], step: int | None, path: Path) -> HealthRecord:
    if not records:
        raise CheckpointError(path, "has no record yet", "Wait for the run's first log step")
    if step is None:
        last = records[-1]
        return last_full(records) or last if last.tensors else last
    for record in records:
        if record.step == step:
            return record
    steps = [record.step for record in records]
    near = sorted(sorted(steps, key=lambda known: abs(known - step))[:3])
    raise CheckpointError(
        path,
        f"has no step {step}",
        f"The nearest of its {len(steps)} steps are {', '.join(map(str, near))}",
    )


def _tensors(record: HealthRecord, sort: str | None, limit: int | None) -> Table:
    is_full = record.is_full
    sort = sort or ("snr" if is_full else "name")
    names = worst_first(record.tensors) if sort == "snr" else _sorted(record, sort)
    shown = names[:limit]
    table = Table(
        box=box.SIMPLE,
        title=f"step {record.step}: {len(shown)} of {len(names)} tensors, by {sort}",
        title_justify="left",
    )
    titles: tuple[str, ...] = ("tensor", "amax", "scale")
    if is_full:
        titles += ("underflow", "saturation", "signal to noise")
    for title in titles:
        is_name = title == "tensor"
        table.add_column(title, justify="left" if is_name else "right", no_wrap=not is_name)
    for name in shown:
        health = record.tensors[name]
        table.add_row(
            Text(printable(name)),
            f"{health.amax:.3g}",
            f"{health.quant_scale:.4g}",
            *(_losses(health) if is_full else ()),
        )
    return table


def _roles(records: list[HealthRecord]) -> Table:
    """Return a table of the largest amax by role, at the first, middle and last log step."""
    chosen = sorted({0, len(records) // 2, len(records) - 1})
    table = Table(box=box.SIMPLE, title="largest amax by role, over the run", title_justify="left")
    table.add_column("role")
    for index in chosen:
        table.add_column(f"step {records[index].step}", justify="right")
    for role in ROLES:
        cells = []
        for index in chosen:
            of_role = [h.amax for n, h in records[index].tensors.items() if n.endswith(f".{role}")]
            cells.append(f"{max(of_role):.3g}" if of_role else "")
        table.add_row(role, *cells)
    return table


def _sorted(record: HealthRecord, sort: str) -> list[str]:
    """Return the tensors by one measure, the largest first, or by their names."""

    def rank(name: str) -> tuple[float, str]:
        value = None if sort == "name" else getattr(record.tensors[name], sort)
        return (0.0 if value is None or math.isnan(value) else -value, name)

    return sorted(record.tensors, key=rank)


def _losses(health: TensorHealth) -> tuple[str, str, str]:
    """Return what a tensor lost in FP8: its underflow, its saturation, its signal to noise."""
    ratio = "" if health.snr_db is None else f"{health.snr_db:.1f} dB"
    return _percent(health.underflow), _percent(health.overflow), ratio


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.3%}"


if __name__ == "__main__":
    run_old_name("inspect")
