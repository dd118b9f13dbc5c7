"""Time the linears of a GPT's layers on a CPU, in each of our recipes and in torchao's.

Each linear runs forward and backward. torchao's emulation (`Float8LinearConfig(emulate=True)`) is
the other way to run such recipes without FP8 tensor cores; its products are in FP32. All variants
get the same inputs; each has its own BF16 weights, and accumulates gradients in its own way. The
variants named "rounded" are ours, but round each weight gradient to BF16 before it is added. The
variants alternate. A figure is the median over the rounds of the process's CPU time, which other
programs on the machine disturb least.

    python benchmarks/cpu_linear.py --layers 12 --width 768 --threads 1
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fp8_numerics.gemm import GemmCounter
from fp8_numerics.kernels.compile import library
from megafp8.backends import torchao as torchao_linear
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.grad_sink import ComputeGrad, MainGradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import RecipeName
from megafp8.specs.recipes import RECIPES
from megafp8.train.process import prepare_process

Step = Callable[[], float]


def shapes(width: int) -> list[tuple[int, int]]:
    """Return the (in, out) features of QKV, projection, FC1 and FC2."""
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


def recipe_of(name: RecipeName) -> Fp8Recipe:
    """Return a recipe with its usual formats and kind of scales."""
    return Fp8Recipe(
        name=name,
        backward_format="e5m2" if name in ("delayed", "tensorwise") else "e4m3",
        power_2_scale=name not in ("delayed", "tensorwise"),
    )


class RoundingSink(MainGradSink):
    """Sums weight gradients that were rounded to the weight's dtype first, for comparison."""

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        """Round the gradient and add it to the sum."""
        return super().add(weight, lambda _: compute(None).to(weight.dtype))


def ours(
    args: argparse.Namespace,
    inputs: dict[int, torch.Tensor],
    name: RecipeName | None,
    sink: MainGradSink | None = None,
) -> Step:
    """Return a step of our linears in the recipe `name`, or in BF16 if it is None."""
    state = None if name is None else ScalingState(recipe_of(name))
    sink = sink or MainGradSink()
    linears = []
    for layer in range(args.layers):
        for index, (ins, outs) in enumerate(shapes(args.width)):
            label = f"{layer}.{index}"
            weight = nn.Parameter((0.02 * torch.randn(outs, ins)).bfloat16())
            linear = Linear(
                weight,
                None,
                name=label,
                quantizer=None if state is None else linear_quantizer(state, label),
                comm=LinearComm(),
                sink=sink,
                counter=GemmCounter(),
            )
            sink.attach([(weight, torch.zeros(outs, ins))])
            linears.append(linear)
    events = state or NoScaling()

    def step() -> float:
        sink.begin_step()
        seconds = 0.0
        for microbatch in range(args.microbatches):
            events.begin_microbatch(microbatch)
            seconds += run(linears, inputs, args)
            events.end_forward()
            events.end_backward()
        sink.end_step()
        return seconds

    return step


def torchao(args: argparse.Namespace, inputs: dict[int, torch.Tensor], name: RecipeName) -> Step:
    """Return a step of torchao's emulated linears in the recipe `name`."""
    plain = nn.ModuleList(
        nn.Linear(ins, outs, bias=False, dtype=torch.bfloat16)
        for _ in range(args.layers)
        for ins, outs in shapes(args.width)
    )
    config = torchao_linear.make_config(recipe_of(name), emulate=True)
    model = torchao_linear.import_torchao().convert_to_float8_training(plain, config=config)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        return sum(run(list(model), inputs, args) for _ in range(args.microbatches))

    return step


def plain_bf16(args: argparse.Namespace, inputs: dict[int, torch.Tensor]) -> Step:
    """Return a step of torch's own linears in BF16."""
    model = nn.ModuleList(
        nn.Linear(ins, outs, bias=False, dtype=torch.bfloat16)
        for _ in range(args.layers)
        for ins, outs in shapes(args.width)
    )

    def step() -> float:
        model.zero_grad(set_to_none=True)
        return sum(run(list(model), inputs, args) for _ in range(args.microbatches))

    return step


def run(
    linears: list[nn.Module], inputs: dict[int, torch.Tensor], args: argparse.Namespace
) -> float:
    """Run every linear forward and backward, one after another; return the CPU seconds."""
    began = time.process_time()
    sizes = shapes(args.width) * args.layers
    for linear, (ins, outs) in zip(linears, sizes, strict=True):
        x = inputs[ins].detach().requires_grad_()
        linear(x).backward(inputs[outs])
    return time.process_time() - began


def main() -> None:
    """Time all variants, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    prepare_process(torch.device("cpu"), fp32=True)
    sizes = {size for pair in shapes(args.width) for size in pair}
    inputs = {size: torch.randn(args.tokens, size).bfloat16() for size in sizes}
    steps: dict[str, Step] = {
        "plain bf16": plain_bf16(args, inputs),
        "bf16": ours(args, inputs, None),
        "bf16 rounded": ours(args, inputs, None, RoundingSink()),
        "delayed rounded": ours(args, inputs, "delayed", RoundingSink()),
    }
    steps |= {name: ours(args, inputs, name) for name in RECIPES}
    for name in RECIPES[1:4]:
        steps[f"torchao {name}"] = torchao(args, inputs, name)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(args.rounds):
        for name, step in steps.items():
            seconds[name].append(step())
    report(args, {name: statistics.median(values) for name, values in seconds.items()})


def report(args: argparse.Namespace, medians: dict[str, float]) -> None:
    """Print times and ratios, and write the result file."""
    names = [name.removeprefix("torchao ") for name in medians if name.startswith("torchao ")]
    ratios = {f"{name} over torchao": medians[f"torchao {name}"] / medians[name] for name in names}
    ratios |= {
        f"{name} over its rounding": medians[f"{name} rounded"] / medians[name]
        for name in ("bf16", "delayed")
    }
    ratios |= {f"{name} over bf16": medians["bf16"] / medians[name] for name in RECIPES}
    for name, median in medians.items():
        print(f"{name:>28}  {1e3 * median:8.1f} ms of CPU")
    for what, ratio in ratios.items():
        print(f"{what:>33}: {ratio:.2f} times the speed")
    today = datetime.date.today().isoformat()
    cpu_name = runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"]
    result = {
        "what": "linears of a GPT's layers, forward and backward, medians of CPU time",
        "date": today,
        "cpu": cpu_name(),
        "threads": args.threads,
        "shape": {k: getattr(args, k) for k in ("layers", "width", "tokens", "microbatches")},
        "rounds": args.rounds,
        "command": " ".join(["python", "benchmarks/cpu_linear.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "casts": library().note.split(" (")[0],
        "median_cpu_seconds": medians,
        "ratios": ratios,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    name = f"{today}_cpu-linear_{args.layers}x{args.width}_{args.threads}-threads.json"
    (args.results / name).write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {args.results / name}")


if __name__ == "__main__":
    main()
