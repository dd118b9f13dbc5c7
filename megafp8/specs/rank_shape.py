"""Say which part of a model one rank has: stages, layers, linears and parameters, without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

from megafp8.specs import GPTSpec, PrecisionSpec, RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.division import WAYS, Divided, Division, Member, padded_rows
from megafp8.specs.layer import LayerLinear, layer_spec
from megafp8.specs.optim import ITEM_BYTES, ParamKind, StorageName
from megafp8.specs.parallel import LARGEST_IMBALANCE, PipelineSpec, imbalance_of
from megafp8.specs.parameters import WORD, ParameterSpec, parameters_of
from megafp8.specs.precision import ModulePrecision
from megafp8.specs.recipes import HIGH_PRECISION, traits_of
from megafp8.specs.traits import GemmName, Traits

FP32, BF16 = 4, 2


@dataclass(frozen=True)
class LinearShape:
    """Describe one linear of a layer as one tensor-parallel rank holds it."""

    whole: LayerLinear  # as all ranks hold it together
    out_features: int  # of each of its weights
    in_features: int
    precision: ModulePrecision
    fp8_products: frozenset[GemmName]  # those of its products that run in FP8
    names: tuple[str, ...]  # of the linears of its weights

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
        """Return the number of elements of its weights."""
        return self.whole.experts * self.in_features * self.out_features

    @property
    def written(self) -> int:
        """Return the features that it writes of a token."""
        return self.whole.per_token(self.out_features)

    @property
    def read(self) -> int:
        """Return the features that it reads of a token."""
        return self.whole.per_token(self.in_features)

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what is equal for linears that compute and hold the same."""
        whole = replace(self.whole, name="", parts=())
        return whole, self.out_features, self.in_features, self.precision, self.fp8_products

    def weight_copies(self, products: Collection[GemmName]) -> int:
        """Return the bytes of FP8 copies of its weights that `products` read."""
        if self.traits is None:
            return 0
        each = self.traits.weight_bytes(self.out_features, self.in_features, products)
        return self.whole.experts * each


class BranchShape(NamedTuple):
    """Hold the linears of a layer's attention, MLP or experts, as one rank holds them."""

    columns: tuple[LinearShape, ...]  # those that begin it: they read the residual stream
    rows: tuple[LinearShape, ...]  # those that end it: they write to the residual stream

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """Return the linears in the order in which they run."""
        return self.columns + self.rows

    @property
    def written(self) -> int:
        """Return the features of a token that the linears write which begin it."""
        return sum(linear.written for linear in self.columns)

    @property
    def read(self) -> int:
        """Return the features of a token that the linears read which end it."""
        return sum(linear.read for linear in self.rows)


class LayerShape(NamedTuple):
    """Hold the linears of one layer as one rank holds them."""

    attention: BranchShape
    mlp: BranchShape  # of all tokens; without linears in a layer whose experts share none
    experts: BranchShape  # without linears in a layer without experts

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """Return the linears in the order in which they run."""
        return self.attention.linears + self.mlp.linears + self.experts.linears


@dataclass(frozen=True)
class Parameter:
    """Describe one parameter as one rank holds it, before ZeRO-1 or FSDP shards it."""

    listed: ParameterSpec
    rows: int  # the size of its first dim
    columns: int  # the product of its other dims; 1 without any
    itemsize: int  # bytes of an element of the parameter itself
    linear: LinearShape | None  # the linear of a layer whose weight it is
    is_tied_end: bool = False  # whether another pipeline rank updates a copy of it

    @property
    def elements(self) -> int:
        """Return the number of its elements."""
        return self.rows * self.columns

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a layer."""
        return isinstance(self.listed.place, int)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a layer's linear."""
        return self.linear is not None

    @property
    def is_of_expert(self) -> bool:
        """Whether it belongs to an expert."""
        return self.listed.linear is not None and self.listed.linear.is_expert

    @cached_property
    def kind(self) -> ParamKind:
        """Return what its optimizer depends on."""
        return ParamKind(self.is_linear, is_vector=len(self.listed.tensors[0][1]) < 2)

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

    @cached_property
    def params_of_layers(self) -> list[list[Parameter]]:
        """Return the parameters of each of its layers."""
        of_layer = groupby(filter(attrgetter("in_layer"), self.params), attrgetter("listed.place"))
        return [list(params) for _, params in of_layer]


def rank_shape(spec: RunSpec, pipeline_rank: int) -> RankShape:
    """Return the part of the model that the ranks of `pipeline_rank` have."""
    own = stages_of_rank(spec, pipeline_rank)
    stages = tuple((stage, layers_of_stage(spec, stage)) for stage in own)
    model = replace(spec.model, recompute=None)  # which changes nothing that a rank has
    parallel = spec.parallel
    last = num_stages(spec) - 1
    return _rank_shape(stages, last, model, spec.precision, parallel.tp, parallel.ep)


