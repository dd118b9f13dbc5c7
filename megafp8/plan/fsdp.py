"""Compute what a rank holds of whole weights and gradients while FSDP gathers and reduces them.

Within a layer's backward pass FSDP holds the layer's weights, what it receives of the layer before,
the layer's gradients, and what it sends of the gradients of the layer after it. It receives into
one tensor and copies the weights from there; the tensor is free again at the next copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megafp8.plan.pipeline import late_sums, short_order
from megafp8.plan.shape import (
    FP32,
    Parameter,
    RankShape,
    compute_itemsize,
    fp8_products,
    linears_of_layer,
    num_microbatches,
    sent_in_fp8,
    shard_ranks,
)
from megafp8.specs import RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.division import ScatteredRow
from megafp8.specs.optim import ITEM_BYTES


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Hold what the computation on one stage keeps and needs, without FSDP."""

    layers: range
    kept: tuple[int, ...]  # by each layer, for its backward pass
    head: int | None  # the head's working memory; None on a stage without it
    head_kept: int  # gradients that the head's forward pass computes
    work: int  # beside what a layer keeps: the backward pass through its activation
    mlp_freed: int  # how much less it is in the backward pass of the MLP's first linear
    end_work: int  # all that a layer has at the end of its backward pass


@dataclass(frozen=True)
class MomentBytes:
    """Hold the bytes of one moment of a microbatch.

    `more` are those beside all that microbatches in flight keep, and `gathered` whole weights.
    `reduced` are the shards of gradients that FSDP has made of this microbatch, and `sums` those of
    them that stay: FP8-LM's levels add up linears' in low precision. `late` is by how much less the
    step needs because its first microbatch has no others.
    """

    more: int = 0
    gathered: int = 0
    reduced: int = 0
    sums: int = 0
    late: int = 0


