"""Modules of other people's models whose three products run in FP8, on their own parameters.

A converted module stays the same object with the same parameters, hooks and names. Its class alone
changes, to a subclass of what it was, so `isinstance(module, nn.Linear)` still holds.
"""

# T tokens (all leading dims)   I in features   O out features

from __future__ import annotations

import logging
import math
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fp8_numerics.cast import amax_of
from fp8_numerics.gemm import GemmCounter
from fp8_numerics.kernels.triton_launch import on_device_of
from fp8_numerics.philox import Rows
from megafp8.errors import UserError
from megafp8.fp8.engine import slow_parts
from megafp8.fp8.grad_sink import ComputeGrad
from megafp8.fp8.linear import LinearComm, LinearFunction
from megafp8.fp8.quantizer import LinearQuantizer
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.weights import FreshFp8
from megafp8.ops import torch_private

_LOGGER = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRACED = ("FakeTensor", "Proxy")
"""Classes of a weight while torch.export or torch.fx follows the model."""
Stamp = list[tuple[int, int | None, torch.dtype | None]]  # address, number of writes, dtype
Phase = Literal["outside", "microbatch", "evaluation"]


class Fp8Error(UserError):
    """A model, an option or a use that FP8 conversion cannot take.

    The message names the module or the option (`subject`), the reason, and what to do (`hint`).
    """

    def __init__(self, subject: str, reason: str, hint: str) -> None:
        end = "" if hint.endswith("?") else "."
        super().__init__(f"{subject}: {reason}. {hint}{end}")
        self.subject, self.reason, self.hint = subject, reason, hint


class _Depth(threading.local):
    depth = 0


MULTIPLYING = _Depth()
"""How many linears, of any model, cast and multiply in this thread just now."""


