"""Compute the bytes that one rank sends in a step, by mesh axis, from the run's spec alone.

`docs/reference/layouts.md` says what is sent and why. `handed` is what a rank hands to the
operation, as `traffic_bytes` of `summary.json` counts it; `on_wire` is what the rank sends with
ring algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from megafp8.specs import RunSpec
from megafp8.specs.division import ALIGNMENT, Division, ScatteredRow, rounded_up
from megafp8.specs.layer import num_experts
from megafp8.specs.optim import ITEM_BYTES
from megafp8.specs.rank_shape import (
    BF16,
    FP32,
    Group,
    LinearShape,
    Parameter,
    RankShape,
    compute_itemsize,
    groups_of,
    layers_with_recomputation,
    microbatch_tokens,
    num_microbatches,
    num_stages,
    rank_shape,
    residual_itemsize,
    rows_with_history,
    sent_in_fp8,
    sequence_shards,
    shard_ranks,
    way_of,
)
from megafp8.specs.traits import GemmName, Role

Operation = Literal["all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter", "send"]
Along = Literal["last", "first"]
_READERS: dict[tuple[Role, str], GemmName] = {
    ("input", "last"): "output",
    ("input", "first"): "grad_weight",
    ("weight", "last"): "output",
    ("weight", "first"): "grad_input",
    ("grad_output", "last"): "grad_input",
    ("grad_output", "first"): "grad_weight",
}
"""The product that sums along the last or the first dim of a tensor."""
AxisName = Literal["tp", "cp", "data", "edp", "ep", "nodes", "pp", "tied", "amax"]
COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Message:
    """Describe what one rank hands to one kind of operation in a step."""

    axis: AxisName
    operation: Operation
    what: str
    handed: int  # bytes
    num_ranks: int  # of the group
    stride: int = 1  # the difference of the numbers of neighbours in the group
    after_update: bool = False  # whether it brings updated weights, for which the ranks wait

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

    def ranks_on_node(self, devices_per_node: int) -> int:
        """Return how many ranks of the group share a node, where ranks are numbered by nodes."""
        return min(self.num_ranks, max(1, devices_per_node // self.stride))


def rank_traffic(spec: RunSpec, pipeline_rank: int) -> list[Message]:
    """Return what a rank of `pipeline_rank` sends in one step, without scalars such as the loss."""
    shape = rank_shape(spec, pipeline_rank)
    messages = [
        *_tensor_parallel(spec, shape),
        *_context_parallel(spec, shape),
        *_experts(spec, shape),
        *_pipeline(spec, shape),
        *_replicas(spec, shape),
        *_updates(spec, shape),
        *_amaxes(spec, shape),
    ]
    return [message for message in messages if message.handed]


def _tensor_parallel(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    tp, tokens, count = spec.parallel.tp, microbatch_tokens(spec), num_microbatches(spec)
    if tp == 1:
        return
    size = compute_itemsize(spec)
    whole = tokens * spec.model.hidden_size * size  # a microbatch's activations
    passes = 1 + layers_with_recomputation(spec, "full", shape.stages)
    divided = [linear for linear in shape.linears if not linear.whole.is_expert]
    columns = [linear for linear in divided if linear.whole.is_column]
    rows = [linear for linear in divided if not linear.whole.is_column]

    def message(operation: Operation, what: str, handed: float) -> Message:
        """Return a message of each microbatch, which hands over so many bytes."""
        return Message(
            axis="tp", operation=operation, what=what, handed=round(handed * count), num_ranks=tp
        )

    def own_bytes(param: Parameter) -> int:
        """Return the bytes of a gradient that this rank has; with FSDP it has its rows alone."""
        is_whole = spec.parallel.fsdp is None
        return FP32 * (param.elements if is_whole else param.shard_elements(shard_ranks(spec)))

    if shape.has_last:
        yield message("all_reduce", "the loss of each token", 3 * tokens * FP32)
        yield message("all_reduce", "gradient of the head's input", whole)
    if not spec.parallel.sequence_parallel:
        if shape.has_first:
            yield message("all_reduce", "embeddings", whole)
        yield message("all_reduce", "activations", len(rows) * whole * passes)
        yield message("all_reduce", "gradients of activations", len(columns) * whole)
        of_heads = sum(own_bytes(param) for param in shape.params if param.listed.is_of_heads)
        yield message("all_reduce", "gradients of norms of heads", of_heads / count)
        return
    if shape.has_first:
        yield message("reduce_scatter", "embeddings", whole)
        yield message("all_gather", "gradient of the embeddings", whole / tp)
    if shape.has_last:
        yield message("all_gather", "input of the head", whole / tp)
    dense = groups_of(spec, shape.params)[0]
    if spec.optim.storage.is_plain and dense.division.splits:  # its range of them, with padding
        flats = dense.division.grads
        own_flats = (x for x in flats if dense.params[x.rows[0]].listed.divided is None)
        once = sum(FP32 * x.elements // dense.num_ranks for x in own_flats)
    else:
        once = sum(own_bytes(param) for param in dense.params if param.listed.divided is None)
    yield message("all_reduce", "gradients of norms, biases and positions", once / count)
    yield message("reduce_scatter", "activations", len(rows) * whole * passes)
    yield message("reduce_scatter", "gradients of activations", len(columns) * whole)
    own = tokens // tp
    inputs = grads = 0.0
    for linear in columns:  # what the product over tokens reads is gathered in backward alone
        inputs += passes * _part(spec, linear, "input", "last", own)
        inputs += _part(spec, linear, "input", "first", own)
    for linear in rows:
        grads += _part(spec, linear, "grad_output", "last", own)
        if not _is_sent_once(spec, linear):
            grads += _part(spec, linear, "grad_output", "first", own)
    yield message("all_gather", "inputs of linears", inputs)
    yield message("all_gather", "output gradients of linears", grads)


def _part(spec: RunSpec, linear: LinearShape, role: Role, along: Along, tokens: int) -> int:
    """Return the bytes of a rank's tokens of a linear's tensor, of the model's width.

    They are those of the quantization that the product along the last or the first dim reads, with
    the scales that are not equal on all ranks.
    """
    width, traits = spec.model.hidden_size, linear.traits
    if traits is None or _READERS[role, along] not in linear.fp8_products:
        return tokens * width * compute_itemsize(spec)
    casts = traits.casts[role]
    scales = casts.last if along == "last" else casts.first
    if scales.is_one or (along == "first" and traits.agrees_on_columns):
        return tokens * width
    sizes = (tokens, width) if along == "last" else (width, tokens)
    return tokens * width + FP32 * scales.count(*sizes)


def _casts(spec: RunSpec, linear: LinearShape, role: Role) -> int:
    """Return how often a tensor is quantized for the two products that read it."""
    products = linear.fp8_products
    count = sum(_READERS[role, along] in products for along in ("last", "first"))
    traits = linear.traits
    return min(count, 1) if traits is not None and traits.casts[role].serves_both else count


def _is_sent_once(spec: RunSpec, linear: LinearShape) -> bool:
    """Whether one tensor serves both products that read an output gradient."""
    in_fp8 = [_READERS["grad_output", a] in linear.fp8_products for a in ("last", "first")]
    serves_both = linear.traits is not None and linear.traits.grad_output.serves_both
    return not any(in_fp8) or (all(in_fp8) and serves_both)


def _updates(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    """Return what ranks send each other so that optimizers update whole matrices.

    Under ZeRO-1 a rank gathers the parts of what it owns, under FSDP of one matrix in as many as
    there are ranks. The bytes are those of a rank with an equal share.
    """
    parallel = spec.parallel
    divides = spec.optim.shards_states or parallel.fsdp is not None
    ranks = shard_ranks(spec) if divides else 1
    for traits in spec.optim.named.optimizers:
        if not traits.needs_whole:
            continue
        params = [param for param in shape.params if spec.optim.owner(param.kind) is traits]
        message = partial(Message, what=f"{traits.name}'s updates", after_update=True)
        elements = sum(param.elements for param in params)
        if parallel.tp > 1 and traits.gathers_parts(spec.optim):
            handed, num_ranks = BF16 * (elements // ranks), parallel.tp
            yield message(axis="tp", operation="all_gather", handed=handed, num_ranks=num_ranks)
        if parallel.fsdp is not None and ranks > 1:
            of_shards = sum(param.shard_elements(ranks) for param in params)
            across = partial(message, axis="data", num_ranks=ranks, stride=parallel.tp)
            yield across(operation="all_gather", handed=BF16 * of_shards)
            yield across(operation="broadcast", handed=BF16 * elements)


def _context_parallel(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    cp = spec.parallel.cp
    if cp == 1:
        return
    pairs = 2 * microbatch_tokens(spec) * spec.model.kv_size // spec.parallel.tp
    turns = (cp - 1) * len(shape.layers) * num_microbatches(spec)
    selective = layers_with_recomputation(spec, "selective", shape.stages)  # sends them again, too
    passes = 2 + layers_with_recomputation(spec, "full", shape.stages) + selective
    sizes = {"keys and values": passes * compute_itemsize(spec), "their gradients": FP32}
    for what, itemsize in sizes.items():
        yield Message(
            axis="cp",
            operation="send",
            what=what,
            handed=round(turns * pairs * itemsize),
            num_ranks=cp,
            stride=spec.parallel.tp,
        )


def _experts(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    """Return what ranks send of rows of experts, with as many for each, and of their counts.

    Ranks that share sequences add up the counts of a balance loss, for one sequence or for each.
    """
    moe, parallel, ranks = spec.model.moe, spec.parallel, spec.parallel.ep
    number = sum(num_experts(spec.model, layer) > 0 for layer in shape.layers)
    if moe is None or not number:
        return
    passes = 1 + layers_with_recomputation(spec, "full", shape.stages)
    count = num_microbatches(spec)
    counts = 0.0
    if moe.router_loss != "none":
        sequences = spec.train.micro_batch_size if moe.router_loss == "seq_aux_loss" else 1
        counts += number * passes * moe.num_experts * sequences
    if moe.router_loss != "none" or moe.z_loss_coeff:
        counts += len(shape.stages)  # of a microbatch's tokens
    shared: tuple[tuple[AxisName, int, int], ...]
    shared = (("tp", parallel.tp, 1), ("cp", parallel.cp, parallel.tp))
    for axis, size, stride in shared if counts else ():
        if size > 1:
            yield Message(
                axis=axis,
                operation="all_reduce",
                what="counts of tokens",
                handed=round(COUNT_BYTES * counts * count),
                num_ranks=size,
                stride=stride,
            )
    if ranks == 1:
        return
    rows = microbatch_tokens(spec) // sequence_shards(spec) * moe.top_k
    row = spec.model.hidden_size * compute_itemsize(spec)
    for what, each in (("rows to experts", rows * (row + FP32)), ("rows of experts", rows * row)):
        handed = round(number * count * (passes + 1) * each)
        yield Message(axis="ep", operation="all_to_all", what=what, handed=handed, num_ranks=ranks)
    handed = round(number * count * passes * COUNT_BYTES * moe.num_experts)
    what = "counts of rows"
    yield Message(axis="ep", operation="all_gather", what=what, handed=handed, num_ranks=ranks)


def _pipeline(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    parallel = spec.parallel
    pp = parallel.pp
    if pp == 1:
        return
    each = parallel.world_size // pp  # ranks of a stage, which are neighbours
    activation = microbatch_tokens(spec) // sequence_shards(spec) * spec.model.hidden_size
    activation *= residual_itemsize(spec)
    last = num_stages(spec) - 1
    own_stages = set(shape.stages)
    forward = sum(stage != last and stage + 1 not in own_stages for stage in shape.stages)
    backward = sum(stage != 0 and stage - 1 not in own_stages for stage in shape.stages)
    for what, times in (("activations", forward), ("gradients of activations", backward)):
        yield Message(
            axis="pp",
            operation="send",
            what=what,
            handed=times * activation * num_microbatches(spec),
            num_ranks=pp,
            stride=each,
        )
    if spec.model.share_embeddings_and_output_weights and shape.has_first != shape.has_last:
        tied = next(param for param in shape.params if param.is_tied_end)
        elements = tied.elements
        if parallel.fsdp is not None:  # a replica sums its rows
            elements = tied.shard_elements(shard_ranks(spec))
        if spec.optim.storage.is_plain and way_of(spec) == "elements":  # a replica sums its range
            elements = rounded_up(elements, ALIGNMENT * shard_ranks(spec)) // shard_ranks(spec)
        yield Message(
            axis="tied",
            operation="all_reduce",
            what="gradient of the tied embedding",
            handed=FP32 * elements,
            num_ranks=2,
            stride=each * abs(_pipeline_rank_of(spec, last) - _pipeline_rank_of(spec, 0)),
        )


def _pipeline_rank_of(spec: RunSpec, stage: int) -> int:
    return spec.parallel.pipeline.rank_of(stage, spec.parallel.pp)


def _written(message: Message) -> Message:
    """Return a message as one of updated weights, which no backward pass hides."""
    return replace(message, after_update=True)


def _replicas(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    parallel = spec.parallel
    if parallel.fsdp is not None:
        if parallel.dp * parallel.cp > 1:
            yield from _fsdp(spec, shape)
        return
    for group in groups_of(spec, shape.params):
        if group.num_ranks > 1:
            yield from _sums_of(spec, group)


def _sums_of(spec: RunSpec, group: Group) -> Iterator[Message]:
    """Return what the ranks send that have the same parameters, of gradients and weights."""

    def message(operation: Operation, what: str, handed: float) -> Message:
        return Message(
            axis=group.axis,
            operation=operation,
            what=what,
            handed=round(handed),
            num_ranks=group.num_ranks,
            stride=group.stride,
        )

    itemsize = ITEM_BYTES[spec.parallel.grad_reduce_dtype]
    division = group.division
    plain = sum(places.elements for places in division.grads if places.kind == "fp32")
    if not spec.optim.storage.is_plain or way_of(spec) == "tensors":
        yield from _stored(spec, group, plain * itemsize, message)
    elif spec.optim.shards_states:
        yield message("reduce_scatter", "gradients", plain * itemsize)
        sent = _weight_bytes(division, is_padded=True)
        yield _written(message("all_gather", "updated weights", sent / group.num_ranks))
        in_fp8 = sum(sent_in_fp8(spec, param) for param in group.params)
        yield _written(message("all_reduce", "amaxes of FP8 weights", FP32 * in_fp8))
    else:
        yield message("all_reduce", "gradients", plain * itemsize)


def _weight_bytes(division: Division, *, is_padded: bool) -> int:
    """Return the bytes of the flat tensors of weights whose ranges are padded, or of the others."""
    chosen = [places for places in division.weights if places.is_padded == is_padded]
    return sum(ITEM_BYTES[places.kind] * places.elements for places in chosen)


def _stored(
    spec: RunSpec,
    group: Group,
    plain: int,
    message: Callable[[Operation, str, float], Message],
) -> Iterator[Message]:
    """Return FP8-LM's messages, with the scalars of each tensor's scale.

    They are also those of FP32 states that replicas own whole, with nothing in low precision.
    `plain` are the bytes of gradients in FP32, as they are sent.
    """
    replicas, storage, division = group.num_ranks, spec.optim.storage, group.division
    linears = [param for param in group.params if param.is_linear]
    scalars = FP32 * len(linears)
    in_fp8 = sum(places.elements for places in division.grads if places.kind != "fp32")
    adds_in_fp32 = bool(in_fp8) and storage.reduction == "fp32"
    if in_fp8:
        yield message("all_to_all", "gradients in FP8", in_fp8)
        if adds_in_fp32:
            yield message("all_gather", "scales of gradients", scalars)
        else:
            yield message("all_reduce", "scales of gradients", scalars)
            yield message("all_reduce", "counts of saturated gradients", scalars)
    if adds_in_fp32 and not division.owners:
        yield message("all_reduce", "amaxes of gradients", scalars)
    if not spec.optim.shards_states:
        yield message("all_gather", "summed gradients in FP8", in_fp8 / replicas)
        yield message("all_reduce", "gradients", plain)
        return
    yield message("all_to_all", "gradients", plain)
    num_in_fp8 = sum(param.itemsize == 1 for param in linears)
    num_own = len(linears) - num_in_fp8 if storage.main_params != "fp32" else 0
    if division.splits:  # one reduction for all weights
        yield message(
            "all_reduce", "amaxes of masters and moments", _amaxes_of_states(spec, group.params)
        )
        num_in_fp8, num_own = (len(linears) if n else 0 for n in (num_in_fp8, num_own))
        num_own = 0 if num_in_fp8 else num_own
    yield _written(message("all_reduce", "amaxes of weights in FP8", FP32 * num_in_fp8))
    yield _written(message("all_reduce", "scales of weights", FP32 * num_own))
    sent = _weight_bytes(division, is_padded=True) / replicas
    yield _written(message("all_gather", "updated weights", sent))
    rest = _weight_bytes(division, is_padded=False)
    yield _written(message("broadcast", "updated weights of the rest", rest))


def _amaxes_of_states(spec: RunSpec, params: Sequence[Parameter]) -> int:
    """Return the bytes of the amaxes on which ranks with parts of masters and states agree."""
    owners = {spec.optim.owner(param.kind) for param in params}
    return FP32 * len(params) * sum(traits.num_amaxes for traits in owners)


def _fsdp(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    """Yield what replicas send under FSDP; its shards are padded along the first dim.

    Weights and gradients are sent for each microbatch, amaxes once, with the step's update.
    """
    fsdp, tp = spec.parallel.fsdp, spec.parallel.tp
    assert fsdp is not None
    ranks, count = shard_ranks(spec), num_microbatches(spec)
    sums_in_fp8 = spec.optim.storage.main_grads != "fp32"
    gathered = sent_high = elements = num_in_fp8 = 0
    for param in shape.params:
        own_elements, is_in_fp8 = param.shard_elements(ranks), sent_in_fp8(spec, param)
        times = 2 if param.in_layer and fsdp.strategy != "grad" else 1  # again for its backward
        gathered += times * own_elements * (1 if is_in_fp8 else compute_itemsize(spec))
        elements += own_elements
        num_in_fp8 += is_in_fp8
        sent_high += own_elements * (not (param.in_layer and sums_in_fp8))
    size = ITEM_BYTES[fsdp.grad_reduce_dtype]

    def message(operation: Operation, what: str, handed: int, *, nodes: int = 1) -> Message:
        """Return a message within a group of shards, or across `nodes` between such groups."""
        return Message(
            axis="data" if nodes == 1 else "nodes",
            operation=operation,
            what=what,
            handed=handed,
            num_ranks=ranks if nodes == 1 else nodes,
            stride=tp if nodes == 1 else tp * ranks,
        )

    yield message("all_gather", "weights", gathered * count)
    yield message("reduce_scatter", "gradients", sent_high * ranks * size * count)
    if sums_in_fp8:
        sent = ranks * sum(row.num_bytes for row in _scattered_rows(shape, ranks))
        yield message("all_to_all", "gradients in FP8", sent * count)
    if not spec.optim.storage.is_plain:
        yield message(
            "all_reduce", "amaxes of masters and moments", _amaxes_of_states(spec, shape.params)
        )
    yield message("all_reduce", "amaxes of FP8 weights", FP32 * num_in_fp8)
    nodes = spec.parallel.dp * spec.parallel.cp // ranks
    if nodes > 1:
        yield message("all_reduce", "gradients of shards", elements * size * count, nodes=nodes)


def _scattered_rows(shape: RankShape, ranks: int) -> Iterator[ScatteredRow]:
    """Return what FSDP sends another rank of each layer's gradients, with linears in FP8."""
    for layer in shape.params_of_layers:
        sizes = [param.shard_elements(ranks) for param in layer]
        yield ScatteredRow.of(sizes, [param.is_linear for param in layer])


