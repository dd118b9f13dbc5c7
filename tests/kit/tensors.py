"""What a rank has of a model, as parts of logical tensors; and whole tensors, compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megafp8.backends.te.quantized import memory_of
from megafp8.fp8.scaled import ScaledTensor
from megafp8.models.init import pieces_of
from megafp8.optim.protocol import Optimizers
from megafp8.train.state import TrainState
from megafp8.train.state_dict import placements, placements_of
from tests.tiny import beside

Tensors = Mapping[str, torch.Tensor]
Tables = dict[str, dict[str, torch.Tensor]]  # by direction and field


@dataclass
class Piece:
    """A part of a logical tensor, as one rank holds it."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


def pieces(
    state: TrainState, tensors: Iterable[torch.Tensor | ScaledTensor], prefix: str = ""
) -> list[Piece]:
    """Of tensors that belong to what this rank updates."""
    masters = state.masters
    return [
        Piece(place.name, place.global_shape, place.offset, _plain(place.tensor))
        for segment, tensor in zip(masters.segments, tensors, strict=True)
        for place in placements_of(
            prefix,
            segment,
            tensor.values() if isinstance(tensor, ScaledTensor) else tensor,
            state.mesh,
            num_shards=1,
        )
    ]


def weights(state: TrainState) -> list[Piece]:
    """As the model computes with them; with FSDP, whose whole weights come and go, the masters."""
    if state.masters.holds_rows:
        return pieces(state, state.masters.stored)
    return [
        Piece(piece.name, piece.global_shape, piece.offset, _plain(param.detach()[piece.local]))
        for param in state.masters.params
        for piece in pieces_of(param)
    ]


def saved(state: TrainState) -> list[Piece]:
    """What a checkpoint gets from this rank."""
    return [
        Piece(p.name, p.global_shape, p.offset, p.tensor.detach().clone())
        for p in placements(state)
        if p.replica == 0 and p.name.startswith(("model/", "optimizer/"))
    ]


def weight_bytes(state: TrainState) -> dict[str, torch.Tensor]:
    """The weights as bytes, by the local names of parameters."""
    found = {}
    for name, param in state.model.named_parameters():
        first = next(iter(memory_of(param)))  # Transformer Engine may keep bytes beside others
        if state.masters.holds_rows:  # FSDP's shards may have no memory
            first = state.masters.rows_of(param)
        found[name] = first.detach().contiguous().view(torch.uint8).clone()
    return found


def tables(state: TrainState) -> Tables:
    """The tables of FP8's scales."""
    return {
        direction: {name: tensor.clone() for name, tensor in table.tensors().items()}
        for direction, table in state.scaling.tables.items()
    }


def stored_states(optimizer: Optimizers, name: str) -> list[ScaledTensor]:
    """The optimizer's states of one name, in the order of the masters that have it."""
    return [state for _, state in dict(optimizer.states())[name]]


def state_tensors(optimizer: Optimizers, name: str) -> list[torch.Tensor]:
    """The payloads of `stored_states`."""
    return [state.payload for state in stored_states(optimizer, name)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; of FP8, which cannot be pickled, its numbers."""
    return tensor.float() if tensor.element_size() == 1 else tensor.clone()


def assembled(ranks: Iterable[Iterable[Piece]]) -> dict[str, torch.Tensor]:
    """Logical tensors from all ranks' pieces; where two hold the same part they agree bitwise."""
    whole: dict[str, torch.Tensor] = {}
    for piece in (piece for rank in ranks for piece in rank):
        target = whole.setdefault(piece.name, torch.full(piece.global_shape, torch.nan))
        extent = tuple(
            slice(start, start + size)
            for start, size in zip(piece.offset, piece.tensor.shape, strict=True)
        )
        held, here = target[extent], piece.tensor.float()
        assert held.isnan().all() or torch.equal(held, here), f"{piece.name} differs between ranks"
        target[extent] = here
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def errors(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """Relative to each tensor's largest element, or that of the tensor that rounds as it does."""
    assert ours.keys() == theirs.keys()
    return {
        name: ((ours[name] - expected).abs().max() / theirs[beside(name)].abs().max()).item()
        for name, expected in theirs.items()
    }


def assert_close(ours: Tensors, theirs: Tensors, bound: float) -> None:
    """Each element within `bound` of the largest one of its tensor."""
    beyond = {name: error for name, error in errors(ours, theirs).items() if not error <= bound}
    assert not beyond


def assert_same_pieces(ours: Sequence[Piece], theirs: Sequence[Piece]) -> None:
    """One rank's parts, bit for bit."""
    one, other = ({f"{p.name} {p.offset}": p.tensor for p in side} for side in (ours, theirs))
    assert_same(one, other)
