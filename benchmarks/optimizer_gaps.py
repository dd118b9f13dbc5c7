"""Compare Muon with AdamW in BF16 and in FP8 at three seeds, by `megafp8 compare`.

The job is that of `recipe_gaps.py`. A comparison that has ended is not made again. The command then
writes a result file and prints its tables.

    python benchmarks/optimizer_gaps.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from cpu_step import cpu_name
from recipe_gaps import JOB, ROOT, SEEDS

PRECISIONS = {"BF16": "model.fp8=False", "FP8 delayed": "model.fp8=True"}
ADAMW = "model.optim.name=adamw"


def compare(folder: Path, precision: str) -> dict[str, Any]:
    """Run a comparison unless it has ended, and return its figures."""
    found = folder / "compare.json"
    if not found.exists():
        command = [sys.executable, "-m", "megafp8", "compare", precision]
        command += ["model.optim.name=muon", *JOB, "--seeds", *map(str, SEEDS)]
        command += ["--out", str(folder), "--base", ADAMW]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if not found.exists():
            sys.exit(f"{folder}: the comparison ended with code {code} and left no figures")
    figures: dict[str, Any] = json.loads(found.read_text())
    return figures


def main() -> None:
    """Make what is missing, and write the tables and the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/optimizer-gaps"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    comparisons, rows = {}, []
    for name, precision in PRECISIONS.items():
        folder = args.runs.resolve() / name.replace(" ", "-")
        comparisons[name] = compare(folder, precision)
        for each in comparisons[name]["configurations"]:
            numbers = each["figures"]
            mean, half = 100 * numbers["mean"], 100 * numbers["half_width"]
            gaps = " | ".join(f"{100 * gap:+.2f} %" for gap in numbers["gaps"].values())
            rows.append(
                f"| {name} | {gaps} | {mean:+.2f} % | {mean - half:+.2f} to {mean + half:+.2f} % |"
            )
    print("\n".join(rows))
    today = datetime.date.today().isoformat()
    result = {
        "what": "gaps of Muon's final validation losses over AdamW's, paired by seed",
        "date": today,
        "cpu": cpu_name(),
        "command": "python benchmarks/optimizer_gaps.py",
        "job": JOB,
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "table": rows,
        "comparisons": {name: each["configurations"] for name, each in comparisons.items()},
    }
    path = args.results / f"{today}_optimizer-gaps.json"
    path.write_text(json.dumps(result) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
