"""Which fused Adam is taken: one that updates as AdamW does, else torch's, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.models.init import normal, parameter
from megafp8.optim import kernels
from megafp8.optim.adamw import STATES, AdamW
from megafp8.optim.kernels import TORCH, choose_foreign, choose_kernel
from megafp8.optim.masters import Masters
from megafp8.specs.geometry import whole
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

    def make() -> AdamW:
        params = [
            parameter((3, 4), whole("matrix", (3, 4)), normal(1.0, 1), torch.bfloat16),
            parameter((4,), whole("bias", (4,)), normal(1.0, 2), torch.bfloat16),
        ]
        return AdamW(Masters(params), FUSED)

    with monkeypatch.context() as patch:
        patch.setattr("megafp8.optim.adamw.choose_kernel", chosen)
        theirs = make()
    assert theirs.kernel_name == "B's fused kernel"
    ours, continued = make(), make()
    assert ours.kernel_name.startswith(kernels.TORCH.name)
    for step in range(1, 6):
        if step == 4:
            assert theirs.num_updates == 3
            continued.set_num_updates(3)
            for mine, other in zip(continued.masters.masters, theirs.masters.masters, strict=True):
                mine.data.copy_(other.data)
            for name in STATES:
                for mine, other in zip(
                    continued.state_tensors(name), theirs.state_tensors(name), strict=True
                ):
                    mine.copy_(other)
        for optimizer in (ours, theirs, continued):
            generator = torch.Generator().manual_seed(step)
            optimizer.masters.flat_grad.normal_(generator=generator)
            optimizer.step(step)
    assert theirs.num_updates == ours.num_updates == 5
    for mine, other, third in zip(
        ours.masters.masters, theirs.masters.masters, continued.masters.masters, strict=True
    ):
        torch.testing.assert_close(other, mine, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(third, mine, rtol=1e-5, atol=1e-7)
