"""Describe the ranks, the mesh axes they form, and the layers of each pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
SCHEDULES: tuple[ScheduleName, ...] = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
)
ONE_STAGE_SCHEDULES: tuple[ScheduleName, ...] = ("GPipe", "1F1B")
"""The schedules that run one stage on each rank."""
ZERO_BUBBLE_SCHEDULES: tuple[ScheduleName, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""The schedules that compute weight gradients later than input gradients."""
ROUND_SCHEDULES: tuple[ScheduleName, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")
"""The schedules that run microbatches in equal rounds, each of at least as many as ranks."""

KEPT_SENDS = 2
"""The messages that a rank has on their way at a time, but under `ONE_STAGE_SCHEDULES`: one."""

MIB = 1 << 20

LARGEST_IMBALANCE = 0.1
"""The imbalance of whole tensors above which elements are divided, if a run chooses itself."""


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """Say how layers are spread over `ParallelSpec.pp` ranks and in which order they run."""

    schedule: ScheduleName = "1F1B"
    stages_per_rank: int = 1
    layout: tuple[int, ...] | None = None  # layers of each stage; None: equal numbers

    def layers(self, num_layers: int, pp: int) -> list[range]:
        """Return the layers of each of the `pp * stages_per_rank` stages, in the model's order."""
        num_stages = pp * self.stages_per_rank
        sizes = self.layout or (num_layers // num_stages,) * num_stages
        assert len(sizes) == num_stages and sum(sizes) == num_layers, f"{sizes} of {num_layers}"
        ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def rank_of(self, stage: int, pp: int) -> int:
        """Return the pipeline rank that holds a stage.

        Stages are assigned to ranks 0, 1, …, pp - 1 and then from rank 0 again; ZBV assigns every
        second round in reverse.
        """
        turn, place = divmod(stage, pp)
        return pp - 1 - place if self.schedule == "ZBVZeroBubble" and turn % 2 else place

    def stages_of(self, rank: int, pp: int) -> list[int]:
        """Return the stages that a pipeline rank holds, in the model's order."""
        stages = range(pp * self.stages_per_rank)
        return [stage for stage in stages if self.rank_of(stage, pp) == rank]


@dataclass(frozen=True, kw_only=True)
class FsdpSpec:
    """Say how replicas shard the parameters of each transformer block.

    `full` gathers weights for a block's forward pass and again for its backward pass (ZeRO-3);
    `grad` keeps them in between (ZeRO-2); `hybrid` works as `full` within a node, and nodes are
    replicas (HSDP). `torchao_in_fp8` sends the weights of torchao's linears as FP8 bytes.
    """

    strategy: Literal["full", "grad", "hybrid"] = "full"
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    torchao_in_fp8: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Hold the sizes of the mesh axes; `world_size` is the product of all but `ep`."""

    num_nodes: int = 1
    devices_per_node: int = 1
    tp: int = 1  # tensor-parallel ranks
    sequence_parallel: bool = False  # whether tp ranks shard the sequence between their linears
    cp: int = 1  # context-parallel ranks
    pp: int = 1  # pipeline-parallel ranks
    ep: int = 1  # ranks of a stage that divide its experts; they are among those of tp, cp and dp
    accelerator: str = "cpu"  # "cpu" or "gpu", never "auto", which is resolved before
    pipeline: PipelineSpec = PipelineSpec()
    tp_only_amax_red: bool = False  # whether amaxes are reduced over tp x cp, and not over dp
    grad_bucket_bytes: int = 125 * MIB  # bytes of FP32 gradients in one reduction
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    fsdp: FsdpSpec | None = None  # None means that every replica has whole parameters
    step_timeout_seconds: float | None = None  # a rank may be silent so long; 0: no limit

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.num_nodes * self.devices_per_node

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.world_size // (self.tp * self.cp * self.pp)


def owners_of(sizes: Sequence[int], held: list[int], first: Collection[int] = ()) -> list[int]:
    """Return the rank that owns each tensor, by the tensors' sizes (FP8-LM's Algorithm 1).

    The largest tensor goes to the rank that owns the fewest elements, then the next one; of equals
    the one of the lower index comes first. The tensors `first` go to rank 0 before that. `held` is
    what each rank owns already, and is raised.
    """
    owners = [0] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda index: (index not in first, -sizes[index], index))
    for index in order:
        owner = 0 if index in first else held.index(min(held))
        owners[index] = owner
        held[owner] += sizes[index]
    return owners


def imbalance_of(held: Sequence[int]) -> float:
    """Return by what fraction the fullest rank has more than an equal share."""
    return max(held) * len(held) / max(sum(held), 1) - 1
