"""Try to refute what a recipe's traits say of one tensor; each function yields its reasons."""

# M, N the tensor's own dims   T tokens, O outputs, I inputs of a linear

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from fp8_numerics.cast import Fp8Tensor, amax_of, spread
from megafp8.fp8.probe import (
    Probe,
    RanksDifferError,
    equal,
    joined,
    same_bits,
    same_scales,
    turned,
    values,
)
from megafp8.specs import HealthSpec

Refuter = Callable[[Probe], Iterator[str]]
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
SIMULATED_FLOOR = 3.0
"""The least signal-to-noise ratio in decibel of simulated numbers, whose format is not known: the
noise has half of the signal's power. A rule that returns codes, or scales the wrong way, has less
than zero."""
ODD_SHAPES = ((0, 4), (4, 0), (1, 1), (9, 33), (33, 9))
DRAWS = 64
"""How often a tensor is rounded with different random bytes."""
CHANCE = 1e-9
"""The chance that an unbiased rule is called biased."""
FP32_ERROR = 2.0**-21
"""What a scale, its reciprocal and their product may err by in FP32, four times 2^-23."""


def floor_of(probe: Probe) -> float:
    """Return the least signal-to-noise ratio in decibel of the tensor's format.

    A number with m bits after the point errs by at most 2^-(m + 1) of itself when it is rounded to
    nearest, and by at most twice as much when it is rounded either way.
    """
    if probe.traits.is_simulated:
        return SIMULATED_FLOOR
    name: str = probe.traits.numbers
    if name == "fp8":
        is_gradient = probe.role == "grad_output"
        settings = probe.settings
        name = settings.backward_format if is_gradient else settings.forward_format
    bits = MANTISSA_BITS[name] + (0 if probe.casts.is_random else 1)
    return 20 * bits * math.log10(2)


def wrong_runs(probe: Probe) -> Iterator[str]:
    """Yield shapes that a cast fails on, and finite tensors that do not stay finite."""
    unit = probe.traits.multiple
    for shape in (*ODD_SHAPES, (unit, unit)):
        whole = torch.linspace(-3, 3, shape[0] * shape[1]).view(shape).to(probe.dtype)
        for along, operand in probe.operands(whole).items():
            filled = -shape[0] % unit if operand.rotation is not None else 0
            if tuple(operand.payload.shape) != (shape[0] + filled, shape[1]):
                yield f"a tensor of {list(shape)} has {list(operand.payload.shape)} numbers"
            elif not values(operand).isfinite().all():
                yield f"a finite tensor of {list(shape)} is not finite along the {along} dim"
    for size in (2.0**-40, 2.0**40) if probe.dtype != torch.float16 else ():
        for along, operand in probe.operands(probe.normal * size).items():
            if not values(operand).isfinite().all():
                yield f"numbers of about {size:.0e} are not finite along the {along} dim"


def wrong_layouts(probe: Probe) -> Iterator[str]:
    """Yield where a tensor that lies transposed in memory gets other numbers."""
    x = probe.wide
    lying = x.t().contiguous().t()
    yield from _other_bits(probe, x, lying, "a tensor that lies transposed in memory")


def wrong_inputs(probe: Probe) -> Iterator[str]:
    """Yield where a cast changes the tensor that it is given."""
    for x in (probe.wide, probe.normal):
        given = x.clone()
        probe.linear(history=x).operands(probe.role, given)
        if not equal(given, x):
            yield "the cast changes the tensor that it is given"
            return


def wrong_values(probe: Probe) -> Iterator[str]:
    """Yield where values are farther from the tensor than rounding to the format explains."""
    floor = floor_of(probe)
    for kind, x in (("normal", probe.normal), ("wide", probe.wide)):
        for along, operand in probe.operands(x).items():
            ratio = _decibel(x.double(), values(operand))
            if operand.rotation is None and not ratio >= floor:
                yield (
                    f"the signal-to-noise ratio of {kind} numbers along the {along} dim is "
                    f"{ratio:.1f} dB, below the {floor:.1f} dB of the format"
                )


