"""Time a layer of experts on a CPU beside a dense MLP of equal active FLOPs, and a whole model.

A layer runs forward and backward as in training: four microbatches a step, of which the first casts
the weights, gradients summed in FP32, scales updated. The dense MLP has the width of the experts
that a token visits together. The share around the experts is that of the same layer whose linears
and activation take no time: router, losses, sort, copies of rows, weights, and sums. A whole step
of a small model is timed beside transformers' Mixtral of the same sizes (`grouped_mm` and `eager`)
with torch's fused AdamW, in FP32. All variants alternate in one process, one step at a time; a
figure is the median of the process's CPU time, which other programs disturb least, and a ratio is
the median of the ratios of each round.

With `--ranks N` the step of a model on N gloo ranks is timed instead, one thread each: replicas of
all experts beside ranks that divide them, with tokens that visit the experts in turn, and with all
tokens at the same K experts, which are one rank's. Its time is that of the rank that takes longest,
by the clock and by CPU time; the bytes that ranks hand to collectives stand beside the plan's.

    python benchmarks/moe.py
    python benchmarks/moe.py --rounds 1 --recipes delayed     # only that it runs
    python benchmarks/moe.py --ranks 2 --recipes delayed --shapes "E 8, K 2"
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import runpy
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.models import router
from megafp8.models.moe import MoE
from megafp8.parallel.launch import follow_launcher, is_rank, launch, leave_process
from megafp8.parallel.mesh import join, leave, single_rank
from megafp8.plan.traffic import rank_traffic
from megafp8.specs import RunSpec
from megafp8.specs.recipes import RECIPES
from megafp8.train.build import build
from megafp8.train.process import prepare_process
from megafp8.train.state import TrainState
from megafp8.train.step import train_step

Step = Callable[[], object]
MICROBATCHES, SEQUENCES, LENGTH = 4, 4, 256  # a microbatch has 1024 tokens
WIDTH = 256
SHAPES = {"E 8, K 2": (8, 2, 512), "E 32, K 4": (32, 4, 128)}  # experts, of a token, width of one
GOALS = {"E 8, K 2": (1.3, 1.5), "E 32, K 4": (2.0, 3.0)}  # in FP32, and in each recipe
MODEL = {"num_layers": 4, "num_attention_heads": 4, "ffn_hidden_size": 512}
VOCABULARY = 1024


def spec_of(settings: Sequence[str], layers: int = 1) -> RunSpec:
    """Return the job of a user's settings, with a vocabulary of 1024."""
    cfg = load(
        [
            "model=moe_tiny",
            "trainer.precision=32",
            f"model.num_layers={layers}",
            f"model.hidden_size={WIDTH}",
            f"model.encoder_seq_length={LENGTH}",
            f"model.micro_batch_size={SEQUENCES}",
            f"model.global_batch_size={MICROBATCHES * SEQUENCES}",
            *settings,
        ]
    )
    return resolve(cfg, lambda: False).with_vocabulary(VOCABULARY)


def state_of(settings: Sequence[str], layers: int = 1) -> TrainState:
    """Return a model as a user's settings build it."""
    return build(spec_of(settings, layers), single_rank())


def experts(shape: str) -> list[str]:
    """Return the settings of a layer of experts."""
    count, top_k, width = SHAPES[shape]
    return [
        f"model.num_moe_experts={count}",
        f"model.moe_router_topk={top_k}",
        f"model.ffn_hidden_size={width}",
    ]


def dense(shape: str) -> list[str]:
    """Return the settings of a dense MLP with as many FLOPs for a token."""
    _, top_k, width = SHAPES[shape]
    nothing = ["num_moe_experts=null", "moe_aux_loss_coeff=0.0", "moe_z_loss_coeff=null"]
    return [f"model.ffn_hidden_size={top_k * width}", *(f"model.{word}" for word in nothing)]


