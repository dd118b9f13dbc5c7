"""Say which part of a model one rank has: stages, layers, linears and parameters, without torch."""

# T tokens of a microbatch on one rank: micro batch x sequence / context-parallel ranks

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megafp8.specs import RunSpec
from megafp8.specs.optim import ITEM_BYTES
from megafp8.specs.parallel import owners_of
from megafp8.specs.precision import HIGH_PRECISION, ModulePrecision

FP32 = 4


@dataclass(frozen=True)
class Linear:
    """Describe one linear of a layer as one tensor-parallel rank holds it."""

    name: str
    in_features: int
    out_features: int
    has_bias: bool  # whether this rank holds a bias, of `out_features`
    precision: ModulePrecision | None  # None: the run has no FP8

    @property
    def in_fp8(self) -> bool:
        """Whether its products run in FP8."""
        return self.precision not in (None, HIGH_PRECISION)

    @property
    def weight_elements(self) -> int:
        """Return the number of elements of its weight."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Parameter:
    """Describe one parameter as one rank holds it, before ZeRO-1 or FSDP shards it."""

    elements: int
    itemsize: int  # bytes of an element of the parameter itself
    is_sharded: bool  # whether tensor-parallel ranks hold different parts
    is_linear: bool = False  # whether it is the weight of a layer's linear


@dataclass(frozen=True)
class RankShape:
    """Hold which part of the model a pipeline rank has."""

    stages: tuple[int, ...]  # their numbers in the whole pipeline
    layers: tuple[int, ...]  # their indices in the whole model
    has_first: bool  # whether it has the embedding
    has_last: bool  # whether it has the head
    linears: tuple[Linear, ...]
    params: tuple[Parameter, ...]


def rank_shape(spec: RunSpec, pipeline_rank: int) -> RankShape:
    """Return the part of the model that the ranks of `pipeline_rank` have."""
    stages = stages_of(spec, pipeline_rank)
    layers = tuple(layer for stage in stages for layer in layers_of(spec, stage))
    linears = tuple(linear for layer in layers for linear in linears_of_layer(spec, layer))
    has_first, has_last = 0 in stages, num_stages(spec) - 1 in stages
    params = tuple(_parameters(spec, linears, len(layers), has_first, has_last))
    return RankShape(tuple(stages), layers, has_first, has_last, linears, params)


def linears_of_layer(spec: RunSpec, layer: int) -> tuple[Linear, Linear, Linear, Linear]:
    """Return QKV, the attention projection, FC1 and FC2 of one layer, as one rank holds them."""
    model, tp = spec.model, spec.parallel.tp
    recipe = spec.precision.fp8

    def linear(place: str, in_features: int, out_features: int) -> Linear:
        name = f"layers.{layer}.{place}"
        precision = None if recipe is None else recipe.precision_of(name)
        return Linear(name, in_features, out_features, model.bias, precision)

    hidden, ffn = model.hidden_size, model.ffn_hidden_size // tp
    query, pair = model.query_size // tp, 2 * max(model.kv_size // tp, model.head_size)
    return (
        linear("attention.qkv", hidden, query + pair),
        linear("attention.projection", query, hidden),
        linear("mlp.fc1", hidden, ffn * (2 if model.is_gated else 1)),
        linear("mlp.fc2", ffn, hidden),
    )


def stages_of(spec: RunSpec, pipeline_rank: int) -> list[int]:
    """Return the numbers of the stages that a pipeline rank holds."""
    pipeline, pp = spec.parallel.pipeline, spec.parallel.pp
    if pp == 1:
        return [0]
    num_stages = pp * pipeline.stages_per_rank
    return [s for s in range(num_stages) if pipeline.rank_of(s, pp) == pipeline_rank]


def num_stages(spec: RunSpec) -> int:
    """Return the number of pipeline stages over all ranks."""
    parallel = spec.parallel
    return 1 if parallel.pp == 1 else parallel.pp * parallel.pipeline.stages_per_rank


def layers_of(spec: RunSpec, stage: int) -> range:
    """Return the indices of a stage's layers."""
    if spec.parallel.pp == 1:
        return range(spec.model.num_layers)
    return spec.parallel.pipeline.layers(spec.model.num_layers, spec.parallel.pp)[stage]