def _amaxes(spec: RunSpec, shape: RankShape) -> Iterator[Message]:
    """Return the reductions of amaxes, of 4 bytes each.

    `delayed` reduces those of a rank's inputs, weights and output gradients in each microbatch of
    each of its stages. Recipes that agree reduce the amax of a tensor of which tensor-parallel
    ranks have parts, before each cast.
    Those that agree on columns reduce an amax for each column of a tensor whose tokens are divided.
    """
    parallel, recipe, count = spec.parallel, spec.precision.fp8, num_microbatches(spec)
    ranks = parallel.tp * parallel.cp * (1 if parallel.tp_only_amax_red else parallel.dp)
    delayed = rows_with_history(spec, shape.linears)
    if recipe is not None and recipe.reduce_amax and ranks > 1:
        yield Message(
            axis="amax",
            operation="all_reduce",
            what="amaxes of delayed scaling",
            handed=3 * FP32 * delayed * count * len(shape.stages),
            num_ranks=ranks,
        )
    if parallel.tp == 1:
        return
    times, passes = 0.0, 1 + layers_with_recomputation(spec, "full", shape.stages)
    for linear in shape.linears:
        if linear.whole.is_expert:
            continue  # each of these ranks has whole tensors
        traits, num = linear.traits, linear.whole.experts
        if traits is not None and traits.agrees:
            of_input = parallel.sequence_parallel or not linear.whole.is_column
            of_grad = parallel.sequence_parallel or linear.whole.is_column
            times += num * _casts(spec, linear, "weight")
            times += num * count * of_input * passes * _casts(spec, linear, "input")
            times += num * count * of_grad * _casts(spec, linear, "grad_output")
        is_divided = parallel.sequence_parallel and "grad_weight" in linear.fp8_products
        if traits is not None and traits.agrees_on_columns and is_divided:
            each = passes if linear.whole.is_column else 1  # of inputs, or of output gradients
            times += num * count * each * spec.model.hidden_size
    yield Message(
        axis="tp",
        operation="all_reduce",
        what="amaxes of scales that ranks share",
        handed=round(FP32 * times),
        num_ranks=parallel.tp,
    )
