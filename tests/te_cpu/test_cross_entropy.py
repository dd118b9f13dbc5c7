"""The cross entropy that stands in for kernels in Triton, against torch's in FP64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from te_cpu import cross_entropy
from te_cpu.errors import SizeError
from tests.te_cpu.test_kernels import assert_near, normal

IGNORED = -100
VERSIONS = [(2, 4), (2, 7), (2, 12), (2, 17), (2, 18), (2, 20)]


def computed(
    version: tuple[int, ...],
    logits: torch.Tensor,
    target: torch.Tensor,
    grad: torch.Tensor | None = None,
    *,
    smoothing: float = 0.0,
    is_mean: bool = False,
    group: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradient of the logits, as Transformer Engine's Python asks."""
    named = cross_entropy.in_triton(version)
    more = (False,) if version >= (2, 19) else ()
    found = named["cross_entropy_forward"](
        logits, target, smoothing, is_mean, group, IGNORED, *more
    )
    grad = torch.ones_like(found[0]) if grad is None else grad
    if version < (2, 19):
        return found[0], named["cross_entropy_backward"](found[1], grad)
    loss, saved, stats, target, counted, rank, world = found
    passed = (saved, stats, target, counted, grad, smoothing, is_mean, rank, world, IGNORED)
    return loss, named["cross_entropy_backward"](*passed)