@dataclass
class Shared:
    """Hold what all converted linears of one model share: scales, counts, the current phase."""

    scaling: ScalingState
    counter: GemmCounter = field(default_factory=GemmCounter)
    phase: Phase = "outside"
    device: torch.device = torch.device("cpu")
    linears: dict[str, Converted] = field(default_factory=dict)
    has_scales: bool = False  # a microbatch has ended, or scales were loaded
    scales_are_fresh: bool = False  # they were loaded, and no pass has run since
    knows_callback: bool = False  # a Trainer without our callback was shown it
    of_heads: Counter[str] = field(default_factory=Counter)  # the FLOPs of output layers
    is_copy: bool = False  # copied or pickled with its model, while the state stayed behind

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Take over what copy or pickle kept; a copy made of the state as well adopts it."""
        vars(self).update(kept, is_copy=True)

    @property
    def is_outside(self) -> bool:
        """Whether no context of a state encloses the linears."""
        return self.phase == "outside" or self.is_copy

    def follow(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Move the scales to the device of the weights, by default those of the linears.

        Raises:
            Fp8Error: The weights lie on several devices, or on the meta device.
        """
        if weights is None:
            weights = {name: each.stored_weights()[0] for name, each in self.linears.items()}
        first: tuple[str, torch.device] | None = None
        for name, weight in weights.items():
            device = weight.device
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
            for text in slow_parts(self.device, map(recipe.precision_of, weights)):
                warnings.warn(f"FP8 on {self.device}: {text}", stacklevel=2)

    def forward_pass(self, bound: Bound) -> AbstractContextManager[None]:
        """Return the context in which one linear casts and multiplies.

        Raises:
            Fp8Error: Training with delayed scaling outside of a microbatch.
        """
        if not self.is_outside:
            return nullcontext()
        self.scales_are_fresh = False
        if not torch.is_grad_enabled():
            self.say_without_scales()
            return self.scaling.evaluation()
        if bound.is_delayed and self.is_copy:
            raise self._of_a_copy(bound)
        if not self.is_copy:
            self._tell_trainer(bound)
        if bound.is_delayed:
            raise Fp8Error(
                bound.name,
                "a forward pass with gradients ran outside of a microbatch, so delayed scaling "
                "would never update its scales",
                "Put `with state.microbatch():` around forward and backward, or "
                "`with state.evaluation():` or `torch.no_grad()` around an evaluation; the Trainer "
                "of transformers takes callbacks=[Fp8Callback(state)] of megafp8.fp8.trainer, and "
                "a LightningModule takes the hooks of docs/guide/own_model_training.md",
            )
        self.scaling.weights_version += 1  # the weight may have changed since its last use
        return nullcontext()

    @contextmanager
    def multiplying(self, bound: Bound) -> Iterator[None]:
        """Enclose what a linear casts and multiplies; count apart what an output layer does."""
        before = self.counter.by_precision() if bound.is_head else {}
        MULTIPLYING.depth += 1
        try:
            yield
        finally:
            MULTIPLYING.depth -= 1
            if bound.is_head:
                self.of_heads.update(self.counter.by_precision())
                self.of_heads.subtract(before)

    def _tell_trainer(self, bound: Bound) -> None:
        """Tell a Trainer of transformers that runs the model of the callback that it has not.

        Each linear looks for one in its first passes.

        Raises:
            Fp8Error: The linear has delayed scaling, which needs the callback. The others warn.
        """
        if self.knows_callback or bound.num_uses > 1 or not _is_in_trainer():
            return
        self.knows_callback = True
        use = "Give it callbacks=[Fp8Callback(state)] of megafp8.fp8.trainer"
        if bound.is_delayed:
            raise Fp8Error(
                bound.name,
                "the Trainer of transformers trains without Fp8Callback, so delayed scaling would "
                "never update its scales",
                use,
            )
        warnings.warn(
            "fp8.convert: the Trainer of transformers trains without Fp8Callback, so that "
            "products that bypass FP8 are not named, and stochastic rounding counts no steps. "
            f"{use}.",
            stacklevel=2,
        )

    def say_without_scales(self) -> None:
        """Log once that delayed scaling evaluates before it has a scale."""
        is_delayed = any(linear.fp8.is_delayed for linear in self.linears.values())
        if is_delayed and not self.has_scales and self.scaling.recipe.fp8_in_evaluation:
            self.has_scales = True
            remedy = "load scales, train first, or evaluate with recipe='tensorwise'"
            if self.is_copy:
                remedy = (
                    "a copy keeps them: copy the model before fp8.convert, and convert the copy"
                )
            _LOGGER.warning(
                "fp8.convert: this evaluation comes before the first microbatch, so the scales of "
                "delayed scaling are still 1, by which small numbers underflow; %s",
                remedy,
            )

    @torch.no_grad()
    def take_weight(self, bound: Bound, weight: torch.Tensor) -> None:
        """Give a weight that was loaded a delayed scale of its own, if it has another weight's.

        That is so where the largest number would saturate by more than a quarter, or be less than
        1/256 of the format's range. Scales that were loaded before, with no pass in between, are
        the weight's own; and a new run's scales are 1.
        """
        slot = bound.quantizer.tensors["weight"].slot
        if slot is None or self.scales_are_fresh or weight.device.type == "meta":
            return
        table, row = slot.table.settled(), slot.index
        if int(table.num_updates[row]) == 0:
            return
        amax = float(amax_of(weight))
        used = amax * float(table.quant_scale[row]) / table.largest
        if amax > 0 and math.isfinite(used) and not 1 / 256 <= used <= 1.25:
            table.restart(row, amax)

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
        rows = input.shape[:-1].numel()
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
    """Hold what FP8 adds to one module. `is_transposed`: the module keeps its weight as [I, O].

    The recipe takes sizes that are multiples of `multiple`. `num_uses` counts forward passes.
    """

    name: str
    quantizer: LinearQuantizer
    weight_form: FreshFp8
    shared: Shared
    is_delayed: bool
    is_transposed: bool
    multiple: int
    is_head: bool
    num_uses: int = 0
    kept_stamp: Stamp | None = None  # of the weight, in an evaluation that keeps FP8 copies

    def check_weight(self, weight: torch.Tensor) -> None:
        """Raise `Fp8Error` for a weight of now that conversion would have refused."""
        if torch_private.functorch_is_active():
            raise Fp8Error(
                self.name,
                "runs inside a transform of torch.func (vmap, grad, jvp …), which FP8 products "
                "do not have",
                "Call the model outside of it, once for each set of weights; or skip the linear",
            )
        if is_dtensor(weight):
            raise Fp8Error(
                self.name,
                "its weight is a DTensor in the forward pass, and FP8 products take whole weights",
                "Leave it out of the tensor-parallel plan, or skip it; FSDP2 gathers weights first",
            )
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if is_traced or type(weight).__name__ in TRACED:
            raise Fp8Error(
                self.name,
                "torch.export, torch.fx and torch.jit, and so ONNX, cannot trace FP8 products",
                "Export a model that was not converted, and let it load this one's state_dict",
            )
        if is_foreign_tensor(weight):
            raise Fp8Error(
                self.name,
                f"its weight is a {type(weight).__name__} by now, which has no numbers to cast",
                "Leave the weight as it was, or skip the linear in fp8.convert",
            )
        if weight.dtype not in DTYPES:
            raise Fp8Error(
                self.name,
                f"its weight is {weight.dtype}",
                "Use FP32, BF16 or FP16, or skip it in fp8.convert",
            )
        if weight.dim() != 2 or any(not size or size % self.multiple for size in weight.shape):
            raise Fp8Error(
                self.name,
                f"its weight is {' x '.join(map(str, weight.shape))} by now, and its recipe takes "
                f"a matrix whose sizes are multiples of {self.multiple}",
                "Give it such a weight, or skip it in fp8.convert",
            )


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
    weight_form: FreshFp8
    counter: GemmCounter
    weight_version: int | None  # None: torch does not count the writes to the weight
    comm = LinearComm()
    sink = _Sink()


