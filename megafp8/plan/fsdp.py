"""Compute what a rank holds of whole weights and gradients while FSDP gathers and reduces them.

Within a layer's backward pass FSDP holds the layer's weights, what it receives of the layer before,
the layer's gradients, and what it sends of the gradients of the layer after it. It receives into
one tensor and copies the weights from there; the tensor is free again at the next copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megafp8.plan.layer import (
    backward_instants,
    forward_work,
    layer_bytes,
    layer_input_bytes,
    norm_bytes,
)
from megafp8.plan.pipeline import PassBytes, StagePasses
from megafp8.specs import RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.division import ScatteredRow
from megafp8.specs.optim import ITEM_BYTES
from megafp8.specs.rank_shape import (
    FP32,
    Parameter,
    RankShape,
    compute_itemsize,
    kinds_of_layers,
    microbatch_tokens,
    recomputes,
    sent_in_fp8,
    sequence_shards,
    shard_ranks,
)


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Hold what one stage keeps and needs without FSDP, beside the work of its layers."""

    layers: range
    kept: int
    has_embedding: bool
    head: int | None  # the working memory of the head's forward pass; None on a stage without it
    head_kept: int  # gradients that the head's forward pass computes
    scores: int  # the working memory of attention


class Instant(NamedTuple):
    """Hold the bytes of one moment of a microbatch.

    `more` are those beside all that microbatches in flight keep, and `gathered` whole weights.
    `reduced` are the shards of gradients that FSDP has made of this microbatch, and `sums` those of
    them that stay: FP8-LM's levels add up linears' in low precision.
    """

    more: int
    gathered: int
    reduced: int = 0
    sums: int = 0


def passes_of_stage(spec: RunSpec, shape: RankShape, stage: StageBytes) -> StagePasses:
    """Return the bytes of a stage's passes at their worst moments."""
    fsdp, instants = spec.parallel.fsdp, list(_instants(spec, shape, stage))
    assert fsdp is not None
    first = max(instants, key=lambda each: each.more + each.gathered + each.sums)
    if fsdp.strategy == "hybrid":
        # Until the end of a backward pass FSDP keeps what it sent of shards to other nodes.
        instants = [each._replace(more=each.more + each.reduced) for each in instants]
    later, sums = max(instants, key=lambda each: each.more + each.gathered), instants[-1].sums
    return StagePasses(
        kept=stage.kept,
        received=0 if stage.has_embedding else layer_input_bytes(spec),
        returned=0 if stage.head is not None else layer_input_bytes(spec),
        left=instants[0].gathered,
        sums=sums,
        first=PassBytes(first.more, first.gathered, first.sums),
        later=PassBytes(later.more, later.gathered, sums),
    )


def start_bytes(spec: RunSpec, shape: RankShape) -> int:
    """Return what a rank holds with FSDP before the optimizer has moments.

    One layer after the other gets its FP32 values and is sharded, and at last the weights outside
    of layers.
    """
    if spec.parallel.fsdp is None:
        return 0
    own_shards = _shards(spec, shape.params)
    root = sum(param.elements for param in shape.params if not param.in_layer)
    before = own_shards
    if shape.has_last or len(shape.stages) == 1:
        before -= _shards(spec, (param for param in shape.params if not param.in_layer))
    largest = max(sum(param.elements for param in layer) for layer in shape.params_of_layers)
    return max(own_shards + FP32 * root, before + FP32 * largest)


