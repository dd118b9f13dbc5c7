"""Count the weights of a model: which of them `fp8.convert` turns into FP8 ones, and what stays.

A weight is a parameter with two or more dims of more than one element, by which a product may
multiply. One of shape [n, 1] is a vector. Buffers whose names end in `weight` count too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

OUTPUT_LAYERS = ("lm_head", "embed_out")
"""The names that models of transformers have for the layer that computes the logits."""
EMBEDDINGS = re.compile(r"embed|position|(^|_)pos(_|$)")
"""What the name of a parameter has that is added to or looked up for tokens, as embeddings are."""
LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
ROUTERS = re.compile(r"(^|_)(router|gate|gating)$")
MOST_NAMES = 20


@dataclass(frozen=True)
class Weight:
    """Describe one weight that is not the `weight` of a linear, under each of its names."""

    names: tuple[str, ...]
    shape: str
    size: int
    is_embedding: bool
    is_router: bool = False  # of experts that have linears of their own

    @property
    def stays(self) -> bool:
        """Whether the weight stays in high precision unasked."""
        return self.is_embedding or self.is_router


@dataclass(frozen=True)
class Census:
    """Hold the numbers of a model's parameters, by what became of them.

    `converted` and `left` have those of each linear, by its name, and `left` of other weights, too.
    """

    total: int
    converted: Mapping[str, int]
    left: Mapping[str, int]
    embeddings: Mapping[str, int]
    routers_left: Mapping[str, int]
    output_layers: tuple[str, ...]  # of all linears
    routers: tuple[str, ...]
    skip: tuple[str, ...]  # the patterns that were given

    def lines(
        self, kinds: Iterable[str], recipes: Iterable[str], idle: str, ran: float | None
    ) -> list[str]:
        """Return three lines: what is converted, by which recipe, and what stays.

        Args:
            kinds: What each converted linear was.
            recipes: The label of each one's recipe.
            idle: The names of the linears that never ran; empty where all did or none could yet.
            ran: The share of FP8 in the FLOPs of the first microbatch, if it has ended.
        """
        converted = f"converted: {_counts(kinds)}; {self.share(self.converted)} of the parameters"
        if self.converted_outputs:
            converted += f"; among them the output layer: {names(self.converted_outputs)}"
        if self.routers:
            converted += f"; among them routers or gates: {names(self.routers)}"
        if ran is not None:
            converted += f"; {ran:.1%} of the FLOPs of the first microbatch ran in FP8"
        if idle:
            converted += f"; never called so far: {idle}"
        stays = [
            f"{kind}{names(of)} ({self.share(of)})"
            for kind, of in (
                ("", self.left),
                ("routers: ", self.routers_left),
                ("embeddings: ", self.embeddings),
            )
            if of
        ]
        return [
            converted,
            f"recipe: {_counts(recipes)}",
            f"stays in high precision: {'; '.join(stays) or 'no weight'}",
        ]

    @property
    def converted_outputs(self) -> list[str]:
        """Return the output layers that are converted."""
        return [name for name in self.output_layers if name in self.converted]

    def share(self, of: Mapping[str, int]) -> str:
        """Return which share of the model's parameters these weights have, in percent."""
        return f"{sum(of.values()) / max(1, self.total):.1%}"


def other_weights(model: nn.Module, linears: Iterable[torch.Tensor]) -> dict[str, Weight]:
    """Return each weight that is none of these weights of linears, by its first name.

    An embedding that shares its weight with a linear is among them.
    """
    of_linears = {id(weight) for weight in linears}
    found: dict[int, list[tuple[str, nn.Module, torch.Tensor]]] = {}
    for owner, module in model.named_modules(remove_duplicate=False):
        for own, tensor in _matrices(module):
            if id(tensor) not in of_linears or isinstance(module, LOOKED_UP):
                name = f"{owner}.{own}" if owner else own
                found.setdefault(id(tensor), []).append((name, module, tensor))
    weights = {}
    for uses in found.values():
        tensor, every_name = uses[0][2], tuple(dict.fromkeys(name for name, _, _ in uses))
        weights[every_name[0]] = Weight(
            every_name,
            "of unknown size (lazy)" if is_lazy(tensor) else " x ".join(map(str, tensor.shape)),
            0 if is_lazy(tensor) else tensor.numel(),
            any(_is_embedding(name, module) for name, module, _ in uses),
        )
    return weights


def routers_beside(weights: Mapping[str, Weight], experts: Iterable[str]) -> dict[str, Weight]:
    """Return the weights, of which those of routers beside these modules of experts are marked.

    A router's weight is that of a module by the name of a router, which lies where experts do.
    """
    around = {_outer(name) for name in experts}

    def is_router(name: str) -> bool:
        router, _, own = name.rpartition(".")
        return own == "weight" and bool(ROUTERS.search(_last(router))) and _outer(router) in around

    return {name: replace(w, is_router=is_router(name)) for name, w in weights.items()}