@lru_cache(maxsize=32)
def _rank_shape(
    stages: tuple[tuple[int, range], ...],
    last: int,
    model: GPTSpec,
    precision: PrecisionSpec,
    tp: int,
    ep: int,
) -> RankShape:
    """Return what stages have, given with their layers; a search asks for the same many times."""
    layers = tuple(layer for _, own in stages for layer in own)
    of_layers = _layer_shapes(model, precision, tp, ep)
    linears = tuple(linear for layer in layers for linear in of_layers[layer].linears)
    params = tuple(_parameters(stages, last, model, precision, tp, ep))
    numbers = tuple(stage for stage, _ in stages)
    return RankShape(numbers, layers, 0 in numbers, last in numbers, linears, params)


def layer_shapes(spec: RunSpec) -> tuple[LayerShape, ...]:
    """Return the linears of each layer of the whole model, as one rank holds them."""
    return _layer_shapes(spec.model, spec.precision, spec.parallel.tp, spec.parallel.ep)


@lru_cache(maxsize=16)
def _layer_shapes(
    model: GPTSpec, precision: PrecisionSpec, tp: int, ep: int
) -> tuple[LayerShape, ...]:
    """Return the linears of each layer; a search asks for those of one model many times."""

    def branch(linears: Sequence[LayerLinear]) -> BranchShape:
        shapes = [x for linear in linears for x in _shapes_of(linear, precision, tp, ep, model)]
        parts = ([x for x in shapes if x.whole.is_column == begins] for begins in (True, False))
        return BranchShape(*map(tuple, parts))

    layers = (layer_spec(model, layer) for layer in range(model.num_layers))
    return tuple(
        LayerShape(branch(x.attention), branch(x.mlp or ()), branch(x.experts or ()))
        for x in layers
    )


def _shapes_of(
    linear: LayerLinear, precision: PrecisionSpec, tp: int, ep: int, model: GPTSpec
) -> Iterator[LinearShape]:
    """Yield a linear; one with several weights once for each precision that rules give them.

    Each of `tp` ranks has the experts whole, for its own part of a microbatch's tokens; each of
    `ep` ranks has a part of them, for the tokens of all these ranks.
    """
    names = linear.names
    if linear.is_expert:
        linear = replace(linear, visits=linear.visits * ep / tp)
        names = names[: len(names) // ep]
    alike: dict[tuple[ModulePrecision, frozenset[GemmName]], list[str]] = {}
    for name in names:
        runs_under: ModulePrecision = HIGH_PRECISION
        products = frozenset[GemmName]()
        if (recipe := precision.fp8) is not None:
            backend = BACKENDS[precision.backend]
            runs_under = backend.precision_of(recipe, name, model.num_layers)
            products = frozenset(linear.products) - recipe.kept_high(runs_under, name)
        alike.setdefault((runs_under, products), []).append(name)
    for how, names in alike.items():
        whole = replace(linear, experts=len(names))
        yield LinearShape(whole, *linear.local_shape(tp), *how, tuple(names))


def kinds_of_layers(spec: RunSpec) -> tuple[int, ...]:
    """Return, for each layer of a model, the first layer whose products are those of this one."""
    return _kinds(spec.model, spec.precision, spec.parallel.tp, spec.parallel.ep)


@lru_cache(maxsize=16)
def _kinds(model: GPTSpec, precision: PrecisionSpec, tp: int, ep: int) -> tuple[int, ...]:
    first: dict[object, int] = {}
    return tuple(
        first.setdefault(tuple(linear.kind for linear in shape.linears), layer)
        for layer, shape in enumerate(_layer_shapes(model, precision, tp, ep))
    )


def kind_of_rank(spec: RunSpec, pipeline_rank: int) -> tuple[object, ...]:
    """Return what is equal for pipeline ranks that compute and send the same in a step."""
    stages, kinds = stages_of_rank(spec, pipeline_rank), kinds_of_layers(spec)
    layers = (tuple(kinds[layer] for layer in layers_of_stage(spec, s)) for s in stages)
    places = (stage - stages[0] for stage in stages)
    return 0 in stages, num_stages(spec) - 1 in stages, *places, *layers


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
    return _plain_itemsize(spec.precision)


def _plain_itemsize(precision: PrecisionSpec) -> int:
    return ITEM_BYTES[precision.compute] if precision.half_weights else FP32


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
    stages: Sequence[tuple[int, range]],
    last: int,
    model: GPTSpec,
    precision: PrecisionSpec,
    tp: int,
    ep: int,
) -> Iterator[Parameter]:
    """Yield the parameters of stages, given with their layers, in the model's order."""
    recipe, listed = precision.fp8, parameters_of(model)
    shapes = (x for shape in _layer_shapes(model, precision, tp, ep) for x in shape.linears)
    linears = {name: shape for shape in shapes for name in shape.names}
    in_fp8 = recipe is not None and recipe.params_in_fp8
    is_tied = model.share_embeddings_and_output_weights and not {0, last} <= dict(stages).keys()

    def is_held(param: ParameterSpec) -> bool:
        """Whether the rank has it: other ranks may have the other experts."""
        return param.linear is None or param.name.rpartition(".")[0] in linears

    def held(param: ParameterSpec) -> Parameter:
        rows, *columns = param.local_shape(tp)
        linear = None if param.linear is None else linears[param.name.rpartition(".")[0]]
        itemsize = _plain_itemsize(precision) if linear is None else ITEM_BYTES[precision.compute]
        itemsize = FP32 if param.in_fp32 else itemsize
        if not param.is_matrix:
            linear = None
        elif in_fp8 and linear is not None and linear.in_fp8:
            itemsize = 1
        is_tied_end = is_tied and param.name == WORD
        return Parameter(param, rows, prod(columns), itemsize, linear, is_tied_end)

    for stage, layers in stages:
        if stage == last and is_tied:
            yield held(replace(listed[WORD], place="last"))
        places = {*layers, "first" * (stage == 0), "last" * (stage == last)}
        there = (param for param in listed.values() if param.place in places)
        yield from (held(param) for param in there if is_held(param))


