"""Runs on ranks of their own whose layers are Transformer Engine's, on a CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import te_cpu
from megafp8.data.loader import Microbatch
from megafp8.models.init import pieces_of
from megafp8.parallel.agreement import gather
from megafp8.parallel.mesh import Mesh, join, single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, PipelineSpec, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.train import state_dict
from megafp8.train.build import build
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from te_cpu.tensors import is_quantized
from tests.backends.te.same_codes import IN_FP32, Casts
from tests.ranks import Rank
from tests.tiny import microbatch
from tests.train.precision_schedule_work import continue_at_every_step


@dataclass
class Found:
    """Of one engine: (loss, gradient norm) of each step, tables after the first, and their rows by
    the name of the tensor (scale, number of updates, history), FLOPs counted, the sizes
    of the groups over which Transformer Engine took a MAX in the first step."""

    results: list[tuple[float, float]] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    flops: dict[Any, int] = field(default_factory=dict)
    maxima: list[int] = field(default_factory=list)


def train(rank: Rank, tp: int, steps: int) -> dict[str, dict[str, Found]]:
    """By what is run, by engine. Sequence parallelism needs no other mesh."""
    mesh = join(ParallelSpec(devices_per_node=rank.size, tp=tp))
    from tests.backends.te.real import DELAYED

    plain = ParallelSpec(devices_per_node=rank.size, tp=tp)
    found = {"delayed": _engines(mesh, DELAYED, plain, steps, follows=True)}
    if tp == 1:
        own = join(replace(plain, tp_only_amax_red=True))
        found["own amaxes"] = _engines(own, DELAYED, plain, steps, follows=True)
    else:
        shared = replace(plain, sequence_parallel=True)
        found["sequence parallel"] = _engines(mesh, DELAYED, shared, steps)
        found["tensorwise"] = _engines(mesh, Fp8Recipe(name="tensorwise"), plain, steps)
    return found


MXFP8 = Fp8Recipe(name="mxfp8", backward_format="e4m3", power_2_scale=True)
IN_PARTS: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "pipeline": {"pp": 2},
    "replicas": {},
    "ZeRO-1": {},
    "FSDP": {"fsdp": FsdpSpec()},
}


Results = list[tuple[float, float]]


def mxfp8(rank: Rank, steps: int) -> dict[str, dict[str, Results]]:
    """Losses and norms of steps in MXFP8 by layout: of both engines, and in one process.

    Every rank has whole blocks of tokens, so that its blocks are those of one process.
    """
    return {layout: _in_layout(rank, layout, MXFP8, "fp32", steps) for layout in IN_PARTS}


def _in_layout(
    rank: Rank, layout: str, recipe: Fp8Recipe, compute: str, steps: int, *, merges: bool = True
) -> dict[str, Results]:
    """By run: Transformer Engine's and ours in a layout, and Transformer Engine's in one process.

    One process takes the microbatches of all replicas, merged into larger ones or one by one.
    """
    from tests.backends.te.real import spec_of, te

    parallel = ParallelSpec(devices_per_node=rank.size, **IN_PARTS[layout])
    mesh, alone = join(parallel), ParallelSpec()
    runs = {"te": ("te", parallel), "native": ("native", parallel), "one process": ("te", alone)}
    found: dict[str, Results] = {}
    for run, (backend, where) in runs.items():
        te.module.base.FP8GlobalStateManager.reset()
        spec = spec_of(backend, recipe, compute, where, hidden_size=64, ffn_hidden_size=128)
        spec = replace(spec, train=replace(spec.train, micro_batch_size=4))
        if layout == "ZeRO-1":
            spec = replace(spec, optim=replace(spec.optim, name="distributed_fused_adam"))
        dp = mesh.dp
        ranks = range(dp.size) if where is alone else [dp.rank]
        state = build(spec, single_rank() if where is alone else mesh)
        results = found[run] = []
        for number in range(steps):
            firsts = [2 * (number * dp.size + replica) for replica in ranks]
            batches = [
                [microbatch(first + index, batch=4) for first in firsts] for index in range(2)
            ]
            one = train_step(state, [merged(b) for b in batches] if merges else sum(batches, []))
            state.step += 1
            results.append((one.loss, one.grad_norm))
    return found


PLAIN_FP4 = Fp8Recipe(name="nvfp4-no_rht-no_sr", backward_format="e4m3")
FP4 = Fp8Recipe(name="nvfp4-no_sr", backward_format="e4m3")


def nvfp4(rank: Rank, steps: int) -> dict[str, dict[str, Results]]:
    """Losses and norms of steps in NVFP4 by layout; with tensor parallelism in BF16 and rotated.

    A microbatch has its own amaxes, so that one process must not merge those of replicas.
    """
    found = {}
    for layout in IN_PARTS:
        is_tensor = layout in ("tensor", "sequence")
        recipe, compute = (FP4, "bf16") if is_tensor else (PLAIN_FP4, "fp32")
        found[layout] = _in_layout(rank, layout, recipe, compute, steps, merges=False)
    return found


def nvfp4_linears(rank: Rank) -> dict[str, dict[str, tuple[torch.Tensor, ...]]]:
    """What a linear of each tensor-parallel kind gets and gives with sequence parallelism.

    By kind: this rank's input, output gradient, weight; output, gradients of input and weight.
    """
    from tests.backends.te.real import autocast, recipes, te

    join(ParallelSpec(devices_per_node=rank.size, tp=rank.size, sequence_parallel=True))
    found: dict[str, dict[str, tuple[torch.Tensor, ...]]] = {}
    for kind in ("column", "row"):
        torch.manual_seed(rank.index)
        linear = te.Linear(
            64, 96, bias=False, params_dtype=torch.bfloat16, parallel_mode=kind,
            sequence_parallel=True, tp_group=dist.group.WORLD, tp_size=rank.size,
        )  # fmt: skip
        with torch.no_grad():
            linear.weight.copy_(torch.randn_like(linear.weight) * (1 + rank.index))
        rows = 32 if kind == "column" else 32 * rank.size
        x = (torch.randn(rows, linear.weight.shape[1]) * (1 + rank.index)).bfloat16()
        x = x.requires_grad_()
        with autocast(recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)):
            out = linear(x)
        grad = (torch.randn_like(out.float()) * (1 + rank.index)).bfloat16()
        out.backward(grad)
        given = x.detach(), grad, linear.weight.detach()
        made = out.detach(), x.grad, linear.weight.grad
        found[kind] = {"given": given, "made": made}
    return found


SCHEDULES = {
    "GPipe": PipelineSpec(schedule="GPipe"),
    "1F1B": PipelineSpec(),
    "interleaved": PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2),
}
LLAMA = {
    "num_query_groups": 2,
    "bias": False,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "position_embedding_type": "rope",
}


def pipelines(rank: Rank, steps: int) -> dict[str, dict[str, Found]]:
    """Two stages by each schedule, four microbatches a step; the last one recomputes layers too."""
    mesh = join(ParallelSpec(devices_per_node=rank.size, pp=rank.size))
    from tests.backends.te.real import DELAYED

    found = {}
    for name, pipeline in SCHEDULES.items():
        parallel = ParallelSpec(devices_per_node=rank.size, pp=rank.size, pipeline=pipeline)
        changes: dict[str, Any] = {"num_layers": 4}
        if name == "interleaved":
            full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
            changes |= LLAMA | {"recompute": full, "hidden_dropout": 0.1}
        found[name] = _engines(mesh, DELAYED, parallel, steps, microbatches=4, **changes)
        found[name]["one process"] = _alone(DELAYED, steps, 4, 1, **changes)
    return found


def together(rank: Rank, steps: int, **axes: Any) -> dict[str, dict[str, Found]]:
    """A layout with recomputation, rotary positions and grouped queries, in BF16 and FP32."""
    parallel = ParallelSpec(devices_per_node=rank.size, **axes)
    mesh = join(parallel)
    from tests.backends.te.real import DELAYED

    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    changes: dict[str, Any] = LLAMA | {"num_layers": 4, "recompute": full}
    found = _engines(mesh, DELAYED, parallel, steps, microbatches=4, **changes)
    found["one process"] = _alone(DELAYED, steps, 4, mesh.dp.size, **changes)
    return {"fp32": found}


def _alone(
    recipe: Fp8Recipe, steps: int, microbatches: int, replicas: int, **changes: Any
) -> Found:
    """Transformer Engine without any parallelism, on every rank by itself.

    A microbatch holds the samples of all replicas' microbatches, so that amaxes are the same. All
    ranks compute the same, so a MAX over all of them, which a group of None means, changes nothing.
    """
    from tests.backends.te.real import run_of, te

    te.module.base.FP8GlobalStateManager.reset()
    state, found = run_of("te", recipe, "fp32", **changes), Found()
    for number in range(steps):
        firsts = [microbatches * (number * replicas + replica) for replica in range(replicas)]
        one = train_step(
            state,
            [
                merged([microbatch(first + index) for first in firsts])
                for index in range(microbatches)
            ],
        )
        state.step += 1
        found.results.append((one.loss, one.grad_norm))
        if number == 0:
            found.rows = rows_of(state)
    return found


def _rows_of_all(mesh: Mesh, state: TrainState) -> list[dict[str, torch.Tensor]]:
    own = {name: row.tolist() for name, row in rows_of(state).items()}
    return [{n: torch.tensor(row) for n, row in rows.items()} for rows in gather(mesh, own)]


def rows_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Scale, number of updates and history of each tensor, by its name."""
    return {
        f"{direction}/{name}": torch.cat(
            [
                table.quant_scale[row, None],
                table.num_updates[row, None].float(),
                table.history[row],
            ]
        )
        for direction, table in state.scaling.tables.items()
        for row, name in enumerate(table.names)
    }


