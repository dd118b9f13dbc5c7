"""Scales and factors that are wrong by 3 % somewhere between ranks, planted in the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8 import linear, quantizer, weights
from megafp8.fp8.quantizer import Operands
from megafp8.parallel import sequence, tensor

FACTOR = 1.03


def _off(operand: Any) -> Any:
    """An FP8 operand with a wrong scale, or plain values that are too large."""
    if isinstance(operand, Fp8Tensor):
        return replace(operand, dequant_scale=operand.dequant_scale * FACTOR)
    return operand * FACTOR


def _gathers(patch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Sequence parallelism's gather of tokens in one format."""
    right = sequence.gather_tokens

    def wrong(x: Any, tp: Any) -> Any:
        is_it = isinstance(x, Fp8Tensor) and x.payload.dtype == dtype
        return _off(right(x, tp)) if is_it else right(x, tp)

    patch.setattr(sequence, "gather_tokens", wrong)


def _gathers_twisted(patch: pytest.MonkeyPatch) -> None:
    """The ranks' gradients are gathered in the wrong order."""
    right = sequence.gather_tokens

    def wrong(x: Any, tp: Any) -> Any:
        found = right(x, tp)
        if not isinstance(x, Fp8Tensor) or x.payload.dtype != torch.float8_e5m2:
            return found
        turned = found.payload.view(torch.uint8).roll(x.payload.shape[0], 0)
        return replace(found, payload=turned.view(x.payload.dtype))

    patch.setattr(sequence, "gather_tokens", wrong)


def _own_scales(patch: pytest.MonkeyPatch) -> None:
    """Bytes are gathered, and a rank takes its own scales for those of all ranks."""
    right = sequence.gather_tokens

    def wrong(x: Any, tp: Any) -> Any:
        found = right(x, tp)
        if not isinstance(x, Fp8Tensor) or found.dequant_scale.shape == x.dequant_scale.shape:
            return found
        return replace(found, dequant_scale=x.dequant_scale.repeat(tp.size, 1))

    patch.setattr(sequence, "gather_tokens", wrong)


def _gathers_plain(patch: pytest.MonkeyPatch) -> None:
    """Tokens that linears in FP8 gather in high precision."""
    right = sequence.gather_tokens

    def wrong(x: Any, tp: Any) -> Any:
        return right(x, tp) if isinstance(x, Fp8Tensor) else _off(right(x, tp))

    patch.setattr(sequence, "gather_tokens", wrong)


def _own_columns(patch: pytest.MonkeyPatch) -> None:
    """Each rank's own amaxes of the columns of tokens that ranks divide."""
    for comm in (sequence.SequenceColumnParallel, sequence.SequenceRowParallel):
        patch.setattr(comm, "reduce_columns", lambda self, role: None)


def _result(patch: pytest.MonkeyPatch, place: str) -> None:
    """A product of linears that are in FP8 and whose ranks sum outputs."""
    right = linear.product

    def wrong(layer: Any, which: Any, *args: Any, **options: Any) -> torch.Tensor:
        found = right(layer, which, *args, **options)
        shares = layer.quantizer is not None and hasattr(layer.comm, "tp")
        return found.mul_(FACTOR) if which == place and shares else found

    patch.setattr(linear, "product", wrong)


def _reduced(patch: pytest.MonkeyPatch, comm: type) -> None:
    """The sum of the ranks' outputs."""
    right = comm.reduce_output  # type: ignore[attr-defined]
    patch.setattr(comm, "reduce_output", lambda self, output: right(self, output).mul_(FACTOR))


def _operands(patch: pytest.MonkeyPatch, form: type, is_evaluation: bool) -> None:
    """A weight that is kept, or sent, in FP8, as evaluation without FP8 or as training reads it."""
    right = form.operands  # type: ignore[attr-defined]

    def wrong(self: Any, *args: Any) -> Operands:
        found = right(self, *args)
        if self._quantizer.state.fp8_enabled == is_evaluation:
            return found
        return Operands(*(_off(operand) for operand in found))

    patch.setattr(form, "operands", wrong)


def _own_amax(patch: pytest.MonkeyPatch, comm: type, role: str) -> None:
    """Each rank's own amax of one tensor."""
    right = comm.reduce_max  # type: ignore[attr-defined]
    patch.setattr(comm, "reduce_max", lambda self, r: None if r == role else right(self, r))


def _sums_in_bf16(patch: pytest.MonkeyPatch) -> None:
    """The sums of a bias' gradient, rounded to the gradient's own dtype."""
    right = quantizer.LinearQuantizer.operands

    def wrong(self: Any, role: str, x: torch.Tensor, **options: Any) -> Any:
        operands, sums = right(self, role, x, **options)  # type: ignore[arg-type]
        return operands, None if sums is None else sums.to(x.dtype).float()

    patch.setattr(quantizer.LinearQuantizer, "operands", wrong)


def _agreed(patch: pytest.MonkeyPatch) -> None:
    """The scale on which ranks that hold parts of a weight agree."""
    right = weights.AgreedScale.of.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, quant_scale: torch.Tensor, *args: Any) -> Any:
        return right(cls, quant_scale * FACTOR, *args)

    patch.setattr(weights.AgreedScale, "of", classmethod(wrong))


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the scale of gathered inputs": lambda p: _gathers(p, torch.float8_e4m3fn),
    "the scale of gathered gradients": lambda p: _gathers(p, torch.float8_e5m2),
    "the order of gathered gradients": _gathers_twisted,
    "output of ranks that share a linear": lambda p: _result(p, "output"),
    "grad_input of ranks that share a linear": lambda p: _result(p, "grad_input"),
    "grad_weight of ranks that share a linear": lambda p: _result(p, "grad_weight"),
    "the sum of outputs": lambda p: _reduced(p, tensor.RowParallel),
    "the scattered sum of outputs": lambda p: _reduced(p, sequence.SequenceRowParallel),
    "evaluation of fp8_params": lambda p: _operands(p, weights.StoredFp8, True),
    "evaluation of FSDP's bytes": lambda p: _operands(p, weights.GatheredFp8, True),
    "training with fp8_params": lambda p: _operands(p, weights.StoredFp8, False),
    "training with FSDP's bytes": lambda p: _operands(p, weights.GatheredFp8, False),
    "training with weights that FSDP gathers": lambda p: _operands(p, weights.RecastFp8, False),
    "the scale that ranks agree on": _agreed,
    "own amax of a row's input": lambda p: _own_amax(p, tensor.RowParallel, "input"),
    "own amax of a row's weight": lambda p: _own_amax(p, tensor.RowParallel, "weight"),
    "own amax of a column's weight": lambda p: _own_amax(p, tensor.ColumnParallel, "weight"),
    "own amax of a column's gradient": lambda p: _own_amax(p, tensor.ColumnParallel, "grad_output"),
    "own amax of sequences' inputs": lambda p: _own_amax(
        p, sequence.SequenceColumnParallel, "input"
    ),
    "own amax of sequences' gradients": lambda p: _own_amax(
        p, sequence.SequenceRowParallel, "grad_output"
    ),
    "a bias' sums in BF16": _sums_in_bf16,
    "own amaxes of sequences' columns": _own_columns,
    "gathered values of products in high precision": _gathers_plain,
    "a rank's own scales for all ranks": _own_scales,
}


@contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Plant one of `BUGS` inside the context, before a model is built."""
    with pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            BUGS[bug](patch)
        yield
