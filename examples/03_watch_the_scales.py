"""What delayed scaling does: a tensor is quantized with a scale from the amaxes before it.

The GPT of 02_train_a_gpt.py in FP8, with one microbatch a step. For three tensors of one linear:
the amax, the scale, the largest magnitude after scaling (E4M3 ends at 448, E5M2 at 57344; what is
above saturates), and how much underflowed to zero. The first step's scales are 1.
"""

import runpy
from pathlib import Path
from typing import NamedTuple

import torch

from megafp8.precision.cast import amax_of
from megafp8.precision.tensor import Fp8Tensor
from megafp8.specs import Fp8Recipe
from megafp8.train.step import train_step

GPT = runpy.run_path(str(Path(__file__).with_name("02_train_a_gpt.py")))
TENSORS = [f"layers.0.mlp.fc1.{kind}" for kind in ("input", "weight", "grad_output")]


class Cast(NamedTuple):
    """One quantization, as it was done."""

    amax: float
    quant_scale: float
    underflow: float  # share of the elements that are not zero and whose FP8 number is


class Watch:
    """Sees every tensor as it is quantized and notes what was done, by the tensor's name."""

    def __init__(self) -> None:
        self.seen: dict[str, Cast] = {}

    def __call__(self, name: str, x: torch.Tensor, x_fp8: Fp8Tensor, _: Fp8Tensor) -> None:
        lost = (x_fp8.numbers(torch.float32) == 0) & (x != 0)
        scale, underflow = 1 / x_fp8.dequant_scale.item(), lost.float().mean().item()
        self.seen[name] = Cast(amax_of(x).item(), scale, underflow)


def watch(steps: int) -> list[dict[str, Cast]]:
    """The casts of each step."""
    state = GPT["start"](Fp8Recipe(amax_history_len=16))
    watch = Watch()
    state.scaling.observers.append(watch)
    found = []
    for _, step_batches in zip(range(steps), GPT["batches"](), strict=False):
        train_step(state, step_batches[:1])
        state.step += 1
        found.append(dict(watch.seen))
    return found


if __name__ == "__main__":
    print(f"{'step':>4}  {'tensor':30} {'amax':>9} {'scale':>9} {'scaled':>7}  underflow")
    for step, casts in enumerate(watch(steps=20), start=1):
        for name in TENSORS if step in (1, 2, 3, 10, 20) else ():
            amax, scale, underflow = casts[name]
            print(
                f"{step:4}  {name:30} {amax:9.3g} {scale:9.4g} {amax * scale:7.0f} {underflow:9.2%}"
            )
