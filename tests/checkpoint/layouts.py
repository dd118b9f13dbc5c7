"""Pass a checkpoint through a round of layouts: each loads what the one before saved, and saves it.

A new kind of layout is one line of `ROUND`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megafp8.checkpoint.step_directories import step_name
from megafp8.data.loader import Loader
from megafp8.fp8.scaling import ScalingState
from megafp8.optim.fsdp_masters import FsdpMasters
from megafp8.parallel.mesh import Mesh, join, single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec
from megafp8.specs.moe import MoESpec
from megafp8.train import state_dict
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.kit.tensors import Piece, weights
from tests.parallel.matrix import INTERLEAVED, MODEL, ZERO, ZERO_BUBBLE
from tests.ranks import Rank, run_ranks
from tests.tiny import SEQ, optim_spec

STEPS_BEFORE, STEPS_AFTER = 6, 5
GLOBAL_BATCH = 16  # samples, in microbatches of 2


@dataclass(frozen=True)
class Layout:
    """Describe a layout of `ranks` processes; `zero` says whether it is ZeRO-1.

    Processes that the sizes in `spec` do not need are replicas.
    """

    name: str
    ranks: int
    spec: ParallelSpec = ParallelSpec()
    zero: bool = False

    @property
    def replicas(self) -> int:
        return self.ranks // (self.spec.tp * self.spec.cp * self.spec.pp)


ROUND = [
    Layout("tp 2", 2, ParallelSpec(tp=2)),
    Layout("pp 2", 2, ParallelSpec(pp=2)),
    Layout("pp 2, interleaved", 2, ParallelSpec(pp=2, pipeline=INTERLEAVED)),
    Layout("dp 2", 2),
    Layout("cp 2", 2, ParallelSpec(cp=2)),
    Layout("dp 2, ZeRO-1", 2, zero=True),
    Layout("dp 2, FSDP full", 2, ParallelSpec(fsdp=FsdpSpec())),
    Layout("pp 2, zero bubble V", 2, ParallelSpec(pp=2, pipeline=ZERO_BUBBLE)),
    Layout("tp 2 x pp 2", 4, ParallelSpec(tp=2, pp=2)),
    Layout("tp 4", 4, ParallelSpec(tp=4)),
    Layout("pp 2 x dp 2", 4, ParallelSpec(pp=2)),
    Layout("tp 2 x dp 2", 4, ParallelSpec(tp=2)),
    Layout("tp 2 x sp x dp 2", 4, ParallelSpec(tp=2, sequence_parallel=True)),
    Layout("tp 2 x dp 2, FSDP grad", 4, ParallelSpec(tp=2, fsdp=FsdpSpec(strategy="grad"))),
    Layout("cp 2 x dp 2, ZeRO-1", 4, ParallelSpec(cp=2), zero=True),
    Layout("cp 2 x pp 2", 4, ParallelSpec(cp=2, pp=2)),
    Layout("pp 2 x dp 2, FSDP full", 4, ParallelSpec(pp=2, fsdp=FsdpSpec())),
    Layout("pp 4", 4, ParallelSpec(pp=4)),
    Layout("tp 2 x pp 2 x dp 2", 8, ParallelSpec(tp=2, pp=2)),
    Layout("tp 2 x dp 2 again", 4, ParallelSpec(tp=2)),
    Layout("one", 1),
]
QUICK = [ROUND[0], ROUND[2], ROUND[3], ROUND[-1]]
PRECISIONS: dict[str, tuple[str, Fp8Recipe | None]] = {
    "FP32": ("fp32", None),
    "BF16": ("bf16", None),
    "FP8": ("bf16", Fp8Recipe(amax_history_len=16, params_in_fp8=True)),
    "FP8, experts": ("bf16", Fp8Recipe(amax_history_len=16, params_in_fp8=True)),
}
EXPERTS = MoESpec(
    num_experts=4,
    top_k=2,
    ffn_hidden_size=32,
    layers=(True, False, True, True),
    score_function="sigmoid",
    has_expert_bias=True,
    router_loss="aux_loss",
    router_loss_coeff=0.01,
    shared_ffn_hidden_size=32,
)
MODELS = {"FP8, experts": replace(MODEL, bias=False, activation="swiglu", moe=EXPERTS)}


def round_of(precision: str) -> list[Layout]:
    """The layouts that a model has: experts have sequence parallelism, and no FSDP."""
    if precision not in MODELS:
        return ROUND
    return [
        replace(layout, spec=replace(layout.spec, sequence_parallel=layout.spec.tp > 1))
        for layout in ROUND
        if layout.spec.fsdp is None
    ]


@dataclass
class Leg:
    """Hold what one rank saw after it loaded the checkpoint."""

    params: list[Piece]  # as the model reads them: the bytes of FP32, BF16 or FP8
    samples: list[int]  # the next global batch's, this rank's part
    losses: list[float]  # of the next steps
    messages: list[str]


class Numbers:
    """Provide samples of consecutive numbers; sample i begins with 10 i."""

    num_samples_per_epoch, seq_length = 1000, SEQ

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        return index * 10 + np.arange(SEQ + 1)


def case_of(
    precision: str,
    spec: ParallelSpec = ParallelSpec(),  # noqa: B008
    *,
    zero: bool = False,
) -> Case:
    compute, fp8 = PRECISIONS[precision]
    optim = ZERO if zero else optim_spec()
    num = GLOBAL_BATCH // 2
    model = MODELS.get(precision, MODEL)
    return Case(compute, fp8, model, num_microbatches=num, parallel=spec, optim=optim)


def saver_at(folder: Path) -> Saver:
    return Saver(folder, 1, {"config": {}, "data_fingerprint": ""})


def begin(precision: str, folder: Path) -> TrainState:
    """Train some steps in one process, and save."""
    case = case_of(precision)
    state = case.build(single_rank())
    train(state, case, STEPS_BEFORE)
    saver_at(folder).save(state)
    return state


def train(state: TrainState, case: Case, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(train_step(state, case.microbatches(state.step, state.mesh)).loss)
        state.step += 1
        state.consumed_samples += GLOBAL_BATCH
    return losses


def next_samples(state: TrainState) -> list[int]:
    dp = state.mesh.dp
    with Loader(
        Numbers(),
        micro_batch_size=2,
        num_microbatches=GLOBAL_BATCH // 2 // dp.size,
        dp_rank=dp.rank,
        dp_size=dp.size,
        consumed_samples=state.consumed_samples,
    ) as loader:
        return [int(row[0]) // 10 for batch in next(loader) for row in batch.tokens_BS]


def params_of(state: TrainState) -> list[Piece]:
    """Return the weights as bytes, [..., bytes of an element], but for those gathered in FP8."""
    found = weights(state)
    if isinstance(state.masters, FsdpMasters):
        if isinstance(state.scaling, ScalingState):
            return []
        for piece in found:
            piece.tensor = piece.tensor.to(state.model.parts.dtype)
    for piece in found:
        shape = piece.tensor.shape
        piece.tensor = piece.tensor.contiguous().view(torch.uint8).view(*shape, -1)
    return found


def leg(precision: str, layout: Layout, mesh: Mesh, source: Path, target: Path) -> Leg:
    """Load a checkpoint, save it again, record what was loaded, and only then train."""
    spec = replace(layout.spec, devices_per_node=layout.ranks)
    case = case_of(precision, spec, zero=layout.zero)
    state, messages = case.build(mesh), list[str]()
    state_dict.load_checkpoint(source / step_name(STEPS_BEFORE), state, messages.append)
    saver_at(target).save(state)
    return Leg(params_of(state), next_samples(state), train(state, case, STEPS_AFTER), messages)


def run_legs(rank: Rank, precision: str, layouts: list[tuple[Layout, Path, Path]]) -> list[Leg]:
    """Run several layouts of the same number of ranks, one after the other."""
    torch.set_num_threads(1)
    legs = []
    for layout, source, target in layouts:
        mesh = join(replace(layout.spec, devices_per_node=rank.size))
        legs.append(leg(precision, layout, mesh, source, target))
    return legs


def go_round(
    precision: str, layouts: list[Layout], folder: Path
) -> tuple[Path, dict[str, list[Leg]]]:
    """Run all layouts from `folder/start` on; return the last folder and what every rank saw."""
    here, found = folder / "start", {}
    numbered = list(enumerate(layouts))
    for size, group in groupby(numbered, key=lambda pair: pair[1].ranks):
        plan = []
        for number, layout in group:
            there = folder / f"{number:02d}"
            plan.append((layout, here, there))
            here = there
        arguments = {"precision": precision, "layouts": plan}
        if size == 1:
            results = [[leg(precision, layout, single_rank(), *paths) for layout, *paths in plan]]
        else:
            results = run_ranks(run_legs, size, arguments)
        for index, (layout, _, _) in enumerate(plan):
            found[layout.name] = [legs[index] for legs in results]
    return here, found
