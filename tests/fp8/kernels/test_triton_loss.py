"""The cross entropy of a chunk and its gradient in one launch, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megafp8.fp8.kernels import triton_loss
from megafp8.fp8.kernels.triton_loss import TokenSums, to_gradient, token_sums
from megafp8.parallel import vocab
from megafp8.parallel.collectives import Axis
from megafp8.specs.data import IGNORE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
TOKENS, VOCAB = 7, 203
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def inputs(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of very different sizes, one of equal logits, one with infinities; one is ignored."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(TOKENS, VOCAB, generator=generator)
    logits *= torch.tensor([1.0, 1e-3, 30.0, 1e4, 0.0, 3.0, 100.0])[:, None]
    logits[5, :100] = -torch.inf
    targets = torch.randint(100, VOCAB, (TOKENS,), generator=generator)
    targets[1] = IGNORE
    return logits.to(dtype).to(device), targets.to(device)


def exact(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.double().requires_grad_()
    loss = F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")
    loss.backward()
    assert wide.grad is not None
    return loss.detach(), wide.grad


def check(
    loss: torch.Tensor, grad: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor
) -> None:
    """One rounding to the dtype, and FP32's: exp(x - top) is off by |x - top| units at most.

    Terms above exp(-104) count, so that is below 2**-17 relative; a loss adds such logarithms.
    """
    expected, of_logits = exact(logits, targets)
    probs = logits.double().softmax(dim=-1)
    bound = 1.01 * UNIT[grad.dtype] * of_logits.abs() + 2.0**-16 * (probs + 2.0**-100)
    assert ((grad.double() - of_logits).abs() <= bound).all()
    assert not grad[targets == IGNORE].any()
    assert abs(loss.item() - expected.item()) <= 2.0**-18 * (expected.item() + TOKENS)


@pytest.mark.parametrize("block", [4096, 64], ids=["one block", "several blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradient(
    device: torch.device,
    dtype: torch.dtype,
    block: int,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ranks` 2: each half of the vocabulary apart, merged as ranks do."""
    monkeypatch.setattr(triton_loss, "BLOCK", block)
    logits, targets = inputs(dtype, device)
    kept = logits.clone()
    if ranks == 1:
        sums = to_gradient(logits, targets, IGNORE)
        grad = logits
    else:
        halves = [half.contiguous() for half in logits.split((120, VOCAB - 120), dim=1)]
        own = [
            targets,
            torch.where(targets == IGNORE, IGNORE, targets - 120 - 1000 * (targets < 120)),
        ]
        of_half = [token_sums(half, ids) for half, ids in zip(halves, own, strict=True)]
        largest = torch.maximum(of_half[0].largest, of_half[1].largest)
        total = sum(s.exponentials * (s.largest - largest).exp() for s in of_half)
        target = of_half[0].target + of_half[1].target
        assert isinstance(total, torch.Tensor)
        sums = TokenSums(largest, total, target)
        for half, ids in zip(halves, own, strict=True):
            assert torch.equal(
                half, kept[:, : half.shape[1]] if half is halves[0] else kept[:, 120:]
            )
            to_gradient(half, ids, IGNORE, sums=sums)
        grad = torch.cat(halves, dim=1)
    loss = sums.exponentials.log() + sums.largest - sums.target
    check(loss[targets != IGNORE].sum(), grad, kept, targets)


def test_the_loss_of_a_chunk(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a gradient, and with FP16's loss scale."""
    monkeypatch.setattr(vocab, "runs_triton", lambda device: True)
    logits, targets = inputs(torch.float32, device)
    for grad_scale in (1.0, 8.0):
        found = vocab.loss_by_triton(
            logits.clone(), targets, tp=Axis("tp"), with_grad=True, grad_scale=grad_scale
        )
        assert found is not None and found[1] is not None
        check(found[0], found[1] / grad_scale, logits, targets)
    alone = vocab.loss_by_triton(
        logits.clone(), targets, tp=Axis("tp"), with_grad=False, grad_scale=1.0
    )
    assert alone is not None and alone[1] is None and torch.equal(alone[0], found[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen(device: torch.device, bad: float) -> None:
    logits, targets = inputs(torch.float32, device)
    logits[2, 7] = bad
    sums = to_gradient(logits, targets, IGNORE)
    assert sums.exponentials[2].isnan() and logits[2].isnan().any()
    others = [0, 1, 3, 4, 5, 6]
    assert sums.exponentials[others].isfinite().all() and logits[others].isfinite().all()


def test_where_triton_does_not_run_torch_does() -> None:
    logits, targets = inputs(torch.float32, torch.device("cpu"))
    found = vocab.loss_by_triton(logits, targets, tp=Axis("tp"), with_grad=True, grad_scale=1.0)
    assert found is None
