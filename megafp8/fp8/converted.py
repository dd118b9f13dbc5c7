"""Modules of other people's models whose three products run in FP8, on their own parameters.

A converted module stays the same object with the same parameters, hooks and names. Its class alone
changes, to a subclass of what it was, so `isinstance(module, nn.Linear)` still holds.
"""

# T tokens (all leading dims)   I in features   O out features

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megafp8.errors import UserError
from megafp8.fp8.engine import slow_parts
from megafp8.fp8.gemm import GemmCounter
from megafp8.fp8.grad_sink import ComputeGrad
from megafp8.fp8.kernels.triton_launch import on_device_of
from megafp8.fp8.linear import LinearFunction, NoComm
from megafp8.fp8.quantizer import LinearQuantizer
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.weights import WeightForm

Phase = Literal["outside", "microbatch", "evaluation"]


class Fp8Error(UserError):
    """A model, an option or a use that FP8 conversion cannot take.

    The message names the module or the option (`subject`), the reason, and what to do (`hint`).
    """

    def __init__(self, subject: str, reason: str, hint: str) -> None:
        super().__init__(f"{subject}: {reason}. {hint}.")
        self.subject, self.reason, self.hint = subject, reason, hint


@dataclass
class Shared:
    """Hold what all converted linears of one model share: scales, counts, the current phase."""

    scaling: ScalingState
    counter: GemmCounter = field(default_factory=GemmCounter)
    phase: Phase = "outside"
    device: torch.device = torch.device("cpu")
    linears: dict[str, Converted] = field(default_factory=dict)
    identity: int = field(init=False)

    def __post_init__(self) -> None:
        self.adopt()

    def adopt(self) -> None:
        """Belong to a state from now on; `copy.deepcopy` of a model makes one without a state."""
        self.identity = id(self)

    @property
    def is_copy(self) -> bool:
        """Whether this was copied with its model, while the state stayed with the original."""
        return self.identity != id(self)

    @property
    def is_outside(self) -> bool:
        """Whether no context of a state encloses the linears."""
        return self.phase == "outside" or self.is_copy

    def follow(self) -> None:
        """Move the scales to the device of the weights.

        Raises:
            Fp8Error: The weights lie on several devices, or on the meta device.
        """
        first: tuple[str, torch.device] | None = None
        for name, linear in self.linears.items():
            device = linear.weight.device
            if device.type == "meta":
                raise Fp8Error(name, "has its weight on the meta device", "Give it memory first")
            if first is not None and device != first[1]:
                raise Fp8Error(
                    name,
                    f"lies on {device}, while {first[0]} lies on {first[1]}",
                    "Keep the converted linears of one model on one device",
                )
            first = first or (name, device)
        assert first is not None
        if first[1] != self.device:
            self.device = first[1]
            self.scaling.to(self.device)
            self.scaling.weights_version += 1
            recipe = self.scaling.recipe
            for text in slow_parts(self.device, map(recipe.precision_of, self.linears)):
                warnings.warn(f"FP8 on {self.device}: {text}", stacklevel=2)

    def forward_pass(self, bound: Bound) -> AbstractContextManager[None]:
        """Return the context in which one linear casts and multiplies.

        Raises:
            Fp8Error: Training with delayed scaling outside of a microbatch.
        """
        if not self.is_outside:
            return nullcontext()
        if not torch.is_grad_enabled():
            return self.scaling.evaluation()
        if bound.is_delayed and self.is_copy:
            raise self._of_a_copy(bound)
        if bound.is_delayed:
            raise Fp8Error(
                bound.name,
                "a forward pass with gradients ran outside of a microbatch, so delayed scaling "
                "would never update its scales",
                "Put `with state.microbatch():` around forward and backward, or "
                "`with state.evaluation():` or `torch.no_grad()` around an evaluation",
            )
        self.scaling.weights_version += 1  # the weight may have changed since its last use
        return nullcontext()

    def check_backward(self, bound: Bound) -> None:
        """Raise `Fp8Error` for a backward pass whose amaxes no microbatch would collect."""
        if bound.is_delayed and self.is_outside:
            if self.is_copy:
                raise self._of_a_copy(bound)
            raise Fp8Error(
                bound.name,
                "its backward pass ran outside of a microbatch, so delayed scaling would miss the "
                "output gradient",
                "Call `loss.backward()` inside of `with state.microbatch():`",
            )

    def check_samples(self, bound: Bound, input: torch.Tensor) -> None:
        """Raise `Fp8Error` for an input that is not the tokens of the microbatch's samples."""
        samples = len(self.scaling.draws.at.tokens.samples)
        rows = input.numel() // input.shape[-1]
        if not self.is_outside and rows % samples:
            raise Fp8Error(
                bound.name,
                f"its input has {rows} rows, which are not the tokens of {samples} samples",
                "Give state.microbatch() the samples of this microbatch, or leave them out",
            )

    def _of_a_copy(self, bound: Bound) -> Fp8Error:
        return Fp8Error(
            bound.name,
            "belongs to a copy of the converted model (copy.deepcopy, pickle), whose scales no "
            "state updates: state.microbatch() is the original's",
            "Evaluate the copy under `torch.no_grad()`; or copy the model before fp8.convert, and "
            "convert the copy to train it",
        )


