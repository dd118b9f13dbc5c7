"""Collectives of tensors along mesh axes: bytes are counted by axis, operation and dtype.

Three kinds of traffic do not pass here. FSDP2's gathers and scatters and the sends of pipeline
schedules are torch's own calls; `parallel/fsdp.py` and `parallel/pipeline.py` add their bytes to
the same `Traffic`, but for the all-reduce between nodes of a hybrid FSDP run, which is not counted.
Objects that ranks agree by (`train/saving.py`) are not counted either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

# axis, operation, dtype
TrafficKey = tuple[str, str, str]

# torch 2.13's names; the ones before are deprecated there and gone sometime
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Traffic:
    """Payload bytes handed to collectives by this rank since the start."""

    def __init__(self) -> None:
        self.num_bytes: dict[TrafficKey, int] = defaultdict(int)
        self.num_calls: dict[TrafficKey, int] = defaultdict(int)

    def add(self, axis: str, operation: str, tensor: torch.Tensor) -> None:
        key = (axis, operation, str(tensor.dtype).removeprefix("torch."))
        self.num_bytes[key] += tensor.numel() * tensor.element_size()
        self.num_calls[key] += 1


@dataclass(frozen=True)
class Pending:
    """A reduction under way; `wait` returns its result."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Passing:
    """A tensor on its way to the next rank and another from the one before; `wait` returns that."""

    sent: torch.Tensor  # stays as it is until both have arrived
    received: torch.Tensor
    works: Sequence[dist.Work] = ()

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class Axis:
    """The ranks along one mesh axis (or several together), as seen from this rank.

    With `size` 1 every collective is the identity and costs nothing.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, "all_reduce_sum", False).wait()

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        """In place, not waited for."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, "all_reduce_sum", True)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place. The caller has made NaNs +inf: gloo's MAX treats NaN by rank order."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, "all_reduce_max", False).wait()

    def start_all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        """`all_reduce_max`, not waited for."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, "all_reduce_max", True)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, all of one shape, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        self.traffic.add(self.name, "all_gather", tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return gathered

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [size N, ...]: every rank's rows, in the order of ranks."""
        if self.size == 1:
            return tensor
        self.traffic.add(self.name, "all_gather", tensor)
        gathered = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        _all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def start_reduce_scatter_sum(self, tensor: torch.Tensor) -> Pending:
        """[size N, ...] -> [N, ...]: this rank's rows of the sum, not waited for."""
        if self.size == 1:
            return Pending(tensor, None)
        self.traffic.add(self.name, "reduce_scatter_sum", tensor)
        own = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        work = _reduce_scatter(own, tensor.contiguous(), group=self.group, async_op=True)
        return Pending(own, work)

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size N] -> [N]: this rank's range, a view."""
        return tensor.chunk(self.size)[self.rank]

    def start_reduce_scatter_in_place(self, tensor: torch.Tensor) -> Pending:
        """[size N]: the sum into this rank's range of it, not waited for; the rest stays."""
        own = self.own_part(tensor)
        if self.size == 1:
            return Pending(own, None)
        self.traffic.add(self.name, "reduce_scatter_sum", tensor)
        return Pending(own, _reduce_scatter(own, tensor, group=self.group, async_op=True))

    def start_all_gather_in_place(self, tensor: torch.Tensor) -> Pending:
        """[size N]: every rank's range into all of it, not waited for."""
        if self.size == 1:
            return Pending(tensor, None)
        own = self.own_part(tensor)
        self.traffic.add(self.name, "all_gather", own)
        return Pending(tensor, _all_gather(tensor, own, group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """In place: the tensor of the rank `source` of this axis."""
        if self.size > 1:
            self.traffic.add(self.name, "broadcast", tensor)
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def start_send(self, tensor: torch.Tensor, target: int) -> dist.Work:
        """To the rank `target` of this axis; the tensor stays as it is until the work is done."""
        self.traffic.add(self.name, "send", tensor)
        work = dist.isend(tensor, group=self.group, group_dst=target)
        assert work is not None
        return work

    def start_shift(self, tensor: torch.Tensor) -> Passing:
        """To the next rank of the ring, for the tensor of the one before, of the same shape."""
        if self.size == 1:
            return Passing(tensor, tensor)
        self.traffic.add(self.name, "send", tensor)
        received = torch.empty_like(tensor)
        if tensor.device.type == "meta":  # a simulated rank's, which nobody sends to
            return Passing(tensor, received)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )
        return Passing(tensor, received, works)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """In place, from the rank `source` of this axis; its sender counts the bytes."""
        dist.recv(tensor, group=self.group, group_src=source)
        return tensor

    def _all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, operation: str, is_async: bool
    ) -> Pending:
        if self.size == 1:
            return Pending(tensor, None)
        self.traffic.add(self.name, operation, tensor)
        work = dist.all_reduce(tensor, op=op, group=self.group, async_op=is_async)
        return Pending(tensor, work)
