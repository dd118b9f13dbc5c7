"""Compute the bytes that one rank sends in a step, by mesh axis, from the run's spec alone.

`docs/parallelism.md` says what is sent and why. `handed` is what a rank hands to the operation, as
`traffic_bytes` of `summary.json` counts it; `on_wire` is what the rank sends with ring algorithms.
"""

# T tokens of a microbatch on one rank: micro batch x sequence / context-parallel ranks

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megafp8.plan.shape import (
    FP32,
    Linear,
    RankShape,
    compute_itemsize,
    deal_whole,
    linears_of_layer,
    rank_shape,
    recomputed_fraction,
    residual_itemsize,
    shard_ranks,
    tokens_of,
)
from megafp8.specs import RunSpec
from megafp8.specs.optim import ITEM_BYTES

Operation = Literal["all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter", "send"]
AxisName = Literal["tp", "cp", "data", "pp", "tied", "amax"]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Describe what one rank hands to one kind of operation in a step."""

    axis: AxisName
    operation: Operation
    what: str
    handed: int  # bytes
    num_ranks: int  # of the group

    @property
    def on_wire(self) -> float:
        """Return the bytes that the rank sends: those of a ring algorithm.

        An all-gather hands in one rank's part, a reduce-scatter and an all-reduce the whole tensor.
        """
        others = self.num_ranks - 1
        return {
            "all_reduce": 2 * self.handed * others / self.num_ranks,
            "reduce_scatter": self.handed * others / self.num_ranks,
            "all_to_all": self.handed * others / self.num_ranks,
            "all_gather": float(self.handed * others),
            "broadcast": self.handed * others / self.num_ranks,  # each rank's share of all of them
            "send": float(self.handed),
        }[self.operation]


def rank_traffic(spec: RunSpec, pipeline_rank: int) -> list[Message]:
    """Return what a rank of `pipeline_rank` sends in one step, without scalars such as the loss."""
    shape = rank_shape(spec, pipeline_rank)
    found = [
        *_tensor_parallel(spec, shape),
        *_context_parallel(spec, shape),
        *_pipeline(spec, shape),
        *_replicas(spec, shape),
        *_amaxes(spec, shape),
    ]
    return [message for message in found if message.handed]


def _num_microbatches(spec: RunSpec) -> int:
    return spec.train.num_microbatches(spec.parallel.dp)


def _gathers_fp8(linear: Linear) -> bool:
    return linear.precision in ("delayed", "tensorwise")


def _tensor_parallel(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    tp, tokens, count = spec.parallel.tp, tokens_of(spec), _num_microbatches(spec)
    if tp == 1:
        return
    size = compute_itemsize(spec)
    whole = tokens * spec.model.hidden_size * size  # a microbatch's activations
    passes = 1 + recomputed_fraction(spec)
    layers = [linears_of_layer(spec, layer) for layer in shape.layers]

    def message(operation: Operation, what: str, handed: float) -> Message:
        return Message(
            axis="tp", operation=operation, what=what, handed=int(handed * count), num_ranks=tp
        )

    if shape.has_last:
        yield message("all_reduce", "the loss of each token", 3 * tokens * FP32)
        yield message("all_reduce", "gradient of the head's input", whole)
    if not spec.parallel.sequence_parallel:
        if shape.has_first:
            yield message("all_reduce", "embeddings", whole)
        yield message("all_reduce", "activations", 2 * len(layers) * whole * passes)
        yield message("all_reduce", "gradients of activations", 2 * len(layers) * whole)
        return
    if shape.has_first:
        yield message("reduce_scatter", "embeddings", whole)
        yield message("all_gather", "gradient of the embeddings", whole / tp)
    if shape.has_last:
        yield message("all_gather", "input of the head", whole / tp)
    once = sum(FP32 * param.elements for param in shape.params if not param.is_sharded)
    yield message("all_reduce", "gradients of norms, biases and positions", once / count)
    yield message("reduce_scatter", "activations", 2 * len(layers) * whole * passes)
    yield message("reduce_scatter", "gradients of activations", 2 * len(layers) * whole)
    inputs = grads = 0.0
    for qkv, projection, fc1, fc2 in layers:
        for linear in (qkv, fc1):  # again in backward
            inputs += (passes + 1) * _part(spec, linear, tokens) / tp
        for linear in (projection, fc2):
            grads += _part(spec, linear, tokens) / tp
    yield message("all_gather", "inputs of linears", inputs)
    yield message("all_gather", "output gradients of linears", grads)


def _part(spec: RunSpec, linear: Linear, tokens: int) -> int:
    """Return the bytes of a linear's gathered tensor, of the model's width."""
    itemsize = 1 if _gathers_fp8(linear) else compute_itemsize(spec)
    return tokens * spec.model.hidden_size * itemsize


def _context_parallel(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    cp = spec.parallel.cp
    if cp == 1:
        return
    pairs = 2 * tokens_of(spec) * spec.model.kv_size // spec.parallel.tp
    turns = (cp - 1) * len(shape.layers) * _num_microbatches(spec)
    passes = 2 + recomputed_fraction(spec)
    sizes = {"keys and values": passes * compute_itemsize(spec), "their gradients": FP32}
    for what, itemsize in sizes.items():
        yield Message(
            axis="cp",
            operation="send",
            what=what,
            handed=int(turns * pairs * itemsize),
            num_ranks=cp,
        )


def _pipeline(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    parallel = spec.parallel
    pp = parallel.pp
    if pp == 1:
        return
    shards = parallel.tp if parallel.sequence_parallel else 1
    activation = tokens_of(spec) // shards * spec.model.hidden_size * residual_itemsize(spec)
    last = pp * parallel.pipeline.stages_per_rank - 1
    own = set(shape.stages)
    forward = sum(stage != last and stage + 1 not in own for stage in shape.stages)
    backward = sum(stage != 0 and stage - 1 not in own for stage in shape.stages)
    for what, times in (("activations", forward), ("gradients of activations", backward)):
        yield Message(
            axis="pp",
            operation="send",
            what=what,
            handed=times * activation * _num_microbatches(spec),
            num_ranks=pp,
        )
    if spec.model.share_embeddings_and_output_weights and shape.has_first != shape.has_last:
        vocab = spec.model.vocab_size // parallel.tp
        yield Message(
            axis="tied",
            operation="all_reduce",
            what="gradient of the tied embedding",
            handed=FP32 * vocab * spec.model.hidden_size,
            num_ranks=2,
        )


def _replicas(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    parallel = spec.parallel
    replicas = parallel.dp * parallel.cp
    if replicas == 1:
        return

    def message(operation: Operation, what: str, handed: float, ranks: int) -> Message:
        return Message(
            axis="data", operation=operation, what=what, handed=int(handed), num_ranks=ranks
        )

    params = shape.params
    elements = sum(param.elements for param in params)
    if parallel.fsdp is not None:
        yield from _fsdp(spec, shape, elements)
        return
    itemsize = ITEM_BYTES[parallel.grad_reduce_dtype]
    if not spec.optim.storage.is_plain:
        yield from _stored(spec, shape, itemsize, message)
    elif spec.optim.shards_states:
        weights = sum(param.elements * param.itemsize for param in params) / replicas
        yield message("reduce_scatter", "gradients", elements * itemsize, replicas)
        yield message("all_gather", "updated weights", weights, replicas)
    else:
        yield message("all_reduce", "gradients", elements * itemsize, replicas)


def _stored(
    spec: RunSpec,
    shape: RankShape,
    itemsize: int,
    message: Callable[[Operation, str, float, int], Message],
) -> Iterator[Message]:
    """Return FP8-LM's messages, with the scalars of each tensor's scale."""
    replicas, storage = spec.parallel.dp * spec.parallel.cp, spec.optim.storage
    linears = [param for param in shape.params if param.is_linear]
    scalars = FP32 * len(linears)
    in_fp8 = sum(param.elements for param in linears) if storage.main_grads != "fp32" else 0
    plain = sum(param.elements for param in shape.params) - in_fp8
    if in_fp8:
        yield message("all_to_all", "gradients in FP8", in_fp8, replicas)
        if storage.reduction == "fp32":
            yield message("all_gather", "scales of gradients", scalars, replicas)
        else:
            yield message("all_reduce", "scales of gradients", scalars, replicas)
            yield message("all_reduce", "counts of saturated gradients", scalars, replicas)
    if not spec.optim.shards_states:
        if in_fp8:
            yield message("all_gather", "summed gradients in FP8", in_fp8 / replicas, replicas)
            if storage.reduction == "fp32":
                yield message("all_reduce", "amaxes of gradients", scalars, replicas)
        yield message("all_reduce", "gradients", plain * itemsize, replicas)
        return
    yield message("all_to_all", "gradients", plain * itemsize, replicas)
    held, counts = [0] * replicas, [0] * replicas
    for param, owner in zip(shape.params, deal_whole(shape.params, replicas), strict=True):
        held[owner] += param.elements * param.is_linear
        counts[owner] += param.is_linear
    size = next((param.itemsize for param in linears), 0)
    if size == 1:
        yield message("all_reduce", "amaxes of weights in FP8", scalars, replicas)
    elif storage.main_params != "fp32":  # a weight is its own master
        size = ITEM_BYTES[storage.main_params]
        yield message("all_gather", "scales of weights", FP32 * max(counts), replicas)
    yield message("all_gather", "updated weights of linears", max(held) * size, replicas)
    rest = sum(param.elements * param.itemsize for param in shape.params if not param.is_linear)
    yield message("broadcast", "updated weights of the rest", rest, replicas)


def _fsdp(spec: RunSpec, shape: RankShape, elements: int) -> Iterator[Message]:
    fsdp = spec.parallel.fsdp
    assert fsdp is not None
    ranks, count = shard_ranks(spec), _num_microbatches(spec)
    in_layers = sum(
        linear.weight_elements + linear.out_features * linear.has_bias
        for layer in shape.layers
        for linear in linears_of_layer(spec, layer)
    )
    norm_parts = 2 if spec.model.normalization == "layernorm" else 1
    in_layers += 2 * norm_parts * spec.model.hidden_size * len(shape.layers)
    recipe = spec.precision.fp8
    sent_in_fp8 = (recipe is not None and recipe.params_in_fp8) or fsdp.torchao_in_fp8
    size = 1 if sent_in_fp8 else compute_itemsize(spec)
    times = 1 if fsdp.strategy == "grad" else 2
    gathered = times * in_layers * size + (elements - in_layers) * compute_itemsize(spec)
    grads = ITEM_BYTES[fsdp.grad_reduce_dtype]

    def message(operation: Operation, what: str, handed: float, group: int) -> Message:
        return Message(
            axis="data", operation=operation, what=what, handed=int(handed), num_ranks=group
        )

    yield message("all_gather", "weights", gathered * count / ranks, ranks)
    yield message("reduce_scatter", "gradients", elements * grads * count, ranks)
    nodes = spec.parallel.dp * spec.parallel.cp // ranks
    if nodes > 1:
        yield message("all_reduce", "gradients of nodes", elements * grads * count / ranks, nodes)


def _amaxes(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    """Return the amaxes of delayed scaling, 4 bytes a tensor and microbatch."""
    parallel, recipe = spec.parallel, spec.precision.fp8
    ranks = parallel.tp * parallel.cp * (1 if parallel.tp_only_amax_red else parallel.dp)
    if recipe is None or not recipe.reduce_amax or ranks == 1:
        return
    delayed = sum(
        linear.precision == "delayed"
        for layer in shape.layers
        for linear in linears_of_layer(spec, layer)
    )
    yield Message(
        axis="amax",
        operation="all_reduce",
        what="amaxes of delayed scaling",
        handed=3 * FP32 * delayed * _num_microbatches(spec),
        num_ranks=ranks,
    )
