"""Compute what gradients in low precision (FP8-LM) take on a rank until they are sums."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.specs import RunSpec
from megafp8.specs.division import Division, Places
from megafp8.specs.held import frees_gradients
from megafp8.specs.optim import ITEM_BYTES
from megafp8.specs.rank_shape import FP32, num_microbatches, shard_ranks, way_of


def passing_gradients(spec: RunSpec, division: Division, rank: int, in_flight: int) -> int:
    """Return the bytes of gradients that a rank holds in a step, at most, beside those it keeps.

    They are FP32 sums of gradients that are stored in low precision, and under ZeRO-2 those of
    other ranks. With several microbatches the latter are complete only in the last one's backward
    pass. With one, they are the FP32 gradients and two buckets of the linears'; its sums grow while
    the backward pass frees the activations, `in_flight` bytes.
    """
    low_precision = [places for places in division.grads if places.kind != "fp32"]
    sums = 0
    if spec.optim.storage.sums_in_fp32:
        sums = FP32 * sum(sum(places.sizes) for places in low_precision)
        if num_microbatches(spec) == 1:
            sums = max(0, sums - in_flight)
    if not frees_gradients(spec):
        return sums
    sizes = [places.elements * ITEM_BYTES[places.kind] for places in division.grads]
    others = sum(sizes) - sum(p.parts[rank] * ITEM_BYTES[p.kind] for p in division.grads)
    if num_microbatches(spec) > 1:
        return sums + others
    plain = sum(FP32 * places.elements for places in division.grads if places.kind == "fp32")
    buckets = [places.elements * ITEM_BYTES[places.kind] for places in low_precision]
    return sums + min(others, plain + 2 * max(buckets, default=0))


def arriving_bytes(spec: RunSpec, division: Division) -> tuple[int, int]:
    """Return what a bucket of gradients needs while backward passes run, and what after them.

    FP32 gradients and a bucket that is the only one are complete at the end alone (FP8-LM).
    """
    in_place = spec.optim.storage.is_plain and way_of(spec) != "tensors"
    if in_place or shard_ranks(spec) == 1:
        return 0, 0
    low_precision = [places for places in division.grads if places.kind != "fp32"]
    plain = [places for places in division.grads if places.kind == "fp32"]
    early, last = _most_of_a_bucket(spec, low_precision), 0
    if spec.optim.shards_states:  # otherwise FP32 gradients are all-reduced in place
        last = _most_of_a_bucket(spec, plain)
    return (0, max(early, last)) if len(low_precision) == 1 else (early, last)


def _most_of_a_bucket(spec: RunSpec, buckets: Sequence[Places]) -> int:
    """Return the bytes that the largest bucket takes on the rank that sums most of it (FP8-LM).

    These bytes are the parts that arrive, copies of what is sent, and sums. Sums of numbers in low
    precision are FP32 until their scales are known. What is sent in several rounds, or in another
    dtype than that of the sums, is copied (`parallel/scaled_data.py`).
    """
    most_bytes = 0
    for places in buckets:
        is_low_precision = places.kind != "fp32"
        sent_dtype = places.kind if is_low_precision else spec.parallel.grad_reduce_dtype
        # What each rank receives in the first round, which is the largest one.
        received = [part.stop - part.start for part in places.rounds()[0]]
        has_more_rounds = sum(received) < places.elements
        num_receivers = sum(elements > 0 for elements in received)
        # One round, or the range of one rank alone, is sent from where the gradients lie.
        copied = sum(received) if has_more_rounds and num_receivers > 1 else 0
        if sent_dtype != places.kind:
            copied += places.elements
        arriving = len(received) * max(received)  # from every rank, padded to the largest part
        sums = max(places.parts) if is_low_precision else 0
        bucket_bytes = ITEM_BYTES[sent_dtype] * (arriving + copied) + FP32 * sums
        most_bytes = max(most_bytes, bucket_bytes)
    return most_bytes
