"""Compute attention of some queries over some of their keys, with log-sum-exps that merge blocks.

The log-sum-exp of each block makes attention over all keys a weighted mean of the blocks' outputs.
A block's gradients need nothing from other blocks except the whole output and the whole log-sum-exp
(FlashAttention, arXiv 2205.14135; ring attention, arXiv 2310.01889).
"""

# B batch  S queries  K keys  H heads  G key-value heads  E head width

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fp8_numerics import cpu
from fp8_numerics.bf16 import is_widened
from fp8_numerics.meta import device_kind
from megafp8.ops import torch_private

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_LONG = 192
"""So many queries make torch's CPU kernel multiply 64 or more of them at a time, and fewer 32."""
_MAY_CALL_ONEDNN = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether torch gives FP32 products to oneDNN where they may have less than highest precision."""
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionTile:
    """Say how the scores of a block are scaled and masked.

    If `is_causal`, the i-th query sees the first i + 1 keys, else all keys. `keep` is dropout's
    mask, broadcast to [B, H, S, K]: 0 for dropped elements, 1 / (1 - p) for the others. `mask`,
    broadcast likewise, is boolean (True where a query may attend) or a bias that is added to the
    scores. Each query must see a key.
    """

    scale: float
    is_causal: bool = False
    keep: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def attend(
    q_BHSE: torch.Tensor, k_BGKE: torch.Tensor, v_BGKE: torch.Tensor, block: AttentionTile
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, S, E] and the log-sum-exp of the scores [B, H, S] in FP32 or FP64.

    The output has the queries' dtype, except that it stays in FP32 where BF16 products are computed
    in FP32.
    """
    if _is_for_cpu(q_BHSE, block):
        if is_widened(q_BHSE):
            q_BHSE, k_BGKE, v_BGKE = q_BHSE.float(), k_BGKE.float(), v_BGKE.float()
        with _small_products(q_BHSE, k_BGKE):
            out_BHSE, lse_BHS = torch_private.cpu_attention(
                q_BHSE,
                k_BGKE,
                v_BGKE,
                0.0,
                block.is_causal,
                attn_mask=_bias_of(block.mask, q_BHSE.dtype),
                scale=block.scale,
            )
        return out_BHSE, lse_BHS
    k_BHKE, v_BHKE = (_for_each_query(x, q_BHSE) for x in (k_BGKE, v_BGKE))
    if _has_flash_kernel(q_BHSE, block):
        out_BHSE, lse_BHS, *_ = torch_private.flash_attention(
            q_BHSE, k_BHKE, v_BHKE, 0.0, block.is_causal, scale=block.scale
        )
        return out_BHSE, lse_BHS
    scores_BHSK = _scores(q_BHSE, k_BHKE, block)
    lse_BHS = scores_BHSK.logsumexp(-1)
    probs_BHSK = scores_BHSK.sub_(lse_BHS[..., None]).exp_()
    if block.keep is not None:
        probs_BHSK = probs_BHSK * block.keep
    return (probs_BHSK @ v_BHKE.to(probs_BHSK.dtype)).to(q_BHSE.dtype), lse_BHS


