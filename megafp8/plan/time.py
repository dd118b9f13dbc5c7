"""Predict the time of a step by rooflines: products, memory passes, messages, pipeline bubble.

Every figure is a count (operations or bytes) divided by a rate. Counts follow from the run's spec.
Rates are the data sheet's peaks times the fractions in `Achieved`, which are assumptions and are
printed with the plan. Nothing is fitted to a published table.

The reductions of amaxes take no time here: each is 4 bytes a tensor, and a rank waits for it only
in the next pass of the same direction. No message has a latency.

Of experts the time is a lower bound. Each has as many rows as the others, and a product of few rows
takes at least as long as reading its operands: nothing says what small products reach. Those of
each expert are started for themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from megafp8.observe.flops import gemm_flops_per_token
from megafp8.plan.hardware import Hardware
from megafp8.plan.traffic import AxisName, Message, rank_traffic
from megafp8.specs import RunSpec
from megafp8.specs.optim import StorageSpec
from megafp8.specs.parallel import ZERO_BUBBLE_SCHEDULES
from megafp8.specs.precision import GEMMS
from megafp8.specs.rank_shape import (
    FP32,
    BranchShape,
    LayerShape,
    LinearShape,
    Parameter,
    compute_itemsize,
    kind_of_rank,
    kinds_of_layers,
    layer_shapes,
    layers_with_recomputation,
    microbatch_tokens,
    num_microbatches,
    rank_shape,
    ranks_with,
    sequence_shards,
    shard_ranks,
)
from megafp8.specs.recipes import RECIPES, find_recipe
from megafp8.specs.traits import Cost, Traits

FP8_WRITE_BACK_BYTES = 12
"""Bytes that storing an FP32 master as a weight kept in FP8 moves: it is rounded to BF16 (4 read, 2
written), cast in both orientations (2 and 2), and one of these is copied to its place (1 and 1)."""
LAUNCHES_IN_BF16 = (39, 49)
"""Kernels that one layer of a GPT and of Llama starts without FP8, forward and backward, counted on
meta tensors by tests/fp8/kernels/test_layer_counts.py, which compares its counts with these
and with those of the recipes (`Cost.launches`). Layers with a gated activation or with rotary
positions start as many as Llama's."""
FUSED_ACTIVATIONS = ("gelu", "gelu-tanh", "swiglu", "geglu", "geglu-tanh")
"""The activations that have a kernel which writes FP8 (`KINDS` of fp8/fused.py)."""
SUM_BYTES = 12
"""Bytes an element of a weight's gradient that each microbatch after a step's first one moves: the
sum reads two FP32 tensors and writes one (docs/evidence/performance.md)."""
Producer = Literal["norm", "activation"] | None
"""What computes the input of a linear, where it can cast it too."""
REPLICAS: tuple[AxisName, ...] = ("data", "edp", "nodes")
"""The mesh axes of messages between replicas."""
WITHIN_LAYERS: tuple[AxisName, ...] = ("tp", "cp", "ep")
"""The mesh axes of messages within layers."""
COPY_BYTES = 6
"""Bytes an element of a gradient that FSDP copies from BF16 to FP32."""
TRANSPOSE_BYTES = 2
"""Bytes an element that a weight kept in FP8 alone costs in each microbatch: it is transposed for
the product of the input gradient."""


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """Hold the fractions of peaks that kernels are assumed to reach, and the host's time."""

    bf16: float = 0.76  # of dense BF16; a square product of width 8192 on an H200 reaches 0.80
    fp8: float = 0.62  # of dense FP8: fast accumulation forward, precise in backward
    attention: float = 0.40  # of dense BF16, over forward and backward
    memory: float = 0.75  # of the memory's bandwidth
    links: float = 0.80  # of a link's bandwidth
    launch_microseconds: float = 20.0  # the host's time for one kernel, eager PyTorch


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Hold the predicted seconds of one step on the slowest pipeline rank."""

    linears: float
    head: float
    attention: float
    passes: float  # memory passes outside the products: casts, norms, activations, sums
    weights: float  # casts of weights and sums of weight gradients
    tensor_parallel: float  # messages between tensor- and context-parallel ranks, not hidden
    stages: float  # messages between pipeline stages, not hidden, and of the tied embedding
    optimizer: float
    gradients: float  # messages between replicas, of gradients or weights, not hidden
    bubble: float  # waiting in the pipeline
    host: float  # what the host's launches add where they take longer than the GPU's work

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def step_time(spec: RunSpec, hardware: Hardware, achieved: Achieved | None = None) -> StepTime:
    """Return the predicted time of one step; `spec.model.vocab_size` must be known."""
    rates = achieved or Achieved()
    unlike = {kind_of_rank(spec, rank): rank for rank in reversed(range(spec.parallel.pp))}
    ranks = [_rank_time(spec, rank, hardware, rates) for rank in sorted(unlike.values())]
    slowest = max(ranks, key=lambda time: time.total)
    return replace(slowest, bubble=_bubble(spec) * _passes_of(slowest))


def tokens_per_step(spec: RunSpec) -> int:
    """Return the tokens of one step over all ranks."""
    return spec.train.global_batch_size * spec.data.seq_length


def model_flops_utilization(spec: RunSpec, seconds: float, hardware: Hardware) -> float:
    """Return model FLOPs (causal attention) over the BF16 peak of all ranks in `seconds`."""
    flops = gemm_flops_per_token(spec.model, "causal", seq_length=spec.data.seq_length).total
    peak = hardware.bf16_tflops * 1e12 * spec.parallel.world_size
    return flops * tokens_per_step(spec) / (seconds * peak)


def without_fp8(spec: RunSpec) -> RunSpec:
    """Return the same run in BF16, with gradients, master weights and moments in FP32."""
    precision = replace(spec.precision, fp8=None, schedule=(), compute="bf16")
    optim = replace(spec.optim, storage=StorageSpec(), shards_grads=False, shard_by="tensors")
    parallel = spec.parallel
    if parallel.fsdp is not None:
        parallel = replace(parallel, fsdp=replace(parallel.fsdp, torchao_in_fp8=False))
    return replace(spec, precision=precision, optim=optim, parallel=parallel)


def _passes_of(time: StepTime) -> float:
    """Return the seconds of all microbatches' passes, for whose first and last ones ranks wait."""
    compute = time.linears + time.head + time.attention + time.passes + time.weights
    return compute + time.tensor_parallel + time.stages + time.host


