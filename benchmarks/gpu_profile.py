"""Profile training steps on a GPU: the share of time in which it is idle, and its largest kernels.

The model, its precision and its batch are those of `gpu_step.py`; the tokens are random. Two steps
are recorded after five. The GPU is idle where no kernel and no copy runs between the first and the
last one. For Triton's kernels a row has the bytes of their arguments a second: what a kernel reads
or writes of each tensor once.

    python benchmarks/gpu_profile.py --variant fp8
    python benchmarks/gpu_profile.py --tiny          # check on a CPU that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gpu_step
import numpy as np
import torch
from gpu_common import RESULTS, Results, device_and_name
from torch.profiler import ProfilerActivity, profile

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build
from megafp8.train.process import prepare_process
from megafp8.train.step import train_step

BEFORE, RECORDED, LARGEST = 3, 2, 10
ATTENTION = ("attention", "flash", "fmha", "sdpa")


class Work(NamedTuple):
    """Hold what the device did, by name, from `begin` to `end` in microseconds."""

    name: str
    begin: float
    end: float


def idle_share(works: Iterable[Work]) -> float:
    """Return the share of time from the first begin to the last end in which nothing ran.

    Works may overlap, since a GPU has several streams.
    """
    ordered = sorted(works, key=lambda work: work.begin)
    busy, until = 0.0, ordered[0].begin
    for work in ordered:
        busy += max(0.0, work.end - max(work.begin, until))
        until = max(until, work.end)
    return 1.0 - busy / (until - ordered[0].begin)


def row_of(works: list[Work], passed: Counter[str]) -> dict[str, Any]:
    """Return the row of recorded works; `passed` has the bytes of Triton's arguments by kernel."""
    seconds: Counter[str] = Counter()
    for work in works:
        seconds[work.name] += (work.end - work.begin) / 1e6
    counts = Counter(work.name for work in works)
    kernels = [
        {"name": name[:120], "launches": counts[name], "seconds": time}
        | ({"bytes_per_second": passed[name] / time} if passed[name] else {})
        for name, time in seconds.most_common()
    ]
    span = max(work.end for work in works) - min(work.begin for work in works)
    return {
        "idle_share": idle_share(works),
        "step_seconds": span / 1e6 / RECORDED,
        "launches_of_a_step": len(works) / RECORDED,
        "largest": kernels[:LARGEST],
        "triton": [kernel for kernel in kernels if "bytes_per_second" in kernel],
        "attention": [name for name in seconds if any(word in name.lower() for word in ATTENTION)],
    }


@contextmanager
def counted_arguments(passed: Counter[str]) -> Iterator[None]:
    """Return a context in which the bytes of the tensors given to Triton's kernels are counted."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:  # a CPU build of PyTorch
        yield
        return
    launch = JITFunction.run

    def counting(kernel: Any, *args: Any, **options: Any) -> Any:
        given = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        places = {(x.data_ptr(), x.nbytes) for x in given}
        passed[kernel.fn.__name__] += sum(size for _, size in places)
        return launch(kernel, *args, **options)

    JITFunction.run = counting
    try:
        yield
    finally:
        JITFunction.run = launch


def works_of(recorded: profile, device: torch.device) -> list[Work]:
    """Return what the device did. On a CPU these are the operations that no other one called."""
    on_gpu = device.type == "cuda"
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return [
        Work(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events() or []
        if event.device_type == wanted
        # An annotation on a GPU is a span around other works.
        and (not event.is_user_annotation if on_gpu else event.cpu_parent is None)
    ]


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run the steps, and return the row."""
    preset = "tiny" if args.tiny else args.preset
    length = argparse.Namespace(accumulation=1)
    spec = resolve(
        load(gpu_step.settings_of(preset, args.variant, length)), torch.cuda.is_available
    )
    vocab_size = 512 if args.tiny else 50304  # of random tokens: no tokenizer says it
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=vocab_size))
    prepare_process(device, fp32=False)
    state = build(spec, single_rank(device))
    shape = (2, spec.train.micro_batch_size, spec.data.seq_length)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape)
    batch = [Microbatch(*tokens)]
    for _ in range(BEFORE):
        train_step(state, batch)
    passed: Counter[str] = Counter()
    with counted_arguments(passed):  # before, since counting would take time that is recorded
        for _ in range(RECORDED):
            train_step(state, batch)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [ProfilerActivity.CUDA]
        torch.cuda.synchronize()
    with profile(activities=activities) as recorded:
        for _ in range(RECORDED):
            train_step(state, batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return row_of(works_of(recorded, device), passed)


def main() -> None:
    """Profile one variant, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=gpu_step.PRESETS, default="1.3b")
    parser.add_argument("--variant", choices=gpu_step.VARIANTS, default="fp8")
    parser.add_argument("--tiny", action="store_true", help="check on any device: a small model")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, name = device_and_name()
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device to measure (--tiny checks that the benchmark runs)")
    results = Results(args.results, f"profile-{args.variant}", name, __doc__.splitlines()[0])
    try:
        row = measure(args, device)
    except Exception as error:
        results.fail(args.variant, f"{type(error).__name__}: {error}")
    else:
        results.add(args.variant, row)
        print(f"idle {row['idle_share']:.1%} of {row['step_seconds']:.4f} s a step")
        for kernel in row["largest"]:
            print(f"{kernel['seconds']:9.4f} s {kernel['launches']:6}  {kernel['name']}")
    sys.exit(results.exit_code())


if __name__ == "__main__":
    main()
