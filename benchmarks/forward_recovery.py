"""Try what NVFP4 gains when it is left shortly before the end of a run, at three seeds.

NVIDIA's report on NVFP4 (arXiv 2509.25149, "Switching to Higher Precision") moves the forward
products alone to BF16 for the last 18 % of a run, about where the learning rate begins to decay,
and finds that most of the loss's gap to higher precision goes. This command trains four
configurations with `megafp8 compare`: BF16, NVFP4, NVFP4 with forward products in BF16 for the last
18 %, and NVFP4 with all products in BF16 then. The job is that of `recipe_gaps.py`, but twice as
long, and with a learning rate that is constant for 80 % of the run and then decays. A comparison
that has ended is not made again. The command then writes a result file and prints its tables.

    python benchmarks/forward_recovery.py
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from recipe_gaps import JOB, ROOT, SEEDS, compare, gaps_of, write

from megafp8.report.record import read_run
from megafp8.report.verdict import Pair, judge

NAME = "forward-recovery"
SWITCH = 0.82
CHANGES = (
    "trainer.max_steps=800",
    "trainer.val_check_interval=800",
    "model.optim.sched.name=WSD",
    "model.optim.sched.wsd_decay_ratio=0.2",
    "model.fp8_health=scales",  # full measurements would take time and change no number
)
SCHEDULES = {  # what a configuration is called: its value of the setting
    "NVFP4 throughout": "[]",
    "NVFP4, then forward in BF16": f"[{{from: {SWITCH}, products: forward, recipe: bf16}}]",
    "NVFP4, then BF16": f"[{{from: {SWITCH}, recipe: bf16}}]",
}
FOLDERS = (
    "given",
    "from-0.82-products-forward-recipe-bf16",
    "from-0.82-recipe-bf16",
)
"""What `compare` calls the runs of each schedule, in their order."""


def over_nvfp4(folder: Path, label: str) -> dict[str, Any]:
    """Return the figures of a configuration's loss over that of NVFP4 throughout."""
    pairs = [
        Pair(seed, read_run(folder / f"{FOLDERS[0]}-{seed}"), read_run(folder / f"{label}-{seed}"))
        for seed in SEEDS
    ]
    return {"figures": dataclasses.asdict(judge(pairs, 0.005, ("NVFP4 throughout", label)))}


def main() -> None:
    """Make what is missing, and write the tables and the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs", NAME))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    folder = args.runs.resolve()
    job = tuple({text.partition("=")[0]: text for text in (*JOB, *CHANGES)}.values())
    schedules = f"model.precision_schedule={','.join(SCHEDULES.values())}"
    settings = ("model.fp8=True", "model.fp8_recipe=nvfp4", schedules)
    figures = compare(folder, settings, "model.fp8=False", job)
    over_bf16 = dict(zip(SCHEDULES, figures["configurations"], strict=True))
    labels = dict(zip(SCHEDULES, FOLDERS, strict=True))
    over_itself = {name: over_nvfp4(folder, labels[name]) for name in list(SCHEDULES)[1:]}
    found = {"job": job, "switch": SWITCH, "schedules": SCHEDULES}
    for title, of in (("over BF16", over_bf16), ("over NVFP4 throughout", over_itself)):
        rows = [f"| {name} | {gaps_of(each)} |" for name, each in of.items()]
        print(title, *rows, sep="\n", end="\n\n")
        found[title] = {"table": rows, "configurations": of}
    write(NAME, "gaps of final validation losses, paired by seed", args.results, found)


if __name__ == "__main__":
    main()
