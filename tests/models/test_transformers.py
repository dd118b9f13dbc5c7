"""Logits and gradients are those of transformers' models with the same weights."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint import huggingface_files as hf_files
from megafp8.errors import CheckpointError
from megafp8.models.attention import KVCache
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.specs import GPTSpec
from megafp8.specs.moe import MoESpec
from megafp8.specs.parameters import logical_shapes
from tests.tiny import VOCAB, gpt_spec

transformers = pytest.importorskip("transformers")

LLAMA: dict[str, Any] = dict(
    normalization="rmsnorm",
    activation="swiglu",
    position_embedding_type="rope",
    bias=False,
    share_embeddings_and_output_weights=False,
)
GPT2_CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 gelu_new": dict(activation="gelu-tanh"),
    "gpt2 untied squared-relu": dict(
        activation="squared-relu", share_embeddings_and_output_weights=False
    ),
}
LLAMA_CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama grouped": LLAMA | dict(num_query_groups=2, rotary_base=500000.0),
    "llama one group, wide heads": LLAMA | dict(num_query_groups=1, kv_channels=32),
    "llama tied biases": LLAMA | dict(bias=True, share_embeddings_and_output_weights=True),
    "llama geglu interpolated": LLAMA | dict(activation="geglu", seq_len_interpolation_factor=4.0),
    "llama geglu tanh": LLAMA | dict(activation="geglu-tanh"),
    "llama reglu": LLAMA | dict(activation="reglu"),
}
SCALED: dict[str, Any] = dict(
    scale_positional_embedding=True, rotary_base=500000.0, original_max_position_embeddings=8,
)  # fmt: skip
YARN: dict[str, Any] = dict(yarn_rotary_scaling_factor=4.0, original_max_position_embeddings=32)
GROUPED = LLAMA | dict(num_query_groups=2)
QWEN2 = GROUPED | dict(add_qkv_bias=True, layernorm_epsilon=1e-6)
QWEN3 = GROUPED | dict(qk_layernorm=True, kv_channels=16, layernorm_epsilon=1e-6)


def experts(width: int, top_k: int = 2, *layers: bool, **more: Any) -> dict[str, Any]:
    """Four experts in layers of a pattern, by default in all."""
    pattern = layers or (True, True, True)
    return dict(
        moe=MoESpec(num_experts=4, top_k=top_k, ffn_hidden_size=width, layers=pattern, **more)
    )


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.1": ("llama", GROUPED | SCALED),
    "llama 3.2": ("llama", GROUPED | SCALED | dict(share_embeddings_and_output_weights=True)),
    "qwen2": ("qwen2", QWEN2 | dict(rotary_base=1e6)),
    "qwen2 yarn, tied": ("qwen2", QWEN2 | YARN | dict(share_embeddings_and_output_weights=True)),
    "qwen3": ("qwen3", QWEN3 | dict(rotary_base=1e6)),
    "qwen3 yarn, tied": ("qwen3", QWEN3 | YARN | dict(share_embeddings_and_output_weights=True)),
    "mistral": ("mistral", GROUPED),
    "mistral, wide heads": ("mistral", GROUPED | dict(kv_channels=32)),
    "mistral with a window": ("mistral", GROUPED | dict(window_size=(4, 0))),
    "qwen2 with a window": ("qwen2", QWEN2 | dict(window_size=(9, 0))),
    "qwen3 with windows": ("qwen3", QWEN3 | dict(window_size=(3, 0), window_attn_skip_freq=2)),
    "mixtral": ("mixtral", GROUPED | experts(48)),
    "mixtral, tied, three of four": (
        "mixtral",
        GROUPED
        | experts(24, 3)
        | dict(window_size=(5, 0), share_embeddings_and_output_weights=True),
    ),
    "qwen3_moe": ("qwen3_moe", QWEN3 | experts(24) | dict(rotary_base=1e6)),
    "qwen3_moe, not renormalized, a dense layer": (
        "qwen3_moe",
        QWEN3 | experts(40, 2, True, False, True, pre_softmax=True),
    ),
    "qwen3_moe, one of four, tied": (
        "qwen3_moe",
        QWEN3
        | experts(24, 1, False, True, True, pre_softmax=True)
        | dict(window_size=(3, 0), share_embeddings_and_output_weights=True),
    ),
}
CASES = GPT2_CASES | LLAMA_CASES | {name: changes for name, (_, changes) in FAMILIES.items()}
EXPERTS = [case for case in CASES if "moe" in CASES[case]]
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}


def spec_of(case: str, num_layers: int, **more: Any) -> GPTSpec:
    spec = gpt_spec(num_layers=num_layers, num_attention_heads=4, **CASES[case], **more)
    moe = spec.moe and dataclasses.replace(spec.moe, layers=spec.moe.layers[:num_layers])
    return dataclasses.replace(spec, moe=moe)


def randomized(spec: GPTSpec, dtype: torch.dtype) -> GPT:
    """Nothing is at its initial 0 or 1."""
    model = GPT(Parts(spec, dtype, 7, RandomStreams(7))).train()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            base = 1.0 if "norm.weight" in pieces_of(param)[0].name else 0.0
            param.copy_(base + 0.2 * noise)
    return model


def logical(model: GPT, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The model's logical tensors, or their gradients."""
    found = {}
    for param in model.parameters():
        tensor = param.grad if gradients else param.detach()
        assert tensor is not None
        found |= {piece.name: tensor[piece.local] for piece in pieces_of(param)}
    return found


