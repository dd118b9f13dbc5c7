"""List the linears of a transformer layer: the one table that model, plan and checks read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megafp8.specs.geometry import Piece
from megafp8.specs.model import GPTSpec
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
    `products` are the GEMMs that a microbatch runs.
    """

    name: str
    in_features: int
    parts: tuple[SubLinear, ...]
    is_column: bool  # tensor-parallel ranks divide its out features, or else its in features
    has_bias: bool = True
    products: tuple[GemmName, ...] = GEMMS

    @property
    def out_features(self) -> int:
        """Return the out features of all parts."""
        return sum(part.out_features for part in self.parts)

    @property
    def weight_elements(self) -> int:
        """Return the number of elements of the whole weight."""
        return self.in_features * self.out_features

    @property
    def in_mlp(self) -> bool:
        """Whether it belongs to the layer's MLP, and not to its attention."""
        return ".mlp." in self.name

    def local_shape(self, tp: int) -> tuple[int, int]:
        """Return the out and in features of the weight that one of `tp` ranks holds."""
        if self.is_column:
            return self.out_features // tp, self.in_features
        return self.out_features, self.in_features // tp

    def pieces(self, tp: int, rank: int) -> tuple[list[Piece], list[Piece]]:
        """Return which parts of the logical weights and biases rank `rank` of `tp` ranks holds."""
        weights, biases, begin = [], [], 0
        columns = self.local_shape(tp)[1]
        for part in self.parts:
            name, out = part.name, part.out_features
            share = out // tp if self.is_column else out
            row, column = (rank * share, 0) if self.is_column else (0, rank * columns)
            local, begin = slice(begin, begin + share), begin + share
            shape = (out, self.in_features)
            weight = Piece(f"{name}.weight", shape, (row, column), (local, slice(0, columns)))
            weights.append(weight)
            biases.append(Piece(f"{name}.bias", (out,), (row,), (local,)))
        return weights, biases


def layer_linears(spec: GPTSpec, layer: int) -> tuple[LayerLinear, ...]:
    """Return the linears of layer `layer` (from 0) in the order in which they run."""
    name, hidden, ffn = f"layers.{layer}", spec.hidden_size, spec.ffn_hidden_size
    heads = {"query": spec.query_size, "key": spec.kv_size, "value": spec.kv_size}
    qkv = tuple(SubLinear(f"{name}.attention.{part}", size) for part, size in heads.items())
    inner = ("gate", "up") if spec.is_gated else ("fc1",)
    fc1 = tuple(SubLinear(f"{name}.mlp.{part}", ffn) for part in inner)
    projection = SubLinear(f"{name}.attention.projection", hidden)
    fc2 = SubLinear(f"{name}.mlp.fc2", hidden)
    bias = spec.bias
    return (
        LayerLinear(f"{name}.attention.qkv", hidden, qkv, True, bias or spec.add_qkv_bias),
        LayerLinear(projection.name, spec.query_size, (projection,), False, bias),
        LayerLinear(f"{name}.mlp.fc1", hidden, fc1, True, bias),
        LayerLinear(fc2.name, ffn, (fc2,), False, bias),
    )


def linear_names(layers: Iterable[int]) -> list[str]:
    """Return the names of the linears of these layers, which no size of the model changes."""
    return [linear.name for layer in layers for linear in layer_linears(_ANY_SIZES, layer)]


def first_and_last_linear(num_layers: int) -> tuple[str, str]:
    """Return the names of the first and the last linear of a model's layers."""
    return linear_names([0])[0], linear_names([num_layers - 1])[-1]
