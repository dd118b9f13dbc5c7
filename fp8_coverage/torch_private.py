"""Name what coverage uses of torch that torch does not document; a test tries each."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

CALLER = 2**64 - 1
"""The number of an autograd node that belongs to no operation: one that adds up gradients."""


COPY = torch.ops.aten._to_copy


def newest_node() -> int:
    """Return the number of the newest autograd node that this thread has made."""
    return torch._C._autograd._get_sequence_nr() - 1


def running_node() -> int | None:
    """Return the number of the autograd node that runs, or None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def backward_pass() -> int:
    """Return a number of the backward pass that runs in this thread, or -1 outside of one."""
    return torch._C._current_graph_task_id()


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from all others that are alive, on meta too."""
    number: int = tensor.untyped_storage()._cdata
    return number


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor of a subclass is made of; of a plain one, itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(
        tensor, "__tensor_flatten__"
    ):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def is_composite(func: Any) -> bool:
    """Whether an operation is made of others, which `torch.inference_mode` hides."""
    has_kernel = getattr(func, "has_kernel_for_dispatch_key", None)  # not of higher-order ones
    return has_kernel is not None and has_kernel(torch._C.DispatchKey.CompositeImplicitAutograd)


def parameters_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's own parameters, without computing those that are parametrized."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]
