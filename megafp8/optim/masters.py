"""FP32 master weights and gradients of a model whose compute weights may be BF16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megafp8.models.init import pieces_of
from megafp8.parallel.collectives import Axis


@dataclass(frozen=True)
class Segment:
    """The elements `begin` to `end` (exclusive) of a parameter, in memory order."""

    param: nn.Parameter
    begin: int
    end: int


# Puts a master's values into a parameter that a copy would not do for.
Store = Callable[[torch.Tensor], None]


class Masters:
    """One FP32 master per parameter, and all gradients in one flat FP32 buffer.

    For FP32 parameters the master *is* the parameter. Sharded parameters come first in the buffer,
    so that the gradient norm needs two ranges; one division, clip and reduction serve all.
    `stores`: the parameters that are quantized, not copied, when masters are written back.

    params         all of this rank's
    param_grads    their gradients, as backward fills them
    segments       what of them this rank updates: each whole, or a shard (`ShardedMasters`)
    masters        FP32, one a segment
    grads          of the segments, after the reduction
    own_grads      flat ranges that hold all of `grads`
    shards         the ranks that update the other segments
    """

    shards: Axis

    def __init__(
        self, params: Iterable[nn.Parameter], stores: Mapping[nn.Parameter, Store] | None = None
    ) -> None:
        self.shards, self._stores = Axis("shards"), dict(stores or {})
        self.params = sorted(params, key=lambda p: not pieces_of(p)[0].is_sharded)
        self.device = device = self.params[0].device
        self.masters = [initial_master(param) for param in self.params]
        sizes = [param.numel() for param in self.params]
        self.flat_grad = torch.zeros(sum(sizes), device=device)
        views = self.flat_grad.split(sizes)
        self.grads = [view.view_as(param) for view, param in zip(views, self.params, strict=True)]
        self.param_grads, self.own_grads = self.grads, [self.flat_grad]
        self.segments = [Segment(param, 0, param.numel()) for param in self.params]
        num_sharded = sum(pieces_of(param)[0].is_sharded for param in self.params)
        begin = sum(p.numel() for p in self.params[:num_sharded])
        self.replicated_grads = [self.flat_grad[begin:]]  # whole on every tensor-parallel rank

    @property
    def held_params(self) -> Sequence[torch.Tensor]:
        """The parameters' memory on this rank."""
        return self.params

    def begin_step(self) -> None:
        """Before the first microbatch; the gradient sink starts anew by itself."""

    def collect_grads(self) -> None:
        """After the reduction: `grads` are there."""

    def reshard(self) -> None:
        """Let go of weights that were gathered for a forward pass without a backward."""

    def grads_of(self, param: nn.Parameter) -> list[torch.Tensor]:
        """The gradients of what this rank updates of a parameter."""
        both = zip(self.segments, self.grads, strict=True)
        return [grad for segment, grad in both if segment.param is param]

    @contextmanager
    def lend_grads(self) -> Iterator[None]:
        """Inside, `.grad` of each master is its gradient. Outside it is None: an FP32 master is a
        parameter too, and autograd would add to it."""
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        yield
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the compute weights."""
        both = zip(self.params, self.masters, strict=True)
        pairs = [(p, m) for p, m in both if p is not m and p not in self._stores]
        if pairs:
            params, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(list(params), list(masters))
        for param, master in zip(self.params, self.masters, strict=True):
            if store := self._stores.get(param):
                store(master)


def initial_master(param: nn.Parameter) -> nn.Parameter:
    """The FP32 initialization before it was rounded, where there was a rounding."""
    initial = getattr(param, "initial_master", None)
    if param.dtype == torch.float32 and initial is None:
        return param
    master = param.detach().float() if initial is None else initial.to(param.device)
    param.initial_master = None  # type: ignore[attr-defined]
    return nn.Parameter(master)
