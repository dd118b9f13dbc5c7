"""Small frozen dataclasses that the rooms hand to each other. No torch: planning is instant."""

from megafp8.specs.checkpoint import CheckpointSpec
from megafp8.specs.data import DataSpec, TokenizerSpec
from megafp8.specs.model import GPTSpec
from megafp8.specs.optim import OptimSpec, ScheduleSpec
from megafp8.specs.parallel import ParallelSpec, PipelineSpec
from megafp8.specs.precision import Fp8Recipe, PrecisionSpec
from megafp8.specs.run import ObserveSpec, RunSpec
from megafp8.specs.train import TrainSpec

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "Fp8Recipe",
    "GPTSpec",
    "ObserveSpec",
    "OptimSpec",
    "ParallelSpec",
    "PipelineSpec",
    "PrecisionSpec",
    "RunSpec",
    "ScheduleSpec",
    "TokenizerSpec",
    "TrainSpec",
]
