"""Scales and factors that are wrong by 3 % somewhere between ranks, planted in the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8.quantizer import Operands
from tests.kit.faults import Fault, nothing, times

FACTOR = 1.03
Right = Callable[..., Any]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WEIGHTS, PARALLEL = "megafp8.fp8.weights", "megafp8.parallel"


def _off(operand: Any) -> Any:
    """An FP8 operand with a wrong scale, or plain values that are too large."""
    if isinstance(operand, Fp8Tensor):
        return replace(operand, dequant_scale=operand.dequant_scale * FACTOR)
    return operand * FACTOR


def _gathered(dtype: torch.dtype, right: Right, x: Any, tp: Any) -> Any:
    """Sequence parallelism's gather of tokens in one format."""
    is_it = isinstance(x, Fp8Tensor) and x.payload.dtype == dtype
    return _off(right(x, tp)) if is_it else right(x, tp)


def _twisted(right: Right, x: Any, tp: Any) -> Any:
    """The ranks' gradients are gathered in the wrong order."""
    found = right(x, tp)
    if not isinstance(x, Fp8Tensor) or x.payload.dtype != E5M2:
        return found
    turned = found.payload.view(torch.uint8).roll(x.payload.shape[0], 0)
    return replace(found, payload=turned.view(x.payload.dtype))


def _own_scales(right: Right, x: Any, tp: Any) -> Any:
    """Bytes are gathered, and a rank takes its own scales for those of all ranks."""
    found = right(x, tp)
    if not isinstance(x, Fp8Tensor) or found.dequant_scale.shape == x.dequant_scale.shape:
        return found
    return replace(found, dequant_scale=x.dequant_scale.repeat(tp.size, 1))


def _plain(right: Right, x: Any, tp: Any) -> Any:
    """Tokens that linears in FP8 gather in high precision."""
    return right(x, tp) if isinstance(x, Fp8Tensor) else _off(right(x, tp))


def _result(place: str, right: Right, layer: Any, which: Any, *args: Any, **more: Any) -> Any:
    """A product of linears that are in FP8 and whose ranks sum outputs."""
    found = right(layer, which, *args, **more)
    shares = layer.quantizer is not None and hasattr(layer.comm, "tp")
    return found.mul_(FACTOR) if which == place and shares else found


def _operands(is_evaluation: bool, right: Right, self: Any, *args: Any) -> Operands:
    """A weight that is kept, or sent, in FP8, as evaluation without FP8 or as training reads it."""
    found: Operands = right(self, *args)
    if self._quantizer.state.fp8_enabled == is_evaluation:
        return found
    return Operands(*(_off(operand) for operand in found))


def _own_amax(of: str, right: Right, self: Any, role: str) -> Any:
    """Each rank's own amax of one tensor."""
    return None if role == of else right(self, role)


def _sums_in_bf16(right: Right, self: Any, role: str, x: torch.Tensor, **more: Any) -> Any:
    """The sums of a bias' gradient, rounded to the gradient's own dtype."""
    operands, sums = right(self, role, x, **more)
    return operands, None if sums is None else sums.to(x.dtype).float()


def _agreed(right: Right, quant_scale: torch.Tensor, *args: Any) -> Any:
    """The scale on which ranks that hold parts of a weight agree."""
    return right(quant_scale * FACTOR, *args)


def _gather(wrong: Right) -> Fault:
    return Fault(f"{PARALLEL}.sequence.gather_tokens", wrong)


def _product(place: str) -> Fault:
    return Fault("megafp8.fp8.linear.product", partial(_result, place))


def _read(form: str, *, is_evaluation: bool) -> Fault:
    return Fault(f"{WEIGHTS}.{form}.operands", partial(_operands, is_evaluation))


def _amax(comm: str, role: str) -> Fault:
    return Fault(f"{PARALLEL}.{comm}.reduce_max", partial(_own_amax, role))


_BUGS: dict[str, Fault | tuple[Fault, ...]] = {
    "the scale of gathered inputs": _gather(partial(_gathered, E4M3)),
    "the scale of gathered gradients": _gather(partial(_gathered, E5M2)),
    "the order of gathered gradients": _gather(_twisted),
    "output of ranks that share a linear": _product("output"),
    "grad_input of ranks that share a linear": _product("grad_input"),
    "grad_weight of ranks that share a linear": _product("grad_weight"),
    "the sum of outputs": Fault(
        f"{PARALLEL}.tensor.RowParallel.reduce_output", partial(times, FACTOR)
    ),
    "the scattered sum of outputs": Fault(
        f"{PARALLEL}.sequence.SequenceRowParallel.reduce_output", partial(times, FACTOR)
    ),
    "evaluation of fp8_params": _read("StoredFp8", is_evaluation=True),
    "evaluation of FSDP's bytes": _read("GatheredFp8", is_evaluation=True),
    "training with fp8_params": _read("StoredFp8", is_evaluation=False),
    "training with FSDP's bytes": _read("GatheredFp8", is_evaluation=False),
    "training with weights that FSDP gathers": _read("RecastFp8", is_evaluation=False),
    "the scale that ranks agree on": Fault(f"{WEIGHTS}.AgreedScale.of", _agreed),
    "own amax of a row's input": _amax("tensor.RowParallel", "input"),
    "own amax of a row's weight": _amax("tensor.RowParallel", "weight"),
    "own amax of a column's weight": _amax("tensor.ColumnParallel", "weight"),
    "own amax of a column's gradient": _amax("tensor.ColumnParallel", "grad_output"),
    "own amax of sequences' inputs": _amax("sequence.SequenceColumnParallel", "input"),
    "own amax of sequences' gradients": _amax("sequence.SequenceRowParallel", "grad_output"),
    "a bias' sums in BF16": Fault("megafp8.fp8.quantizer.LinearQuantizer.operands", _sums_in_bf16),
    "own amaxes of sequences' columns": tuple(
        Fault(f"{PARALLEL}.sequence.{comm}.reduce_columns", nothing)
        for comm in ("SequenceColumnParallel", "SequenceRowParallel")
    ),
    "gathered values of products in high precision": _gather(_plain),
    "a rank's own scales for all ranks": _gather(_own_scales),
}
BUGS = {name: bug if isinstance(bug, tuple) else (bug,) for name, bug in _BUGS.items()}
