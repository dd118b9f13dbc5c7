"""Measure sums of gradients over gloo ranks: FP32, BF16, and FP8-LM's two ways, bytes and time.

Each rank is a process with one thread. Compared are an all-reduce in FP32, one of gradients that
are rounded to BF16 for it, FP8 gradients that are added up in FP32 by the rank that owns a part
(`fp32` of `model.optim.fp8_grad_reduction`), and FP8 gradients that are added in FP8 (`auto`).
Bytes are those that a rank sends with ring algorithms, as the plan counts them. Rounds alternate
between the ways, so that other load on the machine falls on all. The result is one JSON line.

    python benchmarks/grad_reduce.py --ranks 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.parallel.collectives import Axis
from megafp8.parallel.grad_reduce import Bucket
from megafp8.parallel.mesh import join
from megafp8.parallel.scaled_data import ExchangedBucket, Fp8SumBucket, lay_out
from megafp8.specs import ParallelSpec
from megafp8.specs.division import equal_parts

WARM_UP = 2
ON_WIRE: dict[str, Callable[[int], float]] = {  # times the bytes handed in, by the number of ranks
    "all_reduce_sum": lambda n: 2 * (n - 1) / n,
    "all_reduce_max": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1.0,
}


def ways(axis: Axis, count: int, size: int) -> dict[str, Callable[[], None]]:
    """Return a function for each way that reduces `count` matrices of `size` x `size` once."""
    generator = torch.Generator().manual_seed(axis.rank)
    params = [nn.Parameter(torch.empty(size, size)) for _ in range(count)]
    values = [1e-3 * torch.randn(size, size, generator=generator) for _ in params]
    flat = torch.cat([value.flatten() for value in values])
    plain = Bucket(flat, frozenset(params))
    places = equal_parts([param.numel() for param in params], axis.size)
    held = [lay_out(places, params, STORAGE_FORMATS["fp8"]) for _ in range(2)]
    for grads in held:
        for grad, value in zip(grads.grads, values, strict=True):
            grad.store(value)
    factors = torch.full((count,), axis.size**-0.5)
    scaled = [ExchangedBucket(held[0]), Fp8SumBucket(held[1], factors=factors)]

    def run(bucket: Bucket | ExchangedBucket, dtype: torch.dtype) -> Callable[[], None]:
        def reduce() -> None:
            bucket.start(axis, dtype)
            bucket.finish(axis)

        return reduce

    return {
        "FP32": run(plain, torch.float32),
        "BF16": run(plain, torch.bfloat16),
        "FP8, added in FP32": run(scaled[0], torch.float32),
        "FP8, added in FP8": run(scaled[1], torch.float32),
    }


def measure(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    """Run all ways on one rank; rank 0 prints."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    axis = join(ParallelSpec(devices_per_node=ranks)).data
    made = ways(axis, args.matrices, args.size)
    walls: dict[str, list[float]] = {name: [] for name in made}
    works: dict[str, list[float]] = {name: [] for name in made}
    sent: dict[str, float] = {}
    for number in range(WARM_UP + args.rounds):
        for name, reduce in made.items():
            dist.barrier()
            before = dict(axis.traffic.num_bytes)
            wall, work = time.perf_counter(), time.process_time()
            reduce()
            if number >= WARM_UP:
                walls[name].append(time.perf_counter() - wall)
                works[name].append(time.process_time() - work)
            sent[name] = sum(
                (total - before.get(key, 0)) * ON_WIRE[key[1]](ranks)
                for key, total in axis.traffic.num_bytes.items()
            )
    if rank == 0:
        report(args, ranks, sent, walls, works)
    dist.barrier()
    dist.destroy_process_group()


def report(
    args: argparse.Namespace,
    ranks: int,
    sent: dict[str, float],
    walls: dict[str, list[float]],
    works: dict[str, list[float]],
) -> None:
    """Print a table and one line of JSON."""
    elements = args.matrices * args.size**2
    rows: dict[str, Any] = {}
    for name in walls:
        rows[name] = {
            "bytes_per_element": round(sent[name] / elements, 3),
            "median_ms": round(1e3 * statistics.median(walls[name]), 1),
            "least_ms": round(1e3 * min(walls[name]), 1),
            "cpu_ms": round(1e3 * statistics.median(works[name]), 1),
            "to_fp32": round(statistics.median(walls[name]) / statistics.median(walls["FP32"]), 2),
            "least_to_fp32": round(min(walls[name]) / min(walls["FP32"]), 2),
        }
        print(f"{name:20} {rows[name]}")
    about = {"ranks": ranks, "elements": elements, "rounds": args.rounds}
    print(json.dumps({"rows": rows, **about, "torch": torch.__version__}))


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--matrices", type=int, default=4, help="how many gradients")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a gradient")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(measure, (args.ranks, port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
