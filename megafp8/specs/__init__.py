"""Define the frozen dataclasses that the packages exchange; importing them needs no torch."""

from megafp8.specs.data import DataSpec, InstructionSpec, TokenizerSpec
from megafp8.specs.model import GPTSpec
from megafp8.specs.moe import MoESpec
from megafp8.specs.optim import MuonSpec, OptimSpec, ScheduleSpec, StorageSpec
from megafp8.specs.parallel import FsdpSpec, ParallelSpec, PipelineSpec
from megafp8.specs.precision import Fp8Recipe, LossScaleSpec, PrecisionSpec
from megafp8.specs.run import (
    CheckpointSpec,
    HealthMode,
    HealthSpec,
    ObserveSpec,
    ProfileSpec,
    RampupSpec,
    RunSpec,
    TensorHealth,
    TrainSpec,
)
