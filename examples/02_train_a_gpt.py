"""Train the same small GPT in BF16 and in FP8, on tokens that a model can learn to predict."""

from collections.abc import Iterator

import numpy as np
import torch

from megafp8.data.loader import Microbatch, microbatch
from megafp8.models.gpt import GPT
from megafp8.models.random import RandomStreams
from megafp8.optim.adamw import AdamW
from megafp8.optim.masters import Masters
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.parts import NativeParts
from megafp8.precision.gemm import GemmCounter
from megafp8.precision.grad_sink import MainGradSink
from megafp8.precision.scaling import NoScaling, ScalingState
from megafp8.specs import Fp8Recipe, GPTSpec, OptimSpec, ScheduleSpec
from megafp8.train.state import TrainState
from megafp8.train.step import train_step

torch.set_num_threads(1)  # more gain nothing with a model this small
STEPS, VOCABULARY = 60, 64
MODEL = GPTSpec(
    num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    max_position_embeddings=32, vocab_size=VOCABULARY, init_method_std=0.02,
    use_scaled_init_method=True, hidden_dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0,
    layernorm_epsilon=1e-5,
)  # fmt: skip
OPTIM = OptimSpec(
    name="adamw", lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-8, clip_grad_norm=1.0,
    schedule=ScheduleSpec(
        name="CosineAnnealing", warmup_steps=5, constant_steps=0, min_lr=3e-4, max_steps=STEPS
    ),
)  # fmt: skip


def batches() -> Iterator[list[Microbatch]]:
    """Steps of two microbatches of counting sequences: each has a stride to be found out."""
    rng = np.random.default_rng(0)
    while True:
        starts, strides = rng.integers(VOCABULARY, size=(2, 8, 1)), rng.integers(1, 4, (2, 8, 1))
        yield [microbatch(w) for w in (starts + strides * np.arange(33)) % VOCABULARY]


def start(recipe: Fp8Recipe | None) -> TrainState:
    """What `megafp8.train.build` does for a run."""
    scaling = ScalingState(recipe) if recipe else None
    streams, mesh, sink, counter = RandomStreams(0), single_rank(), MainGradSink(), GemmCounter()
    parts = NativeParts(MODEL, torch.bfloat16, 0, streams, scaling=scaling, tp=mesh.tp,
                        sink=sink, counter=counter)  # fmt: skip
    model = GPT(parts)
    masters = Masters(model.parameters())
    sink.attach(zip(masters.params, masters.grads, strict=True))
    optimizer = AdamW(masters, OPTIM)
    return TrainState(model=model, masters=masters, optimizer=optimizer, sink=sink, mesh=mesh,
                      scaling=scaling or NoScaling(), streams=streams, counter=counter)  # fmt: skip


def losses(recipe: Fp8Recipe | None, steps: int = STEPS) -> list[float]:
    state, found = start(recipe), []
    for _, step_batches in zip(range(steps), batches(), strict=False):
        found.append(train_step(state, step_batches).loss)
        state.step += 1
    return found


if __name__ == "__main__":
    print("step    BF16     FP8   (nats per token)")
    both = zip(losses(None), losses(Fp8Recipe()), strict=True)
    for step, (bf16, fp8) in enumerate(both, start=1):
        if step == 1 or step % 10 == 0:
            print(f"{step:4} {bf16:7.4f} {fp8:7.4f}")