def compute_itemsize(spec: RunSpec) -> int:
    """Return the bytes of an element of the linears' weights and activations."""
    return ITEM_BYTES[spec.precision.compute]


def plain_itemsize(spec: RunSpec) -> int:
    """Return the bytes of an element of embeddings and norms."""
    return compute_itemsize(spec) if spec.precision.half_weights else FP32


def residual_itemsize(spec: RunSpec) -> int:
    """Return the bytes of an element of the residual stream."""
    return FP32 if spec.model.fp32_residual_connection else plain_itemsize(spec)


def tokens_of(spec: RunSpec) -> int:
    """Return the tokens of one microbatch on one rank."""
    return spec.train.micro_batch_size * spec.data.seq_length // spec.parallel.cp


def sequence_shards(spec: RunSpec) -> int:
    """Return over how many ranks the tokens between linears are spread."""
    return spec.parallel.tp if spec.parallel.sequence_parallel else 1


def _parameters(
    spec: RunSpec, linears: Sequence[Linear], num_layers: int, has_first: bool, has_last: bool
) -> Iterator[Parameter]:
    model, tp = spec.model, spec.parallel.tp
    plain, compute = plain_itemsize(spec), compute_itemsize(spec)
    hidden, vocab = model.hidden_size, model.vocab_size // tp
    norm_parts = 2 if model.normalization == "layernorm" else 1
    is_post = model.transformer_block_type == "post_ln"
    if has_first:
        yield Parameter(vocab * hidden, plain, True)
        if model.position_embedding_type == "learned_absolute":
            yield Parameter(model.max_position_embeddings * hidden, plain, False)
    for _ in range(2 * num_layers * norm_parts):
        yield Parameter(hidden, plain, False)
    in_fp8 = spec.precision.fp8 is not None and spec.precision.fp8.params_in_fp8
    for linear in linears:
        itemsize = 1 if in_fp8 and linear.in_fp8 else compute
        yield Parameter(linear.weight_elements, itemsize, True, is_linear=True)
        if linear.has_bias:
            is_column = linear.name.endswith(("qkv", "fc1"))
            yield Parameter(linear.out_features, compute, is_column)
    if has_last:
        if not is_post:
            for _ in range(norm_parts):
                yield Parameter(hidden, plain, False)
        is_copy = model.share_embeddings_and_output_weights and not has_first
        if is_copy:
            yield Parameter(vocab * hidden, plain, True)
        elif not model.share_embeddings_and_output_weights:
            yield Parameter(vocab * hidden, compute, True)


def shard_ranks(spec: RunSpec) -> int:
    """Return how many ranks share one replica's optimizer state, under ZeRO-1 or FSDP."""
    parallel = spec.parallel
    replicas = parallel.dp * parallel.cp
    if parallel.fsdp is not None and parallel.fsdp.strategy == "hybrid":
        return max(1, min(replicas, parallel.devices_per_node // parallel.tp))
    return replicas


def recomputed_fraction(spec: RunSpec) -> float:
    """Return the fraction of layers whose whole forward pass is repeated in backward."""
    return layers_with_recomputation(spec, "full")


def layers_with_recomputation(spec: RunSpec, granularity: str) -> float:
    """Return the fraction of layers of which backward recomputes `selective` or `full` parts."""
    recompute = spec.model.recompute
    if recompute is None or recompute.granularity != granularity:
        return 0.0
    if recompute.method == "uniform":
        return 1.0
    stages = (len(layers_of(spec, stage)) for stage in range(num_stages(spec)))
    return sum(min(recompute.num_layers, layers) for layers in stages) / spec.model.num_layers


def deal_whole(params: Sequence[Parameter], ranks: int) -> list[int]:
    """Return the rank that owns each parameter under FP8-LM's ZeRO: linears first, by size."""
    held, owners = [0] * ranks, [0] * len(params)
    for kind in (True, False):
        rows = [row for row, param in enumerate(params) if param.is_linear == kind]
        dealt = owners_of([params[row].elements for row in rows], held)
        for row, owner in zip(rows, dealt, strict=True):
            owners[row] = owner
    return owners
