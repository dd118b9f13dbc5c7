"""Time whole training steps of a very small model on a CPU, where Python counts.

FP32 and FP8 (`delayed`, with FP32 as the other dtype) train without dropout, in one process for
each tree; plain PyTorch (`plain_gpt.py` with an AdamW loop) in another. All alternate, one step at
a time. The figures are medians of the CPU time of a process. Several trees, such as a git worktree
of an earlier commit and this one, are compared in one run:

    python benchmarks/small_step.py --trees ../earlier . --steps 40

With `--calls` the calls of Python functions in one step are counted instead. With
`--precision bf16` BF16 takes the place of FP32, but in plain PyTorch. With `--avx2` torch and
its libraries imitate a CPU that has AVX2 and nothing newer.
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
from importlib.metadata import version
from pathlib import Path

SETTINGS = {"high": (), "fp8": ("model.fp8=True",)}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def serve(kind: str, sizes: argparse.Namespace) -> None:
    """Run one step for each line of standard input, which names it; print its CPU seconds."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = {"plain": plain_step(sizes)} if kind == "plain" else our_steps(sizes)
    for line in sys.stdin:
        step = steps[line.strip()]
        if sizes.calls:
            print(calls_of(step), flush=True)
            continue
        began = time.process_time()
        step()
        print(time.process_time() - began, flush=True)


def plain_step(sizes: argparse.Namespace) -> Callable[[], object]:
    """Return a training step of plain PyTorch in FP32: forward, backward, clipping, AdamW."""
    import torch
    from plain_gpt import PlainGPT

    model = PlainGPT(sizes.layers, sizes.width, max(1, sizes.width // 64), sizes.vocab, sizes.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = torch.randint(sizes.vocab, (2, sizes.batch, sizes.seq))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_steps(sizes: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return a training step in each of our precisions."""
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
    rng, steps = np.random.default_rng(0), {}
    batch = Microbatch(*rng.integers(0, sizes.vocab, (2, sizes.batch, sizes.seq)))
    for name, settings in SETTINGS.items():
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
                *settings,
            ]
        )
        spec = resolve(cfg, lambda: False)
        model = dataclasses.replace(spec.model, vocab_size=sizes.vocab)
        state = build(dataclasses.replace(spec, model=model), single_rank())
        steps[name] = partial(train_step, state, [batch])
    return steps


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


def main() -> None:
    """Time all variants in turn, print medians and ratios, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"layers": 4, "width": 128, "seq": 64, "batch": 12, "vocab": 256}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--trees", nargs="+", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--precision", choices=("32", "bf16"), default="32")
    parser.add_argument("--avx2", action="store_true", help="imitate a CPU with AVX2")
    parser.add_argument("--calls", action="store_true", help="count Python calls, time nothing")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args)
        return
    named = [*sizes, "precision"]
    shape = [word for name in named for word in (f"--{name}", str(getattr(args, name)))]
    shape += ["--calls"] * args.calls
    workers: dict[str, subprocess.Popen[str]] = {}
    for number, tree in enumerate([Path(), *args.trees]):
        name = f"tree {number}" if number else "plain"
        command = [sys.executable, __file__, *shape, "--serve", name.partition(" ")[0]]
        workers[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={"PYTHONPATH": str(tree.resolve()), "PATH": "/usr/bin:/bin"}
            | (AVX2 if args.avx2 else {}),
        )  # fmt: skip
    asked = [("plain", "plain"), *((w, kind) for w in list(workers)[1:] for kind in SETTINGS)]
    seconds: dict[str, list[float]] = {}
    high = "fp32" if args.precision == "32" else "bf16"
    for _ in range(4 if args.calls else args.steps + 3):
        for name, kind in asked:
            worker = workers[name]
            assert worker.stdin is not None and worker.stdout is not None
            print(kind, file=worker.stdin, flush=True)
            label = name if name == kind else f"{name} {high if kind == 'high' else kind}"
            seconds.setdefault(label, []).append(float(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    if args.calls:
        for name, counts in seconds.items():
            print(f"{name:>12}: {counts[-1]:.0f} Python calls")
        return
    medians = {name: statistics.median(values[3:]) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:>12}: {1e3 * median:7.2f} ms")
    ratios = {}
    for number in range(1, len(args.trees) + 1):
        ours, fp8 = medians[f"tree {number} {high}"], medians[f"tree {number} fp8"]
        ratios[f"tree {number}: fp8 over {high}"] = ours / fp8
        if high == "fp32":
            ratios[f"tree {number}: fp32 over plain"] = medians["plain"] / ours
    for name, ratio in ratios.items():
        print(f"{name} {ratio:.3f}")
    today = datetime.date.today().isoformat()
    cpu = "_imitated-avx2" if args.avx2 else ""
    dtype = "" if high == "fp32" else f"_{high}"
    path = args.results / f"{today}_small-step_{args.layers}x{args.width}{dtype}{cpu}.json"
    result = {
        "what": "CPU seconds of whole training steps, medians; ratios of speeds; oldest tree first",
        "shape": {name: getattr(args, name) for name in sizes},
        "steps": args.steps,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "median_seconds": medians,
        "ratios": ratios,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
