"""Record the operations of a function on a CPU and replay them, as a CUDA graph does with kernels.

A tape holds operations with their arguments. While it is recorded, what the operations write into
older tensors is undone at the end, as if nothing had run. A replay runs each operation again and
writes its result where the recorded one was. So it repeats no work of the host, and it reads and
writes the recorded addresses, whatever has taken the tensors' places since. On CPUs alone, the loss
reads numbers on the host: a replay fails if such a number is not the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_numerics import addmm, block_casts, cast, gemm
from fp8_numerics.addmm import Scales, times_scales
from fp8_numerics.kernels.compile import Library
from megafp8.fp8 import grad_sink, scaled
from megafp8.train import graphs
from megafp8.train.graphs import RecordedGraph

WAITING = {"equal", "nonzero", "masked_select", "is_nonzero", "unique_dim"}
READ = "_local_scalar_dense"
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """Holds the operations of one recording."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []
        self._own: dict[int, torch.UntypedStorage] = {}  # by address; made while recording
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"{name} waits for the device inside a recording"
        of_arguments = [argument.alias_info for argument in func._schema.arguments]
        writes = [alias is not None and alias.is_write for alias in of_arguments]
        if any(writes):
            written = [x for flag, x in zip(writes, args, strict=False) if flag]
            written += [kwargs[a.name] for a in func._schema.arguments if a.name in kwargs]
            for tensor in tensors_of(written):
                self._save(tensor.untyped_storage())
        result = func(*args, **kwargs)
        if name == READ:
            self._steps.append(lambda: self._read_again(args[0], result))
            return result
        is_view = any(r.alias_info is not None for r in func._schema.returns) and not any(writes)
        if is_view:
            return result
        outputs = [] if any(writes) else tensors_of(result)
        for tensor in outputs:
            storage = tensor.untyped_storage()
            self._own[storage.data_ptr()] = storage
        if name not in ALLOCATIONS:
            self._steps.append(lambda: self._again(func, args, kwargs, outputs))
        return result

    def _save(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key not in self._own and key not in self._before:
            self._before[key] = storage, storage.clone()

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        result = func(*args, **kwargs)
        for old, new in zip(outputs, tensors_of(result) if outputs else (), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    @staticmethod
    def _read_again(number: torch.Tensor, recorded: object) -> None:
        assert number.item() == recorded, "the host read another number while it was recorded"

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for step in self._steps:
            step()


class TapeRecorder:
    """Records tapes, and counts what it is asked for."""

    def __init__(self) -> None:
        self.num_beside = self.num_records = self.num_beginnings = 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.num_beside += 1
        yield

    def record(self, function: Callable[[], torch.Tensor]) -> RecordedGraph:
        self.num_records += 1
        tape = Tape()
        with tape:
            result = function()
        tape.undo()
        return RecordedGraph(tape.replay, result)

    def begin_again(self) -> None:
        self.num_beginnings += 1


def use_tapes(replace: Callable[[Any, str, Any], None]) -> TapeRecorder:
    """Let tapes stand for CUDA graphs; `replace` is `setattr`.

    Nothing then runs outside of torch, and nothing as only CPUs do it: there a product reads its
    scale on the host.
    """

    def scaled_product(
        a: torch.Tensor,
        b: torch.Tensor,
        scales: Scales,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        product = times_scales(torch.mm(a, b).float(), scales)
        product = product if bias is None else product + bias
        return product if out is None else out.copy_(product)

    replace(gemm, "_scaled_product", scaled_product)
    for module in (gemm, addmm):
        replace(module, "mm_into", lambda *args, **options: None)
    replace(block_casts, "library_for", lambda x: None)
    for module in (cast, grad_sink, scaled):
        replace(module, "library", lambda: Library(None, "off"))
    tapes = TapeRecorder()
    replace(graphs, "make_recorder", lambda device: tapes)
    return tapes
