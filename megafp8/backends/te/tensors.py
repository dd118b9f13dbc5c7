"""Find the memory of Transformer Engine's quantized tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megafp8.te_cpu.tensors import is_quantized

# Where quantized tensors keep their bytes, row-wise or column-wise; either has all of them.
BYTES = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
# Where they keep bytes and scales, of whole tensors and of blocks.
MEMORY = (*BYTES, "_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv")


def bytes_of(tensor: Any) -> torch.Tensor | None:
    """Return the bytes of a quantized tensor; None for one in high precision."""
    if not is_quantized(tensor):
        return None
    for name in BYTES:
        if (found := getattr(tensor, name, None)) is not None:
            assert isinstance(found, torch.Tensor)
            return found
    return None


def memory_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors whose memory a tensor occupies; an ordinary one yields itself."""
    if not is_quantized(tensor):
        yield tensor
        return
    for name in MEMORY:
        if isinstance(found := getattr(tensor, name, None), torch.Tensor):
            yield found
