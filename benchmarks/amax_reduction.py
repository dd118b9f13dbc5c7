"""Measure which fraction of a step the amax reductions of delayed scaling take on this machine.

    python benchmarks/amax_reduction.py            # 12 x 768 over four tensor-parallel ranks
    python benchmarks/amax_reduction.py --tp 1     # four replicas

Three times are measured. `call` is one all-reduce of the amaxes of each direction after a barrier,
so that no rank waits for one that is late. `started` and `at once` are the time that a forward and
backward pass spends in its reductions, which includes waiting for late ranks: with `started`, a
reduction is started at its event and waited for when a scale is read, with `at once` it is waited
for when it is started. Steps of both kinds alternate in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import runpy
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.collectives import Axis, Pending
from megafp8.parallel.launch import follow_launcher, is_rank, launch, leave_process
from megafp8.parallel.mesh import join, leave
from megafp8.train.build import build
from megafp8.train.process import prepare_process
from megafp8.train.step import forward_backward

CALLS = 20  # all-reduces of each direction


class Timed:
    """Reduce amaxes over an axis of the mesh, and add up the seconds spent in the reductions.

    `at_once` waits for a reduction when it is started.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self.seconds, self.at_once = axis, 0.0, False

    def start(self, amax: torch.Tensor) -> TimedPending:
        """Start to take the maximum of `amax` over the ranks."""
        began = time.perf_counter()
        pending = self.axis.start_all_reduce_max(amax)
        if self.at_once:
            pending.wait()
        self.seconds += time.perf_counter() - began
        return TimedPending(self, pending)


@dataclasses.dataclass
class TimedPending:
    """Hold a reduction that was started."""

    timed: Timed
    pending: Pending

    def wait(self) -> torch.Tensor:
        """Wait for the reduction, count the time, and return its result."""
        began = time.perf_counter()
        if not self.timed.at_once:
            self.pending.wait()
        self.timed.seconds += time.perf_counter() - began
        return self.pending.tensor


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--tp", type=int, default=4, help="tensor-parallel ranks; the other ranks are replicas"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


def main() -> None:
    """Start the ranks, or measure on this rank and write the result."""
    args = arguments(sys.argv[1:])
    if not is_rank():
        sys.exit(launch([__file__], sys.argv[1:], args.ranks))
    follow_launcher()
    torch.set_num_threads(1)
    prepare_process(torch.device("cpu"), fp32=False)
    figures = measure(args)
    if figures is not None:
        report(args, figures)
    leave()
    leave_process(0)


def measure(args: argparse.Namespace) -> dict[str, float] | None:
    """Return the median of each time in seconds, or None on ranks other than the first."""
    overrides = [
        f"trainer.devices={args.ranks}",
        f"model.tensor_model_parallel_size={args.tp}",
        f"model.num_layers={args.layers}",
        f"model.hidden_size={args.width}",
        f"model.ffn_hidden_size={4 * args.width}",
        "model.optim.lr=2e-3",  # of any width
        f"model.num_attention_heads={args.heads}",
        f"model.encoder_seq_length={args.seq}",
        "model.micro_batch_size=1",
        f"model.global_batch_size={args.ranks // args.tp}",
        "model.fp8=True",
    ]
    spec = resolve(load(overrides), lambda: False)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=args.vocab))
    mesh = join(spec.parallel)
    state = build(spec, mesh)
    assert isinstance(state.scaling, ScalingState)
    timed = Timed(mesh.amax)
    state.scaling._start_reduce_max = timed.start
    rng = np.random.default_rng(mesh.dp.rank)
    batch = Microbatch(*(rng.integers(0, args.vocab, (1, args.seq)) for _ in range(2)))
    found: dict[str, list[float]] = {"step": [], "call": [], "started": [], "at once": []}
    for number in range(2 * args.rounds + 2):
        timed.at_once, timed.seconds = number % 2 == 1, 0.0
        dist.barrier()
        began = time.perf_counter()
        forward_backward(state, [batch])
        state.scaling.forward.settled()
        state.scaling.backward.settled()
        dist.barrier()
        if number >= 2:
            found["step"].append(time.perf_counter() - began)
            found["at once" if timed.at_once else "started"].append(timed.seconds)
    for _ in range(CALLS):
        found["call"].append(sum(call(mesh.amax, t.amax) for t in state.scaling.tables.values()))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians if mesh.is_main else None


def call(axis: Axis, amax: torch.Tensor) -> float:
    """Return the seconds of one all-reduce of a tensor like `amax`, after a barrier."""
    dist.barrier()
    began = time.perf_counter()
    axis.all_reduce_max(torch.zeros_like(amax))
    return time.perf_counter() - began


def report(args: argparse.Namespace, medians: dict[str, float]) -> None:
    """Print the times and their fractions of a step, and write the result file."""
    shares = {name: medians[name] / medians["step"] for name in ("call", "started", "at once")}
    print(f"a forward and backward pass: {medians['step']:.2f} s")
    for name, share in shares.items():
        print(f"{name:>8}  {1e3 * medians[name]:9.2f} ms  {share:.3%}")
    today = datetime.date.today().isoformat()
    layout = f"tp{args.tp}_dp{args.ranks // args.tp}"
    shape = ("ranks", "tp", "layers", "width", "heads", "seq", "vocab")
    result = {
        "what": "amax reductions of one microbatch, gloo, one thread a rank, medians on rank 0",
        "date": today,
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "shape": {name: getattr(args, name) for name in shape},
        "rounds": args.rounds,
        "command": " ".join(["python", "benchmarks/amax_reduction.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "median_seconds": medians,
        "share_of_step": shares,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{today}_amax-reduction_{args.layers}x{args.width}_{layout}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