def layer_step(state: TrainState) -> Step:
    """Return a step of the model's first MLP alone."""
    layer = state.model.layers[0].mlp
    generator = torch.Generator().manual_seed(0)
    shape = (MICROBATCHES, SEQUENCES, LENGTH, WIDTH)
    inputs, grads = (torch.randn(shape, generator=generator) for _ in range(2))
    counted = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    added = state.model.parts.added_losses

    def step() -> None:
        state.sink.begin_step()
        if added is not None:
            added.begin_step(torch.device("cpu"))
        for index, (x_BSD, grad_BSD) in enumerate(zip(inputs, grads, strict=True)):
            if added is not None:
                added.begin_microbatch(counted)
            state.scaling.begin_microbatch(index)
            out_BSD = layer(x_BSD.requires_grad_())
            state.scaling.end_forward()
            out_BSD.backward(grad_BSD)
            state.scaling.end_backward()
            x_BSD.grad = None
        state.sink.end_step()

    return step


class _Instead(torch.autograd.Function):
    """Stand for work on rows: results and gradients are memory that is there already."""

    @staticmethod
    def forward(
        ctx: Any, x_RI: torch.Tensor, out_RO: torch.Tensor, grad_RI: torch.Tensor
    ) -> torch.Tensor:
        ctx.grad_RI = grad_RI[: len(x_RI)]
        return out_RO[: len(x_RI)]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.grad_RI, None, None


def without_experts(state: TrainState, shape: str) -> TrainState:
    """Let the linears and the activation of the first layer's experts take no time."""
    layer, (_, top_k, width) = state.model.layers[0].mlp, SHAPES[shape]
    assert isinstance(layer, MoE)
    rows_RD, inner_RF = (torch.ones(top_k * SEQUENCES * LENGTH, n) for n in (WIDTH, width))
    sides = {False: (inner_RF, rows_RD), True: (rows_RD, inner_RF)}
    layer.of_experts = lambda linears, x_RI, *_: _Instead.apply(
        x_RI, *sides[linears[0] is layer.fc2[0]]
    )
    layer.activation = lambda x_RI: x_RI
    for param in (*layer.fc1.parameters(), *layer.fc2.parameters()):
        del state.sink.main_grads[param]  # a step would fill them with zeros
    return state


def layer_variants(shape: str, recipes: Sequence[str]) -> dict[str, Step]:
    """Return the steps of a layer of this shape, and of its dense MLP, in each precision."""
    steps: dict[str, Step] = {}
    for name in ("fp32", *recipes):
        settings = [] if name == "fp32" else ["model.fp8=True", f"model.fp8_recipe={name}"]
        steps[f"{name} dense"] = layer_step(state_of([*dense(shape), *settings]))
        steps[f"{name} experts"] = layer_step(state_of([*experts(shape), *settings]))
    steps["around experts"] = layer_step(without_experts(state_of(experts(shape)), shape))
    return steps


def model_variants(shape: str) -> dict[str, Step]:
    """Return whole steps of a small model: ours, and transformers' in two implementations."""
    layers = MODEL["num_layers"]
    rng = np.random.default_rng(0)
    size = (2, MICROBATCHES, SEQUENCES, LENGTH)
    tokens, targets = rng.integers(0, VOCABULARY, size)
    batches = [Microbatch(*pair) for pair in zip(tokens, targets, strict=True)]
    state = state_of(experts(shape), layers)
    steps: dict[str, Step] = {"ours": partial(train_step, state, batches)}
    for how in ("grouped_mm", "eager"):
        steps[how] = transformers_step(shape, how, tokens, targets)
    return steps


