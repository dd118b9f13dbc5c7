"""Choose the fused kernel that computes Adam's update: Apex's, Transformer Engine's or torch's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from megafp8.ops import torch_private
from megafp8.specs import OptimSpec

Groups = list[dict[str, Any]]
STATES_OF_ADAM = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Kernel:
    """Describe a fused Adam.

    `make` returns an optimizer for parameter groups. `counts_in_groups` says that the optimizer
    keeps its step count as one number in each parameter group, instead of one tensor for each
    parameter.
    """

    name: str
    make: Callable[[Groups, OptimSpec], Any]
    counts_in_groups: bool


class TorchAdam:
    """Call torch's fused Adam on lists of tensors that stay the same from step to step.

    `torch.optim.AdamW` runs the same kernel, but gathers the lists in every step, which takes about
    1 % of a very small model's step on a CPU. Here all states exist from the start, and nothing can
    replace them: who loads a state writes into its tensors.

        param_groups   as those of torch's optimizers: `params`, `weight_decay`, `lr`
        state          of each parameter: `step`, `exp_avg`, `exp_avg_sq`
        grad_scale, found_inf   0-d FP32 on the device, or None; see `torch.amp.GradScaler`
    """

    def __init__(self, groups: Groups, spec: OptimSpec) -> None:
        """Make the states of all parameters of the groups."""
        self.param_groups = [{**group, "lr": spec.lr} for group in groups]
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self._spec = spec
        self._states = [_fresh_states(group["params"]) for group in groups]
        self.state = {
            param: MappingProxyType(dict(zip(STATES_OF_ADAM, states, strict=True)))
            for group, lists in zip(groups, self._states, strict=True)
            for param, *states in zip(group["params"], *lists, strict=True)
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters by their `.grad`; a group without any gradient stays as it is."""
        for group, (steps, exp_avgs, exp_avg_sqs) in zip(
            self.param_groups, self._states, strict=True
        ):
            torch_private.fused_adam_(
                group["params"],
                exp_avgs,
                exp_avg_sqs,
                steps,
                is_decoupled=self._spec.name != "adam",
                lr=group["lr"],
                betas=self._spec.betas,
                eps=self._spec.eps,
                weight_decay=group["weight_decay"],
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


TORCH = Kernel("torch's fused kernel", TorchAdam, counts_in_groups=False)


def _fresh_states(params: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """Return the counts of updates, and both moments, of the parameters."""
    steps = [torch.zeros((), device=param.device) for param in params]
    return steps, *([torch.zeros_like(param) for param in params] for _ in range(2))


def choose_kernel(spec: OptimSpec, device: torch.device) -> tuple[Kernel, str]:
    """Return the kernel for `spec` on `device`, and its name with the reason for the log.

    Apex's and Transformer Engine's kernels are considered on a GPU only.
    """
    if spec.name not in ("fused_adam", "distributed_fused_adam"):
        return TORCH, TORCH.name
    if not runs_foreign_kernels(device):
        return TORCH, f"{TORCH.name} (Apex's and Transformer Engine's need a GPU)"
    te_adam = partial(fused_adam, "transformer_engine", "transformer_engine.pytorch.optimizers")
    return choose_foreign(spec, device, {"Apex": apex_adam, "Transformer Engine": te_adam})


def runs_foreign_kernels(device: torch.device) -> bool:
    """Whether the kernels of other packages can run on the device; tests replace the function."""
    return device.type == "cuda"


def choose_foreign(
    spec: OptimSpec, device: torch.device, finders: dict[str, Callable[[], Any | None]]
) -> tuple[Kernel, str]:
    """Return the first of other packages' kernels that updates a scratch parameter as AdamW does.

    `finders` gives for each package's name a function that returns its class, or None where it is
    not installed. The second result is the kernel's name, with the reasons if it is torch's.
    """
    why = []
    for name, find in finders.items():
        optimizer_class = find()
        if optimizer_class is None:
            why.append(f"{name} is not installed")
            continue
        kernel = Kernel(f"{name}'s fused kernel", _maker(optimizer_class), counts_in_groups=True)
        problem = _problem(kernel, spec, device)
        if problem is None:
            return kernel, kernel.name
        why.append(f"{name}'s {problem}")
    return TORCH, f"{TORCH.name} ({'; '.join(why)})"


def apex_adam() -> Any | None:
    """Return NVIDIA Apex's FusedAdam, or None; on PyPI, the name `apex` is another project's."""
    return fused_adam("apex", "apex.optimizers")


def fused_adam(package: str, module: str) -> Any | None:
    """Return the class FusedAdam of a package's module, or None where it is missing.

    The first import of Transformer Engine takes seconds.
    """
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return getattr(importlib.import_module(module), "FusedAdam", None)
    except Exception:  # built for another torch, without its libraries, or its own assertion failed
        return None


def _maker(optimizer_class: Any) -> Callable[[Groups, OptimSpec], Any]:
    def make(groups: Groups, spec: OptimSpec) -> Any:
        return optimizer_class(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, adam_w_mode=True)

    return make


def _problem(kernel: Kernel, spec: OptimSpec, device: torch.device) -> str | None:
    """Return what is wrong with a kernel's update, or None if it equals torch's AdamW.

    Two updates from a prepared state are compared. The versions of these packages keep state in
    different ways, and a wrong assumption would train with wrong numbers.
    """
    try:
        theirs = _two_updates(kernel, spec, device)
    except Exception as error:  # whatever failed, torch's kernel can do the update
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
    """Allocate the state that the first step would allocate, so that a checkpoint can fill it."""
    if kernel is TORCH:
        return  # it has its state from the start
    for param in params:
        state = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param)
    set_count(kernel, optimizer, 0)


def set_count(kernel: Kernel, optimizer: Any, count: int) -> None:
    """Set the number of applied updates, which is Adam's t, to `count`."""
    for group in optimizer.param_groups:
        if kernel.counts_in_groups:
            group["step"] = count
        else:
            for param in group["params"]:
                optimizer.state[param]["step"].fill_(count)
