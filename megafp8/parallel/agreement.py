"""How ranks agree: one rank's value on all of them, and one rank's error raised by all of them.

The ranks agree within `Mesh.agreement`, where they wait for a rank that works on files however long
it takes, or within a `group` that the caller gives. Objects travel as JSON (`parallel.messages`),
so that no message can run code. They are not counted in `Traffic`: a step of training sends none,
unless it logs FP8's health.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megafp8.errors import RunError, UserError
from megafp8.fp8.rows import why_lists_differ, why_rows_differ
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.models.init import pieces_of
from megafp8.ops.exchange import broadcast_bytes, gather_bytes
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.messages import from_bytes, to_bytes
from megafp8.specs.geometry import DENSE

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
    sent = broadcast_bytes(to_bytes(value) if mesh.is_main else None, group or mesh.agreement)
    return value if mesh.is_main else from_bytes(sent)


def gather(mesh: Mesh, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's object, by rank."""
    if mesh.world.size == 1:
        return [value]
    return [from_bytes(c) for c in gather_bytes(to_bytes(value), group or mesh.agreement)]


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
    # On the rank's device, since the group of a run on GPUs is NCCL's.
    raised = torch.tensor([float(flag) for flag in flags], device=mesh.device)
    return [bool(flag) for flag in mesh.world.all_reduce_max(raised).tolist()]


def agree_on_rows(mesh: Mesh, scaling: ScalingState | NoScaling) -> None:
    """Agree on the rows of the scale tables before they are reduced; all ranks call it together.

    Raises:
        RunError: Ranks that reduce their amaxes together have different rows.
    """
    if isinstance(scaling, ScalingState):
        _agree(mesh, [(mesh.amax, partial(why_rows_differ, scaling))])


def agree_on_parameters(mesh: Mesh, params: Iterable[nn.Parameter]) -> None:
    """Agree on the parameters of each group of replicas, whose gradients are summed by place.

    All ranks call it together, with all parameters.

    Raises:
        RunError: Ranks that sum their gradients together have different parameters.
    """
    named = [
        (piece.group, f"{piece.name} {piece.offset}") for p in params for piece in pieces_of(p)
    ]
    checks = []
    for group in (DENSE, *mesh.groups):
        lists = {f"{group} parameters": [name for of, name in named if of == group]}
        checks.append((mesh.replicas_of(group).data, partial(why_lists_differ, lists)))
    _agree(mesh, checks)


def _agree(
    mesh: Mesh, checks: Iterable[tuple[Axis, Callable[[dist.ProcessGroup], str | None]]]
) -> None:
    """Raise on all ranks what a check says of the ranks of its axis."""
    checks = [(axis, check) for axis, check in checks if axis.size > 1]
    if mesh.agreement is None or not checks:  # a simulated rank has none to agree with
        return

    def act() -> None:
        for axis, check in checks:
            assert axis.group is not None
            if (difference := check(axis.group)) is not None:
                raise RunError(
                    f"ranks would reduce different tensors together: {difference}. All ranks must "
                    "run the same version of megafp8 with the same settings"
                )

    on_all(mesh, act)


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
