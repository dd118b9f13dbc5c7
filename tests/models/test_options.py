"""Loss and gradients of every option against a plain FP64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.positions import alibi_slopes
from megafp8.models.random import RandomStreams
from megafp8.parallel.collectives import Axis
from megafp8.parallel.parts import NativeParts, PartsArgs
from megafp8.specs import GPTSpec
from tests.documents import borders_of
from tests.models.reference import loss_of
from tests.tiny import VOCAB, beside, gpt_spec, moe_spec

BATCH, SEQ = 2, 8
LLAMA: dict[str, Any] = dict(
    normalization="rmsnorm",
    activation="swiglu",
    position_embedding_type="rope",
    bias=False,
    share_embeddings_and_output_weights=False,
    num_query_groups=2,
)
SCALED: dict[str, Any] = dict(
    position_embedding_type="rope", kv_channels=16, scale_positional_embedding=True,
    original_max_position_embeddings=60, rope_scaling_factor=4.0,
)  # fmt: skip
"""Two pairs of a head's eight turn often, one in between, and the others seldom."""
YARN: dict[str, Any] = dict(
    position_embedding_type="rope", kv_channels=32, yarn_rotary_scaling_factor=4.0,
    yarn_beta_fast=8.0, original_max_position_embeddings=256,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(bias=False, activation="swiglu")
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rmsnorm": dict(normalization="rmsnorm"),
    "zero-centered layernorm": dict(layernorm_zero_centered_gamma=True),
    "zero-centered rmsnorm": dict(normalization="rmsnorm", layernorm_zero_centered_gamma=True),
    "openai_gelu": dict(activation="gelu-tanh"),
    "geglu": dict(activation="geglu"),
    "openai_gelu, geglu": dict(activation="geglu-tanh"),
    "swiglu": dict(activation="swiglu"),
    "reglu": dict(activation="reglu"),
    "squared-relu": dict(activation="squared-relu"),
    "rope": dict(position_embedding_type="rope"),
    "rope of half": dict(position_embedding_type="rope", rotary_percentage=0.5),
    "rope, other base": dict(position_embedding_type="rope", rotary_base=500.0),
    "rope, interpolated": dict(position_embedding_type="rope", seq_len_interpolation_factor=3.0),
    "rope, scaled": SCALED,
    "rope, scaled, of half": SCALED | dict(kv_channels=32, rotary_percentage=0.5),
    "rope, yarn": YARN,
    "rope, yarn of half": YARN | dict(rotary_percentage=0.5, yarn_attention_factor=0.7),
    "alibi": dict(position_embedding_type="alibi"),
    "no positions": dict(position_embedding_type="none"),
    "two groups": dict(num_query_groups=2),
    "one group": dict(num_query_groups=1),
    "wide heads": dict(kv_channels=16),
    "narrow heads, groups, alibi": dict(
        kv_channels=4, num_query_groups=2, position_embedding_type="alibi"
    ),
    "no biases": dict(bias=False),
    "untied": dict(share_embeddings_and_output_weights=False),
    "post_ln": dict(transformer_block_type="post_ln"),
    "post_ln rmsnorm": dict(transformer_block_type="post_ln", normalization="rmsnorm"),
    "layer scaling": dict(apply_query_key_layer_scaling=True),
    "fp32 residual": dict(fp32_residual_connection=True),
    "llama": LLAMA,
    "normalized queries and keys": dict(qk_layernorm=True),
    "the same, zero-centered": dict(qk_layernorm=True, layernorm_zero_centered_gamma=True),
    "qwen2": LLAMA | dict(add_qkv_bias=True),
    "a window": dict(window_size=(3, 0)),
    "a window of two tokens": dict(window_size=(1, 0)),
    "a window in layer 0": LLAMA | dict(window_size=(2, 0), window_attn_skip_freq=2),
    "a window in layer 1, alibi": dict(
        window_size=(2, 0), window_attn_skip_freq=(0, 1), position_embedding_type="alibi"
    ),
    "experts": EXPERTS | dict(moe=moe_spec()),
    "experts, weights of all, not gated": EXPERTS
    | dict(activation="gelu", moe=moe_spec(pre_softmax=True, layers=(True, True))),
    "experts, sigmoid, scaled, shared": EXPERTS
    | dict(moe=moe_spec(score_function="sigmoid", scaling_factor=2.5, shared_ffn_hidden_size=16)),
    "qwen3": LLAMA | dict(qk_layernorm=True, kv_channels=16),
}
DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.3, ffn_dropout=0.1)


