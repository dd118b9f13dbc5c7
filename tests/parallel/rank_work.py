"""What the ranks of the tests do; with one rank the same code is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megafp8.data.loader import DocumentRules, Microbatch
from megafp8.fp8.scaling import ScaleTable
from megafp8.models.init import pieces_of
from megafp8.optim.fsdp_masters import FsdpMasters
from megafp8.parallel.collectives import Axis
from megafp8.parallel.context import whole_logits
from megafp8.parallel.mesh import Mesh, join
from megafp8.specs import Fp8Recipe, GPTSpec, LossScaleSpec, OptimSpec, ParallelSpec
from megafp8.specs.precision import BackendName
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.state_dict import placements_of
from megafp8.train.step import forward_backward, reduce_gradients, train_step
from megafp8.train.validate import evaluate
from tests.parallel import bugs
from tests.ranks import Rank
from tests.tiny import SEQ, gpt_spec, microbatch, optim_spec, run_spec

Tables = dict[str, dict[str, torch.Tensor]]  # by direction and field
RESETS = DocumentRules(eod_id=0, reset_position_ids=True, reset_attention_mask=True)
"""Attention and positions begin anew with each document."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    compute: str = "fp32"
    fp8: Fp8Recipe | None = None
    model: GPTSpec = field(default_factory=gpt_spec)
    steps: int = 10
    num_microbatches: int = 2  # of the global batch
    batch: int = 2
    parallel: ParallelSpec = ParallelSpec()
    optim: OptimSpec = field(default_factory=optim_spec)
    bug: str | None = None  # one of `bugs`, planted
    merged: int = 1  # microbatches that are run as one: what replicas run at the same time
    perturbed: int | None = None  # seed of a last-bit change of the word embedding
    loss_scale: LossScaleSpec | None = None
    documents: bool = False  # they are apart as `rules` say
    rules: DocumentRules = RESETS
    backend: BackendName = "native"

    def build(self, mesh: Mesh) -> TrainState:
        spec = run_spec(
            compute=self.compute,
            fp8=self.fp8,
            model=self.model,
            parallel=self.parallel,
            optim=self.optim,
            loss_scale=self.loss_scale,
        )
        spec = replace(
            spec,
            train=replace(spec.train, micro_batch_size=self.batch),
            data=replace(
                spec.data, reset_attention_mask=self.documents and self.rules.reset_attention_mask
            ),
        )
        if self.backend == "te":  # it updates the scales of all models of a process together
            import te_cpu

            te_cpu.load().module.base.FP8GlobalStateManager.reset()
        precision = replace(spec.precision, backend=self.backend)
        state = build(replace(spec, precision=precision), mesh)
        if self.bug is not None:
            bugs.plant(self.bug, state)
        if self.perturbed is not None:
            perturb(state, self.perturbed)
        return state

    def microbatches(self, step: int, mesh: Mesh) -> list[Any]:
        """This rank's part of the global batch."""
        whole = [
            self.microbatch(100 * step + index, 0.1 * index)
            for index in range(mesh.dp.rank, self.num_microbatches, mesh.dp.size)
        ]
        starts = range(0, len(whole), self.merged)
        return [together(whole[start : start + self.merged]) for start in starts]

    def microbatch(self, seed: int, ignored: float) -> Microbatch:
        plain = microbatch(seed, self.batch, ignored=ignored)
        return with_documents(plain, self.rules) if self.documents else plain


def with_documents(plain: Microbatch, rules: DocumentRules = RESETS) -> Microbatch:
    """Every sixth token or so ends a document."""
    ends_BS = plain.tokens_BS % 6
    return replace(
        plain,
        position_ids_BS=rules.position_ids(ends_BS),
        cu_seqlens_N1=rules.cu_seqlens(ends_BS),
    )


def together(microbatches: list[Microbatch]) -> Microbatch:
    if len(microbatches) == 1:
        return microbatches[0]
    arrays = [
        np.concatenate([getattr(m, name) for m in microbatches])
        for name in ("tokens_BS", "targets_BS", "position_ids_BS")
        if getattr(microbatches[0], name) is not None
    ]
    whole = Microbatch(*arrays)
    if microbatches[0].cu_seqlens_N1 is None:
        return whole
    lengths = [np.diff(m.cu_seqlens_N1) for m in microbatches]
    borders = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int32)
    return replace(whole, cu_seqlens_N1=borders)


