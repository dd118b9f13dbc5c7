"""Measure a step of Adam at FP8-LM's levels: time, and bytes held for each parameter.

Matrices of one size stand for the weights of linears. Compared are torch's fused AdamW on FP32
parameters, our AdamW with FP32 masters beside BF16 weights (O0), the levels O1 to O3, and
torchao's AdamWFp8, whose parameters and gradients are FP32 here. Bytes are counted from the tensors
that are alive between two steps: weights, masters, gradients, moments. Rounds alternate between the
optimizers, so that other load on the machine falls on all of them. The result is one JSON line.

    python benchmarks/optimizer.py --threads 2
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.models.init import normal, parameter
from megafp8.optim.adamw import STATES
from megafp8.optim.fp8_weights import WholeFp8Weights
from megafp8.optim.masters import Masters
from megafp8.optim.protocol import Optimizers
from megafp8.optim.scaled_adam import kernel_name
from megafp8.specs import OptimSpec, ScheduleSpec, StorageSpec
from megafp8.specs.geometry import whole_pieces

WARM_UP = 20
"""Steps that are not measured: in the first ones the scales of the moments still change."""

LEVELS = {
    "O1": StorageSpec(main_grads="fp8", main_params="fp16"),
    "O2": StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16"),
    "O3": StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16"),
}


@dataclass(frozen=True)
class Case:
    """Hold an optimizer: its step, and the tensors that it keeps between steps."""

    step: Callable[[], object]
    held: list[torch.Tensor]


def spec(storage: StorageSpec) -> OptimSpec:
    """Return the settings of Adam that all cases share."""
    schedule = ScheduleSpec(
        name="CosineAnnealing", warmup_steps=0, constant_steps=0, min_lr=1e-3, max_steps=10**6
    )
    return OptimSpec(
        name="adamw",
        lr=1e-3,
        weight_decay=0.01,
        betas=(0.9, 0.98),
        eps=1e-8,
        clip_grad_norm=1.0,
        schedule=schedule,
        storage=storage,
    )


def weights(count: int, size: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return `count` square matrices."""
    shape = (size, size)
    return [
        parameter(shape, whole_pieces(f"w{i}", shape), normal(0.02, 1), dtype) for i in range(count)
    ]


def gradients(like: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return FP32 gradients of the same values for every case."""
    generator = torch.Generator().manual_seed(2)
    return [1e-3 * torch.randn(param.shape, generator=generator) for param in like]


def plain_case(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *size: int) -> Case:
    """Return a case of an optimizer of torch's interface on FP32 parameters."""
    params = weights(*size, torch.float32)
    for param, grad in zip(params, gradients(params), strict=True):
        param.grad = grad
    optimizer = make(params)
    optimizer.step()
    held = [t for param in params for t in (param, param.grad, *_states(optimizer, param))]
    return Case(optimizer.step, [t for t in held if t is not None])


def _states(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> list[torch.Tensor]:
    """Return the moments of a parameter; torchao's are subclasses that hold codes and scales."""
    held = []
    for name in STATES:
        state = optimizer.state[param][name]
        parts = state.__tensor_flatten__()[0] if hasattr(state, "__tensor_flatten__") else []
        held += [getattr(state, part) for part in parts] or [state]
    return held


def level_case(level: str, *size: int) -> Case:
    """Return a case of one of our levels, whose weights a model would compute with in BF16."""
    params = weights(*size, torch.bfloat16)
    if level == "O0":
        masters = Masters(params)
        for plain, grad in zip(masters.grads, gradients(params), strict=True):
            plain.copy_(grad)
        optimizer = Optimizers(masters, spec(StorageSpec()))
    else:
        stores = {}
        if level == "O3":  # the weight in FP8 beside the master, as `StoredFp8` keeps it
            for param in params:
                in_fp8 = ScaledTensor.zeros(param.shape, STORAGE_FORMATS["fp8"])
                param.data = in_fp8.payload
                stores[param] = in_fp8.store
        fp8 = WholeFp8Weights(stores)
        masters = Masters(params, LEVELS[level], linears=params, fp8=fp8)
        for stored, grad in zip(masters.stored_grads, gradients(params), strict=True):
            stored.store(grad)
        optimizer = Optimizers(masters, spec(LEVELS[level]), seed=1)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        optimizer.step(number)

    moments = optimizer.all_state_tensors()
    return Case(step, [*params, *masters.masters, *masters.param_grads, *moments])


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, equal memory once."""
    return sum({t.data_ptr(): t.numel() * t.itemsize for t in tensors}.values())


def cases(count: int, size: int, with_torchao: bool) -> dict[str, Case]:
    """Return every optimizer by its name."""
    choices = dict(lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
    made = {
        "torch fused AdamW, FP32": plain_case(
            lambda params: torch.optim.AdamW(params, fused=True, **choices), count, size
        )
    }
    made |= {level: level_case(level, count, size) for level in ("O0", *LEVELS)}
    if with_torchao:
        kind = importlib.import_module("torchao.optim").AdamWFp8
        made["torchao AdamWFp8"] = plain_case(lambda params: kind(params, **choices), count, size)
    return made


def main() -> None:
    """Measure, print a table, and print the result as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--matrices", type=int, default=12, help="how many weights")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a weight")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-torchao", action="store_true", help="leave torchao out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    made = cases(args.matrices, args.size, not args.no_torchao)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(WARM_UP + args.rounds):
        for name, case in made.items():
            began = time.process_time()
            case.step()
            if number >= WARM_UP:
                seconds[name].append(time.process_time() - began)
    num_params = args.matrices * args.size**2
    fused = statistics.median(seconds["torch fused AdamW, FP32"])
    rows = {}
    for name, case in made.items():
        median, least = statistics.median(seconds[name]), min(seconds[name])
        rows[name] = {
            "bytes_per_parameter": round(held_bytes(case.held) / num_params, 3),
            "median_ms": round(1e3 * median, 2),
            "least_ms": round(1e3 * least, 2),
            "to_fused": round(median / fused, 2),
        }
        print(f"{name:26} {rows[name]}")
    about = {"parameters": num_params, "threads": args.threads, "rounds": args.rounds}
    about |= {"cpu": platform.processor(), "torch": torch.__version__}
    print(json.dumps({"rows": rows, **about, "kernel": kernel_name(torch.device("cpu"))}))


if __name__ == "__main__":
    main()
