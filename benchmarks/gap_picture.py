"""Draw how far the validation losses of a comparison are from its baseline, step by step.

    megafp8 compare model.fp8=True model.fp8_recipe=… --seeds 1 2 3 4 5 --out FOLDER
    python benchmarks/gap_picture.py FOLDER --command "megafp8 compare …"

A line is the mean over the seeds, each paired with the baseline of the same seed; the band is the
95 % interval of that mean by Student's t. The figures are written as a result file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path

import torch
from cpu_step import cpu_name

from megafp8.report.verdict import _half_width

ROOT = Path(__file__).resolve().parents[1]
LOOKS = {"delayed": "#2b6cb0", "mxfp8": "#2f855a", "nvfp4": "#b7791f", "Int2": "#c53030"}
NAMES = {"delayed": "FP8 delayed", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "Int2": "2-bit integers"}


def losses(run: Path) -> dict[int, float]:
    """Return the validation loss of a run by its step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def gaps(folder: Path, label: str, seeds: list[str]) -> dict[int, list[float]]:
    """Return the gaps of all seeds in percent by step."""
    pairs = [(losses(folder / f"{label}-{s}"), losses(folder / f"baseline-{s}")) for s in seeds]
    return {
        step: [100 * (mine[step] / base[step] - 1) for mine, base in pairs] for step in pairs[0][0]
    }


def main() -> None:
    """Write the picture and its figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "gap_to_bf16.png")
    parser.add_argument("--command", required=True, help="the comparison's, for the figures")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    seeds = sorted(path.name.rpartition("-")[2] for path in args.folder.glob("baseline-*"))
    figure, axes = plt.subplots(figsize=(9, 3.4), dpi=110)
    axes.axhspan(-0.5, 0.5, color="#e2e8f0", label="within 0.5 %, the tolerance of a verdict")
    axes.axhline(0, color="#4a5568", linewidth=0.8)
    found = {}
    for label, color in LOOKS.items():
        by_step = gaps(args.folder, label, seeds)
        mean = [statistics.mean(values) for values in by_step.values()]
        half = [_half_width(statistics.stdev(v), len(v)) for v in by_step.values()]
        axes.plot(list(by_step), mean, color=color, label=NAMES[label], linewidth=2)
        low = [m - h for m, h in zip(mean, half, strict=True)]
        high = [m + h for m, h in zip(mean, half, strict=True)]
        axes.fill_between(list(by_step), low, high, color=color, alpha=0.2, linewidth=0)
        found[label] = {"gaps": by_step, "mean": mean, "half_width": half}
    axes.set(
        xlabel="step", ylabel="validation loss over BF16, %", xlim=(min(by_step), max(by_step))
    )
    axes.legend(loc="upper left", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out)
    result = {
        "what": "gaps of validation losses to BF16 in percent, by step and seed",
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "seeds": seeds,
        "command": args.command,
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "configurations": found,
    }
    path = args.results / f"{result['date']}_gap-to-bf16.json"
    path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