def perturb(state: TrainState, seed: int) -> None:
    """One rounding step up or none, at random, in each element of the word embedding."""
    generator = torch.Generator().manual_seed(seed)
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        if pieces_of(param)[0].name == "embedding.word.weight":
            weight = param.detach()
            up = torch.nextafter(weight, torch.full_like(weight, torch.inf))
            chosen = torch.rand(weight.shape, generator=generator) < 0.5
            master.data.copy_(torch.where(chosen, up, weight))
    state.masters.write_back()


@dataclass
class Piece:
    """A part of a logical tensor, as one rank holds it."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


@dataclass
class Outcome:
    """What one rank saw of a case."""

    losses: list[float]
    norms: list[float]
    first_gradients: list[Piece]
    weights: list[Piece]
    sizes: dict[str, int]  # bytes by local parameter name
    traffic: dict[tuple[str, str, str], int]  # of one step
    names: dict[str, list[str]]  # the tensors of each table
    updates: dict[str, list[dict[str, torch.Tensor]]]  # tables after each, `staged` before it
    validation: tuple[float, int]
    logits: torch.Tensor


def run_case(case: Case, mesh: Mesh) -> Outcome:
    """Train; every update of the scaling tables is looked at."""
    gradients = case.build(mesh)
    forward_backward(gradients, case.microbatches(0, mesh))
    reduce_gradients(gradients)
    state = case.build(mesh)
    updates: dict[str, list[dict[str, torch.Tensor]]] = {}
    for direction, table in state.scaling.tables.items():
        watch(table, updates.setdefault(direction, []))
    losses, norms, traffic = [], [], {}
    for step in range(case.steps):
        before = dict(mesh.traffic.num_bytes)
        result = train_step(state, case.microbatches(step, mesh))
        traffic = {key: n - before.get(key, 0) for key, n in mesh.traffic.num_bytes.items()}
        state.step += 1
        losses.append(result.loss)
        norms.append(result.grad_norm)
    if case.backend == "te":  # its updates are its own: their result is compared
        for direction, table in state.scaling.tables.items():
            after = {name: tensor.clone() for name, tensor in table.tensors().items()}
            updates[direction].append({"staged": table.amax.clone(), **after})
    named = state.model.named_parameters()
    validation = evaluate(state, [case.microbatch(9000 + i, 0.0) for i in range(3)])
    state.model.eval()
    with torch.no_grad(), state.scaling.evaluation():
        # Blocks of tokens must be whole on each rank, in the recipes whose microbatches are larger.
        samples = torch.arange(SEQ).repeat(case.batch if case.batch > 2 else 1, 1)
        logits = whole_logits(state.model, samples, mesh.cp)
    return Outcome(
        losses,
        norms,
        pieces(gradients, [grad.values() for grad in gradients.masters.stored_grads]),
        weights(state),
        {name: param.numel() * param.element_size() for name, param in named},
        {key: count for key, count in traffic.items() if count},
        {direction: table.names for direction, table in state.scaling.tables.items()},
        updates,
        validation,
        logits,
    )


@dataclass
class Sums:
    """One rank's gradients of a step, and the operation and dtype of each message of its sums."""

    whole: list[Piece]
    rounds: list[list[Piece]]  # of each microbatch of a replica alone; of two for two stages
    of_axes: set[tuple[str, str, str]]  # while the passes run, by axis
    at_the_end: set[tuple[str, str, str]]


def sums_of(case: Case, mesh: Mesh) -> Sums:
    """Add up gradients once for all microbatches, and once for each, or as few as stages take."""
    state, batches = case.build(mesh), case.microbatches(0, mesh)
    messages = [set(mesh.traffic.num_calls)]

    def gradients(some: list[Any]) -> list[Piece]:
        mesh.traffic.num_calls.clear()
        forward_backward(state, some)
        messages.append(set(mesh.traffic.num_calls))
        mesh.traffic.num_calls.clear()
        reduce_gradients(state)
        messages.append(set(mesh.traffic.num_calls))
        return pieces(state, [grad.values() for grad in state.masters.stored_grads])

    whole = gradients(batches)
    _, of_axes, at_the_end = messages
    fewest = case.parallel.pp
    rounds = [batches[first : first + fewest] for first in range(0, len(batches), fewest)]
    return Sums(whole, [gradients(some) for some in rounds], of_axes, at_the_end)