def worst_moment(
    spec: RunSpec,
    shape: RankShape,
    pipeline_rank: int,
    stages: Iterable[StageBytes],
    kept: Mapping[int, int],
) -> MomentBytes:
    """Return the moment of a microbatch at which a rank with these stages needs most.

    A microbatch in flight keeps `kept[stage]`.
    """
    found = [moment for stage in stages for moment in _moments(spec, shape, stage)]
    first = max(moment.more + moment.gathered + moment.sums for moment in found)
    sums, parallel = _shards(spec, _summed_in_fp32(spec, shape.params)), spec.parallel
    if parallel.fsdp is not None and parallel.fsdp.strategy == "hybrid":
        # Until the end of a backward pass FSDP keeps what it sent of shards to other nodes.
        found = [replace(moment, more=moment.more + moment.reduced) for moment in found]
    worst = max(found, key=lambda moment: moment.more + moment.gathered)
    late = worst.more + worst.gathered + sums - first
    order = short_order(parallel.pipeline, parallel.pp, pipeline_rank, num_microbatches(spec))
    of_stages = dict.fromkeys(kept, sums // len(kept))
    return replace(worst, late=late_sums(order, kept, of_stages, late))


def start_bytes(spec: RunSpec, shape: RankShape) -> int:
    """Return what a rank holds with FSDP before the optimizer has moments.

    One layer after the other gets its FP32 values and is sharded, and at last the weights outside
    of layers.
    """
    if spec.parallel.fsdp is None:
        return 0
    whole = sum(param.elements for param in shape.params)
    own = _shards(spec, shape.params)
    root = sum(param.elements for param in shape.params if not param.in_layer)
    before = own
    if shape.has_last or len(shape.stages) == 1:
        before -= _shards(spec, (param for param in shape.params if not param.in_layer))
    one = FP32 * (whole - root) // len(shape.layers)
    return max(own + FP32 * root, before + one)


def _moments(spec: RunSpec, shape: RankShape, stage: StageBytes) -> Iterator[MomentBytes]:
    """Yield the moments of a stage at which most may be held, in order.

    They are the head's, for each layer the backward passes of the MLP's two linears and of the
    layer's first one and the sum of its gradients, and those of the embedding.
    """
    fsdp, size, count = spec.parallel.fsdp, compute_itemsize(spec), len(shape.layers)
    assert fsdp is not None
    of_layers = [param for param in shape.params if param.in_layer]
    outside = [param for param in shape.params if not param.in_layer]
    reduced, stays = ITEM_BYTES[fsdp.grad_reduce_dtype], fsdp.strategy == "grad"
    gradients = size * sum(param.elements for param in of_layers) // count
    received = sum(_received(spec, param) for param in of_layers) // count
    gathered = sum(_gathered(spec, param) for param in of_layers) // count
    root = sum(_gathered(spec, param) for param in outside)
    shards = _shards(spec, of_layers) // count
    lasting = _shards(spec, _summed_in_fp32(spec, of_layers)) // count
    scattered = reduced * shard_ranks(spec) * shards // FP32
    group, of_head = _recomputed_together(spec), 0
    of_layer = of_layers[: len(of_layers) // count]
    summing = max(gradients, shards + _sent_by_level(spec, of_layer))
    if stage.head is not None:
        of_head = size * max((p.elements for p in outside), default=0)
        whole = count * gathered if stays else 0
        yield MomentBytes(stage.head + received, root + whole)
    freed = stage.head_kept
    for place in reversed(range(len(stage.layers))):
        is_last, is_first = place == len(stage.layers) - 1, place == 0
        before = 0 if is_first or stays else received
        more = of_head + before - freed + (0 if is_last else scattered)
        held = root + gathered * (place + 1 if stays else min(group, place + 1))
        done = len(stage.layers) - 1 - place
        sums = shards * done, lasting * done
        first, both = _mlp_gradients(spec, stage.layers[place])
        freed += stage.kept[place]
        yield MomentBytes(more + stage.work + first, held, *sums)
        yield MomentBytes(more + stage.work - stage.mlp_freed + both, held, *sums)
        yield MomentBytes(more + gradients + stage.end_work - stage.kept[place], held, *sums)
        sending = of_head + before + summing + scattered
        yield MomentBytes(sending - freed, held - gathered, *sums)
    sums = shards * len(stage.layers), lasting * len(stage.layers)
    of_root = size * sum(p.elements for p in outside)
    yield MomentBytes(of_root + of_head + scattered - freed, root, *sums)
    yield MomentBytes(of_root + reduced * of_root // size - freed, 0, *sums)


def _recomputed_together(spec: RunSpec) -> int:
    """Return how many layers are recomputed, and so gathered, together."""
    recompute = spec.model.recompute
    if recompute is None or (recompute.granularity, recompute.method) != ("full", "uniform"):
        return 1
    return recompute.num_layers


def _summed_in_fp32(spec: RunSpec, params: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yield the parameters whose gradients FSDP itself adds up."""
    in_fp32 = spec.optim.storage.main_grads == "fp32"
    return (param for param in params if in_fp32 or not param.is_linear)


def _sent_by_level(spec: RunSpec, layer: Sequence[Parameter]) -> int:
    """Return what FP8-LM's levels make to send a layer's gradients, 0 without a level.

    They are the message, and for one linear after the other its scaled gradient in FP32 and FP8.
    """
    if spec.optim.storage.main_grads == "fp32":
        return 0
    ranks = shard_ranks(spec)
    sizes = [param.shard_elements(ranks) for param in layer]
    are_linears = [param.is_linear for param in layer]
    message = ranks * ScatteredRow.of(sizes, are_linears).num_bytes
    widest = max(size for size, is_in in zip(sizes, are_linears, strict=True) if is_in)
    return message + (FP32 + ITEM_BYTES["fp8"]) * ranks * widest


def _shards(spec: RunSpec, params: Iterable[Parameter]) -> int:
    """Return the bytes of FP32 shards; FSDP pads the largest part of each parameter."""
    return FP32 * sum(param.shard_elements(shard_ranks(spec)) for param in params)


def _received(spec: RunSpec, param: Parameter) -> int:
    """Return the bytes of a parameter as ranks send it."""
    elements = shard_ranks(spec) * param.shard_elements(shard_ranks(spec))
    return elements * (1 if sent_in_fp8(spec, param) else compute_itemsize(spec))


def _gathered(spec: RunSpec, param: Parameter) -> int:
    """Return the bytes of a gathered parameter.

    One that is sent in FP8 has its bytes and, for autograd, a tensor of the compute dtype besides.
    """
    if not sent_in_fp8(spec, param):
        return _received(spec, param)
    return _received(spec, param) + param.elements * compute_itemsize(spec)


def _mlp_gradients(spec: RunSpec, layer: int) -> tuple[int, int]:
    """Return the gradients of the MLP's last linear and of both, each with an FP8 copy for a use.

    FSDP's weights are quantized for each use.
    """
    size, first, last, copies = compute_itemsize(spec), 0, 0, [0]
    for linear in linears_of_layer(spec, layer):
        if not linear.whole.in_mlp:
            continue
        if linear.whole.is_column:
            first += size * linear.weight_elements
        else:
            last += size * linear.weight_elements
        if linear.traits is not None and BACKENDS[spec.precision.backend].copies_weights:
            sizes = linear.out_features, linear.in_features
            copies.append(linear.traits.weight_bytes(*sizes, fp8_products(spec, linear)))
    return max(copies) + last, max(copies) + first + last
