"""Give the optimizer the FP32 shards of a model under FSDP as its master weights."""

from __future__ import annotations

import torch
from torch import nn

from megafp8.models.init import pieces_of
from megafp8.optim.masters import Masters, Segment
from megafp8.parallel.fsdp import ShardedModel, local_of
from megafp8.precision.cast import amax_of


class FsdpMasters(Masters):
    """Hold this rank's rows of each FSDP parameter as FP32 master weights.

    FSDP allocates new gradients of these rows in every step.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self.shards, self._modules = sharded.shards, sharded.modules
        self._fp8 = sharded.gathered_in_fp8
        self.params = list(sharded.params)
        self.device = local_of(self.params[0]).device
        self.segments, self.masters = [], []
        self._owned: list[nn.Parameter] = []  # the parameter of each segment
        for param in self.params:
            local = local_of(param.detach())
            if local.numel() == 0:
                continue  # fewer rows than ranks
            rows = -(-param.shape[0] // self.shards.size)  # torch.chunk's rule
            begin = self.shards.rank * rows * (param.numel() // param.shape[0])
            self.segments.append(Segment(param, begin, begin + local.numel()))
            self.masters.append(nn.Parameter(local))  # shares its memory
            self._owned.append(param)
        self.grads, self.own_grads, self.param_grads = [], [], []

    @property
    def held_params(self) -> list[nn.Parameter]:
        """Return the memory that parameters occupy on this rank: its FP32 shards."""
        return self.masters

    def begin_step(self) -> None:
        """Drop the gradients of the last step, so that FSDP allocates new ones."""
        for param in self.params:
            param.grad = None

    def collect_grads(self) -> None:
        """Take the reduced gradients from the parameters; a parameter without one gets zeros."""
        self.param_grads = [_grad_of(param) for param in self.params]
        self.grads = [grad for grad in self.param_grads if grad.numel()]
        self.own_grads = self.grads
        self.replicated_grads = [
            grad
            for param, grad in zip(self._owned, self.grads, strict=True)
            if not pieces_of(param)[0].is_sharded
        ]

    def write_back(self) -> None:
        """Free the gathered weights, so that their next use gathers the updated masters.

        For weights that cross ranks in FP8, the ranks also agree on the scale of each whole tensor,
        with one reduction for all amaxes.
        """
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
        """Free the gathered weights of every module."""
        for module in self._modules:
            module.reshard()


def _grad_of(param: nn.Parameter) -> torch.Tensor:
    if param.grad is None:  # nothing of this step used it
        return torch.zeros_like(local_of(param.detach()))
    return local_of(param.grad)
