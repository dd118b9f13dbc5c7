"""Say which part of a model one rank has: stages, layers, linears and parameters, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megafp8.specs import GPTSpec, PrecisionSpec, RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.division import WAYS, Divided, Division, Member, padded_rows
from megafp8.specs.layer import LayerLinear, layer_linears
from megafp8.specs.optim import ITEM_BYTES, StorageName
from megafp8.specs.parallel import LARGEST_IMBALANCE, PipelineSpec, imbalance_of
from megafp8.specs.precision import ModulePrecision
from megafp8.specs.recipes import HIGH_PRECISION, traits_of
from megafp8.specs.traits import GemmName, Traits

FP32, BF16 = 4, 2


@dataclass(frozen=True)
class LinearShape:
    """Describe one linear of a layer as one tensor-parallel rank holds it."""

    whole: LayerLinear  # as all ranks hold it together
    out_features: int
    in_features: int
    has_bias: bool  # whether this rank holds a bias, of `out_features`
    precision: ModulePrecision
    fp8_products: frozenset[GemmName]  # those of its products that run in FP8

    @cached_property
    def traits(self) -> Traits | None:
        """Return the traits of its recipe; None in high precision."""
        return traits_of(self.precision)

    @cached_property
    def has_history(self) -> bool:
        """Whether its scales are known before its tensors."""
        return self.traits is not None and self.traits.has_history

    @cached_property
    def in_fp8(self) -> bool:
        """Whether its products run in FP8."""
        return self.precision != HIGH_PRECISION

    @property
    def weight_elements(self) -> int:
        """Return the number of elements of its weight."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Parameter:
    """Describe one parameter as one rank holds it, before ZeRO-1 or FSDP shards it."""

    rows: int  # the size of its first dim
    columns: int  # the product of its other dims; 1 without any
    itemsize: int  # bytes of an element of the parameter itself
    is_sharded: bool  # whether tensor-parallel ranks hold different parts
    linear: LinearShape | None = None  # the linear of a layer whose weight it is
    in_layer: bool = True  # whether it belongs to a layer
    is_tied_end: bool = False  # whether another pipeline rank updates a copy of it
    is_of_heads: bool = False  # whether its gradients are summed over the ranks that have heads

    @property
    def elements(self) -> int:
        """Return the number of its elements."""
        return self.rows * self.columns

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a layer's linear."""
        return self.linear is not None

    def shard_elements(self, num_shards: int) -> int:
        """Return the elements of FSDP's largest shard, along the first dim."""
        return padded_rows(self.rows, num_shards) * self.columns


@dataclass(frozen=True)
class RankShape:
    """Hold which part of the model a pipeline rank has."""

    stages: tuple[int, ...]  # their numbers in the whole pipeline
    layers: tuple[int, ...]  # their indices in the whole model
    has_first: bool  # whether it has the embedding
    has_last: bool  # whether it has the head
    linears: tuple[LinearShape, ...]
    params: tuple[Parameter, ...]

    @property
    def params_of_layers(self) -> list[list[Parameter]]:
        """Return the parameters of each of its layers."""
        inside = [param for param in self.params if param.in_layer]
        each = len(inside) // len(self.layers)
        return [inside[begin : begin + each] for begin in range(0, len(inside), each)]


def rank_shape(spec: RunSpec, pipeline_rank: int) -> RankShape:
    """Return the part of the model that the ranks of `pipeline_rank` have."""
    stages = stages_of_rank(spec, pipeline_rank)
    layers = tuple(layer for stage in stages for layer in layers_of_stage(spec, stage))
    of_layers = linears_of_layers(spec)
    linears = tuple(linear for layer in layers for linear in of_layers[layer])
    has_first, has_last = 0 in stages, num_stages(spec) - 1 in stages
    params = tuple(_parameters(spec, linears, has_first, has_last))
    return RankShape(tuple(stages), layers, has_first, has_last, linears, params)


def linears_of_layer(spec: RunSpec, layer: int) -> tuple[LinearShape, ...]:
    """Return the linears of one layer, as one rank holds them."""
    return linears_of_layers(spec)[layer]


