"""What the GPU benchmarks share: the hardware's peaks, timing by events, result files."""

from __future__ import annotations

import datetime
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

PEAK_FLOPS = {"bf16": 989e12, "fp8": 1979e12}  # dense, NVIDIA's data sheet for H100 and H200 SXM
RESULTS = Path(__file__).parent / "results"


def bytes_per_second(name: str) -> float:
    """Of the memory, by the data sheet; an H200's where the device is neither."""
    return 3.35e12 if "H100" in name else 4.8e12


def device_and_name() -> tuple[torch.device, str]:
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.cuda.get_device_name()
    return torch.device("cpu"), "cpu"


def timed(run: Callable[[], object], device: torch.device, warm_up: int, runs: int) -> list[float]:
    """Seconds of each run."""
    for _ in range(warm_up):
        run()
    seconds = []
    for _ in range(runs):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            torch.cuda.synchronize()
            seconds.append(began.elapsed_time(ended) / 1e3)
        else:
            clock = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - clock)
    return seconds


def spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median_seconds": statistics.median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
    }


def git_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write_result(
    folder: Path, subject: str, name: str, what: str, content: Mapping[str, Any]
) -> Path:
    """`DATE_HARDWARE_SUBJECT.json`, with versions, commit and command."""
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
    print(f"written to {path}")
    return path