def plain(spec: GPTSpec, dtype: torch.dtype) -> GPT:
    return randomized(GPT(Parts(spec, dtype, 7, RandomStreams(7))))


def native(spec: GPTSpec, counter: GemmCounter | None = None) -> GPT:
    parts = NativeParts(
        PartsArgs(
            spec=spec,
            dtype=torch.float32,
            seed=7,
            streams=RandomStreams(7),
            tp=Axis("tp"),
            sink=AutogradSink(),
            counter=counter or GemmCounter(),
        )
    )
    return randomized(GPT(parts))


def randomized(model: GPT) -> GPT:
    """Nothing is at its initial 0 or 1; equal in both dtypes."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            base = 1.0 if "norm.weight" in pieces_of(param)[0].name else 0.0
            param.copy_(base + 0.3 * torch.randn(param.shape, generator=generator))
    return model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(0, VOCAB, (2, BATCH, SEQ), generator=generator)
    targets[1, 2:4] = -100
    return {"tokens": tokens, "targets": targets}


def documents() -> dict[str, torch.Tensor]:
    """Two documents in the first sample, three in the second, each counted from 0."""
    ids = torch.tensor([[0] * 3 + [1] * 5, [0] * 1 + [1] * 4 + [2] * 3], dtype=torch.int32)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 0, 1, 2]])
    return {"positions": places, "documents": ids}


def borders(ids: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(borders_of(ids.numpy()))


def compare(model: GPT, bound: float, dropout: Any = None, **ids: torch.Tensor) -> None:
    """Loss, and the gradient of each logical tensor relative to its largest element."""
    inputs = batch()
    loss = model(
        inputs["tokens"],
        inputs["targets"],
        position_ids_BS=ids.get("positions"),
        cu_seqlens_N1=None if "documents" not in ids else borders(ids["documents"]),
    )
    loss.backward()
    pieces = {piece.name: (p, piece.local) for p in model.parameters() for piece in pieces_of(p)}
    weights = {n: p.detach()[at].double().requires_grad_() for n, (p, at) in pieces.items()}
    more = {} if dropout is None else {"dropout": dropout}
    expected = loss_of(model.spec, weights, **inputs, **ids, **more)
    expected.backward()
    assert abs(loss.item() / expected.item() - 1) <= bound
    for name, (param, local) in pieces.items():
        gradient = weights[name].grad
        assert gradient is not None and param.grad is not None
        if name == "embedding.position.weight":
            gradient, local = gradient[:SEQ], (slice(0, SEQ), local[1])
        elif not name.endswith(("key.bias", "key_norm.bias")):
            assert gradient.abs().max() > 1e-4, name
        # The softmax does not feel the keys' bias: its gradient is rounding without RoPE.
        queries = weights[beside(name)].grad
        assert queries is not None
        scale = max(gradient.abs().max().item(), queries.abs().max().item())
        difference = (param.grad[local].double() - gradient).abs().max() / scale
        assert difference <= bound, f"{name}: {difference:.3g}"


@pytest.mark.parametrize("option", OPTIONS)
def test_fp64(option: str) -> None:
    """RoPE's FP32 angles round differently in the two: 1e-6 instead of 1e-11."""
    spec = gpt_spec(**OPTIONS[option])
    compare(plain(spec, torch.float64), 1e-6 if "rope" in spec.position_embedding_type else 1e-11)


@pytest.mark.parametrize("option", OPTIONS)
def test_our_linears_in_fp32(option: str) -> None:
    compare(native(gpt_spec(**OPTIONS[option])), 2e-5)


@pytest.mark.parametrize("option", ["as it is", "rope", "alibi", "one group", "llama"])
def test_documents_see_only_themselves(option: str) -> None:
    spec = gpt_spec(**OPTIONS[option])
    compare(plain(spec, torch.float64), 1e-6, **documents())


