"""Predict the time of a step by rooflines: products, memory passes, messages, pipeline bubble.

Every figure is a count (operations or bytes) divided by a rate. Counts follow from the run's spec.
Rates are the data sheet's peaks times the fractions in `Achieved`, which are assumptions and are
printed with the plan. Nothing is fitted to a published table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megafp8.plan.flops import gemm_flops_per_token
from megafp8.plan.hardware import Hardware
from megafp8.plan.pipeline import planned_order, run_times
from megafp8.plan.shape import Linear, linears_of_layer, rank_shape, recomputed_fraction, tokens_of
from megafp8.plan.traffic import Message, rank_traffic
from megafp8.specs import RunSpec
from megafp8.specs.precision import HIGH_PRECISION

OPTIMIZER_BYTES = 46
"""Bytes that a step's norm, clipping, AdamW and write-back move for each parameter that a rank
updates: gradients 4 read for the norm, 8 for clipping; AdamW reads 16 and writes 12; the write-back
reads 4 and writes 2."""
LAUNCHES = {None: 39, "delayed": 43, "tensorwise": 83, "rowwise": 87, "blockwise": 55}
"""Kernels that one layer of a GPT starts, forward and backward, counted on meta tensors by
tests/precision/kernels/test_layer_counts.py, which compares its counts with these."""


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
    optimizer: float
    gradients: float  # messages between replicas and stages that the backward pass does not hide
    bubble: float  # waiting in the pipeline
    host: float  # what the host's launches add where they take longer than the GPU's work

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def step_time(spec: RunSpec, hardware: Hardware, achieved: Achieved | None = None) -> StepTime:
    """Return the predicted time of one step; `spec.model.vocab_size` must be known."""
    rates = achieved or Achieved()
    ranks = [_rank_time(spec, rank, hardware, rates) for rank in range(spec.parallel.pp)]
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
    """Return the same run in BF16."""
    precision = replace(spec.precision, fp8=None, compute="bf16")
    return replace(spec, precision=precision)


def _passes_of(time: StepTime) -> float:
    return (
        time.linears + time.head + time.attention + time.passes + time.tensor_parallel + time.host
    )


def _bubble(spec: RunSpec) -> float:
    """Return the pipeline's waiting over the time of its passes."""
    parallel = spec.parallel
    if parallel.pp == 1:
        return 0.0
    count = spec.train.num_microbatches(parallel.dp)
    orders = [
        planned_order(parallel.pipeline, parallel.pp, rank, count) for rank in range(parallel.pp)
    ]
    num_stages = parallel.pp * parallel.pipeline.stages_per_rank
    if parallel.pipeline.stages_per_rank == 1:
        bubble = run_times(orders, num_stages).bubble
        return bubble / (1 - bubble)
    # Several stages a rank divide the filling of the pipeline (Narayanan et al. 2021, section 2.2);
    # zero bubble leaves a third of it (Qi et al. 2024, with equal times of F, I and W).
    filling = (parallel.pp - 1) / (count * parallel.pipeline.stages_per_rank)
    return filling / 3 if parallel.pipeline.schedule.endswith("ZeroBubble") else filling


def _rank_time(spec: RunSpec, rank: int, hardware: Hardware, achieved: Achieved) -> StepTime:
    shape = rank_shape(spec, rank)
    model, parallel = spec.model, spec.parallel
    count = spec.train.num_microbatches(parallel.dp)
    tokens = tokens_of(spec)
    again = recomputed_fraction(spec)
    bf16 = hardware.bf16_tflops * 1e12 * achieved.bf16
    fp8 = hardware.fp8_tflops * 1e12 * achieved.fp8
    memory = hardware.memory_gb_s * 1e9 * achieved.memory
    linears = sum(_linear_time(spec, linear, tokens, bf16, fp8, again) for linear in shape.linears)
    core = 4 * tokens * spec.data.seq_length / 2 * model.query_size / parallel.tp
    is_selective = model.recompute is not None and model.recompute.granularity == "selective"
    repeats = 3.5 + (1.0 if is_selective else again)  # backward has 5 products where forward has 2
    attention = core * len(shape.layers) * repeats
    head = 6 * tokens * model.hidden_size * model.vocab_size / parallel.tp * shape.has_last
    width = tokens * model.hidden_size * len(shape.layers)
    between = parallel.tp if parallel.sequence_parallel else 1
    passes = width * _pass_bytes(spec, between) * (1 + again / 3) / memory
    elements = sum(linear.weight_elements for linear in shape.linears)
    in_fp8 = sum(linear.weight_elements for linear in shape.linears if linear.in_fp8)
    weights = (count * 8 * elements + 4 * in_fp8) / memory
    messages = rank_traffic(spec, rank)
    exposed = sum(_seconds(spec, m, hardware, achieved) for m in messages if m.axis in ("tp", "cp"))
    hidden = sum(_seconds(spec, m, hardware, achieved) for m in messages if m.axis == "data")
    others = sum(_seconds(spec, m, hardware, achieved) for m in messages if m.axis == "tied")
    own = sum(param.elements for param in shape.params)
    if spec.optim.shards_states or parallel.fsdp is not None:
        own //= parallel.dp * parallel.cp
    products = count * (linears + attention / (hardware.bf16_tflops * 1e12 * achieved.attention))
    gpu = products + count * passes
    launches = _launches(spec) * len(shape.layers) * count
    host = launches * achieved.launch_microseconds * 1e-6
    return StepTime(
        linears=count * linears,
        head=count * head / bf16,
        attention=count * attention / (hardware.bf16_tflops * 1e12 * achieved.attention),
        passes=count * passes,
        weights=weights,
        tensor_parallel=exposed,
        optimizer=OPTIMIZER_BYTES * own / memory,
        gradients=max(0.0, hidden - gpu * 2 / 3) + others,
        bubble=0.0,
        host=max(0.0, host - gpu),
    )


