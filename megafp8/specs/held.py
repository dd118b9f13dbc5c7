"""Compute the bytes of the state that a rank keeps from step to step, from the run's spec alone."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.specs import RunSpec
from megafp8.specs.division import Division
from megafp8.specs.optim import ITEM_BYTES
from megafp8.specs.rank_shape import (
    FP32,
    Group,
    Parameter,
    RankShape,
    groups_of,
    rows_with_history,
    shard_ranks,
    stored_as,
)

SCALE_TABLE_BYTES = 20
"""Delayed scaling keeps, beside a tensor's amax history, its scales, amax and counters."""


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Hold the bytes of the state that stays from step to step."""

    weights: int  # as the products read them
    masters: int  # FP32 master weights that are not the weights themselves
    moments: int  # the optimizer's
    gradients: int  # of all parameters, or under FP8-LM's ZeRO-2 those that the rank sums
    scaling: int  # FP8 scales and their histories

    @property
    def total(self) -> int:
        """Return the sum of all kinds."""
        return self.weights + self.masters + self.moments + self.gradients + self.scaling


def bytes_kept(spec: RunSpec, shape: RankShape, replica: int | None = None) -> HeldBytes:
    """Return the bytes that a rank keeps, given its part of the model.

    Without `replica` it is the one that owns most under ZeRO, but for padding. FSDP's shards are
    the largest ones.
    """
    recipe = spec.precision.fp8
    delayed = rows_with_history(spec, shape.linears)
    history = recipe.amax_history_len if recipe is not None else 0
    scaling = 3 * delayed * (FP32 * history + SCALE_TABLE_BYTES)
    if spec.parallel.fsdp is not None:
        storage = spec.optim.storage
        ranks = shard_ranks(spec)
        own = [param.shard_elements(ranks) for param in shape.params]
        of_kinds = {param.kind: param for param in shape.params}
        per_element = {k: _itemsize_of_moments(spec, each) for k, each in of_kinds.items()}
        masters, gradients = (
            sum(
                elements * (ITEM_BYTES[name] if param.is_linear else FP32)
                for elements, param in zip(own, shape.params, strict=True)
            )
            for name in (storage.main_params, storage.main_grads)
        )
        if storage.main_grads != "fp32":
            gradients += FP32 * sum(param.is_linear for param in shape.params)  # their scales
        moments = sum(
            elements * per_element[param.kind]
            for elements, param in zip(own, shape.params, strict=True)
        )
        return HeldBytes(
            weights=0,  # FSDP's parameters are the masters, or have no memory beside them
            masters=masters,
            moments=moments,
            gradients=gradients,
            scaling=scaling,
        )
    groups = groups_of(spec, shape.params)
    replica = fullest(spec, groups[0]) if replica is None else replica
    weights = masters = moments = gradients = 0
    for group in groups:
        params, division = group.params, group.division
        # The first of the tensor-parallel ranks of a replica, which are neighbours in the group.
        rank = replica * group.num_ranks // groups[0].num_ranks
        names = [stored_as(spec, param) for param in params]
        weights += sum(ITEM_BYTES[places.kind] * places.elements for places in division.weights)
        for row in set(range(len(names))) - {row for p in division.weights for row in p.rows}:
            weights += ITEM_BYTES[names[row]] * params[row].elements
        for row, elements in division.owned_by(rank):
            of_master, of_moments = _owned_itemsizes(spec, params[row], division)
            masters += elements * of_master
            moments += elements * of_moments
        gradients += gradient_bytes(spec, division, rank)
    return HeldBytes(
        weights=weights, masters=masters, moments=moments, gradients=gradients, scaling=scaling
    )


def _owned_itemsizes(spec: RunSpec, param: Parameter, division: Division) -> tuple[int, int]:
    """Return the bytes of an element's master, beside the parameter itself, and of its moments.

    A linear's weight in low precision is its own master; one in FP8 has a master beside it. A whole
    FP32 parameter is its own master, too; a rank that owns a part of it has a copy.
    """
    storage, moments = spec.optim.storage, _itemsize_of_moments(spec, param)
    if param.is_linear and storage.main_params != "fp32":
        return 0 if param.itemsize > 1 else ITEM_BYTES[storage.main_params], moments
    is_own = param.itemsize == FP32 and not division.splits
    return 0 if is_own else FP32, moments


def _itemsize_of_moments(spec: RunSpec, param: Parameter) -> int:
    return sum(ITEM_BYTES[name] for name in spec.optim.states_of(param.kind).values())


def fullest(spec: RunSpec, group: Group) -> int:
    """Return the replica that owns the most bytes of masters and moments, but for padding."""
    owned_bytes = [0] * group.num_ranks
    for param, owner in zip(group.params, group.division.owners, strict=False):
        owned_bytes[owner] += param.elements * sum(_owned_itemsizes(spec, param, group.division))
    return owned_bytes.index(max(owned_bytes))


def gradient_bytes(spec: RunSpec, division: Division, rank: int) -> int:
    """Return the bytes of the gradients, and of scales, that one of the replicas keeps."""
    total = 0
    for places in division.grads:
        held = places.parts[rank] if frees_gradients(spec) else places.elements
        total += held * ITEM_BYTES[places.kind]
        if places.kind != "fp32":
            total += FP32 * len(places.rows)
    return total


def frees_gradients(spec: RunSpec) -> bool:
    """Whether a rank frees the gradients that others sum, once they were sent (ZeRO-2)."""
    return spec.optim.shards_grads and not spec.optim.storage.is_plain and shard_ranks(spec) > 1
