"""Shard parameters over replicas with FSDP2 (`fully_shard`), one transformer block at a time.

FSDP keeps FP32 shards of the parameters along their first dim; the shards are the master weights.
It gathers a block's weights in the compute dtype before they are used, and it reduce-scatters the
block's gradients after each microbatch, in FP32 unless configured otherwise. Gradients are summed,
never averaged; the step divides once at its end.

With `fp8_params`, or if torchao is configured to, the weights of linears are sent as FP8 bytes with
a scale that all ranks share. Our products read these bytes; torchao's read their values.

At FP8-LM's levels (`optim/fsdp_masters.py`) the shards of linears are masters in low precision
(`ShardedModel.gather_from`), and their gradients cross ranks in FP8 (`ShardedModel.sum_in_fp8`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_numerics.dtypes import DTYPES
from megafp8.fp8.weights import GatheredForm, GatheredFp8
from megafp8.models.gpt import GPT
from megafp8.models.init import initial_values, pieces_of
from megafp8.ops import torch_private
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import AXES, Mesh, group_of, groups_along
from megafp8.parallel.pipeline import PipelinedGPT
from megafp8.parallel.scaled_data import ScatteredGrads
from megafp8.specs import ParallelSpec
from megafp8.specs.division import padded_rows
from megafp8.specs.geometry import DENSE

if TYPE_CHECKING:  # torch's FSDP imports its tracer and SymPy: a run without it starts sooner
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class ShardedModel:
    """Hold the modules that FSDP gathers and their shards `params`, in the model's order.

    `shards_of` has the ranks that shard the parameters of each group of replicas, by its name.
    """

    modules: tuple[FSDPModule, ...]
    params: tuple[nn.Parameter, ...]
    shards_of: Mapping[str, Axis]
    compute_dtype: torch.dtype
    gathered_in_fp8: dict[nn.Parameter, GatheredForm]  # the `params` that are sent in FP8

    def shards_of_param(self, param: nn.Parameter) -> Axis:
        """Return the ranks that shard a parameter."""
        return self.shards_of[pieces_of(param)[0].group]

    def gather_from(self, values: Mapping[nn.Parameter, Callable[[], torch.Tensor]]) -> None:
        """Gather these parameters as what the functions return; their shards need no memory then.

        A function returns this rank's rows in FP32. What crosses ranks has the compute dtype, or is
        in FP8 as before.
        """
        for param, read in values.items():
            form = self.gathered_in_fp8.get(param)
            rows = padded_rows(param.shape[0], self.shards_of_param(param).size)
            _gather_by_hooks(local_of(param), read, form, self.compute_dtype, rows)
        for module in self.modules:
            torch_private.fsdp_take_hooks(module)

    def sum_in_fp8(self, params: Collection[nn.Parameter]) -> None:
        """Send the gradients of these parameters in FP8, each rank's with its own scale.

        Each rank adds up those of its rows in FP32 (`ScatteredGrads`).
        """
        for module in self.modules:
            module_params = torch_private.fsdp_params(module)
            if not any(param in params for param in module_params):
                continue
            shards = self.shards_of_param(module_params[0])
            sizes = [
                padded_rows(param.shape[0], shards.size) * (param.numel() // param.shape[0])
                for param in module_params
            ]
            grads = ScatteredGrads(sizes, [param in params for param in module_params], shards)
            reduce = torch_private.fsdp_reduce_scatter_by(grads.reduce)
            module.set_custom_reduce_scatter(reduce)


def shard_model(
    model: GPT | PipelinedGPT, mesh: Mesh, spec: ParallelSpec, compute: str
) -> ShardedModel:
    """Shard the model's parameters in place; the unrounded initial weights become the FP32 shards.

    Each stage of a pipeline is sharded by itself, over the replicas of that stage. A module with
    parameters of another group of replicas has these alone, and is sharded over the group's own.

    One layer after the other gets its values and is sharded, so that a rank whose parameters have
    none yet (`values_later`) never holds more than its shards and one layer.
    """
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    assert spec.fsdp is not None and mesh.data.size > 1
    pieces = {name: pieces_of(param) for name, param in model.named_parameters()}
    device_mesh, shards = _device_mesh(mesh, spec)
    shards_of = {DENSE: shards} | {name: group.data for name, group in mesh.groups.items()}
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == "fp32" else DTYPES[compute],
        reduce_dtype=DTYPES[spec.fsdp.grad_reduce_dtype],
        cast_forward_inputs=False,
    )
    shared: dict[str, Any] = {"mesh": device_mesh, "mp_policy": policy}
    stages: Iterable[Any] = model.stages if isinstance(model, PipelinedGPT) else [model]
    for gpt in stages:
        for layer in gpt.layers:
            others = _of_other_groups(layer)  # before other parameters take the place of these
            _give_values(layer, mesh.device)
            reshards = spec.fsdp.strategy != "grad"
            for module, group in others:
                ranks, kind = group_of(shards_of[group]), mesh.device.type
                assert ranks is not None
                over = DeviceMesh.from_group(ranks, kind, mesh_dim_names=("shard",))
                fully_shard(module, reshard_after_forward=reshards, mesh=over, mp_policy=policy)
            fully_shard(layer, reshard_after_forward=reshards, **shared)
        _give_values(gpt, mesh.device)
        fully_shard(gpt, **shared)
        for method in ("logits", "forward_stage"):
            register_fsdp_forward_method(gpt, method)
        if isinstance(model, PipelinedGPT):
            _gather_ahead(gpt)
    modules = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
    for name, param in model.named_parameters():
        param.pieces = pieces[name]  # type: ignore[attr-defined]
    sharded = ShardedModel(modules, tuple(model.parameters()), shards_of, DTYPES[compute], {})
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        params = torch_private.fsdp_params(module)
        own = sharded.shards_of_param(params[0]) if params else shards
        gather = torch_private.fsdp_all_gather(_counted(own, "all_gather"))
        reduce = torch_private.fsdp_reduce_scatter(_counted(own, "reduce_scatter_sum"))
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    for owner in model.modules():
        for path, form in _gathered_forms(owner).items():
            weight = owner.get_parameter(path)
            sharded.gathered_in_fp8[weight] = form
            num_ranks = sharded.shards_of_param(weight).size
            local, rows = local_of(weight), padded_rows(weight.shape[0], num_ranks)
            _gather_by_hooks(local, local.detach, form, form.compute_dtype, rows)
    return sharded


def _of_other_groups(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules of a layer whose own parameters are not dense, and their groups."""
    found = []
    for module in layer.modules():
        groups = {pieces_of(param)[0].group for param in module.parameters(recurse=False)}
        if groups - {DENSE}:
            (group,) = groups
            found.append((module, group))
    return found