def merged(batches: list[Microbatch]) -> Microbatch:
    """One microbatch of the samples of several."""
    return replace(
        batches[0],
        tokens_BS=np.concatenate([batch.tokens_BS for batch in batches]),
        targets_BS=np.concatenate([batch.targets_BS for batch in batches]),
    )


Sharded = dict[str, tuple[list[tuple[float, float]], dict[str, Any]]]
"""By the name of a run: losses and norms, and all weights and tables."""


def zero(rank: Rank, steps: int) -> dict[str, Sharded]:
    """ZeRO-1 beside the replicated optimizer on the same replicas, by recipe, with weights in BF16
    and in FP8 alone."""
    parallel = ParallelSpec(devices_per_node=rank.size)
    mesh = join(parallel)
    from tests.backends.te.real import DELAYED

    alone = replace(DELAYED, params_in_fp8=True)
    runs: dict[str, Fp8Recipe] = {"bf16": DELAYED, "delayed": alone}
    runs["tensorwise"] = Fp8Recipe(name="tensorwise", params_in_fp8=True)
    runs["blockwise"] = BLOCKWISE
    found: dict[str, Sharded] = {}
    for run, recipe in runs.items():
        found[run] = {}
        for name in ("fused_adam", "distributed_fused_adam"):
            wide = {"hidden_size": 256, "ffn_hidden_size": 384} if run == "blockwise" else {}
            spec = _sharded_spec(recipe, "bf16", parallel, **(LLAMA | wide))
            spec = replace(spec, optim=replace(spec.optim, name=name))
            found[run][name] = _sharded(spec, mesh, rank, steps)
    return found


