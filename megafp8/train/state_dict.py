"""List what a checkpoint of a run has, as pieces of logical tensors, and load a checkpoint.

    model/<name>                     FP32 master weights, logical tensors, and routers' biases
    optimizer/<state>/<name>         what optimizers keep, such as AdamW's moments
    scales/<any of both>             the factor of a tensor in low precision, FP32; a grid of
                                     factors where tensor-parallel ranks hold parts of it, or
                                     two numbers for each group of 128 elements of a row
    reduction/factor/<name>          the factor of FP8-LM's sum of a gradient in FP8, like a scale
    scaling/<direction>/<field>/<tensor>[/shards]
    rng/torch                        torch's default generator (our own generators have no state)

The manifest's meta has the scalars: step, samples, updates, configuration, data fingerprint; and
the layout of FP8 scales (`scaling_dict`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8_numerics.cast import amax_of
from megafp8.checkpoint.manifest import COUNTS, SKIPPED_IN_A_ROW, Placement, check_state
from megafp8.checkpoint.reader import SCALES, Reader
from megafp8.errors import CheckpointError
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.scaling import ScalingState
from megafp8.models.init import pieces_of
from megafp8.optim.partitions import Segment
from megafp8.parallel.agreement import wait_for_all
from megafp8.parallel.mesh import Mesh
from megafp8.specs.geometry import Box, boxes_of_run
from megafp8.train.phases import return_to
from megafp8.train.scaling_dict import load_scaling, scaling_placements
from megafp8.train.state import TrainState

Notify = Callable[[str], None]
FACTORS = "reduction/factor/"
States = Iterable[tuple[str, Sequence[tuple[Segment, ScaledTensor]]]]


def placements_of(
    prefix: str, segment: Segment, tensor: torch.Tensor, mesh: Mesh, *, num_shards: int
) -> Iterator[Placement]:
    """Yield the pieces of logical tensors in a segment, whose values are in `tensor`.

    `tensor` may have any shape; its values are read in memory order. The parameters are divided
    among `num_shards` consecutive replicas; replicas after those have copies.
    """
    shape, flat, begin = tuple(segment.param.shape), tensor.detach().view(-1), 0
    for box in boxes_of_run(shape, segment.begin, segment.end):
        values = flat[begin : begin + box.volume].view(box.shape)
        begin += box.volume
        for piece in pieces_of(segment.param):
            local = piece.local_box
            if (common := local.overlap(box)) is None:
                continue
            inside = zip(piece.offset, common.offset, local.offset, strict=True)
            is_replica = mesh.replicas_of(piece.group).data.rank >= num_shards
            is_replica = is_replica or (mesh.tp.rank > 0 and not piece.is_sharded)
            yield Placement(
                prefix + piece.name,
                piece.global_shape,
                tuple(start + at - first for start, at, first in inside),
                values[common.slices_within(box)],
                replica=int(is_replica or piece.replica > 0),
            )


def placements(state: TrainState) -> Iterator[Placement]:
    """Yield every tensor of the state, as pieces of logical tensors."""
    yield from _fixed_placements(state)
    yield from _passing_placements(state)


def _fixed_placements(state: TrainState) -> Iterator[Placement]:
    """Yield the placements of tensors that training changes in place: weights and moments."""
    for prefix, tensors in _states(state):
        yield from _pieces(prefix, state, tensors)


def _passing_placements(state: TrainState) -> Iterator[Placement]:
    """Yield the placements of tensors that training may replace: FP8 scaling and torch's RNG.

    With `keeps_addresses` the tables of FP8 scaling are updated in place instead.
    """
    if isinstance(state.scaling, ScalingState):
        yield from scaling_placements(state)
    yield from _factor_placements(state)
    yield from _buffer_placements(state)
    if state.mesh.is_main:
        rng = torch.get_rng_state()
        yield Placement("rng/torch", tuple(rng.shape), (0,), rng)


def _factor_placements(state: TrainState) -> Iterator[Placement]:
    """Yield the placements of the factors of sums in FP8, where these adapt to the gradients.

    They are the same on all replicas.
    """
    masters = state.masters
    if not masters.factors_adapt:
        return
    for param, factor in masters.factor_of():
        whole = Segment(param, 0, param.numel())
        for piece in placements_of(FACTORS, whole, param, state.mesh, num_shards=1):
            yield _scalar_of(piece.name, piece, factor)


def _buffer_placements(state: TrainState) -> Iterator[Placement]:
    """Yield the placements of what the model keeps beside its parameters, the same on replicas."""
    replica = int(state.mesh.data.rank > 0 or state.mesh.tp.rank > 0)
    for name, tensor in state.model.parts.buffers().items():
        yield Placement(f"model/{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor, replica)


class RepeatedPlacements:
    """Return `placements` of a state again and again.

    The placements of weights and moments are computed once for as long as their tensors stay at the
    same addresses.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._places: list[int] = []
        self._fixed: list[Placement] = []

    def now(self) -> list[Placement]:
        """Return the placements of the state as it is now."""
        state = self._state
        tensors = [*state.masters.masters, *state.optimizer.all_state_tensors()]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places, self._fixed = places, list(_fixed_placements(state))
        return [*self._fixed, *_passing_placements(state)]


