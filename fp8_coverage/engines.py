"""Tell which modules were asked for FP8, and which operands are FP8, for each known engine.

No engine is imported: its classes are known by name, and its products either reach torch's
dispatcher or are announced by the engine itself (`PLACES`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from fp8_coverage import torch_private

PLACES = ("fp8_numerics.gemm",)
"""Modules with a global `LISTENER`, which is None or is called in place of each FP8 product.

Its arguments are `run`, which computes the product and announces nothing, the operands' dtypes,
the shape (M, N, K), and whether a wider format emulates the product. It returns what `run()`
returns.
"""
CLASSES = {
    "Converted": "megafp8.fp8.converted",
    "ConvertedExperts": "megafp8.fp8.experts",
    "Float8Linear": "torchao.float8.float8_linear",
    "MXLinear": "torchao.prototype",
    "FP8Linear": "transformers.integrations",
    "FP8GroupedLinear": "transformers.integrations",
    "FP8Experts": "transformers.integrations",
    "FbgemmFp8Linear": "transformers.integrations",
    "TorchaoLinear": "megafp8.backends",
}
"""Classes whose modules compute in FP8, and how the names of their Python modules begin."""
SWITCHED = {"TransformerEngineBaseModule": "transformer_engine", "Linear": "megafp8.fp8.linear"}
"""The same of classes that compute in FP8 where an attribute `fp8` or a state says so."""
FLOAT8 = {
    dtype
    for name in dir(torch)
    if name.startswith(("float8_e4m3", "float8_e5m2", "float4_"))
    and isinstance(dtype := getattr(torch, name), torch.dtype)
}


def announcers() -> list[Any]:
    """Return the loaded modules of engines that announce their products."""
    return [sys.modules[name] for name in PLACES if name in sys.modules]


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tensor's numbers; of a subclass that stores FP8, the FP8 dtype."""
    if tensor.dtype in FLOAT8:
        return tensor.dtype
    inner = (part.dtype for part in torch_private.parts_of(tensor))
    return next((dtype for dtype in inner if dtype in FLOAT8), tensor.dtype)


def was_asked(module: nn.Module) -> bool:
    """Whether this module's own products were asked to run in FP8."""
    for kind in type(module).__mro__:
        if _is_of(kind, CLASSES):
            return True
        if _is_of(kind, SWITCHED):
            return _is_on(module)
    return any(dtype_of(p) in FLOAT8 for p in torch_private.parameters_of(module))


def _is_of(kind: type, classes: dict[str, str]) -> bool:
    home = classes.get(kind.__name__)
    return home is not None and kind.__module__.startswith(home)


def _is_on(module: Any) -> bool:
    quantizer = getattr(module, "quantizer", None)
    if quantizer is not None and hasattr(quantizer, "state"):
        return bool(quantizer.state.fp8_enabled)
    return getattr(module, "fp8", False) is True


def transformer_engine() -> Any:
    """Return Transformer Engine's compiled module if it is loaded; te-on-cpu announces its own."""
    found = sys.modules.get("transformer_engine_torch")
    gemm = getattr(found, "generic_gemm", None)
    return None if gemm is None or getattr(gemm, "__module__", "").startswith("te_cpu") else found


def is_in_te(operand: Any) -> bool:
    """Whether an operand of Transformer Engine is quantized; a plain one is a plain tensor."""
    return hasattr(operand, "_fp8_dtype") or hasattr(operand, "_fp4_dtype")


def dtype_in_te(operand: Any) -> Any:
    """Return the dtype of an operand as Transformer Engine names it."""
    return getattr(operand, "_fp8_dtype", None) or getattr(operand, "_fp4_dtype", operand.dtype)
