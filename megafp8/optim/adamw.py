"""Adam over the masters, by a fused kernel."""

from __future__ import annotations

import torch

from megafp8.optim.kernels import choose_kernel, count, prepare_state, set_count
from megafp8.optim.masters import Masters
from megafp8.optim.schedules import learning_rate
from megafp8.specs import OptimSpec

STATES = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Kingma & Ba 2015 (arXiv 1412.6980), with decoupled weight decay (Loshchilov & Hutter 2019,
    arXiv 1711.05101) or, as `adam`, with L2. Norms and biases do not decay (NeMo)."""

    def __init__(self, masters: Masters, spec: OptimSpec) -> None:
        self.masters, self.spec = masters, spec
        self._kernel, self.kernel_name = choose_kernel(spec, masters.device)
        both = list(zip(masters.segments, masters.masters, strict=True))
        decaying = [master for segment, master in both if segment.param.dim() > 1]
        others = [master for segment, master in both if segment.param.dim() <= 1]
        if not both:  # the shard of one of very many ranks may be empty
            others = [torch.nn.Parameter(torch.zeros(0, device=masters.device))]
        groups = [
            {"params": decaying, "weight_decay": spec.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._torch = self._kernel.make([group for group in groups if group["params"]], spec)
        prepare_state(self._kernel, self._torch, decaying + others)

    def step(self, step: int) -> None:
        """Apply the gradients in `masters` as optimizer step `step` (from 1), then round back."""
        for group in self._torch.param_groups:
            group["lr"] = learning_rate(self.spec, step)
        with self.masters.lend_grads():
            self._torch.step()
        self.masters.write_back()

    @property
    def num_updates(self) -> int:
        """Updates applied so far: Adam's t (skipped steps do not count)."""
        return count(self._kernel, self._torch)

    def set_num_updates(self, count: int) -> None:
        set_count(self._kernel, self._torch, count)

    def state_tensors(self, name: str) -> list[torch.Tensor]:
        """`exp_avg` or `exp_avg_sq` of every master, in the masters' order."""
        assert name in STATES
        return [self._torch.state[master][name] for master in self.masters.masters]
