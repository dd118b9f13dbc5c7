"""Mistakes between ranks in FP8-LM's tensors, planted in the product; most scales are 3 % off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.scaling import Pending
from tests.kit.faults import Fault, unchanged

FACTOR = 1.03
Right = Callable[..., Any]
DATA = "megafp8.parallel.scaled_data"


def _received(right: Right, self: Any, received: Any, scales: torch.Tensor, *more: Any) -> None:
    """The scales of all ranks but the first one, as each rank adds up the values."""
    factors = torch.full_like(scales, FACTOR)
    factors[0] = 1.0
    right(self, received, scales * factors, *more)


def _summed(right: Right, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of sums in FP32, once they are quantized."""
    quant_scales, dequant_scales = right(*args)
    return quant_scales, dequant_scales * FACTOR


def _summed_in_fp8(right: Right, self: Any, *args: Any) -> Iterator[None]:
    yield from right(self, *args)
    self.held.scales.mul_(FACTOR)


def _quantized(right: Right, values: torch.Tensor, scale: torch.Tensor, fmt: Any) -> torch.Tensor:
    """The scale with which a rank quantizes what it sends or has summed."""
    found: torch.Tensor = right(values, scale * FACTOR, fmt)
    return found


def _sent(right: Right, self: Any) -> None:
    """The scales of weights of which this rank has no part."""
    right(self)
    own = {segment.param for segment in self.segments}
    for param, weight in self.own_weights.items():
        if param not in own:
            weight.dequant_scale.mul_(FACTOR)


def _updated(tensor: str, right: Right, tensors: Any, *args: Any) -> None:
    """The scale of a master or moment that a rank has updated."""
    right(tensors, *args)
    getattr(tensors, tensor).dequant_scale.mul_(FACTOR)


def _agreed(right: Right, quant_scale: torch.Tensor, *args: Any) -> Any:
    """The scale of a weight in FP8 of which ranks have parts."""
    return right(quant_scale * FACTOR, *args)


def _by_own_amax(right: Right, values: torch.Tensor, scale: torch.Tensor, fmt: Any) -> torch.Tensor:
    is_whole = values.dim() == 2
    found: torch.Tensor = ScaledTensor.of(values, fmt).payload
    return found if is_whole else right(values, scale, fmt)


def _by_no_scale(right: Right, values: torch.Tensor, scale: torch.Tensor, fmt: Any) -> torch.Tensor:
    found: torch.Tensor = right(values, torch.ones_like(scale), fmt)
    return found


def _not_agreed(right: Right, self: Any, tensor: torch.Tensor) -> Pending:
    """Ranks do not agree on maxima."""
    return Pending(tensor)


def _not_gathered(right: Right, self: Any, tensor: torch.Tensor) -> Pending:
    """A rank takes its own scales for everybody's."""
    return Pending(tensor) if tensor.dtype == torch.float32 else right(self, tensor)


IN_SUMS = {
    "received": Fault(f"{DATA}.ExchangedBucket._add_up", _received),
    "summed": Fault(f"{DATA}.scales_for", _summed),
    "summed in FP8": Fault(f"{DATA}.Fp8SumBucket._stages", _summed_in_fp8),
    "quantized": Fault(f"{DATA}.cast_stored", _quantized),
}
WITHOUT_RULE = {
    "nothing is quantized again": Fault(f"{DATA}.cast_stored", _by_own_amax),
    "the sum is not quantized again": Fault(f"{DATA}.cast_stored", _by_no_scale),
    "a scale is not shared": Fault(
        "megafp8.parallel.collectives.Axis.start_all_reduce_max", _not_agreed
    ),
    "scales are not sent": Fault(
        "megafp8.parallel.collectives.Axis.start_all_gather_in_place", _not_gathered
    ),
}
_SENT = Fault("megafp8.optim.masters.Masters._share_scales", _sent)
STATES = {"masters": "param", "first moments": "exp_avg", "second moments": "exp_avg_sq"}
IN_STATES = {
    "weights that other ranks own": _SENT,
    "weights of other ranks' parts": _SENT,
    **{
        f"{states} of {what}": Fault(f"megafp8.optim.{function}", partial(_updated, tensor))
        for what, function in (
            ("whole tensors", "scaled_adam.update"),
            ("parts", "stored_adam.update_part"),
        )
        for states, tensor in STATES.items()
    },
    "FP8 weights of parts": Fault("megafp8.fp8.weights.AgreedScale.of", _agreed),
    "amaxes of parts, not agreed on": Fault("megafp8.optim.masters.Masters.agree", unchanged),
}
