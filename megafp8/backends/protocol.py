"""Say what a backend gives to a run; `native`, `te` and `torchao` implement it.

Nothing outside of this package and of `config` asks which backend runs: it calls a method here, or
reads the traits that packages without torch need too (`megafp8/specs/backends.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.grad_sink import MainGradSink
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.models.parts import Parts
from megafp8.optim.fp8_weights import Fp8Weights
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import PartsArgs
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.precision import PlannedGemms

Stores = Mapping[nn.Parameter, Callable[[torch.Tensor], None]]
"""By a weight that is kept in FP8: what writes its whole FP32 master into it."""


class Backend(ABC):
    """Run the layers of one model, on one rank.

    Attributes:
        parts: What the model is made of.
        scaling: What receives the events of a step, and holds the scales that a checkpoint stores.
        shows_casts: Whether observers see each cast; otherwise FP8 health reads the tables alone.
    """

    parts: Parts
    scaling: ScalingState | NoScaling
    shows_casts = True

    @abstractmethod
    def __init__(self, spec: RunSpec, mesh: Mesh, parts_args: PartsArgs) -> None:
        """Make parts and scaling, and connect what ranks share: the reduction of amaxes."""
        self.spec, self.device = spec, mesh.device

    @classmethod
    @abstractmethod
    def why_not(cls, spec: RunSpec, device: torch.device) -> Iterable[str]:
        """Return why it cannot run here; a library that it needs is loaded.

        Raises:
            ConfigError: Settings rule it out.
        """

    @abstractmethod
    def stores(self, model: nn.Module) -> Stores:
        """Return what writes whole masters into weights that are kept in FP8."""

    @abstractmethod
    def fp8_weights(self, model: nn.Module) -> Fp8Weights:
        """Return what keeps weights in FP8 where ranks have parts of their masters."""

    @abstractmethod
    def weights(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the weights of the layers' linears."""

    @abstractmethod
    def read_stored(self, model: nn.Module, stored: Mapping[nn.Parameter, ScaledTensor]) -> None:
        """Let linears read weights that are their own masters in low precision."""

    def connect(self, model: nn.Module, sink: MainGradSink) -> None:  # noqa: B027  # most do nothing
        """Let a library's products add gradients to the sums of `sink`, without autograd."""

    def after_load(self) -> None:  # noqa: B027  # most do nothing
        """Take over the scales that a checkpoint has brought into the tables of `scaling`."""

    def change_recipe(self, model: nn.Module, recipe: Fp8Recipe) -> None:
        """Let the linears of a model compute by another recipe, between two steps.

        Settings refuse it where a backend cannot do it.
        """
        raise NotImplementedError(f"{self.spec.precision.backend} keeps its recipe")

    def forget(self) -> None:  # noqa: B027  # most do nothing
        """Forget what a library keeps for the whole process of this model."""

    @abstractmethod
    def describe(self) -> str:
        """Return name, version and kernels for the header; empty if the dtype says it all."""

    def documents(self) -> str:
        """Return how its own attention keeps documents apart; empty where ours computes."""
        return ""

    @abstractmethod
    def planned(self, model: nn.Module) -> Iterable[PlannedGemms]:
        """Return which products of this rank's linears run in FP8; there is a recipe."""

    def kernel(self) -> str:
        """Return backend and kernel of the FP8 products, such as `te emulated`."""
        how = "emulated" if self.device.type == "cpu" else "tensor cores"
        return f"{self.spec.precision.backend} {how}"

    def fp8_flops(self, counter: GemmCounter) -> dict[str, int]:
        """Return the counted FLOPs in FP8 by backend and kernel."""
        return {self.kernel(): counter.by_precision().get("fp8", 0)}

    def memory_of(self, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        """Return the tensors whose memory a tensor occupies; an ordinary one is its own."""
        return (tensor,)

    def scaling_tensors(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the scales and histories that are in the memory of the rank's device."""
        tables = self.scaling.tables.values()
        return [tensor for table in tables for tensor in table.tensors().values()]

    def without_values(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the layers run on the meta device, for a dry run."""
        return nullcontext()

    def token_multiple(self) -> int:
        """Return the number that the layers want each rank's tokens to be a multiple of."""
        return 1

    def weight_copies(self, model: nn.Module) -> int | None:
        """Return the bytes of FP8 copies that last a step, if a dry run does not see them made."""
        return None
