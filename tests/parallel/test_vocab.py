"""Cross entropy over a shared vocabulary, each rank played in turn, against the plain one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fp8_numerics.kernels import triton_launch
from megafp8.models.loss import HeadLoss, plain_matmul, through_autograd
from megafp8.parallel import vocab
from megafp8.parallel.collectives import Axis
from megafp8.parallel.vocab import VocabParallelHeadLoss, local_rows
from megafp8.specs.data import IGNORE

RANKS, CHUNK, VOCAB = 3, 7, 12


@dataclass(frozen=True)
class Played(Axis):
    """One of several ranks whose contributions to each reduction are known."""

    others: list[list[torch.Tensor]] = field(default_factory=list)  # by reduction, by rank
    given: list[torch.Tensor] = field(default_factory=list)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, torch.amax)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, torch.sum)

    def _reduce(self, tensor: torch.Tensor, how: Any) -> torch.Tensor:
        self.given.append(tensor.clone())
        turn = len(self.given) - 1
        if turn < len(self.others):
            tensor.copy_(how(torch.stack(self.others[turn]), dim=0))
        return tensor


def run_ranks_in_turn(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, grad_scale: float = 1.0
) -> list[Any]:
    """Loss and gradient of each rank. A reduction's result needs all ranks: one round for each."""
    share = logits_CV.shape[1] // RANKS
    others: list[list[torch.Tensor]] = []
    for known in range(3):
        ranks = [Played("tp", RANKS, rank, others=others) for rank in range(RANKS)]
        results = []
        for tp in ranks:
            head = VocabParallelHeadLoss(tp, plain_matmul, through_autograd)
            head.grad_scale = grad_scale
            own_CV = logits_CV[:, tp.rank * share : (tp.rank + 1) * share].contiguous()
            results.append(head.loss_of_chunk(own_CV, targets_C, True))
        if known < 2:
            others = [*others, [tp.given[known] for tp in ranks]]
    assert all(len(tp.given) == 2 for tp in ranks), "one maximum, one sum"
    return results


@pytest.fixture(params=[False, True], ids=["torch", "kernel"])
def by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the loss comes from the Triton kernel, here in Triton's interpreter."""
    if request.param:
        pytest.importorskip("triton")
        if triton_launch.unavailable(torch.device("cpu")) is not None:
            pytest.skip("needs Triton's interpreter")
        monkeypatch.setattr(vocab, "runs_triton", lambda device: True)
    return bool(request.param)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_loss_and_gradient_equal_the_plain_ones(scale: float, by_kernel: bool) -> None:
    """FP16's loss scale, here 8, multiplies the gradient alone."""
    generator = torch.Generator().manual_seed(1)
    logits_CV = torch.randn(CHUNK, VOCAB, generator=generator) * scale
    targets_C = torch.tensor([0, 3, 4, 11, IGNORE, 7, 8])
    expected, expected_CV = HeadLoss().loss_of_chunk(logits_CV.clone(), targets_C, True)
    results = run_ranks_in_turn(logits_CV, targets_C, 8.0)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    found_CV = torch.cat([grad for _, grad in results], dim=1)
    torch.testing.assert_close(found_CV / 8, expected_CV, rtol=1e-5, atol=1e-7)
    assert not found_CV[4].any(), "not counted"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_is_not_lost(bad: float, by_kernel: bool) -> None:
    logits_CV = torch.zeros(2, VOCAB)
    logits_CV[1, 5] = bad
    for loss, _ in run_ranks_in_turn(logits_CV, torch.tensor([1, 2])):
        assert not loss.isfinite()


def test_each_index_is_on_one_rank() -> None:
    ids = torch.arange(VOCAB)
    here = torch.stack([local_rows(ids, 4, Axis("tp", RANKS, rank))[1] for rank in range(RANKS)])
    assert (here.sum(dim=0) == 1).all()
    rows, is_here = local_rows(torch.tensor([7, IGNORE, 0]), 4, Axis("tp", RANKS, 1))
    assert rows[0] == 3 and is_here.tolist() == [True, False, False]
