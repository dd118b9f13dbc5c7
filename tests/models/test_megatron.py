"""Logits and gradients are those of Megatron-core's GPT, run on the CPU, with the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megafp8.specs import GPTSpec
from tests.models.test_transformers import assert_close, logical, randomized
from tests.tiny import SEQ, VOCAB, gpt_spec

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron, about what is not installed

LLAMA: dict[str, Any] = dict(
    normalization="rmsnorm",
    activation="swiglu",
    position_embedding_type="rope",
    bias=False,
    share_embeddings_and_output_weights=False,
    num_query_groups=2,
)
CASES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "geglu, biases, half rope interpolated": LLAMA
    | dict(
        activation="geglu",
        bias=True,
        rotary_percentage=0.5,
        seq_len_interpolation_factor=2.0,
        kv_channels=16,
    ),
    "squared-relu, no positions": dict(activation="squared-relu", position_embedding_type="none"),
    "layer scaling": dict(apply_query_key_layer_scaling=True),
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[SimpleNamespace]:
    """Its modules, with one rank of gloo; where it asks for the current GPU it gets the CPU."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        no_fork = SimpleNamespace(
            fork=nullcontext
        )  # of a GPU's generator, for dropout: there is none
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: no_fork)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield SimpleNamespace(
            GPTModel=GPTModel, layer_spec=get_gpt_layer_local_spec, Config=TransformerConfig
        )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def counterpart(megatron: SimpleNamespace, spec: GPTSpec) -> Any:
    """Megatron's model of the same shape."""
    functions = {
        "gelu": F.gelu,
        "geglu": F.gelu,
        "swiglu": F.silu,
        "squared-relu": lambda x: F.relu(x) ** 2,
    }
    norm = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[spec.normalization]
    config = megatron.Config(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=norm,
        layernorm_epsilon=spec.layernorm_epsilon,
        gated_linear_unit=spec.is_gated,
        activation_func=functions[spec.activation],
        add_bias_linear=spec.bias,
        apply_query_key_layer_scaling=spec.apply_query_key_layer_scaling,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return megatron.GPTModel(
        config,
        megatron.layer_spec(normalization=norm),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_position_embeddings,
        position_embedding_type=spec.position_embedding_type,
        rotary_percent=spec.rotary_percentage,
        rotary_base=spec.rotary_base,
        seq_len_interpolation_factor=spec.seq_len_interpolation_factor,
        share_embeddings_and_output_weights=spec.share_embeddings_and_output_weights,
    )


def theirs_of(spec: GPTSpec, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's tensors of our logical ones. Its QKV has each group's queries, key and value."""
    found = {"embedding.word_embeddings.weight": ours["embedding.word.weight"]}
    if spec.position_embedding_type == "learned_absolute":
        found["embedding.position_embeddings.weight"] = ours["embedding.position.weight"]
    kinds = ["weight", "bias"] if spec.bias else ["weight"]
    norm_kinds = ["weight", "bias"] if spec.normalization == "layernorm" else ["weight"]
    for i in range(spec.num_layers):
        mine, other = f"layers.{i}", f"decoder.layers.{i}"
        for kind in kinds:
            q, k, v = (
                ours[f"{mine}.attention.{part}.{kind}"].unflatten(0, (spec.num_kv_heads, -1))
                for part in ("query", "key", "value")
            )
            found[f"{other}.self_attention.linear_qkv.{kind}"] = torch.cat((q, k, v), 1).flatten(
                0, 1
            )
            name = f"{mine}.attention.projection.{kind}"
            found[f"{other}.self_attention.linear_proj.{kind}"] = ours[name]
            inner = ["gate", "up"] if spec.is_gated else ["fc1"]
            rows = [ours[f"{mine}.mlp.{part}.{kind}"] for part in inner]
            found[f"{other}.mlp.linear_fc1.{kind}"] = torch.cat(rows)
            found[f"{other}.mlp.linear_fc2.{kind}"] = ours[f"{mine}.mlp.fc2.{kind}"]
        for kind in norm_kinds:
            found[f"{other}.input_layernorm.{kind}"] = ours[f"{mine}.attention_norm.{kind}"]
            found[f"{other}.pre_mlp_layernorm.{kind}"] = ours[f"{mine}.mlp_norm.{kind}"]
    for kind in norm_kinds:
        found[f"decoder.final_layernorm.{kind}"] = ours[f"final_norm.{kind}"]
    if not spec.share_embeddings_and_output_weights:
        found["output_layer.weight"] = ours["head.weight"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case: str, megatron: SimpleNamespace) -> None:
    """FP32; 1e-5 of each tensor's largest element."""
    spec = gpt_spec(num_layers=3, **CASES[case])
    model, theirs = randomized(spec, torch.float32), counterpart(megatron, spec)
    named = dict(theirs.named_parameters())
    expected_names = theirs_of(spec, logical(model))
    assert named.keys() == expected_names.keys()
    with torch.no_grad():
        for name, tensor in expected_names.items():
            named[name].copy_(tensor)
    tokens, targets = torch.randint(
        0, VOCAB, (2, 2, SEQ), generator=torch.Generator().manual_seed(5)
    )
    positions = torch.arange(SEQ).expand(2, SEQ)
    masked = torch.ones(1, 1, SEQ, SEQ).triu(1).bool()
    expected = theirs(tokens, positions, masked)
    assert_close(model.logits(tokens), expected, torch.float32, "logits")
    model(tokens, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours = theirs_of(spec, logical(model, gradients=True))
    for name, param in named.items():
        assert param.grad is not None and param.grad.abs().max() > 0
        assert_close(ours[name], param.grad, torch.float32, name)
