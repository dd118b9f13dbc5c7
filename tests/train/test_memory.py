"""Bytes that a training step holds between forward and backward, counted from live tensors.

A sixth of the 125M shape (2 of 12 layers, a sixth of the vocabulary, full width) at 4,096 tokens a
microbatch: parameters, what autograd keeps, and FP8 copies of weights that the linears keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.data.loader import Microbatch
from megafp8.parallel.parts import linears_of
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import RecipeName
from tests.tiny import build_run, gpt_spec

BATCH, SEQ, LAYERS, WIDTH, VOCAB = 16, 256, 2, 768, 8384
SHAPE = gpt_spec(
    num_layers=LAYERS,
    hidden_size=WIDTH,
    ffn_hidden_size=4 * WIDTH,
    num_attention_heads=12,
    max_position_embeddings=SEQ,
    vocab_size=VOCAB,
)


class Held(NamedTuple):
    """Hold bytes by kind."""

    params: int
    weight_copies: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


def bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def held(fp8: Fp8Recipe | None) -> Held:
    state = build_run(compute="bf16", fp8=fp8, model=SHAPE)
    rng = np.random.default_rng(0)
    batch = Microbatch(*(rng.integers(0, VOCAB, (BATCH, SEQ)) for _ in range(2)))
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    state.scaling.begin_microbatch(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state.model.hidden(torch.from_numpy(batch.tokens_BS))
    params = {p.untyped_storage().data_ptr() for p in state.model.parameters()}
    copies = []
    for linear in linears_of(state.model):
        for operand in linear.weight_form.operands(linear.weight, torch.bfloat16, BATCH * SEQ):
            if isinstance(operand, Fp8Tensor):
                copies += [operand.payload] + ([] if operand.grid is None else [operand.grid])
    copies = [t for t in copies if t.untyped_storage().data_ptr() not in params]
    own = {t.untyped_storage().data_ptr() for t in copies} | params
    activations = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    return Held(bytes_of(iter(state.model.parameters())), bytes_of(iter(copies)),
                bytes_of(iter(activations)))  # fmt: skip


@pytest.fixture(scope="module")
def bf16() -> Held:
    return held(None)


def test_bf16_is_what_the_formula_says(bf16: Held) -> None:
    """The sum over layers, in units of tokens x width x 2 bytes, is the memory of activations.

    A layer keeps the inputs of two norms, of QKV, FC1 and FC2 (1 + 1 + 4), QKV (3), attention's
    output, which the projection reads (1), and GELU's input (4). The last norm keeps its input.
    """
    unit = BATCH * SEQ * WIDTH * 2
    floor = (LAYERS * (2 + 6 + 3 + 1 + 4) + 1) * unit
    assert floor <= bf16.activations <= 1.02 * floor  # the rest: log-sum-exps, means, positions


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_fp8_never_holds_more(name: RecipeName, bf16: Held) -> None:
    """FP8 halves the inputs of QKV, FC1 and FC2, but the projection's FP8 copy is additional.

    Attention's backward pass needs its output in BF16.
    """
    fp8 = held(Fp8Recipe(name=name))
    unit = BATCH * SEQ * WIDTH
    assert bf16.activations - fp8.activations == pytest.approx(LAYERS * (6 - 1) * unit, rel=0.01)
    assert fp8.total <= bf16.total


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_with_weights_in_fp8_alone(name: RecipeName, bf16: Held) -> None:
    fp8 = held(Fp8Recipe(name=name, params_in_fp8=True))
    assert fp8.weight_copies == 0
    assert fp8.total <= 0.85 * bf16.total


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_finer_scales_keep_one_fp8_copy_of_an_input(name: RecipeName, bf16: Held) -> None:
    fp8 = held(Fp8Recipe(name=name, backward_format="e4m3", power_2_scale=True))
    assert fp8.activations < bf16.activations
