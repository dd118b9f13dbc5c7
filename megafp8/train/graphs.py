"""Capture a microbatch's forward and backward pass as a CUDA graph, and replay it.

**Unproven: no GPU has run this file.** Tests replay recordings on a CPU.

There are two recordings. A step's first microbatch casts the weights to FP8 and overwrites the
gradients; each later one reads these casts and adds to the gradients. Everything else of a step
runs as without graphs, between the replays: amaxes are reduced over ranks and rolled into the
scales, gradients are reduced, and the optimizer updates. A recording has the addresses of all that
it reads and writes, so these stay (`ScalingState.keeps_addresses`), and microbatches are copied
into tensors of its own. What the host does during a pass is done again after each replay: FLOPs
are counted, and the sink and the weights' forms learn what they hold now.

The first steps run without recordings, and so does each step in which observers see the casts (FP8
health of any recipe but `delayed`, and `full`): they need the host. A later microbatch is recorded
when one has run without a recording. If a step's first microbatch runs without one, its casts are
where no recording finds them, and the rest of the step runs so too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from fp8_numerics.gemm import Fp8Backend, GemmCounter
from megafp8.errors import ConfigError
from megafp8.fp8.grad_sink import GradSum, MainGradSink
from megafp8.fp8.quantizer import Operands
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.fp8.weights import CachedFp8, StoredFp8
from megafp8.models.documents import document_ids
from megafp8.models.loss import backward_of_loss
from megafp8.parallel.parts import linears_of
from megafp8.parallel.pipeline import Batch

WARMUP_STEPS = 3
"""The steps before the first recording, as many as Megatron's `cuda_graph_warmup_steps`: libraries
choose their kernels and allocate their workspaces in them."""


@dataclass(frozen=True)
class RecordedGraph:
    """Hold what was recorded: `replay` runs it again, and `result` then has the new result."""

    replay: Callable[[], object]
    result: torch.Tensor


class Recorder(Protocol):
    """Record what a function starts on a device, without running it."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a context in which work that is not recorded runs as recorded work will."""

    def record(self, function: Callable[[], torch.Tensor]) -> RecordedGraph:
        """Call the function once and record the kernels that it starts; none of them runs."""

    def begin_again(self) -> None:
        """Give later recordings memory of their own; the earlier ones have been dropped."""


class CudaRecorder:
    """Record CUDA graphs, all in one pool of memory and on one stream.

    The graphs may share their memory, since they are replayed one after the other. Threads of the
    run that use CUDA meanwhile (saves, NCCL's watchdog) do not disturb a capture, which watches the
    capturing thread alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run on the stream of the captures, so that autograd's nodes belong to it."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)  # the inputs are written there
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)  # the results are read there

    def record(self, function: Callable[[], torch.Tensor]) -> RecordedGraph:
        """Capture the function as a CUDA graph.

        Raises:
            ConfigError: CUDA refuses to capture something that the function does, or there is not
                enough memory for it.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = function()
        except RuntimeError as error:
            reason = f"the forward and backward pass could not be captured ({error})"
            hint = "Set model.enable_cuda_graph=False; the run continues from its last checkpoint"
            raise ConfigError("model.enable_cuda_graph", True, reason, hint) from error
        return RecordedGraph(graph.replay, result)

    def begin_again(self) -> None:
        """Leave the pool of memory to what is still alive in it.

        Once its graphs are gone, torch takes a pool for abandoned, and begins no capture in one
        that still holds a tensor.
        """
        self._pool = torch.cuda.graph_pool_handle()


def make_recorder(device: torch.device) -> Recorder:
    """Return the recorder of a device; tests replace the function.

    Raises:
        AssertionError: The device has no graphs, which the settings refuse.
    """
    assert device.type == "cuda", "the settings refuse model.enable_cuda_graph without a GPU"
    return CudaRecorder(device)


@dataclass
class _Recording:
    """Hold one recorded microbatch, and what the host knows after it."""

    recorded: RecordedGraph
    flops: Counter[tuple[str, str]]
    fp8_flops: Counter[Fp8Backend]
    untouched: frozenset[nn.Parameter]
    casts: list[Operands | None]  # of the forms, in their order


