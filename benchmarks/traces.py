"""Record delayed scaling over many updates, and replay the record bit for bit.

A trace is two files of one name. `NAME.json` names the engine, its version, the recipe, the tensors
of each direction and the events in their order; `NAME.safetensors` holds

    DIRECTION/amax          [updates, tensors]  staged when the update came; 0: did not occur
    DIRECTION/quant_scale   [updates, tensors]  after the update
    DIRECTION/history       [kept, tensors, length-1]  after the updates listed in `kept_updates`
    sample/N/input          a whole tensor as it was cast
    sample/N/payload        its FP8 bytes
    sample/N/quant_scale    the scale that it was cast with

`replay` runs the amaxes through our own tables and the samples through our own casts, and names
every bit that differs. Nothing in either file is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fp8_numerics.cast import Fp8Tensor
from megafp8.errors import DataError
from megafp8.fp8.scaling import Direction, ScaleTable, ScalingState
from megafp8.specs import Fp8Recipe

FORMAT = 1
# The fields of a recipe that decide about scales and casts.
RECIPE_FIELDS = ("name", "forward_format", "backward_format", "margin", "interval",
                 "amax_history_len", "amax_compute_algo")  # fmt: skip


@dataclass
class Sample:
    """Hold one tensor with its FP8 payload, cast before update `update` of its direction."""

    name: str
    direction: Direction
    update: int
    input: torch.Tensor
    payload: torch.Tensor
    quant_scale: torch.Tensor


@dataclass
class Trace:
    """Hold a recording; the module's docstring describes its tensors.

    `events` are `begin I`, `cast NAME` and `update DIRECTION`, in their order.
    """

    engine: str
    version: str
    recipe: Fp8Recipe
    names: dict[Direction, list[str]]
    events: list[str] = field(default_factory=list)
    amax: dict[Direction, list[torch.Tensor]] = field(default_factory=dict)
    quant_scale: dict[Direction, list[torch.Tensor]] = field(default_factory=dict)
    history: dict[Direction, dict[int, torch.Tensor]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def add_update(
        self, direction: Direction, amax: torch.Tensor, table: ScaleTable, *, keep_history: bool
    ) -> None:
        """Record one update: the amaxes staged for it, and the table after it."""
        amaxes = self.amax.setdefault(direction, [])
        if keep_history:
            self.history.setdefault(direction, {})[len(amaxes)] = table.history.cpu().clone()
        amaxes.append(amax.cpu().clone())
        self.quant_scale.setdefault(direction, []).append(table.quant_scale.cpu().clone())
        self.events.append(f"update {direction}")

    def save(self, path: Path) -> None:
        """Write `path`.json and `path`.safetensors."""
        tensors: dict[str, torch.Tensor] = {}
        for direction in self.amax:
            tensors[f"{direction}/amax"] = torch.stack(self.amax[direction])
            tensors[f"{direction}/quant_scale"] = torch.stack(self.quant_scale[direction])
            if kept := list(self.history.get(direction, {}).values()):
                tensors[f"{direction}/history"] = torch.stack(kept)
        for number, sample in enumerate(self.samples):
            tensors[f"sample/{number}/input"] = sample.input.cpu().contiguous()
            tensors[f"sample/{number}/payload"] = sample.payload.cpu().contiguous()
            tensors[f"sample/{number}/quant_scale"] = sample.quant_scale.cpu().reshape(())
        head = {
            "format": FORMAT,
            "engine": self.engine,
            "version": self.version,
            "recipe": {name: getattr(self.recipe, name) for name in RECIPE_FIELDS},
            "names": self.names,
            "kept_updates": {d: list(kept) for d, kept in self.history.items()},
            "samples": [
                {"name": s.name, "direction": s.direction, "update": s.update} for s in self.samples
            ],
            "events": self.events,
        }
        path.with_suffix(".json").write_text(json.dumps(head, indent=1) + "\n", "utf-8")
        save_file(tensors, path.with_suffix(".safetensors"))

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read the trace that `save` wrote to `path`.

        Raises:
            DataError: The file is not a trace of this format.
        """
        head = json.loads(path.with_suffix(".json").read_text("utf-8"))
        if head.get("format") != FORMAT:
            raise DataError(
                path.with_suffix(".json"),
                "format",
                f"is {head.get('format')}, and this version reads {FORMAT}",
                "Record it again",
            )
        tensors = load_file(path.with_suffix(".safetensors"))
        names: dict[Direction, list[str]] = head["names"]
        trace = cls(
            head["engine"], head["version"], Fp8Recipe(**head["recipe"]), names, head["events"]
        )
        for direction in names:
            if f"{direction}/amax" not in tensors:
                continue
            trace.amax[direction] = list(tensors[f"{direction}/amax"])
            trace.quant_scale[direction] = list(tensors[f"{direction}/quant_scale"])
            kept = head["kept_updates"].get(direction, [])
            histories = tensors.get(f"{direction}/history", ())
            trace.history[direction] = dict(zip(kept, histories, strict=True))
        for number, sample in enumerate(head["samples"]):
            parts = ("input", "payload", "quant_scale")
            of = (tensors[f"sample/{number}/{part}"] for part in parts)
            trace.samples.append(Sample(sample["name"], sample["direction"], sample["update"], *of))
        return trace


