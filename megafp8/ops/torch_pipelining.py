"""Keep every private name of torch's pipelines that the project uses.

What `torch_private` says of its names goes for these too. They have a file of their own because
torch's schedules take long to import, and only runs with pipelines need them.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import schedules


class NoMessagesToItself:
    """Let a pipeline stage open connections to other ranks only; a mix-in before `PipelineStage`.

    Before its first microbatch each stage sends its neighbours a number. With the schedule ZBV two
    neighbours are on one rank, and gloo, unlike NCCL, has no connection of a rank to itself. torch
    2.13 no longer does so for stages of its own class.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        messages: list[Any] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [each for each in messages if each.group_peer != self.group_rank]  # type: ignore[attr-defined]

    def _refuse_pickles(self, *_: Any) -> Any:
        """Refuse to ask another stage for the shapes of its tensors, which torch pickles.

        Our stages know their shapes, so that torch does not ask.
        """
        raise AssertionError("pipeline stages exchange no pickled objects")

    _recv_meta = _send_meta = _shape_inference = _refuse_pickles


class ReceivesWhenDue:
    """Let a pipeline stage hold a message only until the pass that needs it is over; a mix-in.

    Up to 2.14 torch makes a buffer for each message of a step when the first step begins, and keeps
    all of them: a rank would hold all microbatches of a step, whatever its schedule. torch 2.14
    alone gives the ranks for a receipt as an argument.
    """

    device: torch.device

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[misc]

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)  # type: ignore[misc]

    def _get_recv_ops(self, recv_infos: Sequence[Any], *group: Any) -> Any:
        _move_buffers(recv_infos, self.device)
        return super()._get_recv_ops(recv_infos, *group)  # type: ignore[misc]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)  # type: ignore[misc]
        received = self.args_recv_info[fwd_chunk_id]  # type: ignore[attr-defined]
        _move_buffers(received, torch.device("meta"))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)  # type: ignore[misc]
        received = self.grad_recv_info[bwd_chunk_id]  # type: ignore[attr-defined]
        _move_buffers(received, torch.device("meta"))

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


def _move_buffers(infos: Sequence[Any], device: torch.device) -> None:
    """Give what a stage receives memory on `device`; on meta it has none."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None:
            new = torch.empty_like(buffer, device=device)
            info.buffer = new.requires_grad_(buffer.requires_grad)


def few_sends(kind: type, kept: int) -> dict[str, int]:
    """Return the argument with which torch's schedule keeps `kept` sends, from torch 2.15 on.

    It is empty for an older torch, whose schedules of several stages need `FewSends`.
    """
    name = "max_outstanding_sends"
    return {name: kept} if name in inspect.signature(kind).parameters else {}


class FewSends:
    """Let a schedule of several stages keep its last sends only; torch up to 2.14 keeps all.

    At most `kept` messages are on their way: before another one is sent, the oldest must have
    arrived. No rank waits for ever, since torch makes the lists of all ranks in one order, in which
    a receiver does nothing between the send of a message and its receipt.
    """

    def __init__(self, schedule: Any, kept: int) -> None:
        self._kept = kept
        self._sends: deque[list[Any]] = deque()
        self._stages = {stage.stage_index: stage for stage in schedule._stages}
        functions = schedule._comp_type_to_function_map
        functions[schedules.SEND_F] = self._send("get_fwd_send_ops")
        functions[schedules.SEND_B] = self._send("get_bwd_send_ops")

    def _send(self, ops_of: str) -> Callable[[Any, Any], None]:
        def send(action: Any, context: Any) -> None:
            self.finish(self._kept - 1)
            ops = getattr(self._stages[action.stage_index], ops_of)(action.microbatch_index)
            self._sends.append(schedules._batch_p2p(ops))

        return send

    def finish(self, kept: int = 0) -> None:
        """Wait for all sends but the last `kept`."""
        while len(self._sends) > kept:
            schedules._wait_batch_p2p(self._sends.popleft())