def exactly(
    logits: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.double().requires_grad_()
    loss = F.cross_entropy(
        x.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing,
        ignore_index=IGNORED,
    ).view(target.shape)  # fmt: skip
    return loss.detach(), torch.autograd.grad(loss, x, grad.double())[0]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("width", [7, 1])
def test_losses_and_gradients_of_rows(
    width: int, smoothing: float, version: tuple[int, ...]
) -> None:
    """One target is to be ignored. 2.4 divides gradients by the rows, as of a mean; up to 2.7 the
    gradient of the first row counts for all."""
    logits, grad = normal(2, 3, width), normal(2, 3, seed=1)
    target = torch.arange(6).view(2, 3) % width
    target[1, 0] = IGNORED
    used = torch.full_like(grad, float(grad[0, 0])) if version < (2, 8) else grad
    exact, exact_grad = exactly(logits, target, used, smoothing)
    exact_grad = exact_grad / 6 if version < (2, 5) else exact_grad
    loss, found = computed(version, logits.clone(), target, grad, smoothing=smoothing)
    assert loss.dtype == torch.float32 and loss[1, 0] == 0 and not found[1, 0].any()
    bound = 16 * 2**-24 * max(1.0, float(exact.max()), float(exact_grad.abs().max()))
    assert (loss - exact).abs().max() <= bound
    assert (found - exact_grad).abs().max() <= bound


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_empty", [False, True])
def test_means_are_over_what_counts_since_2_12(version: tuple[int, ...], is_empty: bool) -> None:
    """And over all rows before; with nothing that counts the loss is 0."""
    logits, target = normal(2, 3, 5), torch.tensor([[0, IGNORED, 4], [IGNORED, 2, 1]])
    target = torch.full_like(target, IGNORED) if is_empty else target
    count = 6 if version < (2, 12) else max(1, int((target >= 0).sum()))
    exact, exact_grad = exactly(logits, target, torch.full((2, 3), 3.0), 0.0)
    loss, grad = computed(version, logits.clone(), target, torch.tensor([3.0]), is_mean=True)
    assert loss.numel() == 1
    if is_empty:
        assert loss == 0 and not grad.any()
        return
    assert_near(loss.view(()), exact.sum() / count)
    assert_near(grad, exact_grad / count)


@pytest.mark.parametrize("version", VERSIONS)
def test_where_gradients_of_bf16_are_rounded(version: tuple[int, ...]) -> None:
    """2.18 keeps them in FP32; the others write them over the logits or over a copy."""
    logits, target = normal(2, 3, 9).bfloat16(), torch.arange(6).view(2, 3)
    given = logits.clone()
    _, exact = exactly(logits, target, torch.ones(2, 3), 0.0)
    exact = exact / 6 if version < (2, 5) else exact
    _, found = computed(version, given, target)
    is_wide = (2, 18) <= version < (2, 19)
    assert found.dtype == (torch.float32 if is_wide else torch.bfloat16)
    assert (found is given) == (version < (2, 18))
    assert torch.equal(given, logits) == (version >= (2, 18))
    assert (found - exact).abs().max() <= (2**-22 if is_wide else 2**-8)
    if version >= (2, 19):
        assert torch.equal(found, exact.bfloat16())  # one rounding


def test_the_input_may_be_overwritten_since_2_19() -> None:
    named, logits = cross_entropy.in_triton((2, 20)), normal(1, 2, 4)
    target = torch.tensor([[1, 2]])
    _, exact = exactly(logits, target, torch.ones(1, 2), 0.0)
    _, saved, stats, *rest = named["cross_entropy_forward"](
        logits, target, 0.0, False, None, IGNORED, True
    )
    assert saved is logits
    passed = (saved, stats, rest[0], None, torch.ones(1, 2), 0.0, False, 0, 1, IGNORED)
    assert named["cross_entropy_backward"](*passed) is logits
    assert_near(logits, exact)


@pytest.mark.parametrize("version", [(2, 12), (2, 20)])
def test_numbers_that_are_not_finite(version: tuple[int, ...]) -> None:
    """A word with -inf has no share; as a target its loss is infinite. NaN spoils its row alone."""
    logits, target = normal(1, 4, 5), torch.tensor([[1, 2, 0, 3]])
    logits[0, :2, 2], logits[0, 2, 4] = -torch.inf, torch.nan
    loss, grad = computed(version, logits.clone(), target)
    exact, exact_grad = exactly(logits[:, [0, 3]], target[:, [0, 3]], torch.ones(1, 2), 0.0)
    assert loss[0, 1] == torch.inf and loss[0, 2].isnan() and grad[0, 2].isnan().all()
    assert_near(loss[:, [0, 3]], exact)
    assert_near(grad[:, [0, 3]], exact_grad)
    assert grad[0, 0, 2] == 0


def test_rows_that_kernels_up_to_2_18_do_not_find() -> None:
    """They step by one distance from row to row; later ones know all distances."""
    whole, target = normal(3, 2, 5).transpose(0, 1), torch.tensor([[0, 1, 2], [3, 4, 0]])
    with pytest.raises(SizeError, match=r"strides \[5, 10, 1\]. Make them contiguous"):
        computed((2, 13), whole, target)
    exact, exact_grad = exactly(whole, target, torch.ones(2, 3), 0.0)
    for version in ((2, 14), (2, 20)):
        loss, grad = computed(version, whole.clone(memory_format=torch.preserve_format), target)
        assert_near(loss, exact)
        assert_near(grad, exact_grad)
    gaps = normal(2, 3, 8)[..., :5]
    exact, exact_grad = exactly(gaps, target, torch.ones(2, 3), 0.0)
    loss, grad = computed((2, 13), gaps, target)
    assert_near(loss, exact)
    assert_near(grad, exact_grad)


@pytest.mark.parametrize("version", [(2, 12), (2, 17), (2, 20)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_vocabulary_on_three_ranks(
    smoothing: float, version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the whole loss, and its own part of the gradient; one word is the largest by far.

    Up to 2.18 a rank smoothes with its own logits alone.
    """
    logits, target = normal(2, 3, 12), torch.tensor([[0, 5, 11], [IGNORED, 4, 8]])
    logits[0, 0, 6] = 60.0
    sent: dict[int, torch.Tensor] = {}

    def gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        sent[group.rank] = own
        for rank, part in enumerate(parts):
            part.copy_(sent.get(rank, own))

    monkeypatch.setattr(cross_entropy, "dist", SimpleNamespace(
        get_rank=lambda group: group.rank, get_world_size=lambda group: 3, all_gather=gather,
    ))  # fmt: skip
    exact, exact_grad = exactly(logits, target, torch.ones(2, 3), smoothing)
    for _ in range(2):  # in the second round all parts have been sent
        found = [
            computed(version, part.clone(), target, smoothing=smoothing,
                     group=SimpleNamespace(rank=rank))
            for rank, part in enumerate(logits.chunk(3, -1))
        ]  # fmt: skip
    for (loss, grad), wanted, own in zip(
        found, exact_grad.chunk(3, -1), logits.double().chunk(3, -1), strict=True
    ):
        whole = exact
        if smoothing and version < (2, 19):
            others = logits.double().sum(-1) - own.sum(-1)
            whole = (exact + smoothing / 12 * others).masked_fill(target == IGNORED, 0.0)
        assert_near(loss, whole)
        assert_near(grad, wanted)
