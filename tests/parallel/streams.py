"""A double of a GPU's streams and of its allocator, for FSDP on a CPU.

A GPU's streams run beside each other, and a tensor's memory belongs to the stream on which it was
made: once Python has dropped the tensor, the next tensor of that stream may get its memory, even
while another stream has yet to read it. Only an event, or whoever holds the tensor, prevents that.
torch's CPU streams do nothing; the double follows the operations, the waits and the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    def __init__(self, priority: int = 0) -> None:
        self.length = 0  # operations so far
        self.seen: dict[Stream, int] = {}  # how much of each other stream lies before the next one

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, length in event.seen.items():
            self.seen[stream] = max(length, self.seen.get(stream, 0))


class Event:
    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.seen = stream.seen | {stream: stream.length}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)


def current_stream() -> Stream:
    stream: Any = torch.cpu.current_stream()
    return stream  # type: ignore[no-any-return]


class Block:
    """The memory of one tensor: where it was made, where and when it was read last."""

    def __init__(self, stream: Stream, made_by: str) -> None:
        self.stream, self.made_by = stream, made_by
        self.reads: dict[Stream, int] = {}


class Memory(TorchDispatchMode):
    """`overwritten`: what made each tensor whose memory another one may get too early."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, tuple[Any, Block]] = {}
        self.free: list[Block] = []
        self.overwritten: set[str] = set()
        self.crossings = 0  # reads on another stream than the tensor's own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = current_stream()
        stream.length += 1
        for tensor in tensors_of((args, kwargs)):
            _, block = self.blocks.get(tensor.untyped_storage()._cdata, (None, None))
            if block is not None and block.stream is not stream:
                block.reads[stream] = stream.length
                self.crossings += 1
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            self.allocate(tensor.untyped_storage(), stream, str(func))
        return result

    def allocate(self, storage: torch.UntypedStorage, stream: Stream, made_by: str) -> None:
        key = storage._cdata
        if key in self.blocks:
            return
        for block in [block for block in self.free if block.stream is stream]:
            self.free.remove(block)
            if any(stream.seen.get(other, 0) < at for other, at in block.reads.items()):
                self.overwritten.add(block.made_by)
        block = Block(stream, made_by)
        self.blocks[key] = weakref.ref(storage, lambda _: self.release(key)), block

    def release(self, key: int) -> None:
        self.free.append(self.blocks.pop(key)[1])


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]


@contextmanager
def streams() -> Iterator[Memory]:
    """FSDP on a CPU has streams inside."""
    compute: Any = Stream()
    with (
        mock.patch.multiple(torch.cpu, Stream=Stream, Event=Event, _current_stream=compute),
        Memory() as memory,
    ):
        yield memory
