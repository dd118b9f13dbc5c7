"""Time whole training steps of a small model on a CPU, beside plain PyTorch.

    python benchmarks/small_step.py --trees ../earlier . --steps 40
    python benchmarks/small_step.py --width 256 --seq 256 --batch 8 --vocab 512 --precision bf16 \\
        --variants plain compiled high delayed mxfp8 convert:high convert:delayed

A variant is `plain` (`plain_gpt.py` with a loop of clipping and fused AdamW, its weights in the
precision), `compiled` (the same by `torch.compile`), `torchao` and `torchao:compiled` (its emulated
FP8), `high` (ours without FP8), a recipe (ours), or `convert:` before a recipe, which is
`fp8.convert` of the plain model; `convert:high` is that model in the same process. All train
without dropout. Plain ones have a process each, ours one for each tree; they take turns of two
steps, of which the second is timed, since the first finds the caches as another process has left
them. A figure is the median of a process's CPU time, with more threads of the clock; a ratio is the
median of the ratios of each round. Trees, such as a git worktree of an earlier commit and this one,
are compared in one run. With `--kept` plain and converted models keep freed memory in huge pages by
`fp8.keep_freed_memory`, which each tree must have, as ours always do. With `--calls` the calls of
Python functions in one step are counted instead, and with `--parts` torch's profiler says what
takes its time. With `--avx2` torch and its libraries imitate a CPU that has AVX2 and nothing newer,
with `--no-amx` one that multiplies BF16 by AVX-512.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
WARMUP = 3
PLAIN = ("plain", "compiled", "torchao", "torchao:compiled")
PARTS = {  # of the profiler's names; what runs in a function of autograd's is the function's own
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "GELU": ("aten::gelu", "_Gelu"),
    "casts and Python of linears": ("DirectLinearFunction", "_ConvertedFunction", "_Linears"),
    "norms": ("aten::native_layer_norm",),
    "loss": ("aten::_log_softmax", "aten::nll_loss", "_ChunkedCrossEntropy"),
    "optimizer, norm of gradients": ("aten::_fused_adam", "aten::linalg_vector_norm"),
    "sums of columns": ("aten::sum",),
    "copies, additions, zeros": ("aten::copy_", "aten::cat", "aten::add", "aten::fill_"),
}
REST = "all else"
Step = Callable[[], object]


def serve(sizes: argparse.Namespace) -> None:
    """Run one step for each line of standard input, which names it; print its seconds."""
    import torch

    if sizes.kept:
        from megafp8 import fp8

        fp8.keep_freed_memory()
    torch.set_num_threads(sizes.threads)
    torch.manual_seed(0)
    steps = {
        name: plain_step(name, sizes) if name in PLAIN or ":" in name else our_step(name, sizes)
        for name in sizes.serve
    }
    clock = time.process_time if sizes.threads == 1 else time.perf_counter
    for line in sys.stdin:
        step = steps[line.strip()]
        if sizes.calls or sizes.parts:
            print(calls_of(step) if sizes.calls else json.dumps(parts_of(step)), flush=True)
            continue
        step()
        began = clock()
        step()
        print(clock() - began, flush=True)


def plain_step(name: str, sizes: argparse.Namespace) -> Step:
    """Return a step of plain PyTorch: forward and backward pass, clipping, AdamW."""
    import torch
    from plain_gpt import PlainGPT, emulated_fp8

    model = PlainGPT(sizes.layers, sizes.width, max(1, sizes.width // 64), sizes.vocab, sizes.seq)
    model = model.to(torch.float32 if sizes.precision == "32" else torch.bfloat16)
    microbatch: Callable[[], AbstractContextManager[object]] = nullcontext
    if name.startswith("torchao"):
        model = emulated_fp8(model)
    if name.startswith("convert:") and name != "convert:high":
        from megafp8 import fp8

        microbatch = fp8.convert(model, recipe=name.partition(":")[2]).microbatch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if name.endswith("compiled") else model
    tokens, targets = torch.randint(sizes.vocab, (2, sizes.batch, sizes.seq))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with microbatch():
            run(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(name: str, sizes: argparse.Namespace) -> Step:
    """Return a step of this framework in a recipe, or in high precision."""
    import dataclasses
    from functools import partial

    import numpy as np
    import torch

    from megafp8.config.load import load
    from megafp8.config.resolve import resolve
    from megafp8.data.loader import Microbatch
    from megafp8.parallel.mesh import single_rank
    from megafp8.train.build import build
    from megafp8.train.process import prepare_process
    from megafp8.train.step import train_step

    prepare_process(torch.device("cpu"), fp32=sizes.precision == "32")
    batch = Microbatch(
        *np.random.default_rng(0).integers(0, sizes.vocab, (2, sizes.batch, sizes.seq))
    )
    cfg = load(
        [
            f"trainer.precision={sizes.precision}",
            f"model.num_layers={sizes.layers}",
            f"model.hidden_size={sizes.width}",
            f"model.ffn_hidden_size={4 * sizes.width}",
            f"model.num_attention_heads={max(1, sizes.width // 64)}",
            f"model.encoder_seq_length={sizes.seq}",
            f"model.micro_batch_size={sizes.batch}",
            f"model.global_batch_size={sizes.batch}",
            "model.optim.lr=1e-4",
            "model.hidden_dropout=0",  # plain PyTorch has none
            "model.attention_dropout=0",
            *([] if name == "high" else ["model.fp8=True", f"model.fp8_recipe={name}"]),
        ]
    )
    spec = resolve(cfg, lambda: False)
    model = dataclasses.replace(spec.model, vocab_size=sizes.vocab)
    state = build(dataclasses.replace(spec, model=model), single_rank())
    return partial(train_step, state, [batch])


def calls_of(step: Callable[[], object]) -> int:
    """Return how many Python functions one step calls, in all packages."""
    count = 0

    def look(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def parts_of(step: Step) -> dict[str, float]:
    """Return the milliseconds of one step by `PARTS`, in the profiler's time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    found = dict.fromkeys((*PARTS, REST), 0.0)
    for event in recorded.key_averages():
        names = (part for part, heads in PARTS.items() if event.key.startswith(heads))
        found[next(names, REST)] += event.self_cpu_time_total / 1e3
    return found


