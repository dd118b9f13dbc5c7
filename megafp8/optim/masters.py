"""FP32 master weights and gradients of a model whose compute weights may be BF16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from megafp8.models.init import pieces_of

# Puts a master's values into a parameter that a copy would not do for.
Store = Callable[[torch.Tensor], None]


class Masters:
    """One FP32 master per parameter, and all gradients in one flat FP32 buffer.

    For FP32 parameters the master *is* the parameter. Sharded parameters come first in the buffer,
    so that the gradient norm needs two ranges; one division, clip and reduction serve all.
    `stores`: the parameters that are quantized, not copied, when masters are written back.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], stores: Mapping[nn.Parameter, Store] | None = None
    ) -> None:
        self._stores = dict(stores or {})
        self.params = sorted(params, key=lambda p: not pieces_of(p)[0].is_sharded)
        device = self.params[0].device
        self.masters = [_master_of(param) for param in self.params]
        sizes = [param.numel() for param in self.params]
        self.flat_grad = torch.zeros(sum(sizes), device=device)
        views = self.flat_grad.split(sizes)
        self.grads = [view.view_as(param) for view, param in zip(views, self.params, strict=True)]
        self.num_sharded = sum(pieces_of(param)[0].is_sharded for param in self.params)

    @property
    def replicated_grad(self) -> torch.Tensor:
        """The flat gradients of the parameters that every tensor-parallel rank has whole."""
        return self.flat_grad[sum(p.numel() for p in self.params[: self.num_sharded]) :]

    def zero_grad(self) -> None:
        self.flat_grad.zero_()

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


def _master_of(param: nn.Parameter) -> nn.Parameter:
    """The FP32 initialization before it was rounded, where there was a rounding."""
    initial = getattr(param, "initial_master", None)
    if param.dtype == torch.float32 and initial is None:
        return param
    master = param.detach().float() if initial is None else initial.to(param.device)
    param.initial_master = None  # type: ignore[attr-defined]
    return nn.Parameter(master)
