"""Recomputation: the same gradients, bit for bit, with less kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8_numerics.gemm import GemmCounter
from megafp8.models.gpt import GPT
from megafp8.specs.model import RecomputeSpec
from tests.models.test_options import DROPOUT, LLAMA, batch, native
from tests.tiny import gpt_spec

LAYERS = 4
CHOICES = {
    "selective": RecomputeSpec(granularity="selective", method="uniform", num_layers=1),
    "selective block 1": RecomputeSpec(granularity="selective", method="block", num_layers=1),
    "full uniform 1": RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    "full uniform 3": RecomputeSpec(granularity="full", method="uniform", num_layers=3),
    "full block 2": RecomputeSpec(granularity="full", method="block", num_layers=2),
}


def model_of(choice: str | None, counter: GemmCounter, **changes: Any) -> GPT:
    recompute = None if choice is None else CHOICES[choice]
    return native(gpt_spec(num_layers=LAYERS, recompute=recompute, **changes), counter)


class Kept:
    """Bytes that autograd keeps for backward in a forward pass, parameters aside."""

    def __init__(self, model: GPT) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self.storages.values())


def outcome(model: GPT) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients, bytes kept; another microbatch is current when backward begins."""
    inputs, kept = batch(), Kept(model)
    model.parts.streams.begin_microbatch(3, 1)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        loss = model(inputs["tokens"], inputs["targets"])
    model.parts.streams.begin_microbatch(3, 2)
    loss.backward()
    assert model.parts.streams.position == (3, 2)
    gradients = [param.grad for param in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return loss.detach(), [g for g in gradients if g is not None], kept.num_bytes


@pytest.mark.parametrize("changes", [DROPOUT, LLAMA | DROPOUT], ids=["gpt", "llama"])
@pytest.mark.parametrize("choice", CHOICES)
def test_same_gradients_with_less_kept(choice: str, changes: dict[str, Any]) -> None:
    counters = GemmCounter(), GemmCounter()
    plain = outcome(model_of(None, counters[0], **changes))
    again = outcome(model_of(choice, counters[1], **changes))
    assert plain[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))
    assert again[2] < plain[2]


def flops(choice: str | None) -> dict[str, int]:
    counter = GemmCounter()
    outcome(model_of(choice, counter))
    return {place: n for (_, place), n in counter.flops.items()}


def test_how_much_is_computed_again() -> None:
    """Attention: forward is a third of forward and backward. Linears: of `output`, one more."""
    plain = flops(None)
    selective, block = flops("selective"), flops("selective block 1")
    assert selective["attention"] * 3 == plain["attention"] * 4
    assert block["attention"] * 12 == plain["attention"] * 13  # one of four layers
    assert selective["output"] == block["output"] == plain["output"]
    full, half = flops("full uniform 1"), flops("full block 2")
    assert full["attention"] == selective["attention"]
    # Recomputing a layer stops where nothing more is needed: its last product's output is not.
    assert plain["output"] < half["output"] < full["output"] <= 2 * plain["output"]
    assert full["grad_weight"] == plain["grad_weight"]


def test_evaluation_recomputes_nothing() -> None:
    counter = GemmCounter()
    model = model_of("full uniform 1", counter).eval()
    inputs = batch()
    model(inputs["tokens"], inputs["targets"]).backward()
    assert {place: n for (_, place), n in counter.flops.items()} == flops(None)
