"""Measure what recording costs: a recorded step of a small Llama against a plain one, in turns.

python benchmarks/coverage_cost.py [--width 256] [--steps 10]

The two kinds of steps take turns in one process, so that a busy machine slows both. What is printed
are the medians and their ratio, for the plain model and for one that `fp8.convert` has converted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8_coverage import coverage
from megafp8 import fp8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    for converts in (False, True):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=1024, hidden_size=asked.width, intermediate_size=4 * asked.width,
                num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            )
        )  # fmt: skip
        state = fp8.convert(model, recipe="tensorwise", skip="lm_head") if converts else None
        ids = torch.randint(0, 1024, (4, 128))
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * (asked.steps + 1)):
            is_recorded = bool(number % 2)
            began = time.perf_counter()
            with coverage(model) if is_recorded else nullcontext():
                with state.microbatch() if state is not None else nullcontext():
                    model(input_ids=ids, labels=ids).loss.backward()
            if number > 1:  # the first of each kind compiles and warms up
                seconds[is_recorded].append(time.perf_counter() - began)
        plain, recorded = (statistics.median(seconds[kind]) for kind in (False, True))
        name = "fp8.convert" if converts else "plain"
        print(
            f"{name}: {1e3 * plain:.1f} ms, recorded {1e3 * recorded:.1f} ms: "
            f"{recorded / plain:.2f} times, width {asked.width}"
        )


if __name__ == "__main__":
    main()
