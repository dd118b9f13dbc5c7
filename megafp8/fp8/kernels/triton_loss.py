"""Compute the cross entropy of a chunk of tokens and its gradient by the logits, in one launch.

A program computes one token. It reads the logits once for the largest one and the sum of
exponentials, and once more for the gradient, which overwrites them. Where ranks hold parts of the
vocabulary a first launch computes the two numbers and a second one, given those of all ranks, the
gradient. Everything is FP32 until the gradient is rounded to the logits' dtype.

Liger-Kernel has such kernels too. They are not used, since they come with products of their own,
which neither write into our FP32 sums nor are counted, and their ranks' messages are not ours.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# C tokens of a chunk   V vocabulary rows of this rank
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8_numerics.kernels.triton_launch import casts_in_hardware, check_matrix
from fp8_numerics.kernels.triton_rounding import narrowed, rounded, widened

BLOCK = 4096  # logits that a program holds at once
WARPS = 8


class TokenSums(NamedTuple):
    """Hold, for each token, what a softmax needs of all its logits; FP32 [C] each.

    `exponentials` is the sum of exp(logit - largest), `target` the logit of the token's target, or
    0 where that is not among these logits.
    """

    largest: torch.Tensor
    exponentials: torch.Tensor
    target: torch.Tensor


def token_sums(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> TokenSums:
    """Return the sums of each token's logits.

    `targets_C` (int64) are columns; one outside of the matrix is on another rank, or ignored. A NaN
    makes `exponentials` NaN.
    """
    return _launch(logits_CV, targets_C, None, with_grad=False, grad_scale=1.0)


def to_gradient(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    ignore: int,
    *,
    sums: TokenSums | None = None,
    grad_scale: float = 1.0,
) -> TokenSums:
    """Overwrite logits by grad_scale * (softmax - one_hot(target)); return the tokens' sums.

    Tokens whose target is `ignore` get 0. `sums` are those of all ranks, if ranks hold parts of
    the vocabulary.
    """
    return _launch(logits_CV, targets_C, sums, with_grad=True, grad_scale=grad_scale, ignore=ignore)


def _launch(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    sums: TokenSums | None,
    *,
    with_grad: bool,
    grad_scale: float,
    ignore: int = 0,
) -> TokenSums:
    check_matrix("logits_CV", logits_CV)
    num_tokens, vocab = logits_CV.shape
    is_given = sums is not None
    if sums is None:
        sums = TokenSums(*torch.empty(3, num_tokens, device=logits_CV.device).unbind())
    if logits_CV.numel() > 0:
        _loss_kernel[(num_tokens,)](
            logits_CV,
            targets_C,
            *sums,
            vocab,
            ignore,
            grad_scale,
            IS_GIVEN=is_given,
            WITH_GRAD=with_grad,
            HARDWARE=casts_in_hardware(logits_CV.device),
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
            num_warps=WARPS,
        )
    return sums


@triton.jit
def _loss_kernel(
    logits,
    targets,
    largest,
    exponentials,
    of_target,
    vocab,
    ignore,
    grad_scale,
    IS_GIVEN: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * vocab
    one = tl.arange(0, 1)  # vectors of one element: masks then broadcast
    target = tl.load(targets + token + one)
    lanes = tl.arange(0, BLOCK)
    if IS_GIVEN:
        top = tl.load(largest + token + one)
        total = tl.load(exponentials + token + one)
    else:
        is_here = (target >= 0) & (target < vocab)
        found = widened(tl.load(row + target, mask=is_here, other=0.0))
        tl.store(of_target + token + one, found)
        # One running maximum and sum for each lane; their sums are taken once, at the end.
        tops = tl.full((BLOCK,), float("-inf"), tl.float32)
        totals = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, vocab, BLOCK):
            inside = begin + lanes < vocab
            x = widened(tl.load(row + begin + lanes, mask=inside, other=float("-inf")))
            higher = tl.maximum(tops, x)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            totals = totals * tl.exp(tops - shift) + tl.exp(x - shift)
            tops = higher
        top = tl.max(tops, axis=0) + tl.zeros((1,), tl.float32)
        shift = tl.where(top == float("-inf"), 0.0, top)  # no logit is larger
        total = tl.sum(totals * tl.exp(tops - shift), axis=0) + tl.zeros((1,), tl.float32)
        tl.store(largest + token + one, top)
        tl.store(exponentials + token + one, total)
    if WITH_GRAD:
        dtype: tl.constexpr = logits.dtype.element_ty
        for begin in range(0, vocab, BLOCK):
            cols = begin + lanes
            inside = cols < vocab
            x = widened(tl.load(row + cols, mask=inside, other=0.0))
            grad = tl.exp(x - top) / total - tl.where(cols == target, 1.0, 0.0)
            grad = tl.where(target == ignore, 0.0, grad * grad_scale)
            grad = rounded(grad, dtype, HARDWARE)
            tl.store(row + cols, narrowed(grad, dtype, HARDWARE), mask=inside)
