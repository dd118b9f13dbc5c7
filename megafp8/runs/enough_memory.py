"""Say before weights are made that a model does not fit into memory, by the sum of what stays.

A job is refused if the tensors that it keeps from step to step need more than there is in all, and
warned if they need more than is free now. What a step adds, `megafp8 plan` predicts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megafp8.errors import ConfigError, RunError
from megafp8.observe.units import format_bytes
from megafp8.ops.memory import Limit, machine_limits, process_limits
from megafp8.parallel.agreement import gather, on_all
from megafp8.parallel.mesh import Mesh
from megafp8.specs import RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.held import bytes_kept
from megafp8.specs.rank_shape import rank_shape

CHECK = "MEGAFP8_MEMORY_CHECK"
"""The environment variable that, as `warn`, makes the refusal a warning, if the count is wrong."""

_TOKEN_BYTES = 16  # a token and the target of its position, int64 each
_FP32 = 4


def needs_of(spec: RunSpec, pipeline_rank: int) -> tuple[int, int]:
    """Return the bytes that a rank needs at least on its device and in its process's memory.

    On a CPU the latter are all, and the former 0. They include the data of one step. Weights are
    drawn in FP32 on the host before they are moved to a GPU and sharded.
    """
    shape = rank_shape(spec, pipeline_rank)
    held = bytes_kept(spec, shape)
    kept = held.total
    if not BACKENDS[spec.precision.backend].is_counted:
        kept = held.masters + held.moments + held.gradients
    drawn = _FP32 * sum(param.elements for param in shape.params)
    samples = spec.train.global_batch_size // max(1, spec.parallel.dp)
    data = samples * spec.data.seq_length * _TOKEN_BYTES
    if spec.parallel.accelerator == "gpu":
        return kept, drawn + data
    return 0, max(kept, drawn) + data


def require_memory(spec: RunSpec, mesh: Mesh, warn: Callable[[str], None]) -> None:
    """Check that the job fits into memory. All ranks call it together.

    Args:
        spec: The run, with the size of its vocabulary.
        mesh: The ranks.
        warn: Called with a line if it may not fit.

    Raises:
        RunError: The job cannot fit into the memory of a rank's device or machine.
        ConfigError: `MEGAFP8_MEMORY_CHECK` has an unknown value.
    """
    on_device, on_host = needs_of(spec, mesh.pp.rank)
    size = max(1, spec.parallel.devices_per_node)
    node = mesh.world.rank // size
    of_node = [each for rank, each in enumerate(gather(mesh, on_host)) if rank // size == node]

    def check() -> str | None:
        """Return a warning, or raise, for what this rank's process, machine and device hold."""
        found = [
            *problems(on_host, process_limits(), "this process"),
            *problems(sum(of_node), machine_limits(), _ranks(len(of_node))),
        ]
        if mesh.device.type == "cuda":
            free, in_all = torch.cuda.mem_get_info(mesh.device)
            device = Limit(in_all, free, f"the memory of {torch.cuda.get_device_name(mesh.device)}")
            found += problems(on_device, [device], "a rank")
        return decide(spec, found)

    lines = [line for line in on_all(mesh, check) if line is not None]
    if lines:
        warn(lines[0])


@dataclass(frozen=True)
class Problem:
    """Hold what does not fit, in words, and whether that is certain."""

    text: str
    is_certain: bool


def problems(needed: int, limits: Sequence[Limit], who: str) -> list[Problem]:
    """Return what is wrong with each limit, for a need of at least `needed` bytes."""
    misfits = []
    for limit in limits:
        is_certain = needed > limit.num_bytes
        if is_certain or needed > limit.free:
            supply = f"{format_bytes(limit.num_bytes)} are there in all"
            if not is_certain:
                supply = f"{format_bytes(limit.free)} are free"
            text = f"{who} needs at least {format_bytes(needed)}, and {supply} ({limit.name})"
            misfits.append(Problem(text, is_certain))
    return misfits


def decide(spec: RunSpec, found: Sequence[Problem]) -> str | None:
    """Return a warning about a job that may not fit; None if it fits.

    Raises:
        RunError: The job cannot fit.
        ConfigError: `MEGAFP8_MEMORY_CHECK` has an unknown value.
    """
    mode = os.environ.get(CHECK, "")
    if mode not in ("", "error", "warn"):
        raise ConfigError(CHECK, mode, "is neither error nor warn", "Leave the variable out")
    certain = [problem for problem in found if problem.is_certain]
    if not found:
        return None
    text = (certain or list(found))[0].text
    if not certain:
        return f"the job may not fit into memory: {text}"
    reason = f"the job does not fit into memory: {text} ({_sizes(spec)})"
    if mode == "warn":
        return reason
    raise RunError(
        f"{reason}. Use a smaller model or batch, or divide it over more ranks; "
        "megafp8 plan with the same settings shows what needs how much. If this "
        f"count is wrong, {CHECK}=warn in the environment starts the job all the same"
    )


def _sizes(spec: RunSpec) -> str:
    model = spec.model
    return (
        f"model.num_layers={model.num_layers}, model.hidden_size={model.hidden_size}, "
        f"model.global_batch_size={spec.train.global_batch_size}"
    )


def _ranks(count: int) -> str:
    return "the job" if count == 1 else f"the job of {count} ranks on this machine"
