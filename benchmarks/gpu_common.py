"""Provide what the GPU benchmarks share: hardware peaks, timing by events, result files."""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megafp8.ops.torch_private import pause_gpu

PEAK_FLOPS = {"bf16": 989e12, "fp8": 1979e12}  # dense, NVIDIA's data sheet for H100 and H200 SXM
RESULTS = Path(__file__).parent / "results"
PAUSE_CYCLES = 20_000_000  # about 10 ms, in which the host queues the first runs
LINES = "results.jsonl"  # in the folder of the results: one line for each row


def bytes_per_second(name: str) -> float:
    """Return the memory bandwidth of a device by its data sheet.

    It is that of an H200 for any device but an H100.
    """
    return 3.35e12 if "H100" in name else 4.8e12


def device_and_name() -> tuple[torch.device, str]:
    """Return the device to measure and its name: a CUDA device if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.cuda.get_device_name()
    return torch.device("cpu"), "cpu"


def timed(run: Callable[[], object], device: torch.device, warm_up: int, runs: int) -> list[float]:
    """Return the seconds of each of `runs` calls, after `warm_up` calls that are not timed.

    On a GPU, all runs are queued behind a pause and waited for once. A wait after each run would
    add the time that the host needs to launch the first kernel of the next one.
    """
    for _ in range(warm_up):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        pause_gpu(PAUSE_CYCLES)
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    seconds = []
    for _ in range(runs):
        clock = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - clock)
    return seconds


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, the least and the largest of times, for a row of results."""
    return {
        "median_seconds": statistics.median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
    }


def git_commit() -> str:
    """Return the commit of this checkout, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write_result(
    folder: Path, subject: str, name: str, what: str, content: Mapping[str, Any]
) -> Path:
    """Write `DATE_HARDWARE_SUBJECT.json` to `folder`, and return its path.

    The file has `content`, and versions, commit and command.
    """
    today = datetime.date.today().isoformat()
    result = {
        "what": what,
        "date": today,
        "hardware": name,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": git_commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        **content,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{today}_{name.replace(' ', '-').lower()}_{subject}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


class Results:
    """Collect the rows of one benchmark, and write each to the disk as soon as it is measured.

    Each row is also appended to `results.jsonl`, which shows the newest row last.
    """

    def __init__(self, folder: Path, subject: str, name: str, what: str, **content: Any) -> None:
        self.folder, self.subject, self.name, self.what = folder, subject, name, what
        self.rows: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}  # rows that cannot be measured here, with reasons
        self.failed: dict[str, str] = {}  # rows that failed, with errors
        self.content = content

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Write a row that was measured."""
        self.rows[key] = row
        self._write(key, {"row": row})

    def skip(self, key: str, reason: str) -> None:
        """Write why a row cannot be measured here."""
        self.skipped[key] = reason
        print(f"{key:>24}  skipped: {reason}", flush=True)
        self._write(key, {"skipped": reason})

    def fail(self, key: str, error: str) -> None:
        """Write that measuring a row failed."""
        self.failed[key] = error
        print(f"{key:>24}  failed: {error}", flush=True)
        self._write(key, {"failed": error})

    def _write(self, key: str, found: Mapping[str, Any]) -> None:
        parts = {"rows": self.rows, "skipped": self.skipped, "failed": self.failed}
        write_result(self.folder, self.subject, self.name, self.what, self.content | parts)
        line = {"subject": self.subject, "hardware": self.name, "key": key, **found}
        with (self.folder / LINES).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def exit_code(self) -> int:
        """Return 1 if a row failed or none was measured, else 0."""
        return int(bool(self.failed) or not self.rows)