@dataclass
class MicrobatchGraphs:
    """Run the forward and backward pass of a run's microbatches, from recordings where it can."""

    model: nn.Module
    scaling: ScalingState | NoScaling
    sink: MainGradSink
    counter: GemmCounter
    device: torch.device
    num_recordings: int = 0  # how often a pass was recorded; a rank that recovers records again
    num_replays: int = 0
    _num_steps: int = 0  # steps begun since the process started
    _recorder: Recorder | None = None
    _inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    _recordings: dict[bool, _Recording] = field(default_factory=dict)  # by "is the step's first"
    _addresses: dict[str, int] = field(default_factory=dict)  # when the recordings were made
    _has_run: set[bool] = field(default_factory=set)  # without recording, by "is the first"
    _is_eager: bool = True  # in this step

    def __post_init__(self) -> None:
        linears = linears_of(self.model)
        self._forms = [x.weight_form for x in linears if isinstance(x.weight_form, CachedFp8)]

    def begin_step(self) -> None:
        """Decide whether this step replays; forget recordings of memory that is elsewhere now."""
        self._num_steps += 1
        observed = isinstance(self.scaling, ScalingState) and bool(self.scaling.observers)
        self._is_eager = observed or self._num_steps <= WARMUP_STEPS
        if self._recordings and self._addresses != self._now():
            self._begin_again()

    def _begin_again(self) -> None:
        """Forget all recordings, and the casts of weights that are in their memory."""
        self._recordings.clear()
        for form in self._forms:
            form.keep(None)
        if self._recorder is not None:
            self._recorder.begin_again()

    def run(self, batch: Batch, *, is_first: bool) -> torch.Tensor:
        """Compute a microbatch's loss and gradients; return the summed loss, a 0-d tensor.

        The next call may overwrite the result. A microbatch of other shapes than those recorded
        runs without a recording; if it is the step's first, so do the others of the step.
        """
        if self._recorder is None:
            self._recorder = make_recorder(self.device)
        inputs = {"tokens_BS": batch.tokens_BS, "targets_BS": batch.targets_BS, **batch.documents}
        if (cu_seqlens_N1 := inputs.pop("cu_seqlens_N1", None)) is not None:
            # A recording has fixed shapes, and the host plans no blocks in a replay.
            ids_BS = document_ids(cu_seqlens_N1, batch.tokens_BS.shape[1])
            inputs["document_ids_BS"] = ids_BS.to(self.device, non_blocking=True)
        if self._is_eager or is_first not in self._has_run or not self._fits(inputs):
            self._has_run.add(is_first)
            self._is_eager = self._is_eager or is_first  # recordings read recorded casts alone
            with self._recorder.beside():
                return self._forward_backward(inputs)
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        if (recording := self._recordings.get(is_first)) is None:
            recording = self._recordings[is_first] = self._record(self._recorder)
        else:
            self._catch_up(recording, is_first=is_first)
        recording.recorded.replay()
        self.num_replays += 1
        return recording.recorded.result

    def lasting(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that a recording reads or writes and that outlive it, with names."""
        for name, param in self.model.named_parameters():
            yield name, param
            if isinstance(main_grad := self.sink.main_grads.get(param), GradSum):
                yield f"{name}, gradient", main_grad.total
        for direction, table in self.scaling.tables.items():
            for name, tensor in table.tensors().items():
                yield f"{direction} {name}", tensor
        for linear in linears_of(self.model):
            form = linear.weight_form
            if isinstance(form, StoredFp8) and form.dequant_scale is not None:
                yield f"{linear.name}.weight, scale", form.dequant_scale
        for name, tensor in self._inputs.items():
            yield f"microbatch, {name}", tensor

    def _now(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.lasting()}

    def _fits(self, inputs: dict[str, torch.Tensor]) -> bool:
        """Whether a microbatch has the shapes of the recordings, which the first one decides."""
        if not self._inputs:
            self._inputs = {name: torch.empty_like(tensor) for name, tensor in inputs.items()}
        same = inputs.keys() == self._inputs.keys()
        return same and all(inputs[name].shape == x.shape for name, x in self._inputs.items())

    def _forward_backward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**inputs)
        backward_of_loss(loss)
        return loss.detach()

    def _record(self, recorder: Recorder) -> _Recording:
        """Record the pass of a microbatch; the host does its part meanwhile."""
        counter = self.counter
        flops, fp8_flops = Counter(counter.flops), Counter(counter.fp8_backends)
        recorded = recorder.record(lambda: self._forward_backward(self._inputs))
        self._addresses = self._now()
        self.num_recordings += 1
        return _Recording(
            recorded,
            Counter(counter.flops) - flops,
            Counter(counter.fp8_backends) - fp8_flops,
            self.sink.untouched,
            [form.kept for form in self._forms],
        )

    def _catch_up(self, recording: _Recording, *, is_first: bool) -> None:
        """Do what the host would do in the pass that is replayed."""
        for key, flops in recording.flops.items():
            self.counter.flops[key] += flops
        for backend, flops in recording.fp8_flops.items():
            self.counter.fp8_backends[backend] += flops
        self.sink.leave_untouched(recording.untouched)
        if is_first:
            for form, casts in zip(self._forms, recording.casts, strict=True):
                form.keep(casts)
