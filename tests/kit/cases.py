"""A small training run, described: model, precision, layout, text, and what is planted in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megafp8.data.loader import DocumentRules, Microbatch
from megafp8.models.init import pieces_of
from megafp8.parallel.mesh import Mesh
from megafp8.specs import Fp8Recipe, GPTSpec, LossScaleSpec, OptimSpec, ParallelSpec, RunSpec
from megafp8.specs.precision import BackendName
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.state_dict import load_checkpoint
from tests.kit.faults import Fault
from tests.parallel import bugs
from tests.tiny import gpt_spec, microbatch, optim_spec, run_spec

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
    bug: str | None = None  # one of `bugs`, planted in the state
    faults: tuple[Fault, ...] = ()  # planted in the code while the case is built and runs
    spoiled: int | None = None  # the step in which rank 1's gradients become NaN below layer 1
    grows: bool = False  # later steps have twice the microbatches
    merged: int = 1  # microbatches that are run as one: what replicas run at the same time
    perturbed: int | None = None  # seed of a last-bit change of the word embedding
    loss_scale: LossScaleSpec | None = None
    documents: bool = False  # they are apart as `rules` say
    rules: DocumentRules = RESETS
    backend: BackendName = "native"
    begins: Path | None = None  # the checkpoint from which it continues
    saves: Path | None = None  # where the state after its steps is saved

    def spec(self) -> RunSpec:
        spec = run_spec(
            compute=self.compute,
            fp8=self.fp8,
            model=self.model,
            parallel=self.parallel,
            optim=self.optim,
            loss_scale=self.loss_scale,
        )
        are_apart = self.documents and self.rules.reset_attention_mask
        return replace(
            spec,
            precision=replace(spec.precision, backend=self.backend),
            train=replace(
                spec.train,
                micro_batch_size=self.batch,
                global_batch_size=self.num_microbatches * self.batch,
            ),
            data=replace(spec.data, reset_attention_mask=are_apart),
        )

    def build(self, mesh: Mesh) -> TrainState:
        if self.backend == "te":  # it updates the scales of all models of a process together
            import te_cpu

            te_cpu.load().module.base.FP8GlobalStateManager.reset()
        state = build(self.spec(), mesh)
        if self.bug is not None:
            bugs.plant(self.bug, state)
        if self.perturbed is not None:
            perturb(state, self.perturbed)
        if self.begins is not None:
            load_checkpoint(self.begins, state, print)
        return state

    def microbatches(self, step: int, mesh: Mesh) -> list[Any]:
        """This rank's part of the global batch."""
        count = self.num_microbatches * (1 + (self.grows and step >= self.steps // 2))
        whole = [
            self.microbatch(100 * step + index, 0.1 * index)
            for index in range(mesh.dp.rank, count, mesh.dp.size)
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


def spoil_gradient(module: object, inputs: object, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: grad * math.nan)
