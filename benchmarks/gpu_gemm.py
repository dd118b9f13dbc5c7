"""One matrix product on a GPU: BF16, and FP8 on ready operands, against its floor.

Random normal operands (zeros and small integers draw less power and run faster), CUDA events,
medians. FP8 runs with and without fast accumulation, through the project's own entry. The floor is
the larger of operations over peak and bytes over bandwidth of an H200 SXM.

    python benchmarks/gpu_gemm.py --size 8192
    python benchmarks/gpu_gemm.py --tiny            # on a CPU: does it run
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megafp8.precision.kernels.scaled_mm import scaled_mm, unsupported

PEAK_FLOPS = {"bf16": 989e12, "fp8": 1979e12}  # dense, NVIDIA's data sheet for H100 and H200 SXM
BYTES_PER_SECOND = 4.8e12  # H200 SXM


def floor_seconds(size: int, precision: str) -> float:
    """For three square matrices, the result in BF16."""
    operand_bytes = {"bf16": 2, "fp8": 1}[precision]
    num_bytes = size * size * (2 * operand_bytes + 2)
    return max(2 * size**3 / PEAK_FLOPS[precision], num_bytes / BYTES_PER_SECOND)


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


def variants(size: int, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    a_bf16, b_bf16 = a.bfloat16(), b.bfloat16()
    a_fp8, b_fp8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def fp8(use_fast_accum: bool) -> Callable[[], torch.Tensor]:
        return lambda: scaled_mm(
            a_fp8, b_fp8, one, one, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum
        )

    found: dict[str, Callable[[], torch.Tensor]] = {"bf16": lambda: a_bf16 @ b_bf16.t()}
    if device.type == "cpu" or unsupported(device) is None:
        found |= {"fp8 fast accumulation": fp8(True), "fp8 precise accumulation": fp8(False)}
    return found


def git_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="64, few runs, any device: a check")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.tiny:
        parser.error("no CUDA device: this benchmark measures one (--tiny checks that it runs)")
    if args.tiny:
        args.size, args.runs, args.warm_up = 64, 3, 1
    device = torch.device("cuda" if has_gpu else "cpu")
    name = torch.cuda.get_device_name() if has_gpu else "cpu"
    rows = {}
    for what, run in variants(args.size, device).items():
        seconds = timed(run, device, args.warm_up, args.runs)
        median, precision = statistics.median(seconds), what.split()[0]
        flops = 2 * args.size**3 / median
        rows[what] = {
            "median_seconds": median,
            "min_seconds": min(seconds),
            "max_seconds": max(seconds),
            "flops_per_second": flops,
            "share_of_bf16_peak": flops / PEAK_FLOPS["bf16"],
            "share_of_fp8_peak": flops / PEAK_FLOPS["fp8"],
            "floor_seconds": floor_seconds(args.size, precision),
        }
        print(f"{what:>26}  {1e3 * median:9.3f} ms  {flops / 1e12:8.2f} TFLOP/s")
    today = datetime.date.today().isoformat()
    result = {
        "what": f"{args.size} cubed product of random normal operands, scales 1; medians",
        "date": today,
        "hardware": name,
        "command": " ".join(["python", "benchmarks/gpu_gemm.py", *sys.argv[1:]]),
        "commit": git_commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "runs": args.runs,
        "rows": rows,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{today}_{name.replace(' ', '-').lower()}_gemm-{args.size}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
