"""Say where Transformer Engine's quantized tensors keep their memory, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Where quantized tensors keep their bytes, row-wise or column-wise; either has all of them.
BYTES = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
# Where they keep bytes, scales of whole tensors and of blocks, and amaxes that are scales too.
MEMORY = (
    *(*BYTES, "_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv"),
    *("_amax_rowwise", "_amax_columnwise"),
)


def is_quantized(tensor: Any) -> bool:
    """Whether `tensor` is a tensor that Transformer Engine keeps in FP8 or FP4, of either kind.

    One kind is a subclass of `torch.Tensor`, which a parameter may be; the other one is not.
    """
    return hasattr(tensor, "_fp8_dtype") or hasattr(tensor, "_fp4_dtype")


def bytes_of(tensor: Any) -> torch.Tensor | None:
    """Return the bytes of a quantized tensor; None for one in high precision."""
    if not is_quantized(tensor):
        return None
    for name in BYTES:
        if (found := getattr(tensor, name, None)) is not None:
            assert isinstance(found, torch.Tensor)
            return found
    return None


def size_of(tensor: Any) -> int:
    """Return the number of elements of a tensor; the bytes of one in FP4 hold two each."""
    found = bytes_of(tensor)
    if found is None:
        return int(tensor.numel())
    return found.numel() * (2 if hasattr(tensor, "_fp4_dtype") else 1)


def memory_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors whose memory a tensor occupies; an ordinary one yields itself."""
    if not is_quantized(tensor):
        yield tensor
        return
    for name in MEMORY:
        if isinstance(found := getattr(tensor, name, None), torch.Tensor):
            yield found