def load_checkpoint(step_dir: Path, state: TrainState, notify: Notify) -> dict[str, Any]:
    """Fill `state` from a verified checkpoint of any layout, and return the manifest's meta.

    All ranks call it together.

    Raises:
        CheckpointError: The checkpoint lacks a tensor, a count, or a loss scale that `state` needs.
    """
    reader = Reader(step_dir)
    meta = reader.meta
    check_state(meta, step_dir, COUNTS)
    return_to(state, reader.step, meta, notify)
    for line in _load_states(reader, state, _states(state)):
        notify(line)
    reader.load_into(list(_buffer_placements(state)))
    if isinstance(state.scaling, ScalingState):
        load_scaling(reader, state, notify)
        state.backend.after_load()
    for line in _load_factors(reader, state):
        notify(line)
    if "rng/torch" in reader.names():
        torch.set_rng_state(reader.read("rng/torch"))
    state.step = reader.step
    state.consumed_samples = int(meta["consumed_samples"])
    state.num_skipped = int(meta["num_skipped"])
    state.num_skipped_in_a_row = int(meta.get(SKIPPED_IN_A_ROW, 0))
    state.optimizer.set_num_updates(int(meta["num_updates"]))
    if state.loss_scale is not None:
        try:
            state.loss_scale.set_state(meta["loss_scale"])
        except (ValueError, TypeError, KeyError) as error:
            hint = "Continue from another checkpoint: model.resume_from_checkpoint"
            raise CheckpointError(step_dir, str(error), hint) from error
    wait_for_all(state.mesh)  # before the write-back's collectives: ranks read different bytes
    state.masters.write_back()
    return meta


def load_weights(reader: Reader, state: TrainState, notify: Notify) -> None:
    """Fill the master weights alone from a checkpoint of any layout; all ranks call it together."""
    for line in _load_states(reader, state, itertools.islice(_states(state), 1)):
        notify(line)
    reader.load_into(list(_buffer_placements(state)))
    wait_for_all(state.mesh)


def _states(state: TrainState) -> States:
    """Yield the master weights, then each kind of moments, with the prefix of their names.

    Each tensor comes with its segment.
    """
    yield "model/", list(zip(state.masters.segments, state.masters.stored, strict=True))
    for name, tensors in state.optimizer.states():
        yield f"optimizer/{name}/", tensors


def _pieces(
    prefix: str, state: TrainState, tensors: Sequence[tuple[Segment, ScaledTensor]]
) -> Iterator[Placement]:
    """Yield the placements of `tensors`."""
    for segment, tensor in tensors:
        yield from _pieces_of_segment(prefix, state, segment, tensor)


def _pieces_of_segment(
    prefix: str, state: TrainState, segment: Segment, tensor: torch.Tensor | ScaledTensor
) -> Iterator[Placement]:
    """Yield the placements of one segment's tensor, and those of its scale where it has one.

    Of a parameter in several segments the first one has the scale.
    """
    num_shards = state.masters.shards_of[segment.piece.group].size
    payload = tensor.payload if isinstance(tensor, ScaledTensor) else tensor
    for placement in placements_of(prefix, segment, payload, state.mesh, num_shards=num_shards):
        yield placement
    if isinstance(tensor, ScaledTensor) and tensor.fmt.max is not None:
        if segment.begin:
            return
        for placement in _whole_pieces(prefix, state, segment):
            yield _scalar_of(SCALES + placement.name, placement, tensor.dequant_scale)


def _whole_pieces(prefix: str, state: TrainState, segment: Segment) -> Iterator[Placement]:
    """Yield the placements of the whole parameter of a segment; their tensors are only shapes."""
    whole = Segment(segment.param, 0, segment.param.numel())
    shape_of_it = torch.empty(segment.param.shape, device="meta")  # FSDP's is sharded
    num_shards = state.masters.shards_of[segment.piece.group].size
    yield from placements_of(prefix, whole, shape_of_it, state.mesh, num_shards=num_shards)


