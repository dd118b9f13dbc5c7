"""Say which weights of a model `fp8.convert` has turned into FP8 ones, and what stays as it was.

A weight is a parameter with two or more dims of more than one element, by which a product may
multiply. One of shape [n, 1] is a vector. Buffers whose names end in `weight` count too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8_coverage.flops import ATTENTION, FLOPS
from fp8_coverage.torch_private import newest_node, running_node
from megafp8.ops import torch_private

SUMS = {f"aten.{name}" for name in ("addmm", "baddbmm", "addbmm", "addmv")}
"""The products that are added to a third tensor, which comes first."""
BATCHED = ("aten.bmm", "aten.baddbmm", "aten.addbmm")
HEAD = ""
"""The name that stands for the weight of an output layer."""
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


@dataclass(frozen=True)
class Coverage:
    """Hold the numbers of a model's parameters, by what became of them.

    `converted` and `left` have those of each linear, by its name, and `left` of other weights, too.
    """

    total: int
    converted: Mapping[str, int]
    left: Mapping[str, int]
    embeddings: Mapping[str, int]
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
            for kind, of in (("", self.left), ("embeddings: ", self.embeddings))
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


def other_weights(model: nn.Module, linears: Iterable[nn.Module]) -> dict[str, Weight]:
    """Return each weight that is not the `weight` of one of these linears, by its first name.

    An embedding that shares its weight with a linear is among them.
    """
    of_linears = {id(getattr(linear, "weight", None)) for linear in linears}
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


def coverage_of(
    model: nn.Module,
    linears: Mapping[str, nn.Module],
    others: Mapping[str, Weight],
    converted: Iterable[str],
    skip: Iterable[str],
) -> Coverage:
    """Return the coverage of a model: its linears, its other weights, and what is converted.

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
    return Coverage(
        sum(p.numel() for p in model.parameters() if not is_lazy(p)),
        chosen,
        {name: size for name, size in sizes.items() if name not in chosen}
        | {name: weight.size for name, weight in others.items() if not weight.is_embedding},
        {name: weight.size for name, weight in others.items() if weight.is_embedding},
        tuple(n for n in linears if _last(n) in OUTPUT_LAYERS or [n] == alike),
        tuple(name for name in chosen if _is_router(name, linears[name])),
        tuple(skip),
    )


def _is_router(name: str, linear: nn.Module) -> bool:
    """Return whether a linear chooses experts, or weighs them, judged by its name and shape."""
    num_out, num_in = linear.get_parameter("weight").shape
    return bool(ROUTERS.search(_last(name))) and num_out < num_in


def _last(name: str) -> str:
    return name.rpartition(".")[2]


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


class Reads(torch_private.TorchDispatchMode):
    """Find the weights by which code of others multiplies in high precision, in forward passes.

    `flops` counts the products of both passes that no converted linear runs: "linear" ones, those
    of the "head", and "attention" for products of two activations.

    A tensor that is computed from parameters and buffers alone stands for the weights that it comes
    from, so that a product with joined, cast or masked weights is found as well. Only a product of
    such a tensor with an activation counts: a penalty on the weights alone does not.
    """

    def __init__(
        self,
        fixed: Iterable[torch.Tensor],
        weights: Mapping[str, Iterable[torch.Tensor]],
        heads: Iterable[torch.Tensor],
        is_own: Callable[[], bool],
    ) -> None:
        """Prepare to watch a model.

        Args:
            fixed: Its parameters and buffers.
            weights: The tensors of each weight to look for.
            heads: The weights of output layers.
            is_own: Whether a converted linear computes just now.
        """
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.found: dict[str, None] = {}
        self.flops = dict.fromkeys(("linear", "attention", "head"), 0)
        self.is_counted = True  # the FLOPs of all products are known
        self._kinds: dict[int, str] = {}  # of products, by their autograd nodes
        self._is_own = is_own
        self._fixed: dict[int, frozenset[str]] = {}
        self._derived: dict[int, tuple[object, frozenset[str]]] = {}  # by the storage's key
        for tensor in fixed:
            self._fixed[_key(tensor)] = frozenset()
        for name, tensors in weights.items():
            for tensor in tensors:
                self._fixed[_key(tensor)] = self._fixed.get(_key(tensor), frozenset()) | {name}

        for tensor in heads:
            self._fixed[_key(tensor)] = self._fixed.get(_key(tensor), frozenset()) | {HEAD}

    @property
    def saw_products(self) -> bool:
        """Whether anything but converted linears multiplied."""
        return any(self.flops.values())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compilations as they are; torch would not compile what it meets in a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and follow what comes from weights alone."""
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # comes back with the tensors that such a tensor has
        out = func(*args, **(kwargs or {}))
        if self._is_own():
            return out
        inputs = [*_tensors_of((args, kwargs))]
        if (count := FLOPS.get(func.overloadpacket)) is not None:
            kind = self._kind_of(func.overloadpacket, inputs)
            try:
                self.flops[kind] += count(*args, **(kwargs or {}), out_val=out)
            except Exception:  # a form of the operation that its count does not know
                self.is_counted = False
        if not torch_private.is_in_backward():
            self._follow(inputs, [*_tensors_of(out)])
        return out

    def _kind_of(self, operation: Any, inputs: list[torch.Tensor]) -> str:
        """Return the kind of a product, and note which weights it reads in a forward pass."""
        if torch_private.is_in_backward():
            return self._kinds.get(running_node() or 0, "linear")
        operands = inputs[1:3] if str(operation) in SUMS else inputs[:2]
        from_where = [self._source(tensor) for tensor in operands]
        kind = "linear"
        if operation in ATTENTION or str(operation) in BATCHED and not any(from_where):
            kind = "attention"
        elif None in from_where and all(tensor.numel() for tensor in operands):
            read = [name for names in from_where for name in sorted(names or ())]
            kind = "head" if HEAD in read else kind
            self.found |= dict.fromkeys(name for name in read if name != HEAD)
        self._kinds[newest_node()] = kind
        return kind

    def _follow(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Note what comes from weights alone."""
        sources = [self._source(tensor) for tensor in inputs if tensor.numel() > 1]
        merged: frozenset[str] | None = frozenset() if sources else None
        for source in sources:
            merged = None if source is None or merged is None else merged | source
        for tensor in outputs:
            if (key := _key(tensor)) in self._fixed:
                continue
            if merged is None:
                self._derived.pop(key, None)
            else:
                reference = torch_private.storage_reference(tensor.untyped_storage())
                self._derived[key] = reference, merged

    def _source(self, tensor: torch.Tensor) -> frozenset[str] | None:
        """Return the names of the weights that a tensor comes from; None if it is an activation."""
        derived = self._derived.get(_key(tensor))
        return self._fixed.get(_key(tensor)) if derived is None else derived[1]


def _key(tensor: torch.Tensor) -> int:
    return torch_private.storage_key(tensor.untyped_storage())


def _tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results of an operation, in their order."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_of(value)
    elif isinstance(values, dict):
        yield from _tensors_of([*values.values()])
