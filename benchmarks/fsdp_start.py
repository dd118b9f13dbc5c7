"""Measure what a rank needs to start with FSDP: memory, and the speed of drawing.

Each rank is a process on this CPU, so that the memory of the host and that of the device are one
figure. It is the growth of the process's largest resident set while the model and its master
weights are made, beside the bytes of the shards. Other trees, such as a git worktree of an earlier
commit, run the same script. `--drawing` measures instead how many numbers a second one process
draws with each number of threads, several tensors at a time. Beside the seconds of the clock it
prints those on free cores: the largest sum over a thread's draws, without the time for which the
kernel let the thread wait for a core (`/proc/self/task/*/schedstat`). Other jobs of the machine
lengthen the former and hardly the latter.

    python benchmarks/fsdp_start.py --presets gpt3_125m gpt3_1.3b --trees ../earlier .
    python benchmarks/fsdp_start.py --drawing --threads 1 2
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KIB = 1024


def start(preset: str, ranks: int) -> dict[str, float]:
    """Build a rank's model and master weights; return bytes and seconds."""
    import torch

    from fp8_numerics.gemm import GemmCounter
    from megafp8.backends import choose
    from megafp8.config.load import load
    from megafp8.config.resolve import resolve
    from megafp8.models.random import RandomStreams
    from megafp8.parallel.fsdp import local_of
    from megafp8.parallel.mesh import join
    from megafp8.specs import RunSpec
    from megafp8.train import build

    words = [f"model={preset}", "model.fsdp=True", f"trainer.devices={ranks}"]
    words += ["trainer.accelerator=cpu", "model.fp8=True"]
    spec: RunSpec = resolve(load(words), lambda: False)
    spec = with_vocabulary(spec, 51200)
    mesh = join(spec.parallel)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    sinks = build.make_sinks(spec, mesh)
    streams = RandomStreams(spec.train.seed, mesh.tp.rank, mesh.cp.rank)
    backend = choose.make_backend(spec, mesh, streams, sinks.outer, GemmCounter())
    masters = build.make_masters(spec, mesh, build.make_model(spec, mesh, backend), backend)
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shards = sum(local_of(param.detach()).nbytes for param in masters.params)
    return {
        "bytes": KIB * (most - before),
        "bytes of shards": shards,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
    }


def drawing(preset: str, threads: Sequence[int]) -> list[dict[str, float]]:
    """Return the seconds and the numbers a second of drawing a model, medians of five rounds."""
    from collections import defaultdict

    import torch

    from megafp8.config.load import load
    from megafp8.config.resolve import resolve
    from megafp8.models.gpt import GPT
    from megafp8.models.init import initial_values, values_later
    from megafp8.models.parts import Parts
    from megafp8.models.random import RandomStreams

    spec = with_vocabulary(resolve(load([f"model={preset}"]), lambda: False), 51200).model
    with values_later():
        model = GPT(Parts(spec, torch.bfloat16, 1, RandomStreams(0)))
    count = sum(param.numel() for param in model.parameters())
    free: dict[int, float] = defaultdict(float)  # of each thread, without waits for a core

    def timed(draw: Any) -> Any:
        def call(name: str, values: torch.Tensor) -> None:
            began, waited = time.perf_counter(), waited_for_a_core()
            draw(name, values)
            spent = time.perf_counter() - began - (waited_for_a_core() - waited)
            free[threading.get_native_id()] += spent

        return call

    for param in model.parameters():
        param.draw = timed(param.draw)  # type: ignore[attr-defined]
    rounds: dict[int, list[tuple[float, float, float]]] = {number: [] for number in threads}
    for _ in range(5):
        for number, times in rounds.items():
            torch.set_num_threads(number)
            free.clear()
            began, used = time.perf_counter(), time.process_time()
            values = initial_values(model.parameters(), torch.device("cpu"))
            clock, used = time.perf_counter() - began, time.process_time() - used
            del values
            times.append((clock, used, max(free.values())))
    found = []
    for number, times in rounds.items():
        clock, used, alone = (statistics.median(column) for column in zip(*times, strict=True))
        one = {"threads": number, "seconds": clock, "CPU seconds": used}
        more = {"seconds on free cores": alone, "numbers a second on free cores": count / alone}
        found.append({**one, "numbers a second": count / clock, **more})
    return found


def waited_for_a_core() -> float:
    """Return for how many seconds this thread has been ready to run and had no core."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(path.read_text().split()[1]) / 1e9


def with_vocabulary(spec: Any, size: int) -> Any:
    """Return the spec with a vocabulary, which a run takes from its tokenizer."""
    from dataclasses import replace

    return replace(spec, model=replace(spec.model, vocab_size=size))


def measure(tree: Path, preset: str, ranks: int, threads: int) -> dict[str, float]:
    """Start all ranks of a job of a tree, and return what the first one measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", preset, "--ranks", str(ranks)]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree.resolve()),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
        }
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, cwd=tree, stdout=pipe))
    said, _ = processes[0].communicate()
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"{tree}: ranks of {preset} ended with the codes {codes}")
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    """Measure each preset in each tree, print a line for each, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["gpt3_125m"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--trees", type=Path, nargs="+", default=[ROOT])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--drawing", action="store_true", help="measure the speed of drawing")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        print(json.dumps(start(args.rank_of, args.ranks)))
        return
    found: list[dict[str, Any]] = []
    if args.drawing:
        for preset in args.presets:
            found += [{"preset": preset, **one} for one in drawing(preset, args.threads)]
        print(*found, sep="\n")
        what = "seconds and speed of drawing a model's weights in one process"
        write(args.results, "drawing", what, found)
        return
    for preset in args.presets:
        for tree in args.trees:
            for threads in args.threads:
                one = measure(tree, preset, args.ranks, threads)
                commit = subprocess.check_output(
                    ["git", "rev-parse", "--short", "HEAD"], cwd=tree, text=True
                ).strip()
                found.append({"preset": preset, "commit": commit, "ranks": args.ranks, **one})
                print(found[-1], flush=True)
    what = "bytes that a rank needs until its master weights are made, and seconds"
    write(args.results, "fsdp-start", what, found)


def write(results: Path, name: str, what: str, found: Sequence[dict[str, Any]]) -> None:
    """Write today's result file."""
    today = datetime.date.today().isoformat()
    path = results / f"{today}_{name}.json"
    path.write_text(json.dumps({"what": what, "date": today, "starts": found}) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