def wrong_saturation(probe: Probe) -> Iterator[str]:
    """Yield where more of a normal tensor saturates than health takes for normal."""
    limit = max(HealthSpec().max_overflow, probe.traits.max_saturated)
    x = probe.normal
    for along, operand in probe.operands(x).items():
        if operand.rotation is not None:
            continue
        scale = spread(operand.dequant_scale, x.shape, operand.block).double()
        scale = scale if operand.outer is None else scale * operand.outer
        largest = operand.fmt.max * scale * (1 + FP32_ERROR)
        share = float((x.double().abs() > largest).double().mean())
        if share > limit:
            yield (
                f"{share:.2%} of normal numbers saturate along the {along} dim, and health warns "
                f"of more than {limit:.2%}"
            )


def wrong_zeros(probe: Probe) -> Iterator[str]:
    """Yield where a zero does not stay zero."""
    for kind, x in (("of zeros", torch.zeros_like(probe.normal)), ("with zeros", probe.wide)):
        for along, operand in probe.operands(x, history=probe.wide).items():
            is_zero = x == 0 if operand.rotation is None else torch.full_like(x, not x.any()).bool()
            if bool((values(operand)[is_zero] != 0).any()):
                yield f"a tensor {kind} has other values there along the {along} dim"


def lost_nans(probe: Probe) -> Iterator[str]:
    """Yield where a NaN is gone from payload and scales."""
    x = probe.normal.clone()
    x[1, 2] = math.nan
    for along, operand in probe.operands(x, history=probe.normal).items():
        cast_values = values(operand)
        at = cast_values[:, 2] if operand.rotation is not None else cast_values[1, 2]
        if bool(at.isfinite().all()):
            yield f"a NaN is gone from payload and scale along the {along} dim"


def lost_infinities(probe: Probe) -> Iterator[str]:
    """Yield where an infinity is neither non-finite nor the largest value of its block."""
    x = probe.normal.clone()
    x[1, 2] = math.inf
    for along, operand in probe.operands(x, history=probe.normal).items():
        if operand.rotation is not None:
            continue
        cast_values = values(operand)
        rows, cols = operand.block or cast_values.shape
        row, col = 1 // rows * rows, 2 // cols * cols
        block_values = cast_values[row : row + rows, col : col + cols].abs()
        if bool(cast_values[1, 2].isfinite()) and bool((block_values > cast_values[1, 2]).any()):
            yield f"an infinity is smaller than other values of its block along the {along} dim"


def wrong_scales(probe: Probe) -> Iterator[str]:
    """Yield a scale that is no power of two."""
    for x in (probe.wide, probe.normal * 3):
        for along, operand in probe.operands(x).items():
            scale = operand.dequant_scale
            finite = scale[scale.isfinite() & (scale != 0)]
            mantissa = torch.frexp(finite).mantissa.abs()
            if bool((mantissa != 0.5).any()):
                odd = finite[mantissa != 0.5][0].item()
                yield f"the scale {odd:.6g} along the {along} dim is no power of two"
                return


def wrong_both(probe: Probe) -> Iterator[str]:
    """Yield where one quantization does not serve both products."""
    for x in (probe.wide, probe.normal):
        operands, of_turned = probe.operands(x), probe.operands(x.t().contiguous(), history=x)
        if len(operands) == 2 and not same_bits(operands["last"], operands["first"]):
            yield "the two products get different numbers or scales"
        for along in operands.keys() & of_turned.keys():
            other = turned(of_turned[along])
            # What is rounded with random bytes gets others when it is turned.
            same = same_scales if probe.casts.is_random else same_bits
            if not same(operands[along], other):
                yield "the transposed tensor has other numbers or scales than the tensor"
                return


def wrong_parts(probe: Probe) -> Iterator[str]:
    """Yield where quantizing parts and joining them is not quantizing the whole."""
    for x in (probe.wide, _uneven(probe)):
        whole = probe.operands(x)
        for dim in (0, 1):
            pieces = _cut(x, dim, probe.traits.multiple)
            sizes = " and ".join(str(list(part.shape)) for part in pieces)
            try:
                parts = probe.together(pieces, x)
            except RanksDifferError as error:
                yield f"parts of {sizes}: {error}"
                return
            for along, operand in whole.items():
                if not _is_joined(operand, [part[along] for part in parts], dim, probe):
                    yield (
                        f"parts of {sizes} have other numbers or scales along the {along} dim "
                        "than the whole"
                    )
                    return


