"""The GPT with our linears, FP8 off, is the plain PyTorch GPT."""

from __future__ import annotations

import pytest
import torch

from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.models.gpt import GPT
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.parallel.collectives import Axis
from megafp8.parallel.parts import NativeParts, PartsArgs, linears_of
from tests.tiny import SEQ, VOCAB, gpt_spec, microbatch

DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)


def plain(dtype: torch.dtype = torch.float32, **changes: object) -> GPT:
    return GPT(Parts(gpt_spec(**changes), dtype, 7, RandomStreams(7)))


def native(
    dtype: torch.dtype = torch.float32, counter: GemmCounter | None = None, **changes: object
) -> GPT:
    parts = NativeParts(
        PartsArgs(
            spec=gpt_spec(**changes),
            dtype=dtype,
            seed=7,
            streams=RandomStreams(7),
            tp=Axis("tp"),
            sink=AutogradSink(),
            counter=counter or GemmCounter(),
        )
    )
    return GPT(parts)


def tokens_and_targets(seed: int = 0, ignored: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    batch = microbatch(seed, batch=3, ignored=ignored)
    return torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.targets_BS)


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["no dropout", "dropout"])
def test_loss_and_gradients_equal_plain_pytorch(dropout: dict[str, float]) -> None:
    """FP32; 1e-6 relative to each gradient's largest element."""
    ours, theirs = native(**dropout), plain(**dropout)
    tokens, targets = tokens_and_targets(ignored=0.2)
    losses = [model(tokens, targets) for model in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    expected = dict(theirs.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, param in ours.named_parameters():
        assert torch.equal(param, expected[name]), f"{name}: initial values"
        assert param.grad is not None and expected[name].grad is not None
        difference = (param.grad - expected[name].grad).abs().max()
        assert difference <= 1e-6 * expected[name].grad.abs().max(), name
        assert expected[name].grad.abs().max() > 0, f"{name} gets a gradient"


def test_evaluation_has_no_dropout() -> None:
    tokens, targets = tokens_and_targets()
    model = native(**DROPOUT)
    assert model(tokens, targets) != native()(tokens, targets)
    assert model.eval()(tokens, targets) == native()(tokens, targets)


def test_tied_head_gets_gradients_from_both_ends() -> None:
    """A word that is no token and no target has a gradient through the head, and one that is a
    token has one through the embedding too: central differences in FP64 agree."""
    model = plain(torch.float64)
    tokens, targets = tokens_and_targets()
    model(tokens, targets).backward()
    word = model.embedding.word
    used, unused = int(tokens[0, 0]), next(i for i in range(VOCAB) if i not in tokens)
    for row in (used, unused):
        step = 1e-4
        with torch.no_grad():
            losses = []
            for sign in (1, -1):
                word[row, 3] += sign * step
                losses.append(model(tokens, targets).double().item())
                word[row, 3] -= sign * step
        numeric = (losses[0] - losses[1]) / (2 * step)
        assert word.grad is not None
        assert word.grad[row, 3].item() == pytest.approx(numeric, rel=0.02, abs=0.02)


@pytest.mark.parametrize("position", [0, 5, SEQ - 1])
def test_a_later_token_leaves_earlier_logits_unchanged(position: int) -> None:
    model = native().eval()
    tokens, _ = tokens_and_targets()
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 11) % VOCAB
    with torch.no_grad():
        before, after = model.logits(tokens), model.logits(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=1e-6)
    differs = (before - after).abs().amax(dim=-1)[:, position:]
    assert (differs > 1e-4).all(), "the changed position and all later ones do see it"


def test_positions_are_distinguished() -> None:
    """The same token everywhere: without positions every logit row would be the same."""
    model = native().eval()
    logits = model.logits(torch.full((1, SEQ), 5))
    assert (logits[0, 1:] - logits[0, :-1]).abs().amax(dim=-1).min() > 1e-3


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    tokens, targets = tokens_and_targets()
    loss = native()(tokens, targets).item() / targets.numel()
    assert loss == pytest.approx(torch.tensor(VOCAB).log().item(), abs=0.05)


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = native()
    tokens, targets = tokens_and_targets(ignored=0.3)
    logits = model.logits(tokens).flatten(0, 1).double()
    expected = torch.nn.functional.cross_entropy(
        logits, targets.flatten(), ignore_index=-100, reduction="sum"
    )
    assert model(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-6)


def test_every_product_is_counted() -> None:
    """Forward and backward: QKV, projection, FC1, FC2 three times, head three times, attention's
    two products forward and four backward over the causal half."""
    counter = GemmCounter()
    model = native(counter=counter)
    tokens, targets = tokens_and_targets()
    model(tokens, targets).backward()
    spec, rows = model.spec, tokens.numel()
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    weights = spec.num_layers * (4 * hidden * hidden + 2 * hidden * ffn)
    by_place: dict[str, int] = {}
    for (precision, place), flops in counter.flops.items():
        assert precision == "fp32"
        by_place[place] = by_place.get(place, 0) + flops
    for place in ("output", "grad_input", "grad_weight"):
        assert by_place.pop(place) == 2 * rows * weights
    for place in ("head", "head grad_input", "head grad_weight"):
        assert by_place.pop(place) == 2 * rows * hidden * VOCAB
    square = spec.num_layers * tokens.shape[0] * SEQ * SEQ * hidden
    assert by_place == {"attention": 3 * 2 * square}


def test_linears_are_named_after_layer_and_place() -> None:
    names = [linear.name for linear in linears_of(native())]
    layer = ["attention.qkv", "attention.projection", "mlp.fc1", "mlp.fc2"]
    assert names == [f"layers.{i}.{place}" for i in range(2) for place in layer]
