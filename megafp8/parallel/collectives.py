"""Define the collectives along mesh axes; bytes are counted by axis, operation and dtype.

Three kinds of traffic do not pass through this module. FSDP2's gathers and scatters and the sends
of pipeline schedules are torch's own calls: `parallel/fsdp.py` and `parallel/pipeline.py` add their
bytes to the same `Traffic`, except the all-reduce between nodes of a hybrid FSDP run, which is not
counted. Python objects that ranks exchange (`parallel/agreement.py`) are not counted either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megafp8.fp8.scaling import Pending

# axis, operation, dtype
TrafficKey = tuple[str, str, str]

# names since torch 2.13, which deprecates the older ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return FP8 numbers as bytes, since not every communication backend knows FP8 dtypes.

    A tensor of wider numbers is returned as it is.
    """
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class Traffic:
    """Count the payload bytes and calls that this rank has handed to collectives since the
    start.
    """

    def __init__(self) -> None:
        self.num_bytes: dict[TrafficKey, int] = defaultdict(int)
        self.num_calls: dict[TrafficKey, int] = defaultdict(int)

    def add(self, axis: str, operation: str, tensor: torch.Tensor) -> None:
        """Count one call of `operation` on `axis` with this tensor's bytes and dtype."""
        key = (axis, operation, str(tensor.dtype).removeprefix("torch."))
        self.num_bytes[key] += tensor.numel() * tensor.element_size()
        self.num_calls[key] += 1


@dataclass(frozen=True)
class Axis:
    """Hold the ranks along one mesh axis (or several together), as seen from this rank.

    Every method is a collective: all ranks of the axis must call it in the same order with tensors
    of the same shape and dtype. With `size` 1 every collective is the identity and costs nothing.
    Methods that start with `start_` return at once; their result is valid after `wait`.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the tensor over the ranks, in place; return it."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, "all_reduce_sum", False).wait()

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        """Start to sum the tensor over the ranks, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, "all_reduce_sum", True)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the elementwise maximum over the ranks, in place; return the tensor.

        The caller must have replaced NaN by +inf, because gloo's MAX treats NaN by rank order.
        """
        return self._all_reduce(tensor, dist.ReduceOp.MAX, "all_reduce_max", False).wait()

    def start_all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        """Start `all_reduce_max`, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, "all_reduce_max", True)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor in the order of ranks; all have the same shape."""
        if self.size == 1:
            return [tensor]
        self.traffic.add(self.name, "all_gather", tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self.group)
        return gathered

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's rows in the order of ranks: [N, ...] -> [size N, ...]."""
        if self.size == 1:
            return tensor
        self.traffic.add(self.name, "all_gather", tensor)
        gathered = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        _all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def start_reduce_scatter_sum(self, tensor: torch.Tensor) -> Pending:
        """Start a sum of which each rank gets its own rows: [size N, ...] -> [N, ...]."""
        if self.size == 1:
            return Pending(tensor)
        self.traffic.add(self.name, "reduce_scatter_sum", tensor)
        own_rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        work = _reduce_scatter(own_rows, tensor.contiguous(), group=self.group, async_op=True)
        return Pending(own_rows, (work,))

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's range: [size N] -> [N]."""
        return tensor.chunk(self.size)[self.rank]

    def start_reduce_scatter_in_place(self, tensor: torch.Tensor) -> Pending:
        """Start a sum of [size N] that is written into this rank's range [N] of the tensor.

        The rest of the tensor keeps its values.
        """
        own_range = self.own_part(tensor)
        if self.size == 1:
            return Pending(own_range)
        self.traffic.add(self.name, "reduce_scatter_sum", tensor)
        work = _reduce_scatter(own_range, tensor, group=self.group, async_op=True)
        return Pending(own_range, (work,))

    def start_all_gather_in_place(self, tensor: torch.Tensor) -> Pending:
        """Start to fill the tensor [size N] with every rank's own range [N] of it."""
        if self.size == 1:
            return Pending(tensor)
        own_range = self.own_part(tensor)
        self.traffic.add(self.name, "all_gather", own_range)
        work = _all_gather(tensor, own_range, group=self.group, async_op=True)
        return Pending(tensor, (work,))

    def start_all_to_all(
        self, tensor: torch.Tensor, parts: Sequence[int], memory: torch.Tensor | None = None
    ) -> Pending:
        """Start to send the next `parts[rank]` elements of a flat tensor to each rank.

        The result [size, N] has in row r what rank r has sent to this rank: N is this rank's entry
        of `parts`, which is the same on all ranks. It is written into `memory`, a flat tensor of at
        least as many elements, or into new memory.
        """
        if self.size == 1:
            return Pending(tensor[None])
        self.traffic.add(self.name, "all_to_all", tensor)
        num_own = parts[self.rank]
        if memory is None:
            memory = tensor.new_empty(self.size * num_own)
        received = memory[: self.size * num_own].view(self.size, num_own)
        work = dist.all_to_all_single(
            received.view(-1), tensor, [num_own] * self.size, list(parts), self.group, async_op=True
        )
        return Pending(received, (work,), sent=tensor)

    def exchange_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send the next `sent[rank]` rows to each rank; return what all have sent to this one.

        The result has the `received[rank]` rows of each rank in the order of ranks. Any of these
        numbers may be 0, and they may differ between ranks: [sum(sent), ...] -> [sum(received),
        ...].
        """
        if self.size == 1:
            return rows
        self.traffic.add(self.name, "all_to_all", rows)
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(
            result, rows.contiguous(), list(received), list(sent), group=self.group
        )
        return result

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy the tensor of rank `source` of this axis to all its ranks, in place; return it."""
        if self.size > 1:
            self.traffic.add(self.name, "broadcast", tensor)
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def start_send(self, tensor: torch.Tensor, target: int) -> Pending:
        """Start to send the tensor to rank `target` of this axis.

        The tensor must not change before `wait`.
        """
        self.traffic.add(self.name, "send", tensor)
        work = dist.isend(tensor, group=self.group, group_dst=target)
        assert work is not None
        return Pending(tensor, (work,), tensor)

    def start_shift(self, tensor: torch.Tensor) -> Pending:
        """Start to send the tensor to the next rank of the ring and to receive one from the
        previous.

        Both tensors have the same shape and dtype. The sent tensor must not change before `wait`.
        """
        if self.size == 1:
            return Pending(tensor)
        self.traffic.add(self.name, "send", tensor)
        received = torch.empty_like(tensor)
        if tensor.device.type == "meta":  # a simulated rank has no peers
            return Pending(received, sent=tensor)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )
        return Pending(received, works, tensor)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive the tensor from rank `source` of this axis, in place; only the sender counts
        the bytes.
        """
        dist.recv(tensor, group=self.group, group_src=source)
        return tensor

    def _all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, operation: str, is_async: bool
    ) -> Pending:
        """Start a reduction in place, or end it at once unless `is_async`; count its bytes."""
        if self.size == 1:
            return Pending(tensor)
        self.traffic.add(self.name, operation, tensor)
        work = dist.all_reduce(tensor, op=op, group=self.group, async_op=is_async)
        return Pending(tensor, () if work is None else (work,))
