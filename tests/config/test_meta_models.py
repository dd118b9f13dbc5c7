"""Test that each preset's model can be built on torch's meta device and has the published size."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megafp8.config.layers import conf_dir
from megafp8.config.overrides import preset_names
from megafp8.models.init import pieces_of
from megafp8.parallel.mesh import single_rank
from megafp8.specs.model import padded_vocab_size
from megafp8.train.build import build
from megafp8.train.state import TrainState
from tests.config.helpers import run_spec

GPT2_VOCABULARY = 50257
PUBLISHED: dict[str, tuple[int, float]] = {
    # Vocabulary, parameters. GPT-3: Brown et al. 2020, table 2.1, whose sizes are rounded; "13B"
    # is 12.85 B by its own layers and widths (40 of 5140, which has no 40 equal heads: 5120 here).
    "gpt3_125m": (GPT2_VOCABULARY, 125e6),
    "gpt3_1.3b": (GPT2_VOCABULARY, 1.3e9),
    "gpt3_2.7b": (GPT2_VOCABULARY, 2.7e9),
    "gpt3_6.7b": (GPT2_VOCABULARY, 6.7e9),
    "gpt3_13b": (GPT2_VOCABULARY, 13.0e9),
    "gpt3_175b": (GPT2_VOCABULARY, 175e9),
    "gpt3_5b": (GPT2_VOCABULARY, 5.0e9),  # NeMo's, named by its size
    "llama3_8b": (128256, 8.03e9),
    "llama3_70b": (128256, 70.6e9),
    "llama3.1_8b": (128256, 8.03e9),
    "qwen3_0.6b": (151936, 0.6e9),
    "qwen3_8b": (151936, 8.2e9),
    "mistral_7b": (32768, 7.25e9),
    "mixtral_8x7b": (32000, 46.70e9),
    "qwen3_30b_a3b": (151936, 30.53e9),
    "default": (4096, 4.3e6),  # ours
    "moe_tiny": (4096, 5.25e6),
}
MODELS, PRECISIONS = (preset_names(group, [conf_dir()]) for group in ("model", "precision"))


def on_meta(*overrides: str, vocab_size: int) -> TrainState:
    spec = run_spec(*overrides)
    vocab = padded_vocab_size(vocab_size, spec.vocab_divisible_by)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=vocab))
    mesh = single_rank()
    with torch.device("meta"):
        return build(spec, dataclasses.replace(mesh, device=torch.device("meta")))


def num_parameters(state: TrainState) -> int:
    return sum(math.prod(p.global_shape) for w in state.model.parameters() for p in pieces_of(w))


@pytest.mark.parametrize(
    "model",  # the one with 12,288 experts is built for a long time
    [pytest.param(m, marks=pytest.mark.slow) if m == "qwen3_30b_a3b" else m for m in MODELS],
)
def test_each_model_has_its_published_size(model: str) -> None:
    assert model in PUBLISHED, f"add the published size of conf/model/{model}.yaml here"
    vocab_size, published = PUBLISHED[model]
    state = on_meta(f"model={model}", vocab_size=vocab_size)
    assert all(p.is_meta for p in state.model.parameters())
    assert num_parameters(state) == pytest.approx(published, rel=0.02)
    assert len(state.model.layers) == state.model.spec.num_layers


# This process has no Transformer Engine; tests/train/test_transformer_engine.py trains its preset.
@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp8_lm_te"])
@pytest.mark.parametrize("model", ["default", "gpt3_1.3b"])
def test_each_precision_builds(precision: str, model: str) -> None:
    chosen = [f"precision={precision}", f"model={model}"]
    if precision.startswith("nemotron"):  # its layers in BF16 are more than the default job has
        chosen.append("model.num_layers=24")
    state = on_meta(*chosen, vocab_size=GPT2_VOCABULARY)
    expected = {
        "fp32": {torch.float32},
        "fp8_lm": {torch.float16, torch.bfloat16},  # weights of linears are FP16 masters
    }
    others = {torch.float16 if precision.startswith("fp16") else torch.bfloat16}
    if precision.endswith(("with_fp8_current_scaling_mixed", "with_fp8_delayed_scaling_mixed")):
        others.add(torch.float8_e4m3fn)  # Bridge keeps and gathers such weights in FP8
    dtypes = {p.dtype for p in state.model.parameters()}
    assert dtypes == expected.get(precision, others)
