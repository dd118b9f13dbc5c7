"""Run the casts of megafp8 on the vectors.

PYTHONPATH=. python fp8_numerics/conformance/check.py tests/fp8/conformance_casts.py

`quantized` goes through the quantizer of a linear, as training does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fp8_numerics.cast import Fp8Tensor, quantize
from fp8_numerics.formats import ALL_FORMATS, E4M3
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.quantizer import Role, WantsFp8
from megafp8.fp8.scaling import Pending, ScaleTable, ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.recipe import Cast
from megafp8.specs.recipes import find_recipe
from megafp8.specs.traits import Scales

Arrays = dict[str, np.ndarray]
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def run(case: dict[str, Any], tensors: Arrays) -> Arrays | None:
    """Return what megafp8 makes of a case."""
    rule = case["rule"]
    if rule == "history":
        return history(case, torch.from_numpy(tensors["amaxes"]))
    x = torch.from_numpy(tensors["x"])
    if rule == "delayed":
        amax = torch.zeros(())
        scale, fmt = torch.tensor(case["scale"]), ALL_FORMATS[case["format"]]
        made = quantize(x, scale, fmt, amax=amax, grid_dtype=None)
        return {"codes": codes_of(made.payload), "amax": amax.numpy()}
    if rule == "nvfp4_random":
        return at_random(x, torch.from_numpy(tensors["random"]))
    if rule == "rowwise_with_gw_hp_weight":
        return whole(quantized("rowwise_with_gw_hp", "weight", x, power_2=True, is_last=False), x)
    name, _, part = rule.partition("_")
    role: Role = "weight" if part == "weight" else "input"
    if case["format"] == "e5m2":
        role = "grad_output"
    operand = quantized(
        name, role, x, power_2=part == "power_2" or name in ("rowwise", "blockwise")
    )
    if name == "nvfp4":
        return four_bits(operand.payload, operand.dequant_scale, x)
    scale = operand.dequant_scale.contiguous()
    if name == "mxfp8":
        return {"codes": codes_of(operand.payload), "scale_codes": e8m0(scale)}
    if operand.block is None:
        return whole(operand, x)
    return {"codes": codes_of(operand.payload), "dequant_scale": scale.numpy()}


def whole(operand: Fp8Tensor, x: torch.Tensor) -> Arrays:
    """Return codes and the one scale; an empty matrix has no scale in the vectors."""
    scale = operand.dequant_scale.view(1, 1)[: len(x)]
    return {"codes": codes_of(operand.payload), "dequant_scale": scale.numpy()}


def quantized(
    name: str, role: Role, x: torch.Tensor, *, power_2: bool, is_last: bool = True
) -> Fp8Tensor:
    """Return a tensor as the product along its last dim reads it, or the one along its first."""
    hybrid = name in ("delayed", "tensorwise")
    recipe = Fp8Recipe(
        name=name, power_2_scale=power_2, backward_format="e5m2" if hybrid else "e4m3"
    )
    quantizer = linear_quantizer(ScalingState(recipe), "linear")
    assert quantizer is not None
    tensor = quantizer.tensors[role]
    both, _ = tensor.rule.operands(tensor, x, WantsFp8(is_last, not is_last))
    operand = both.along_last if is_last else both.along_first
    assert isinstance(operand, Fp8Tensor)
    return operand


def at_random(x: torch.Tensor, byte: torch.Tensor) -> Arrays:
    """Round a gradient by given bytes instead of those that a run draws."""
    recipe = find_recipe("nvfp4")
    cast = Cast(
        "grad_output", Scales(1, 16, has_outer=True), E4M3, False, "last", None, lambda shape: byte
    )
    made = recipe.cast(x, cast)
    return four_bits(made.payload, made.dequant_scale, x)


def four_bits(payload: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> Arrays:
    """Return the codes of E2M1 that numbers of E4M3 stand for, those of scales, and the amax."""
    numbers = payload.float()
    codes = torch.searchsorted(MAGNITUDES, numbers.abs()) + 8 * numbers.signbit()
    return {
        "codes": codes.to(torch.uint8).numpy(),
        "scale_codes": codes_of(scale.to(torch.float8_e4m3fn)),
        "amax": x.abs().amax().numpy(),
    }


def e8m0(scale: torch.Tensor) -> np.ndarray:
    """Return the byte of each power of two: its exponent plus 127."""
    return (torch.frexp(scale).exponent + 126).to(torch.uint8).numpy()


def codes_of(payload: torch.Tensor) -> np.ndarray:
    """Return the bytes of numbers in FP8."""
    return payload.contiguous().view(torch.uint8).numpy()


def history(case: dict[str, Any], amaxes_SRT: torch.Tensor) -> Arrays:
    """Return what ranks agree on, and the histories and scales after each step."""
    recipe = Fp8Recipe(
        amax_history_len=case["length"],
        amax_compute_algo=case["algo"],
        margin=case["margin"],
    )
    table = ScaleTable(recipe, E4M3)
    slots = [table.register(str(number)) for number in range(amaxes_SRT.shape[2])]
    agreed, scales, histories = [], [], []
    for amaxes_RT in amaxes_SRT:

        def reduce(staged: torch.Tensor, ranks: torch.Tensor = amaxes_RT) -> Pending:
            staged.copy_(ranks.nan_to_num(nan=torch.inf, posinf=torch.inf).amax(0))
            agreed.append(staged.clone())
            return Pending(staged)

        assert len(slots) == len(table.amax)
        table.update(reduce)
        held = table.tensors()
        scales.append(held["quant_scale"].clone())
        histories.append(held["history"].clone())
    return {
        "agreed": torch.stack(agreed).numpy(),
        "quant_scale": torch.stack(scales).numpy(),
        "history": torch.stack(histories).numpy(),
    }