def _is_joined(whole: Fp8Tensor, parts: list[Fp8Tensor], dim: int, probe: Probe) -> bool:
    """Whether parts are the whole; random bytes differ, as the draws of parts do."""
    if whole.block is None and not all(same_scales(whole, part) for part in parts):
        return False
    if whole.outer is not None and any(
        part.outer is None or not equal(part.outer, whole.outer) for part in parts
    ):
        return False
    same = same_scales if probe.casts.is_random else same_bits
    return same(joined(parts, dim), whole)


def wrong_agreement(probe: Probe) -> Iterator[str]:
    """Yield where ranks that hold parts do not come to the scale of the whole tensor."""
    for x in (probe.wide, _uneven(probe), _half_zero(probe)):
        whole = probe.operands(x)
        for dim in (0, 1):
            try:
                parts = probe.together(_cut(x, dim, probe.unit), x)
            except RanksDifferError as error:
                yield str(error)
                return
            for along, operand in whole.items():
                for part in parts:
                    if operand.block is None and not same_scales(operand, part[along]):
                        yield f"ranks with parts have other scales along the {along} dim"
                        return
                    if operand.outer is not None and not _same_outer(operand, part[along]):
                        yield f"ranks with parts have other factors along the {along} dim"
                        return


def _same_outer(a: Fp8Tensor, b: Fp8Tensor) -> bool:
    return a.outer is not None and b.outer is not None and equal(a.outer, b.outer)


def wrong_shared_weights(probe: Probe) -> Iterator[str]:
    """Yield where the scale that follows from a weight's amax is not the one that its cast has."""
    tiny = torch.full_like(probe.normal, torch.finfo(probe.dtype).tiny)
    for x in (probe.wide, probe.normal, probe.normal * 3, torch.zeros_like(tiny), tiny):
        for operand in probe.operands(x, history=probe.wide).values():
            linear = probe.linear(history=probe.wide)
            scale, fmt = linear.store_scale(amax_of(x))
            shared = Fp8Tensor.quantize(x, scale.clone(), fmt)
            if not equal(shared.dequant_scale, operand.dequant_scale):
                yield (
                    f"the amax {amax_of(x).item():.6g} gives the scale "
                    f"{shared.dequant_scale.item():.6g}, and its cast has "
                    f"{operand.dequant_scale.item():.6g}"
                )
                return
            if not probe.casts.is_random and not equal(shared.payload, operand.payload):
                yield "a part that is cast with the scale of the amax has other numbers"
                return


def wrong_repeats(probe: Probe) -> Iterator[str]:
    """Yield where the same tensor, with the same key, gets other numbers."""
    x = probe.wide
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = probe.operands(x)
        probe.operands(probe.normal * 7)
        torch.manual_seed(2)
        again = probe.operands(x)
    if _differ(first, again):
        hint = "takes its random bytes elsewhere than from `cast.draw`, or keeps something"
        yield f"the same tensor gets other numbers at a second cast: the rule {hint}"
    elif not probe.casts.is_random and _differ(first, probe.operands(x, step=2)):
        yield "the numbers change with the step, and is_random is not declared"


def _differ(a: dict[str, Fp8Tensor], b: dict[str, Fp8Tensor]) -> bool:
    return a.keys() != b.keys() or any(not same_bits(a[along], b[along]) for along in a)


def wrong_draws(probe: Probe) -> Iterator[str]:
    """Yield where stochastic rounding does not depend on its key, or is biased.

    Each draw errs by at most R, as measured, so that by Hoeffding's inequality the mean of n
    weighted errors, with weights of at most 1, is beyond R * sqrt(2 ln(2 / chance) / n) with this
    chance alone. Bytes round up with a chance that is off by 1/256 at most, which adds R / 256. The
    weights are 1, the sign of the number, and the sign of the mean error of the first half of the
    draws, by which the second half is judged: if single numbers are biased, both halves agree.
    """
    x = probe.normal
    if not _differ(probe.operands(x), probe.operands(x, step=2)):
        yield "another step gets the same numbers, as without random bytes"
        return
    draws = [probe.operands(x, step=step) for step in range(1, DRAWS + 1)]
    for along, operand in draws[0].items():
        if operand.rotation is not None:
            continue  # the product tells of it (`wrong_products`)
        errors = torch.stack([values(draw[along]) - x.double() for draw in draws])
        scale = spread(operand.dequant_scale, x.shape, operand.block).double()
        scale = scale if operand.outer is None else scale * operand.outer
        inside = x.double().abs() <= operand.fmt.max * scale
        yield from _biases(errors[:, inside], x.double()[inside], along)