def test_a_document_does_not_depend_on_its_neighbours() -> None:
    model, ids = plain(gpt_spec(**LLAMA), torch.float64), documents()
    tokens = batch()["tokens"]
    found = model.forward_layers(
        model.forward_embedding(tokens), position_ids_BS=ids["positions"],
        cu_seqlens_N1=borders(ids["documents"]),
    )  # fmt: skip
    alone = model.forward_layers(model.forward_embedding(tokens[:1, 3:]))
    torch.testing.assert_close(found[:1, 3:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", ["as it is", "llama", "post_ln", "alibi"])
def test_the_three_dropouts(option: str) -> None:
    """Where they stand, and that each has the mask of its site."""
    spec = gpt_spec(**(OPTIONS[option] | DROPOUT))
    model = plain(spec, torch.float64)
    sharded = ("attention.dropout", "fc2.dropout")

    def drawn(site: str, p: float, shape: tuple[int, ...]) -> torch.Tensor:
        with model.parts.streams.keyed(site, torch.device("cpu"), sharded=site.endswith(sharded)):
            return F.dropout(torch.ones(shape, dtype=torch.float64), p)

    bound = 1e-6 if spec.position_embedding_type == "rope" else 1e-11
    compare(model, bound, dropout=drawn)
    for name in DROPOUT:
        other = plain(gpt_spec(**(OPTIONS[option] | DROPOUT | {name: 0.0})), torch.float64)
        assert other(**{f"{k}_BS": v for k, v in batch().items()}) != model(
            **{f"{k}_BS": v for k, v in batch().items()}
        ), name


def test_residual_stream_is_fp32_where_asked() -> None:
    seen: dict[bool, list[torch.dtype]] = {}
    for asked in (False, True):
        model = plain(gpt_spec(fp32_residual_connection=asked), torch.bfloat16)
        x = model.forward_embedding(batch()["tokens"])
        layer = model.layers[0]
        seen[asked] = [x.dtype, layer(x).dtype, layer.attention_norm(x).dtype]
        model(batch()["tokens"], batch()["targets"]).backward()
    assert seen[False] == [torch.bfloat16] * 3
    assert seen[True] == [torch.float32, torch.float32, torch.bfloat16]


def test_layer_scaling_is_the_same_but_for_rounding() -> None:
    losses = []
    for asked in (False, True):
        model = native(gpt_spec(num_layers=3, apply_query_key_layer_scaling=asked))
        losses.append(model.hidden(batch()["tokens"]))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*losses)


def test_alibi_slopes() -> None:
    """Those of the paper, and its authors' rule for 12 heads."""
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    between = [2.0**-n for n in (0.5, 1.5, 2.5, 3.5)]
    assert alibi_slopes(12) == pytest.approx([2.0**-n for n in range(1, 9)] + between)


def test_scaled_init() -> None:
    """Projections into the residual stream have a smaller deviation by sqrt(2 L)."""
    for scaled in (True, False):
        spec = gpt_spec(hidden_size=128, ffn_hidden_size=256, activation="swiglu",
                        use_scaled_init_method=scaled, num_layers=8)  # fmt: skip
        layer = GPT(Parts(spec, torch.float32, 3, RandomStreams(3)), range(1)).layers[0]
        deviations = {
            piece.name.rpartition("layers.0.")[2]: param.detach()[piece.local].std().item()
            for param in layer.parameters()
            for piece in pieces_of(param)
            if param.dim() == 2
        }
        assert len(deviations) == 7
        for name, deviation in deviations.items():
            into = name.endswith(("projection.weight", "fc2.weight"))
            expected = 0.02 / 4 if scaled and into else 0.02
            assert deviation == pytest.approx(expected, rel=0.05), name


# --- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["tied", "untied"])
def test_stages_make_the_whole(changes: dict[str, Any]) -> None:
    spec = gpt_spec(num_layers=3, **changes)
    whole = GPT(Parts(spec, torch.float64, 7, RandomStreams(7)))
    parts = [Parts(spec, torch.float64, 7, RandomStreams(7)) for _ in range(3)]
    first = GPT(parts[0], range(1), has_head=False)
    middle = GPT(parts[1], range(1, 2), has_embedding=False, has_head=False)
    last = GPT(parts[2], range(2, 3), has_embedding=False)
    inputs = batch()
    x = first.forward_layers(first.forward_embedding(inputs["tokens"]))
    loss = last.forward_head(last.forward_layers(middle.forward_layers(x)), inputs["targets"])
    assert loss == whole(inputs["tokens"], inputs["targets"])
    names = [p.name for s in (first, middle, last) for q in s.parameters() for p in pieces_of(q)]
    expected = [p.name for q in whole.parameters() for p in pieces_of(q)]
    copies = ["embedding.word.weight"] if not changes else []
    assert sorted(names) == sorted(expected + copies)
    if copies:
        assert [p.replica for p in pieces_of(last.output_weight)] == [1]
        assert torch.equal(last.output_weight, first.embedding.word)