BLOCKWISE = Fp8Recipe(
    name="blockwise",
    params_in_fp8=True,
    backward_format="e4m3",
    power_2_scale=True,
    fast_accumulation=frozenset(),
)


def _sharded_spec(
    recipe: Fp8Recipe, compute: str, parallel: ParallelSpec, **changes: Any
) -> RunSpec:
    from tests.backends.te.real import spec_of, te

    te.module.base.FP8GlobalStateManager.reset()
    return spec_of("te", recipe, compute, parallel, **changes)


def _sharded(
    spec: RunSpec, mesh: Mesh, rank: Rank, steps: int
) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Losses and norms of the steps, and the weights (where ranks have them whole) and tables."""
    from tests.backends.te.real import step, tables_of

    state, results = build(spec, mesh), []
    for module in state.model.modules():  # FSDP's layers were built on the meta device
        on_meta = [name for name, x in vars(module).items() if getattr(x, "is_meta", False)]
        assert not on_meta, on_meta
    for number in range(steps):
        one = step(state, number, replica=rank.index, replicas=rank.size)
        results.append((one.loss, one.grad_norm))
    weights = {}
    for param in state.model.parameters() if spec.parallel.fsdp is None else ():
        values = param.dequantize() if is_quantized(param) else param.detach()
        weights[pieces_of(param)[0].name] = values.clone()
    tables = tables_of(state) if spec.precision.fp8.name == "delayed" else {}  # type: ignore[union-attr]
    return results, weights | tables


def fsdp(rank: Rank, steps: int) -> dict[str, Any]:
    """Sharded weights and replicas, by strategy and precision: losses and norms, and the tables.

    "alone" has weights in FP8 alone, which cross ranks as bytes. "full" recomputes the layers, and
    "full, kept" does not.
    """
    from tests.backends.te.real import DELAYED

    found = {}
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    alone = replace(DELAYED, params_in_fp8=True)
    tensorwise = Fp8Recipe(name="tensorwise", params_in_fp8=True)
    precisions = {
        "fp32": ("fp32", DELAYED, ("full", "grad")),
        "bf16": ("bf16", DELAYED, ("full",)),
        "alone": ("bf16", alone, ("full", "full, kept", "grad")),
        "tensorwise": ("bf16", tensorwise, ("full",)),
    }
    for precision, (compute, recipe, strategies) in precisions.items():
        for name in ("replicas", *strategies):
            changes = LLAMA | ({"recompute": full} if name == "full" else {})
            strategy: Any = name.partition(",")[0]
            sharded = None if name == "replicas" else FsdpSpec(strategy=strategy)
            parallel = ParallelSpec(devices_per_node=rank.size, fsdp=sharded)
            mesh = join(parallel)
            spec = _sharded_spec(recipe, compute, parallel, **changes)
            found[f"{name} {precision}"] = _sharded(spec, mesh, rank, steps)
    return found


def casts(rank: Rank, version: str) -> dict[str, tuple[float, float, float]]:
    """By what holds the weights and the number of microbatches: the first step's loss, and of a
    weight the number of updates that were counted and of amaxes in its history."""
    os.environ["MEGAFP8_TESTED_TE"] = version
    from tests.backends.te.real import DELAYED, step

    found = {}
    for count in (1, 2):
        for name, sharded in (("replicas", None), ("FSDP", FsdpSpec())):
            parallel = ParallelSpec(devices_per_node=rank.size, fsdp=sharded)
            mesh = join(parallel)
            state = build(_sharded_spec(DELAYED, "fp32", parallel, **LLAMA), mesh)
            loss = step(state, 0, replica=rank.index, replicas=rank.size, count=count).loss
            _, updates, *history = rows_of(state)["forward/layers.0.attention.qkv.weight"].tolist()
            found[f"{name}, {count}"] = loss, updates, sum(amax > 0 for amax in history)
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp, sp": {"tp": 2, "sequence_parallel": True},
    "ZeRO-1": {},
    "FSDP": {"fsdp": FsdpSpec()},
    "native, pp": {"pp": 2},
    "pp again": {"pp": 2},
}


def continued(rank: Rank, root: str) -> tuple[float, dict[str, Any]]:
    """The loss of step 3 of a run over two stages; for each layout that continues it after step 2:
    its rows, those that were saved, and its loss of step 3, of the same samples."""
    from tests.backends.te.real import DELAYED, spec_of, te

    def state_of(name: str) -> tuple[TrainState, Mesh]:
        te.module.base.FP8GlobalStateManager.reset()
        parallel = ParallelSpec(devices_per_node=rank.size, **LAYOUTS[name])
        mesh = join(parallel)
        backend = "native" if name.startswith("native") else "te"
        spec = spec_of(backend, DELAYED, "bf16", parallel, **LLAMA)
        zero = "distributed_fused_adam" if name == "ZeRO-1" else "fused_adam"
        return build(replace(spec, optim=replace(spec.optim, name=zero)), mesh), mesh

    def one_step(state: TrainState, mesh: Mesh) -> float:
        share = 4 // mesh.dp.size
        first = 4 * state.step + share * mesh.dp.rank
        loss = train_step(state, [microbatch(first + index) for index in range(share)]).loss
        state.step += 1
        return loss

    def save(state: TrainState, name: str) -> Path:
        return Saver(Path(root) / name, 2, {"config": {}, "data_fingerprint": ""}).save(state)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    state, mesh = state_of("pp again")
    for _ in range(2):
        one_step(state, mesh)
    path, saved = save(state, "begun"), {}
    for rows in _rows_of_all(mesh, state):
        saved |= rows
    loss, found = one_step(state, mesh), {}
    for name in LAYOUTS:
        state, mesh = state_of(name)
        state_dict.load_checkpoint(path, state, refuse)
        rows = rows_of(state)
        path = save(state, name.replace(" ", "").replace(",", "-"))
        found[name] = rows, saved, one_step(state, mesh)
    return loss, found


def _engines(
    mesh: Mesh,
    recipe: Fp8Recipe,
    parallel: ParallelSpec,
    steps: int,
    microbatches: int = 2,
    *,
    follows: bool = False,
    **changes: Any,
) -> dict[str, Found]:
    """Train by both engines; with `follows` ours takes the codes of Transformer Engine's casts."""
    from tests.backends.te.real import run_of, te

    found, casts = {}, Casts()
    for backend, casting in (("te", casts.recorded()), ("native", casts.followed(IN_FP32))):
        te.module.base.FP8GlobalStateManager.reset()
        state = run_of(backend, recipe, "fp32", parallel, mesh=mesh, **changes)
        with casting if follows else nullcontext():
            found[backend] = _train(state, mesh, recipe, steps, microbatches)
    return found