def _scalar_of(name: str, piece: Placement, scalar: torch.Tensor) -> Placement:
    """Return the placement of a scalar that belongs to a piece of a tensor.

    The scalars of the pieces are a grid, as the pieces are; that of a whole tensor is 0-d. Pieces
    of tensor-parallel ranks have one shape, so the grid is regular.
    """
    shape, whole = piece.tensor.shape, piece.global_shape
    assert all(size % part == 0 for size, part in zip(whole, shape, strict=True)), piece.name
    grid = tuple(size // part for size, part in zip(whole, shape, strict=True))
    if grid == (1,) * len(grid):
        return Placement(name, (), (), scalar, piece.replica)
    place = tuple(at // part for at, part in zip(piece.offset, shape, strict=True))
    return Placement(name, grid, place, scalar.view((1,) * len(grid)), piece.replica)


def _load_states(reader: Reader, state: TrainState, states: States) -> Iterator[str]:
    """Load master weights or moments, and yield a message for each kind that was converted.

    A tensor that the checkpoint stores in the same format is loaded bit for bit. FP32 tensors hold
    the values of any format. All others are rounded to the format of this run.
    """
    same: list[Placement] = []
    to_convert: list[tuple[str, Segment, ScaledTensor]] = []
    prefixes = []
    for prefix, tensors in states:
        prefixes.append(prefix)
        for segment, tensor in tensors:
            pieces = list(_pieces_of_segment(prefix, state, segment, tensor))
            if tensor.fmt.name == "fp32":
                same += pieces
                continue
            # ranks that have parts of one tensor must come to one answer
            whole = _whole_pieces(prefix, state, segment)
            if (factor := _common_factor(reader, whole, tensor.payload.dtype)) is not None:
                same += [piece for piece in pieces if not piece.name.startswith(SCALES)]
                tensor.dequant_scale.copy_(factor)
            else:
                to_convert.append((prefix, segment, tensor))
    reader.load_into(same)
    amaxes = _amaxes_of_parts(reader, state, to_convert, prefixes)
    converted: dict[tuple[str, str, str], float] = {}
    for prefix, segment, tensor in to_convert:
        values, pieces = _read_values(reader, state, prefix, segment, tensor)
        tensor.store(values, amax=amaxes.get((prefix, segment.param)))
        lost = (tensor.values() - values).norm() / values.norm().clamp(min=1e-30)
        was = str(reader.dtype(pieces[0].name)).removeprefix("torch.")
        kind = (prefix.strip("/"), was, tensor.fmt.name)
        converted[kind] = max(converted.get(kind, 0.0), lost.item())
    for (kind_of_state, was, now), error in converted.items():
        yield (
            f"{kind_of_state}: stored in {was} there and in {now} here; converted, with a relative "
            f"error of at most {error:.1e} in a tensor"
        )


def _has(reader: Reader, piece: Placement) -> bool:
    """Whether the checkpoint has a tensor in the format and with the scales of `piece`."""
    if piece.name not in reader.names():
        return False
    same_dtype = reader.dtype(piece.name) == piece.tensor.dtype
    return same_dtype and reader.global_shape(piece.name) == piece.global_shape


def _read_values(
    reader: Reader, state: TrainState, prefix: str, segment: Segment, tensor: ScaledTensor
) -> tuple[torch.Tensor, list[Placement]]:
    """Return the values of a segment's tensor in FP32, and where they were read."""
    values = torch.empty(tensor.payload.shape, device=tensor.payload.device)
    pieces = list(_pieces_of_segment(prefix, state, segment, values))
    reader.load_into(pieces)
    return values, pieces


def _amaxes_of_parts(
    reader: Reader,
    state: TrainState,
    to_convert: Sequence[tuple[str, Segment, ScaledTensor]],
    prefixes: Sequence[str],
) -> dict[tuple[str, nn.Parameter], torch.Tensor]:
    """Return the amaxes of whole tensors that are converted, where ranks have parts of them."""
    masters = state.masters
    if masters.row_of is None:
        return {}
    amaxes = torch.zeros(len(masters.row_of), len(prefixes), device=masters.device)
    amax_at = {
        (prefix, segment.param): amaxes[masters.row_of[segment.param], prefixes.index(prefix)]
        for prefix, segment, _ in to_convert
    }
    for prefix, segment, tensor in to_convert:
        values, _ = _read_values(reader, state, prefix, segment, tensor)
        amax_at[prefix, segment.param].copy_(amax_of(values))
    masters.agree(amaxes)
    return amax_at


def _common_factor(
    reader: Reader, pieces: Iterable[Placement], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the one factor (0-d) with which the checkpoint has these pieces of one tensor.

    None: they have another format there than `dtype`, or several factors, since ranks that held
    less of the tensor stored them.
    """
    factors = []
    for piece in pieces:
        if reader.dtype(piece.name) != dtype:
            return None
        factor = reader.factor(piece.name, Box(piece.offset, tuple(piece.tensor.shape)))
        factors.append(torch.ones(1) if factor is None else factor.flatten())
    distinct = torch.cat(factors).unique()
    return distinct[0] if len(distinct) == 1 else None


def _load_factors(reader: Reader, state: TrainState) -> Iterator[str]:
    """Load the factors of sums in FP8, and yield a message where the checkpoint has others.

    Where it has several for what is one tensor here, the smallest is taken.
    """
    here, stored = list(_factor_placements(state)), set(reader.names())
    same = [p for p in here if p.name in stored and reader.global_shape(p.name) == p.global_shape]
    reader.load_into(same)
    loaded = {placement.name for placement in same}
    for placement in here:
        if placement.name in stored - loaded:
            placement.tensor.fill_(reader.read(placement.name).min())
    # A parameter has a placement for each of its logical tensors, with the same factor.
    missing = len({p.tensor.data_ptr() for p in here if p.name not in stored})
    if missing:
        yield f"{missing} gradients summed in FP8 begin with the factor 1/sqrt(ranks)"
