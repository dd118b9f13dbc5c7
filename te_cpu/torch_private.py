"""Keep the private names of torch that are replaced here; tried with torch 2.11 and 2.13."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def load_dynamo() -> None:
    """Import the tracer of `torch.compile`, which records what there is at its first use.

    These are the optional packages, and the functions of torch that a graph may have.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map()


def wrap_default_device(place: Callable[[Any], Any]) -> Callable[[], None]:
    """Let `torch.set_default_device` and `with torch.device(...)` choose `place` of a device.

    The result undoes it.
    """
    from torch.utils._device import DeviceContext, _device_constructors

    _device_constructors()  # torch notes once which functions make tensors: its own ones, so far
    context: Any = DeviceContext
    original = context.__init__
    context.__init__ = lambda self, device: original(self, place(device))
    return lambda: setattr(context, "__init__", original)


def wrap_make_wrapper_subclass(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[], None]:
    """Replace the function that makes tensor subclasses without storage by `wrap` of it.

    The result puts the original back.
    """
    tensor: Any = torch.Tensor
    original = tensor._make_wrapper_subclass
    tensor._make_wrapper_subclass = staticmethod(wrap(original))
    return lambda: setattr(tensor, "_make_wrapper_subclass", staticmethod(original))


def wrap_coalescing_manager(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[], None]:
    """Replace the context that sends several collectives together by `wrap` of it.

    The result puts the original back.
    """
    distributed: Any = torch.distributed
    original = distributed._coalescing_manager
    distributed._coalescing_manager = wrap(original)
    return lambda: setattr(distributed, "_coalescing_manager", original)


def read_from(device: str) -> Callable[[], None]:
    """Let `torch.load` put on the CPU what a file or `map_location` says is on `device`.

    The result undoes it.
    """
    serialization: Any = torch.serialization
    before = [*serialization._package_registry]
    serialization.register_package(
        0,  # before the CPU's 10 and CUDA's 20
        lambda storage: None,
        lambda storage, place: storage if place.partition(":")[0] == device else None,
    )

    def undo() -> None:
        serialization._package_registry[:] = before

    return undo
