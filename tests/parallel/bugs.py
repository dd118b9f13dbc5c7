"""Mistakes that parallel code is likely to have, to be found by the checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megafp8.backends.te.layer import TeLayer
from megafp8.fp8.scaling import Pending
from megafp8.parallel.collectives import Axis
from megafp8.parallel.parts import linears_of
from megafp8.parallel.tensor import ColumnParallel, RowParallel
from megafp8.train.state import TrainState


def plant(bug: str, state: TrainState) -> None:
    {
        "amax is not reduced": _amax_over_nobody,
        "amax is reduced over replicas alone": _amax_over_replicas,
        "output is not summed": lambda s: _rows(s, 0),
        "output is summed twice": lambda s: _rows(s, 2),
        "grad_input is not summed": lambda s: _columns(s, 0),
        "grad_input is summed twice": lambda s: _columns(s, 2),
        "gradients are not summed": lambda s: _gradients(s, 0),
        "gradients are summed twice": lambda s: _gradients(s, 2),
        "norms' gradients are not summed": lambda s: _norms(s, 0),
        "norms' gradients are summed twice": lambda s: _norms(s, 2),
        "tied gradients are not summed": lambda s: _tied(s, 0),
        "tied gradients are summed twice": lambda s: _tied(s, 2),
        "gradients' scales are not sent": _scales_unsent,
        "te's output is not summed": lambda s: _te_alone(s, "self_attention.proj"),
        "te's grad_input is not summed": lambda s: _te_alone(s, "self_attention.layernorm_qkv"),
        "te's amax is not reduced": _te_amax_over_nobody,
        "muon orthogonalizes its own part": lambda s: _muon(s, tp=Axis("tp")),
        "muon takes another rank's part": _muon_of_another,
        "muon sees this rank's rows alone": _muon_of_own_rows,
    }[bug](state)


def _muon(state: TrainState, **axes: Axis) -> None:
    for name, axis in axes.items():
        setattr(state.optimizer.optimizers[0], name, axis)


def _muon_of_another(state: TrainState) -> None:
    tp = state.mesh.tp
    _muon(state, tp=replace(tp, rank=tp.size - 1 - tp.rank))


class OwnRows(Axis):
    """An axis on which a rank takes its own rows for those of all."""

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size)


def _muon_of_own_rows(state: TrainState) -> None:
    shards = state.masters.shards
    _muon(state, _shards=OwnRows(**vars(shards)))


def _this_rank_alone() -> dist.ProcessGroup:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _te_alone(state: TrainState, path: str) -> None:
    """One module of each of Transformer Engine's layers sums over this rank alone."""
    for module in state.model.modules():
        if isinstance(module, TeLayer):
            module.layer.get_submodule(path).tp_group = _this_rank_alone()  # type: ignore[assignment]


def _te_amax_over_nobody(state: TrainState) -> None:
    state.scaling.region.group = _this_rank_alone()  # type: ignore[union-attr]


class Unsent(Axis):
    """An axis on which a rank takes its own FP32 numbers for everybody's."""

    def start_all_gather_in_place(self, tensor: torch.Tensor) -> Pending:
        if tensor.dtype == torch.float32:
            return Pending(tensor)
        return super().start_all_gather_in_place(tensor)


def _scales_unsent(state: TrainState) -> None:
    assert state.reducer is not None
    for bucket, axis in state.reducer.axis_of.items():
        unsent = Unsent(axis.name, axis.size, axis.rank, axis.group, axis.traffic)
        state.reducer.axis_of[bucket] = unsent


def _amax_over_nobody(state: TrainState) -> None:
    state.scaling._start_reduce_max = None  # type: ignore[union-attr]


def _amax_over_replicas(state: TrainState) -> None:
    state.scaling._start_reduce_max = state.mesh.dp.start_all_reduce_max  # type: ignore[union-attr]


class _Repeated:
    """An axis whose sums are done `times` times."""

    def __init__(self, axis: Any, times: int) -> None:
        self.axis, self.times = axis, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.axis, name)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            self.axis.all_reduce_sum(tensor)
        return tensor

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        return Pending(self.all_reduce_sum(tensor))

    def start_reduce_scatter_sum(self, tensor: torch.Tensor) -> Pending:
        """One time too many: over all ranks' parts, which are of other tokens."""
        if self.times == 0:
            return Pending(tensor.chunk(self.axis.size)[self.axis.rank])
        own = self.axis.start_reduce_scatter_sum(tensor).wait()
        for _ in range(self.times - 1):
            self.axis.all_reduce_sum(own)
        return Pending(own)


def _rows(state: TrainState, times: int) -> None:
    for linear in linears_of(state.model):
        if isinstance(linear.comm, RowParallel):
            linear.comm = replace(linear.comm, tp=_Repeated(linear.comm.tp, times))


def _columns(state: TrainState, times: int) -> None:
    for linear in linears_of(state.model):
        if isinstance(linear.comm, ColumnParallel):
            linear.comm = replace(linear.comm, tp=_Repeated(linear.comm.tp, times))


def _gradients(state: TrainState, times: int) -> None:
    assert state.reducer is not None
    for bucket, axis in state.reducer.axis_of.items():
        state.reducer.axis_of[bucket] = _Repeated(axis, times)  # type: ignore[assignment]


def _tied(state: TrainState, times: int) -> None:
    state.mesh = replace(state.mesh, ends=_Repeated(state.mesh.ends, times))  # type: ignore[arg-type]


def _norms(state: TrainState, times: int) -> None:
    """Of parameters that every rank has whole, where ranks share the sequence."""
    state.mesh = replace(state.mesh, tp=_Repeated(state.mesh.tp, times))  # type: ignore[arg-type]