def _instants(spec: RunSpec, shape: RankShape, stage: StageBytes) -> Iterator[Instant]:
    """Yield the moments of a stage at which most may be held, in order.

    They are the end of the forward pass, the head's backward pass, for each layer its backward pass
    and the sum of its gradients, and the gradients of what is outside of layers. Layers that are
    recomputed together are gathered together; the layer before them is received for the first one.
    """
    fsdp, size = spec.parallel.fsdp, compute_itemsize(spec)
    assert fsdp is not None
    layers, outside = _params_of_stage(shape, stage)
    reduced_itemsize, stays = ITEM_BYTES[fsdp.grad_reduce_dtype], fsdp.strategy == "grad"
    received = [sum(_received(spec, param) for param in layer) for layer in layers]
    gathered = [sum(_gathered(spec, param) for param in layer) for layer in layers]
    root = sum(_gathered(spec, param) for param in outside)
    table = spec.model.vocab_size // spec.parallel.tp * spec.model.hidden_size
    groups = [_first_recomputed_with(spec, place) for place in range(len(layers))]
    stream, known = layer_input_bytes(spec), dict[object, tuple[int, int]]()
    of_head = 0 if stage.head is None else size * table
    all_gathered = root + (sum(gathered) if stays else 0)
    yield Instant((stage.head or 0) + received[-1], all_gathered)
    output = microbatch_tokens(spec) // sequence_shards(spec) * spec.model.hidden_size * size
    after = 0  # what the head and its norm keep beside the last layer's output
    if stage.head is not None:
        is_post = spec.model.transformer_block_type == "post_ln"
        after = stage.head_kept + (0 if is_post else norm_bytes(spec)) - stream
    of_layer = 0 if stays else gathered[-1]
    work = max(0, forward_work(spec, stage.layers[-1]) - stream)  # before the stream's sum is made
    yield Instant(output + work - after + received[-1], all_gathered + of_layer)
    received = [0] * len(layers) if stays else received  # in the backward pass
    if stage.head is not None:
        yield Instant(of_head + received[-1], all_gathered)
    now, reduced, sums, sending = of_head - after, 0, 0, 0
    now += stream if stage.head is None else 0
    for place in reversed(range(len(layers))):
        begin, is_last = groups[place], place == len(layers) - 1
        others = stage.layers[begin:place]
        held = root + sum(gathered[0 if stays else begin : place + 1])
        if recomputes(spec, "full", place) and (is_last or groups[place + 1] > place):
            again = sum(layer_bytes(spec, layer) for layer in others) - stream
            if others:
                work = max(stream, forward_work(spec, others[-1]))
                more = again + output + work + received[place - 1]
                yield Instant(now + sending + more, held, reduced, sums)
            now += again + layer_bytes(spec, stage.layers[place])
            work = output + forward_work(spec, stage.layers[place])
        else:
            work = 0
        before = received[place - 1] if place and begin == place else 0
        most, end = _backward(spec, stage, place, 0 if stage.head is not None else stream, known)
        most = max(most, work, before // shard_ranks(spec))  # this rank's part, while it is sent
        yield Instant(now + sending + before + most, held, reduced, sums)
        gradients = size * sum(param.elements for param in layers[place])
        shards = _shards(spec, layers[place])
        sending = reduced_itemsize * shard_ranks(spec) * shards // FP32
        now += end - gradients
        summing = max(gradients, shards + _sent_by_level(spec, layers[place]))
        yield Instant(now + before + summing + sending, held - gathered[place], reduced, sums)
        reduced += shards
        sums += _shards(spec, _summed_in_fp32(spec, layers[place]))
    if stage.has_embedding:  # a sum in FP32 of the tokens' gradients
        rows = FP32 * microbatch_tokens(spec) * spec.model.hidden_size
        yield Instant(now + sending + FP32 * table + max(rows, size * table), root, reduced, sums)
    gradients = size * sum(param.elements for param in outside) - of_head
    shards = _shards(spec, outside)
    yield Instant(now + gradients + sending, root, reduced, sums)
    sending = reduced_itemsize * shard_ranks(spec) * shards // FP32
    yield Instant(now + gradients + sending, 0, reduced, sums + shards)


def _params_of_stage(
    shape: RankShape, stage: StageBytes
) -> tuple[list[list[Parameter]], list[Parameter]]:
    """Return the parameters of each of a stage's layers, and its others: embedding and head."""
    begin = shape.layers.index(stage.layers[0])
    is_here = {"first": stage.has_embedding, "last": stage.head is not None}
    outside = [param for param in shape.params if is_here.get(str(param.listed.place))]
    return shape.params_of_layers[begin : begin + len(stage.layers)], outside


def _backward(
    spec: RunSpec, stage: StageBytes, place: int, held: int, known: dict[object, tuple[int, int]]
) -> tuple[int, int]:
    """Return by how much more a layer's backward pass holds at its worst moment, and at its end.

    `known` has those of layers that are alike.
    """
    layer, keeps_core = stage.layers[place], not recomputes(spec, "selective", place)
    held = held if place == len(stage.layers) - 1 else 0
    alike = kinds_of_layers(spec)[layer], keeps_core, held
    if alike not in known:
        moments = list(
            backward_instants(spec, layer, keeps_core=keeps_core, scores=stage.scores, held=held)
        )
        known[alike] = max(moments), moments[-1]
    return known[alike]


def _first_recomputed_with(spec: RunSpec, place: int) -> int:
    """Return the place of the first layer that is recomputed, and so gathered, with this one."""
    recompute = spec.model.recompute
    if recompute is None or (recompute.granularity, recompute.method) != ("full", "uniform"):
        return place
    return place - place % recompute.num_layers


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
    ranks = shard_ranks(spec)
    return FP32 * sum(param.shard_elements(ranks) for param in params)


def _received(spec: RunSpec, param: Parameter) -> int:
    """Return the bytes of a parameter as ranks send it."""
    ranks = shard_ranks(spec)
    elements = ranks * param.shard_elements(ranks)
    return elements * (1 if sent_in_fp8(spec, param) else compute_itemsize(spec))


def _gathered(spec: RunSpec, param: Parameter) -> int:
    """Return the bytes of a gathered parameter.

    One that is sent in FP8 has its bytes and, for autograd, a tensor of the compute dtype besides;
    Transformer Engine's has the transposed bytes.
    """
    if not sent_in_fp8(spec, param):
        return _received(spec, param)
    is_transposed = BACKENDS[spec.precision.backend].transposes_gathered
    besides = ITEM_BYTES["fp8"] if is_transposed else compute_itemsize(spec)
    return _received(spec, param) + param.elements * besides
