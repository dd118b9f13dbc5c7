"""Measure what checkpoints written in the background cost the default job in FP8.

Everything runs in one process, so that ratios are valid on a busy machine too. Three costs are
measured. `pause` is the time that `start` takes, compared with one plain copy of as many bytes; the
two alternate. `total` is the processor time of a whole save (copying, checking, hashing, writing
and reading back) over that of the 50 steps between two saves; it is an upper bound of what training
loses, as if no core were ever idle. `fork` is the time to make a child process with copy on write
instead, without the page faults that follow.

    python benchmarks/async_save.py --saves 20
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.parallel.mesh import single_rank
from megafp8.train.background_saver import BackgroundSaver
from megafp8.train.build import build
from megafp8.train.process import prepare_process
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import train_step

STEPS_BETWEEN = 50
VOCAB = 4096  # the vocabulary of the built-in corpus


def main() -> None:
    """Measure steps, saves and forks, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prepare_process(torch.device("cpu"), fp32=False)
    spec = resolve(load(["trainer.accelerator=cpu", "model.fp8=True"]), lambda: False)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=VOCAB))
    state = build(spec, single_rank())
    rng = np.random.default_rng(0)
    size, length = spec.train.micro_batch_size, spec.data.seq_length
    batches = [
        Microbatch(*(rng.integers(0, VOCAB, (size, length)) for _ in range(2)))
        for _ in range(spec.train.global_batch_size // size)
    ]
    steps = [step_seconds(state, batches) for _ in range(args.steps + 1)][1:]
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), 3, {"config": spec.resolved, "data_fingerprint": ""})
        background = BackgroundSaver(saver, state)
        source = torch.ones(background.num_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        rows = []
        for _ in range(args.saves + 1):
            began = time.perf_counter()
            target.copy_(source)
            copy, began_cpu = time.perf_counter() - began, time.process_time()
            state.step += 1
            began = time.perf_counter()
            background.start(state)
            pause = time.perf_counter() - began
            background.wait()
            rows.append((copy, pause, time.process_time() - began_cpu))
        fork = statistics.median(fork_seconds() for _ in range(args.saves))
    copy, pause, save = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    ratios = sorted(row[1] / row[0] for row in rows[1:])
    step = statistics.median(steps)
    today = datetime.date.today().isoformat()
    result = {
        "what": "saves of the default job in FP8, written in the background; medians",
        "date": today,
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # shows whether other programs used the machine
        "command": " ".join(["python", "benchmarks/async_save.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "state_bytes": background.num_bytes,
        "copy_seconds": copy,
        "pause_seconds": pause,
        "pause_over_copy": statistics.median(ratios),
        "pause_over_copy_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "fork_seconds": fork,
        "step_cpu_seconds": step,
        "save_cpu_seconds": save,
        "total": save / (STEPS_BETWEEN * step),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{today}_async-save.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(f"written to {path}")


def step_seconds(state: TrainState, batches: list[Microbatch]) -> float:
    """Return the processor time of one training step in seconds."""
    began = time.process_time()
    train_step(state, batches)
    state.step += 1
    return time.process_time() - began


def fork_seconds() -> float:
    """Return the seconds that this process needs to fork and continue."""
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    seconds = time.perf_counter() - began
    os.waitpid(child, 0)
    return seconds


if __name__ == "__main__":
    main()
