"""Logits and gradients are those of Megatron-core's GPT, run on the CPU, with the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import join
from megafp8.specs import GPTSpec, ParallelSpec
from tests.models.test_moe import gradients_of, layer_of
from tests.models.test_transformers import assert_close, logical, randomized
from tests.ranks import Rank, run_ranks
from tests.tiny import SEQ, VOCAB, gpt_spec, moe_spec

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
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        on_the_cpu(patch)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield SimpleNamespace(
            GPTModel=GPTModel, layer_spec=get_gpt_layer_local_spec, Config=TransformerConfig
        )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let it run without a GPU and its streams, and without Transformer Engine."""
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    no_fork = SimpleNamespace(fork=nullcontext)  # of a GPU's generator, for dropout: there is none
    patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: no_fork)
    for name in ("Stream", "current_stream"):
        patch.setattr(torch.cuda, name, Mock())
    patch.setattr(torch.cuda, "stream", nullcontext)
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    patch.setattr(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        lambda x, as_numpy=False, **_: x.numpy() if as_numpy and torch.is_tensor(x) else x,
    )


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


EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax after, both losses": (
        dict(router_loss="aux_loss", router_loss_coeff=0.01, z_loss_coeff=0.001),
        dict(
            moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001,
            moe_router_load_balancing_type="aux_loss",
        ),
    ),
    "softmax before, of sequences, scaled": (
        dict(
            pre_softmax=True, router_loss="seq_aux_loss", router_loss_coeff=0.1,
            scaling_factor=1.5,
        ),
        dict(
            moe_router_pre_softmax=True, moe_router_topk_scaling_factor=1.5,
            moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="seq_aux_loss",
        ),
    ),
    "sigmoid, bias, shared": (
        dict(
            score_function="sigmoid", scaling_factor=2.5, has_expert_bias=True,
            router_loss="seq_aux_loss", router_loss_coeff=0.1, shared_ffn_hidden_size=16,
        ),
        dict(
            moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5,
            moe_router_enable_expert_bias=True, moe_aux_loss_coeff=0.1,
            moe_router_load_balancing_type="seq_aux_loss", moe_shared_expert_intermediate_size=16,
        ),
    ),
}  # fmt: skip
"""Settings of ours and of Megatron's that mean the same."""


@pytest.mark.parametrize("case", EXPERTS)
def test_a_layer_of_experts(case: str, megatron: SimpleNamespace) -> None:
    """Outputs, all gradients with those of the losses, counts and the move of the bias, in FP32."""
    compare_layers(case, Axis("ep"))


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS)
def test_a_layer_of_divided_experts(case: str) -> None:
    """The same on two ranks, of which each has half of the experts, and other tokens."""
    run_ranks(on_rank, 2, {"case": case})


def on_rank(rank: Rank, case: str) -> None:
    mesh = join(ParallelSpec(devices_per_node=rank.size, ep=rank.size))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_the_cpu(patch)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(1, expert_model_parallel_size=rank.size)
        compare_layers(case, mesh.ep)


def compare_layers(case: str, ep: Axis) -> None:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import (
        MoEAuxLossAutoScaler,
        get_updated_expert_bias,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    changes, settings = EXPERTS[case]
    config = TransformerConfig(
        num_layers=1, hidden_size=32, ffn_hidden_size=64, moe_ffn_hidden_size=32,
        num_attention_heads=4, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, use_cpu_initialization=True, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, num_moe_experts=4, moe_router_topk=2,
        moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ep.size, **settings,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    theirs: Any = MoELayer(config, spec.submodules)
    theirs.set_layer_number(1)
    ours, tensors = layer_of(moe_spec(layers=(True,), **changes), torch.float32, ep)
    for name, tensor in tensors.items():
        draw = torch.Generator().manual_seed(crc32(name.encode()))
        tensor.normal_(0, 0.3, generator=draw)
    pairs = {"router.weight": theirs.router.weight}
    own = zip(ours.own, theirs.experts.local_experts, strict=True)
    both = {f"experts.{e}": x for e, x in own}
    if ours.shared is not None:
        both["shared"] = theirs.shared_experts
    with torch.no_grad():
        theirs.router.weight.copy_(tensors["router.weight"])
        for name, module in both.items():
            gate, up = (tensors[f"{name}.{part}.weight"] for part in ("gate", "up"))
            module.linear_fc1.weight.copy_(torch.cat((gate, up)))
            module.linear_fc2.weight.copy_(tensors[f"{name}.fc2.weight"])
    if ours.router.bias is not None:
        bias = torch.tensor([0.3, -0.2, 0.0, 0.1])
        ours.router.bias.copy_(bias)
        theirs.router.expert_bias.copy_(bias)
    x, factors = torch.randn(2, 2, 8, 32, generator=torch.Generator().manual_seed(6 + ep.rank))
    one, other = x.clone().requires_grad_(), x.transpose(0, 1).contiguous().requires_grad_()
    ours.router.added.begin_microbatch(torch.ones(2, 8, dtype=torch.bool))
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(16.0))  # a mean counts as 16 tokens, as ours
    mine, (out, _) = ours(one), theirs(other)
    torch.testing.assert_close(mine, out.transpose(0, 1), rtol=1e-5, atol=1e-6)
    (factors * mine).sum().backward()
    (factors.transpose(0, 1) * out).sum().backward()
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(one.grad, other.grad.transpose(0, 1), rtol=1e-5, atol=1e-5)
    grads = gradients_of(ours)
    expected = {name: param.grad for name, param in pairs.items()}
    for name, module in both.items():
        expected[f"{name}.gate.weight"], expected[f"{name}.up.weight"] = (
            module.linear_fc1.weight.grad.chunk(2)
        )
        expected[f"{name}.fc2.weight"] = module.linear_fc2.weight.grad
    assert expected.keys() == grads.keys()
    for name, grad in expected.items():
        assert (grads[name] - grad).abs().max() <= 1e-6 * grad.abs().max(), name
    if ours.router.bias is not None:
        counts = theirs.router.local_tokens_per_expert
        assert ours.router.counts.tolist() == counts.tolist()
        ep.all_reduce_sum(ours.router.counts)  # as a step does
        ours.router.move_bias()
        moved = get_updated_expert_bias(counts, theirs.router.expert_bias, 1e-3)
        assert torch.equal(ours.router.bias, moved)
