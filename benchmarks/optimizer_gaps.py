"""Compare Muon with AdamW in BF16 and in FP8 at three seeds, by `megafp8 compare`.

The job is that of `recipe_gaps.py`, or with `--default-job` the default job (900 steps, about five
minutes a run). A comparison that has ended is not made again. The command then writes a result file
and prints its table.

    python benchmarks/optimizer_gaps.py [--default-job]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipe_gaps import JOB, ROOT, compare, gaps_of, write

PRECISIONS = {"BF16": "model.fp8=False", "FP8 delayed": "model.fp8=True"}
DEFAULT_JOB = (
    "trainer.enable_progress_bar=False",
    "exp_manager.create_tensorboard_logger=False",
)
"""Settings that change no number of the default job."""


def main() -> None:
    """Make what is missing, and write the table and the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--default-job", action="store_true", help="train the default job instead")
    parser.add_argument("--runs", type=Path, help="a folder (below runs/)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    name, job = ("optimizer-gaps", JOB)
    if args.default_job:
        name, job = ("optimizer-gaps-default-job", DEFAULT_JOB)
    comparisons = {}
    for label, precision in PRECISIONS.items():
        folder = (args.runs or Path("runs", name)).resolve() / label.replace(" ", "-")
        settings = (precision, "model.optim.name=muon")
        figures = compare(folder, settings, "model.optim.name=adamw", job)
        comparisons[label] = figures["configurations"]
    rows = [f"| {label} | {gaps_of(each)} |" for label, of in comparisons.items() for each in of]
    print("\n".join(rows))
    command = "python benchmarks/optimizer_gaps.py" + " --default-job" * args.default_job
    found = {"command": command, "job": job, "table": rows, "comparisons": comparisons}
    what = "gaps of Muon's final validation losses over AdamW's, paired by seed"
    write(name, what, args.results, found)


if __name__ == "__main__":
    main()