def _linear_time(
    spec: RunSpec, linear: Linear, tokens: int, bf16: float, fp8: float, again: float
) -> float:
    """Return the seconds of a linear's three products for one microbatch."""
    flops = 2 * tokens * linear.weight_elements
    recipe = spec.precision.fp8
    if recipe is None or not linear.in_fp8:
        return flops * (3 + again) / bf16
    high = len(recipe.high_precision_gemms) or linear.precision == "rowwise_with_gw_hp"
    return flops * ((3 + again - high) / fp8 + high / bf16)


def _pass_bytes(spec: RunSpec, sequence_shards: int) -> float:
    """Return the bytes of memory passes of one layer, per token and unit of the model's width.

    BF16 tensors are read and written by norms (6 forward, 6 backward each), residual sums (6 each
    way), the activation (read and write forward; gradient, input and result backward), the packing
    of QKV's gradient and the sums of bias gradients. FP8 adds a read and two writes for each tensor
    that no other kernel casts, and recipes with scales of the moment a further read for each amax.
    """
    model = spec.model
    hidden, tp = model.hidden_size, spec.parallel.tp
    qkv, projection, fc1, fc2 = linears_of_layer(spec, 0)
    packed = qkv.out_features / hidden
    inner, gated = fc2.in_features / hidden, fc1.out_features / hidden
    query = projection.in_features / hidden
    total = (2 * 12 + 2 * 12) / sequence_shards  # norms and residual sums, forward and backward
    total += 2 * gated + 2 * inner + 2 * inner + 4 * gated  # activation
    total += 4 * packed  # QKV's gradient
    if model.bias:
        total += 2 * (gated + packed + 2 / sequence_shards)
    if model.position_embedding_type == "rope":
        total += 50 * (query + model.kv_size / tp / hidden)  # FP32 operations, one after another
    recipe = spec.precision.fp8
    if recipe is None or recipe.precision_of("layers.0.mlp.fc1") == HIGH_PRECISION:
        return total
    grads = 1 / sequence_shards * 2 + gated + packed
    total += 4 * query + 4 * grads - (2 * grads if model.bias else 0)
    reads = {"delayed": 0, "tensorwise": 1, "blockwise": 1}.get(recipe.name, 2)
    return total + reads * 2 * (2 / sequence_shards + query + inner + grads)


def _launches(spec: RunSpec) -> int:
    recipe = spec.precision.fp8
    name = None if recipe is None else recipe.name.removesuffix("_with_gw_hp")
    return LAUNCHES[name]


def _seconds(spec: RunSpec, message: Message, hardware: Hardware, achieved: Achieved) -> float:
    """Return the seconds of a message, over the network where its group spans nodes."""
    parallel = spec.parallel
    span = {
        "tp": parallel.tp,
        "cp": parallel.tp * parallel.cp,
        "data": parallel.tp * parallel.cp * parallel.dp,
    }.get(message.axis, parallel.world_size)
    is_local = span <= parallel.devices_per_node
    rate = hardware.node_gb_s if is_local else hardware.network_gb_s
    return message.on_wire / (rate * 1e9 * achieved.links)


def why_fp8_pays_little(spec: RunSpec, bf16: StepTime, fp8: StepTime) -> list[str]:
    """Return the reasons for which FP8 saves less than its products save, most important first."""
    total = fp8.total
    shares = {
        "the host starts kernels more slowly than the GPU runs them; larger microbatches or "
        "model.compile=block help": fp8.host / total,
        f"the model's width {spec.model.hidden_size} is small: casts, norms and activations take "
        "as long as products": fp8.passes / total if fp8.passes > 0.5 * fp8.linears else 0.0,
        f"sequences of {spec.data.seq_length} tokens: attention stays in BF16": (
            fp8.attention / total if fp8.attention > 0.3 * fp8.linears else 0.0
        ),
        f"a vocabulary of {spec.model.vocab_size}: the head stays in BF16": (
            fp8.head / total if fp8.head > 0.3 * fp8.linears else 0.0
        ),
        "messages between ranks take as long in BF16 and FP8": (
            (fp8.tensor_parallel + fp8.gradients) / total
        ),
        "the pipeline waits": fp8.bubble / total,
        "the optimizer's step": fp8.optimizer / total,
    }
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return [f"{why} ({share:.0%} of the step)" for why, share in ordered if share >= 0.1]
