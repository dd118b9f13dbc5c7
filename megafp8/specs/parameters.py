"""List a model's parameters: names, shapes, initial values, and how ranks divide them.

This is the one place that states them. Models, plan, checkpoints and the files of other libraries
read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from megafp8.specs.geometry import DENSE, EXPERTS, Piece, Sizes
from megafp8.specs.layer import LayerLinear, layer_spec, model_linears
from megafp8.specs.model import GPTSpec

WORD, POSITION, HEAD = "embedding.word.weight", "embedding.position.weight", "head.weight"


@dataclass(frozen=True)
class ParameterSpec:
    """Describe one parameter of a whole model; it has the rows of its logical tensors in turn."""

    name: str  # that of its logical tensor, unless it has several
    tensors: tuple[tuple[str, Sizes], ...]  # names, as in checkpoints, and shapes
    place: int | Literal["first", "last"]  # its layer, or the pipeline stage that has it
    std: float | None = None  # of its initial values; None where all of them are `value`
    value: float = 0.0
    divided: int | None = None  # the dim of its tensors along which ranks divide them, if they do
    linear: LayerLinear | None = None  # the linear of a layer whose weight or bias it is
    is_of_heads: bool = False  # whether it acts on a rank's heads: its gradient is a part of a sum
    in_fp32: bool = False  # whether it is in FP32 whatever the model's dtype: FP64 stays FP64

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a layer's linear."""
        return self.linear is not None and self.name.endswith(".weight")

    def local_shape(self, tp: int) -> Sizes:
        """Return the shape of what one of `tp` ranks holds."""
        shapes = [self.part(shape, tp) for _, shape in self.tensors]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def pieces(self, tp: int, rank: int, replica: int = 0, *, ep: int = 1) -> tuple[Piece, ...]:
        """Return which parts of its tensors rank `rank` of `tp` ranks holds; see `Piece`.

        `ep` ranks divide the experts, and this one has the parameter.
        """
        pieces, begin = [], 0
        for name, shape in self.tensors:
            part = self.part(shape, tp)
            offset = tuple(rank * size * (dim == self.divided) for dim, size in enumerate(part))
            local = (slice(begin, begin + part[0]), *(slice(0, size) for size in part[1:]))
            begin += part[0]
            group = self.group(tp, ep)
            pieces.append(Piece(name, shape, offset, local, replica, self.is_of_heads, group))
        return tuple(pieces)

    def group(self, tp: int, ep: int = 1) -> str:
        """Return the group of replicas that it belongs to.

        Where `tp` ranks divide matrices, each has whole experts, and other tokens for them than its
        neighbours; where `ep` ranks divide the experts, each has some of them. With neither the
        replicas of experts are those of all parameters.
        """
        is_expert = self.linear is not None and self.linear.is_expert
        return EXPERTS if is_expert and (tp > 1 or ep > 1) else DENSE

    def part(self, shape: Sizes, tp: int) -> Sizes:
        """Return the shape of a rank's part of a logical tensor."""
        if self.divided is None:
            return shape
        assert shape[self.divided] % tp == 0, f"{self.name}: {shape} over {tp} ranks"
        return tuple(size // (tp if dim == self.divided else 1) for dim, size in enumerate(shape))


@lru_cache(maxsize=16)
def parameters_of(model: GPTSpec) -> dict[str, ParameterSpec]:
    """Return a model's parameters by name, in its order; `model.vocab_size` must be known."""
    return {param.name: param for param in _listed(model)}


@lru_cache(maxsize=16)
def logical_shapes(model: GPTSpec) -> dict[str, Sizes]:
    """Return the shapes of all logical tensors of a model by their names."""
    return dict(tensor for param in parameters_of(model).values() for tensor in param.tensors)


def num_parameters(model: GPTSpec) -> int:
    """Return the number of elements of all parameters, without copies in other stages."""
    return sum(map(prod, logical_shapes(model).values()))


def num_active_parameters(model: GPTSpec) -> int:
    """Return how many of a model's parameters a token visits: of a layer's experts only a few."""
    total = num_parameters(model)
    for linear in model_linears(model):
        weight = linear.in_features * linear.out_features
        total -= weight * linear.experts - linear.per_token(weight)  # those of other experts
    return total


def _listed(model: GPTSpec) -> Iterator[ParameterSpec]:
    """Yield the parameters in the order of the model's modules."""
    width, std = model.hidden_size, model.init_method_std
    vocabulary: dict[str, Any] = {"shape": (model.vocab_size, width), "std": std, "divided": 0}
    if not model.share_embeddings_and_output_weights:
        yield _one(HEAD, place="last", **vocabulary)
    yield _one(WORD, place="first", **vocabulary)
    if model.position_embedding_type == "learned_absolute":
        yield _one(POSITION, (model.max_position_embeddings, width), place="first", std=std)
    for layer in range(model.num_layers):
        yield from _layer(model, layer)
    if model.transformer_block_type != "post_ln":
        yield from _norm(model, "final_norm", width, place="last")


def _layer(model: GPTSpec, layer: int) -> Iterator[ParameterSpec]:
    """Yield a layer's parameters; the norm of a branch comes before or after its linears."""
    name, width = f"layers.{layer}", model.hidden_size
    linears_of = layer_spec(model, layer)
    attention = [list(_linear(linear, layer)) for linear in linears_of.attention]
    mlp = [list(_linear(linear, layer)) for linear in linears_of.after_attention]
    if linears_of.experts is not None:
        shape = (linears_of.experts.fc1.experts, width)
        router = _one(f"{name}.mlp.router.weight", shape, place=layer, in_fp32=True)
        mlp.insert(0, [replace(router, std=model.init_method_std)])
    for part in ("query", "key") if model.qk_layernorm else ():
        norm, size = f"{name}.attention.{part}_norm", model.head_size
        attention[0] += _norm(model, norm, size, place=layer, is_of_heads=True)
    for branch, linears in (("attention", attention), ("mlp", mlp)):
        params = [param for linear in linears for param in linear]
        norms = [*_norm(model, f"{name}.{branch}_norm", width, place=layer)]
        is_post = model.transformer_block_type == "post_ln"
        yield from params + norms if is_post else norms + params


def _norm(model: GPTSpec, name: str, width: int, **more: Any) -> Iterator[ParameterSpec]:
    first = 0.0 if model.layernorm_zero_centered_gamma else 1.0
    yield _one(f"{name}.weight", (width,), value=first, **more)
    if model.normalization == "layernorm":
        yield _one(f"{name}.bias", (width,), **more)


def _linear(linear: LayerLinear, layer: int) -> Iterator[ParameterSpec]:
    """Yield the weights of a linear, each with its bias."""
    for index in range(linear.experts):
        name = linear.numbered(linear.name, index)
        parts = [(linear.numbered(part.name, index), part.out_features) for part in linear.parts]
        weights = tuple((f"{part}.weight", (out, linear.in_features)) for part, out in parts)
        divided = None if linear.is_expert else 0 if linear.is_column else 1
        yield ParameterSpec(
            f"{name}.weight", weights, layer, std=linear.std, divided=divided, linear=linear
        )
        biases = tuple((f"{part}.bias", (out,)) for part, out in parts)
        if linear.has_bias:
            divided_bias = 0 if linear.is_column and not linear.is_expert else None
            yield ParameterSpec(f"{name}.bias", biases, layer, divided=divided_bias, linear=linear)


def _one(name: str, shape: Sizes, **more: Any) -> ParameterSpec:
    """Return a parameter that is one logical tensor."""
    return ParameterSpec(name, ((name, shape),), **more)
