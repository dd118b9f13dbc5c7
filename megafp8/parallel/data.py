"""Data parallelism: gradients are summed over replicas, while backward still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megafp8.parallel.collectives import Axis, Pending
from megafp8.precision.grad_sink import ComputeGrad, GradSink


@dataclass
class Bucket:
    """Consecutive parameters' gradients, reduced together.

    `is_scattered`: of the sum each rank gets its own range alone, in place.
    """

    gradient: torch.Tensor  # a part of the flat buffer
    params: frozenset[nn.Parameter]
    is_scattered: bool = False
    reduced: Pending | None = field(default=None)  # under way


@dataclass(frozen=True)
class _Plan:
    """What a step with some number of microbatches does."""

    order: list[int]  # in which buckets become complete
    num_gradients: dict[int, int]  # of a step, by bucket


class GradReducer:
    """Sums buckets of gradients over `axis`, each as soon as its last gradient is in.

    How many gradients a parameter gets in a step is seen in the first step with that number of
    microbatches, which is reduced at its end, and so is the order in which buckets become complete.
    Ranks run the same program and agree on both. The sums are the same, bit for bit, whenever a
    bucket is reduced: its bounds are fixed.
    """

    def __init__(
        self, buckets: Sequence[Bucket], axis: Axis, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """BF16 halves what is sent and rounds each addend."""
        self.axis, self.dtype = axis, dtype
        self.buckets = list(buckets)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self._plans: dict[int, _Plan] = {}  # by number of microbatches
        self._num_microbatches = 0
        self._seen: list[nn.Parameter] = []  # of this step, where there is no plan yet
        self._missing: dict[int, int] = {}  # gradients still to come, by bucket
        self._order: list[Bucket] = []  # still to be reduced, last one first
        for param in self._bucket_of:  # what autograd delivers; the sink has taken it by then
            param.register_post_accumulate_grad_hook(self._note)

    def begin_step(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._seen.clear()
        plan = self._plans.get(num_microbatches)
        self._missing = {} if plan is None else dict(plan.num_gradients)
        self._order = [] if plan is None else [self.buckets[i] for i in reversed(plan.order)]

    def note(self, param: nn.Parameter) -> None:
        """A gradient of `param` is in its sum."""
        if self._num_microbatches not in self._plans:
            self._seen.append(param)
            return
        bucket = self._bucket_of[param]
        assert bucket.reduced is None, "a gradient came after its bucket was reduced"
        self._missing[id(bucket)] -= 1
        while self._order and self._missing[id(self._order[-1])] == 0:
            self._start(self._order.pop())

    def finish(self) -> None:
        """All sums are in the buffer."""
        if self._num_microbatches not in self._plans:
            self._plans[self._num_microbatches] = self._plan()
        for bucket in self.buckets:
            if bucket.reduced is None:
                self._start(bucket)
        for bucket in self.buckets:
            assert bucket.reduced is not None
            total = bucket.reduced.wait()
            if total.dtype != bucket.gradient.dtype:
                mine = self.axis.own_part(bucket.gradient)
                (mine if bucket.is_scattered else bucket.gradient).copy_(total)
            bucket.reduced = None

    def _plan(self) -> _Plan:
        """From the gradients that this step has seen, in their order."""
        counts = Counter(self._seen)
        last = {param: number for number, param in enumerate(self._seen)}
        # A bucket with a parameter that gets no gradient is for the end: it is zeroed there.
        full = [i for i, b in enumerate(self.buckets) if all(counts[p] for p in b.params)]
        order = sorted(full, key=lambda i: max(last[p] for p in self.buckets[i].params))
        return _Plan(order, {id(b): sum(counts[p] for p in b.params) for b in self.buckets})

    def _start(self, bucket: Bucket) -> None:
        sent = bucket.gradient.to(self.dtype)  # itself if it has the dtype
        if bucket.is_scattered:
            bucket.reduced = self.axis.start_reduce_scatter_in_place(sent)
        else:
            bucket.reduced = self.axis.start_all_reduce_sum(sent)

    def _note(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        self.note(param)


class NotingSink:
    """Tells a reducer of each gradient that has been added."""

    def __init__(self, inner: GradSink) -> None:
        self.inner = inner
        self.reducer: GradReducer | None = None  # made when the model is there

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        added = self.inner.add(weight, compute)
        self._note(weight, added)
        return added

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        added = self.inner.add_rows(weight_VD, rows_T, grad_TD)
        self._note(weight_VD, added)
        return added

    def _note(self, weight: nn.Parameter, added: torch.Tensor | None) -> None:
        if added is None and self.reducer is not None:  # else autograd will deliver it
            self.reducer.note(weight)


def buckets_of(
    flat_grad: torch.Tensor, params: Sequence[nn.Parameter], bucket_bytes: int
) -> list[Bucket]:
    """Consecutive parameters, in the order of the buffer, until `bucket_bytes` are reached."""
    size = bucket_bytes // flat_grad.element_size()
    buckets: list[Bucket] = []
    begin = end = 0
    held: list[nn.Parameter] = []
    for param in params:
        held.append(param)
        end += param.numel()
        if end - begin >= size:
            buckets.append(Bucket(flat_grad[begin:end], frozenset(held)))
            begin, held = end, []
    if held:
        buckets.append(Bucket(flat_grad[begin:end], frozenset(held)))
    return buckets
