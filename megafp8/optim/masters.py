"""Keep FP32 master weights and gradients of a model in BF16 or FP8, and clip the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from megafp8.fp8.cast import raise_amax
from megafp8.models.init import pieces_of
from megafp8.ops import torch_private
from megafp8.parallel.collectives import Axis
from megafp8.parallel.fsdp import ShardedModel, local_of
from megafp8.specs import OptimSpec
from megafp8.specs.geometry import Piece

# Quantizes a master's values into a parameter that cannot take a copy of them.
Store = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Segment:
    """Name the elements `begin` to `end` (exclusive) of a parameter, in memory order.

    `piece` is the parameter's first one: all of them are sharded or replicas, or none is.
    """

    param: nn.Parameter
    begin: int
    end: int
    piece: Piece = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "piece", pieces_of(self.param)[0])


class Masters:
    """Hold one FP32 master weight for each parameter, and all gradients in one flat FP32 buffer.

    For an FP32 parameter the master weight *is* the parameter. Sharded parameters come first in the
    buffer, so that the gradient norm needs two ranges, and one division, clip and reduction serve
    all. `stores` has, for each parameter kept in FP8, the function that quantizes its master into
    it.

        params         all parameters of this rank
        param_grads    their gradients, as the backward pass fills them
        segments       what this rank updates: whole parameters, or shards (`ShardedMasters`)
        masters        the FP32 master weight of each segment
        grads          the FP32 gradient of each segment, valid after the reduction
        own_grads      flat ranges that hold all of `grads`
        shards         the ranks that update the other segments
    """

    shards: Axis

    def __init__(
        self, params: Iterable[nn.Parameter], stores: Mapping[nn.Parameter, Store] | None = None
    ) -> None:
        self.shards, self._stores = Axis("shards"), dict(stores or {})
        self.params = sorted(params, key=lambda p: not pieces_of(p)[0].is_sharded)
        self.device = device = self.params[0].device
        self.masters = [initial_master(param) for param in self.params]
        sizes = [param.numel() for param in self.params]
        self.flat_grad = torch.zeros(sum(sizes), device=device)
        views = self.flat_grad.split(sizes)
        self.grads = [view.view_as(param) for view, param in zip(views, self.params, strict=True)]
        self.param_grads, self.own_grads = self.grads, [self.flat_grad]
        self.segments = [Segment(param, 0, param.numel()) for param in self.params]
        num_sharded = sum(pieces_of(param)[0].is_sharded for param in self.params)
        begin = sum(p.numel() for p in self.params[:num_sharded])
        self.replicated_grads = [self.flat_grad[begin:]]  # whole on every tensor-parallel rank

    @property
    def held_params(self) -> Sequence[torch.Tensor]:
        """Return the memory that parameters occupy on this rank."""
        return self.params

    def begin_step(self) -> None:
        """Prepare for a step; called before its first microbatch."""

    def collect_grads(self) -> None:
        """Make `grads` valid; called after the gradients have been reduced over ranks."""

    def reshard(self) -> None:
        """Free the weights that were gathered for a forward pass without a backward pass."""

    def grads_of(self, param: nn.Parameter) -> list[torch.Tensor]:
        """Return the gradients of the segments of `param` that this rank updates."""
        both = zip(self.segments, self.grads, strict=True)
        return [grad for segment, grad in both if segment.param is param]

    def squared_norms(self) -> torch.Tensor:
        """Return the squared L2 norm of each segment's gradient, FP64 [segments]."""
        return torch.stack(torch_private.norms_of(self.grads)).double().square()

    @cached_property
    def rows_of_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of `squared_norms` to count here: of sharded and of whole parameters.

        Both are int64 [rows], on the device. A list as an index would be copied there in every
        step, and that copy waits until the device has done all that was started before.
        """
        sharded: list[int] = []
        whole: list[int] = []
        for row, segment in enumerate(self.segments):
            if not segment.piece.replica:  # another stage counts a replica
                (sharded if segment.piece.is_sharded else whole).append(row)
        both = (torch.tensor(rows, dtype=torch.int64) for rows in (sharded, whole))
        first, second = (rows.to(self.device, non_blocking=True) for rows in both)
        return first, second

    def is_finite(self, param: nn.Parameter) -> bool:
        """Whether the gradient of `param` on this rank holds neither NaN nor infinity."""
        both = zip(self.params, self.param_grads, strict=True)
        return all(bool(grad.isfinite().all()) for own, grad in both if own is param)

    @contextmanager
    def lend_grads(self) -> Iterator[None]:
        """Set the `.grad` of each master to its gradient inside the context, and to None after it.

        An FP32 master is also a parameter of the model, so autograd would add to a `.grad` that
        stays.
        """
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        yield
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the master weights into the weights that the model computes with."""
        both = zip(self.params, self.masters, strict=True)
        pairs = [(p, m) for p, m in both if p is not m and p not in self._stores]
        if pairs:
            params, masters = zip(*pairs, strict=True)
            torch_private.copy_all_(params, masters)
        for param, master in zip(self.params, self.masters, strict=True):
            if store := self._stores.get(param):
                store(master)


def initial_master(param: nn.Parameter) -> nn.Parameter:
    """Return the FP32 master weight of `param`: its initial values from before any rounding.

    An FP32 parameter that was not rounded is returned itself.
    """
    initial = getattr(param, "initial_master", None)
    if param.dtype == torch.float32 and initial is None:
        return param
    master = param.detach().float() if initial is None else initial.to(param.device)
    param.initial_master = None  # type: ignore[attr-defined]
    return nn.Parameter(master)