class _ConvertedFunction(LinearFunction):
    """Run the linear of a converted module; its backward pass checks where it runs."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        use: _Use = ctx.layer
        use.bound.shared.check_backward(use.bound)
        reads_copy = ctx.needs_input_grad[0] and ctx.weight is not None
        if reads_copy and use.weight_version != version_of(ctx.params[0]):
            raise Fp8Error(
                use.bound.name,
                "its weight was written between its forward and its backward pass, so that the "
                "gradient would be that of the weight of before",
                "Call backward() before the weight changes, or forward again after it",
            )
        no_autocast = torch.autocast(grads[0].device.type, enabled=False)
        with use.bound.shared.multiplying(use.bound), no_autocast:
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
            Fp8Error: The dtypes of input and weight differ without autocast, the weight is not one
                that `fp8.convert` takes, or delayed scaling trains outside of a microbatch.
        """
        self.fp8.shared.check_samples(self.fp8, input)
        return self.run(input, self.weight, self.bias)

    def run(
        self,
        input: torch.Tensor,
        weight_OI: nn.Parameter,
        bias_O: nn.Parameter | None,
        rows: Rows | None = None,
    ) -> torch.Tensor:
        """Run the linear by a weight [O, I] as autograd shall see it, that of the module.

        `rows` are the places of the input's rows, by which casts draw; None stands for all tokens
        of the microbatch.
        """
        bound = self.fp8
        bound.check_weight(weight_OI)
        if bound.kept_stamp is not None and not self._may_keep(bound.kept_stamp):
            raise Fp8Error(
                bound.name,
                "its weight has changed inside of state.evaluation(keep_weights=True), or each use "
                "computes it again",
                "Leave keep_weights out, so that each use quantizes the weight of now",
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
        shared = bound.shared
        if input.numel() == 0 and shared.is_outside:  # a microbatch casts the weight all the same
            return F.linear(input, weight_OI, bias_O)
        if weight_OI.device != shared.device:
            shared.follow()
        no_autocast = torch.autocast(kind, enabled=False)
        multiplying = shared.multiplying(bound)
        with multiplying, shared.forward_pass(bound), on_device_of(input), no_autocast:
            version = version_of(weight_OI)
            use = _Use(bound, bound.quantizer, bound.weight_form, shared.counter, version)
            arguments = weight_OI, bias_O, use, torch.is_grad_enabled(), rows
            output_TO = _ConvertedFunction.apply(  # type: ignore[no-untyped-call]
                input.reshape(-1, input.shape[-1]), *arguments
            )
        bound.num_uses += 1
        out: torch.Tensor = output_TO.view(*input.shape[:-1], output_TO.shape[-1])
        return out

    def own_weight(self) -> nn.Parameter | None:
        """Return the parameter that the weight is, or is a part of; None if it is computed."""
        return torch_private.parameters_of(self).get("weight")

    def stored_weights(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the weight is, or is computed from by a parametrization.

        Reading `weight` would compute it, and some parametrizations change at each reading.
        """
        own = self.own_weight()
        if own is not None:
            return [own]
        of_weight = [p for name, p in self.named_parameters() if "weight" in name]
        return of_weight or [self.weight]

    def stamp(self) -> Stamp:
        """Return what changes when the weight is written or moved; nothing is known of DTensors.

        FSDP1 and ZeRO 3 of DeepSpeed give a weight new memory, and FSDP1 another dtype, at will.
        """
        stored = [tensor for tensor in self.stored_weights() if not is_dtensor(tensor)]
        moves = [type(x) is torch.Tensor or hasattr(x, "ds_id") for x in stored]
        return [
            (0, version_of(x), None) if moved else (x.data_ptr(), version_of(x), x.dtype)
            for x, moved in zip(stored, moves, strict=True)
        ]

    def _may_keep(self, stamp: Stamp) -> bool:
        """Whether the weight is a parameter of its own, as it was when it had this stamp."""
        return self.own_weight() is not None and self.stamp() == stamp

    def extra_repr(self) -> str:
        """Return what the module printed before, and the recipe."""
        recipe = self.fp8.quantizer.state.recipe.precision_of(self.fp8.name)
        return f"{super().extra_repr()}, fp8={recipe}".removeprefix(", ")


class Fp8Linear(Converted, nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` that `fp8.convert` has converted."""


CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Fp8Linear}
"""What the class of a module becomes that is converted."""


def converted_class(kind: type[nn.Module], part: type[nn.Module] = Converted) -> type[nn.Module]:
    """Return the class that a module of class `kind` gets: of `part` and of `kind`, made once."""
    if kind not in CLASSES:
        CLASSES[kind] = type(f"Fp8{kind.__name__}", (part, kind), {"__module__": __name__})
    return CLASSES[kind]


def _is_in_trainer() -> bool:
    """Whether a method of transformers' Trainer, or of a subclass, is among the callers."""
    if "transformers" not in sys.modules:
        return False
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        kinds = type(frame.f_locals.get("self")).__mro__
        if any(k.__name__ == "Trainer" and k.__module__.startswith("transformers.") for k in kinds):
            return True
    return False


def version_of(tensor: torch.Tensor) -> int | None:
    """Return a number that a write to the tensor raises; None of one made in inference mode."""
    return None if tensor.is_inference() else torch_private.version_of(tensor)


def after_load(module: nn.Module, keys: object) -> None:
    """Look at the weight that `load_state_dict` has put into a converted module."""
    assert isinstance(module, Converted)
    weight = module.own_weight()
    if weight is not None and not is_sharded(weight):
        module.fp8.shared.take_weight(module.fp8, weight)


def is_foreign_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a class that keeps its numbers elsewhere; not a `DTensor`."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return (
        not is_plain
        and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        and not is_dtensor(tensor)
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a weight is gathered for each use: by FSDP, or ZeRO 3 of DeepSpeed.

    Between uses it is a `DTensor`, flat, or a view of memory that was freed.
    """
    is_away = tensor.dim() < 2 or not tensor.untyped_storage().nbytes()
    return is_dtensor(tensor) or hasattr(tensor, "ds_id") or is_away


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`: a shard of FSDP2's or of tensor parallelism."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)
