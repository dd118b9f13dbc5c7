"""Time one forward and backward pass of a GPT on a CPU, in our precisions and in plain PyTorch.

Our FP32, BF16 and FP8 alternate in this process. Plain PyTorch in BF16, and the same with torchao's
emulated FP8, run in processes of their own without our settings; these do one step on request, and
alternate with ours. The figures are medians over the rounds and ratios of medians: of wall time, or
with `--cpu-time` of CPU time, which other programs on the machine disturb less. The benchmark
writes a result file with versions and command.

    python benchmarks/cpu_step.py --layers 12 --width 768 --threads 2
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from fp8_numerics import cpu
from fp8_numerics.kernels.compile import library
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.parallel.mesh import single_rank
from megafp8.specs import RunSpec
from megafp8.train.build import build
from megafp8.train.process import prepare_process
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward

Clock = Callable[[], float]
PLAIN = Path(__file__).with_name("plain_gpt.py")
VARIANTS = {
    "fp32": ("trainer.precision=32",),
    "fp32 fp8": ("trainer.precision=32", "model.fp8=True"),
    "bf16": ("trainer.precision=bf16",),
    "fp8": ("trainer.precision=bf16", "model.fp8=True"),
    "fp8 tensorwise": ("trainer.precision=bf16", "model.fp8=True", "model.fp8_recipe=tensorwise"),
    "mxfp8": ("precision=mxfp8",),
    "nvfp4": ("trainer.precision=bf16", "model.fp8=True", "model.fp8_recipe=nvfp4"),
    "fp8 params": ("trainer.precision=bf16", "model.fp8=True", "model.fp8_params=True"),
}
WITH_BF16_PRODUCTS = {"bf16, bf16 products": "bf16", "fp8, bf16 products": "fp8"}
"""The same as the named variant, with BF16 products as on a CPU that has BF16 instructions."""
IMITATION = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "MEGAFP8_CPU_FLAGS")
"""The environment variables with which `python -m tests.cpu_levels` imitates an older CPU."""
OTHERS = {"plain bf16": "bfloat16", "torchao tensorwise": "torchao"}


def spec_of(args: argparse.Namespace, settings: Sequence[str]) -> RunSpec:
    """Return the run that a user would get with these sizes and settings."""
    cfg = load(
        [
            f"model.num_layers={args.layers}",
            f"model.hidden_size={args.width}",
            f"model.ffn_hidden_size={4 * args.width}",
            "model.optim.lr=2e-3",  # of any width
            f"model.num_attention_heads={args.width // 64}",
            f"model.encoder_seq_length={args.seq}",
            f"model.micro_batch_size={args.batch}",
            f"model.global_batch_size={args.batch}",
            *settings,
        ]
    )
    spec = resolve(cfg, lambda: False)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=args.vocab))


def timed_step(
    state: TrainState, microbatch: Microbatch, clock: Clock, *, bf16_products: bool = False
) -> float:
    """Run one forward and backward pass, and return its seconds.

    `bf16_products` computes products in BF16 even if this CPU has no instructions for it.
    """
    is_fast = bf16_products or cpu.FAST_AT_BF16
    with patch.object(cpu, "FAST_AT_BF16", is_fast):
        began = clock()
        forward_backward(state, [microbatch])
        return clock() - began


class PlainProcess:
    """Run plain PyTorch in a process of its own, one step on each request."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        shape = (args.layers, args.width, args.width // 64, args.vocab, args.batch, args.seq)
        command = [sys.executable, str(PLAIN), *map(str, shape), dtype, str(args.threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.field = "cpu" if args.cpu_time else "seconds"

    def timed_step(self) -> float:
        """Request one step, and return its seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline())[self.field])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def cpu_name() -> str:
    """Return the CPU's name and those of its instruction sets that matter here."""
    words = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(line.split(":")[1].strip() for line in words if line.startswith("model name"))
    flags = next(line for line in words if line.startswith("flags")).split()
    found = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{name} ({', '.join(found) or 'no AVX-512'})"


def main() -> None:
    """Time all variants, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="alternations with plain PyTorch")
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps of each variant in a round"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure CPU time instead of wall time"
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--with-bf16-products",
        action="store_true",
        help="also time BF16 products on a CPU that has no instructions for them",
    )
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), help="these of ours, with bf16 among them"
    )
    parser.add_argument("--alone", action="store_true", help="leave out plain PyTorch and torchao")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    # The other processes start before our settings are made, and so inherit none of them.
    asked = {} if args.alone else OTHERS
    others = {name: PlainProcess(args, dtype) for name, dtype in asked.items()}
    prepare_process(torch.device("cpu"), fp32=True)
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, args.vocab, (args.batch, args.seq)) for _ in range(2))
    microbatch = Microbatch(tokens, targets)
    variants = {name: VARIANTS[name] for name in args.variants or VARIANTS}
    if args.with_bf16_products:
        variants |= {name: VARIANTS[base] for name, base in WITH_BF16_PRODUCTS.items()}
    states = {
        name: build(spec_of(args, settings), single_rank()) for name, settings in variants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*states, *others)}
    for _ in range(2):  # warm-up: allocator, scales, oneDNN's kernels
        for plain in others.values():
            plain.timed_step()
        for name, state in states.items():
            timed_step(state, microbatch, clock, bf16_products=name in WITH_BF16_PRODUCTS)
    for _ in range(args.rounds):
        for name, plain in others.items():
            plain.timed_step()  # the first step after a pause is not counted
            seconds[name] += [plain.timed_step() for _ in range(args.steps)]
        timed_step(states["bf16"], microbatch, clock)
        for _ in range(args.steps):
            for name, state in states.items():
                unwidened = name in WITH_BF16_PRODUCTS
                seconds[name].append(timed_step(state, microbatch, clock, bf16_products=unwidened))
    for plain in others.values():
        plain.close()
    report(args, {name: statistics.median(values) for name, values in seconds.items()}, seconds)


def report(
    args: argparse.Namespace, medians: dict[str, float], seconds: dict[str, list[float]]
) -> None:
    """Print times and ratios, and write the result file."""
    tokens = args.batch * args.seq
    compared = {
        "our bf16 over plain bf16": ("bf16", "plain bf16"),
        "our fp8 over our bf16": ("fp8", "bf16"),
        "our fp8 over our fp32": ("fp8", "fp32"),
        "fp32 with fp8 over fp32": ("fp32 fp8", "fp32"),
        "our bf16 over our fp32": ("bf16", "fp32"),
        "fp8 tensorwise over our bf16": ("fp8 tensorwise", "bf16"),
        "mxfp8 over our bf16": ("mxfp8", "bf16"),
        "nvfp4 over our bf16": ("nvfp4", "bf16"),
        "fp8 params over our bf16": ("fp8 params", "bf16"),
        "tensorwise over torchao": ("fp8 tensorwise", "torchao tensorwise"),
        "bf16 over bf16 products": ("bf16", "bf16, bf16 products"),
        "fp8 over bf16 products": ("fp8", "fp8, bf16 products"),
    }
    ratios = {
        what: medians[base] / medians[ours]
        for what, (ours, base) in compared.items()
        if base in medians and ours in medians
    }
    for name, median in medians.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(
            f"{name:>18}  {1e3 * median:8.1f} ms  (min {1e3 * low:.1f}, max {1e3 * high:.1f})  "
            f"{tokens / median:7.0f} tokens/s"
        )
    for what, ratio in ratios.items():
        print(f"{what:>30}: {ratio:.2f} times the speed")
    today = datetime.date.today().isoformat()
    shape = f"{args.layers}x{args.width}"
    result = {
        "what": "one forward and backward, medians; ratios are of speeds",
        "date": today,
        "cpu": cpu_name(),
        "threads": args.threads,
        "clock": "CPU time of the process" if args.cpu_time else "wall time",
        "shape": {k: getattr(args, k) for k in ("layers", "width", "batch", "seq", "vocab")},
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "command": " ".join(["python", "benchmarks/cpu_step.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "bf16_products": "BF16" if cpu.FAST_AT_BF16 else f"FP32: {cpu.why_slow_at_bf16()}",
        "casts": library().note.split(" (")[0],
        "imitation": {name: os.environ[name] for name in IMITATION if name in os.environ},
        "median_seconds": medians,
        "ratios": ratios,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    suffix = f"_imitated-{level}" if (level := os.environ.get(IMITATION[0])) else ""
    path = args.results / f"{today}_cpu-step_{shape}_{args.threads}-threads{suffix}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
