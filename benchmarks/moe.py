"""Time a layer of experts on a CPU beside a dense MLP of equal active FLOPs, and a whole model.

A layer runs forward and backward as in training: four microbatches a step, of which the first casts
the weights, gradients summed in FP32, scales updated. The dense MLP has the width of the experts
that a token visits together. The share around the experts is that of the same layer whose experts
return their rows: router, losses, sort, copies of rows, and sums. A whole step of a small model is
timed beside transformers' Mixtral of the same sizes (`grouped_mm` and `eager`) with torch's fused
AdamW, in FP32. All variants alternate in one process, one step at a time; a figure is the median of
the process's CPU time, which other programs disturb least, and a ratio is the median of the ratios
of each round.

    python benchmarks/moe.py
    python benchmarks/moe.py --steps 1 --rounds 1 --recipes delayed     # only that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import runpy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.models.moe import MoE
from megafp8.parallel.mesh import single_rank
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


def state_of(settings: Sequence[str], layers: int = 1) -> TrainState:
    """Return a model as a user's settings build it, with a vocabulary of 1024."""
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
    spec = resolve(cfg, lambda: False)
    model = dataclasses.replace(spec.model, vocab_size=VOCABULARY)
    return build(dataclasses.replace(spec, model=model), single_rank())


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


def without_experts(state: TrainState) -> TrainState:
    """Let the linears and activations of the first layer's experts return their rows."""
    layer = state.model.layers[0].mlp
    assert isinstance(layer, MoE)
    layer.of_experts = lambda _, x_RI, sizes, *__: torch.cat(x_RI.split(sizes))
    layer.activation = lambda x_RI: x_RI
    return state


def layer_variants(shape: str, recipes: Sequence[str]) -> dict[str, Step]:
    """Return the steps of a layer of this shape, and of its dense MLP, in each precision."""
    steps: dict[str, Step] = {}
    for name in ("fp32", *recipes):
        settings = [] if name == "fp32" else ["model.fp8=True", f"model.fp8_recipe={name}"]
        steps[f"{name} dense"] = layer_step(state_of([*dense(shape), *settings]))
        steps[f"{name} experts"] = layer_step(state_of([*experts(shape), *settings]))
    steps["around experts"] = layer_step(without_experts(state_of(experts(shape))))
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
    args = parser.parse_args()
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
    machine = {
        "cpu": runpy.run_path(str(Path(__file__).with_name("cpu_step.py")))["cpu_name"](),
        "torch": version("torch"),
        "rounds": args.rounds,
        "threads": 1,
        "tokens_of_a_microbatch": SEQUENCES * LENGTH,
        "microbatches": MICROBATCHES,
        "width": WIDTH,
        "beside_other_work": True,
    }
    name = f"{datetime.date.today()}_moe_{SEQUENCES * LENGTH}x{WIDTH}.json"
    args.results.mkdir(exist_ok=True)
    (args.results / name).write_text(json.dumps({**machine, "shapes": found}, indent=1) + "\n")
    print(f"written: {args.results / name}")


if __name__ == "__main__":
    main()
