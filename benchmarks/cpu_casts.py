"""Measure the CPU time of the FP8 casts in C on one thread, compared with plain copies.

The casts are also compared with the same source compiled with `-ftrapping-math`, a flag that was
used earlier: gcc then vectorizes no comparison of floats without AVX-512. `--march` compiles both
for an older CPU. The benchmark writes a result file.

    python benchmarks/cpu_casts.py --march x86-64-v3
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fp8_numerics.cast import decode, quantize
from fp8_numerics.formats import E4M3
from fp8_numerics.kernels.compile import library


def operations(rows: int, cols: int) -> dict[str, Callable[[], object]]:
    """Return the copies, casts and decodings of a [rows, cols] tensor by their names."""
    scale, amax, made = torch.tensor(100.0), torch.zeros(()), {}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator)
    payload = quantize(x, scale, E4M3, amax=None, grid_dtype=None).payload
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        source, target = x.to(dtype), torch.empty(rows, cols, dtype=dtype)
        made[f"copy {name}"] = lambda source=source, target=target: target.copy_(source)
        for grid_name, grid in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            if grid not in (dtype, torch.float32):
                continue
            for what, sums in (("quantize", None), ("quantize_and_sum", torch.empty(cols))):
                made[f"{what} {name}, grid {grid_name}"] = partial(
                    quantize, source, scale, E4M3, amax=amax, grid_dtype=grid, column_sum=sums
                )
        made[f"decode to {name}"] = lambda dtype=dtype: decode(payload, E4M3, dtype)
    return made


def measured(rows: int, cols: int, rounds: int) -> dict[str, float]:
    """Return the median of each operation's CPU seconds; the operations alternate."""
    torch.set_num_threads(1)
    made = operations(rows, cols)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds + 2):
        for name, run in made.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def compiled_with(flags: str, arguments: list[str]) -> dict[str, float]:
    """Return `measured` of a process whose kernels are compiled with additional `flags`."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder, "compiler")
        compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" {flags}\n')
        compiler.chmod(0o755)
        environment = os.environ | {"CC": str(compiler), "XDG_CACHE_HOME": folder}
        command = [sys.executable, __file__, "--only-measure", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    medians: dict[str, float] = json.loads(done.stdout)
    return medians


def main() -> None:
    """Measure the casts with and without trapping math, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--march", default="native", help="the compiler's -march")
    parser.add_argument(
        "--only-measure", action="store_true", help="print the medians as JSON and write no result"
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.only_measure:
        assert library().lib is not None, library().note
        print(json.dumps(measured(args.rows, args.cols, args.rounds)))
        return
    sizes = [f"--{name}={getattr(args, name)}" for name in ("rows", "cols", "rounds")]
    medians = compiled_with(f"-march={args.march}", sizes)
    slow = compiled_with(f"-march={args.march} -ftrapping-math", sizes)
    ratios = {}
    for name, median in medians.items():
        ratios[name] = slow[name] / median
        print(f"{name:>32}  {1e3 * median:6.2f} ms, {ratios[name]:5.2f} times the speed")
    today = datetime.date.today().isoformat()
    result = {
        "what": "FP8 casts to E4M3 on one thread, medians of CPU time; ratios are of speeds",
        "date": today,
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "shape": {"rows": args.rows, "cols": args.cols},
        "march": args.march,
        "rounds": args.rounds,
        "command": " ".join(["python", "benchmarks/cpu_casts.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "median_cpu_seconds": medians,
        "median_cpu_seconds_trapping_math": slow,
        "ratios_over_trapping_math": ratios,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{today}_cpu-casts_{args.march}_{args.rows}x{args.cols}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
