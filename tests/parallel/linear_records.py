"""Run steps on ranks and record what each FP8 linear read, multiplied and returned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from fp8_numerics.cast import Fp8Tensor, spread
from megafp8.fp8 import linear as native
from megafp8.fp8.draws import Draw
from megafp8.fp8.linear import Linear
from megafp8.models.init import pieces_of
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import linears_of
from megafp8.specs.geometry import Piece as Place
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, reduce_gradients
from megafp8.train.validate import evaluate
from tests.kit.cases import Case
from tests.kit.tensors import Piece, pieces
from tests.tiny import microbatch

STEPS = 2
"""The first step casts with the scales of the start, the second with those that follow from it."""


@dataclass(frozen=True)
class Fed:
    """An operand of a product: codes with a scale for each of them, or plain values."""

    values: torch.Tensor  # FP8 codes (uint8), or FP32
    scale: torch.Tensor | None  # FP32, of the same shape; None: the values are plain
    outer: torch.Tensor | None = None  # the factor of the whole operand, 0-d


@dataclass
class Pass:
    """One forward pass of a linear on one rank, and its backward pass. All results are FP32."""

    input: torch.Tensor
    output: torch.Tensor
    grad_output: torch.Tensor | None = None
    grad_input: torch.Tensor | None = None
    fed: dict[str, tuple[Fed, Fed]] = field(default_factory=dict)  # by product
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)  # by `role.along`


@dataclass(frozen=True)
class Parameter:
    """Where the parts of a rank's parameter lie in the logical model."""

    shape: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass
class Step:
    masters: list[Piece]  # before the step
    passes: dict[str, Pass]  # by linear
    gradients: list[Piece] = field(default_factory=list)


@dataclass
class Watched:
    """What one rank saw of a case."""

    weights: dict[str, Parameter]
    biases: dict[str, Parameter]
    steps: list[Step]
    evaluation: Step


def watch_case(case: Case, mesh: Mesh) -> Watched:
    state = case.build(mesh)
    linears = linears_of(state.model)
    weights = {linear.name: _parameter(linear.weight) for linear in linears}
    biases = {linear.name: _parameter(linear.bias) for linear in linears if linear.bias is not None}
    steps = []
    for number in range(STEPS):
        with _watching(linears) as passes:
            step = Step(_masters(state), passes)
            batch = replace(case, num_microbatches=mesh.dp.size).microbatches(number, mesh)
            forward_backward(state, batch)
            reduce_gradients(state)
            step.gradients = pieces(state, state.masters.grads)
        steps.append(step)
        state.optimizer.update(number + 1, 1.0, divisor=100.0)
        state.step += 1
    with _watching(linears) as passes:
        last = Step(_masters(state), passes)
        evaluate(state, [microbatch(9000 + mesh.dp.rank)])
    return Watched(weights, biases, steps, last)


def _masters(state: TrainState) -> list[Piece]:
    return pieces(state, [master.detach().clone() for master in state.masters.masters])


def _parameter(param: torch.nn.Parameter) -> Parameter:
    return Parameter(tuple(param.shape), pieces_of(param))


def _fed(operand: Any) -> Fed:
    if not isinstance(operand, Fp8Tensor):
        return Fed(operand.detach().float().clone(), None)
    scale = spread(operand.dequant_scale, operand.payload.shape, operand.block)
    codes = operand.payload.view(torch.uint8).clone()
    outer = None if operand.outer is None else operand.outer.clone()
    return Fed(codes, scale.expand(codes.shape).clone(), outer)


@contextmanager
def _watching(linears: list[Linear]) -> Iterator[dict[str, Pass]]:
    """Note one pass of each linear; what autograd hands over is seen by hooks of tensors."""
    passes: dict[str, Pass] = {}
    handles, fed = [], {linear.name: {} for linear in linears}
    drawn: dict[str, dict[str, torch.Tensor]] = {linear.name: {} for linear in linears}

    def note(linear: Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        (x,) = args
        passes[linear.name] = found = Pass(
            _flat(x), _flat(output), fed=fed[linear.name], drawn=drawn[linear.name]
        )

        def keep(what: str, grad: torch.Tensor) -> None:
            setattr(found, what, _flat(grad))

        if output.requires_grad:
            output.register_hook(lambda grad: keep("grad_output", grad))
            x.register_hook(lambda grad: keep("grad_input", grad))

    product = native.product

    def noted(layer: Any, place: Any, a: Any, b: Any, *args: Any, **options: Any) -> torch.Tensor:
        fed[layer.name][place] = (_fed(a), _fed(b))
        return product(layer, place, a, b, *args, **options)

    draw = Draw.__call__

    def drew(self: Draw, shape: tuple[int, ...]) -> torch.Tensor:
        name, role, along = self.tensor.rsplit(".", 2)
        drawn[name][f"{role}.{along}"] = found = draw(self, shape)
        return found

    for linear in linears:
        handles.append(linear.register_forward_hook(note))  # type: ignore[arg-type]
    with patch.object(native, "product", noted), patch.object(Draw, "__call__", drew):
        yield passes
    for handle in handles:
        handle.remove()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().flatten(0, -2).float().clone()
