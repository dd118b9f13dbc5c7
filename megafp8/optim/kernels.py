"""Who computes Adam's update: Apex, Transformer Engine or torch, whichever really can."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.precision.backends import te_adam
from megafp8.specs import OptimSpec

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Kernel:
    """A fused Adam. `counts_in_groups`: its step count is one number a parameter group, not one
    tensor a parameter."""

    name: str
    make: Callable[[Groups, OptimSpec], Any]
    counts_in_groups: bool


def _torch_adam(groups: Groups, spec: OptimSpec) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if spec.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


TORCH = Kernel("torch's fused kernel", _torch_adam, counts_in_groups=False)


def choose_kernel(spec: OptimSpec, device: torch.device) -> tuple[Kernel, str]:
    """The kernel, and for the log why it is this one. On a GPU the fused ones have a choice."""
    if spec.name not in ("fused_adam", "distributed_fused_adam"):
        return TORCH, TORCH.name
    if device.type != "cuda":
        return TORCH, f"{TORCH.name} (Apex's and Transformer Engine's need a GPU)"
    return choose_foreign(spec, device, {"Apex": _apex, "Transformer Engine": te_adam.fused_adam})


def choose_foreign(
    spec: OptimSpec, device: torch.device, finders: dict[str, Callable[[], Any | None]]
) -> tuple[Kernel, str]:
    """The first of other packages' classes that updates a scratch parameter as AdamW does."""
    why = []
    for name, find in finders.items():
        found = find()
        if found is None:
            why.append(f"{name} is not installed")
            continue
        kernel = Kernel(f"{name}'s fused kernel", _maker(found), counts_in_groups=True)
        problem = _problem(kernel, spec, device)
        if problem is None:
            return kernel, kernel.name
        why.append(f"{name}'s {problem}")
    return TORCH, f"{TORCH.name} ({'; '.join(why)})"


def _apex() -> Any | None:
    """NVIDIA's Apex; another project has its name on PyPI."""
    if importlib.util.find_spec("apex") is None:
        return None
    try:
        return getattr(importlib.import_module("apex.optimizers"), "FusedAdam", None)
    except (ImportError, OSError, RuntimeError):
        return None


def _maker(fused_adam: Any) -> Callable[[Groups, OptimSpec], Any]:
    def make(groups: Groups, spec: OptimSpec) -> Any:
        return fused_adam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, adam_w_mode=True)

    return make


def _problem(kernel: Kernel, spec: OptimSpec, device: torch.device) -> str | None:
    """What is wrong with two updates from prepared state, against torch's AdamW; None if nothing.

    Their versions differ in how they keep state, and a wrong guess would train on wrongly.
    """
    try:
        theirs = _two_updates(kernel, spec, device)
    except Exception as error:  # whatever it is, torch's can do it
        return f"failed ({type(error).__name__}: {error})"
    ours = _two_updates(TORCH, spec, device)
    same = all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(theirs, ours, strict=True)
    )
    return None if same else "updates a parameter in another way"


def _two_updates(kernel: Kernel, spec: OptimSpec, device: torch.device) -> list[torch.Tensor]:
    start = torch.linspace(-1.0, 1.0, 64, device=device)
    param = torch.nn.Parameter(start.clone())
    optimizer = kernel.make([{"params": [param], "weight_decay": 0.1}], spec)
    prepare_state(kernel, optimizer, [param])
    for number in (1.0, 2.0):
        param.grad = number * start.square() - 0.3
        optimizer.step()
    state = optimizer.state[param]
    return [param.detach(), state["exp_avg"], state["exp_avg_sq"]]


def prepare_state(kernel: Kernel, optimizer: Any, params: Sequence[torch.nn.Parameter]) -> None:
    """Allocate what the first step would, so that a checkpoint can fill it."""
    for param in params:
        state = optimizer.state[param]
        if not kernel.counts_in_groups:
            state["step"] = torch.zeros((), device=param.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param)
    set_count(kernel, optimizer, 0)


def count(kernel: Kernel, optimizer: Any) -> int:
    """Updates applied so far: Adam's t."""
    group = optimizer.param_groups[0]
    if kernel.counts_in_groups:
        return int(group["step"])
    return int(optimizer.state[group["params"][0]]["step"])


def set_count(kernel: Kernel, optimizer: Any, count: int) -> None:
    for group in optimizer.param_groups:
        if kernel.counts_in_groups:
            group["step"] = count
        else:
            for param in group["params"]:
                optimizer.state[param]["step"].fill_(count)
