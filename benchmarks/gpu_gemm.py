"""Time one matrix product on a GPU, in BF16 and FP8, and compare it with its floor.

Operands are random normal numbers, since zeros and small integers need less power and run faster;
FP8 operands are quantized before. Times are medians of CUDA events. FP8 runs with and without fast
accumulation, through this project's own function. The floor is the larger of operations over peak
and bytes over bandwidth by the card's data sheet.

    python benchmarks/gpu_gemm.py --size 8192
    python benchmarks/gpu_gemm.py --tiny            # check on a CPU that it runs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_common import (
    RESULTS,
    Results,
    bytes_per_second,
    device_and_name,
    peak_flops,
    spread,
    timed,
)

from fp8_numerics.scaled_mm import scaled_mm
from megafp8.fp8.engine import unsupported


def floor_seconds(size: int, precision: str, name: str) -> float:
    """Return the floor of a product of two square matrices with a result in BF16, in seconds."""
    operand_bytes = {"bf16": 2, "fp8": 1}[precision]
    num_bytes = size * size * (2 * operand_bytes + 2)
    return max(2 * size**3 / peak_flops(name, precision), num_bytes / bytes_per_second(name))


def variants(size: int, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the products that run on `device`, by name."""
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


def main() -> None:
    """Time each product, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument(
        "--tiny", action="store_true", help="check on any device: size 64, few runs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, name = device_and_name()
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device to measure (--tiny checks that the benchmark runs)")
    if args.tiny:
        args.size, args.runs, args.warm_up = 64, 3, 1
    title = f"{args.size} cubed product of random normal operands, scales 1; medians"
    results = Results(args.results, f"gemm-{args.size}", name, title, runs=args.runs)
    for what, run in variants(args.size, device).items():
        try:
            times = spread(timed(run, device, args.warm_up, args.runs))
        except Exception as error:
            results.fail(what, f"{type(error).__name__}: {error}")
            continue
        median, precision = times["median_seconds"], what.split()[0]
        flops = 2 * args.size**3 / median
        row = {
            **times,
            "flops_per_second": flops,
            "share_of_bf16_peak": flops / peak_flops(name, "bf16"),
            "share_of_fp8_peak": flops / peak_flops(name, "fp8"),
            "floor_seconds": floor_seconds(args.size, precision, name),
        }
        results.add(what, row)
        print(f"{what:>26}  {1e3 * median:9.3f} ms  {flops / 1e12:8.2f} TFLOP/s", flush=True)
    sys.exit(results.exit_code())


if __name__ == "__main__":
    main()
