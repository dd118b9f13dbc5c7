"""Check that memory, open files and threads stay flat in a long run of tiny steps with many saves.

    python -m tests.train.soak [--steps 20000] [--saves 300] [--ranks 1] [overrides …]

The program trains a tiny job with `pretrain_gpt.py` and samples the /proc of every rank four times
per second. After the warm-up (the first fifth of the steps), it fits a line to each quantity, and
reports the slope with a 95 % confidence interval from the means of 20 blocks, since neighbouring
samples are not independent. The run passes if

- anonymous resident memory, which is what was allocated, rises by less than 1 % per 10,000 steps
  even at the upper end of the interval (file pages, which the kernel may drop, are reported too),
- the medians of open files and threads in the last fifth are not above those of the warm-up: a save
  holds some files for an instant, which a sample meets or misses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low

from tests.train.runs import ENVIRONMENT, JOB, ROOT, make_dataset

WARM_UP = 0.2  # of the steps
BLOCKS = 20
MAX_RISE = 0.01  # of anonymous memory, in 10,000 steps
PER = 10_000
T_95 = 2.101  # Student's t, two-sided 95 %, BLOCKS - 2 = 18 degrees of freedom


@dataclass(frozen=True)
class Sample:
    """Hold what one process uses at one moment."""

    step: int
    anonymous: int  # bytes
    file: int  # bytes of mapped files and libraries that are resident
    open_files: int
    threads: int


@dataclass(frozen=True)
class Line:
    """Describe a least-squares line through block means."""

    slope: float  # per PER steps
    margin: float  # half of the slope's 95 % interval
    mean: float

    @property
    def highest(self) -> float:
        return self.slope + self.margin


def fit(points: Sequence[tuple[float, float]], blocks: int = BLOCKS) -> Line:
    """Fit a line to (step, value), in order of steps, with two points or more in each block."""
    size = len(points) / blocks
    assert size >= 2, f"{len(points)} samples are too few for {blocks} blocks"
    cut = [points[round(b * size) : round((b + 1) * size)] for b in range(blocks)]
    xs = [sum(x for x, _ in block) / len(block) / PER for block in cut]
    ys = [sum(y for _, y in block) / len(block) for block in cut]
    mean_x, mean_y = sum(xs) / blocks, sum(ys) / blocks
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    residual = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(slope, T_95 * math.sqrt(residual / (blocks - 2) / spread), mean_y)


@dataclass(frozen=True)
class Verdict:
    """Hold the results for one rank."""

    rank: int
    num_samples: int
    anonymous: Line
    file: Line
    open_files: tuple[int, int]  # median of the warm-up, of the last fifth
    threads: tuple[int, int]

    @property
    def problems(self) -> list[str]:
        found = []
        if self.anonymous.highest > MAX_RISE * self.anonymous.mean:
            found.append(
                f"rank {self.rank}: memory may rise by {self.anonymous.highest / 2**20:.2f} MiB "
                f"in {PER} steps, more than {MAX_RISE:.0%} of {self.anonymous.mean / 2**20:.0f} MiB"
            )
        for name, (before, after) in (("open files", self.open_files), ("threads", self.threads)):
            if after > before:
                found.append(f"rank {self.rank}: {after} {name}, {before} in the warm-up")
        return found

    def __str__(self) -> str:
        def text(line: Line) -> str:
            return (
                f"{line.mean / 2**20:.1f} MiB, slope {line.slope / 2**20:+.3f} ± "
                f"{line.margin / 2**20:.3f} MiB per {PER} steps"
            )

        return (
            f"rank {self.rank}, {self.num_samples} samples: anonymous {text(self.anonymous)}; file "
            f"pages {text(self.file)}; open files {self.open_files[0]} -> {self.open_files[1]}, "
            f"threads {self.threads[0]} -> {self.threads[1]} (medians: warm-up -> last fifth)"
        )


def judge(rank: int, samples: Sequence[Sample], steps: int) -> Verdict:
    """Fit lines to the samples after the warm-up and before the last step.

    The last step is left out because a run validates on the whole text at its end.
    """
    warm = [s for s in samples if s.step <= WARM_UP * steps]
    rest = [s for s in samples if WARM_UP * steps < s.step < steps]
    last = [s for s in rest if s.step > (1 - WARM_UP) * steps]
    assert warm and last, "no samples before or after the warm-up"
    return Verdict(
        rank=rank,
        num_samples=len(samples),
        anonymous=fit([(s.step, s.anonymous) for s in rest]),
        file=fit([(s.step, s.file) for s in rest]),
        open_files=(median_low(s.open_files for s in warm), median_low(s.open_files for s in last)),
        threads=(median_low(s.threads for s in warm), median_low(s.threads for s in last)),
    )


def sample(pid: int, step: int) -> Sample | None:
    """Return what a process uses now, or None if it has ended."""
    proc = Path(f"/proc/{pid}")
    try:
        status = dict(re.findall(r"^(\w+):\s+(\d+)", (proc / "status").read_text(), re.MULTILINE))
        open_files = len(list((proc / "fd").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "RssAnon" not in status:
        return None  # it is a zombie
    return Sample(
        step,
        int(status["RssAnon"]) * 1024,
        int(status["RssFile"]) * 1024,
        open_files,
        int(status["Threads"]),
    )


def soak(
    folder: Path, *, steps: int, saves: int, ranks: int, more: Sequence[str], pause: float
) -> tuple[list[Verdict], int, list[list[Sample]]]:
    """Run and sample; return verdicts, the number of committed checkpoints, and the samples."""
    data = make_dataset(folder / "tiny")
    given = {word.partition("=")[0] for word in more}
    own = [
        *JOB,
        f"model.data.data_prefix={data}",
        "exp_manager.name=soak",
        f"trainer.max_steps={steps}",
        f"exp_manager.checkpoint_callback_params.every_n_train_steps={max(1, steps // saves)}",
        f"trainer.val_check_interval={max(1, steps // 40)}",
        f"trainer.devices={ranks}",
        "trainer.log_every_n_steps=10",
    ]
    last = {word.partition("=")[0]: word for word in own}
    words = [word for key, word in last.items() if key not in given] + list(more)
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    samples: list[list[Sample]] = [[] for _ in range(ranks)]
    try:
        while process.poll() is None:
            time.sleep(pause)
            step = last_step(folder / "runs/soak/metrics.jsonl")
            if step == 0:
                continue
            for rank, pid in enumerate(ranks_of(process.pid, ranks)):
                if (seen := sample(pid, step)) is not None:
                    samples[rank].append(seen)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    text = log.read_text()
    assert process.returncode == 0, text[-4000:]
    committed = len(set(re.findall(r"step (\d+) saved", text)))
    return [judge(rank, seen, steps) for rank, seen in enumerate(samples)], committed, samples


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line; only the file's end is read."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def ranks_of(pid: int, ranks: int) -> list[int]:
    """Return the process itself, or the ranks that it has started."""
    if ranks == 1:
        return [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in children][:ranks]


def main(argv: Sequence[str]) -> int:
    """Run the soak; return 0 if everything stays flat, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--saves", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, help="every sample goes there")
    parser.add_argument("overrides", nargs="*", help="of pretrain_gpt.py")
    options = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megafp8-soak-") as folder:
        verdicts, committed, samples = soak(
            Path(folder),
            steps=options.steps,
            saves=options.saves,
            ranks=options.ranks,
            more=options.overrides,
            pause=0.25,
        )
    if options.json is not None:
        options.json.write_text(json.dumps([[asdict(s) for s in seen] for seen in samples]))
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    if committed < options.saves:
        problems.append(f"{committed} checkpoints were committed, not {options.saves}")
    seconds = time.monotonic() - began
    print(f"{options.steps} steps, {committed} checkpoints, {seconds:.0f} s")
    print("\n".join(map(str, [*verdicts, *problems])) or "")
    print("NOT flat" if problems else "flat")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