def _gather_ahead(gpt: GPT) -> None:
    """Let each layer's backward pass gather the weights of the layer before it.

    FSDP's own order is that of the last forward pass. A pipeline has several microbatches in
    flight: the first layer would gather the last one's weights again, and backward passes in a row
    would gather nothing ahead.
    """
    from torch.distributed.fsdp import FSDPModule

    modules: list[Any] = [gpt, *gpt.layers]
    for index, module in enumerate(modules):  # the stage itself begins with its last layer
        assert isinstance(module, FSDPModule)
        module.set_modules_to_backward_prefetch([modules[index - 1]])


def _give_values(module: nn.Module, device: torch.device) -> None:
    """Give the parameters that are not sharded yet their initial values, in FP32."""
    params = [param for param in module.parameters() if not _is_sharded(param)]
    values = dict(zip(params, initial_values(params, device), strict=True))
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            if param not in values:
                continue
            if param.is_meta and param not in fresh:
                fresh[param] = nn.Parameter(values[param])  # no memory can be given to the other
            if param in fresh:
                setattr(owner, name, fresh[param])
            else:
                param.data = values[param]
                param.initial_master = None  # type: ignore[attr-defined]


def _gathered_forms(owner: nn.Module) -> dict[str, GatheredForm]:
    """Return what casts those of a module's weights that are gathered in FP8, by their paths."""
    form = getattr(owner, "weight_form", None)
    if isinstance(form, GatheredFp8):
        return {"weight": form}
    return dict(getattr(owner, "gathered", {}))


