"""Watch which weights code beside the converted linears multiplies by, and count its products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8_coverage.flops import ADDED, ATTENTION, BATCHED, FLOPS
from fp8_coverage.torch_private import backward_pass, newest_node, running_node
from megafp8.ops import torch_private

HEAD = ""
"""The name that stands for the weight of an output layer."""


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
        self._fixed: dict[int, dict[tuple[int, int], frozenset[str]]] = {}  # by key and place
        self._derived: dict[int, tuple[object, frozenset[str]]] = {}  # by the storage's key
        named = [(tensor, HEAD) for tensor in heads]
        named += [(tensor, name) for name, tensors in weights.items() for tensor in tensors]
        for tensor in (*fixed, *(tensor for tensor, _ in named)):
            self._fixed.setdefault(_key(tensor), {})[_place(tensor)] = frozenset()
        for tensor, name in named:
            self._fixed[_key(tensor)][_place(tensor)] |= {name}

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
        if not _is_backward():
            self._follow(inputs, [*_tensors_of(out)])
        return out

    def _kind_of(self, operation: Any, inputs: list[torch.Tensor]) -> str:
        """Return the kind of a product, and note which weights it reads in a forward pass."""
        if _is_backward():
            return self._kinds.get(running_node() or 0, "linear")
        operands = inputs[operation in ADDED :][:2]
        from_where = [self._source(tensor) for tensor in operands]
        kind = "linear"
        if operation in ATTENTION or operation in BATCHED and not any(from_where):
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
        if (derived := self._derived.get(_key(tensor))) is not None:
            return derived[1]
        if (fixed := self._fixed.get(_key(tensor))) is None:
            return None
        begin, end = _place(tensor)  # all parameters may be views of one buffer (DeepSpeed, apex)
        return frozenset[str]().union(*(n for (b, e), n in fixed.items() if b < end and begin < e))


def _is_backward() -> bool:
    """Whether gradients are computed, and not what checkpointing computes again before them."""
    return backward_pass() >= 0 and not torch.is_grad_enabled()


def _key(tensor: torch.Tensor) -> int:
    return torch_private.storage_key(tensor.untyped_storage())


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return which bytes of its storage a tensor lies in: the first, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    begin, last = int(tensor.storage_offset()), sum((size - 1) * step for size, step in steps)
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


def _tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results of an operation, in their order."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_of(value)
    elif isinstance(values, dict):
        yield from _tensors_of([*values.values()])
