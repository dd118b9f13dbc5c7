"""How ranks agree: one rank's value on all of them, and one rank's error raised by all of them.

The ranks agree within `Mesh.agreement`, where they wait for a rank that works on files however long
it takes, or within a `group` that the caller gives. Objects travel as JSON (`parallel.messages`),
so that no message can run code. They are not counted in `Traffic`: a step of training sends none,
unless it logs FP8's health.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from megafp8.errors import UserError
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.messages import from_bytes, to_bytes

T = TypeVar("T")


def on_main(mesh: Mesh, act: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `act` on the main rank alone and return its value on every rank.

    The main rank gets the very object, the others a copy.

    Raises:
        UserError: What `act` raised, on every rank.
    """
    value, error = from_main(mesh, _tried(act) if mesh.is_main else None, group)
    if error is not None:
        raise_on_all(error)
    result: T = value
    return result


def on_all(mesh: Mesh, act: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `act` on every rank and return all values, by rank.

    Raises:
        UserError: What `act` raised on the lowest rank that failed, on every rank.
    """
    tried = gather(mesh, _tried(act), group)
    if (error := _cause([error for _, error in tried])) is not None:
        raise_on_all(error)
    return [value for value, _ in tried]


def from_main(mesh: Mesh, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the main rank's object on every rank of this job."""
    if mesh.world.size == 1:
        return value
    group = group or mesh.agreement
    content = to_bytes(value) if mesh.is_main else b""
    size = _number(len(content), group, mesh)
    dist.broadcast(size, src=0, group=group)  # so that the other ranks have memory for the bytes
    sent = _as_tensor(content, int(size), group, mesh)
    dist.broadcast(sent, src=0, group=group)
    return value if mesh.is_main else from_bytes(_as_bytes(sent))


def gather(mesh: Mesh, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's object, by rank."""
    if mesh.world.size == 1:
        return [value]
    group = group or mesh.agreement
    content = to_bytes(value)
    own_size = _number(len(content), group, mesh)
    sizes = [torch.zeros_like(own_size) for _ in range(mesh.world.size)]
    dist.all_gather(sizes, own_size, group=group)
    most = int(max(sizes))  # all ranks must send equally many bytes
    sent = _as_tensor(content, most, group, mesh)
    parts = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(parts, sent, group=group)
    pairs = zip(parts, sizes, strict=True)
    return [from_bytes(_as_bytes(part[: int(size)])) for part, size in pairs]


def _number(value: int, group: dist.ProcessGroup | None, mesh: Mesh) -> torch.Tensor:
    """Return a number as a tensor of shape (1,) that the group can send."""
    return torch.tensor([value], device=_device(group, mesh))


def _as_tensor(
    content: bytes, size: int, group: dist.ProcessGroup | None, mesh: Mesh
) -> torch.Tensor:
    """Return bytes as a tensor of `size` elements, of which the last ones are 0."""
    whole = torch.zeros(size, dtype=torch.uint8)
    if content:
        whole[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return whole.to(_device(group, mesh))


def _as_bytes(sent: torch.Tensor) -> bytes:
    return bytes(sent.cpu().numpy().data)


def _device(group: dist.ProcessGroup | None, mesh: Mesh) -> torch.device:
    """Return where tensors must be for the group: NCCL sends those of GPUs, gloo those of hosts."""
    return mesh.device if dist.get_backend(group) == "nccl" else torch.device("cpu")


def first_known(mesh: Mesh, value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the lowest rank's object that is not None, on every rank."""
    return next((v for v in gather(mesh, value, group) if v is not None), None)


def wait_for_all(mesh: Mesh) -> None:
    """Return when all ranks have called this function, however long one of them reads files."""
    gather(mesh, None)


def agree(mesh: Mesh, *flags: bool) -> list[bool]:
    """Return by flag whether it is raised on any rank; so all ranks act in the same step."""
    if mesh.world.size == 1:
        return list(flags)
    raised = torch.tensor([float(flag) for flag in flags], device=mesh.device)
    return [bool(flag) for flag in mesh.world.all_reduce_max(raised).tolist()]


def raise_on_all(error: UserError) -> NoReturn:
    """Raise an error that every rank has learned of: the main rank alone prints it."""
    error.is_shared = True
    raise error


def _tried(act: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return act(), None
    except UserError as error:
        return None, error


def _cause(errors: list[UserError | None]) -> UserError | None:
    """Return the lowest rank's error that is not a consequence of another rank's.

    A rank that fails may remove the directory in which another is about to write.
    """
    raised = [error for error in errors if error is not None]
    causes = [error for error in raised if "ENOENT" not in str(error)]
    return next(iter(causes or raised), None)
