"""Profile the time of training steps, and record what held the memory when it ran out.

On a CUDA device, Nsight Systems makes the profile: the steps are marked for `nsys profile
--capture-range=cudaProfilerApi`, and each operation becomes an NVTX range. On other devices,
torch's own profiler writes a Chrome trace to the run's directory (chrome://tracing or
ui.perfetto.dev shows it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megafp8.ops import torch_private
from megafp8.specs.run import ProfileSpec

Notify = Callable[[str], None]

MEMORY_EVENTS = 200_000  # number of the last allocations and frees that a snapshot has


class StepProfiler:
    """Profile the steps that the spec names, on the ranks that it names.

    Call `before_step` and `after_step` around each step, and `close` when training ends for
    whatever reason.
    """

    def __init__(
        self,
        spec: ProfileSpec,
        directory: Path,
        rank: int,
        device: torch.device,
        notify: Notify,
    ) -> None:
        self.spec, self.rank, self.device, self.notify = spec, rank, device, notify
        self.trace_file = directory / f"profile_rank{rank}.json"
        self._is_chosen = spec.enabled and rank in spec.ranks
        self._stack: contextlib.ExitStack | None = None

    def before_step(self, step: int) -> None:
        """Start the profile if it is due; `step` optimizer steps are done before this one."""
        if self._is_chosen and step == self.spec.start_step:
            self._stack = contextlib.ExitStack()
            if self.device.type == "cuda":
                self._stack.enter_context(_nvtx_ranges(self.spec.gen_shape))
            else:
                self._stack.enter_context(self._trace())
        if self._stack is not None and self.device.type == "cuda":
            torch.cuda.nvtx.range_push(f"step {step + 1}")

    def after_step(self, step: int) -> None:
        """End the profile if it is due; `step` is the number that `before_step` got."""
        if self._stack is None:
            return
        if self.device.type == "cuda":
            torch.cuda.nvtx.range_pop()
        if step >= self.spec.end_step:
            self.close()

    def close(self) -> None:
        """End the profile that is under way, if there is one, and write its trace."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @contextlib.contextmanager
    def _trace(self) -> Iterator[None]:
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(
            activities=[activity], record_shapes=self.spec.gen_shape
        ) as profile:
            yield
        error: Exception | str = "see above"  # torch may print on stderr instead of raising
        try:
            profile.export_chrome_trace(str(self.trace_file))
        except (OSError, RuntimeError) as failure:
            error = failure
        if not self.trace_file.is_file():
            self.notify(f"{self.trace_file}: cannot be written ({error})")
            return
        self.notify(f"profiled rank {self.rank}: {self.trace_file}")


@contextlib.contextmanager
def _nvtx_ranges(shapes: bool) -> Iterator[None]:
    """Let Nsight Systems record what the GPU does inside the context, under operations' names."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.synchronize()  # so that no kernel of an earlier step is recorded
    runtime.cudaProfilerStart()
    try:
        with torch.autograd.profiler.emit_nvtx(record_shapes=shapes):
            yield
    finally:
        torch.cuda.synchronize()  # so that the last kernels are recorded
        runtime.cudaProfilerStop()


@contextlib.contextmanager
def memory_snapshot_on_oom(
    enabled: bool, directory: Path, rank: int, notify: Notify
) -> Iterator[None]:
    """Write what held CUDA's memory if it runs out inside this context.

    pytorch.org/memory_viz shows the file.
    """
    if not enabled:
        yield
        return
    torch_private.record_cuda_memory(MEMORY_EVENTS)
    try:
        yield
    except torch.OutOfMemoryError:
        file = directory / f"memory_rank{rank}.pickle"
        torch_private.dump_cuda_memory(str(file))
        notify(f"CUDA is out of memory; {file} shows what held it (see pytorch.org/memory_viz)")
        raise
    finally:
        torch_private.record_cuda_memory(None)
