"""Keep this rank's rows of a model that FSDP shards: master weights and gradients.

FP8-LM's levels store them as ZeRO does that divides by elements: rows of a tensor have the scale of
the whole one, on which ranks agree before they store new masters and moments. A gradient's rows
have a scale of their own, since no other rank reads them.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import nn

from fp8_numerics.cast import amax_of, raise_amax
from megafp8.fp8.scaled import ScaledTensor, resize_memory
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.ops import torch_private
from megafp8.optim.masters import ALL_IN_FP32, Masters
from megafp8.optim.partitions import Segment, by_group
from megafp8.parallel.fsdp import ShardedModel, local_of
from megafp8.specs import StorageSpec
from megafp8.specs.division import padded_rows
from megafp8.specs.geometry import DENSE


class FsdpMasters(Masters):
    """Hold this rank's rows of each FSDP parameter as master weights.

    In FP32 they are FSDP's own shards. A linear's weight in low precision has its master besides:
    FSDP's shard has no memory then, and what is gathered is read from the master.

    FSDP allocates new FP32 gradients of these rows in every step. In FP8 the sums stay: each
    microbatch's gradient is added as soon as the ranks have summed it, with one rounding, and its
    FP32 rows are freed.
    """

    holds_rows = True

    def __init__(
        self,
        sharded: ShardedModel,
        storage: StorageSpec = ALL_IN_FP32,
        linears: Collection[nn.Parameter] = (),
    ) -> None:
        """Take this rank's rows of all parameters; `linears` are those that `storage` is about."""
        self.shards_of, self._modules = dict(sharded.shards_of), sharded.modules
        self.shards = self.shards_of[DENSE]
        self.storage, self.linears = storage, frozenset(linears)
        self.own_weights = {}  # linears read what FSDP gathers, in the compute dtype or in FP8
        self._gathered_in_fp8 = sharded.gathered_in_fp8
        self.params = list(sharded.params)
        self.params_of = by_group(self.params, self.shards_of)
        self.row_of = None
        if not storage.is_plain:  # rows are parts of tensors
            self.row_of = {param: row for row, param in enumerate(self.params)}
        self.device = local_of(self.params[0]).device
        self.segments, self.masters = [], []
        for param in self.params:
            local = local_of(param.detach())
            if local.numel() == 0:
                continue  # fewer rows than ranks
            shards = sharded.shards_of_param(param)
            rows = padded_rows(param.shape[0], shards.size)
            # The place of the first row, in elements of the whole parameter.
            begin = shards.rank * rows * (param.numel() // param.shape[0])
            self.segments.append(Segment(param, begin, begin + local.numel()))
            self.masters.append(nn.Parameter(local))  # shares its memory
        one, fmt = torch.ones((), device=self.device), STORAGE_FORMATS["fp32"]
        self.stored = [ScaledTensor(master.detach(), one, fmt) for master in self.masters]
        self.stored_grads = list(self.stored)
        if not storage.is_plain:  # what the first step allocates
            self.stored_grads = [ScaledTensor(_shape_of(x), one, fmt) for x in self.masters]
        self._own: dict[nn.Parameter, ScaledTensor] = {}
        self._sums: dict[nn.Parameter, ScaledTensor] = {}
        self._without_grad: set[nn.Parameter] = set()
        self._scales = torch.ones(0, device=self.device)
        if storage.main_params != "fp32":
            self._store_linears(sharded)
        if storage.main_grads != "fp32":
            self._sum_in_low_precision(sharded)
        self.grads, self.own_grads, self.param_grads = [], [], []

    def _store_linears(self, sharded: ShardedModel) -> None:
        """Store the masters of linears in low precision, and gather their weights from these."""
        assert self.row_of is not None
        fmt = STORAGE_FORMATS[self.storage.main_params]
        amaxes = torch.zeros(len(self.params), device=self.device)
        for param in self.linears:
            if (local := local_of(param.detach())).numel():
                amaxes[self.row_of[param]] = amax_of(local)
        self.agree(amaxes)
        linears = [param for param in self.params if param in self.linears]
        sharded.gather_from({param: partial(self.rows_of, param) for param in linears})
        index_of = {segment.param: index for index, segment in enumerate(self.segments)}
        for param in linears:
            local = local_of(param.detach())
            if (index := index_of.get(param)) is not None:
                stored = ScaledTensor.zeros(local.shape, fmt, self.device)
                stored.store(local, amax=amaxes[self.row_of[param]])
                self._own[param] = self.stored[index] = stored
                self.masters[index] = nn.Parameter(stored.payload)
            resize_memory(local, has_memory=False)  # now, so that no rank has all of both

    def _sum_in_low_precision(self, sharded: ShardedModel) -> None:
        """Keep the sums of linears' gradients in low precision, and send them in FP8."""
        fmt = STORAGE_FORMATS[self.storage.main_grads]
        rows = [row for row, segment in enumerate(self.segments) if segment.param in self.linears]
        self._scales = torch.ones(len(rows), device=self.device)
        for row, scale in zip(rows, self._scales.unbind(), strict=True):
            shape = self.stored[row].payload.shape
            payload = torch.zeros(shape, dtype=fmt.dtype, device=self.device)
            self.stored_grads[row] = ScaledTensor(payload, scale, fmt)
            self._sums[self.segments[row].param] = self.stored_grads[row]
        sharded.sum_in_fp8(self.linears)
        for module in self._modules:
            params = torch_private.fsdp_params(module)
            if any(param in self.linears for param in params):
                for param in params:
                    param.register_post_accumulate_grad_hook(self._take_grad)

    @torch.no_grad()
    def _take_grad(self, param: torch.Tensor) -> None:
        """Add a microbatch's gradient to the sum in FP8; free what FSDP has reduced.

        FSDP's gradients of a module are views of one tensor, so that the others are copied.
        """
        assert isinstance(param, nn.Parameter) and param.grad is not None
        if param in self.linears:
            if (total := self._sums.get(param)) is not None:
                total.add(local_of(param.grad), is_first=param in self._without_grad)
                self._without_grad.discard(param)
            param.grad = None
        elif local_of(param.grad).untyped_storage().nbytes() > local_of(param.grad).nbytes:
            param.grad = param.grad.clone()

    @property
    def held_params(self) -> list[nn.Parameter]:
        return self.masters

    def rows_of(self, param: nn.Parameter) -> torch.Tensor:
        if (stored := self._own.get(param)) is not None:
            return stored.values()
        return local_of(param.detach())

    def begin_step(self) -> None:
        self._without_grad = set(self._sums)
        for param in self.params:
            param.grad = None
        self.grads, self.own_grads, self.param_grads = [], [], []
        self.stored_grads, self.replicated_grads = [], []

    def collect_grads(self) -> None:
        """Take the reduced gradients from the parameters; a parameter without one gets zeros."""
        for param in self._without_grad:
            self._sums[param].zero_()
        self.param_grads = [self._grad_of(param) for param in self.params]
        self.grads = [grad for grad in self.param_grads if grad.numel()]
        fp32, one = STORAGE_FORMATS["fp32"], torch.ones((), device=self.device)
        self.stored_grads = [
            self._sums.get(segment.param) or ScaledTensor(grad, one, fp32)
            for segment, grad in zip(self.segments, self.grads, strict=True)
        ]
        in_fp32 = [
            (segment, grad)
            for segment, grad in zip(self.segments, self.grads, strict=True)
            if segment.param not in self._sums
        ]
        self.own_grads = [grad for _, grad in in_fp32]
        if self._sums:  # to multiply a scale multiplies its gradient
            self.own_grads.append(self._scales)
        self.replicated_grads = [grad for s, grad in in_fp32 if not s.piece.is_sharded]

    def _grad_of(self, param: nn.Parameter) -> torch.Tensor:
        if (total := self._sums.get(param)) is not None:
            return total.payload
        if param.grad is None:  # nothing of this step used it
            return torch.zeros_like(self.rows_of(param))
        return local_of(param.grad)

    def write_back(self) -> None:
        """Free the gathered weights, so that their next use gathers the updated masters.

        For weights that cross ranks in FP8, the ranks also agree on the scale of each whole tensor,
        with one reduction for all amaxes of a group of replicas.
        """
        self.reshard()
        forms = self._gathered_in_fp8
        for name, shards in self.shards_of.items():
            params = [param for param in self.params_of[name] if param in forms]
            if not params:
                continue
            (dtype,) = {forms[param].compute_dtype for param in params}
            amaxes = torch.zeros(len(params), device=self.device)
            for amax, param in zip(amaxes, params, strict=True):
                raise_amax(amax, self.rows_of(param))
            # the amaxes of the rounded weights: rounding is monotone
            amaxes = amaxes.to(dtype).float()
            shards.all_reduce_max(amaxes)
            for amax, param in zip(amaxes, params, strict=True):
                forms[param].agree_on_scale(amax, self.rows_of(param))

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an FP32 tensor of the same shape that has no memory, in a dry run's count either."""
    shape = torch.empty(tensor.shape, device="meta")
    resize_memory(shape, has_memory=False)
    return shape