def linears_of_layers(spec: RunSpec) -> tuple[tuple[LinearShape, ...], ...]:
    """Return the linears of each layer of the whole model, as one rank holds them."""
    return _linears(spec.model, spec.precision, spec.parallel.tp)


@lru_cache(maxsize=16)
def _linears(
    model: GPTSpec, precision: PrecisionSpec, tp: int
) -> tuple[tuple[LinearShape, ...], ...]:
    """Return the linears of each layer; a search asks for those of one model many times."""
    return tuple(
        tuple(_shape_of(linear, precision, tp, model) for linear in layer_linears(model, layer))
        for layer in range(model.num_layers)
    )


def _shape_of(
    linear: LayerLinear, precision: PrecisionSpec, tp: int, model: GPTSpec
) -> LinearShape:
    runs_under: ModulePrecision = HIGH_PRECISION
    products = frozenset[GemmName]()
    if (recipe := precision.fp8) is not None:
        backend = BACKENDS[precision.backend]
        runs_under = backend.precision_of(recipe, linear.name, model.num_layers)
        products = frozenset(linear.products) - recipe.kept_high(runs_under, linear.name)
    return LinearShape(linear, *linear.local_shape(tp), linear.has_bias, runs_under, products)


def kinds_of_layers(spec: RunSpec) -> tuple[int, ...]:
    """Return, for each layer of a model, the first layer whose products are those of this one."""
    return _kinds(spec.model, spec.precision, spec.parallel.tp)


@lru_cache(maxsize=16)
def _kinds(model: GPTSpec, precision: PrecisionSpec, tp: int) -> tuple[int, ...]:
    first: dict[object, int] = {}
    return tuple(
        first.setdefault(tuple((each.precision, each.fp8_products) for each in linears), layer)
        for layer, linears in enumerate(_linears(model, precision, tp))
    )


def kind_of_rank(spec: RunSpec, pipeline_rank: int) -> tuple[object, ...]:
    """Return what is equal for pipeline ranks that compute and send the same in a step."""
    stages, kinds = stages_of_rank(spec, pipeline_rank), kinds_of_layers(spec)
    layers = (tuple(kinds[layer] for layer in layers_of_stage(spec, s)) for s in stages)
    places = (stage - stages[0] for stage in stages)
    return 0 in stages, num_stages(spec) - 1 in stages, *places, *layers


def features_between(linears: Sequence[LinearShape], *, in_mlp: bool) -> tuple[int, int]:
    """Return the features that a layer's MLP, or else its attention, has between its linears.

    They are what the linears that begin it write (FC1, QKV), and what those that end it read (FC2,
    projection).
    """
    chosen = [linear for linear in linears if linear.whole.in_mlp == in_mlp]
    written = sum(linear.out_features for linear in chosen if linear.whole.is_column)
    return written, sum(linear.in_features for linear in chosen if not linear.whole.is_column)


def stages_of_rank(spec: RunSpec, pipeline_rank: int) -> list[int]:
    """Return the numbers of the stages that a pipeline rank holds."""
    pipeline, pp = spec.parallel.pipeline, spec.parallel.pp
    if pp == 1:
        return [0]
    return pipeline.stages_of(pipeline_rank, pp)


def num_stages(spec: RunSpec) -> int:
    """Return the number of pipeline stages over all ranks."""
    parallel = spec.parallel
    return 1 if parallel.pp == 1 else parallel.pp * parallel.pipeline.stages_per_rank


def layers_of_stage(spec: RunSpec, stage: int) -> range:
    """Return the indices of a stage's layers."""
    if spec.parallel.pp == 1:
        return range(spec.model.num_layers)
    return _layers(spec.parallel.pipeline, spec.model.num_layers, spec.parallel.pp)[stage]


@lru_cache(maxsize=64)
def _layers(pipeline: PipelineSpec, num_layers: int, pp: int) -> list[range]:
    """Return the layers of all stages; a search asks for those of one layout many times."""
    return pipeline.layers(num_layers, pp)


