"""Keep the private names of torch that are replaced here; tried with torch 2.11, 2.13, 2.15."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch


def load_dynamo() -> None:
    """Import the tracer of `torch.compile`, which records what there is at its first use.

    These are the optional packages, and the functions of torch that a graph may have.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map()


def frame_of_caller(above: int) -> Any:
    """Return the frame of a caller: `above` calls above the function that calls this.

    While `torch.compile` traces the code that asks, no frame of it runs. Its tracer calls a
    function that `torch.compiler.assume_constant_result` has marked, and keeps of each frame what
    is traced, with the same `f_globals` and `f_code`.
    """
    caller = sys._getframe(2)
    if not caller.f_globals["__name__"].startswith("torch._dynamo"):
        return sys._getframe(above + 1)
    traced = caller.f_locals["tx"]
    for _ in range(above - 1):
        traced = traced.parent
    return traced


def compile_within_callers_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `torch.compile` trace a function where it traces the caller; elsewhere it runs as it is.

    What is compiled alone, below a caller that is not, knows no caller and is used for all of them.
    """
    frames: Any = importlib.import_module("torch._dynamo.eval_frame")
    skip = frames.FrameAction.SKIP
    strategy = frames.FrameExecStrategy(skip, skip)  # for the function, and for what it calls
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def wrap_traced_is_cuda(is_told: Callable[[str], bool]) -> Callable[[], None]:
    """Let `Tensor.is_cuda` be true where code is traced of a module for which `is_told` says so.

    The result undoes it.
    """
    variables: Any = importlib.import_module("torch._dynamo.variables")
    kind = variables.TensorVariable
    original = kind.method_attr_is_cuda

    def is_cuda(tensor: Any, tracer: Any) -> Any:
        is_true = is_told(tracer.f_globals.get("__name__", ""))
        return variables.ConstantVariable.create(True) if is_true else original(tensor, tracer)

    kind.method_attr_is_cuda = is_cuda
    return lambda: setattr(kind, "method_attr_is_cuda", original)


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


def recompute_on(device: str) -> Callable[[], None]:
    """Let `torch.utils.checkpoint` recompute as autocast for `device` says, for the CPU's tensors.

    The result undoes it.
    """
    kind: Any = importlib.import_module("torch.utils.checkpoint").DefaultDeviceType
    before = kind._default_device_type
    kind.set_device_type(device)
    return lambda: kind.set_device_type(before)