def _train(
    state: TrainState, mesh: Mesh, recipe: Fp8Recipe, steps: int, microbatches: int
) -> Found:
    from tests.backends.te.real import step, tables_of

    found = Found()
    with counted_maxima(found.maxima):
        for number in range(steps):
            one = step(
                state, number, replica=mesh.dp.rank, replicas=mesh.dp.size, count=microbatches
            )
            found.results.append((one.loss, one.grad_norm))
            if number == 0 and recipe.name == "delayed":
                found.tables, maxima = tables_of(state), list(found.maxima)
                found.rows = rows_of(state)
    found.flops = dict(state.counter.flops)
    found.maxima = maxima if found.tables else []
    return found


@contextmanager
def counted_maxima(sizes: list[int]) -> Iterator[None]:
    """The size of the group of each MAX that Transformer Engine's code asks for."""
    run = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("transformer_engine") and op == dist.ReduceOp.MAX:
            sizes.append(dist.get_world_size(group))
        return run(tensor, op=op, group=group, **more)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = run


def continue_around_changes(rank: Rank, settings: list[str], root: str) -> dict[str, list[str]]:
    """Return what `continue_at_every_step` finds under Transformer Engine."""
    te_cpu.load(te_cpu.DEFAULT_VERSION)
    return continue_at_every_step(rank, settings, root)