def compute_itemsize(spec: RunSpec) -> int:
    """Return the bytes of an element of the linears' weights and activations."""
    return ITEM_BYTES[spec.precision.compute]


def plain_itemsize(spec: RunSpec) -> int:
    """Return the bytes of an element of embeddings and norms."""
    return compute_itemsize(spec) if spec.precision.half_weights else FP32


def residual_itemsize(spec: RunSpec) -> int:
    """Return the bytes of an element of the residual stream."""
    return FP32 if spec.model.fp32_residual_connection else plain_itemsize(spec)


def microbatch_tokens(spec: RunSpec) -> int:
    """Return the tokens of one microbatch on one rank."""
    return spec.train.micro_batch_size * spec.data.seq_length // spec.parallel.cp


def num_microbatches(spec: RunSpec) -> int:
    """Return how many microbatches a rank runs in a step, after a ramp-up."""
    return spec.train.num_microbatches(spec.parallel.dp)


def sequence_shards(spec: RunSpec) -> int:
    """Return over how many ranks the tokens between linears are spread."""
    return spec.parallel.tp if spec.parallel.sequence_parallel else 1


def _parameters(
    spec: RunSpec, linears: Sequence[LinearShape], has_first: bool, has_last: bool
) -> Iterator[Parameter]:
    """Return a rank's parameters in the model's order."""
    model, tp = spec.model, spec.parallel.tp
    plain, compute = plain_itemsize(spec), compute_itemsize(spec)
    hidden, vocab = model.hidden_size, model.vocab_size // tp
    num = 2 if model.normalization == "layernorm" else 1
    norm = [Parameter(hidden, 1, plain, False)] * num
    of_heads = [Parameter(model.head_size, 1, plain, False, is_of_heads=True)] * (2 * num)
    is_tied = model.share_embeddings_and_output_weights
    is_tied_end = is_tied and has_first != has_last
    if has_first:
        yield Parameter(vocab, hidden, plain, True, in_layer=False, is_tied_end=is_tied_end)
        if model.position_embedding_type == "learned_absolute":
            positions = model.max_position_embeddings
            yield Parameter(positions, hidden, plain, False, in_layer=False)
    in_fp8 = spec.precision.fp8 is not None and spec.precision.fp8.params_in_fp8
    for linear in linears:
        if linear.whole.is_column:  # a norm comes before QKV, and another before FC1
            yield from norm
        itemsize = 1 if in_fp8 and linear.in_fp8 else compute
        yield Parameter(linear.out_features, linear.in_features, itemsize, True, linear)
        if linear.has_bias:
            yield Parameter(linear.out_features, 1, compute, linear.whole.is_column)
        if model.qk_layernorm and linear.whole.is_column and not linear.whole.in_mlp:
            yield from of_heads
    if has_last:
        if model.transformer_block_type != "post_ln":
            yield from (replace(param, in_layer=False) for param in norm)
        if not is_tied:
            yield Parameter(vocab, hidden, compute, True, in_layer=False)
        elif not has_first:
            yield Parameter(vocab, hidden, plain, True, in_layer=False, is_tied_end=True)


