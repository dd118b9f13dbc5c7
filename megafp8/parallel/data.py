"""Sum gradients over data-parallel replicas while the backward pass still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megafp8.parallel.collectives import Axis
from megafp8.precision.grad_sink import ComputeGrad, GradSink
from megafp8.precision.scaling import Pending


@dataclass
class Bucket:
    """Holds the gradients of consecutive parameters, which are reduced together.

    If `is_scattered`, each rank gets only its own range of the sum, in place.
    """

    gradient: torch.Tensor  # a view of the flat gradient buffer
    params: frozenset[nn.Parameter]
    is_scattered: bool = False
    reduced: Pending | None = field(default=None)  # the reduction that has been started


@dataclass(frozen=True)
class _Plan:
    """Says what a step with some number of microbatches does."""

    order: list[int]  # the order in which buckets become complete
    num_gradients: dict[int, int]  # the gradients of a step, by bucket


class GradReducer:
    """Sums buckets of gradients over `axis`, each as soon as its last gradient has been added.

    The first step with a given number of microbatches records how many gradients each parameter
    gets and in which order buckets become complete; that step is reduced at its end. All ranks run
    the same program and so record the same. The bounds of buckets are fixed, so the sums are the
    same bit for bit whenever a bucket is reduced.
    """

    def __init__(self, axis: Axis, *, dtype: torch.dtype = torch.float32) -> None:
        """Make a reducer without buckets; `dtype` is what gradients are sent in.

        BF16 halves the bytes that are sent and rounds each addend.
        """
        self.axis, self.dtype = axis, dtype
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._plans: dict[int, _Plan] = {}  # the plan for each number of microbatches
        self._num_microbatches = 0
        self._seen: list[nn.Parameter] = []  # this step's gradients, while there is no plan
        self._missing: dict[int, int] = {}  # the gradients that a bucket still waits for
        self._order: list[Bucket] = []  # buckets to reduce, the last one first

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets that are reduced from now on; call it once, before the first step."""
        assert not self.buckets, "buckets are attached already"
        self.buckets = list(buckets)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        for param in self._bucket_of:  # for gradients that autograd accumulates
            param.register_post_accumulate_grad_hook(self._note)

    def begin_step(self, num_microbatches: int) -> None:
        """Expect the gradients of a step of `num_microbatches` microbatches."""
        self._num_microbatches = num_microbatches
        self._seen.clear()
        plan = self._plans.get(num_microbatches)
        self._missing = {} if plan is None else dict(plan.num_gradients)
        self._order = [] if plan is None else [self.buckets[i] for i in reversed(plan.order)]

    def note(self, param: nn.Parameter) -> None:
        """Note that a gradient of `param` has been added; reduce its bucket if it was the last
        one.
        """
        if self._num_microbatches not in self._plans:
            self._seen.append(param)
            return
        bucket = self._bucket_of[param]
        assert bucket.reduced is None, "a gradient came after its bucket was reduced"
        self._missing[id(bucket)] -= 1
        while self._order and self._missing[id(self._order[-1])] == 0:
            self._start(self._order.pop())

    def finish(self) -> None:
        """Reduce what is left and wait until all sums are in the buffer."""
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
        """Return the plan that follows from the gradients of this step, in their order."""
        counts = Counter(self._seen)
        last = {param: number for number, param in enumerate(self._seen)}
        # A bucket whose parameter gets no gradient is zeroed and reduced at the end.
        full = [i for i, b in enumerate(self.buckets) if all(counts[p] for p in b.params)]
        order = sorted(full, key=lambda i: max(last[p] for p in self.buckets[i].params))
        return _Plan(order, {id(b): sum(counts[p] for p in b.params) for b in self.buckets})

    def _start(self, bucket: Bucket) -> None:
        sent = bucket.gradient.to(self.dtype)  # no copy if the dtype is the same
        if bucket.is_scattered:
            bucket.reduced = self.axis.start_reduce_scatter_in_place(sent)
        else:
            bucket.reduced = self.axis.start_all_reduce_sum(sent)

    def _note(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        self.note(param)


class NotingSink:
    """Adds gradients through another sink and tells a `GradReducer` of each one."""

    def __init__(self, inner: GradSink, reducer: GradReducer) -> None:
        self.inner, self.reducer = inner, reducer

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        """Add a weight's gradient as the inner sink does; see `GradSink.add`."""
        added = self.inner.add(weight, compute)
        self._note(weight, added)
        return added

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        """Add the gradient of an embedding's rows as the inner sink does; see
        `GradSink.add_rows`.
        """
        added = self.inner.add_rows(weight_VD, rows_T, grad_TD)
        self._note(weight_VD, added)
        return added

    def _note(self, weight: nn.Parameter, added: torch.Tensor | None) -> None:
        if added is None:  # a returned gradient is noted by autograd's hook
            self.reducer.note(weight)


def buckets_of(
    flat_grad: torch.Tensor, params: Sequence[nn.Parameter], bucket_bytes: int
) -> list[Bucket]:
    """Return buckets of consecutive parameters, in the buffer's order, of about `bucket_bytes`
    each.
    """
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
