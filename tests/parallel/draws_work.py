"""Run steps on ranks and record the random bytes and codes of every output gradient."""

# T tokens   O out features

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8.draws import Draw, Tokens
from megafp8.parallel.collectives import Axis
from megafp8.parallel.cut import places_of
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import linears_of
from megafp8.specs import ParallelSpec
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, reduce_gradients
from tests.kit.cases import Case
from tests.tiny import SEQ

STEPS = 2
COLUMN = ("qkv", "fc1")
"""The linears whose out features ranks divide."""


@dataclass(frozen=True)
class Place:
    """Where a rank is in its layout."""

    parallel: ParallelSpec
    tp: int = 0
    cp: int = 0


@dataclass
class Cast:
    """One cast of an output gradient [T, O] on one rank, for both products."""

    step: int
    samples: tuple[int, ...]
    linear: str
    grad: torch.Tensor
    bytes: dict[str, torch.Tensor]  # by `last` and `first`, both [T, O]
    codes: dict[str, torch.Tensor]


@dataclass
class Watched:
    """What one rank saw: its casts of training, and those of given gradients."""

    place: Place
    casts: list[Cast]
    given: dict[str, Cast]  # by linear


def tokens_at(
    place: Place, linear: str, batch: int, borders: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The rows of the whole gradient [B S, O] that a rank casts, in its order."""
    whole_BS = torch.arange(batch * SEQ).view(batch, SEQ)
    cp, tp = place.parallel.cp, place.parallel.tp
    if borders is not None:
        whole_BS = whole_BS.gather(1, places_of(borders, SEQ, Axis("cp", cp, place.cp)))
    elif cp > 1:  # the first and the last of what is left, for each rank in turn
        chunks = whole_BS.chunk(2 * cp, 1)
        whole_BS = torch.cat([chunks[place.cp], chunks[2 * cp - 1 - place.cp]], 1)
    if not place.parallel.sequence_parallel:
        return whole_BS.flatten()
    shards = whole_BS.chunk(tp, 1)
    if linear.endswith(COLUMN):
        return torch.cat([shard.flatten() for shard in shards])
    return shards[place.tp].flatten()


def features_at(place: Place, linear: str, features: int, *, is_gated: bool) -> torch.Tensor:
    """The columns of the whole gradient that a rank casts; `features` are all."""
    parts = {"qkv": 3, "fc1": 2 if is_gated else 1}.get(linear.rsplit(".", 1)[1])
    whole_O = torch.arange(features)
    if parts is None or place.parallel.tp == 1:
        return whole_O
    return torch.cat([part.chunk(place.parallel.tp)[place.tp] for part in whole_O.chunk(parts)])


def given_gradient(linear: str, batch: int, features: int) -> torch.Tensor:
    """A gradient [B S, O] whose largest magnitude every token has."""
    generator = torch.Generator().manual_seed(sum(linear.encode()))
    grad = torch.randn(batch * SEQ, features, generator=generator).clamp_(-4, 4)
    grad[:, 0] = 5
    return grad


def watch_case(case: Case, mesh: Mesh) -> Watched:
    state, casts = case.build(mesh), list[Cast]()
    with _recording(state, casts):
        for step in range(STEPS):
            forward_backward(state, case.microbatches(step, mesh))
            reduce_gradients(state)
            state.optimizer.update(step + 1, 1.0, divisor=100.0)
            state.step += 1
    place = Place(case.parallel, mesh.tp.rank, mesh.cp.rank)
    return Watched(place, casts, _given(state, case, place))


def _given(state: TrainState, case: Case, place: Place) -> dict[str, Cast]:
    """Cast parts of given gradients, as the ranks of the layout would."""
    found = list[Cast]()
    if place.parallel.fsdp is not None:  # its casts are those of one process
        return {}
    with _recording(state, found):
        half = SEQ // 2 // place.parallel.cp
        own = range(place.cp * half, (place.cp + 1) * half)
        mirrored = range(SEQ - own.stop, SEQ - own.start)
        positions = (range(SEQ),) if place.parallel.cp == 1 else (own, mirrored)
        state.scaling.begin_microbatch(0, 9, Tokens(tuple(range(case.batch)), positions))
        for linear in linears_of(state.model):
            if linear.quantizer is None:
                continue
            share = place.parallel.tp if linear.name.endswith(COLUMN) else 1
            features = linear.weight.shape[0] * share
            whole = given_gradient(linear.name, case.batch, features)
            rows = tokens_at(place, linear.name, case.batch)
            columns = features_at(place, linear.name, features, is_gated=case.model.is_gated)
            linear.quantizer.operands("grad_output", whole[rows][:, columns].contiguous())
    return {cast.linear: cast for cast in found}


@contextmanager
def _recording(state: TrainState, casts: list[Cast]) -> Iterator[None]:
    drawn: dict[str, torch.Tensor] = {}
    draw = Draw.__call__

    def drew(self: Draw, shape: tuple[int, ...]) -> torch.Tensor:
        found = draw(self, shape)
        drawn[self.tensor] = found.t().clone() if self.is_turned else found.clone()
        return found

    def observe(
        name: str, x: torch.Tensor, last: Fp8Tensor | None, first: Fp8Tensor | None
    ) -> None:
        linear, role = name.rsplit(".", 1)
        if role != "grad_output":
            return
        assert last is not None and first is not None
        step, tokens = state.scaling.draws.at  # type: ignore[union-attr]
        codes = {"last": _codes(last), "first": _codes(first)}
        random = {along: drawn.pop(f"{name}.{along}") for along in codes}
        grad = x.detach().float().clone()
        casts.append(Cast(step, tokens.samples, linear, grad, random, codes))

    scaling: Any = state.scaling
    scaling.observers.append(observe)
    with patch.object(Draw, "__call__", drew):
        yield
    scaling.observers.remove(observe)


def _codes(operand: Fp8Tensor) -> torch.Tensor:
    return operand.payload.contiguous().view(torch.uint8).clone()
