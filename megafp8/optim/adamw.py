"""Run Adam on FP32 master weights, with a fused kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.optim.kernels import TORCH, choose_kernel, prepare_state, set_count
from megafp8.optim.protocol import Optimizer, States, Step

STATES = ("exp_avg", "exp_avg_sq")


class AdamW(Optimizer):
    """Update master weights with Adam (Kingma & Ba 2015, arXiv 1412.6980).

    Weight decay is decoupled (Loshchilov & Hutter 2019, arXiv 1711.05101) or, under the name
    `adam`, an L2 term of the gradient. As in NeMo, norms and biases do not decay, unless
    `spec.decays_vectors` is set. The kernel makes the moments and counts Adam's t.
    """

    def __post_init__(self) -> None:
        masters, spec = self.masters, self.spec
        decaying: list[nn.Parameter] = []
        undecayed: list[nn.Parameter] = []
        for row in self.rows:
            decays = spec.decays(masters.segments[row].param.dim())
            (decaying if decays else undecayed).append(masters.masters[row])
        self._kernel, self._kernel_name = choose_kernel(spec, masters.device)
        self.skips_on_device = self.divides = self._kernel is TORCH  # `found_inf`, `grad_scale`
        if not self.rows:  # with very many ranks, the shard of one may be empty
            undecayed = [nn.Parameter(torch.zeros(0, device=masters.device))]
        with_decay = ((decaying, spec.weight_decay), (undecayed, 0.0))
        groups = [{"params": group, "weight_decay": decay} for group, decay in with_decay if group]
        self._torch = self._kernel.make(groups, spec)
        prepare_state(self._kernel, self._torch, decaying + undecayed)

    @property
    def states(self) -> Mapping[int, States]:
        masters = self.masters
        unit_scale, fp32 = torch.ones((), device=masters.device), STORAGE_FORMATS["fp32"]
        moments = {row: self._torch.state[masters.masters[row]] for row in self.rows}
        return {
            row: {name: ScaledTensor(of[name], unit_scale, fp32) for name in STATES}
            for row, of in moments.items()
        }

    def describe(self) -> str:
        return self._kernel_name

    def update(self, step: Step) -> None:
        for group in self._torch.param_groups:
            group["lr"] = step.lr
        if self._kernel is TORCH:
            self._torch.found_inf, self._torch.grad_scale = step.skips, step.divisor
        masters = self.masters
        for row in self.rows:
            masters.masters[row].grad = masters.grads[row]
        self._torch.step()
        for row in self.rows:  # autograd would add to it: a master may be a parameter
            masters.masters[row].grad = None

    def set_num_updates(self, count: int) -> None:
        set_count(self._kernel, self._torch, count)
