"""Count the bytes of tensors that exist at a time, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from fp8_numerics.kernels.compile import library
from fp8_numerics.meta import is_in_kernel
from megafp8.ops.torch_private import TorchDispatchMode, storage_key
from megafp8.parallel.fsdp import local_of

MemoryOf = Callable[[torch.Tensor], Iterable[torch.Tensor]]


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that are made inside this context and still exist.

    With `device` only those on devices of this type count. `memory_of` returns the tensors whose
    memory a tensor occupies, as `Backend.memory_of` does. Peaks are those since `begin`. With
    `resized`, a tensor whose owner resizes its memory, as FSDP does, counts with its present size;
    each possible peak then looks at all storages.
    """

    def __init__(
        self,
        device: str | None = None,
        memory_of: MemoryOf = lambda x: (x,),
        *,
        resized: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        library()  # the tensors with which it tries its kernels once are not those of a run
        self.device, self._memory_of, self._resized = device, memory_of, resized
        self.most = 0
        self.most_with_watched = 0
        self.watched_at_most = 0  # what `watched` was then
        self._watched: list[torch.UntypedStorage] = []
        self._watched_before = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._total = 0  # of the sizes that were seen last
        self._at_most = 0  # with `resized`, a bound: sizes may have changed, and some are gone

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count too by how much the memory of these tensors grows, which an owner may resize."""
        self._watched = [tensor.untyped_storage() for tensor in tensors]
        self._watched_before = sum(storage.nbytes() for storage in self._watched)

    def watch_freed(self) -> None:
        """Count as those of `watch` the tensors made inside whose memory is freed at the moment."""
        self.bytes()
        for key in [key for key, (_, size) in self._known.items() if size == 0]:
            storage = self._known.pop(key)[0]()
            assert storage is not None
            self._watched.append(storage)

    def watched(self) -> int:
        """Return by how many bytes the tensors of `watch` have grown since then."""
        return sum(storage.nbytes() for storage in self._watched) - self._watched_before

    def begin(self) -> None:
        """Begin to look for peaks."""
        self.most = self.bytes()
        self.watched_at_most = self.watched()
        self.most_with_watched = self.most + self.watched_at_most

    def bytes(self) -> int:
        """Return the bytes of the storages that were made inside and still exist."""
        if self._resized:
            for ref, _ in list(self._known.values()):
                if (storage := ref()) is not None:
                    self._see(storage)
        self._at_most = self._total
        return self._total

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its present size, until it ends."""
        key, size = storage_key(storage), storage.nbytes()
        known = self._known.get(key)
        if known is None:  # torch keeps the object of a storage for as long as the storage exists
            known = weakref.ref(storage, partial(self._forget, key)), 0
        self._known[key] = known[0], size
        self._total += size - known[1]
        self._at_most += max(0, size - known[1])

    def _forget(self, key: int, _: object) -> None:
        """Count a storage no more, which has ended."""
        if key in self._known:  # not if it is watched
            size = self._known.pop(key)[1]
            self._total -= size
            self._at_most -= 0 if self._resized else size

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return how many of `bytes` are those of these tensors."""
        keys = set(map(storage_key, self._storages(list(tensors))))
        return sum(self._known[key][1] for key in keys & self._known.keys())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = self._storages((args, kwargs))
        for storage in arguments:  # an operation is about to use what they have grown by
            if storage_key(storage) in self._known:
                self._see(storage)
        argument_keys = set(map(storage_key, arguments))
        out = func(*args, **(kwargs or {}))
        for storage in self._storages(out):
            key = storage_key(storage)
            is_here = self.device in (None, storage.device.type)
            if is_here and key not in argument_keys and key not in self._known:
                self._see(storage)
        if is_in_kernel():
            return out
        watched = self.watched()
        if self._at_most > self.most or self._at_most + watched > self.most_with_watched:
            current = self.bytes()
            self.most = max(self.most, current)
            if current + watched > self.most_with_watched:
                self.most_with_watched, self.watched_at_most = current + watched, watched
        return out

    def _storages(self, tree: Any) -> list[torch.UntypedStorage]:
        parts = map(local_of, _tensors_in(tree))  # of a tensor that FSDP shards: this rank's rows
        return [memory.untyped_storage() for x in parts for memory in self._memory_of(x)]


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or results.

    torch's `tree_leaves` takes two to three times as long, and this runs for each operation.
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors_in(item)
    elif isinstance(tree, dict):
        yield from _tensors_in(list(tree.values()))