def attend_backward(
    grad_BHSE: torch.Tensor,
    q_BHSE: torch.Tensor,
    k_BGKE: torch.Tensor,
    v_BGKE: torch.Tensor,
    out_BHSE: torch.Tensor,
    lse_BHS: torch.Tensor,
    block: AttentionTile,
) -> Grads:
    """Return the gradients of a block's queries, keys and values.

    `out_BHSE` and `lse_BHS` are those of attention over all keys. The gradients stay in FP32 where
    products of BF16 or FP16 are computed in FP32.
    """
    saved = (out_BHSE, lse_BHS)
    if _is_for_cpu(q_BHSE, block):
        operands: tuple[torch.Tensor, ...] = (grad_BHSE, q_BHSE, k_BGKE, v_BGKE, out_BHSE)
        if is_widened(q_BHSE) or _goes_back_in_fp32(q_BHSE, k_BGKE):
            operands = tuple(x.float() for x in operands)
        with _small_products(operands[1], k_BGKE):
            grads: Grads = torch_private.cpu_attention_backward(
                *operands,
                lse_BHS,
                0.0,
                block.is_causal,
                attn_mask=_bias_of(block.mask, operands[0].dtype),
                scale=block.scale,
            )
        return grads
    k_BHKE, v_BHKE = (_for_each_query(x, q_BHSE) for x in (k_BGKE, v_BGKE))
    if _has_flash_kernel(q_BHSE, block):
        lengths = (None, None, q_BHSE.shape[2], k_BHKE.shape[2])  # None: all rows are this long
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BHSE.device)  # seed and offset
        dq_BHSE, dk_BHKE, dv_BHKE = torch_private.flash_attention_backward(
            *(x.contiguous() for x in (grad_BHSE, q_BHSE, k_BHKE, v_BHKE, *saved)),
            *lengths,
            0.0,
            block.is_causal,
            no_dropout,
            no_dropout[0],
            scale=block.scale,
        )
    else:
        probs_BHSK = _scores(q_BHSE, k_BHKE, block).sub_(lse_BHS[..., None]).exp_()
        work_dtype = probs_BHSK.dtype
        grad, q, k, v = (x.to(work_dtype) for x in (grad_BHSE, q_BHSE, k_BHKE, v_BHKE))
        dropped_BHSK = probs_BHSK if block.keep is None else probs_BHSK * block.keep
        dv_BHKE = dropped_BHSK.mT @ grad
        dp_BHSK = grad @ v.mT
        if block.keep is not None:
            dp_BHSK = dp_BHSK * block.keep
        # The softmax's gradient is p * (dp - mean), with the mean of dp over all keys, weighted by
        # p. The output gives it without the other blocks: sum(p * dp) = sum(grad * out).
        mean_dp_BHS1 = (grad * out_BHSE.to(work_dtype)).sum(-1, keepdim=True)
        ds_BHSK = (dp_BHSK - mean_dp_BHS1).mul_(probs_BHSK).mul_(block.scale)
        dq_BHSE, dk_BHKE = ds_BHSK @ k, ds_BHSK.mT @ q
    groups = k_BGKE.shape[1]
    dk_BGKE, dv_BGKE = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk_BHKE, dv_BHKE))
    return dq_BHSE, dk_BGKE, dv_BGKE


def attention(
    q_BHSE: torch.Tensor, k_BGKE: torch.Tensor, v_BGKE: torch.Tensor, block: AttentionTile
) -> torch.Tensor:
    """Return attention over all keys, [B, H, S, E], in the queries' dtype, with gradients.

    The operands are saved for backward in their own dtype, also where products are in FP32.
    """
    out_BHSE: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q_BHSE, k_BGKE, v_BGKE, block
    )
    return out_BHSE


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSE: torch.Tensor,
        k_BGKE: torch.Tensor,
        v_BGKE: torch.Tensor,
        block: AttentionTile,
    ) -> torch.Tensor:
        out_BHSE, lse_BHS = attend(q_BHSE, k_BGKE, v_BGKE, block)
        out_BHSE = out_BHSE.to(q_BHSE.dtype)
        ctx.save_for_backward(q_BHSE, k_BGKE, v_BGKE, out_BHSE, lse_BHS)
        ctx.block = block
        return out_BHSE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BHSE, k_BGKE, v_BGKE, out_BHSE, lse_BHS = ctx.saved_tensors
        d_inputs = attend_backward(grads[0], q_BHSE, k_BGKE, v_BGKE, out_BHSE, lse_BHS, ctx.block)
        dq_BHSE, dk_BGKE, dv_BGKE = (grad.to(grads[0].dtype) for grad in d_inputs)
        return dq_BHSE, dk_BGKE, dv_BGKE, None


def is_faster_here(q_BHSE: torch.Tensor, k_BGKE: torch.Tensor) -> bool:
    """Whether `attention` has a faster way on a CPU to compute these than torch's own function."""
    if device_kind(q_BHSE.device) != "cpu":
        return False
    in_fp32 = is_widened(q_BHSE) or _goes_back_in_fp32(q_BHSE, k_BGKE)
    return in_fp32 or _has_small_products(q_BHSE, k_BGKE)