class FsdpMasters(Masters):
    """Hold this rank's rows of each FSDP parameter as FP32 master weights.

    FSDP allocates new gradients of these rows in every step.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self.shards, self._modules = sharded.shards, sharded.modules
        self._fp8 = sharded.gathered_in_fp8
        self.params = list(sharded.params)
        self.device = local_of(self.params[0]).device
        self.segments, self.masters = [], []
        for param in self.params:
            local = local_of(param.detach())
            if local.numel() == 0:
                continue  # fewer rows than ranks
            rows = -(-param.shape[0] // self.shards.size)  # torch.chunk's rule
            begin = self.shards.rank * rows * (param.numel() // param.shape[0])
            self.segments.append(Segment(param, begin, begin + local.numel()))
            self.masters.append(nn.Parameter(local))  # shares its memory
        self.grads, self.own_grads, self.param_grads = [], [], []

    @property
    def held_params(self) -> list[nn.Parameter]:
        """Return the memory that parameters occupy on this rank: its FP32 shards."""
        return self.masters

    def begin_step(self) -> None:
        """Drop the gradients of the last step, so that FSDP allocates new ones."""
        for param in self.params:
            param.grad = None

    def collect_grads(self) -> None:
        """Take the reduced gradients from the parameters; a parameter without one gets zeros."""
        self.param_grads = [_grad_of(param) for param in self.params]
        self.grads = [grad for grad in self.param_grads if grad.numel()]
        self.own_grads = self.grads
        self.replicated_grads = [
            grad
            for segment, grad in zip(self.segments, self.grads, strict=True)
            if not segment.piece.is_sharded
        ]

    def write_back(self) -> None:
        """Free the gathered weights, so that their next use gathers the updated masters.

        For weights that cross ranks in FP8, the ranks also agree on the scale of each whole tensor,
        with one reduction for all amaxes.
        """
        self.reshard()
        if not self._fp8:
            return
        parts = [local_of(param.detach()) for param in self._fp8]
        (dtype,) = {form.compute_dtype for form in self._fp8.values()}
        amaxes = torch.zeros(len(parts), device=self.device)
        for amax, part in zip(amaxes, parts, strict=True):
            raise_amax(amax, part)
        amaxes = amaxes.to(dtype).float()  # the amaxes of the rounded weights: rounding is monotone
        self.shards.all_reduce_max(amaxes)
        for amax, part, form in zip(amaxes, parts, self._fp8.values(), strict=True):
            form.agree_on_scale(amax, part)

    def reshard(self) -> None:
        """Free the gathered weights of every module."""
        for module in self._modules:
            module.reshard()


def _grad_of(param: nn.Parameter) -> torch.Tensor:
    if param.grad is None:  # nothing of this step used it
        return torch.zeros_like(local_of(param.detach()))
    return local_of(param.grad)


def grad_norm(masters: Masters, tp: Axis, pp: Axis) -> torch.Tensor:
    """Return the L2 norm of the gradients of the whole logical model, as a 0-d FP64 tensor.

    The squares of sharded parameters are summed over tensor-parallel ranks, and all squares over
    pipeline stages and the optimizer's shards. A replicated parameter counts once: as the mean of
    the tensor-parallel ranks, so that all of them get the same norm, and all learn of a gradient
    that is not finite on one of them.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=masters.device)
    if masters.grads:  # a shard may be all padding
        of_each = masters.squared_norms()
        squares = torch.stack([of_each[rows].sum() for rows in masters.rows_of_norm])
    masters.shards.all_reduce_sum(squares)
    return pp.all_reduce_sum(tp.all_reduce_sum(squares[0] + squares[1] / tp.size)).sqrt()


def coefficient(norm: float, spec: OptimSpec) -> float:
    """Return the factor by which clipping by norm shrinks gradients of this norm, at most 1."""
    if spec.clip_algorithm != "norm":
        return 1.0
    limit = spec.clip_grad_norm or math.inf
    return min(1.0, limit / (norm + 1e-6))  # the constant of torch's clip_grad_norm_


def coefficient_on_device(norm: torch.Tensor, spec: OptimSpec) -> torch.Tensor:
    """Return what `coefficient` returns, with the same bits, for a norm that is on the device.

    Both are 0-d FP64 tensors; clipping is by norm.
    """
    assert spec.clip_algorithm == "norm"
    limit = torch.full_like(norm, spec.clip_grad_norm or math.inf)
    # tensor / tensor is a true division; number / tensor would be a rounded reciprocal times it
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip(
    flat_grads: Sequence[torch.Tensor], norm: float, spec: OptimSpec, *, divisor: float
) -> None:
    """Divide all gradients by `divisor` and clip them, in place.

    `norm` is the norm of the gradients after the division. Clipping by norm shrinks all gradients
    together until their norm is `spec.clip_grad_norm`; clipping by value limits the magnitude of
    each element to it.
    """
    limit, factor = spec.clip_grad_norm or math.inf, coefficient(norm, spec) / divisor
    for flat_grad in flat_grads:
        flat_grad.mul_(factor)
        if spec.clip_algorithm == "value" and limit < math.inf:
            flat_grad.clamp_(-limit, limit)