def _bubble(spec: RunSpec) -> float:
    """Return the pipeline's waiting over the time of its passes.

    Several stages a rank divide the filling of the pipeline (Narayanan et al. 2021, section 2.2);
    zero bubble leaves a third of it (Qi et al. 2024, with equal times of F, I and W).
    """
    pipeline, pp = spec.parallel.pipeline, spec.parallel.pp
    filling = (pp - 1) / (num_microbatches(spec) * pipeline.stages_per_rank)
    return filling / 3 if pipeline.schedule in ZERO_BUBBLE_SCHEDULES else filling


def _rank_time(spec: RunSpec, rank: int, hardware: Hardware, achieved: Achieved) -> StepTime:
    """Return the seconds of a pipeline rank's step, without waiting for others (`bubble`)."""
    shape = rank_shape(spec, rank)
    model, parallel = spec.model, spec.parallel
    count, tokens = num_microbatches(spec), microbatch_tokens(spec)
    again = layers_with_recomputation(spec, "full", shape.stages)
    again_core = layers_with_recomputation(spec, "selective", shape.stages)
    bf16 = hardware.bf16_tflops * 1e12 * achieved.bf16
    fp8 = hardware.fp8_tflops * 1e12 * achieved.fp8
    memory = hardware.memory_gb_s * 1e9 * achieved.memory
    shapes, every = layer_shapes(spec), kinds_of_layers(spec)
    kinds = [every[layer] for layer in shape.layers]
    times = {
        kind: sum(
            _experts_time(spec, linear, bf16, fp8, again, memory)
            if linear.whole.is_expert
            else _linear_time(linear, tokens, bf16, fp8, again)
            for linear in shapes[kind].linears
        )
        for kind in set(kinds)
    }
    linears = sum(times[kind] for kind in kinds)
    core = 4 * tokens * spec.data.seq_length / 2 * model.query_size / parallel.tp
    repeats = 3.5 + again + again_core  # backward has 5 products where forward has 2
    attention = count * core * len(shape.layers) * repeats
    attention /= hardware.bf16_tflops * 1e12 * achieved.attention
    head = 6 * tokens * model.hidden_size * model.vocab_size / parallel.tp * shape.has_last
    width = tokens * model.hidden_size
    bytes_of_layer = {kind: _pass_bytes(spec, shapes[kind]) for kind in set(kinds)}
    bytes_of_layers = sum(bytes_of_layer[kind] for kind in kinds)
    passes = width * bytes_of_layers * (1 + again / 3) / memory
    weights = _weight_bytes(spec, shape.linears) / memory
    seconds: dict[tuple[AxisName, bool], float] = defaultdict(float)
    for message in rank_traffic(spec, rank):
        took = _seconds(message, parallel.devices_per_node, hardware, achieved)
        seconds[message.axis, message.after_update] += took
    divides = spec.optim.shards_states or parallel.fsdp is not None
    update = orthogonal = 0.0
    for param in shape.params:
        owners = ranks_with(spec, param) if divides else 1
        each = spec.optim.owner(param.kind).update_bytes + write_back_bytes(spec, param.itemsize)
        update += param.elements * each / owners
        orthogonal += update_flops(spec, param) / owners / bf16
    gpu = count * (linears + passes) + attention
    launches_of_layer = {kind: _launches(spec, shapes[kind].linears) for kind in set(kinds)}
    launches = count * sum(launches_of_layer[kind] for kind in kinds) * (1 + again / 3)
    host = launches * achieved.launch_microseconds * 1e-6
    if spec.train.cuda_graph:
        host = 0.0  # a graph starts all kernels of a microbatch at once
    return StepTime(
        linears=count * linears,
        head=count * head / bf16,
        attention=attention,
        passes=count * passes,
        weights=weights,
        tensor_parallel=sum(seconds[axis, False] for axis in WITHIN_LAYERS),
        stages=seconds["pp", False] + seconds["tied", False],
        optimizer=update / memory + orthogonal + seconds["tp", True],
        gradients=_not_hidden(spec, seconds, gpu),
        bubble=0.0,
        host=max(0.0, host - gpu),
    )