@dataclass
class Bound:
    """Hold what FP8 adds to one module. `is_transposed`: the module keeps its weight as [I, O]."""

    name: str
    quantizer: LinearQuantizer
    weight_form: WeightForm
    shared: Shared
    is_delayed: bool
    is_transposed: bool


class _Sink:
    """Return each gradient to autograd, in the dtype of its parameter; None for frozen ones."""

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        return compute(None).to(weight.dtype) if weight.requires_grad else None

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        raise AssertionError("a linear has no look-up")


@dataclass
class _Use:
    """Hold what one use of a converted module reads in both passes (`linear.LinearWork`)."""

    bound: Bound
    quantizer: LinearQuantizer
    weight_form: WeightForm
    counter: GemmCounter
    comm = NoComm()
    sink = _Sink()


class _ConvertedFunction(LinearFunction):
    """Run the linear of a converted module; its backward pass checks where it runs."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bound: Bound = ctx.layer.bound
        bound.shared.check_backward(bound)
        with torch.autocast(grads[0].device.type, enabled=False):
            return LinearFunction.backward(ctx, *grads)


class Converted(nn.Module):
    """The part that every converted module has; subclasses say what the module was before."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    fp8: Bound

    @torch.compiler.disable(reason="megafp8's FP8 linears run eagerly and part the graph")  # type: ignore[untyped-decorator,unused-ignore]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [..., I] to [..., O], in the input's dtype or that of `torch.autocast`.

        Raises:
            Fp8Error: The dtypes of input and weight differ without autocast, the weight is a
                DTensor, or delayed scaling trains outside of a microbatch.
        """
        bound, weight_OI, bias_O = self.fp8, self.weight, self.bias
        if is_dtensor(weight_OI):
            raise Fp8Error(
                bound.name,
                "its weight is a DTensor in the forward pass, and FP8 products take whole weights",
                "Leave it out of the tensor-parallel plan, or skip it; FSDP2 gathers weights first",
            )
        if bound.is_transposed:
            weight_OI = cast(nn.Parameter, weight_OI.t())
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight_OI = input.to(dtype), cast(nn.Parameter, weight_OI.to(dtype))
            bias_O = None if bias_O is None else cast(nn.Parameter, bias_O.to(dtype))
        elif input.dtype != weight_OI.dtype:
            raise Fp8Error(
                bound.name,
                f"its input is {input.dtype}, and its weight {weight_OI.dtype}",
                "Give both one dtype, or run the model under torch.autocast",
            )
        if input.numel() == 0:
            return F.linear(input, weight_OI, bias_O)
        shared = bound.shared
        shared.check_samples(bound, input)
        if weight_OI.device != shared.device:
            shared.follow()
        with shared.forward_pass(bound), on_device_of(input), torch.autocast(kind, enabled=False):
            quantizer, form = bound.quantizer, bound.weight_form
            output_TO = _ConvertedFunction.apply(  # type: ignore[no-untyped-call]
                input.reshape(-1, input.shape[-1]),
                weight_OI,
                bias_O,
                _Use(bound, quantizer, form, shared.counter),
                torch.is_grad_enabled(),
            )
        out: torch.Tensor = output_TO.view(*input.shape[:-1], output_TO.shape[-1])
        return out

    def extra_repr(self) -> str:
        """Return what the module printed before, and the recipe."""
        recipe = self.fp8.quantizer.state.recipe.precision_of(self.fp8.name)
        return f"{super().extra_repr()}, fp8={recipe}".removeprefix(", ")


class Fp8Linear(Converted, nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` that `fp8.convert` has converted."""


_CLASSES: dict[type[nn.Module], type[Converted]] = {nn.Linear: Fp8Linear}


def converted_class(kind: type[nn.Module]) -> type[Converted]:
    """Return the class that a module of class `kind` gets: a subclass of `kind`, made once."""
    if kind not in _CLASSES:
        made = type(f"Fp8{kind.__name__}", (Converted, kind), {"__module__": __name__})
        _CLASSES[kind] = cast(type[Converted], made)
    return _CLASSES[kind]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`: a shard of FSDP2's or of tensor parallelism."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)
