"""Compare FP8 with BF16 on the default job: training and validation loss, same seeds and data.

Each run is `pretrain_gpt.py` as a user would start it. Runs that have finished under `--runs`
already are not run again. The benchmark writes a result file and a plot of the curves.

    python benchmarks/fp8_vs_bf16.py --seeds 1234 1 2 --jobs 2 --threads 1
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cpu_step import cpu_name

from megafp8.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]


def run(precision: str, seed: int, args: argparse.Namespace) -> Path:
    """Run one job to its end, and return its directory."""
    path = Path(args.runs).resolve() / f"{precision}-{seed}"
    summary = path / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["status"] == "finished":
        return path
    command = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        f"model.fp8={precision == 'fp8'}",
        f"model.seed={seed}",
        "trainer.log_every_n_steps=1",
        f"exp_manager.explicit_log_dir={path}",
        "exp_manager.create_tensorboard_logger=False",
        *args.overrides,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return path


def collect(path: Path) -> dict[str, Any]:
    """Return the losses and results of a finished run."""
    lines = read_metrics(path / "metrics.jsonl")
    summary = json.loads((path / "summary.json").read_text())
    return {
        "loss": [line["loss"] for line in lines if "loss" in line],
        "val_steps": [line["step"] for line in lines if "val_loss" in line],
        "val_loss": [line["val_loss"] for line in lines if "val_loss" in line],
        "final_val_loss": summary["val_loss"],
        "final_val_bits_per_byte": summary["val_bits_per_byte"],
        "unigram_bits_per_byte": summary["unigram_bits_per_byte"],
        "xz_bits_per_byte": summary["xz_bits_per_byte"],
        "fp8_share_of_gemm_flops": summary["fp8_share_of_gemm_flops"],
        "fp8_share_with_attention": summary["fp8_share_with_attention"],
        "wall_seconds": summary["wall_seconds"],
    }


def compare(runs: dict[tuple[str, int], dict[str, Any]], seeds: list[int]) -> dict[str, Any]:
    """Return the differences between FP8 and BF16 for each seed, and the spread over seeds."""
    gaps, first_steps = {}, {}
    for seed in seeds:
        fp8, bf16 = runs["fp8", seed], runs["bf16", seed]
        gaps[seed] = fp8["final_val_loss"] / bf16["final_val_loss"] - 1
        pairs = zip(fp8["loss"], bf16["loss"], strict=True)
        first_steps[seed] = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), None)
    bf16_finals = [runs["bf16", seed]["final_val_loss"] for seed in seeds]
    return {
        "relative_gap_of_final_val_loss": gaps,
        "first_step_that_differs": first_steps,
        "bf16_spread_over_seeds": max(bf16_finals) / min(bf16_finals) - 1,
        "mean_gap": statistics.mean(gaps.values()),
    }


def plot(
    runs: dict[tuple[str, int], dict[str, Any]], seeds: list[int], comparison: dict[str, Any]
) -> Path:
    """Draw the curves of all runs and their differences; return the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1.4), constrained_layout=True
    )
    colors = {"bf16": "#4C72B0", "fp8": "#DD8452"}
    names = {"bf16": "BF16", "fp8": "FP8 delayed, hybrid"}
    for (precision, seed), values in sorted(runs.items()):
        label = names[precision] if seed == seeds[0] else None
        steps = range(1, len(values["loss"]) + 1)
        top.plot(
            steps, values["loss"], color=colors[precision], alpha=0.45, linewidth=0.8, label=label
        )
        label = f"{names[precision]}, validation" if seed == seeds[0] else None
        style = "-" if precision == "bf16" else "--"
        top.plot(
            values["val_steps"], values["val_loss"], style, color=colors[precision], marker="o",
            markersize=4, linewidth=1.5, label=label,
        )  # fmt: skip
    top.set_ylabel("loss, nats per token")
    top.set_title(f"The default job in BF16 and in FP8, {len(seeds)} seeds each")
    top.legend(frameon=False)
    for seed in seeds:
        pairs = zip(runs["fp8", seed]["loss"], runs["bf16", seed]["loss"], strict=True)
        gap = [100 * (a / b - 1) for a, b in pairs]
        final = 100 * comparison["relative_gap_of_final_val_loss"][seed]
        label = f"seed {seed}: final validation {final:+.2f} %"
        bottom.plot(range(1, len(gap) + 1), gap, linewidth=0.8, alpha=0.8, label=label)
    bottom.axhline(0, color="black", linewidth=0.6)
    bottom.set_ylabel("FP8 over BF16, %")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False, fontsize=8, ncols=len(seeds))
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path = ROOT / "docs" / "images" / "fp8_vs_bf16.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def main() -> None:
    """Run all jobs, compare them, and write the result and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--threads", type=int, default=2, help="threads of each run")
    parser.add_argument("--runs", default="runs/fp8-vs-bf16")
    parser.add_argument(
        "overrides", nargs="*", help="settings of every run, such as trainer.max_steps=100"
    )
    args = parser.parse_args()
    wanted = [(precision, seed) for seed in args.seeds for precision in ("fp8", "bf16")]
    with ThreadPoolExecutor(args.jobs) as pool:
        paths = list(pool.map(lambda item: run(*item, args), wanted))
    runs = {item: collect(path) for item, path in zip(wanted, paths, strict=True)}
    comparison = compare(runs, args.seeds)
    print(json.dumps(comparison, indent=2))
    today = datetime.date.today().isoformat()
    result = {
        "what": "the default job in FP8 and BF16: nats per token; gaps relative to BF16",
        "date": today,
        "cpu": cpu_name(),
        "threads": args.threads,
        "command": " ".join(["python", "benchmarks/fp8_vs_bf16.py", *sys.argv[1:]]),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "comparison": comparison,
        "runs": {f"{precision}-{seed}": values for (precision, seed), values in runs.items()},
    }
    path = ROOT / "benchmarks" / "results" / f"{today}_cpu_fp8-vs-bf16.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    print(f"written to {path} and {plot(runs, args.seeds, comparison)}")


if __name__ == "__main__":
    main()
