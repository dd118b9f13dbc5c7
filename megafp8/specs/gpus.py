"""Say what each generation of NVIDIA GPUs does with each recipe, without asking a GPU or torch."""

from __future__ import annotations

import re

from megafp8.specs.traits import LayoutName, Traits

Capability = tuple[int, int]
"""The compute capability of a GPU: (9, 0) is Hopper's."""
GPUS: dict[str, Capability] = {
    "Ada (L4, L40S), 8.9": (8, 9),
    "Hopper (H100, H200), 9.0": (9, 0),
    "Blackwell (B200, GB200), 10.0": (10, 0),
    "Blackwell (RTX PRO 6000), 12.0": (12, 0),
}
_NAMES = {
    r"(rtx)?(40[5-9]0(ti|super)?|[2456]000ada)|ad10\d|ada|l4|l40s?|8\.?9": (8, 9),
    r"h(100|200|800|20)|gh200|hopper|9\.?0": (9, 0),
    r"g?b[123]00|gb10|blackwell|10\.?[0-3]": (10, 0),
    r"(rtx)?(50[5-9]0(ti)?|pro\d000(blackwell)?)|12\.?[01]": (12, 0),
    r"a(2|10g?|16|30|40|100|800|[2456]000)|(rtx)?30[5-9]0(ti)?|ampere|8\.?[067]": (8, 0),
    r"v100|t4|(rtx)?20[678]0(ti|super)?|volta|turing|7\.?[05]": (7, 0),
}
"""Patterns of what users call a GPU, in small letters without spaces and dashes."""
FIRST_WITH_FP8 = (8, 9)
"""The least compute capability that has FP8 tensor cores."""


def capability_of(name: str) -> Capability | None:
    """Return the compute capability that a GPU's name stands for; None if it is not known.

    All GPUs before Ampere, which have no BF16 either, stand for one.
    """
    word = re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())
    word = re.sub(r"(sxm\d?|pcie|nvl|\d+gb)$", "", word)
    return next((found for text, found in _NAMES.items() if re.fullmatch(text, word)), None)


def why_no_product(capability: Capability, layout: LayoutName | None) -> str | None:
    """Return why a GPU's tensor cores take no operands with such scales, or None if they do.

    The source is PyTorch's `_scaled_mm` (aten/src/ATen/native/cuda/ScaledBlas.cpp) and its tests:
    cuBLASLt has block scales of 128 for Hopper alone, and scales in tiles from Blackwell on.
    """
    prefix = f"compute capability {capability[0]}.{capability[1]}: "
    if capability < FIRST_WITH_FP8:
        return f"{prefix}FP8 tensor cores begin at 8.9"
    if layout is None:
        return f"{prefix}no product for such scales is built in yet"
    if layout == "row" and capability < (9, 0):
        return f"{prefix}row scales begin at 9.0"
    if layout in ("block", "square") and capability[0] != 9:
        return f"{prefix}block scales of 128 exist on 9.0 only"
    if layout in ("mx", "nv") and capability < (10, 0):
        return f"{prefix}scales of 16 and 32 elements begin at 10.0"
    return None


def why_not_in_te(capability: Capability, te_class: str, power_2_scale: bool = True) -> str | None:
    """Return why Transformer Engine cannot run a class of its recipes on a GPU, or None if it can.

    The source is `check_recipe_support` of version 2.20.2 (transformer_engine/pytorch/
    quantization.py), which also wants CUDA 12.9 for `Float8BlockScaling`. Whether scales are powers
    of two is asserted by the casts of blocks (transformer_engine/common/transpose/
    quantize_transpose_vector_blockwise.cu), since Blackwell multiplies such blocks as MXFP8.
    """
    least = {
        "Float8BlockScaling": (9, 0),
        "MXFP8BlockScaling": (10, 0),
        "NVFP4BlockScaling": (10, 0),
    }
    first = least.get(te_class, FIRST_WITH_FP8)
    if capability < first:
        return f"{te_class} begins at compute capability {first[0]}.{first[1]}"
    if te_class == "MXFP8BlockScaling" and capability >= (12, 0):
        return f"{te_class} has not all products from compute capability 12.0 on"
    if te_class == "Float8BlockScaling" and capability >= (10, 0) and not power_2_scale:
        return f"{te_class} needs model.fp8_power_2_scale=True from compute capability 10.0 on"
    return None


def ways(traits: Traits, capability: Capability) -> tuple[str, ...]:
    """Return what runs a recipe's products on a GPU's tensor cores: `native`, `te`, both, or none.

    Without any, the native backend computes the same results in BF16 or FP32 products.
    """
    runners = []
    if all(why_no_product(capability, layout) is None for layout in traits.layouts):
        runners.append("native")
    te_class = traits.backends.get("te")
    if te_class is not None and why_not_in_te(capability, te_class) is None:
        runners.append("te")
    return tuple(runners)
