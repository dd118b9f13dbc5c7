"""Provide what the GPU benchmarks share: peaks, timing by events, the card's state, result files.

A result says on which card it was measured: its name, driver, power limit and highest clocks once,
and with each row the most power that was drawn meanwhile and the clocks at that moment.
"""

from __future__ import annotations

import atexit
import datetime
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megafp8.observe.utilization import peak_of_gpu
from megafp8.ops.torch_private import pause_gpu
from megafp8.plan.hardware import KNOWN, Hardware
from megafp8.train.process import prepare_process

RESULTS = Path(__file__).parent / "results"
PAUSE_CYCLES = 20_000_000  # about 10 ms, in which the host queues the first runs
LINES = "results.jsonl"  # in the folder of the results: one line for each row
COMMIT = "MEGAFP8_COMMIT"  # the environment variable of the commit, where there is no repository
CARD = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.mem")
SENSORS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
"""Fields of `nvidia-smi`: what a card is, and what it does at a moment."""
EVERY_MS = 100


def hardware_of(name: str) -> Hardware:
    """Return the data sheet of the GPU that CUDA calls `name`; an H200's for one without.

    Results name the sheet whose peaks their floors and shares are of.
    """
    peak = peak_of_gpu(name)
    found = (sheet for sheet in KNOWN.values() if peak is not None and sheet.name == peak.device)
    return next(found, KNOWN["h200"])


def peak_flops(name: str, precision: str) -> float:
    """Return the dense FLOPs a second of a device in `bf16` or `fp8`, by its data sheet."""
    sheet = hardware_of(name)
    return 1e12 * {"bf16": sheet.bf16_tflops, "fp8": sheet.fp8_tflops}[precision]


def bytes_per_second(name: str) -> float:
    """Return the memory bandwidth of a device by its data sheet."""
    return 1e9 * hardware_of(name).memory_gb_s


def smi(*options: str) -> list[str] | None:
    """Return the command that asks `nvidia-smi` about the first CUDA device, if there is one."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--format=csv,noheader,nounits", *options]
    if torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return command
    return [*command, f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"]


@cache
def card() -> dict[str, str]:
    """Return what `nvidia-smi` says of the card: MiB, watts, MHz; nothing without it."""
    command = smi(f"--query-gpu={','.join(CARD)}")
    if command is None:
        return {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return {"error": "nvidia-smi said nothing for 20 seconds"}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(values) != len(CARD):
        return {"error": (done.stderr or done.stdout).strip()[:200]}
    return dict(zip(CARD, values, strict=True))


class Sensors:
    """Read power, clocks and temperature of the card ten times a second, in the background."""

    def __init__(self, command: list[str] | None = None) -> None:
        asked = (f"--query-gpu={','.join(SENSORS)}", f"--loop-ms={EVERY_MS}")
        command = smi(*asked) if command is None else command
        self._found: list[tuple[float, ...]] = []
        if command is None:
            return
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        atexit.register(process.kill)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self._found.append(tuple(float(value) for value in line.split(",")))
            except ValueError:  # a field that this card or driver does not have
                continue

    def since_last(self) -> dict[str, float]:
        """Return the moment of most power since the last call, or nothing if none was read."""
        found, self._found = self._found, []
        if not found:
            return {}
        sm, memory, watts, celsius = max(found, key=lambda each: each[2])
        named = {"watts": watts, "sm_mhz": sm, "memory_mhz": memory, "celsius": celsius}
        return named | {"readings": len(found)}


def device_and_name() -> tuple[torch.device, str]:
    """Return the device to measure and its name: a CUDA device if there is one.

    Its products add up as those of a run do, which torch's own settings would not.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda")
        prepare_process(device, fp32=False)
        return device, torch.cuda.get_device_name()
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
    """Return the commit of this checkout, or what the environment says where it has none."""
    if given := os.environ.get(COMMIT):
        return given
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
        "card": card(),
        "data_sheet": hardware_of(name).name,
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
        self.sensors = Sensors()

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Write a row that was measured, with the card's state since the row before."""
        if found := self.sensors.since_last():
            row["card"] = found
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
