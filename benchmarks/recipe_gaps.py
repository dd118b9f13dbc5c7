"""Compare all built-in recipes with BF16, and NVFP4 with itself less one of its parts.

Both are `megafp8 compare` on a job that takes about a minute a run. Each leaves a page with the
curves of all its runs, `report.html` in its folder below `--runs`. A comparison that has ended is
not made again. The command then writes a result file and prints its tables.

    python benchmarks/recipe_gaps.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cpu_step import cpu_name

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (1, 2, 3)
JOB = (
    "trainer.max_steps=400",
    "trainer.val_check_interval=400",
    "trainer.limit_val_batches=64",
    "trainer.enable_progress_bar=False",
    "exp_manager.create_tensorboard_logger=False",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.encoder_seq_length=64",
    "model.micro_batch_size=8",
    "model.global_batch_size=8",
    "model.tokenizer.vocab_size=1024",
)
RECIPES = "delayed,tensorwise,rowwise,rowwise_with_gw_hp,blockwise,mxfp8,nvfp4"
COMPARISONS: dict[str, tuple[str, str]] = {  # folder: (recipes, what the baseline has)
    "recipes": (RECIPES, "model.fp8=False"),
    "parts": ("nvfp4-no_rht,nvfp4-no_sr,nvfp4-no_2d", "model.fp8_recipe=nvfp4"),
}
BASELINES = {"recipes": "BF16", "parts": "NVFP4 with all its parts"}


def compare(
    folder: Path,
    settings: Sequence[str],
    base: str | Sequence[str],
    job: Sequence[str] = JOB,
    seeds: Sequence[int] = SEEDS,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a comparison of `settings` with `base` unless it has ended, and return its figures.

    `options` are further ones of the command. A run has one thread.
    """
    found = folder / "compare.json"
    if not found.exists():
        command = [sys.executable, "-m", "megafp8", "compare", *settings, *job, *options]
        command += ["--seeds", *map(str, seeds), "--out", str(folder)]
        command += ["--base", *([base] if isinstance(base, str) else base)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if not found.exists():
            sys.exit(f"{folder}: the comparison ended with code {code} and left no figures")
    figures: dict[str, Any] = json.loads(found.read_text())
    return figures


def table(figures: dict[str, Any], baseline: str) -> list[str]:
    """Return the gaps to a baseline as rows of Markdown."""
    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    rows = [f"| over {baseline} | {seeds} | mean gap | 95 % interval | lowest SNR of a tensor |"]
    rows.append("|---" * (len(SEEDS) + 4) + "|")
    for each in figures["configurations"]:
        weakest = each["weakest_tensors"][0]
        signal = f"{weakest['snr_db']:.1f} dB, `{weakest['name']}`"
        name = each["name"].split(" ", 1)[1]
        rows.append(f"| `{name}` | {gaps_of(each)} | {signal} |")
    return rows


def gaps_of(configuration: dict[str, Any]) -> str:
    """Return the gap of each seed, their mean and its interval, as cells of a table."""
    numbers = configuration["figures"]
    mean, half = 100 * numbers["mean"], 100 * numbers["half_width"]
    gaps = [f"{100 * gap:+.2f} %" for gap in numbers["gaps"].values()]
    return " | ".join([*gaps, f"{mean:+.2f} %", f"{mean - half:+.2f} to {mean + half:+.2f} %"])


def write(name: str, what: str, results: Path, found: dict[str, Any]) -> None:
    """Write what was found, with what it was found by, as today's result file of a benchmark.

    `found` may have a command and a job of its own.
    """
    today = datetime.date.today().isoformat()
    result = {
        "what": what,
        "date": today,
        "cpu": cpu_name(),
        "command": f"python benchmarks/{name.replace('-', '_')}.py",
        "job": JOB,
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        **found,
    }
    path = results / f"{today}_{name}.json"
    path.write_text(json.dumps(result) + "\n")
    print(f"written to {path}")


def health_of(figures: dict[str, Any]) -> dict[str, list[str]]:
    """Return the warnings of FP8 health of each run, by its name."""
    found = {}
    for name, folder in figures["runs"].items():
        text = (Path(folder) / "console.log").read_text(errors="replace")
        found[name] = [line.strip() for line in text.splitlines() if " in FP8: " in line]
    return found


def main() -> None:
    """Make what is missing, and write the tables and the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe-gaps"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    tables: dict[str, list[str]] = {}
    warnings: dict[str, dict[str, list[str]]] = {}
    all_figures: dict[str, Any] = {}
    for name, (recipes, base) in COMPARISONS.items():
        settings = ("model.fp8=True", f"model.fp8_recipe={recipes}")
        figures = compare(args.runs.resolve() / name, settings, base)
        all_figures[name] = figures["configurations"]
        tables[name] = table(figures, BASELINES[name])
        warnings[name] = health_of(figures)
        print("\n".join(tables[name]), end="\n\n")
    found = {
        "tables": tables,
        "warnings of FP8 health": warnings,
        "comparisons": all_figures,
    }
    write("recipe-gaps", "gaps of final validation losses, paired by seed", args.results, found)


if __name__ == "__main__":
    main()
