"""Show the scaling state of Transformer Engine's modules through the tables of our own.

Transformer Engine keeps, per module and direction, `scale` [tensors] and `amax_history` [length,
tensors]: slot 0 is the amax staged since the last update, slots 1 to length-1 are the updates
before, oldest first. Our tables have `quant_scale`, `amax` and `history` [tensors, length-1]. The
two convert without loss, by the tensors' logical names, so a checkpoint moves between the backends;
Transformer Engine's pickled `_extra_state` is never read nor written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import torch

from megafp8.backends.te.names import TeNames
from megafp8.fp8.draws import ONE_SAMPLE, Tokens
from megafp8.fp8.scaling import Direction, NoScaling, ScaleTable, ScalingState, Slot
from megafp8.specs import Fp8Recipe

META_KEYS: dict[Direction, str] = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


@dataclass(frozen=True)
class TeGemm:
    """Name one linear inside one of Transformer Engine's modules; `number` counts GEMMs from 1."""

    name: str  # the logical name, as of our own linears: layers.0.mlp.fc1
    module: Any
    number: int
    num_gemms: int  # the number of GEMMs in the whole module


@dataclass(frozen=True)
class TeTensor:
    """Name a tensor of attention in FP8, and its column in the scaling tensors of a module."""

    name: str  # layers.0.attention.core.scores
    module: Any
    direction: Direction
    column: str  # as Transformer Engine names it
    num_gemms: int


