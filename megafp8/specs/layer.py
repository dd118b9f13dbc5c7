"""List the linears of a transformer layer by name: what model, plan and checks read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from megafp8.specs.model import GPTSpec
from megafp8.specs.moe import MoESpec
from megafp8.specs.precision import GEMMS
from megafp8.specs.traits import GemmName

_ANY_SIZES = GPTSpec(
    num_layers=1, hidden_size=1, ffn_hidden_size=1, num_attention_heads=1, vocab_size=1,
    max_position_embeddings=1, init_method_std=0.0, use_scaled_init_method=False,
    hidden_dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0, layernorm_epsilon=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class SubLinear:
    """Name one logical linear (query, key, value, …), which may share its weight with others."""

    name: str
    out_features: int


@dataclass(frozen=True)
class LayerLinear:
    """Describe one linear of a layer by its logical (unsharded) sizes.

    `parts` are the logical linears whose rows its weight has, in this order; checkpoints name them.
    `products` are the GEMMs that a microbatch runs. A linear may have several weights of one shape,
    its `experts`, of which a token uses the fraction `visits`. They are numbered, and with
    `is_expert` even a single one is; such weights are whole on each rank.
    """

    name: str
    in_features: int
    parts: tuple[SubLinear, ...]
    is_column: bool  # tensor-parallel ranks divide its out features, or else its in features
    std: float  # the standard deviation of its initial weights
    has_bias: bool = True
    products: tuple[GemmName, ...] = GEMMS
    experts: int = 1
    visits: Fraction = Fraction(1)
    is_expert: bool = False

    @property
    def out_features(self) -> int:
        """Return the out features of all parts."""
        return sum(part.out_features for part in self.parts)

    @property
    def macs(self) -> int:
        """Return the multiplications of one product for one token."""
        return self.per_token(self.in_features * self.out_features)

    def per_token(self, count: int) -> int:
        """Return `count` numbers of one weight for all weights that a token visits."""
        return count * self.experts * self.visits.numerator // self.visits.denominator

    def local_shape(self, tp: int) -> tuple[int, int]:
        """Return the out and in features of a weight that one of `tp` ranks holds."""
        if self.is_expert:
            return self.out_features, self.in_features
        if self.is_column:
            return self.out_features // tp, self.in_features
        return self.out_features, self.in_features // tp

    def numbered(self, name: str, index: int) -> str:
        """Return the name of weight `index`: of several `….3.fc1`, where `name` is `….fc1`."""
        before, _, last = name.rpartition(".")
        is_numbered = self.is_expert or self.experts > 1
        return f"{before}.{index}.{last}" if is_numbered else name

    @property
    def names(self) -> list[str]:
        """Return the names of the linears of all its weights."""
        return [self.numbered(self.name, index) for index in range(self.experts)]

    def one(self, index: int) -> LayerLinear:
        """Return the linear of weight `index` alone."""
        names = ((self.numbered(part.name, index), part.out_features) for part in self.parts)
        parts, name = tuple(SubLinear(*part) for part in names), self.numbered(self.name, index)
        return LayerLinear(
            name, self.in_features, parts, self.is_column, self.std, self.has_bias, self.products
        )


class Attention(NamedTuple):
    """Name the linears of a layer's attention, in the order in which they run."""

    qkv: LayerLinear
    projection: LayerLinear


class Mlp(NamedTuple):
    """Name the linears of a layer's MLP, in the order in which they run."""

    fc1: LayerLinear
    fc2: LayerLinear


class LayerSpec(NamedTuple):
    """Name the linears of one layer; those of another layer may have other sizes.

    Every token visits the `mlp`: a layer with `experts` has one only if they share an expert.
    """

    attention: Attention
    mlp: Mlp | None
    experts: Mlp | None = None

    @property
    def after_attention(self) -> tuple[LayerLinear, ...]:
        """Return the linears of MLP and experts in the order in which they run."""
        return (*(self.mlp or ()), *(self.experts or ()))

    @property
    def linears(self) -> tuple[LayerLinear, ...]:
        """Return the linears in the order in which they run."""
        return (*self.attention, *self.after_attention)


def layer_spec(model: GPTSpec, layer: int) -> LayerSpec:
    """Return the linears of layer `layer` (from 0)."""
    name, moe = f"layers.{layer}", model.moe
    attention = _attention(model, name)
    if moe is None or not num_experts(model, layer):
        return LayerSpec(attention, _mlp(model, name))
    shared, width = None, moe.shared_ffn_hidden_size
    if width is not None:
        shared = _pair(model, f"{name}.mlp.shared", width)
    count, visits = moe.num_experts, Fraction(moe.top_k, moe.num_experts)
    pair = _pair(model, f"{name}.mlp.experts", moe.ffn_hidden_size)
    experts = (replace(x, experts=count, visits=visits, is_expert=True) for x in pair)
    return LayerSpec(attention, shared, Mlp(*experts))


def _attention(model: GPTSpec, layer: str) -> Attention:
    name, std = f"{layer}.attention", model.init_method_std
    heads = {"query": model.query_size, "key": model.kv_size, "value": model.kv_size}
    qkv = tuple(SubLinear(f"{name}.{part}", size) for part, size in heads.items())
    has_bias = model.bias or model.add_qkv_bias
    return Attention(
        qkv=LayerLinear(f"{name}.qkv", model.hidden_size, qkv, True, std, has_bias),
        projection=_output(model, f"{name}.projection", model.query_size),
    )


def _mlp(model: GPTSpec, layer: str) -> Mlp:
    return _pair(model, f"{layer}.mlp", model.ffn_hidden_size)


def _pair(model: GPTSpec, name: str, width: int) -> Mlp:
    """Return the two linears of an MLP with `width` features between them."""
    std = model.init_method_std
    inner = ("gate", "up") if model.is_gated else ("fc1",)
    fc1 = tuple(SubLinear(f"{name}.{part}", width) for part in inner)
    return Mlp(
        fc1=LayerLinear(f"{name}.fc1", model.hidden_size, fc1, True, std, model.bias),
        fc2=_output(model, f"{name}.fc2", width),
    )


def _output(model: GPTSpec, name: str, in_features: int) -> LayerLinear:
    """Return a linear that writes to the residual stream.

    Megatron's scaled init: the outputs of 2L residual branches add up in L layers.
    """
    parts = (SubLinear(name, model.hidden_size),)
    scale = math.sqrt(2 * model.num_layers) if model.use_scaled_init_method else 1.0
    std = model.init_method_std / scale
    return LayerLinear(name, in_features, parts, False, std, model.bias)


def num_experts(model: GPTSpec, layer: int) -> int:
    """Return the number of experts of a layer; 0 for a layer with an MLP."""
    return 0 if model.moe is None else model.moe.layers[layer] * model.moe.num_experts


def model_linears(model: GPTSpec) -> Iterator[LayerLinear]:
    """Yield the linears of all layers."""
    for layer in range(model.num_layers):
        yield from layer_spec(model, layer).linears


def linear_names(layers: Iterable[int], moe: MoESpec | None = None) -> list[str]:
    """Return the names of the linears of these layers: experts add some, and no other setting."""
    model = replace(_ANY_SIZES, moe=moe)
    return [
        name
        for layer in layers
        for linear in layer_spec(model, layer).linears
        for name in linear.names
    ]


def first_and_last_linear(num_layers: int) -> tuple[str, str]:
    """Return the names of the first and the last linear of a model's layers."""
    return linear_names([0])[0], linear_names([num_layers - 1])[-1]