def _biases(errors: torch.Tensor, x: torch.Tensor, along: str) -> Iterator[str]:
    """Yield a bias of the errors [draws, numbers] of numbers."""
    largest = float(errors.abs().max())
    half = len(errors) // 2
    hints = errors[:half].mean(0).sign()
    weighted = {
        "of single numbers": errors[half:] * hints,
        "upward or downward": errors,
        "to or from zero": errors * x.sign(),
    }
    for name, some in weighted.items():
        bound = largest * (math.sqrt(2 * math.log(2 / CHANCE) / some.numel()) + 1 / 256)
        if abs(mean := float(some.mean())) > bound:
            yield (
                f"the rounding has a bias {name} along the {along} dim: {mean:.3g} on average, and "
                f"chance explains {bound:.3g}"
            )
            return


def wrong_products(probe: Probe) -> Iterator[str]:
    """Yield where the product of two rotated operands is not that of the tensors.

    The noise of an operand is below its floor; those of two independent ones add up.
    """
    if probe.role != "input":
        return  # the pair is judged once
    grad_probe = replace(probe, role="grad_output")
    generator = torch.Generator().manual_seed(3)
    tokens, inputs = probe.normal.shape
    x_TI = probe.normal
    g_TO = torch.randn(tokens, inputs, generator=generator).to(probe.dtype)
    x_fp8 = probe.operands(x_TI).get("first")
    g_fp8 = grad_probe.operands(g_TO).get("first")
    if x_fp8 is None or g_fp8 is None:
        return
    noise = 10 ** (-floor_of(probe) / 10) + 10 ** (-floor_of(grad_probe) / 10)
    floor = -10 * math.log10(noise)
    ratio = _decibel(g_TO.double().t() @ x_TI.double(), values(g_fp8).t() @ values(x_fp8))
    if not ratio >= floor:
        yield (
            f"the product of the rotated input and grad_output has {ratio:.1f} dB, below "
            f"{floor:.1f} dB: the rotation does not cancel"
        )
    if _decibel(x_TI.double(), values(x_fp8)) >= floor_of(probe):
        yield "the rotation is declared, and the operand is not rotated"


def wrong_simulation(probe: Probe) -> Iterator[str]:
    """Yield where a rule that says that it returns values returns numbers and scales."""
    for along, operand in probe.operands(probe.normal).items():
        if bool((operand.dequant_scale != 1).any()):
            yield f"the cast returns numbers and scales, not values, along the {along} dim"


def _other_bits(probe: Probe, x: torch.Tensor, other: torch.Tensor, what: str) -> Iterator[str]:
    if _differ(probe.operands(x), probe.operands(other)):
        yield f"{what} gets other numbers or scales"


def _decibel(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Return the signal-to-noise ratio; -inf where the noise is not finite."""
    signal, noise = float(exact.square().sum()), float((exact - approximate).square().sum())
    if not math.isfinite(noise):
        return -math.inf
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def _cut(x: torch.Tensor, dim: int, size: int) -> list[torch.Tensor]:
    """Return two parts of a tensor along a dim, the first of this size."""
    first, rest = x.split([size, x.shape[dim] - size], dim)
    return [first.contiguous(), rest.contiguous()]


def _uneven(probe: Probe) -> torch.Tensor:
    """Return normal numbers whose amax is in the last corner, far above the others."""
    x = probe.normal.clone()
    x[-1, -1] = 1000.0
    return x


def _half_zero(probe: Probe) -> torch.Tensor:
    """Return normal numbers whose first parts have zeros alone."""
    x = probe.normal.clone()
    x[: probe.unit] = 0
    x[:, : probe.unit] = 0
    return x