Worker = subprocess.Popen[str]


def started(args: argparse.Namespace, shape: Sequence[str]) -> dict[str, tuple[str, Worker]]:
    """Start the processes; return for each row of the result its variant and its process."""
    groups = [(Path(), "", [name]) for name in args.variants if name in PLAIN]
    for number, tree in enumerate(args.trees, 1):
        where = f"tree {number} " if len(args.trees) > 1 else ""
        for converted in (False, True):
            names = [n for n in args.variants if n not in PLAIN and (":" in n) == converted]
            groups += [(tree, where, names)] if names else []
    rows: dict[str, tuple[str, Worker]] = {}
    for tree, where, names in groups:
        worker = subprocess.Popen(
            [sys.executable, __file__, *shape, "--serve", *names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={"PYTHONPATH": str(tree.resolve()), "PATH": "/usr/bin:/bin"}
            | (AVX2 if args.avx2 else NO_AMX if args.no_amx else {}),
        )  # fmt: skip
        rows |= {f"{where}{name}": (name, worker) for name in names}
    return rows


def answers_of(rows: dict[str, tuple[str, Worker]], rounds: int) -> dict[str, list[Any]]:
    """Ask each row in turn, `rounds` times after the warm-up; return what it has answered."""
    answers: dict[str, list[Any]] = {row: [] for row in rows}
    for number in range(WARMUP + rounds):
        for row, (name, worker) in rows.items():
            assert worker.stdin is not None and worker.stdout is not None
            print(name, file=worker.stdin, flush=True)
            answer = worker.stdout.readline()
            if number >= WARMUP:
                answers[row].append(json.loads(answer))
    for _, worker in rows.values():
        worker.communicate()
    return answers


def print_parts(answers: dict[str, list[dict[str, float]]]) -> None:
    """Print the median milliseconds of each part, a column for each row of `started`."""
    print(" " * 28 + "".join(f"{row:>18}" for row in answers))
    for part in (*PARTS, REST):
        medians = (statistics.median(step[part] for step in steps) for steps in answers.values())
        print(f"{part:>28}" + "".join(f"{median:>18.2f}" for median in medians))


def ratio(other: Sequence[float], own: Sequence[float]) -> float:
    """Return the median over the rounds of the other's seconds over one's own."""
    return round(statistics.median(a / b for a, b in zip(other, own, strict=True)), 4)


def main() -> None:
    """Time all variants in turn, print medians and ratios, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 4, "width": 128, "seq": 64, "batch": 12, "vocab": 256, "threads": 1}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--variants", nargs="+", default=["plain", "high", "delayed"])
    parser.add_argument("--trees", nargs="+", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--precision", choices=("32", "bf16"), default="32")
    parser.add_argument("--kept", action="store_true", help="keep freed memory in all processes")
    imitated = parser.add_mutually_exclusive_group()
    imitated.add_argument("--avx2", action="store_true", help="imitate a CPU with AVX2")
    imitated.add_argument("--no-amx", action="store_true", help="imitate a CPU without AMX")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--calls", action="store_true", help="count Python calls, time nothing")
    instead.add_argument("--parts", action="store_true", help="show the parts of a profiled step")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args)
        return
    named = [*sizes, "precision"]
    shape = [word for name in named for word in (f"--{name}", str(getattr(args, name)))]
    shape += ["--kept"] * args.kept + ["--calls"] * args.calls + ["--parts"] * args.parts
    answers = answers_of(started(args, shape), 1 if args.calls else args.steps)
    if args.parts:
        print_parts(answers)
        return
    if args.calls:
        for row, counts in answers.items():
            print(f"{row:>24}: {counts[-1]} Python calls")
        return
    for row, values in answers.items():
        speeds = (f"{ratio(answers[o], values):.3f} of {o}" for o in answers if o != row)
        print(f"{row:>24}: {1e3 * statistics.median(values):8.2f} ms; speed {', '.join(speeds)}")
    from cpu_step import cpu_name  # it loads torch, which the timed processes need not wait for

    today = datetime.date.today().isoformat()
    cpu = "_kept" * args.kept + "_imitated-avx2" * args.avx2 + "_no-amx" * args.no_amx
    dtype = "" if args.precision == "32" else f"_{args.precision}"
    path = args.results / f"{today}_small-step_{args.layers}x{args.width}{dtype}{cpu}.json"
    pairs = [(row, other) for row in answers for other in answers if other != row]
    result = {
        "what": "seconds of whole training steps, medians; ratios of speeds; oldest tree first",
        "command": shlex.join(["python", "benchmarks/small_step.py", *sys.argv[1:]]),
        "cpu": cpu_name(),
        "clock": "CPU time" if args.threads == 1 else "wall",
        "freed memory of plain and converted models": "kept" if args.kept else "returned",
        "shape": {name: getattr(args, name) for name in sizes},
        "steps": args.steps,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "median_seconds": {row: statistics.median(values) for row, values in answers.items()},
        "speeds": {f"{a} over {b}": ratio(answers[b], answers[a]) for a, b in pairs},
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
