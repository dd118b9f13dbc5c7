"""Time a training step of the default job with AdamW and with Muon, in BF16 and in FP8.

All four train in this process on one thread and alternate, one step at a time. The figures are
medians of the process's CPU time, which other programs disturb less than time on the clock, and
Muon's median over AdamW's.

    python benchmarks/optimizer_time.py --steps 20
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from cpu_step import cpu_name
from optimizer_gaps import PRECISIONS

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build
from megafp8.train.process import prepare_process
from megafp8.train.state import TrainState
from megafp8.train.step import train_step

VOCABULARY = 4096


def state_of(*settings: str) -> TrainState:
    """Return the state of the default job, changed by `settings`, before its first step."""
    spec = resolve(load(["trainer.accelerator=cpu", *settings]), lambda: False)
    model = dataclasses.replace(spec.model, vocab_size=VOCABULARY)
    return build(dataclasses.replace(spec, model=model), single_rank())


def main() -> None:
    """Time all four in turn, print the medians, and write them to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare_process(torch.device("cpu"), fp32=False)
    states = {
        (label, name): state_of(precision, f"model.optim.name={name}")
        for label, precision in PRECISIONS.items()
        for name in ("adamw", "muon")
    }
    numbers = np.random.default_rng(0).integers(0, VOCABULARY, (2, 2, 4, 256))
    batches = [Microbatch(*pair) for pair in numbers]
    seconds: dict[tuple[str, str], list[float]] = {which: [] for which in states}
    for step in range(args.steps + 2):
        for which, state in states.items():
            began = time.process_time()
            train_step(state, batches)
            if step >= 2:  # the first steps also allocate
                seconds[which].append(time.process_time() - began)
            state.step += 1
    found = {}
    for label in PRECISIONS:
        adamw, muon = (statistics.median(seconds[label, name]) for name in ("adamw", "muon"))
        found[label] = {"adamw": adamw, "muon": muon, "ratio": muon / adamw}
        print(f"{label}: AdamW {adamw:.4f} s, Muon {muon:.4f} s, ratio {muon / adamw:.3f}")
    today = datetime.date.today().isoformat()
    result = {
        "what": "CPU seconds of a step of the default job on one thread, medians",
        "date": today,
        "cpu": cpu_name(),
        "command": f"python benchmarks/optimizer_time.py --steps {args.steps}",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "found": found,
    }
    path = args.results / f"{today}_optimizer-time.json"
    path.write_text(json.dumps(result) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
