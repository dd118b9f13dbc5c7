"""Compare Muon with AdamW in BF16 and in FP8 at three seeds, by `megafp8 compare`.

The job is that of `recipe_gaps.py`. A comparison that has ended is not made again. The command then
writes a result file and prints its table.

    python benchmarks/optimizer_gaps.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipe_gaps import ROOT, compare, gaps_of, write

PRECISIONS = {"BF16": "model.fp8=False", "FP8 delayed": "model.fp8=True"}


def main() -> None:
    """Make what is missing, and write the table and the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/optimizer-gaps"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    comparisons = {}
    for name, precision in PRECISIONS.items():
        folder = args.runs.resolve() / name.replace(" ", "-")
        settings = (precision, "model.optim.name=muon")
        figures = compare(folder, settings, "model.optim.name=adamw")
        comparisons[name] = figures["configurations"]
    rows = [f"| {name} | {gaps_of(each)} |" for name, of in comparisons.items() for each in of]
    print("\n".join(rows))
    what = "gaps of Muon's final validation losses over AdamW's, paired by seed"
    write("optimizer-gaps", what, args.results, {"table": rows, "comparisons": comparisons})


if __name__ == "__main__":
    main()
