"""SIGTERM, SIGINT and SIGUSR1 ask the loop to save and leave; a second one leaves at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

import torch

from megafp8.parallel.mesh import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Remembers the first signal; use as a context around training."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)  # as a shell reports a process that a signal ended
        self.signal = signal.Signals(number)


def agree(mesh: Mesh, *flags: bool) -> list[bool]:
    """Each flag is true on every rank if it is true on any; so all ranks act in the same step."""
    if mesh.world.size == 1:
        return list(flags)
    raised = torch.tensor([float(flag) for flag in flags], device=mesh.device)
    return [bool(flag) for flag in mesh.world.all_reduce_max(raised)]
