"""Compare the losses of FP8-LM's levels with BF16's, and repeat the ablation of its table 6.

Each run is `pretrain_gpt.py` on a job that is smaller than the default one. Runs that have finished
under `--runs` are not run again, and a run that was stopped continues, so that the same command
runs what is missing. It then writes a table, a result file and a plot of the runs that are there.

    python benchmarks/fp8_lm_accuracy.py                # all runs, one after another
    python benchmarks/fp8_lm_accuracy.py --new 3        # at most three that are missing
    python benchmarks/fp8_lm_accuracy.py --new 0        # only the table
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from cpu_step import cpu_name

from megafp8.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (1234, 1, 2)
JOB = (
    "trainer.max_steps=300",
    "trainer.val_check_interval=50",
    "trainer.limit_val_batches=8",
    "trainer.enable_progress_bar=False",
    "exp_manager.create_tensorboard_logger=False",
    "model.num_layers=4",
    "model.hidden_size=128",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.encoder_seq_length=128",
    "model.micro_batch_size=8",
    "model.global_batch_size=8",
    "model.tokenizer.vocab_size=1024",
)
FP8 = "model.fp8=True"
LEVEL = "model.optim.fp8_opt_level"
LEVELS: dict[str, tuple[str, ...]] = {
    "BF16": (),
    "FP8": (FP8,),
    "O1": (FP8, f"{LEVEL}=O1"),
    "O2": (FP8, f"{LEVEL}=O2"),
    "O3": (FP8, f"{LEVEL}=O3"),
}
ABLATION: dict[str, tuple[str, ...]] = {
    "#0": ("trainer.precision=32",),
    "#1": LEVELS["BF16"],
    "#2a": LEVELS["O2"],
    "#2b": (*LEVELS["O2"], "model.optim.main_params_dtype=bf16"),
    "#3": (*LEVELS["O2"], "model.optim.main_params_dtype=fp8"),
    "#4": (*LEVELS["O2"], "model.optim.exp_avg_sq_dtype=fp8"),
}
ABOUT = {
    "#0": "FP32",
    "#1": "BF16",
    "#2a": "FP8 with FP16 masters, FP8 + FP16 moments (O2)",
    "#2b": "#2a with BF16 masters",
    "#3": "#2a with FP8 masters",
    "#4": "#2a with FP8 second moments",
}
SAME_RUN = {"#1": "BF16", "#2a": "O2"}  # rows of the ablation that a level has already


def wanted() -> list[tuple[str, int, tuple[str, ...]]]:
    """Return all runs: a name, a seed and the settings."""
    runs = [(name, SEEDS[0], flags) for name, flags in LEVELS.items()]
    runs += [(name, SEEDS[0], flags) for name, flags in ABLATION.items() if name not in SAME_RUN]
    return runs + [(name, seed, flags) for seed in SEEDS[1:] for name, flags in LEVELS.items()]


def is_finished(path: Path) -> bool:
    """Whether a run in a directory has reached its last step."""
    summary = path / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "finished"


def run(path: Path, seed: int, flags: tuple[str, ...], threads: int) -> None:
    """Run one job to its end, or continue it."""
    command = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *JOB,
        *flags,
        f"model.seed={seed}",
        f"exp_manager.explicit_log_dir={path}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def collect(path: Path) -> dict[str, Any]:
    """Return the losses of a finished run."""
    lines = read_metrics(path / "metrics.jsonl")
    return {
        "val_steps": [line["step"] for line in lines if "val_loss" in line],
        "val_loss": [line["val_loss"] for line in lines if "val_loss" in line],
        "final_val_loss": json.loads((path / "summary.json").read_text())["val_loss"],
    }


def table(found: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Return the final validation losses as rows of Markdown; `-` was not run."""

    def final(name: str, seed: int) -> float | None:
        row = found.get(SAME_RUN.get(name, name), {}).get(seed)
        return None if row is None else float(row["final_val_loss"])

    def shown(value: float | None, form: str = ".4f") -> str:
        return "-" if value is None else format(value, form)

    rows = [f"| | {' | '.join(f'seed {seed}' for seed in SEEDS)} | mean gap to BF16 |"]
    rows.append("|---" * (len(SEEDS) + 2) + "|")
    for name in LEVELS:
        losses = {seed: final(name, seed) for seed in SEEDS}
        pairs = [(loss, final("BF16", seed)) for seed, loss in losses.items()]
        gaps = [loss / base - 1 for loss, base in pairs if loss is not None and base is not None]
        gap = f"{100 * statistics.fmean(gaps):+.2f} % ({len(gaps)} seeds)" if gaps else "-"
        rows.append(f"| {name} | {' | '.join(map(shown, losses.values()))} | {gap} |")
    rows += ["", f"| | seed {SEEDS[0]} | gap to #1 |", "|---|---|---|"]
    base = final("#1", SEEDS[0])
    for name in ABLATION:
        loss = final(name, SEEDS[0])
        gap = "-" if loss is None or base is None else f"{100 * (loss / base - 1):+.2f} %"
        rows.append(f"| {name}: {ABOUT[name]} | {shown(loss)} | {gap} |")
    return rows


def plot(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Draw the validation losses over BF16's, of levels and of the ablation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for axes, names, title in (
        (panels[0], list(LEVELS), "levels"),
        (panels[1], list(ABLATION), "ablation of table 6"),
    ):
        for number, name in enumerate(names):
            seeds = found.get(SAME_RUN.get(name, name), {}) if axes is panels[1] else found[name]
            for seed, row in seeds.items():
                base = found["BF16"].get(seed)
                if base is None or (axes is panels[1] and seed != SEEDS[0]):
                    continue
                pairs = zip(row["val_loss"], base["val_loss"], strict=True)
                gaps = [100 * (ours / theirs - 1) for ours, theirs in pairs]
                label = name if seed == SEEDS[0] else None
                axes.plot(row["val_steps"], gaps, color=f"C{number}", marker="o", markersize=3,
                          linewidth=1, label=label)  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("validation loss over BF16, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what is missing, and write the table, the result file and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", type=int, help="the most runs to make (all that are missing)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run (1)")
    parser.add_argument("--runs", type=Path, default=Path("runs/fp8-lm"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--image", type=Path, default=ROOT / "docs" / "images" / "fp8_lm_accuracy.png"
    )
    args = parser.parse_args()
    left = len(wanted()) if args.new is None else args.new
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in (*LEVELS, *ABLATION)}
    for name, seed, flags in wanted():
        path = args.runs.resolve() / f"{name.removeprefix('#')}-{seed}"
        if not is_finished(path) and left > 0:
            left -= 1
            print(f"{name}, seed {seed}", flush=True)
            run(path, seed, flags, args.threads)
        if is_finished(path):
            found[name][seed] = collect(path)
    rows = table(found)
    print("\n".join(rows))
    num_found = sum(map(len, found.values()))
    print(f"{num_found} of {len(wanted())} runs are there; the same command runs the others")
    today = datetime.date.today().isoformat()
    result = {
        "what": "validation losses of FP8-LM's levels and ablation, nats per token",
        "date": today,
        "cpu": cpu_name(),
        "command": " ".join(["python", "benchmarks/fp8_lm_accuracy.py", *sys.argv[1:]]),
        "job": JOB,
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "table": rows,
        "runs": found,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{today}_fp8-lm-accuracy.json"
    path.write_text(json.dumps(result) + "\n")
    if found["BF16"]:
        plot(found, args.image)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