def shard_ranks(spec: RunSpec) -> int:
    """Return how many ranks share one replica's optimizer state, under ZeRO-1 or FSDP."""
    parallel = spec.parallel
    replicas = parallel.dp * parallel.cp
    if parallel.fsdp is not None and parallel.fsdp.strategy == "hybrid":
        return max(1, min(replicas, parallel.devices_per_node // parallel.tp))
    return replicas


def recomputed_fraction(spec: RunSpec, stages: Sequence[int] | None = None) -> float:
    """Return the fraction of layers whose whole forward pass is repeated in backward.

    The layers are those of the given stages, or of the whole model.
    """
    return layers_with_recomputation(spec, "full", stages)


def layers_with_recomputation(
    spec: RunSpec, granularity: str, stages: Sequence[int] | None = None
) -> float:
    """Return the fraction of layers of which backward recomputes `selective` or `full` parts.

    The layers are those of the given stages, or of the whole model.
    """
    chosen = range(num_stages(spec)) if stages is None else stages
    layers = [layers_of_stage(spec, stage) for stage in chosen]
    repeated = sum(
        recomputes(spec, granularity, place) for own in layers for place in range(len(own))
    )
    return repeated / max(1, sum(map(len, layers)))


def recomputes(spec: RunSpec, granularity: str, place: int) -> bool:
    """Whether backward recomputes `selective` or `full` parts of a stage's layer at `place`.

    The method `block` recomputes the first layers of each stage alone.
    """
    recompute = spec.model.recompute
    if recompute is None or recompute.granularity != granularity:
        return False
    return recompute.method == "uniform" or place < recompute.num_layers


def stored_as(spec: RunSpec, param: Parameter) -> StorageName:
    """Return the format of the memory that a parameter's weights occupy.

    A linear's weight is its own master under FP8-LM, unless it is in FP8 or masters are FP32.
    """
    main = spec.optim.storage.main_params
    if param.itemsize == 1:
        return "fp8"
    if param.is_linear and main != "fp32":
        return main
    return "fp32" if param.itemsize == FP32 else spec.precision.compute


def division_of(spec: RunSpec, params: Sequence[Parameter], way: str = "") -> Division:
    """Return where gradients and weights lie and what each replica owns of them, without FSDP."""
    grad, tp = spec.optim.storage.main_grads, spec.parallel.tp
    members = tuple(
        Member(
            elements=param.elements,
            weight=stored_as(spec, param),
            grad=grad if param.is_linear else "fp32",
            is_linear=param.is_linear,
            is_sharded=param.is_sharded and tp > 1,
            is_tied=param.is_tied_end,
        )
        for param in params
    )
    size = spec.parallel.grad_bucket_bytes // FP32
    divided = Divided(members, shard_ranks(spec), size, spec.optim.storage.is_plain)
    return _division(way or way_of(spec), divided)


@lru_cache(maxsize=64)
def _division(way: str, divided: Divided) -> Division:
    """Return a division; a search asks for that of one layout many times."""
    return WAYS[way].divide(divided)


def way_of(spec: RunSpec) -> str:
    """Return the way in which replicas divide masters and moments, by its name in `WAYS`.

    `shard_by="auto"` divides elements where whole tensors would be too uneven.
    """
    optim = spec.optim
    if not optim.shards_states:
        return "replicated"
    if optim.uses_muon:
        return "tensors"  # a matrix is orthogonalized whole
    if optim.storage.is_plain:
        return "elements"
    if optim.shard_by != "auto":
        return optim.shard_by
    imbalance = 0.0
    for stage in range(spec.parallel.pp):
        params = rank_shape(spec, stage).params
        owned = [0] * shard_ranks(spec)  # elements of each rank
        for places in division_of(spec, params, "tensors").grads:
            owned = [a + b for a, b in zip(owned, places.parts, strict=True)]
        imbalance = max(imbalance, imbalance_of(owned))
    return "elements" if imbalance > LARGEST_IMBALANCE else "tensors"


def sent_in_fp8(spec: RunSpec, param: Parameter) -> bool:
    """Whether replicas send each other this parameter as FP8 bytes."""
    recipe, fsdp = spec.precision.fp8, spec.parallel.fsdp
    if recipe is None or param.linear is None or not param.linear.in_fp8:
        return False
    return recipe.params_in_fp8 or (fsdp is not None and fsdp.torchao_in_fp8)


def copies_weights(spec: RunSpec) -> bool:
    """Whether linears keep FP8 copies of their weights for a whole step."""
    precision = spec.precision
    if precision.fp8 is None or precision.fp8.params_in_fp8:
        return False
    traits = BACKENDS[precision.backend]
    if spec.parallel.fsdp is not None:
        return traits.copies_gathered(precision.te_version)
    return traits.copies_weights


def num_moments(spec: RunSpec, param: Parameter) -> int:
    """Return the moments of each element: Adam's two, or Muon's momentum of a linear's weight."""
    return 1 if spec.optim.uses_muon and param.is_linear else 2
