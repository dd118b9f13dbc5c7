"""Scales of FP8-LM's tensors that are wrong by 3 % between ranks, planted in the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megafp8.fp8 import weights
from megafp8.optim import scaled_adam, stored_adam
from megafp8.optim.masters import Masters
from megafp8.parallel import scaled_data
from megafp8.parallel.scaled_data import ExchangedBucket, Fp8SumBucket

FACTOR = 1.03


def _received(patch: pytest.MonkeyPatch) -> None:
    """The scales of all ranks but the first one, as each rank adds up the values."""
    right = ExchangedBucket._add_up

    def wrong(self: Any, received: Any, scales: torch.Tensor, *more: Any) -> None:
        factors = torch.full_like(scales, FACTOR)
        factors[0] = 1.0
        right(self, received, scales * factors, *more)

    patch.setattr(ExchangedBucket, "_add_up", wrong)


def _summed(patch: pytest.MonkeyPatch) -> None:
    """The scales of sums in FP32, once they are quantized."""
    right = scaled_data.scales_for

    def wrong(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        quant_scales, dequant_scales = right(*args)
        return quant_scales, dequant_scales * FACTOR

    patch.setattr(scaled_data, "scales_for", wrong)


def _summed_in_fp8(patch: pytest.MonkeyPatch) -> None:
    """The scales of sums in FP8."""
    right = Fp8SumBucket._stages

    def wrong(self: Any, *args: Any) -> Iterator[None]:
        yield from right(self, *args)
        self.held.scales.mul_(FACTOR)

    patch.setattr(Fp8SumBucket, "_stages", wrong)


def _quantized(patch: pytest.MonkeyPatch) -> None:
    """The scale with which a rank quantizes what it sends or has summed."""
    right = scaled_data.cast_stored
    patch.setattr(scaled_data, "cast_stored", lambda x, scale, fmt: right(x, scale * FACTOR, fmt))


def _sent(patch: pytest.MonkeyPatch) -> None:
    """The scales of weights of which this rank has no part."""
    right = Masters._share_scales

    def wrong(self: Any) -> None:
        right(self)
        own = {segment.param for segment in self.segments}
        for param, weight in self.own_weights.items():
            if param not in own:
                weight.dequant_scale.mul_(FACTOR)

    patch.setattr(Masters, "_share_scales", wrong)


def _updated(patch: pytest.MonkeyPatch, module: Any, function: str, tensor: str) -> None:
    """The scale of a master or moment that a rank has updated."""
    right = getattr(module, function)

    def wrong(tensors: Any, *args: Any) -> None:
        right(tensors, *args)
        getattr(tensors, tensor).dequant_scale.mul_(FACTOR)

    patch.setattr(module, function, wrong)


def _agreed(patch: pytest.MonkeyPatch) -> None:
    """The scale of a weight in FP8 of which ranks have parts."""
    right = weights.AgreedScale.of.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, quant_scale: torch.Tensor, *args: Any) -> Any:
        return right(cls, quant_scale * FACTOR, *args)

    patch.setattr(weights.AgreedScale, "of", classmethod(wrong))


IN_SUMS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "received": _received,
    "summed": _summed,
    "summed in FP8": _summed_in_fp8,
    "quantized": _quantized,
}
IN_STATES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "weights that other ranks own": _sent,
    "weights of other ranks' parts": _sent,
    "masters of whole tensors": lambda p: _updated(p, scaled_adam, "update", "param"),
    "first moments of whole tensors": lambda p: _updated(p, scaled_adam, "update", "exp_avg"),
    "second moments of whole tensors": lambda p: _updated(p, scaled_adam, "update", "exp_avg_sq"),
    "masters of parts": lambda p: _updated(p, stored_adam, "update_part", "param"),
    "first moments of parts": lambda p: _updated(p, stored_adam, "update_part", "exp_avg"),
    "second moments of parts": lambda p: _updated(p, stored_adam, "update_part", "exp_avg_sq"),
    "FP8 weights of parts": _agreed,
    "amaxes of parts, not agreed on": lambda p: p.setattr(
        Masters, "agree", lambda self, amaxes: amaxes
    ),
}


@contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Plant one of the bugs inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            (IN_SUMS | IN_STATES)[bug](patch)
        yield