def _matrices(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that a module holds itself, by their names in it."""
    buffers = (item for item in module.named_buffers(recurse=False) if item[0].endswith("weight"))
    for name, tensor in (*module.named_parameters(recurse=False), *buffers):
        is_matrix = "bias" not in name if is_lazy(tensor) else _num_dims(tensor.shape) > 1
        if is_matrix:
            yield name, tensor


def _is_embedding(name: str, module: nn.Module) -> bool:
    """Whether a weight that this module holds is looked up, or added to what was looked up."""
    is_looked_up = isinstance(module, LOOKED_UP) or type(module).__name__.endswith("Embedding")
    return is_looked_up or bool(EMBEDDINGS.search(_last(name)))


def _num_dims(shape: torch.Size) -> int:
    """Return the number of dims of more than one element."""
    return sum(size > 1 for size in shape)


def census_of(
    model: nn.Module,
    linears: Mapping[str, nn.Module],
    others: Mapping[str, Weight],
    converted: Iterable[str],
    skip: Iterable[str],
) -> Census:
    """Count the weights of a model: its linears, its other weights, and what is converted.

    The only linear that has the shape of an embedding counts as an output layer by any name.
    """
    looked_up = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {id(module.weight) for module in looked_up}
    weights = {
        name: weight
        for name, linear in linears.items()
        if isinstance(weight := getattr(linear, "weight", None), torch.Tensor)
        and not is_lazy(weight)
    }
    sizes = dict.fromkeys(linears, 0) | {
        name: weight.numel() for name, weight in weights.items() if id(weight) not in tied
    }
    shapes = {tuple(embedding.weight.shape) for embedding in looked_up}
    alike = [name for name, weight in weights.items() if tuple(weight.shape) in shapes]
    chosen = {name: sizes[name] for name in converted}
    return Census(
        sum(p.numel() for p in model.parameters() if not is_lazy(p)),
        chosen,
        {name: size for name, size in sizes.items() if name not in chosen}
        | {name: weight.size for name, weight in others.items() if not weight.stays},
        {name: weight.size for name, weight in others.items() if weight.is_embedding},
        {name: weight.size for name, weight in others.items() if weight.is_router},
        tuple(n for n in linears if _last(n) in OUTPUT_LAYERS or [n] == alike),
        tuple(name for name in chosen if _is_router(name, linears[name])),
        tuple(skip),
    )


def _is_router(name: str, linear: nn.Module) -> bool:
    """Return whether a linear chooses experts, or weighs them, judged by its name and shape."""
    if not ROUTERS.search(_last(name)):
        return False
    num_out, num_in = linear.get_parameter("weight").shape
    return num_out < num_in


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _outer(name: str) -> str:
    return name.rpartition(".")[0]


def _counts(texts: Iterable[str]) -> str:
    return ", ".join(f"{count} {text}" for text, count in Counter(texts).items())


def names(of: Iterable[str]) -> str:
    """Return names for a message; those that differ in the number of a layer alone stand once."""
    alike = list(by_pattern(of))
    more = len(alike) - MOST_NAMES
    return ", ".join(alike[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def by_pattern(of: Iterable[str]) -> dict[str, list[str]]:
    """Return names that differ in the number of a layer alone, by a pattern of them all."""
    patterns: dict[str, list[str]] = {}
    for name in of:
        patterns.setdefault(numbered(name), []).append(name)
    return {found[0] if len(found) == 1 else key: found for key, found in patterns.items()}


def numbered(name: str) -> str:
    """Return the name with `*` for the numbers of layers, as a pattern of `skip`."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)  # not the last part, as of a Sequential


def matches(name: str, pattern: str) -> bool:
    """Return whether `pattern` fits the name of a linear or weight, or of a module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def patterns_of(
    chosen: Iterable[str], units: Collection[str], allowed: set[str], around: Collection[str] = ()
) -> list[str]:
    """Return patterns of `skip` that match the chosen names, and of the units allowed ones alone.

    Those in `around` are named by the module around them, where this matches no other unit.
    """
    found: list[str] = []
    for name in chosen:
        if not any(matches(name, pattern) for pattern in found):
            ways = _ways_to_name(name, name in around)
            found.append(next((w for w in ways if _names_only(w, name, units, allowed)), name))
    return found


def _ways_to_name(name: str, by_what_is_around: bool) -> list[str]:
    """Return patterns for a linear, or for another weight, from the shortest to its name."""
    outer = name.partition(".parametrizations.")[0] if ".parametrizations." in name else ""
    outer = outer or name.rpartition(".")[0]
    targets = [outer, name] if outer and by_what_is_around else [name]
    return [way for each in targets for way in (f"*.{_last(each)}", numbered(each), each)]


def _names_only(pattern: str, name: str, units: Iterable[str], allowed: set[str]) -> bool:
    """Whether a pattern matches this name and, of the others, allowed ones alone."""
    matched = [unit for unit in units if matches(unit, pattern)]
    is_needed = "*" not in pattern or len(matched) > 1
    return name in matched and set(matched) <= allowed and is_needed