class TeRegion:
    """Open and close the FP8 region, and say to layers whether to cast their weights.

    One region spans a microbatch's whole forward pass on a pipeline stage, so that delayed scaling
    reduces and updates once, at its exit; the backward pass updates itself when the first module's
    backward is done.

    `cast` has the layers whose weights were cast in this step, `forward_ran` those that have run in
    this region, with whether they cast weights, and `backward_ran` those whose backward pass has
    begun since the last one that was counted. The layers in `cast_always` cast their weights in
    each pass, whatever `is_first_microbatch` says.

    Regions of one process share Transformer Engine's count of open ones, and delayed scaling only
    updates when it comes back to 0. A pass that raises leaves its region open: it is held in
    `_opened`, so that it is not closed whenever Python frees the run, and is closed before the next
    region opens.
    """

    _opened: ClassVar[set[TeRegion]] = set()

    def __init__(self, names: TeNames, recipe: object | None, group: object) -> None:
        self.names, self.recipe, self.group = names, recipe, group
        self.in_fp8 = recipe is not None
        self.cast: set[int] = set()
        self.cast_always: set[int] = set()
        self.forward_ran: dict[int, bool] = {}
        self.backward_ran: set[int] = set()
        self._caches = False  # whether weights are cast once in a step; else where they are used
        self.is_again = False  # whether a backward pass recomputes
        self._has_changed = False  # whether the recipe is another one than at the start
        self._open = ExitStack()

    def begin(self, index: int) -> None:
        """Open the region for forward pass `index` of a step; number 0 makes cast weights stale."""
        self.end()
        self.close_left_open()
        if self.recipe is not None:
            self._caches = True
            if index == 0:
                self.cast.clear()
            self.forward_ran.clear()
            self._open.enter_context(self._autocast(enabled=True))
            self._opened.add(self)

    def change(self, recipe: object) -> None:
        """Open the regions of later steps with another recipe; its first pass casts weights."""
        self.end()
        self.recipe, self._has_changed = recipe, True

    def is_first_microbatch(self, layer: int) -> bool | None:
        """Note a forward pass of `layer`, and return whether it casts the layer's weights.

        It does in the layer's own first pass of a step, since a rank may hold several pipeline
        stages, and not where a backward pass recomputes. None: no casts are kept.
        """
        if not self._caches:
            return None
        if self.is_again:
            return False
        is_first = layer not in self.cast
        self.cast.add(layer)
        self.forward_ran[layer] = is_first or layer in self.cast_always
        return is_first

    def end(self) -> None:
        """Close the region, if it is open."""
        self._opened.discard(self)
        self._open.close()

    @classmethod
    def close_left_open(cls) -> None:
        """Close the regions of passes that raised; without gradients this updates no scale."""
        with torch.no_grad():
            for region in list(cls._opened):
                region.end()

    @contextmanager
    def evaluation(self, *, in_fp8: bool) -> Iterator[None]:
        """Open a region outside of a step, in which no cached weight is used or replaced."""
        self.end()
        if self.recipe is None:
            yield
            return
        before, self._caches, self.in_fp8 = self._caches, False, in_fp8
        try:
            with self._autocast(enabled=in_fp8):
                yield
        finally:
            self._caches, self.in_fp8 = before, True

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Open a region for recomputing, in a backward pass, what a forward pass has computed.

        Weights are not cast again. Transformer Engine opens a region of its own in there; this one
        around it, which is off, keeps it from reducing and updating the forward tensors once more.
        """
        self.is_again = True
        try:
            with nullcontext() if self.recipe is None else self._autocast(enabled=False):
                yield
        finally:
            self.is_again = False

    def layer(self, *, in_fp8: bool) -> AbstractContextManager[Any]:
        """Return the context for one layer, which switches FP8 off for one in high precision."""
        if in_fp8 or self.recipe is None or not self.in_fp8:
            return nullcontext()
        return self._autocast(enabled=False)

    @contextmanager
    def _autocast(self, *, enabled: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if self._has_changed:  # each module would warn, beside the run's own line
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Recipe type changed")
            of_te = self.names.autocast(enabled=enabled, recipe=self.recipe, group=self.group)
            stack.enter_context(of_te)
            yield


class Draws(Protocol):
    """Draw random bytes for kernels on a CPU, which belong to one microbatch of a step."""

    def begin(self, seed: int, step: int, microbatch: str) -> None:
        """Let the casts that follow belong to a microbatch of a step."""


class TeEvents(NoScaling):
    """Receive the events of a step for recipes without a lasting state, and for BF16."""

    def __init__(
        self, region: TeRegion, *, fp8_in_evaluation: bool, seed: int, draws: Draws | None
    ) -> None:
        self.region, self._fp8_in_evaluation = region, fp8_in_evaluation
        self._seed, self._draws = seed, draws

    def begin_microbatch(self, index: int, step: int = 0, tokens: Tokens = ONE_SAMPLE) -> None:
        """Open the region for microbatch `index`; kernels on a CPU draw by step and tokens."""
        self.return_to(step, tokens)
        self.region.begin(index)

    def return_to(self, step: int, tokens: Tokens) -> None:
        """Let the kernels on a CPU draw for an earlier microbatch, whose backward pass begins."""
        if self._draws is not None:
            self._draws.begin(self._seed, step, repr(tokens))

    def end_forward(self) -> None:
        self.region.end()

    def evaluation(self) -> AbstractContextManager[None]:
        """Return the region for evaluation."""
        return self.region.evaluation(in_fp8=self._fp8_in_evaluation)


class TeScaling(ScalingState):
    """Hold delayed scaling of Transformer Engine's modules; `tables` mirror its tensors.

    Reading `tables` copies the tensors out (before a checkpoint is written, or FP8 health is
    reported); `push` copies the tables into the modules (after a checkpoint was read). Transformer
    Engine counts neither updates nor non-finite amaxes: updates are counted here by event, and the
    counts of non-finite amaxes stay as they were.
    """

    def __init__(self, recipe: Fp8Recipe, region: TeRegion) -> None:
        super().__init__(recipe)
        self.region = region
        self._slots: list[tuple[Slot, Any, Direction, int]] = []  # table row, module, column
        self._rows: dict[Direction, list[tuple[int, bool]]] = {"forward": [], "backward": []}

    def register(self, gemm: TeGemm, layer: int) -> None:
        """Add rows for the three tensors of one linear of `layer`, in the order of our linears."""
        names = self.region.names
        columns: list[tuple[str, Direction, int]] = [
            ("input", "forward", int(getattr(names.forward_index, f"GEMM{gemm.number}_INPUT"))),
            ("weight", "forward", int(getattr(names.forward_index, f"GEMM{gemm.number}_WEIGHT"))),
            (
                "grad_output",
                "backward",
                int(getattr(names.backward_index, f"GRAD_OUTPUT{gemm.number}")),
            ),
        ]
        for role, direction, column in columns:
            self._add(f"{gemm.name}.{role}", gemm.module, direction, column)
            self._rows[direction].append((layer, role == "weight"))
        self._prepare(gemm.module, gemm.num_gemms)

    def register_tensor(self, tensor: TeTensor, layer: int) -> None:
        """Add a row for a tensor of attention in `layer`."""
        names = self.region.names
        index = names.forward_index if tensor.direction == "forward" else names.backward_index
        column = int(getattr(index, tensor.column))
        self._add(tensor.name, tensor.module, tensor.direction, column)
        self._rows[tensor.direction].append((layer, False))
        self._prepare(tensor.module, tensor.num_gemms)

    def _add(self, name: str, module: Any, direction: Direction, column: int) -> None:
        slot = self._own(direction).register(name)
        self._slots.append((slot, module, direction, column))

    def _prepare(self, module: Any, num_gemms: int) -> None:
        """Allocate the module's scaling tensors, as its first forward pass would."""
        meta = module.fp8_meta
        if "scaling_fwd" not in meta:
            meta["num_gemms"] = num_gemms
            meta["recipe"] = self.region.recipe
            module.init_fp8_meta_tensors(self.region.recipe)

    def _own(self, direction: Direction) -> ScaleTable:
        return self.forward if direction == "forward" else self.backward

    @property
    def tables(self) -> dict[Direction, ScaleTable]:
        """Return the tables, with Transformer Engine's present tensors in them."""
        self.pull()
        return {"forward": self.forward, "backward": self.backward}

    def to(self, device: torch.device) -> None:
        """Do nothing: checkpoints and reports read the tables where they are."""

    @torch.no_grad()
    def pull(self) -> None:
        """Copy Transformer Engine's tensors into the tables, in one copy from the device.

        In a dry run they have no values.
        """
        keyed = [module.fp8_meta[META_KEYS[direction]] for _, module, direction, _ in self._slots]
        states = list({id(state): state for state in keyed}.values())
        if not states or states[0].scale.is_meta:
            return
        widths = [0, *accumulate(state.scale.numel() for state in states)]
        begins = {id(state): begin for state, begin in zip(states, widths[:-1], strict=True)}
        scales = torch.cat([state.scale for state in states])
        history = torch.cat([state.amax_history for state in states], dim=1)
        numbers = torch.cat((scales[None], history)).cpu()
        for (slot, _, _, column), state in zip(self._slots, keyed, strict=True):
            of_tensor = numbers[:, begins[id(state)] + column]
            table, row = slot.table, slot.index
            table.quant_scale[row].copy_(of_tensor[0])
            table.amax[row].copy_(of_tensor[1])
            table.history[row].copy_(of_tensor[2:])

    @torch.no_grad()
    def push(self) -> None:
        """Copy the tables into Transformer Engine's tensors, in place: its modules hold views."""
        for slot, module, direction, column in self._slots:
            state = module.fp8_meta[META_KEYS[direction]]
            table, row = slot.table, slot.index
            state.amax_history[0, column] = table.amax[row]
            state.amax_history[1:, column] = table.history[row]
            state.scale[column] = table.quant_scale[row]

    def forget_staged(self) -> None:
        self.pull()
        super().forget_staged()
        self.push()

    def begin_microbatch(self, index: int, step: int = 0, tokens: Tokens = ONE_SAMPLE) -> None:
        self.region.begin(index)

    def end_forward(self) -> None:
        """Close the region, which updates the forward tensors, and count the update."""
        self.region.end()
        ran = self.region.forward_ran
        counted = [
            layer in ran and (not is_weight or ran[layer])
            for layer, is_weight in self._rows["forward"]
        ]
        self.forward.num_updates += torch.tensor(counted)

    def end_backward(self) -> None:
        """Count the update that Transformer Engine's backward pass made."""
        ran = self.region.backward_ran
        self.backward.num_updates += torch.tensor(
            [layer in ran for layer, _ in self._rows["backward"]]
        )
        ran.clear()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Open the region for evaluation, and restore after it the amaxes that it recorded."""
        modules = {id(module): module for _, module, _, _ in self._slots}.values()
        tensors_before = [module.get_fp8_meta_tensors() for module in modules]
        try:
            with self.region.evaluation(in_fp8=self.recipe.fp8_in_evaluation):
                yield
        finally:
            for module, tensors in zip(modules, tensors_before, strict=True):
                module.reset_fp8_meta_tensors(tensors)