def shard_ranks(spec: RunSpec) -> int:
    """Return how many ranks share one replica's optimizer state, under ZeRO-1 or FSDP."""
    parallel = spec.parallel
    replicas = parallel.dp * parallel.cp
    if parallel.fsdp is not None and parallel.fsdp.strategy == "hybrid":
        return max(1, min(replicas, parallel.devices_per_node // parallel.tp))
    return replicas


def ranks_with(spec: RunSpec, param: Parameter) -> int:
    """Return how many ranks have a parameter as one rank holds it.

    All ranks of a pipeline stage have the same experts, of which `ep` ranks have parts.
    """
    replicas = shard_ranks(spec)
    return replicas * spec.parallel.tp // spec.parallel.ep if param.is_of_expert else replicas


def rows_with_history(spec: RunSpec, linears: Sequence[LinearShape]) -> int:
    """Return how many rows of one role the scale tables of these linears have.

    A table has rows of the experts of all ranks, so that each amax meets that of its own tensor.
    """
    return sum(
        linear.whole.experts * (spec.parallel.ep if linear.whole.is_expert else 1)
        for linear in linears
        if linear.has_history
    )


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


class Group(NamedTuple):
    """Hold parameters that the same ranks have, and where these own what of them, without FSDP."""

    params: list[Parameter]
    axis: Literal["data", "edp"]  # the mesh axis of the ranks that have the same parts
    num_ranks: int
    stride: int  # the difference of the numbers of neighbours among them
    division: Division


def groups_of(spec: RunSpec, params: Sequence[Parameter]) -> list[Group]:
    """Return the dense parameters, and experts where other ranks have these than those."""
    tp, ep, replicas = spec.parallel.tp, spec.parallel.ep, shard_ranks(spec)
    dense, experts = list[Parameter](), list[Parameter]()
    for param in params:
        (experts if param.is_of_expert and tp * ep > 1 else dense).append(param)
    groups = [Group(dense, "data", replicas, tp, division_of(spec, dense))]
    if experts:
        ranks = ranks_with(spec, experts[0])
        groups.append(Group(experts, "edp", ranks, ep, division_of(spec, experts, num_ranks=ranks)))
    return groups


def division_of(
    spec: RunSpec, params: Sequence[Parameter], way: str = "", num_ranks: int | None = None
) -> Division:
    """Return where gradients and weights lie and what each replica owns of them, without FSDP.

    There are `num_ranks` replicas, or those of dense parameters.
    """
    grad, tp = spec.optim.storage.main_grads, spec.parallel.tp
    members = tuple(
        Member(
            elements=param.elements,
            weight=stored_as(spec, param),
            grad=grad if param.is_linear else "fp32",
            is_linear=param.is_linear,
            is_sharded=(param.listed.divided is not None or param.is_of_expert) and tp > 1,
            is_tied=param.is_tied_end,
        )
        for param in params
    )
    size = spec.parallel.grad_bucket_bytes // FP32
    ranks = shard_ranks(spec) if num_ranks is None else num_ranks
    divided = Divided(members, ranks, size, spec.optim.storage.is_plain)
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
    if optim.needs_whole:
        return "tensors"
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
