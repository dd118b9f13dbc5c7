"""Sum gradients over data-parallel replicas while the backward pass still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from megafp8.fp8.grad_sink import ComputeGrad, GradSink
from megafp8.fp8.scaling import Pending
from megafp8.parallel.collectives import Axis


class GradBucket(Protocol):
    """Hold gradients that are reduced together, in one step or in several.

    All ranks call the methods at the same points of a step.
    """

    starts_early: bool  # whether gradients are complete as soon as the last of them was added
    num_gradients: int  # those that sinks keep of a microbatch, if known before a step, or 0

    @property
    def params(self) -> frozenset[nn.Parameter]:
        """Return the parameters whose gradients are in the bucket."""

    @property
    def has_started(self) -> bool:
        """Whether the reduction has been started and not ended."""

    def start(self, axis: Axis, dtype: torch.dtype) -> None:
        """Start the reduction; FP32 gradients are sent in `dtype`."""

    def advance(self, axis: Axis) -> bool:
        """Take the next step of a started reduction; return whether there are more."""

    def finish(self, axis: Axis) -> None:
        """Take all steps that are left, and wait until the sums are in their place."""


@dataclass
class Bucket:
    """Hold the FP32 gradients of consecutive parameters, which one operation reduces.

    If `is_scattered`, each rank gets only its own range of the sum, in place.
    """

    gradient: torch.Tensor  # a view of the flat gradient buffer
    params: frozenset[nn.Parameter]
    is_scattered: bool = False
    starts_early: bool = True
    num_gradients: int = 0
    reduced: Pending | None = field(default=None)  # the reduction that has been started

    @property
    def has_started(self) -> bool:
        """Whether the reduction has been started and not ended."""
        return self.reduced is not None

    def start(self, axis: Axis, dtype: torch.dtype) -> None:
        """Start to sum the gradients over `axis`, in `dtype`."""
        sent = self.gradient.to(dtype)  # rounds what is sent; no copy if the dtype is the same
        if self.is_scattered:
            self.reduced = axis.start_reduce_scatter_in_place(sent)
        else:
            self.reduced = axis.start_all_reduce_sum(sent)

    def advance(self, axis: Axis) -> bool:
        """Do nothing: there is one step, which `start` takes."""
        return False

    def finish(self, axis: Axis) -> None:
        """Wait until the sums are in the buffer."""
        assert self.reduced is not None
        total = self.reduced.wait()
        if total.dtype != self.gradient.dtype:
            mine = axis.own_part(self.gradient)
            (mine if self.is_scattered else self.gradient).copy_(total)
        self.reduced = None


@dataclass(frozen=True)
class _Plan:
    """Say what a step with some number of microbatches does."""

    order: list[int]  # the order in which buckets become complete
    num_gradients: dict[int, int]  # the gradients of a step, by bucket


class GradReducer:
    """Sum buckets of gradients over ranks, each as soon as its last gradient has been added.

    The first step with a given number of microbatches records how many gradients each parameter
    gets and in which order buckets become complete; that step is reduced at its end, but for
    buckets that know their number of gradients. All ranks run the same program and so record the
    same. The bounds of buckets are fixed, so the sums are the same bit for bit whenever a bucket is
    reduced. Dictionaries have a bucket by its `id`, since buckets change and so are no keys.
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        """Make a reducer without buckets; `dtype` is what gradients are sent in.

        BF16 halves the bytes that are sent and rounds each addend.
        """
        self.dtype = dtype
        self.axis_of: dict[int, Axis] = {}  # over which each bucket is summed, by its id
        self.at_the_end = False  # reduce nothing before `finish`
        self.buckets: list[GradBucket] = []
        self._bucket_of: dict[nn.Parameter, GradBucket] = {}
        self._plans: dict[int, _Plan] = {}  # the plan for each number of microbatches
        self._num_microbatches = 0
        self._seen: list[nn.Parameter] = []  # this step's gradients, while there is no plan
        self._missing: dict[int, int] = {}  # how many gradients a bucket waits for, by its id
        self._order: list[GradBucket] = []  # buckets to reduce, the last one first
        self._under_way: list[GradBucket] = []  # started ones that have steps left

    def attach(self, buckets: Sequence[GradBucket], axis: Axis) -> None:
        """Take buckets that are summed over `axis` from now on; called before the first step."""
        self.buckets += buckets
        self.axis_of |= dict.fromkeys(map(id, buckets), axis)
        bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        assert not bucket_of.keys() & self._bucket_of.keys(), "buckets are attached already"
        self._bucket_of |= bucket_of
        for param in bucket_of:  # for gradients that autograd accumulates
            param.register_post_accumulate_grad_hook(self._note)

    def begin_step(self, num_microbatches: int) -> None:
        """Expect the gradients of a step of `num_microbatches` microbatches."""
        self._num_microbatches = num_microbatches
        self._seen.clear()
        plan = self._plans.get(num_microbatches)
        known = {id(b): b.num_gradients * num_microbatches for b in self.buckets if b.num_gradients}
        self._missing = known if plan is None else dict(plan.num_gradients)
        self._order = [] if plan is None else [self.buckets[i] for i in reversed(plan.order)]

    def note(self, param: nn.Parameter) -> None:
        """Note that a gradient of `param` has been added; reduce its bucket if it was the last
        one.
        """
        if self.at_the_end:
            return
        bucket = self._bucket_of[param]
        if self._num_microbatches not in self._plans:
            self._seen.append(param)
            if bucket.num_gradients:
                assert not bucket.has_started, "a gradient came after its bucket was reduced"
                self._missing[id(bucket)] -= 1
                if self._missing[id(bucket)] == 0:
                    self._start(bucket)
            return
        assert not bucket.has_started, "a gradient came after its bucket was reduced"
        self._missing[id(bucket)] -= 1
        while self._order and self._missing[id(self._order[-1])] == 0:
            self._start(self._order.pop())

    def finish(self) -> None:
        """Reduce what is left and wait until all sums are in the buffer."""
        if self._num_microbatches not in self._plans:
            self._plans[self._num_microbatches] = self._plan()
        for bucket in self.buckets:
            if not bucket.has_started:
                self._start(bucket)
        while self._under_way:
            self._advance()
        for bucket in self.buckets:
            bucket.finish(self.axis_of[id(bucket)])

    def _plan(self) -> _Plan:
        """Return the plan that follows from the gradients of this step, in their order."""
        counts = Counter(self._seen)
        last = {param: number for number, param in enumerate(self._seen)}
        # A bucket whose parameter gets no gradient is zeroed and reduced at the end.
        early = [(i, b) for i, b in enumerate(self.buckets) if b.starts_early]
        full = [i for i, b in early if all(counts[p] for p in b.params)]
        order = sorted(full, key=lambda i: max(last[p] for p in self.buckets[i].params))
        return _Plan(order, {id(b): sum(counts[p] for p in b.params) for b in self.buckets})

    def _start(self, bucket: GradBucket) -> None:
        """Start a bucket's reduction; those under way take their next step first."""
        self._advance()
        bucket.start(self.axis_of[id(bucket)], self.dtype)
        self._under_way.append(bucket)

    def _advance(self) -> None:
        self._under_way = [b for b in self._under_way if b.advance(self.axis_of[id(b)])]

    def _note(self, param: torch.Tensor) -> None:
        """Note what autograd says of a parameter, also where a sink has kept the gradient."""
        assert isinstance(param, nn.Parameter)
        if self._num_microbatches not in self._plans and self._bucket_of[param].num_gradients:
            self._seen.append(param)  # its sink notes the gradient itself
        else:
            self.note(param)


class NotingSink:
    """Add gradients through another sink and tell a `GradReducer` of each one."""

    def __init__(self, inner: GradSink, reducer: GradReducer) -> None:
        self.inner, self.reducer = inner, reducer

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
    members: list[nn.Parameter] = []
    for param in params:
        members.append(param)
        end += param.numel()
        if end - begin >= size:
            buckets.append(Bucket(flat_grad[begin:end], frozenset(members)))
            begin, members = end, []
    if members:
        buckets.append(Bucket(flat_grad[begin:end], frozenset(members)))
    return buckets
