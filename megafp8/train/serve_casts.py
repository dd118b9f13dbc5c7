"""Cast a linear's weight and input as a run does, as an export's format does, or by parts of both.

Operands are those of the products of `fp8_numerics`, so that equal casts multiply to equal bits.
"""

# M rows  T tokens  K in features  N out features

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8_numerics import mxfp8, scales
from fp8_numerics.cast import Fp8Tensor, amax_of, quantize_scaled, spread
from fp8_numerics.formats import E2M1, E4M3
from fp8_numerics.gemm import Operand
from megafp8.checkpoint.serving import Read, ServingFormat
from megafp8.checkpoint.serving_blocks import BlockFormat
from megafp8.fp8.linear import Linear
from megafp8.models.attention import QKV, AttentionContext, AttentionCore
from megafp8.specs.layer import LayerLinear
from megafp8.specs.recipes import find_recipe
from megafp8.train.served import values_of

Form = ServingFormat | BlockFormat | None
"""How linears are served; None is BF16."""
Rule = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns the factors from values to numbers of E4M3, and back, for largest magnitudes."""


class Apart(NamedTuple):
    """Count the bytes of numbers that differ, and the numbers whose scales do."""

    bytes: int
    differ: int
    scales: int
    numbers: int

    def __add__(self, other: tuple[Any, ...]) -> Apart:
        """Return both counts together."""
        return Apart(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Apart(0, 0, 0, 0)


def apart(trained: Operand, served: Operand) -> Apart:
    """Compare the bytes of two operands of one shape; other formats differ in each byte."""
    t, s = (x.payload if isinstance(x, Fp8Tensor) else x for x in (trained, served))
    count, is_same = served.shape[0] * served.shape[1], t.dtype == s.dtype
    if isinstance(trained, Fp8Tensor) != isinstance(served, Fp8Tensor):
        is_same = False
    scaled = 0
    if isinstance(trained, Fp8Tensor) and isinstance(served, Fp8Tensor):
        is_same = trained.fmt == served.fmt
        scaled = int((_scales(trained) != _scales(served)).sum())
    elif not is_same:
        scaled = count
    t, s = (x.contiguous().view(torch.uint8).view(x.shape[0], -1) for x in (t, s))
    differs = t != s if is_same else torch.ones_like(s, dtype=torch.bool)
    if isinstance(served, Fp8Tensor) and served.fmt == E2M1:  # two numbers in a byte
        differs = differs.unflatten(1, (-1, 2)).any(-1)
    return Apart(differs.numel(), int(differs.sum()), scaled, count)


def are_other(a: Operand, b: Operand) -> bool:
    """Whether two operands have other numbers or scales."""
    found = apart(a, b)
    return found.differ > 0 or found.scales > 0


def _scales(x: Fp8Tensor) -> torch.Tensor:
    return x.scale_over(x.payload.shape).expand(x.payload.shape)


def rule_of(linear: Linear) -> Rule | None:
    """Return how a run's linear computes scales of amaxes; None if it has none in E4M3."""
    if linear.quantizer is None:
        return None
    tensor, recipe = linear.quantizer.tensors["weight"], linear.quantizer.state.recipe
    if tensor.fmt is not E4M3:
        return None
    own = find_recipe(recipe.precision_of(linear.name))
    if own.traits.packs is not None:
        return _powers_above
    return partial(_by_scale, partial(own.scale_rule(), fmt=E4M3, power_2=tensor.power_2))


def rule_of_form(form: ServingFormat | BlockFormat, *, is_input: bool = False) -> Rule | None:
    """Return how a form computes scales of amaxes; None if it has none in E4M3."""
    if isinstance(form, BlockFormat):
        return _powers_above if form.has_powers else None
    back = form.input_scale_of if is_input else form.scale_of
    return lambda amax: (back(amax).reciprocal(), back(amax))


def _powers_above(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mxfp8.scales_of(amax, E4M3)


def _by_scale(rule: Any, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quant = rule(amax)
    return quant, quant.reciprocal()


def rescaled(x_MK: torch.Tensor, served: Operand, rule: Rule | None) -> Operand:
    """Return values in the groups of an operand of E4M3, with scales by another rule, if any."""
    if rule is None or not isinstance(served, Fp8Tensor) or served.fmt is not E4M3:
        return served
    return rescaled_fp8(x_MK, served, rule)


def rescaled_fp8(x_MK: torch.Tensor, served: Fp8Tensor, rule: Rule) -> Fp8Tensor:
    block = served.block
    quant, back = rule(amax_of(x_MK) if block is None else scales.amax_of_blocks(x_MK, block))
    payload = quantize_scaled(x_MK.float() * spread(quant, x_MK.shape, block), E4M3)
    is_exact = block is not None and not bool((back.view(torch.int32) & 0x7FFFFF).any())
    return replace(
        served, payload=payload, dequant_scale=back, is_exact_in_bf16=is_exact, grid=None
    )


def encoded(form: ServingFormat | BlockFormat, linear: LayerLinear, read: Read) -> list[Fp8Tensor]:
    """Return the parts of a linear's weight in a form, of masters that `read` returns."""
    shared: Any = form.quantize(linear, read)
    parts, begin = [], 0
    for part in linear.parts:
        rows = slice(begin, begin + part.out_features)
        parts.append(form.weight_operand(form.encode(shared, rows, read(f"{part.name}.weight"))))
        begin = rows.stop
    return parts


def is_turned(served: Operand, master_NN: torch.Tensor) -> bool:
    """Whether a square weight is nearer to the transposed master than to the master."""
    values = values_of(served)
    return bool((values - master_NN.t()).norm() < (values - master_NN).norm())


def in_e4m3(core: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round keys and values to E4M3 without a scale, as a server's cache does; a forward hook."""
    assert isinstance(core, AttentionCore)
    qkv, context = arguments if len(arguments) == 2 else (*arguments, AttentionContext())
    heads = qkv if isinstance(qkv, QKV) else core.split(qkv, context)
    rounded = (x.clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).to(x.dtype) for x in heads[1:])
    return QKV(heads.query, *rounded), context
