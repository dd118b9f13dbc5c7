"""Count the Python calls of one FP8 linear, forward and backward, in a microbatch on a CPU.

    python -m scripts.walk_linear              the counts of each recipe
    python -m scripts.walk_linear delayed -v   the functions of one recipe, by their calls

Counted are the calls of our own functions (`sys.setprofile`), after warm-up, while the
first microbatch of a step runs through eight linears (128 x 128, with biases, 64 tokens in BF16),
from `begin_microbatch` to `end_backward`: casts of the weights and updates of the scales count. All
of it is divided by the number of linears. `deepest` is the largest number of such functions that
wait for each other.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import fp8_numerics
import megafp8
from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.grad_sink import MainGradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.recipes import RECIPES, find_recipe

PACKAGES = [Path(str(package.__file__)).parent for package in (megafp8, fp8_numerics)]
NUM_LINEARS, WIDTH, TOKENS = 8, 128, 64


class Walk:
    """Counts calls into the package's files, by function; `sys.setprofile` calls it."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # by file and function
        self.deepest = self._depth = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Look at one call or return."""
        path = Path(frame.f_code.co_filename)
        package = next((each for each in PACKAGES if path.is_relative_to(each)), None)
        if event not in ("call", "return") or package is None:
            return
        self._depth += 1 if event == "call" else -1
        if event == "call":
            file = path.relative_to(package).as_posix()
            self.calls[file, frame.f_code.co_qualname] += 1
            self.deepest = max(self.deepest, self._depth)

    @property
    def per_linear(self) -> float:
        """Return the number of calls of one linear."""
        return sum(self.calls.values()) / NUM_LINEARS

    @property
    def files(self) -> set[str]:
        """Return the files in which the called functions are."""
        return {file for file, _ in self.calls}


def walk(recipe: str) -> Walk:
    """Return the walk of one microbatch through linears of a recipe."""
    e4m3 = "e5m2" not in find_recipe(recipe).traits.backward_formats
    power_2 = find_recipe(recipe).traits.power_2_default
    settings = Fp8Recipe(
        name=recipe, backward_format="e4m3" if e4m3 else "e5m2", power_2_scale=power_2
    )
    state, sink = ScalingState(settings), MainGradSink()
    linears = [_linear(f"linear{number}", state, sink) for number in range(NUM_LINEARS)]
    params = [param for linear in linears for param in linear.parameters()]
    sink.attach([(param, torch.zeros(param.shape)) for param in params])
    x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
    found = Walk()
    for is_counted in (False, False, True):
        sink.begin_step()
        sys.setprofile(found if is_counted else None)
        try:
            state.begin_microbatch(0)
            output = x
            for linear in linears:
                output = linear(output)
            state.end_forward()
            output.backward(torch.ones_like(output))
            state.end_backward()
        finally:
            sys.setprofile(None)
        sink.end_step()
    return found


def _linear(name: str, state: ScalingState, sink: MainGradSink) -> Linear:
    return Linear(
        nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16()),
        nn.Parameter(torch.randn(WIDTH).bfloat16()),
        name=name,
        quantizer=linear_quantizer(state, name),
        comm=LinearComm(),
        sink=sink,
        counter=GemmCounter(),
    )


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="recipe")
    parser.add_argument("-v", "--verbose", action="store_true", help="list the functions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    for recipe in args.recipes:
        found = walk(recipe)
        print(
            f"{recipe:>20}: {found.per_linear:.1f} calls, {len(found.files)} files, "
            f"{len(found.calls)} functions, {found.deepest} deep"
        )
        for (file, function), count in found.calls.most_common() if args.verbose else ():
            print(f"{count / NUM_LINEARS:10.2f}  {file}:{function}")


if __name__ == "__main__":
    main()
