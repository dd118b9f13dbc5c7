"""Initial weights: named once, the same at every tensor-parallel size, of the right spread."""

from __future__ import annotations

import math

import pytest
import torch

from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.random import RandomStreams
from megafp8.parallel.collectives import Axis
from megafp8.parallel.parts import NativeParts, PartsArgs
from tests.tiny import gpt_spec


def model(
    tp: int, rank: int, dtype: torch.dtype = torch.float32, seed: int = 7, **sizes: object
) -> GPT:
    return GPT(
        NativeParts(
            PartsArgs(
                spec=gpt_spec(**sizes),
                dtype=dtype,
                seed=seed,
                streams=RandomStreams(seed, rank),
                tp=Axis("tp", tp, rank),
                sink=AutogradSink(),
                counter=GemmCounter(),
            )
        )
    )


def logical(models: list[GPT]) -> dict[str, torch.Tensor]:
    """Logical tensors put together from all ranks' pieces; NaN where no rank holds anything."""
    whole: dict[str, torch.Tensor] = {}
    for one in models:
        for param in one.parameters():
            for piece in pieces_of(param):
                target = whole.setdefault(piece.name, torch.full(piece.global_shape, math.nan))
                here = param.detach()[piece.local]
                extent = tuple(
                    slice(start, start + size)
                    for start, size in zip(piece.offset, here.shape, strict=True)
                )
                held = target[extent]
                assert held.isnan().all() or torch.equal(held, here), f"{piece.name}: overlap"
                target[extent] = here
    return whole


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_together_hold_the_one_process_model(tp: int) -> None:
    alone = logical([model(1, 0)])
    together = logical([model(tp, rank) for rank in range(tp)])
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        assert torch.equal(together[name], tensor), name


@pytest.mark.parametrize("tp", [1, 2])
def test_logical_names_are_unique_and_cover_every_parameter(tp: int) -> None:
    for rank in range(tp):
        params = list(model(tp, rank).parameters())
        pieces = [piece for param in params for piece in pieces_of(param)]
        names = [piece.name for piece in pieces]
        assert len(set(names)) == len(names)
        assert {"layers.0.attention.query.weight", "layers.1.mlp.fc2.bias"} <= set(names)
        for param in params:
            covered = torch.zeros_like(param)
            for piece in pieces_of(param):
                covered[piece.local] += 1
            assert (covered == 1).all()


def test_each_rank_holds_its_share() -> None:
    whole, half = model(1, 0), model(2, 1)
    for name, param in half.named_parameters():
        size = dict(whole.named_parameters())[name].numel()
        sharded = (".qkv.", "projection.weight", ".fc1.", "fc2.weight", "embedding.word")
        cut = any(part in name for part in sharded)
        assert param.numel() * (2 if cut else 1) == size, name


def test_spread_of_the_initial_weights() -> None:
    """0.02, and 0.02 / sqrt(2 * layers) where a branch is added; 2 % at these sizes."""
    sizes = dict(hidden_size=128, ffn_hidden_size=512, num_layers=8, vocab_size=512)
    tensors = logical([model(1, 0, **sizes)])
    scaled = 0.02 / math.sqrt(2 * 8)
    expected = {
        "layers.3.attention.query.weight": 0.02,
        "layers.3.mlp.fc1.weight": 0.02,
        "embedding.word.weight": 0.02,
        "layers.3.attention.projection.weight": scaled,
        "layers.3.mlp.fc2.weight": scaled,
    }
    for name, std in expected.items():
        assert tensors[name].std().item() == pytest.approx(std, rel=0.02), name
        assert abs(tensors[name].mean().item()) < std / 20
    unscaled = logical([model(1, 0, use_scaled_init_method=False, **sizes)])
    assert unscaled["layers.3.mlp.fc2.weight"].std().item() == pytest.approx(0.02, rel=0.02)


def test_norms_start_as_identity_and_biases_at_zero() -> None:
    for name, tensor in logical([model(1, 0)]).items():
        if name.endswith(".bias"):
            assert not tensor.any(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name


def test_tensors_and_seeds_differ() -> None:
    tensors = logical([model(1, 0)])
    query, key = (tensors[f"layers.0.attention.{part}.weight"] for part in ("query", "key"))
    assert not torch.equal(query, key)
    assert not torch.equal(query, tensors["layers.1.attention.query.weight"])
    other = logical([model(1, 0, seed=8)])
    assert not torch.equal(query, other["layers.0.attention.query.weight"])


def test_bf16_weights_are_rounded_and_their_masters_are_not() -> None:
    exact = dict(model(1, 0).named_parameters())
    for name, param in model(1, 0, torch.bfloat16).named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, exact[name].bfloat16())
        assert torch.equal(param.initial_master, exact[name])  # type: ignore[attr-defined]


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    model(1, 0)
    assert torch.equal(torch.get_rng_state(), before)
