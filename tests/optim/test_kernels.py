"""Which fused Adam is taken: one that updates as AdamW does, else torch's, with the reason."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch

from megafp8.models.init import normal, parameter
from megafp8.optim import kernels
from megafp8.optim.adamw import STATES, AdamW
from megafp8.optim.kernels import TORCH, choose_foreign, choose_kernel
from megafp8.optim.masters import Masters
from megafp8.optim.protocol import Optimizers
from megafp8.optim.schedules import learning_rate
from megafp8.specs.geometry import whole_pieces
from tests.kit.tensors import state_tensors
from tests.tiny import optim_spec

CPU = torch.device("cpu")
FUSED = optim_spec(name="fused_adam")


class GroupCounting(torch.optim.Optimizer):
    """With Apex's interface: the step count is the group's, and state is used if it is there."""

    decays_wrongly = False

    def __init__(self, groups: Any, lr: float, betas: Any, eps: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), t, lr = group["betas"], group["step"], group["lr"]
            for p in group["params"]:
                m, v = (self.state[p][name] for name in STATES)
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                if not self.decays_wrongly:
                    p.mul_(1 - lr * group["weight_decay"])
                p -= lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


class WithoutDecay(GroupCounting):
    decays_wrongly = True


class Broken(GroupCounting):
    def step(self) -> None:  # type: ignore[override]
        raise RuntimeError("no kernel image")


class FusedAdam(torch.optim.Optimizer):
    """Stand in for Apex's FusedAdam on a CPU: with its arguments, attributes and state.

    As in Apex, a group without `step` begins at 1, and moments are made for a parameter whose state
    is empty only.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or capturable or master_weights:
            raise RuntimeError("not used here")
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None, grads: Any = None) -> None:  # type: ignore[override]
        assert closure is None and grads is None
        self.updates += 1
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            (beta1, beta2), t, lr = group["betas"], group["step"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p.data).float()
                    state["exp_avg_sq"] = torch.zeros_like(p.data).float()
                m, v = state["exp_avg"], state["exp_avg_sq"]
                g = p.grad if self.adam_w_mode else p.grad + group["weight_decay"] * p
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
                if self.adam_w_mode:
                    update += group["weight_decay"] * p
                p -= lr * update


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Install a package `apex` that has `optimizers.FusedAdam`, and let this CPU be a GPU."""
    package, optimizers = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    package.__spec__ = importlib.machinery.ModuleSpec("apex", None)
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    monkeypatch.setattr(kernels, "runs_foreign_kernels", lambda device: True)
    return optimizers


def test_apex_is_used_where_it_is_installed(apex: types.ModuleType) -> None:
    """Three updates by Apex's interface equal those of torch's plain AdamW."""
    params = [parameter((3, 4), whole_pieces("matrix", (3, 4)), normal(1.0, 1), torch.float32)]
    ours = Optimizers(Masters(params), FUSED)
    (adamw,) = ours.optimizers
    assert ours.describe() == "Apex's fused kernel" and isinstance(adamw, AdamW)
    assert isinstance(adamw._torch, FusedAdam)
    copy = torch.nn.Parameter(ours.masters.masters[0].detach().clone())
    plain = torch.optim.AdamW(
        [copy], lr=1.0, betas=FUSED.betas, eps=FUSED.eps, weight_decay=FUSED.weight_decay
    )
    for step in range(1, 4):
        generator = torch.Generator().manual_seed(step)
        ours.masters.own_grads[0].normal_(generator=generator)
        copy.grad = ours.masters.grads[0].clone()
        plain.param_groups[0]["lr"] = learning_rate(FUSED, step)
        ours.step(step)
        plain.step()
    assert adamw._torch.updates == ours.num_updates == 3
    torch.testing.assert_close(ours.masters.masters[0].detach(), copy.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_apex_is_not_used_unasked(apex: types.ModuleType, name: str) -> None:
    assert choose_kernel(optim_spec(name=name), CPU) == (TORCH, TORCH.name)


def test_an_apex_without_its_kernels_is_named(apex: types.ModuleType) -> None:
    """So is a build of Apex without CUDA extensions, whose FusedAdam raises."""

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")

    apex.FusedAdam = raises  # type: ignore[attr-defined]
    kernel, why = choose_kernel(FUSED, CPU)
    assert kernel is TORCH
    assert "Apex's failed (RuntimeError: apex.optimizers.FusedAdam requires cuda extensions" in why


def test_the_first_that_updates_as_adamw() -> None:
    finders = {"A": lambda: None, "B": lambda: GroupCounting, "C": lambda: WithoutDecay}
    kernel, why = choose_foreign(FUSED, CPU, finders)
    assert why == kernel.name == "B's fused kernel"


def test_otherwise_torchs_and_why() -> None:
    finders = {"A": lambda: None, "B": lambda: WithoutDecay, "C": lambda: Broken}
    kernel, why = choose_foreign(FUSED, CPU, finders)
    assert kernel is TORCH
    assert why == (
        "torch's fused kernel (A is not installed; B's updates a parameter in another way; "
        "C's failed (RuntimeError: no kernel image))"
    )


@pytest.mark.parametrize("name", ["adam", "adamw", "fused_adam", "distributed_fused_adam"])
def test_on_a_cpu_it_is_torchs(name: str) -> None:
    kernel, why = choose_kernel(optim_spec(name=name), CPU)
    assert kernel is TORCH
    assert ("need a GPU" in why) == ("fused_adam" in name)


def test_a_chosen_one_trains_and_continues_like_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five updates, with the state carried over to torch's kernel after three of them."""

    def chosen(*_: object) -> Any:
        return choose_foreign(FUSED, CPU, {"B": lambda: GroupCounting})

    def make() -> Optimizers:
        params = [
            parameter((3, 4), whole_pieces("matrix", (3, 4)), normal(1.0, 1), torch.bfloat16),
            parameter((4,), whole_pieces("bias", (4,)), normal(1.0, 2), torch.bfloat16),
        ]
        return Optimizers(Masters(params), FUSED)

    with monkeypatch.context() as patch:
        patch.setattr("megafp8.optim.adamw.choose_kernel", chosen)
        theirs = make()
    assert theirs.describe() == "B's fused kernel"
    ours, continued = make(), make()
    assert ours.describe().startswith(kernels.TORCH.name)
    for step in range(1, 6):
        if step == 4:
            assert theirs.num_updates == 3
            continued.set_num_updates(3)
            for mine, other in zip(continued.masters.masters, theirs.masters.masters, strict=True):
                mine.data.copy_(other.data)
            for name in STATES:
                for mine, other in zip(
                    state_tensors(continued, name), state_tensors(theirs, name), strict=True
                ):
                    mine.copy_(other)
        for optimizer in (ours, theirs, continued):
            generator = torch.Generator().manual_seed(step)
            optimizer.masters.own_grads[0].normal_(generator=generator)
            optimizer.step(step)
    assert theirs.num_updates == ours.num_updates == 5
    for mine, other, third in zip(
        ours.masters.masters, theirs.masters.masters, continued.masters.masters, strict=True
    ):
        torch.testing.assert_close(other, mine, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(third, mine, rtol=1e-5, atol=1e-7)