def _gather_by_hooks(
    local_RI: Any,
    read_master: Callable[[], torch.Tensor],
    form: GatheredForm | None,
    compute: torch.dtype,
    padded_rows: int,
) -> None:
    """Attach FSDP's two all-gather hooks to a shard, which stays an ordinary tensor.

    `read_master` returns this rank's rows [R, I]. They are rounded to `compute` and sent as FP8
    bytes of `form`, or as they are. FSDP calls `pre_all_gather` on its own stream and
    `post_all_gather` on the compute stream. It drops the metadata before `post_all_gather` has run,
    so these have no tensors; `form` holds what both need. FSDP fixes the hooks' arguments.
    """

    def pre_all_gather(
        mesh: DeviceMesh, size: torch.Size, stride: object, module: object, policy: object
    ) -> tuple[tuple[torch.Tensor], int]:
        """Return what this rank sends, with rows of padding, and the rows of the whole weight."""
        # Rounded first, so that FP8 bytes are those of a weight kept in the compute dtype.
        rows_RI = read_master().to(compute)
        rows_RI = rows_RI if form is None else form.bytes_of(rows_RI)
        payload = torch.zeros(padded_rows, size[1], dtype=rows_RI.dtype, device=rows_RI.device)
        payload[: rows_RI.shape[0]] = rows_RI
        return (payload,), size[0]

    @torch.no_grad()
    def post_all_gather(
        gathered: tuple[torch.Tensor],
        num_rows: int,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the weight and what FSDP must keep alive for it; with `out`, fill that instead."""
        if form is None:  # FSDP gathers into the memory of the parameter itself
            return (gathered[0], ()) if out is None else None
        weight = form.receive(gathered[0], num_rows, dtype, out)
        return weight if out is None else None

    local_RI.fsdp_pre_all_gather, local_RI.fsdp_post_all_gather = pre_all_gather, post_all_gather


def _counted(shards: Axis, kind: str) -> Callable[[torch.Tensor], None]:
    """Return a function that counts a tensor's bytes as sent by a collective of `kind`."""
    return lambda tensor: shards.traffic.add(shards.name, kind, tensor)


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor that FSDP shards; return any other tensor unchanged."""
    return torch_private.local_shard(param) if _is_sharded(param) else param


def grads_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that a module's parameters have; of FSDP's those of this rank's rows."""
    return [local_of(param.grad) for param in module.parameters() if param.grad is not None]


def _is_sharded(param: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(param, DTensor)


def _device_mesh(mesh: Mesh, spec: ParallelSpec) -> tuple[DeviceMesh, Axis]:
    """Return FSDP's device mesh of this rank's replicas, and the axis that shards parameters.

    Under the hybrid strategy the ranks of a node shard the parameters, and ranks of different nodes
    are replicas.
    """
    assert spec.fsdp is not None
    data, kind = mesh.data, mesh.device.type
    assert data.group is not None
    if spec.fsdp.strategy != "hybrid":
        return DeviceMesh.from_group(data.group, kind, mesh_dim_names=("shard",)), data
    # A node's ranks are neighbours, so that each group of replicas runs through the nodes in order.
    share = spec.devices_per_node // spec.tp
    sizes = {axis: getattr(spec, axis) for axis in AXES}
    grids = [  # of each group of replicas: a row for each node
        [ranks[begin : begin + share] for begin in range(0, len(ranks), share)]
        for ranks in groups_along(sizes, ("cp", "dp"))
    ]
    inner, _ = dist.new_subgroups_by_enumeration([row for grid in grids for row in grid])
    columns = [list(column) for grid in grids for column in zip(*grid, strict=True)]
    outer, _ = dist.new_subgroups_by_enumeration(columns)
    (own_grid,) = (grid for grid in grids if any(mesh.world.rank in row for row in grid))
    names = ("replicate", "shard")
    device_mesh = DeviceMesh.from_group([outer, inner], kind, mesh=own_grid, mesh_dim_names=names)
    return device_mesh, Axis("shard", share, data.rank % share, inner, mesh.traffic)
