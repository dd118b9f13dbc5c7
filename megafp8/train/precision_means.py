"""By what FP8 really runs in a process: tensor cores or emulation, and who casts."""

from __future__ import annotations

import torch

from megafp8.precision.engine import Engine
from megafp8.precision.gemm import wide_dtype
from megafp8.precision.kernels.compile import library
from megafp8.precision.kernels.scaled_mm import Layout
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import HIGH_PRECISION, RecipeName

LAYOUTS_OF: dict[RecipeName, tuple[Layout, ...]] = {
    "delayed": ("tensor",),
    "tensorwise": ("tensor",),
    "rowwise": ("row",),
    "rowwise_with_gw_hp": ("tensor", "row"),
    "blockwise": ("block", "square"),
}


def means_of(recipe: Fp8Recipe, engine: Engine, device: torch.device, work: torch.dtype) -> str:
    """`engine` is the scaling state's; `work` the dtype of the products' results."""
    named = [recipe.name, *(rule.precision for rule in recipe.modules)]
    recipes = [name for name in dict.fromkeys(named) if name != HIGH_PRECISION]
    in_hardware = [
        all(engine.multiplies(layout, work) for layout in LAYOUTS_OF[name]) for name in recipes
    ]
    wide = {torch.bfloat16: "BF16", torch.float32: "FP32"}[wide_dtype(device, work)]
    cores, emulated = "FP8 tensor cores", f"emulated: {wide} GEMMs over FP8 bytes"
    if all(in_hardware):
        products = cores
    elif not any(in_hardware):
        products = emulated
    else:
        mixed = zip(recipes, in_hardware, strict=True)
        products = ", ".join(f"{name} on {cores}" for name, runs in mixed if runs)
        products += f", the others {emulated}"
    return f"{products}, casts in {_caster(engine, device)}"


def _caster(engine: Engine, device: torch.device) -> str:
    if engine.uses_triton:
        return "Triton"
    return "C" if device.type == "cpu" and library().lib is not None else "torch"