def _goes_back_in_fp32(q_BHSE: torch.Tensor, k_BGKE: torch.Tensor) -> bool:
    """Whether the backward pass of BF16 or FP16 is computed in FP32, which takes less time.

    torch makes a product of oneDNN for each 32 to 256 queries of a head. Such a call takes about
    10 us, and MKL needs none: over 64 tokens the pass is six times as fast in FP32. From 192 tokens
    on AMX makes up for the calls. Gradients of scores are then not rounded to BF16 or FP16 either.
    """
    if q_BHSE.dtype not in _HALVES or device_kind(q_BHSE.device) != "cpu":
        return False
    return _is_short(q_BHSE, k_BGKE) or not cpu.HAS_AMX


def _has_small_products(q_BHSE: torch.Tensor, k_BGKE: torch.Tensor) -> bool:
    """Whether torch would give FP32 products to oneDNN that are too small for it.

    Torch does so where FP32 products may have less than the highest precision
    (`train/process.py`). A call of oneDNN takes about 10 us, and the products of 32 queries with
    fewer than 192 keys take less in MKL: attention over 64 tokens is then three times as fast.
    """
    if not _MAY_CALL_ONEDNN or q_BHSE.dtype != torch.float32 or q_BHSE.device.type != "cpu":
        return False
    if torch.compiler.is_compiling():  # torch's own function is then a part of the graph
        return False
    return _is_short(q_BHSE, k_BGKE) and torch.get_float32_matmul_precision() != "highest"


def _is_short(q_BHSE: torch.Tensor, k_BGKE: torch.Tensor) -> bool:
    return q_BHSE.shape[2] < _LONG and k_BGKE.shape[2] < _LONG


@contextmanager
def _small_products(q_BHSE: torch.Tensor, k_BGKE: torch.Tensor) -> Iterator[None]:
    """Let MKL compute the products inside the context if they are too small for oneDNN."""
    if not _has_small_products(q_BHSE, k_BGKE):
        yield
        return
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def merge_(
    out_BHSE: torch.Tensor, lse_BHS: torch.Tensor, more_BHSE: torch.Tensor, more_BHS: torch.Tensor
) -> None:
    """Merge attention over a second set of keys into that over a first set, in place.

    The first output and log-sum-exp become those over both sets, in the first one's dtype.
    """
    both_BHS = torch.logaddexp(lse_BHS, more_BHS)
    out_BHSE.mul_((lse_BHS - both_BHS).exp_()[..., None])
    out_BHSE.add_(more_BHSE * (more_BHS - both_BHS).exp_()[..., None])
    lse_BHS.copy_(both_BHS)


def _is_for_cpu(q_BHSE: torch.Tensor, block: AttentionTile) -> bool:
    return block.keep is None and q_BHSE.device.type in ("cpu", "meta")


def _bias_of(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the bias that is added to the scores, with the 4 dims that the kernel expects."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    else:
        bias = mask.to(dtype)
    return bias[(None,) * (4 - bias.ndim)]


def _has_flash_kernel(q_BHSE: torch.Tensor, block: AttentionTile) -> bool:
    if block.keep is not None or block.mask is not None:
        return False
    is_half = q_BHSE.dtype in (torch.bfloat16, torch.float16)
    return q_BHSE.device.type == "cuda" and is_half and q_BHSE.shape[-1] in range(8, 257, 8)


def _for_each_query(x_BGKE: torch.Tensor, q_BHSE: torch.Tensor) -> torch.Tensor:
    """Repeat key-value heads for the query heads that share them: [B, G, K, E] -> [B, H, K, E]."""
    return x_BGKE.repeat_interleave(q_BHSE.shape[1] // x_BGKE.shape[1], dim=1)


def _scores(q_BHSE: torch.Tensor, k_BHKE: torch.Tensor, block: AttentionTile) -> torch.Tensor:
    """Return the scaled scores in FP32 or wider, -inf where a query does not see a key."""
    work = torch.promote_types(q_BHSE.dtype, torch.float32)
    scores_BHSK = (q_BHSE.to(work) @ k_BHKE.to(work).mT).mul_(block.scale)
    if block.is_causal:
        later_SK = torch.ones_like(scores_BHSK[0, 0], dtype=torch.bool).triu(1)
        scores_BHSK.masked_fill_(later_SK, float("-inf"))
    if block.mask is not None:
        if block.mask.dtype == torch.bool:
            scores_BHSK.masked_fill_(~block.mask, float("-inf"))
        else:
            scores_BHSK.add_(block.mask)
    return scores_BHSK
