"""Hold everything that a training step reads and changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8_numerics.gemm import GemmCounter
from megafp8.backends.protocol import Backend
from megafp8.fp8.grad_sink import MainGradSink
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.models.gpt import GPT
from megafp8.models.random import RandomStreams
from megafp8.optim.loss_scale import LossScale
from megafp8.optim.masters import Masters
from megafp8.optim.protocol import Optimizers
from megafp8.parallel.grad_reduce import GradReducer
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pipeline import PipelinedGPT
from megafp8.specs.precision import PrecisionPhase
from megafp8.train.compile import CompileCounter
from megafp8.train.graphs import MicrobatchGraphs

if TYPE_CHECKING:
    from megafp8.parallel.pipeline_runner import PipelineRunner


@dataclass
class TrainState:
    """Hold everything that a training step reads and changes, on one rank.

    `build` makes it once. Parts change in place; `step` and the counters are set after each step.
    """

    model: GPT | PipelinedGPT
    masters: Masters
    optimizer: Optimizers
    backend: Backend
    scaling: ScalingState | NoScaling
    streams: RandomStreams
    sink: MainGradSink
    counter: GemmCounter
    mesh: Mesh
    reducer: GradReducer | None = None  # None without replicas
    sequence_parallel: bool = False  # then gradients of unsharded parameters are summed over tp
    pipeline: PipelineRunner | None = None  # None without pipeline stages
    step: int = 0  # the last finished step
    consumed_samples: int = 0  # over all ranks
    num_skipped: int = 0  # steps whose gradients were not finite
    num_skipped_in_a_row: int = 0  # of these, up to now; FP16's overflows are not counted
    loss_scale: LossScale | None = None  # None unless the run computes in FP16
    compiled: CompileCounter | None = None  # None unless torch compiles the layers
    graphs: MicrobatchGraphs | None = None  # None unless microbatches are captured as CUDA graphs
    phases: tuple[PrecisionPhase, ...] = ()  # of a run that changes its precision