def replay(trace: Trace) -> list[str]:
    """Return what our scaling and casts do differently from the trace, bit by bit.

    The list is empty if nothing differs.
    """
    return [*_replay_scales(trace), *_replay_samples(trace)]


def _replay_scales(trace: Trace) -> Iterator[str]:
    state = ScalingState(trace.recipe)
    for direction, names in trace.names.items():
        table = state.tables[direction]
        for name in names:
            table.register(name)
        updates = zip(trace.amax[direction], trace.quant_scale[direction], strict=True)
        for update, (amax, expected) in enumerate(updates):
            table.amax.copy_(amax)
            table.update(None)
            for row in _differing(table.quant_scale, expected):
                got, wanted = table.quant_scale[row].item(), expected[row].item()
                yield f"{direction} update {update}, {names[row]}: scale {got}, traced {wanted}"
            kept = trace.history.get(direction, {}).get(update)
            if kept is not None:
                for row in _differing(table.history, kept):
                    yield f"{direction} update {update}, {names[row]}: history differs"


def _differing(got: torch.Tensor, expected: torch.Tensor) -> list[int]:
    same = (got.view(torch.int32) == expected.view(torch.int32)).flatten(1 if got.dim() > 1 else 0)
    rows = same.all(1) if got.dim() > 1 else same
    return [int(row) for row in (~rows).nonzero()]


def _replay_samples(trace: Trace) -> Iterator[str]:
    formats = ScalingState(trace.recipe).tables
    for sample in trace.samples:
        fmt = formats[sample.direction].fmt
        cast = Fp8Tensor.quantize(sample.input, sample.quant_scale, fmt)
        got, expected = (t.view(torch.uint8) for t in (cast.payload, sample.payload))
        count = int((got != expected).sum())
        if count:
            yield f"{sample.name}, update {sample.update}: {count} payload bytes differ"
        before = trace.quant_scale[sample.direction][: sample.update]
        if before:
            column = trace.names[sample.direction].index(sample.name)
            if before[-1][column] != sample.quant_scale:
                yield f"{sample.name}, update {sample.update}: was cast with another scale"


class RecordedScaling:
    """Pass events to the `ScalingState` of one rank and record what happens to it.

    The first cast of each tensor before the updates `sample_updates` is kept whole; histories are
    kept after every `history_every`-th update.
    """

    def __init__(
        self,
        state: ScalingState,
        *,
        version: str,
        sample_updates: frozenset[int] = frozenset(),
        history_every: int = 10,
    ) -> None:
        self.state, self.sample_updates = state, sample_updates
        self.history_every = history_every
        names = {direction: list(table.names) for direction, table in state.tables.items()}
        self.trace = Trace("native", version, state.recipe, names)
        self._direction: dict[str, Direction] = {n: d for d, ns in names.items() for n in ns}
        self._sampled: set[tuple[str, int]] = set()
        state.observers.append(self._observe)

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
        self._update("forward")

    def end_backward(self) -> None:
        """Pass the event on and record the backward update."""
        self._update("backward")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Enter the state's evaluation; its casts do not belong to the trace."""
        self.state.observers.remove(self._observe)
        with self.state.evaluation():
            yield
        self.state.observers.append(self._observe)

    def recomputation(self) -> AbstractContextManager[None]:
        """Return the state's context for recomputation."""
        return self.state.recomputation()

    def to(self, device: torch.device) -> None:
        """Move the state to `device`."""
        self.state.to(device)

    def _updates(self, direction: Direction) -> int:
        return len(self.trace.amax.get(direction, ()))

    def _update(self, direction: Direction) -> None:
        table = self.state.tables[direction]
        amax = table.amax.clone()
        if direction == "forward":
            self.state.end_forward()
        else:
            self.state.end_backward()
        keep = self._updates(direction) % self.history_every == 0
        self.trace.add_update(direction, amax, table, keep_history=keep)

    def _observe(
        self, name: str, x: torch.Tensor, last: Fp8Tensor | None, first: Fp8Tensor | None
    ) -> None:
        if name not in self._direction or not self.state.recording:
            return  # the tensor is of another recipe, or its cast is repeated
        self.trace.events.append(f"cast {name}")
        direction = self._direction[name]
        update = self._updates(direction)
        cast = last if last is not None else first
        if cast is None or update not in self.sample_updates or (name, update) in self._sampled:
            return
        self._sampled.add((name, update))
        table = self.state.tables[direction]
        scale = table.quant_scale[table.names.index(name)]
        payload = cast.payload.view(table.fmt.dtype).detach().clone()
        tensors = x.detach().clone(), payload, scale.clone()
        self.trace.samples.append(Sample(name, direction, update, *tensors))
