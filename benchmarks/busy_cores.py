"""Measure how waiting threads of OpenMP change a step, alone and with busy cores beside it.

python benchmarks/busy_cores.py [--busy 0 1 2] [--rounds 5] [--spins ours 1000 20000] [--later]

Each round runs the job with each value of `GOMP_SPINCOUNT` in turn; `ours` is what the command
chooses by itself. The figures are seconds a step: the median of the runs, with the smallest and the
largest, of the last half of the steps. `--busy` is the number of other processes that keep a core
busy, from the start or, with `--later`, from the middle of the run on. The job is the default job
or, with `--nanogpt`, FP32 at the shape of nanoGPT's own example for a CPU (4 layers x 128, 12 x 64
tokens).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NANOGPT = (
    "trainer.precision=32 model.num_layers=4 model.hidden_size=128 model.num_attention_heads=4 "
    "model.ffn_hidden_size=512 model.encoder_seq_length=64 model.micro_batch_size=12 "
    "model.global_batch_size=12"
).split()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy with other processes."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def seconds_per_step(spins: str, settings: list[str], steps: int, count: int, later: bool) -> float:
    """Run the job beside `count` busy processes; return the mean of the last half of its steps."""
    unset = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "MEGAFP8_SPINS"}
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    if spins != "ours":
        environment["GOMP_SPINCOUNT"] = spins
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run = Path(folder, "run")
        flags = [
            *settings,
            f"trainer.max_steps={steps}",
            f"trainer.log_every_n_steps={steps // 20}",
        ]
        flags += ["trainer.limit_val_batches=0", f"exp_manager.explicit_log_dir={run}"]
        flags += ["exp_manager.create_checkpoint_callback=False"]
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
        if not later:
            stack.enter_context(busy(count))
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as job:
            while later and job.poll() is None:
                if len(rows_of(run)) >= 10:  # half of the steps are over
                    stack.enter_context(busy(count))
                    break
                time.sleep(0.05)
        if job.returncode:
            raise SystemExit(f"the job ended with {job.returncode}")
        return statistics.mean(row["step_seconds"] for row in rows_of(run)[10:])


def rows_of(run: Path) -> list[dict[str, float]]:
    """Return the logged steps of a run so far."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "step_seconds" in row]
    return []


def main() -> None:
    """Measure every value in every round, and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--spins", nargs="+", default=["ours", "1000", "5000", "20000", "200000"])
    parser.add_argument("--later", action="store_true")
    parser.add_argument("--nanogpt", action="store_true")
    args = parser.parse_args()
    settings = NANOGPT if args.nanogpt else ["model.fp8=True"]
    for count in args.busy:
        found: dict[str, list[float]] = {spins: [] for spins in args.spins}
        for _ in range(args.rounds):
            for spins in args.spins:
                seconds = seconds_per_step(spins, settings, args.steps, count, args.later)
                found[spins].append(seconds)
        for spins, runs in found.items():
            middle, ends = statistics.median(runs), f"{min(runs):.4f} to {max(runs):.4f}"
            print(f"{count} busy, {spins:>7}: {middle:.4f} s/step ({ends})", flush=True)


if __name__ == "__main__":
    main()