def update_flops(spec: RunSpec, param: Parameter) -> int:
    """Return the operations of matrix products with which a step updates a parameter.

    Query, key and value are matrices of their own.
    """
    if param.linear is None:
        return 0
    traits = spec.optim.owner(param.kind)
    ranks = 1 if traits.gathers_parts(spec.optim) else spec.parallel.tp
    shapes = (param.listed.part(shape, ranks) for _, shape in param.listed.tensors)
    return sum(traits.flops(spec.optim, *shape) for shape in shapes)


def write_back_bytes(spec: RunSpec, itemsize: int) -> int:
    """Return the bytes an element that rounding an FP32 master into its weight moves.

    `itemsize` are the bytes of the weight's elements. An FP32 weight is its own master, except
    where ZeRO-1 sends it; FSDP's parameters are the masters.
    """
    if spec.parallel.fsdp is not None:
        return 0
    if itemsize == FP32 and not spec.optim.shards_states:
        return 0
    return FP8_WRITE_BACK_BYTES if itemsize == 1 else FP32 + itemsize


def _not_hidden(spec: RunSpec, seconds: Mapping[tuple[AxisName, bool], float], gpu: float) -> float:
    """Return the seconds for which a rank waits for other replicas.

    Without FSDP a bucket is sent once its last gradient of a step was added, so beside the last
    microbatch's backward pass, and updated weights are waited for. FSDP sends in all microbatches.
    With CUDA graphs all sums begin after the last replay, so that nothing runs beside them. `gpu`
    are the seconds of all microbatches' passes, of which backward takes two thirds.
    """
    count = 1 if spec.parallel.fsdp is not None else num_microbatches(spec)
    sums = sum(seconds.get((axis, False), 0.0) for axis in REPLICAS)
    written = sum(seconds.get((axis, True), 0.0) for axis in REPLICAS)
    if spec.train.cuda_graph:
        return sums + written
    return max(0.0, sums - gpu * 2 / 3 / count) + written


def _linear_time(linear: LinearShape, tokens: int, bf16: float, fp8: float, again: float) -> float:
    """Return the seconds of a linear's three products for one microbatch.

    `again` is the fraction of the linears of which recomputation repeats the forward product.
    """
    in_fp8 = linear.fp8_products
    times = {gemm: 1 + again * (gemm == "output") for gemm in GEMMS}
    rates = {gemm: fp8 if gemm in in_fp8 else bf16 for gemm in GEMMS}
    flops = 2 * tokens * linear.read * linear.out_features
    return sum(flops * times[gemm] / rates[gemm] for gemm in GEMMS)


