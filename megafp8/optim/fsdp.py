"""The optimizer's view of a model that FSDP shares out: its FP32 shards are the masters."""

from __future__ import annotations

import torch
from torch import nn

from megafp8.models.init import pieces_of
from megafp8.optim.masters import Masters, Segment
from megafp8.parallel.fsdp import ShardedModel, local_of
from megafp8.precision.cast import amax_of


class FsdpMasters(Masters):
    """Shards are rows of each parameter; FSDP makes their gradients anew in each step."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.shards, self._modules = sharded.shards, sharded.modules
        self._fp8 = sharded.gathered_in_fp8
        self.params = list(sharded.params)
        self.device = local_of(self.params[0]).device
        self.segments, self.masters = [], []
        self._owned: list[nn.Parameter] = []  # of the segments
        for param in self.params:
            local = local_of(param.detach())
            if local.numel() == 0:
                continue  # fewer rows than ranks
            rows = -(-param.shape[0] // self.shards.size)  # as torch.chunk cuts
            begin = self.shards.rank * rows * (param.numel() // param.shape[0])
            self.segments.append(Segment(param, begin, begin + local.numel()))
            self.masters.append(nn.Parameter(local))  # shares its memory
            self._owned.append(param)
        self.grads, self.own_grads, self.param_grads = [], [], []

    @property
    def held_params(self) -> list[nn.Parameter]:
        return self.masters

    def begin_step(self) -> None:
        for param in self.params:
            param.grad = None

    def collect_grads(self) -> None:
        self.param_grads = [_grad_of(param) for param in self.params]
        self.grads = [grad for grad in self.param_grads if grad.numel()]
        self.own_grads = self.grads
        self.replicated_grads = [
            grad
            for param, grad in zip(self._owned, self.grads, strict=True)
            if not pieces_of(param)[0].is_sharded
        ]

    def write_back(self) -> None:
        """Weights are gathered from the masters when they are next used; those that cross in FP8
        by scales of the whole tensors: one reduction agrees on all amaxes."""
        self.reshard()
        if not self._fp8:
            return
        rounded = [
            local_of(param.detach()).to(form.compute_dtype) for param, form in self._fp8.items()
        ]
        amaxes = torch.stack([amax_of(part) for part in rounded])
        self.shards.all_reduce_max(amaxes)
        for amax, part, form in zip(amaxes, rounded, self._fp8.values(), strict=True):
            form.agree_on_scale(amax, part)

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()


def _grad_of(param: nn.Parameter) -> torch.Tensor:
    if param.grad is None:  # nothing of this step used it
        return torch.zeros_like(local_of(param.detach()))
    return local_of(param.grad)
