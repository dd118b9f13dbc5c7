"""Run Adam on the FP32 master weights with a fused kernel."""

from __future__ import annotations

import torch

from megafp8.optim.kernels import TORCH, choose_kernel, count, prepare_state, set_count
from megafp8.optim.masters import Masters, clip, coefficient_on_device
from megafp8.optim.schedules import learning_rate
from megafp8.specs import OptimSpec

STATES = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Update FP32 master weights with Adam (Kingma & Ba 2015, arXiv 1412.6980).

    Weight decay is decoupled (Loshchilov & Hutter 2019, arXiv 1711.05101) or, under the name
    `adam`, an L2 term of the gradient. As in NeMo, norms and biases do not decay, unless
    `spec.decays_vectors` is set. The moments are FP32, with the shape of their master weight.
    """

    def __init__(self, masters: Masters, spec: OptimSpec) -> None:
        self.masters, self.spec = masters, spec
        self._kernel, self.kernel_name = choose_kernel(spec, masters.device)
        both = list(zip(masters.segments, masters.masters, strict=True))
        decaying = [master for segment, master in both if spec.decays(segment.param.dim())]
        others = [master for segment, master in both if not spec.decays(segment.param.dim())]
        if not both:  # with very many ranks, the shard of one may be empty
            others = [torch.nn.Parameter(torch.zeros(0, device=masters.device))]
        groups = [
            {"params": decaying, "weight_decay": spec.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._torch = self._kernel.make([group for group in groups if group["params"]], spec)
        prepare_state(self._kernel, self._torch, decaying + others)

    @property
    def decides_on_device(self) -> bool:
        """Whether the kernel itself clips and, after a step that is not finite, updates nothing.

        The host then need not know the norm before the update, and no pass over the gradients is
        spent on clipping. torch's kernel does both (`grad_scale`, `found_inf`), where gradients are
        clipped by norm. It is used so on GPUs; on CPUs the bits stay those of `clip`.
        """
        by_torch = self._kernel is TORCH and self.spec.clip_algorithm == "norm"
        return by_torch and self.masters.device.type == "cuda"

    def update(self, step: int, norm: float, *, divisor: float) -> None:
        """Divide the gradients in `masters` by `divisor`, clip them, and apply them.

        `norm` is the norm of the gradients after the division; `step` is counted from 1.
        """
        clip(self.masters.own_grads, norm, self.spec, divisor=divisor)
        self.step(step)

    @torch.no_grad()
    def update_if_finite(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor, *, divisor: torch.Tensor
    ) -> None:
        """Do what `update` does, unless the loss or the norm is not finite, without the host.

        The arguments are 0-d FP64 tensors on the device. If the step is skipped, masters, moments,
        gradients and the count of updates stay as they are; the masters are written into the
        weights again, since FP8 scales may have moved. It is called only with `decides_on_device`.
        """
        is_finite = loss.isfinite() & norm.isfinite()
        self._torch.grad_scale = (divisor / coefficient_on_device(norm, self.spec)).float()
        self._torch.found_inf = is_finite.logical_not().float()
        self.step(step)
        self._torch.grad_scale = self._torch.found_inf = None

    def step(self, step: int) -> None:
        """Apply the gradients in `masters` as optimizer step `step`, counted from 1.

        The updated master weights are then rounded into the weights that the model computes with.
        """
        for group in self._torch.param_groups:
            group["lr"] = learning_rate(self.spec, step)
        with self.masters.lend_grads():
            self._torch.step()
        self.masters.write_back()

    @property
    def num_updates(self) -> int:
        """Return how many updates were applied, which is Adam's t; skipped steps do not count."""
        return count(self._kernel, self._torch)

    def set_num_updates(self, count: int) -> None:
        """Set Adam's t to `count`, when training continues from a checkpoint."""
        set_count(self._kernel, self._torch, count)

    def state_tensors(self, name: str) -> list[torch.Tensor]:
        """Return the FP32 moments of every master weight, in the order of the masters.

        `name` is `exp_avg` or `exp_avg_sq`.
        """
        assert name in STATES
        return [self._torch.state[master][name] for master in self.masters.masters]