def _experts_time(
    spec: RunSpec, linear: LinearShape, bf16: float, fp8: float, again: float, memory: float
) -> float:
    """Return what `_linear_time` does, for one linear of all experts with equally many rows each.

    A product takes the longer of its operations and, in bytes a second, of its operands and result.
    """
    out, into, size = linear.out_features, linear.in_features, compute_itemsize(spec)
    rows = linear.whole.per_token(microbatch_tokens(spec)) / linear.whole.experts
    matrices = rows * into, rows * out, into * out
    results = {"output": (rows * out, size), "grad_input": (rows * into, size)}
    total = 0.0
    for gemm in GEMMS:
        in_fp8 = gemm in linear.fp8_products
        result, itemsize = results.get(gemm, (into * out, FP32))
        moved = (sum(matrices) - result) * (1 if in_fp8 else size) + result * itemsize
        operations = 2 * rows * into * out / (fp8 if in_fp8 else bf16)
        total += max(operations, moved / memory) * (1 + again * (gemm == "output"))
    return linear.whole.experts * total


def _pass_bytes(spec: RunSpec, shape: LayerShape) -> float:
    """Return the bytes of one layer's memory passes, per token and unit of the model's width.

    Products and attention's kernels are not counted. In BF16 the
    two norms move 4 bytes forward and 6 backward, the two residual sums 6 each way, and the
    gradients of queries, keys and values are packed. Rotary positions read and write queries and
    keys each way. Casts are in `_cast_bytes`.
    """
    model = spec.model
    between = 1 / sequence_shards(spec)  # of the tokens: what norms and residual sums work on
    packed, query, made, inner = (
        features / model.hidden_size
        for branch in (shape.attention, shape.mlp)
        for features in (branch.written, branch.read)
    )
    total = 2 * (4 + 6 + 6 + 6) * between
    is_rotary = model.position_embedding_type == "rope"
    in_one = all(linear.has_history for linear in shape.attention.columns)
    if not in_one:  # otherwise the kernel that casts QKV's gradient packs and turns it as well
        total += 4 * packed
    total += is_rotary * (4 if in_one else 8) * (query + packed) / 2  # of queries and keys
    has_kernel = all(linear.has_history for linear in shape.mlp.rows)
    has_kernel = has_kernel and model.activation in FUSED_ACTIVATIONS
    if model.is_gated and not has_kernel:  # activation and product are two operations
        total += 36 * inner
    else:  # it reads and writes; backward reads the gradient and the input, and writes
        total += 4 * inner + 6 * made
    total += _pass_bytes_of_experts(spec, shape.experts)
    casts: float = 0
    for linear in shape.linears:
        if linear.whole.is_expert:
            widths = (width / model.hidden_size for width in (linear.read, linear.written))
            casts += _cast_bytes(linear, *widths, producer=None)
            continue
        by_kernel = has_kernel and linear in shape.mlp.linears
        if linear.whole.is_column:
            width = 0 if by_kernel else linear.written / model.hidden_size
            casts += _cast_bytes(linear, between, width, producer="norm")
        else:
            width = linear.read / model.hidden_size
            producer: Producer = "activation" if by_kernel else None
            casts += _cast_bytes(linear, width, between, producer=producer)
    return total + casts


def _pass_bytes_of_experts(spec: RunSpec, branch: BranchShape) -> float:
    """Return what `_pass_bytes` does, for what happens to rows of experts but for casts.

    Each way, rows are copied from tokens (4 bytes), added up in FP32 (14), and joined from those of
    each expert (4). The weights multiply in FP32: 12 bytes forward and 34 backward.
    """
    width = spec.model.hidden_size
    outer = sum(linear.read for linear in branch.columns) / width
    inner, made = branch.read / width, branch.written / width
    activation = 36 * inner if spec.model.is_gated else 4 * inner + 6 * made
    return 2 * (4 + 14 + 4) * outer + 4 * (made + inner) + (12 + 34) * inner + activation


