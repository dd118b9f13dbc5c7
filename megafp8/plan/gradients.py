"""Compute what gradients in low precision (FP8-LM) take on a rank until they are sums."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.plan.shape import (
    FP32,
    Parameter,
    assign_whole_tensors,
    divides_elements,
    num_microbatches,
)
from megafp8.specs import RunSpec
from megafp8.specs.optim import ITEM_BYTES


def has_low_precision(spec: RunSpec, param: Parameter) -> bool:
    """Whether a gradient is in low precision throughout a step, and has a scale."""
    storage = spec.optim.storage
    return param.is_linear and not storage.sums_in_fp32 and storage.main_grads != "fp32"


def gradient_bytes(spec: RunSpec, param: Parameter) -> int:
    """Return the bytes of a gradient without its scale where some are in low precision (FP8-LM)."""
    few = ITEM_BYTES[spec.optim.storage.main_grads]
    return param.elements * (few if has_low_precision(spec, param) else FP32)


def passing_gradients(spec: RunSpec, params: Sequence[Parameter]) -> int:
    """Return the gradients that a rank holds for others, at most, under FP8-LM's ZeRO-2.

    With several microbatches they are complete only in the last one's backward pass. With one, they
    are the FP32 gradients and two buckets of the linears'.
    """
    if not spec.optim.shards_grads or spec.optim.storage.is_plain:
        return 0
    ranks = spec.parallel.dp * spec.parallel.cp
    whole = sum(gradient_bytes(spec, param) for param in params)
    others = whole - whole // ranks
    if num_microbatches(spec) > 1:
        return others
    plain = sum(
        gradient_bytes(spec, param)
        for param in params
        if not _is_sent_in_low_precision(spec, param)
    )
    buckets = [sum(held) for held in _shared_buckets(spec, params, in_low_precision=True)]
    item = ITEM_BYTES[spec.optim.storage.main_grads]
    return min(others, plain + 2 * item * max(buckets, default=0))


def _is_sent_in_low_precision(spec: RunSpec, param: Parameter) -> bool:
    """Whether ranks send each other this gradient in low precision (FP8-LM)."""
    return param.is_linear and spec.optim.storage.main_grads != "fp32"


def _shared_buckets(
    spec: RunSpec, params: Sequence[Parameter], *, in_low_precision: bool
) -> list[list[int]]:
    """Return, for each bucket of gradients, how many elements of it each rank sums (FP8-LM).

    The gradients are those in low precision or the others.
    """
    ranks = spec.parallel.dp * spec.parallel.cp
    size = spec.parallel.grad_bucket_bytes // FP32
    is_whole = spec.optim.shards_states and not divides_elements(spec)
    buckets: list[list[int]] = []
    for param, owner in zip(params, assign_whole_tensors(params, ranks), strict=True):
        if _is_sent_in_low_precision(spec, param) != in_low_precision:
            continue
        if not buckets or sum(buckets[-1]) >= size:
            buckets.append([0] * ranks)
        buckets[-1][owner] += param.elements
    if is_whole:
        return buckets
    return [[-(-sum(held) // ranks)] * ranks for held in buckets]


def arriving_bytes(spec: RunSpec, params: Sequence[Parameter]) -> tuple[int, int]:
    """Return what a bucket of gradients needs while backward passes run, and what after them.

    FP32 gradients and a bucket that is the only one are complete at the end alone (FP8-LM).
    """
    early, last = (_of_a_bucket(spec, params, in_low_precision=few) for few in (True, False))
    if early and len(_shared_buckets(spec, params, in_low_precision=True)) == 1:
        early, last = 0, max(early, last)
    return early, last


def _of_a_bucket(spec: RunSpec, params: Sequence[Parameter], *, in_low_precision: bool) -> int:
    """Return what the rank that sums most of a bucket of gradients needs for it (FP8-LM).

    In a round of the exchange at most an equal share of the bucket arrives from each rank. Sums of
    numbers in low precision are FP32 until their scales are known. What is sent in several rounds,
    or in another dtype than that of the sums, is copied (`parallel/scaled_data.py`).
    """
    storage, ranks = spec.optim.storage, spec.parallel.dp * spec.parallel.cp
    is_exchanged = in_low_precision or spec.optim.shards_states  # otherwise all-reduced in place
    if storage.is_plain or ranks == 1 or not is_exchanged:
        return 0
    dtype = storage.main_grads if in_low_precision else spec.parallel.grad_reduce_dtype
    most = 0
    for held in _shared_buckets(spec, params, in_low_precision=in_low_precision):
        share = -(-sum(held) // ranks)
        first_round = [min(part, share) for part in held]
        copied = sum(first_round) if max(held) > share and max(held) < sum(held) else 0
        if not in_low_precision and dtype != "fp32":
            copied += sum(held)
        total = max(held) if in_low_precision else 0
        most = max(most, ITEM_BYTES[dtype] * (ranks * share + copied) + FP32 * total)
    return most
