"""Name torch's dtypes as settings and counts of products do, and tensors in messages."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def described(value: object) -> str:
    """Return what a message calls a value: a tensor's dtype and shape, or the type of another."""
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__module__}.{type(value).__qualname__}".replace(
            "builtins.", ""
        )
    place = "" if value.is_cpu else f" on {value.device}"
    return f"{value.dtype} {list(value.shape)}{place}"
