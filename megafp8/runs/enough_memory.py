"""Say before weights are made that a model does not fit into memory, by the plan's own count.

A job is refused if the tensors that it keeps from step to step alone need more than there is in
all. If they and a step need more than is free now, it is warned.
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
from megafp8.plan.memory import RankMemory, rank_memory
from megafp8.plan.phases import largest_phase
from megafp8.specs import RunSpec
from megafp8.specs.backends import BACKENDS

CHECK = "MEGAFP8_MEMORY_CHECK"
"""The environment variable that, as `warn`, makes the refusal a warning, if the count is wrong."""

_TOKEN_BYTES = 16  # a token and the target of its position, int64 each
_FP32 = 4


@dataclass(frozen=True)
class Needs:
    """Hold the bytes that a rank needs at least, and about how many at the worst moment."""

    on_device: int  # in the memory of the rank's device
    on_host: int  # in the memory of its process; on a CPU this is all
    on_device_at_most: int
    on_host_at_most: int


def needs_of(spec: RunSpec, memory: RankMemory) -> Needs:
    """Return what a rank needs by the plan's count, and its data of one step.

    Weights are drawn in FP32 on the host before they are moved to a GPU and sharded.
    """
    held = memory.held
    own = held.total
    if not BACKENDS[spec.precision.backend].is_counted:
        own = held.masters + held.moments + held.gradients
    data = _step_data(spec)
    drawn = _FP32 * memory.num_params
    if spec.parallel.accelerator == "gpu":
        return Needs(own, drawn + data, memory.total, drawn + data)
    most = max(own, drawn) + data
    return Needs(0, most, 0, max(most, memory.total + data))


def _step_data(spec: RunSpec) -> int:
    """Return the bytes of a rank's samples of one optimizer step."""
    samples = spec.train.global_batch_size // max(1, spec.parallel.dp)
    return samples * spec.data.seq_length * _TOKEN_BYTES


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
    needs = needs_of(spec, rank_memory(largest_phase(spec), mesh.pp.rank))
    size = max(1, spec.parallel.devices_per_node)
    node = mesh.world.rank // size
    own_bytes = (needs.on_host, needs.on_host_at_most)
    bytes_by_rank = gather(mesh, own_bytes)
    of_node = [tuple(each) for rank, each in enumerate(bytes_by_rank) if rank // size == node]
    node_bytes = (sum(least for least, _ in of_node), sum(most for _, most in of_node))

    def check() -> str | None:
        """Return a warning, or raise, for what this rank's process, machine and device hold."""
        found = [
            *problems(own_bytes, process_limits(), "this process"),
            *problems(node_bytes, machine_limits(), _ranks(len(of_node))),
        ]
        if mesh.device.type == "cuda":
            free, in_all = torch.cuda.mem_get_info(mesh.device)
            device = Limit(in_all, free, f"the memory of {torch.cuda.get_device_name(mesh.device)}")
            device_bytes = (needs.on_device, needs.on_device_at_most)
            found += problems(device_bytes, [device], "a rank")
        return decide(spec, found)

    lines = [line for line in on_all(mesh, check) if line is not None]
    if lines:
        warn(lines[0])


@dataclass(frozen=True)
class Problem:
    """Hold what does not fit, in words, and whether that is certain."""

    text: str
    is_certain: bool


def problems(wanted: tuple[int, int], limits: Sequence[Limit], who: str) -> list[Problem]:
    """Return what is wrong with each limit, for a need of at least and about at most `wanted`."""
    least, most = wanted
    misfits = []
    for limit in limits:
        if least > limit.num_bytes:
            supply = f"{format_bytes(limit.num_bytes)} are there in all ({limit.name})"
            misfits.append(
                Problem(f"{who} needs at least {format_bytes(least)}, and {supply}", True)
            )
        elif most > limit.free:
            supply = f"{format_bytes(limit.free)} are free ({limit.name})"
            misfits.append(Problem(f"{who} needs about {format_bytes(most)}, and {supply}", False))
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
