"""How many ranks there are, which axes they form, and which layers each pipeline stage holds."""

from __future__ import annotations

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
"""Those that run one stage on each rank."""
ZERO_BUBBLE_SCHEDULES: tuple[ScheduleName, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Those that compute weights' gradients later than inputs' gradients."""
ROUND_SCHEDULES: tuple[ScheduleName, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Those that run microbatches in equal rounds of at least as many as there are ranks."""

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """How the layers are spread over `ParallelSpec.pp` ranks and in which order they run."""

    schedule: ScheduleName = "1F1B"
    stages_per_rank: int = 1
    layout: tuple[int, ...] | None = None  # layers of each stage; None: equal numbers

    def layers(self, num_layers: int, pp: int) -> list[range]:
        """The layers of each of the `pp * stages_per_rank` stages, in the model's order."""
        num_stages = pp * self.stages_per_rank
        sizes = self.layout or (num_layers // num_stages,) * num_stages
        assert len(sizes) == num_stages and sum(sizes) == num_layers, f"{sizes} of {num_layers}"
        ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def rank_of(self, stage: int, pp: int) -> int:
        """Which pipeline rank holds a stage: in turn, but for ZBV, which goes there and back."""
        turn, place = divmod(stage, pp)
        return pp - 1 - place if self.schedule == "ZBVZeroBubble" and turn % 2 else place

    def stages_of(self, rank: int, pp: int) -> list[int]:
        """The stages that a pipeline rank holds, in the model's order."""
        stages = range(pp * self.stages_per_rank)
        return [stage for stage in stages if self.rank_of(stage, pp) == rank]


@dataclass(frozen=True, kw_only=True)
class FsdpSpec:
    """How replicas share out the parameters of each transformer block.

    `full`: weights are gathered for a block's forward and again for its backward pass (ZeRO-3);
    `grad`: they stay from one to the other (ZeRO-2); `hybrid`: as `full` within a node, and nodes
    are replicas (HSDP). `torchao_in_fp8`: the weights of torchao's linears cross as FP8 bytes.
    """

    strategy: Literal["full", "grad", "hybrid"] = "full"
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    torchao_in_fp8: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """Sizes of the mesh axes; `world_size` is their product."""

    num_nodes: int = 1
    devices_per_node: int = 1
    tp: int = 1  # tensor-parallel ranks
    sequence_parallel: bool = False  # they share out the sequence between their linears
    cp: int = 1  # context-parallel ranks
    pp: int = 1  # pipeline-parallel ranks
    accelerator: str = "cpu"  # "cpu" or "gpu", never "auto": resolved already
    pipeline: PipelineSpec = PipelineSpec()
    tp_only_amax_red: bool = False  # amaxes over tp x cp, not over dp too
    grad_bucket_bytes: int = 125 * MIB  # of FP32 gradients that one reduction takes
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    fsdp: FsdpSpec | None = None  # None: every replica has whole parameters
    step_timeout_seconds: float | None = None  # without a sign of life; None: no watch

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)
