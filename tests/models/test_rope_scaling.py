"""Frequencies and factors of scaled rotary positions are those of transformers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.models.positions import frequencies, rotary, yarn_attention_factor
from tests.config.helpers import load_problems, run_spec, the_problem
from tests.tiny import gpt_spec

transformers = pytest.importorskip("transformers")

ROPE = "model.position_embedding_type=rope"
# Our settings, and transformers' parameters. The first ones are published: Llama 3.1, Llama 3.2's
# small models, Qwen 2.5 and Qwen 3 with the factor that their cards name.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama 3.1": (
        dict(rotary_base=500000.0, kv_channels=128, scale_positional_embedding=True),
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192),
    ),
    "llama 3.2": (
        dict(rotary_base=500000.0, kv_channels=64, scale_positional_embedding=True,
             rope_scaling_factor=32.0),
        dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192),
    ),
    "qwen": (
        dict(rotary_base=1e6, kv_channels=128, yarn_rotary_scaling_factor=4.0,
             original_max_position_embeddings=32768),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    ),
    "a factor of its own": (
        dict(rotary_base=10000.0, kv_channels=64, yarn_rotary_scaling_factor=40.0,
             yarn_attention_factor=1.25, yarn_beta_fast=16.0, yarn_beta_slow=2.0,
             original_max_position_embeddings=4096),
        dict(rope_type="yarn", factor=40.0, attention_factor=1.25, beta_fast=16.0, beta_slow=2.0,
             original_max_position_embeddings=4096),
    ),
    "a ramp without width": (
        dict(rotary_base=10000.0, kv_channels=32, yarn_rotary_scaling_factor=4.0,
             original_max_position_embeddings=4),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_factor(case: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    changes, theirs = CASES[case]
    spec = gpt_spec(position_embedding_type="rope", **changes)
    config = transformers.LlamaConfig(
        hidden_size=4 * spec.head_size, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters=theirs | {"rope_theta": spec.rotary_base},
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    found = frequencies(spec, torch.device("cpu"))
    assert torch.equal(found, expected)
    assert yarn_attention_factor(spec) == factor
    plain = frequencies(gpt_spec(
        position_embedding_type="rope", kv_channels=spec.head_size, rotary_base=spec.rotary_base
    ), torch.device("cpu"))  # fmt: skip
    assert not torch.equal(found, plain)
    turn = rotary(torch.tensor([0, 1, 100000]), spec)
    assert torch.equal(turn.cos[0], torch.full_like(turn.cos[0], factor))


def test_nemo_and_megatron_ask_for_it_under_their_names() -> None:
    for name in ("model.scale_positional_embedding=True", "model.use_rope_scaling=True"):
        assert run_spec(ROPE, name).model.scale_positional_embedding
    assert the_problem("model.scale_positional_embedding=True").key.endswith("embedding")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["model.scale_positional_embedding=True", "model.yarn_rotary_scaling_factor=4"],
         "model.yarn_rotary_scaling_factor"),
        (["model.seq_len_interpolation_factor=2", "model.scale_positional_embedding=True"],
         "model.scale_positional_embedding"),
        (["model.seq_len_interpolation_factor=2", "model.yarn_rotary_scaling_factor=4"],
         "model.yarn_rotary_scaling_factor"),
        (["model.scale_positional_embedding=True", "model.rope_high_freq_factor=1"],
         "model.rope_high_freq_factor"),
        (["model.yarn_rotary_scaling_factor=4", "model.yarn_beta_fast=0.5"],
         "model.yarn_beta_fast"),
        (["model.yarn_beta_slow=2"], "model.yarn_beta_slow"),
        (["model.rope_scaling_factor=4"], "model.rope_scaling_factor"),
        (["model.original_max_position_embeddings=64"], "model.original_max_position_embeddings"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(given: list[str], key: str) -> None:
    assert key in [problem.key for problem in load_problems(ROPE, *given)]