def family_of(case: str) -> str | None:
    return FAMILIES[case][0] if case in FAMILIES else None


def counterpart(model: GPT, dtype: torch.dtype, family: str | None = None) -> Any:
    """transformers' model with the same weights."""
    config = hf.to_config(model.spec, dtype, None, family)
    kind = transformers.AutoConfig.for_model(**config)
    if model.spec.moe is not None:
        kind._experts_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="sdpa")
    theirs = theirs.to(dtype).train()
    own = logical(model)
    entries = hf.mapping(model.spec, fused=True)
    state = {entry.theirs: hf.to_theirs(entry, own.__getitem__) for entry in entries}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    tied = model.spec.share_embeddings_and_output_weights
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    theirs.tie_weights()
    return theirs


def rms_norm_in_its_dtype(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """transformers' casts FP64 down to FP32, which alone makes differences of 1e-7."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def routes_in_its_dtype(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """transformers' casts FP64 down to FP32 here too."""
    logits = F.linear(hidden_states, self.weight)
    weights, experts = logits.softmax(-1).topk(self.top_k)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomized(spec_of(case, 3), dtype)
    theirs = counterpart(model, dtype, family_of(case))
    exact = {"RMSNorm": rms_norm_in_its_dtype, "TopKRouter": routes_in_its_dtype}
    for kind, name in itertools.product({type(m) for m in theirs.modules()}, exact):
        if dtype == torch.float64 and kind.__name__.endswith(name):
            monkeypatch.setattr(kind, "forward", exact[name])
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (3, 16), generator=generator)
    targets = torch.randint(0, VOCAB, (3, 16), generator=generator)
    targets[0, :5] = -100
    expected = theirs(tokens).logits
    hidden = model.hidden(tokens)
    assert_close(hidden @ model.output_weight.t(), expected, dtype, "logits")
    assert_close(model.logits(tokens).to(dtype), expected, torch.float32, "FP32 logits")
    model(tokens, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours, seen = logical(model, gradients=True), 0
    named = dict(theirs.named_parameters())
    for entry in hf.mapping(model.spec, fused=True):
        gradient = named[entry.theirs].grad
        assert gradient is not None and gradient.abs().max() > 0, entry.theirs
        assert_close(hf.to_theirs(entry, ours.__getitem__), gradient, dtype, entry.theirs)
        seen += len(entry.ours)
    assert seen == len(ours), "every tensor of ours has been compared"


@pytest.mark.parametrize("case", FAMILIES)
def test_a_greedy_continuation(case: str) -> None:
    """With a cache on both sides, token by token after a prompt of seven."""
    model = randomized(spec_of(case, 3, max_position_embeddings=64), torch.float32).eval()
    theirs = counterpart(model, torch.float32, family_of(case)).eval()
    prompt = torch.arange(7)[None] * 11 % VOCAB
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    found, cache, new = prompt, KVCache(), prompt
    with torch.no_grad():
        for _ in range(24):
            new = model.logits(new, cache)[:, -1:].argmax(-1)
            found = torch.cat((found, new), 1)
    assert torch.equal(found, expected)
    assert len(set(found[0, 7:].tolist())) > 1, "the weights say something"


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    assert difference <= BOUND[dtype], f"{name}: {difference:.3g}"


def test_a_full_disk_ends_an_export_with_a_hint(tmp_path: Path) -> None:
    """No part of the model stays behind, so that the same command works when there is space."""
    case = next(iter(CASES.values()))
    spec = gpt_spec(num_layers=2, num_attention_heads=4, **case)
    own = logical(randomized(spec, torch.float32))

    def write() -> None:
        hf_files.write_folder(
            tmp_path / "m", spec, own.__getitem__, dtype=torch.float32, eod_id=3,
            max_file_bytes=10_000,
        )  # fmt: skip

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"part-.*cannot be written.*disk"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list((tmp_path / "m").iterdir()) == []
    write()
    assert (tmp_path / "m" / "config.json").is_file()


@pytest.mark.parametrize("case", CASES)
def test_a_folder_round_trips(case: str, tmp_path: Path) -> None:
    """Ours, to files that transformers loads, and back: the same bits and the same shape."""
    spec = spec_of(case, 2)
    model = randomized(spec, torch.float32)
    own = logical(model)
    hf_files.write_folder(
        tmp_path / "m",
        spec,
        own.__getitem__,
        dtype=torch.float32,
        eod_id=3,
        family=family_of(case),
        max_file_bytes=10_000,  # several files
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokens = torch.arange(12).view(2, 6)
    assert_close(model.logits(tokens), loaded.eval()(tokens).logits, torch.float32, "logits")
    back = hf.from_config(hf_files.read_config(tmp_path / "m"), tmp_path / "m")
    assert shape_of(back) == shape_of(spec)
    tensors = {t.name: t.read() for t in hf_files.read_tensors(tmp_path / "m", back)}
    assert tensors.keys() == own.keys()
    assert {name: logical_shapes(spec)[name] for name in own} == {
        name: tuple(tensor.shape) for name, tensor in own.items()
    }
    assert all(torch.equal(tensors[name], own[name]) for name in own)
    # and what transformers itself writes
    loaded.save_pretrained(tmp_path / "theirs")
    back = hf.from_config(hf_files.read_config(tmp_path / "theirs"), tmp_path / "theirs")
    tensors = {t.name: t.read() for t in hf_files.read_tensors(tmp_path / "theirs", back)}
    assert shape_of(back) == shape_of(spec)
    assert all(torch.equal(tensors[name], own[name]) for name in own)


def test_a_model_without_its_head_is_read(tmp_path: Path) -> None:
    """A `GPT2Model` writes its weights without the first word of a `GPT2LMHeadModel`'s names."""
    spec = gpt_spec(num_layers=2)
    own = logical(randomized(spec, torch.float32))
    hf_files.write_folder(tmp_path / "m", spec, own.__getitem__, dtype=torch.float32, eod_id=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    model.base_model.save_pretrained(tmp_path / "base")
    names = safetensors.torch.load_file(tmp_path / "base" / hf_files.WEIGHTS).keys()
    assert not any(name.startswith("transformer.") for name in names)
    tensors = {t.name: t.read() for t in hf_files.read_tensors(tmp_path / "base", spec)}
    assert tensors.keys() == own.keys()
    assert all(torch.equal(tensors[name], own[name]) for name in own)


def shape_of(spec: GPTSpec) -> GPTSpec:
    """Without what transformers' configurations do not have."""
    return dataclasses.replace(
        spec,
        ffn_hidden_size=0 if spec.moe and all(spec.moe.layers) else spec.ffn_hidden_size,
        kv_channels=spec.head_size,
        num_query_groups=spec.num_kv_heads,
        init_method_std=0.0,
        use_scaled_init_method=False,
        max_position_embeddings=0,
        ffn_dropout=0.0,
        hidden_dropout=0.0,
        window_attn_skip_freq=tuple(  # a number or a list may say the same
            int(spec.window_of(layer) is not None) for layer in range(spec.num_layers)
        ),
    )
