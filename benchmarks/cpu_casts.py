"""Measure the CPU time of the kernels in C on one thread, beside plain copies and an earlier tree.

`--against` names a tree of an earlier commit, such as a git worktree, whose kernels do the same in
processes that alternate with this tree's. `--march` compiles both for an older CPU. The benchmark
writes a result file.

    python benchmarks/cpu_casts.py --against ../earlier
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
from typing import Any

import torch

from fp8_numerics import block_casts, nvfp4
from fp8_numerics import cast as casts
from fp8_numerics.cast import amax_of, decode, quantize
from fp8_numerics.formats import E4M3
from fp8_numerics.kernels.compile import library
from megafp8.models.parts import activation

TURNS = 3  # processes of each tree; a figure is the least of their medians


def operations(rows: int, cols: int) -> dict[str, Callable[[], object]]:
    """Return the copies, casts, decodings and GELUs of a [rows, cols] tensor by their names."""
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
        made[f"amax {name}"] = partial(amax_of, source)
        in_torch = partial(torch.sum, dim=0, dtype=torch.float32)  # as trees up to 30d98359 did
        made[f"columns added up {name}"] = partial(getattr(casts, "column_sums", in_torch), source)
        made[f"rotate {name}"] = partial(block_casts.rotate_columns, source, nvfp4.signs())
        made[f"decode to {name}"] = lambda dtype=dtype: decode(payload, E4M3, dtype)
        leaf = source.clone().requires_grad_()
        out = activation("gelu-tanh")(leaf)
        made[f"gelu {name}"] = partial(activation("gelu-tanh"), source)
        made[f"gelu backward {name}"] = partial(
            torch.autograd.grad, out, leaf, source, retain_graph=True
        )
        made |= {f"{what} {name}": run for what, run in by_blocks(source).items()}
    return made


def by_blocks(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the casts with a scale for each block, and their values in the dtype of `x`."""
    amax, made = x.abs().amax().float(), dict[str, Callable[[], object]]()
    byte = torch.randint(256, x.shape, dtype=torch.uint8, generator=torch.Generator())
    cast_of: dict[str, tuple[tuple[int, int], Callable[[], Any]]] = {
        "mxfp8 rows": ((1, 32), partial(block_casts.mxfp8, x, along_columns=False)),
        "mxfp8 columns": ((32, 1), partial(block_casts.mxfp8, x, along_columns=True)),
    }
    for block in ((1, 16), (16, 1), (16, 16)):
        for how, bytes_ in (("", None), (" random", byte)):
            cast = partial(block_casts.nvfp4, x, block, amax, bytes_)
            cast_of[f"nvfp4 {block[0]}x{block[1]}{how}"] = block, cast
    for block in ((1, 128), (128, 1), (128, 128), (1, x.shape[1]), (x.shape[0], 1)):
        cast = partial(block_casts.current, x, block, E4M3, power_2=True)
        cast_of[f"current {block[0]}x{block[1]}"] = block, cast
    for name, (block, cast) in cast_of.items():
        payload, scale, *_ = cast()
        made[name] = cast
        made[f"values of {name}"] = partial(
            block_casts.block_values, payload, scale, block, x.dtype
        )
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


def medians_of(tree: Path, march: str, arguments: list[str]) -> dict[str, float]:
    """Return `measured` of a process with the kernels of a tree, compiled for a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder, "compiler")
        compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" -march={march}\n')
        compiler.chmod(0o755)
        own = {"CC": str(compiler), "XDG_CACHE_HOME": folder, "PYTHONPATH": str(tree.resolve())}
        command = [sys.executable, __file__, "--only-measure", *arguments]
        done = subprocess.run(
            command, env=os.environ | own, capture_output=True, text=True, check=True
        )
    medians: dict[str, float] = json.loads(done.stdout)
    return medians


def main() -> None:
    """Measure the casts, those of an earlier tree too if one is named, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--march", default="native", help="the compiler's -march")
    parser.add_argument("--against", type=Path, metavar="TREE", help="an earlier commit's tree")
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
    trees = {"this": Path(__file__).parents[1]}
    if args.against is not None:
        trees["earlier"] = args.against
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(TURNS):
        for name, tree in trees.items():
            turns[name].append(medians_of(tree, args.march, sizes))
    count = args.rows * args.cols
    nanoseconds = {
        tree: {name: min(1e9 * each[name] / count for each in made) for name in made[0]}
        for tree, made in turns.items()
    }
    for name in nanoseconds["this"]:
        cells = "  ".join(f"{each[name]:6.3f}" for each in nanoseconds.values())
        print(f"{name:>32}  {cells} ns an element")
    today = datetime.date.today().isoformat()
    result = {
        "what": "casts on one thread, CPU time; the least median of some processes",
        "date": today,
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "shape": {"rows": args.rows, "cols": args.cols},
        "march": args.march,
        "rounds": args.rounds,
        "command": " ".join(["python", "benchmarks/cpu_casts.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "nanoseconds_an_element": nanoseconds,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{today}_cpu-casts_{args.march}_{args.rows}x{args.cols}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
