"""Make Transformer Engine's recipe objects from ours.

Our recipe is checked first, because Transformer Engine's classes ignore what they do not know,
accept values that mean nothing and read their defaults from the environment. There are two traps,
read in the sources of 2.12.0 and 2.20.2:

- `Float8CurrentScaling(use_power_2_scales=True)` and `Float8BlockScaling(use_f32_scales=True)`
  change nothing alone: the modules read `fp8_quant_*`, class attributes that the environment
  fixed at import. They are set on the object here.
- the environment's NVTE_BACKWARD_OVERRIDE would change `backward_override`: it is always given.
"""

from __future__ import annotations

from typing import Any

from megafp8.config import te_layers
from megafp8.config.te_settings import of_recipe
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import AttentionInFp8
from megafp8.specs.recipes import find_recipe
from megafp8.specs.traits import GemmName

QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
ACCUMULATION: dict[GemmName, str] = {
    "output": "fp8_gemm_fprop",
    "grad_input": "fp8_gemm_dgrad",
    "grad_weight": "fp8_gemm_wgrad",
}

WITHOUT_CHOICES = ("MXFP8BlockScaling", "NVFP4BlockScaling")
"""The classes that say nothing about how scales are rounded and products added up."""


def make_te_recipe(recipe: Fp8Recipe, module: Any, attention: AttentionInFp8 = "none") -> Any:
    """Return the recipe object, made of the classes in `module`.

    `module` is transformer_engine.common.recipe; `attention` says what of attention is in FP8.
    Every argument is read back from the object.

    Raises:
        ValueError: This version of Transformer Engine lacks what the recipe needs.
    """
    if reasons := [finding.reason for finding in te_layers.findings(of_recipe(recipe))]:
        raise ValueError("; ".join(reasons))
    traits = find_recipe(recipe.name).traits
    name = traits.backends["te"]
    cls = getattr(module, name, None)
    if cls is None:
        raise ValueError(f"this version of Transformer Engine has no {name}")
    wanted = _arguments(recipe, module, set(cls.__dataclass_fields__), attention)
    missing = sorted(set(wanted) - set(cls.__dataclass_fields__))
    if missing:
        raise ValueError(f"{name} of this version of Transformer Engine has no {missing[0]}")
    te_recipe = cls(**wanted)
    for key, value in wanted.items():
        if getattr(te_recipe, key) != value:
            raise ValueError(f"{name} did not take {key}={value}")
    if not traits.has_history and name not in WITHOUT_CHOICES:
        for quantizer in QUANTIZERS:
            params = module.QParams(power_2_scale=recipe.power_2_scale, amax_epsilon=0.0)
            setattr(te_recipe, quantizer, params)
    return te_recipe


def _arguments(
    recipe: Fp8Recipe, module: Any, known: set[str], attention: AttentionInFp8
) -> dict[str, Any]:
    """Return every argument that decides about numbers, also those that equal the default."""
    formats = module.Format
    e4m3_alone = recipe.backward_format == "e4m3"
    arguments: dict[str, Any] = {"fp8_format": formats.E4M3 if e4m3_alone else formats.HYBRID}
    traits = find_recipe(recipe.name).traits
    if traits.has_history:
        arguments |= {
            "margin": recipe.margin,
            "amax_history_len": recipe.amax_history_len,
            "amax_compute_algo": recipe.amax_compute_algo,
            "reduce_amax": recipe.reduce_amax,
        }
    elif traits.backends["te"] not in WITHOUT_CHOICES:
        for place, key in ACCUMULATION.items():
            is_fast = place in recipe.fast_accumulation
            arguments[key] = module.MMParams(use_split_accumulator=not is_fast)
    if attention != "none":  # required: a version without these fields is refused
        arguments |= {"fp8_dpa": True, "fp8_mha": attention == "whole"}
    optional: dict[str, Any] = {  # given where the version has the field
        "fp8_dpa": attention != "none",
        "fp8_mha": attention == "whole",
        "backward_override": None,
        "enable_2d_quantization": False,
        "use_power_2_scales": recipe.power_2_scale,
        "use_f32_scales": not recipe.power_2_scale,
    }
    if traits.numbers == "e2m1":
        optional |= {
            "disable_rht": traits.input.rotation is None,
            "disable_stochastic_rounding": not traits.grad_output.is_random,
            "disable_2d_quantization": traits.weight.last.across == 1,
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
        }
    return arguments | {key: value for key, value in optional.items() if key in known}