def _cast_bytes(
    linear: LinearShape,
    width_in: float,
    width_out: float,
    *,
    producer: Producer,
) -> float:
    """Return the bytes of a linear's casts and of the sums for a bias, as `_pass_bytes` counts.

    A cast reads BF16 and writes FP8 in two orientations. `tensorwise` and `rowwise` read the tensor
    once more before, for its amaxes. Under `delayed` the norm or activation before a linear writes
    its FP8 input instead of BF16; such a norm sums the residual stream as well. The activation's
    backward pass casts FC1's gradient. The casts of `delayed` and `tensorwise` sum output gradients
    over tokens for the bias; otherwise that is a pass of its own.
    """
    bias = 2 * width_out * linear.whole.has_bias
    traits = linear.traits
    if traits is None:
        return bias
    each = traits.cost.bytes_of_cast
    of_input = {"norm": -2, "activation": 0, None: each}[producer] if linear.has_history else each
    return of_input * width_in + each * width_out + bias * (not traits.cost.sums_columns)


def _weight_bytes(spec: RunSpec, linears: Sequence[LinearShape]) -> float:
    """Return the bytes by which a step casts weights and sums their gradients over microbatches.

    FSDP's weights are cast for each of their two uses in a microbatch; each of its gradients is
    copied from BF16 to FP32 to be sent, and only a rank's shard is summed.
    """
    count, recipe, is_sharded = num_microbatches(spec), spec.precision.fp8, spec.parallel.fsdp
    total = 0.0
    for linear in linears:
        if linear.in_fp8 and recipe is not None and recipe.params_in_fp8:
            each = float(count * TRANSPOSE_BYTES)
        else:
            cast = 0 if linear.traits is None else linear.traits.cost.bytes_of_cast
            each = float(cast * (2 * count if is_sharded else 1))
        if is_sharded:
            each += count * COPY_BYTES + (count - 1) * SUM_BYTES / shard_ranks(spec)
        else:
            each += (count - 1) * SUM_BYTES
        total += each * linear.weight_elements
    return total


def _launches(spec: RunSpec, linears: Sequence[LinearShape]) -> int:
    """Return the kernels that a layer starts, by the linear that needs most.

    Those of each expert's linears are its three products, and the casts of what they read.
    """
    model = spec.model
    is_llama = model.is_gated or model.position_embedding_type == "rope"
    experts = (linear for linear in linears if linear.whole.is_expert)
    more = sum(linear.whole.experts * (len(GEMMS) + 2 * linear.in_fp8) for linear in experts)
    return max(_launches_with(linear.traits)[is_llama] for linear in linears) + more


def _launches_with(traits: Traits | None) -> tuple[int, int]:
    """Return the kernels that a layer of a GPT and of Llama starts under one recipe."""
    if traits is None:
        return LAUNCHES_IN_BF16
    if traits.cost.launches != Cost().launches:
        return traits.cost.launches
    counted = [find_recipe(name).traits.cost.launches for name in RECIPES]
    return max(gpt for gpt, _ in counted), max(llama for _, llama in counted)


def _seconds(
    message: Message, devices_per_node: int, hardware: Hardware, achieved: Achieved
) -> float:
    """Return the seconds of a message.

    A ring between nodes runs over the network adapters of all its ranks on a node, but no faster
    than the links within the node. A send uses one adapter, unless the whole group is on one node.
    """
    members = message.ranks_on_node(devices_per_node)
    rate = hardware.node_gb_s
    if members < message.num_ranks:
        adapters = 1 if message.operation == "send" else members
        rate = min(rate, adapters * hardware.network_gb_s)
    return message.on_wire / (rate * 1e9 * achieved.links)


def why_fp8_pays_little(spec: RunSpec, bf16: StepTime, fp8: StepTime) -> list[str]:
    """Return the reasons for which FP8 saves less than its products save, most important first."""
    total = fp8.total
    shares = {
        "the host starts kernels more slowly than the GPU runs them; larger microbatches "
        "help": fp8.host / total,
        f"the model's width {spec.model.hidden_size} is small: casts, norms and activations take "
        "as long as products": fp8.passes / total if fp8.passes > 0.5 * fp8.linears else 0.0,
        f"sequences of {spec.data.seq_length} tokens: attention stays in BF16": (
            fp8.attention / total if fp8.attention > 0.3 * fp8.linears else 0.0
        ),
        f"a vocabulary of {spec.model.vocab_size}: the head stays in BF16": (
            fp8.head / total if fp8.head > 0.3 * fp8.linears else 0.0
        ),
        "messages between ranks": ((fp8.tensor_parallel + fp8.stages + fp8.gradients) / total),
        "the pipeline waits": fp8.bubble / total,
        "the optimizer's step": fp8.optimizer / total,
    }
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return [f"{why} ({share:.0%} of the step)" for why, share in ordered if share >= 0.1]
