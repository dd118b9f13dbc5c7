"""Quantize matrices as a linear does, for the checks of a recipe's traits (`fp8.check`)."""

# M, N the tensor's own dims

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fp8_numerics.cast import Fp8Tensor, spread
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.draws import Tokens
from megafp8.fp8.quantizer import LinearQuantizer, Role
from megafp8.fp8.scaling import ReduceMax, ScalingState
from megafp8.specs.precision import Fp8Recipe
from megafp8.specs.recipes import find_recipe
from megafp8.specs.traits import Casts, Traits

LINEAR = "linear"
LEAST_SIZE = 32
"""The least size of a part of the matrices that are quantized, so that blocks have many numbers."""
MOST_REDUCTIONS = 8
"""How often a rule may ask for a maximum over ranks in one cast."""


class RanksDifferError(Exception):
    """Report that ranks do not ask for the same maxima, so that they would wait for each other."""


@dataclass(frozen=True)
class Probe:
    """Quantize one of a linear's tensors under the settings of a recipe, in one dtype.

    Each call has quantizers of its own, as a linear has at the first microbatch of a step.
    """

    settings: Fp8Recipe
    role: Role
    dtype: torch.dtype = torch.float32

    @property
    def traits(self) -> Traits:
        """Return the recipe's traits."""
        return find_recipe(self.settings.name).traits

    @property
    def casts(self) -> Casts:
        """Return how the tensor is cast, by the traits."""
        return self.traits.casts[self.role]

    @property
    def where(self) -> str:
        """Name the tensor and the settings, for messages."""
        words = [self.role, str(self.dtype).removeprefix("torch.")]
        if self.role == "grad_output" and len(self.traits.backward_formats) > 1:
            words.append(self.settings.backward_format)
        if self.traits.power_2_is_choice:
            words.append(f"fp8_power_2_scale={self.settings.power_2_scale}")
        return ", ".join(words)

    @property
    def unit(self) -> int:
        """Return a size that is some whole multiples of the recipe's `multiple`."""
        return self.traits.multiple * -(-LEAST_SIZE // self.traits.multiple)

    @cached_property
    def normal(self) -> torch.Tensor:
        """Return a matrix of normal numbers."""
        return _normal(2 * self.unit, 3 * self.unit).to(self.dtype)

    @cached_property
    def wide(self) -> torch.Tensor:
        """Return a matrix that spreads over more than 2^12 in each block, with zeros.

        Scales that are powers of two cannot be distinguished by tame numbers, which such a scale
        does not round in another way.
        """
        x = _normal(2 * self.unit, 3 * self.unit)
        generator = torch.Generator().manual_seed(2)
        for shape, low in ((x.shape, -12), ((len(x), 1), -4), ((1, x.shape[1]), -4)):
            x = x * torch.exp2(torch.randint(low, 1, tuple(shape), generator=generator))
        x[3], x[:, 5], x[torch.rand(x.shape, generator=generator) < 0.05] = 0, 0, 0
        return x.to(self.dtype)

    def operands(
        self,
        x_MN: torch.Tensor,
        *,
        reduce_max: ReduceMax | None = None,
        step: int = 1,
        history: torch.Tensor | None = None,
    ) -> dict[str, Fp8Tensor]:
        """Return the FP8 operands of a tensor by the dim that is summed, `last` and `first`.

        Products that stay in high precision have none. `history` is the tensor that a recipe with a
        history has seen in the microbatch before; None stands for `x_MN`.
        """
        return self._quantized(self.linear(step, reduce_max, x_MN, history), x_MN)

    def linear(
        self,
        step: int = 1,
        reduce_max: ReduceMax | None = None,
        x_MN: torch.Tensor | None = None,
        history: torch.Tensor | None = None,
    ) -> LinearQuantizer:
        """Return new quantizers of a linear, after a microbatch with `history` or `x_MN`."""
        state = ScalingState(self.settings)
        linear = linear_quantizer(state, LINEAR, lambda role: reduce_max)
        assert linear is not None, "a recipe is no high precision"
        seen = x_MN if history is None else history
        if self.traits.has_history and seen is not None:
            state.begin_microbatch(0, 0)
            linear.operands(self.role, seen.clone())
            state.end_forward()
            state.end_backward()
        state.begin_microbatch(0, step, Tokens((step,)))
        return linear

    def _quantized(self, linear: LinearQuantizer, x_MN: torch.Tensor) -> dict[str, Fp8Tensor]:
        operands, _ = linear.operands(self.role, x_MN.clone())
        return {
            along: operand
            for along, operand in zip(("last", "first"), operands, strict=True)
            if isinstance(operand, Fp8Tensor)
        }

    def together(
        self, parts: Sequence[torch.Tensor], whole_MN: torch.Tensor
    ) -> list[dict[str, Fp8Tensor]]:
        """Return the operands of each part, where ranks that hold them agree on maxima.

        The parts are quantized again until every maximum is known: the n-th of each part is taken
        over the n-th of all parts.

        Raises:
            RanksDifferError: The parts do not ask for the same maxima.
        """
        if not self.traits.agrees:
            return [self.operands(part, history=whole_MN) for part in parts]
        known: list[torch.Tensor] = []
        for _ in range(MOST_REDUCTIONS):
            asked = [_Asked(known) for _ in parts]
            operands = [
                self.operands(part, reduce_max=one, history=whole_MN)
                for part, one in zip(parts, asked, strict=True)
            ]
            _require_alike(asked)
            if len(asked[0].amaxes) <= len(known):
                return operands
            known.append(torch.stack([one.amaxes[len(known)] for one in asked]).amax(0))
        raise RanksDifferError(f"its cast asks for more than {MOST_REDUCTIONS} maxima")


class _Asked:
    """Stand for `reduce_max` on one rank: remember what is asked, and answer what is known."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self._known, self.amaxes = known, list[torch.Tensor]()

    def __call__(self, amax: torch.Tensor) -> None:
        index = len(self.amaxes)
        self.amaxes.append(amax.clone())
        if index < len(self._known) and self._known[index].shape == amax.shape:
            amax.copy_(self._known[index])


def _require_alike(asked: Sequence[_Asked]) -> None:
    shapes = [[list(amax.shape) for amax in one.amaxes] for one in asked]
    if any(other != shapes[0] for other in shapes):
        raise RanksDifferError(
            "ranks ask for different maxima, and would wait for each other: "
            + ", then ".join(str(one) for one in shapes)
        )


def _normal(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))


# --- what an operand is ---------------------------------------------------------------------------


def values(operand: Fp8Tensor) -> torch.Tensor:
    """Return the values of an operand in FP64, [M, N]."""
    scale = spread(operand.dequant_scale, operand.payload.shape, operand.block).double()
    outer = 1.0 if operand.outer is None else operand.outer.double()
    return operand.numbers(torch.float32).double() * scale * outer


def same_bits(a: Fp8Tensor, b: Fp8Tensor) -> bool:
    """Whether two operands have the same payload, scales and factor, bit for bit."""
    return same_scales(a, b) and equal(a.payload, b.payload)


def same_scales(a: Fp8Tensor, b: Fp8Tensor) -> bool:
    """Whether two operands have the same scales and factor, bit for bit."""
    if (a.outer is None) != (b.outer is None):
        return False
    same_outer = a.outer is None or b.outer is None or equal(a.outer, b.outer)
    return same_outer and equal(a.dequant_scale, b.dequant_scale)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and bits, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that has one dim at least."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def turned(operand: Fp8Tensor) -> Fp8Tensor:
    """Return the operand of the transposed tensor."""
    block = operand.block
    return replace(
        operand,
        payload=operand.payload.t(),
        dequant_scale=operand.dequant_scale if block is None else operand.dequant_scale.t(),
        grid=None,
        block=None if block is None else block[::-1],
    )


def joined(parts: Sequence[Fp8Tensor], dim: int) -> Fp8Tensor:
    """Return the operand whose parts along `dim` are given; the first one's factor is taken."""
    scale = parts[0].dequant_scale
    if parts[0].block is not None:
        scale = torch.cat([part.dequant_scale for part in parts], dim)
    payload = torch.cat([_as_bytes(part.payload) for part in parts], dim)
    return replace(
        parts[0], payload=payload.view(parts[0].payload.dtype), dequant_scale=scale, grid=None
    )


def _as_bytes(payload: torch.Tensor) -> torch.Tensor:
    """Return a payload in a dtype that torch can join: one without FP8."""
    whole = payload.contiguous()
    return whole.view(torch.uint8) if whole.element_size() == 1 else whole
