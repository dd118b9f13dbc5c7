"""AdamW over the masters, by torch's fused kernel."""

from __future__ import annotations

import torch

from megafp8.optim.masters import Masters
from megafp8.optim.schedules import learning_rate
from megafp8.specs import OptimSpec

STATES = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Loshchilov & Hutter 2019 (arXiv 1711.05101). Norms and biases do not decay (NeMo)."""

    def __init__(self, masters: Masters, spec: OptimSpec) -> None:
        self.masters, self.spec = masters, spec
        decaying = [m for m in masters.masters if m.dim() > 1]
        others = [m for m in masters.masters if m.dim() <= 1]
        self._torch = torch.optim.AdamW(
            [
                {"params": decaying, "weight_decay": spec.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,
        )
        self._make_state()

    def _make_state(self) -> None:
        """Allocate what torch would in the first step, so that a checkpoint can fill it."""
        for master in self.masters.masters:
            state = self._torch.state[master]
            state["step"] = torch.zeros((), device=master.device)
            for name in STATES:
                state[name] = torch.zeros_like(master)

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
        return int(self._torch.state[self.masters.masters[0]]["step"])

    def set_num_updates(self, count: int) -> None:
        for master in self.masters.masters:
            self._torch.state[master]["step"].fill_(count)

    def state_tensors(self, name: str) -> list[torch.Tensor]:
        """`exp_avg` or `exp_avg_sq` of every master, in the masters' order."""
        assert name in STATES
        return [self._torch.state[master][name] for master in self.masters.masters]
