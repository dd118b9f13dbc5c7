"""Watch delayed scaling: a tensor is quantized with a scale that follows from earlier amaxes.

The model is the GPT of 02_train_a_gpt.py in FP8. For three tensors of one linear, the program
prints the amax, the scale, the largest magnitude after scaling (the largest number is 448 in E4M3
and 57344 in E5M2, and larger values saturate), and the fraction of values that became zero. The
scales of the first step are 1.
"""

import runpy
from collections.abc import Mapping
from pathlib import Path

import torch

from megafp8 import fp8
from megafp8.specs.run import TensorHealth

GPT = runpy.run_path(str(Path(__file__).with_name("02_train_a_gpt.py")))
TENSORS = [f"layers.0.fc1.{kind}" for kind in ("input", "weight", "grad_output")]


def watch(steps: int) -> list[Mapping[str, TensorHealth]]:
    """Return the FP8 health of each step, by the tensor's name."""
    model, optimizer, state = GPT["start"](fp8.Fp8Recipe(amax_history_len=16))
    found = []
    for _, tokens_BS in zip(range(steps), GPT["batches"](), strict=False):
        with state.health() as report, state.microbatch():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens_BS)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(report.tensors)
    return found


if __name__ == "__main__":
    print(f"{'step':>4}  {'tensor':30} {'amax':>9} {'scale':>9} {'scaled':>7}  underflow")
    for step, casts in enumerate(watch(steps=20), start=1):
        for name in TENSORS if step in (1, 2, 3, 10, 20) else ():
            amax, scale, underflow = (
                casts[name].amax,
                casts[name].quant_scale,
                casts[name].underflow,
            )
            print(
                f"{step:4}  {name:30} {amax:9.3g} {scale:9.4g} {amax * scale:7.0f} {underflow:9.2%}"
            )
