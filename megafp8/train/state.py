"""Everything that a training step reads and changes, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.models.gpt import GPT
from megafp8.models.random import RandomStreams
from megafp8.optim.adamw import AdamW
from megafp8.optim.loss_scale import LossScale
from megafp8.optim.masters import Masters
from megafp8.parallel.data import GradReducer
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pipeline import PipelinedGPT, PipelineRunner
from megafp8.precision.gemm import GemmCounter
from megafp8.precision.grad_sink import MainGradSink
from megafp8.precision.scaling import NoScaling, ScalingState
from megafp8.train.compile import CompileCounter


@dataclass
class TrainState:
    """The parts are made once by `build`; `step` and `consumed_samples` move."""

    model: GPT | PipelinedGPT
    masters: Masters
    optimizer: AdamW
    scaling: ScalingState | NoScaling
    streams: RandomStreams
    sink: MainGradSink
    counter: GemmCounter
    mesh: Mesh
    reducer: GradReducer | None = None  # where there are replicas
    sequence_parallel: bool = False  # unsharded parameters' gradients are summed over tp
    pipeline: PipelineRunner | None = None  # where the model is one stage of several
    step: int = 0  # the last finished step
    consumed_samples: int = 0  # over all ranks
    num_skipped: int = 0  # steps whose gradients were not finite
    loss_scale: LossScale | None = None  # FP16's
    compiled: CompileCounter | None = None  # where torch compiles the layers