def each_case(
    rank: Rank, work: Callable[[Case, Mesh], Any], cases: dict[str, Case]
) -> dict[str, Any]:
    """Do `work` with every case, on the mesh that it names."""
    parallel = {name: replace(c.parallel, devices_per_node=rank.size) for name, c in cases.items()}
    return {
        name: work(replace(case, parallel=parallel[name]), join(parallel[name]))
        for name, case in cases.items()
    }


def first_update(case: Case, mesh: Mesh) -> tuple[float, list[Piece]]:
    """The norm of the first step, and the gradients that its update was given, clipped."""
    state = case.build(mesh)
    norm = train_step(state, case.microbatches(0, mesh)).grad_norm
    return norm, pieces(state, [grad.values() for grad in state.masters.stored_grads])


def watch(table: ScaleTable, updates: list[dict[str, torch.Tensor]]) -> None:
    """Note the amaxes staged before each update and the table after it."""
    update = table.update

    def noted(*args: Any, **kwargs: Any) -> None:
        staged = table.amax.clone()
        update(*args, **kwargs)
        after = {name: tensor.clone() for name, tensor in table.tensors().items()}
        updates.append({"staged": staged, **after})

    table.update = noted  # type: ignore[method-assign]


def readable(weight: torch.Tensor) -> torch.Tensor:
    """FP8 cannot be pickled."""
    return weight.float() if weight.dtype.itemsize == 1 else weight


def pieces(state: TrainState, tensors: list[torch.Tensor]) -> list[Piece]:
    """Of tensors that belong to what this rank updates."""
    num_shards = state.masters.shards.size
    return [
        Piece(place.name, place.global_shape, place.offset, _plain(place.tensor))
        for segment, tensor in zip(state.masters.segments, tensors, strict=True)
        for place in placements_of("", segment, tensor, state.mesh, num_shards=num_shards)
    ]


def weights(state: TrainState) -> list[Piece]:
    """As the model computes with them; with FSDP, whose whole weights come and go, the masters."""
    if isinstance(state.masters, FsdpMasters):
        return pieces(state, [stored.values() for stored in state.masters.stored])
    return [
        Piece(piece.name, piece.global_shape, piece.offset, _plain(param.detach()[piece.local]))
        for param in state.masters.params
        for piece in pieces_of(param)
    ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; of FP8, which cannot be pickled, its numbers."""
    return tensor.float() if tensor.element_size() == 1 else tensor.clone()


def run_layouts(rank: Rank, cases: dict[str, Case]) -> dict[str, Outcome]:
    """Every case on the mesh that it names; equal meshes are made once."""
    meshes: dict[tuple[int, ...], Mesh] = {}
    outcomes = {}
    for name, case in cases.items():
        spec = replace(case.parallel, devices_per_node=rank.size)
        sizes = (spec.tp, spec.cp, spec.pp, spec.tp_only_amax_red)
        if sizes not in meshes:
            meshes[sizes] = join(spec)
        outcomes[name] = run_case(replace(case, parallel=spec), meshes[sizes])
    return outcomes


def run_cases(rank: Rank, tp: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    """Every case on one mesh."""
    mesh = join(ParallelSpec(devices_per_node=rank.size, tp=tp))
    return {name: run_case(case, mesh) for name, case in cases.items()}


def fail_on_rank_1(rank: Rank) -> None:
    """The others wait for it."""
    join(ParallelSpec(devices_per_node=rank.size, tp=rank.size))
    if rank.index == 1:
        raise ValueError("the number is 42")
    dist.barrier()


def members(rank: Rank, spec: ParallelSpec) -> dict[str, tuple[int, int, list[int]]]:
    """Size, own place and the global ranks of every axis, by a reduction over it."""
    mesh = join(spec)
    found = {}
    for name, axis in vars(mesh).items():
        if isinstance(axis, Axis):
            present = torch.zeros(rank.size)
            present[rank.index] = 1
            axis.all_reduce_sum(present)
            found[name] = (axis.size, axis.rank, present.nonzero().flatten().tolist())
    return found
