"""Count the FLOPs of a product from its shapes: 2 for each multiplication and its addition."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
Shape = tuple[int, ...]


def product_of(a: Shape, b: Shape) -> int:
    """Return the FLOPs of a [..., M, K] times b [..., K, N]."""
    return 2 * math.prod(a) * b[-1]


def attention_of(q: Shape, k: Shape, v: Shape) -> int:
    """Return the FLOPs of both products of attention, as if no score were masked.

    q is [B, H, S, E], k [B, H or fewer, T, E], v [B, H or fewer, T, D].
    """
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return attention_of(q.shape, k.shape, v.shape)


def _attention_backward(
    grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Five products where the forward pass has two: the scores are computed again."""
    (*rows, head), (places, value) = q.shape, (k.shape[-2], v.shape[-1])
    return 2 * math.prod(rows) * places * (3 * head + 2 * value)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count groups of rows of a, of columns of b, or of what is summed."""
    if a.dim() == 3 and b.dim() == 2:
        return 2 * a.shape[1] * b.numel()
    return product_of(a.shape, b.shape)


def _matrices(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    packed = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    return packed * product_of(a.shape, b.shape)


def _added(start: Any, a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    return product_of(a.shape, b.shape)


def _vector(a: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _added_vector(start: Any, a: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _of(names: tuple[str, ...], count: Callable[..., int]) -> dict[Any, Callable[..., int]]:
    return {getattr(aten, name): count for name in names if hasattr(aten, name)}


_SDPA = tuple(
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention",
                 "cudnn_attention", "fused_attention_overrideable")
)  # fmt: skip
SCALED = _of(("_scaled_mm", "_scaled_mm_v2"), _matrices)
SCALED |= _of(("_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped)
ATTENTION = _of(_SDPA, _attention)
ATTENTION |= _of(tuple(f"{name}_backward" for name in _SDPA), _attention_backward)
ATTENTION |= {
    op: count for op, count in flop_registry.items()
    if op not in ATTENTION and "attention" in str(op)
}  # fmt: skip
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry, **ATTENTION, **SCALED,
    **_of(("mm", "bmm"), _matrices), **_of(("addmm", "baddbmm", "addbmm"), _added),
    **_of(("mv", "dot", "vdot"), _vector), **_of(("addmv",), _added_vector),
    **_of(("_grouped_mm",), _grouped),
}  # fmt: skip
"""The FLOPs of each operation that is a product, from its arguments and `out_val`, its result."""
ADDED = frozenset({aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv})
"""The products that are added to a third tensor, which comes first."""
BATCHED = frozenset({aten.bmm, aten.baddbmm, aten.addbmm})
OPAQUE = re.compile(
    r"(^|_)(mm|bmm|gemm|matmul|linear|conv\d?d?|convolution|attention|attn|rnn|lstm|gru)(_|$)"
    r"|encoder_layer"
)
"""What is in the name of an operation that computes products which nothing here can count."""