def transformers_step(shape: str, how: str, tokens: Any, targets: Any) -> Step:
    """Return a training step of transformers' Mixtral in FP32, with clipping and AdamW."""
    from transformers import MixtralConfig, MixtralForCausalLM

    count, top_k, width = SHAPES[shape]
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=width,
            num_hidden_layers=MODEL["num_layers"],
            num_attention_heads=MODEL["num_attention_heads"],
            num_key_value_heads=MODEL["num_attention_heads"],
            num_local_experts=count,
            num_experts_per_tok=top_k,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            output_router_logits=True,
            experts_implementation=how,
            use_cache=False,
        )
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = torch.from_numpy(tokens), torch.from_numpy(targets)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for tokens_BS, targets_BS in zip(tokens, targets, strict=True):
            # `shift_labels` are targets that are shifted already, as ours are
            out = model(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS)
            (out.loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measured(steps: dict[str, Step], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Run each step in turn; return the CPU seconds of each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(warmup + rounds):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if index >= warmup:
                seconds[name].append(time.process_time() - began)
    return seconds


def in_turn(scores_TE: torch.Tensor, count: int) -> torch.Tensor:
    """Choose the next `count` experts for each token."""
    tokens, experts = scores_TE.shape
    return (torch.arange(tokens * count).view(tokens, count) % experts).sort(-1).values


def the_first(scores_TE: torch.Tensor, count: int) -> torch.Tensor:
    """Choose the same experts for all tokens."""
    return torch.arange(count).expand(len(scores_TE), count)


ROUTINGS = {"in turn": in_turn, "the same experts": the_first}


def ranks_variants(shape: str, precision: str, ranks: int) -> dict[str, RunSpec]:
    """Return two layers with replicas of all experts on each of `ranks`, and with divided ones."""
    settings = [*experts(shape), f"trainer.devices={ranks}"]
    if precision != "fp32":
        settings += ["model.fp8=True", f"model.fp8_recipe={precision}"]
    divided = f"model.expert_model_parallel_size={ranks}"
    return {f"dp {ranks}": spec_of(settings, 2), f"ep {ranks}": spec_of([*settings, divided], 2)}


def bytes_of(state: TrainState) -> list[int]:
    """Return the bytes handed to collectives so far: of rows of experts, and others but losses."""
    sums = [0, 0]
    for (axis, _, dtype), count in state.mesh.traffic.num_bytes.items():
        sums[axis != "ep"] += count * (dtype != "float64")
    return sums


def planned_bytes(spec: RunSpec) -> list[int]:
    """Return what `bytes_of` should grow by in a step."""
    sums = [0, 0]
    for message in rank_traffic(spec, 0):
        sums[message.axis != "ep"] += message.handed
    return sums


def of_ranks(specs: dict[str, RunSpec], rounds: int, warmup: int) -> dict[str, Any]:
    """Run steps in turn; return their times on the slowest rank, and bytes beside the plan's."""
    states = {name: build(spec, join(spec.parallel)) for name, spec in specs.items()}
    world = next(iter(states.values())).mesh.world
    count = MICROBATCHES // world.size
    size = (2, count, SEQUENCES, LENGTH)
    tokens, targets = np.random.default_rng(world.rank).integers(0, VOCABULARY, size)
    batches = [Microbatch(*pair) for pair in zip(tokens, targets, strict=True)]
    names = [f"{layout}, {routing}" for layout in states for routing in ROUTINGS]
    clock, cpu = ({name: list[float]() for name in names} for _ in range(2))
    sent: dict[str, list[list[int]]] = {}
    for number in range(warmup + rounds):
        for name in names:
            layout, routing = name.split(", ")
            state = states[layout]
            setattr(router, "best", ROUTINGS[routing])  # noqa: B010
            before = bytes_of(state)
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            train_step(state, batches)
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            state.step += 1
            sums = [after - old for after, old in zip(bytes_of(state), before, strict=True)]
            each = world.all_gather(torch.tensor([*took, *sums], dtype=torch.float64))
            seen = torch.stack(each)
            sent[name] = seen[:, 2:].long().tolist()
            if number >= warmup:
                clock[name].append(seen[:, 0].max().item())
                cpu[name].append(seen[:, 1].max().item())
    dense, divided = states
    found: dict[str, Any] = {
        name: {
            "clock_seconds": round(statistics.median(clock[name]), 4),
            "cpu_seconds": round(statistics.median(cpu[name]), 4),
            "bytes_of_rows_and_others": sent[name],
            "planned": planned_bytes(specs[name.split(", ")[0]]),
        }
        for name in names
    }
    pairs = {f"{divided} over {dense}, {how}": (f"{divided}, {how}", f"{dense}, {how}")
             for how in ROUTINGS}  # fmt: skip
    pairs |= {f"{layout}, the same experts over in turn": (
        f"{layout}, the same experts", f"{layout}, in turn") for layout in states}  # fmt: skip
    found["ratios"] = {
        name: {"clock": ratio(clock, *pair), "cpu": ratio(cpu, *pair)}
        for name, pair in pairs.items()
    }
    return found


def on_ranks(args: argparse.Namespace) -> None:
    """Start the ranks, or time a step on this one; the first writes the result."""
    if not is_rank():
        sys.exit(launch([__file__], sys.argv[1:], args.ranks))
    follow_launcher()
    torch.set_num_threads(1)
    prepare_process(torch.device("cpu"), fp32=True)
    found: dict[str, Any] = {shape: {} for shape in args.shapes}
    for shape in args.shapes:
        for precision in ("fp32", *args.recipes):
            specs = ranks_variants(shape, precision, args.ranks)
            found[shape][precision] = of_ranks(specs, args.rounds, args.warmup)
            if dist.get_rank() == 0:
                print(shape, precision, json.dumps(found[shape][precision], indent=1), flush=True)
    if dist.get_rank() == 0:
        write(args, found, f"moe_{args.ranks}-ranks")
    leave()
    leave_process(0)


def write(args: argparse.Namespace, found: dict[str, Any], name: str) -> None:
    """Write what was found, with the machine and the sizes."""
    machine = {
        "command": shlex.join(["python", "benchmarks/moe.py", *sys.argv[1:]]),
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "torch": version("torch"),
        "rounds": args.rounds,
        "threads": 1,
        "tokens_of_a_microbatch": SEQUENCES * LENGTH,
        "microbatches": MICROBATCHES,
        "width": WIDTH,
        "load": os.getloadavg()[0],  # of the last minute, with this run
    }
    path = args.results / f"{datetime.date.today()}_{name}_{SEQUENCES * LENGTH}x{WIDTH}.json"
    args.results.mkdir(exist_ok=True)
    path.write_text(json.dumps({**machine, "shapes": found}, indent=1) + "\n")
    print(f"written: {path}")


def ratio(seconds: dict[str, list[float]], of: str, over: str) -> float:
    """Return the median of a variant's CPU time over that of another in the same round."""
    pairs = zip(seconds[of], seconds[over], strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def main() -> None:
    """Time all variants, print medians and ratios beside the goals, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--no-model", action="store_true", help="time the layers alone")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--ranks", type=int, default=1, help="time steps of so many ranks instead")
    args = parser.parse_args()
    if args.ranks > 1:
        on_ranks(args)
    torch.set_num_threads(1)
    prepare_process(torch.device("cpu"), fp32=True)
    found: dict[str, Any] = {}
    for shape in args.shapes:
        seconds = measured(layer_variants(shape, args.recipes), args.rounds, args.warmup)
        rows = {}
        for name in ("fp32", *args.recipes):
            goal = GOALS[shape][name != "fp32"]
            rows[name] = {
                "experts_seconds": round(statistics.median(seconds[f"{name} experts"]), 4),
                "dense_seconds": round(statistics.median(seconds[f"{name} dense"]), 4),
                "ratio": ratio(seconds, f"{name} experts", f"{name} dense"),
                "goal": goal,
                "around_experts": ratio(seconds, "around experts", f"{name} experts"),
            }
            print(shape, name, rows[name], flush=True)
        found[shape] = {"layer": rows}
        if not args.no_model:
            seconds = measured(model_variants(shape), args.rounds, args.warmup)
            found[shape]["model"] = {
                "seconds": {name: round(statistics.median(s), 3) for name, s in seconds.items()},
                "ours_over_grouped_mm": ratio(seconds, "ours", "grouped_mm"),
                "ours_over_eager": ratio(seconds, "ours", "eager"),
            }
            print(shape, "model", found[shape]["model"], flush=True)
    write(args, found, "moe")


if __name__ == "__main__":
    main()
