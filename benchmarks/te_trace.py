"""Record Transformer Engine's delayed scaling, for `traces` to replay."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.traces import Sample, Trace
from fp8_numerics.formats import Fp8Format
from megafp8.backends.te.state import TeScaling
from megafp8.fp8.scaling import Direction, ScaleTable

UPDATE = (
    "reduce_and_update_fp8_tensors"  # Transformer Engine's method; its one argument is forward=True
)


class RecordedTeScaling:
    """Pass events to the `TeScaling` of one rank and record the amaxes that each update is given.

    They are read out of the scaling tensors when Transformer Engine begins an update, whose method
    is replaced for that until `close`.
    """

    def __init__(self, state: TeScaling, *, history_every: int = 10) -> None:
        self.state, self.history_every = state, history_every
        names = {direction: list(table.names) for direction, table in state.tables.items()}
        self.trace = Trace("transformer_engine", state.region.names.version, state.recipe, names)
        self._staged: dict[Direction, torch.Tensor] = {}
        self._manager = state.region.names.global_state
        self._original = vars(self._manager)[UPDATE]
        update = getattr(self._manager, UPDATE)

        def noting(*args: Any, **kwargs: Any) -> Any:
            is_forward = kwargs["forward"] if "forward" in kwargs else next(iter(args), True)
            direction: Direction = "forward" if is_forward else "backward"
            self._staged[direction] = state.tables[direction].amax.clone()
            return update(*args, **kwargs)

        setattr(self._manager, UPDATE, noting)

    def close(self) -> None:
        """Restore Transformer Engine's own method."""
        setattr(self._manager, UPDATE, self._original)

    @property
    def tables(self) -> dict[Direction, ScaleTable]:
        """Return the state's tables."""
        return self.state.tables

    def begin_microbatch(self, index: int, step: int = 0, sample: int = 0) -> None:
        """Record the event and pass it on."""
        self.trace.events.append(f"begin {index}")
        self.state.begin_microbatch(index, step, sample)

    def end_forward(self) -> None:
        """Pass the event on and record the forward update."""
        self.state.end_forward()
        self._read("forward")

    def end_backward(self) -> None:
        """Pass the event on and record the backward update."""
        self.state.end_backward()
        self._read("backward")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Enter the state's evaluation."""
        with self.state.evaluation():
            yield

    def _read(self, direction: Direction) -> None:
        table = self.state.tables[direction]
        keep = len(self.trace.amax.get(direction, ())) % self.history_every == 0
        if direction not in self._staged:
            raise RuntimeError(f"Transformer Engine made no {direction} update through {UPDATE}")
        self.trace.add_update(direction, self._staged.pop(direction), table, keep_history=keep)


def cast_sample(trace: Trace, name: str, x: torch.Tensor, fmt: Fp8Format) -> Sample:
    """Return `x` cast by Transformer Engine's own quantizer with the newest scale of `name`."""
    direction: Direction = "backward" if name.endswith(".grad_output") else "forward"
    update = len(trace.quant_scale[direction])
    scale = trace.quant_scale[direction][-1][trace.names[direction].index(name)]
    return Sample(name, direction, update, x, _cast(x, scale, fmt), scale)


def _cast(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    extension = importlib.import_module("transformer_engine_torch")
    tensor = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    kind = {"e4m3": extension.DType.kFloat8E4M3, "e5m2": extension.DType.kFloat8E5M2}[fmt.name]
    quantizer = tensor.Float8Quantizer(
        scale.to(x.device).reshape(1), torch.zeros(1, device=x.device), kind
    )
    payload: torch.Tensor = quantizer(x)._data
    return payload.view(fmt.dtype)
