"""The chunked head and loss against `F.cross_entropy` in FP64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8_numerics.meta import planning_for
from megafp8.models import loss as loss_module
from megafp8.models.loss import HeadLoss
from megafp8.specs import model as model_spec
from megafp8.specs.data import IGNORE

TOKENS, WIDTH, VOCAB = 37, 24, 101
chunk_rows = pytest.mark.parametrize("rows", [1, 5, 36, 37, 1000])


def chunks_of(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(model_spec, "CHUNK_BYTES", rows * 4 * VOCAB)


def test_chunks_are_limited_in_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_spec, "CHUNK_TOKENS", 10)
    sizes = []

    def matmul(a: torch.Tensor, b: torch.Tensor, **kwargs: object) -> torch.Tensor:
        sizes.append(a.shape[0])
        return loss_module.plain_matmul(a, b, **kwargs)  # type: ignore[arg-type]

    hidden, weight, targets = inputs(0.0)
    with torch.no_grad():
        HeadLoss(matmul)(hidden, weight, targets)
    assert sizes == [10, 10, 10, 7]
    sizes.clear()
    with torch.no_grad(), planning_for("cuda"):
        on_gpu = (hidden.to("meta"), nn.Parameter(weight.to("meta")), targets.to("meta"))
        monkeypatch.setattr(model_spec, "CHUNK_TOKENS", 4)
        HeadLoss(matmul)(*on_gpu)
    assert sizes == [32, 5], "a GPU's chunks are larger"


def inputs(
    ignored: float, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, nn.Parameter, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator).to(dtype))
    targets = torch.randint(0, VOCAB, (1, TOKENS), generator=generator)
    targets[torch.rand(1, TOKENS, generator=generator) < ignored] = IGNORE
    return hidden, weight, targets


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and both gradients in FP64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = (hidden @ weight.t()).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (loss * factor).backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@chunk_rows
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    ignored: float,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """FP32 within 1e-6, BF16 (its logits are BF16) within 1 %, of each tensor's largest element;
    with nothing counted exactly zero."""
    chunks_of(monkeypatch, rows)
    hidden, weight, targets = inputs(ignored, dtype)
    loss = HeadLoss()(hidden, weight, targets)
    (loss * 0.3).backward()
    assert loss.dtype == torch.float32 and loss.dim() == 0
    expected = exact(hidden, weight, targets, 0.3)
    for ours, theirs in zip((loss.detach(), hidden.grad, weight.grad), expected, strict=True):
        assert ours is not None
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()
        assert ignored < 1 or not ours.any()


def test_fp16s_loss_scale_multiplies_the_gradients_alone() -> None:
    """By a power of two, so that nothing is rounded differently."""
    found = []
    for grad_scale in (1.0, 16.0):
        head, (hidden, weight, targets) = HeadLoss(), inputs(0.4)
        head.grad_scale = grad_scale
        loss = head(hidden, weight, targets)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        found.append((loss.detach(), hidden.grad / grad_scale, weight.grad / grad_scale))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_ignored_positions_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, 8)
    hidden, weight, targets = inputs(0.5)
    HeadLoss()(hidden, weight, targets).backward()
    assert hidden.grad is not None
    has_gradient = hidden.grad.abs().sum(-1) > 0
    assert torch.equal(has_gradient, targets != IGNORE)


@chunk_rows
def test_no_tensor_holds_the_logits_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Neither saved for backward, nor made in between: every product is looked at."""
    chunks_of(monkeypatch, rows)
    sizes: list[torch.Size] = []
    saved: list[torch.Size] = []

    def matmul(a: torch.Tensor, b: torch.Tensor, **kwargs: object) -> torch.Tensor:
        product = loss_module.plain_matmul(a, b, **kwargs)  # type: ignore[arg-type]
        sizes.append(product.shape)
        return product

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    hidden, weight, targets = inputs(0.2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        HeadLoss(matmul)(hidden, weight, targets)
    assert set(saved) == {(TOKENS, WIDTH), (VOCAB, WIDTH)}
    logits = [size for size in sizes if size[1] == VOCAB]
    assert max(size[0] for size in logits) == min(rows, TOKENS)
    assert sum(size[0] for size in logits) == TOKENS


def test_no_gradients_are_made_where_none_are_wanted() -> None:
    places = []

    def matmul(a: torch.Tensor, b: torch.Tensor, *, place: str, **kwargs: object) -> torch.Tensor:
        places.append(place)
        return loss_module.plain_matmul(a, b, place=place, **kwargs)  # type: ignore[arg-type]

    hidden, weight, targets = inputs(0.0)
    with torch.no_grad():
        loss = HeadLoss(matmul)(hidden, weight, targets)
    assert places == ["head"]
    assert loss.item() == pytest.approx(exact(hidden, weight, targets, 1.0)[0].item(), rel=1e-6)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(0.0)
    large = (hidden.detach() * 1e4).requires_grad_()
    loss = HeadLoss()(large, weight, targets)
    loss.backward()
    assert loss.isfinite() and large.grad is not None and large.grad.isfinite().all()


@pytest.mark.parametrize("rows", [10, 1000])
def test_gradient_of_the_weight_may_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Summed over chunks in FP32."""
    chunks_of(monkeypatch, rows)
    taken = []

    def take(weight: nn.Parameter, grad: torch.Tensor) -> None:
        taken.append(grad)

    hidden, weight, targets = inputs(0.0, torch.bfloat16)
    HeadLoss(add_grad_weight=take)(hidden, weight, targets).backward()
    assert weight.grad is None
    assert len(taken) == 1 and (rows > TOKENS or taken[0].dtype == torch.float32)
    expected = exact(hidden, weight, targets, 1.0)[2]
    assert (taken[0].double() - expected).abs().max() <= 1e-2 * expected.abs().max()
