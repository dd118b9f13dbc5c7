"""Say which device tensors without values (torch's meta device) stand for in plans and dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_planned_type = ContextVar("the type of the device that meta tensors stand for", default="cpu")
_in_kernel = ContextVar("whether what runs stands for one kernel of a GPU", default=False)


@contextmanager
def planning_for(device_type: str) -> Iterator[None]:
    """Let meta tensors stand for tensors of this type of device, inside the context."""
    token = _planned_type.set(device_type)
    try:
        yield
    finally:
        _planned_type.reset(token)


@contextmanager
def as_one_kernel() -> Iterator[None]:
    """Let what runs inside stand for one kernel of a GPU where meta tensors are on one."""
    token = _in_kernel.set(_planned_type.get() != "cpu")
    try:
        yield
    finally:
        _in_kernel.reset(token)


def is_in_kernel() -> bool:
    """Whether what runs stands for one kernel of a GPU, which makes its results and no more."""
    return _in_kernel.get()


def device_kind(device: torch.device) -> str:
    """Return the type of a device; for meta, that of the device which its tensors stand for."""
    return _planned_type.get() if device.type == "meta" else device.type
