"""Terms that layers add to the loss: in every layout those of plain autograd in one process.

The MLP of each layer adds a term that grows with its input, as the z loss of a router does, and
that of the last layer adds another one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from megafp8.models.added_loss import AddedLoss, AddedLosses
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import Mesh, single_rank
from megafp8.specs import FsdpSpec, LossScaleSpec, ParallelSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.train.loop import log_step
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, forward_backward, reduce_gradients, train_step
from megafp8.train.validate import evaluate
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import Piece, assembled, assert_close, pieces
from tests.parallel.test_pipeline import SCHEDULES
from tests.tiny import gpt_spec, optim_spec, run_spec

MODEL = gpt_spec(num_layers=4)
AGAIN = replace(MODEL, recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1))
TERMS = (AddedLoss("z_loss", 0.01, 4), AddedLoss("square", 0.5, 1))
LAST = "layers.3."


class Adding(nn.Module):
    """An MLP that adds the terms of its layer to the loss."""

    def __init__(self, mlp: nn.Module, added: AddedLosses, *, is_last: bool) -> None:
        super().__init__()
        self.mlp, self.added, self.is_last = mlp, added, is_last

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_BSD = self.added.add("z_loss", x_BSD, z_values(x_BSD))
        if self.is_last:
            x_BSD = self.added.add("square", x_BSD, squares(x_BSD))
        out: torch.Tensor = self.mlp(x_BSD)
        return out


def z_values(x_BSD: torch.Tensor) -> torch.Tensor:
    return x_BSD.float().logsumexp(dim=-1).square()


def squares(x_BSD: torch.Tensor) -> torch.Tensor:
    return x_BSD.float().square().mean(dim=-1)


def plant(state: TrainState) -> TrainState:
    added = state.model.parts.added_losses = AddedLosses(TERMS)
    for module in [*state.model.modules()]:
        if type(module).__name__.endswith("TransformerLayer"):  # FSDP makes a class of its own
            is_last = any(
                piece.name.startswith(LAST)
                for param in module.parameters()
                for piece in pieces_of(param)
            )
            module.mlp = Adding(module.mlp, added, is_last=is_last)  # type: ignore[arg-type]
    return state


@dataclass
class Seen:
    """A step with the terms, and the messages of one with and of one without them."""

    loss: float
    norm: float
    added: dict[str, float]
    num_tokens: int
    gradients: list[Piece]  # of the sum
    sent: tuple[dict[tuple[str, str], tuple[int, int]], ...]  # with terms, without: FP64
    calls: tuple[Counter[tuple[str, str, str]], ...]  # with terms, without
    validation: tuple[float, float]  # with terms, without


def seen(case: Case, mesh: Mesh) -> Seen:
    batches = case.microbatches(0, mesh)
    summed = plant(case.build(mesh))
    forward_backward(summed, batches)
    reduce_gradients(summed)
    results, sent, calls, validation = [], [], [], []
    for state in (plant(case.build(mesh)), case.build(mesh)):
        validation.append(evaluate(state, batches)[0])
        bytes_before = dict(mesh.traffic.num_bytes)
        calls_before = Counter(mesh.traffic.num_calls)
        results.append(train_step(state, batches))
        calls.append(Counter(mesh.traffic.num_calls) - calls_before)
        num_bytes = Counter(mesh.traffic.num_bytes) - Counter(bytes_before)
        sent.append(
            {key[:2]: (n, num_bytes[key]) for key, n in calls[-1].items() if "float64" in key}
        )
    result, plain = results
    assert plain.added == {}
    gradients = pieces(summed, summed.masters.grads)
    return Seen(
        result.loss, result.grad_norm, dict(result.added), result.num_tokens, gradients,
        (sent[0], sent[1]), (calls[0], calls[1]), (validation[0], validation[1]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Seen:
    """The plain model in one process, whose terms are summed by plain autograd."""
    case = Case(model=MODEL, num_microbatches=4)
    spec = run_spec(model=MODEL)
    model = GPT(Parts(MODEL, torch.float32, spec.train.seed, RandomStreams(spec.train.seed)))
    inputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, index=index: inputs.update({index: args[0]})
        )
    total = loss = torch.zeros((), dtype=torch.float64)
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for batch in case.microbatches(0, single_rank()):
        targets_BS = torch.from_numpy(batch.targets_BS)
        own = model(torch.from_numpy(batch.tokens_BS), targets_BS)
        counted = targets_BS >= 0
        terms = torch.stack(
            (
                sum(z_values(x)[counted].sum() for x in inputs.values()),
                squares(inputs[3])[counted].sum(),
            )
        )
        loss, sums, count = loss + own.detach(), sums + terms.detach(), count + int(counted.sum())
        total = total + own + 0.01 * terms[0] + 0.5 * terms[1]
    total.backward()
    grads = {
        piece.name: Piece(piece.name, piece.global_shape, piece.offset, param.grad[piece.local])
        for param in model.parameters()
        for piece in pieces_of(param)
    }
    norm = torch.stack([param.grad.double().norm() for param in model.parameters()]).norm() / count
    added = {"z_loss": sums[0].item() / count / 4, "square": sums[1].item() / count}
    value = loss.item() / count
    return Seen(
        value,
        norm.item(),
        added,
        count,
        [*grads.values()],
        ({}, {}),
        (Counter(), Counter()),
        (value, value),
    )


def case_of(**changes: object) -> Case:
    return replace(Case(model=MODEL, num_microbatches=4), **changes)  # type: ignore[arg-type]


def staged(schedule: str, **changes: object) -> Case:
    return case_of(parallel=ParallelSpec(pp=2, pipeline=SCHEDULES[schedule]), **changes)


ONE = {
    "four microbatches": case_of(),
    "one microbatch": case_of(merged=4),
    "recomputed": case_of(model=AGAIN),
    "scaled": case_of(loss_scale=LossScaleSpec(init_scale=1024.0)),
}
TWO = {
    "replicas": case_of(),
    "replicas, one microbatch": case_of(merged=2),
    "replicas, ZeRO-1": case_of(optim=optim_spec(name="distributed_fused_adam")),
    "FSDP": case_of(parallel=ParallelSpec(fsdp=FsdpSpec())),
    "tensor": case_of(parallel=ParallelSpec(tp=2)),
    "sequence": case_of(parallel=ParallelSpec(tp=2, sequence_parallel=True)),
    "context": case_of(parallel=ParallelSpec(cp=2)),
    "1F1B": staged("1F1B"),
    "1F1B, recomputed": staged("1F1B", model=AGAIN),
    "interleaved": staged("Interleaved1F1B"),
    "interleaved, recomputed": staged("Interleaved1F1B", model=AGAIN),
    "zero bubble": staged("ZBVZeroBubble"),
}  # fmt: skip
FOUR = {
    "sequence, stages": case_of(
        parallel=ParallelSpec(tp=2, sequence_parallel=True, pp=2, pipeline=SCHEDULES["1F1B"])
    ),
    "replicas, stages": staged("1F1B"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Seen]]:
    results = {name: [seen(case, single_rank())] for name, case in ONE.items()}
    for size, cases in ((2, TWO), (4, FOUR)):
        results |= on_ranks(seen, cases, size)
    return results


@pytest.mark.parametrize("name", [*ONE, *TWO, *FOUR])
def test_terms_are_those_of_autograd(name: str, found: dict[str, list[Seen]], plain: Seen) -> None:
    ours = assembled([rank.gradients for rank in found[name]])
    assert_close(ours, assembled([plain.gradients]), 2e-5)
    for rank in found[name]:
        assert rank.num_tokens == plain.num_tokens
        assert rank.loss == pytest.approx(plain.loss, rel=1e-6), "the terms are beside the loss"
        assert rank.norm == pytest.approx(plain.norm, rel=1e-5)
        assert rank.added == pytest.approx(plain.added, rel=1e-5)
        assert rank.added == found[name][0].added, "the same on all ranks"
        assert rank.validation[0] == rank.validation[1]


FP64_WITHOUT_TERMS = {
    "replicas": {("dp", "all_reduce_sum"): (1, 2 * 8)},  # loss and tokens
    "replicas, ZeRO-1": {("dp", "all_reduce_sum"): (2, 4 * 8)},  # and two sums of squares
    "tensor": {("tp", "all_reduce_sum"): (1, 8)},  # the squares of the norm
    "1F1B": {("pp", "all_reduce_sum"): (2, 2 * 8)},  # the loss, and the squares
}
"""Messages and bytes of FP64 numbers in a step of a model whose layers add no term."""


@pytest.mark.parametrize("name", FP64_WITHOUT_TERMS)
def test_without_terms_no_byte_is_sent_for_them(name: str, found: dict[str, list[Seen]]) -> None:
    """How many operations such a step starts is counted in test_step_counts.py."""
    for rank in found[name]:
        assert rank.sent[1] == FP64_WITHOUT_TERMS[name]


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_terms_need_no_message(name: str, found: dict[str, list[Seen]]) -> None:
    """A step sends as many messages; those of its sums have two numbers more."""
    for rank in found[name]:
        assert rank.calls[0] == rank.calls[1]
        with_terms, without = rank.sent
        for (axis, operation), (count, num_bytes) in without.items():
            joined = 1 if operation == "all_reduce_sum" and axis != "ends" else 0
            assert with_terms[axis, operation] == (count, num_bytes + joined * 2 * 8), axis


def test_each_step_begins_with_sums_of_zero() -> None:
    added, values = AddedLosses(TERMS), torch.ones(1, 2)
    for _ in range(2):
        added.begin_step(torch.device("cpu"))
        added.begin_microbatch(torch.tensor([[True, False]]))
        added.add("square", values, values)
        assert added.sums.tolist() == [0, 1]


def test_a_recomputation_counts_its_own_tokens_and_leaves_those_of_the_present_microbatch() -> None:
    """A pipeline recomputes a microbatch while another one is the present."""
    added, x = AddedLosses(TERMS), torch.zeros(1, 2, 1, requires_grad=True)
    values = torch.tensor([[1.0, 10.0]], requires_grad=True)
    added.begin_step(torch.device("cpu"))
    added.begin_microbatch(torch.tensor([[True, False]]))
    again = added.recomputation()
    added.begin_microbatch(torch.tensor([[False, True]]))
    with again:
        added.add("square", x, values).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[0.5, 0]]
    assert added.sums.tolist() == [0, 0]
    added.add("square", x, values)
    assert added.sums.tolist() == [0, 10]


def test_terms_are_logged() -> None:
    lines: list[dict[str, float]] = []
    nothing = SimpleNamespace(
        log=lambda *_: None, end=lambda *_: None, metrics={}, least_updates=None
    )
    run = SimpleNamespace(
        state=SimpleNamespace(step=1, consumed_samples=4, phases=()),
        spec=run_spec(),
        metrics=SimpleNamespace(log=lines.append),
        experts_log=None,
        trackers=nothing,
        health=nothing,
        saver=nothing,
    )
    result = StepResult(4.0, 1.0, 0.1, 32, added={"z_loss": 15.5})
    log_step(run, result, 4, Mock(memory_bytes=None))  # type: ignore[arg-type]
    assert [line["z_loss"] for line in lines] == [15.5]
